"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request

from quire._documents import compose_chat
from quire.engine import Result, Sample, Usage
from quire.serve import generation as common
from quire.serve._streams import Delta
from quire.serve.calls import Call, answer_beside, read_body
from quire.serve.documents import read_documents
from quire.serve.fields import Fields
from quire.serve.generation import Generation
from quire.serve.grammars import Wanted, read_inner_format
from quire.serve.problems import Problem
from quire.serve.responses import JsonAnswer, View, answer, event
from quire.serve.service import Service, blend_of, guesses_of, origin_of
from quire.serve.tool_parser import Call as ToolCall
from quire.serve.tool_parser import Part, ToolParser, call_id, special_texts
from quire.serve.tools import Tools, read_tools

__all__ = ["count_tokens", "handle"]

_BLOCKS_MAX = 4096


async def handle(request: Request, service: Service) -> Any:
    generation, headers = await read_body(request, service, _read)
    view = _MessageView(service, Call.of(request), generation)
    return await answer(request, service, generation, view, headers)


async def count_tokens(request: Request, service: Service) -> Any:
    """The number of tokens that the prompt of a message has."""
    return await answer_beside(request, service, _read_counted)


def _read_counted(fields: Fields, service: Service) -> Callable[[dict[str, str]], JsonAnswer]:
    service.facts.check_name(fields)
    messages = _read_messages(fields, service)
    documents = read_documents(fields, messages, service.limits).get("documents", ())
    texts = () if documents == "auto" else documents
    fields.ignore("cache_control", "thinking")  # which change nothing of the prompt
    config = fields.object("output_config")
    wanted = read_inner_format(fields, "output_config", config)
    if config is not None:
        config.ignore("effort")
        fields.leave(config)
    tools = _read_tools(fields, service, wanted)
    variables = {} if tools is None else {"tools": tools.entries}
    tokenizer = service.engine.tokenizer

    def make(headers: dict[str, str]) -> JsonAnswer:
        ids = compose_chat(tokenizer, messages, texts, variables).ids
        return JsonAnswer({"input_tokens": len(ids)}, headers=headers)

    return make


def _read(fields: Fields, service: Service) -> Generation:
    service.facts.check_name(fields)
    max_tokens = common.read_max_tokens(fields, "max_tokens")
    if max_tokens is None:
        fields.refuse("max_tokens", "an integer of at least 0")
    wanted = _read_config(fields)
    tools = _read_tools(fields, service, wanted)
    options = common.read_sampling(fields, service.limits, service.facts)
    fields.only("kv_transfer_params")
    options |= {"max_tokens": max_tokens, "logprobs": None}
    if options.get("n", 1) != 1:
        fields.refuse("n", "1 in this API")
    stop = common.read_stop(fields, service.limits, "stop_sequences")
    if stop is not None:
        options["stop"] = stop
    if tools is not None:
        options["template_args"] = {"tools": tools.entries}
    fields.ignore("cache_control")
    fields.only("mcp_servers", [])
    fields.only("container")
    fields.only("speed", "standard")
    messages = _read_messages(fields, service)
    options |= read_documents(fields, messages, service.limits)
    if messages[-1]["role"] == "assistant":
        place = f"messages[{len(fields.any('messages')) - 1}].role"
        message = (
            f"{place} is assistant in the last message; to go on from an answer that is begun is "
            "not supported"
        )
        raise Problem(400, message, param=place, code="unsupported_value")
    return Generation(
        [messages],
        options,
        common.read_salt(fields),
        fields.boolean("stream"),
        tool_parser=None if tools is None else service.tool_parser,
        reads_samples=stop is not None,  # which of them ended the answer
    ).hold(wanted if tools is None else tools.answer)


def _read_config(fields: Fields) -> Wanted | None:
    """What the answer must look like."""
    thinking = fields.object("thinking")
    if thinking is not None:
        thinking.only("type", "disabled")
        fields.leave(thinking)
    config = fields.object("output_config")
    wanted = read_inner_format(fields, "output_config", config)
    if config is not None:
        config.only("effort")
        fields.leave(config)
    return wanted


# ---- Prompts


def _read_messages(fields: Fields, service: Service) -> list[dict[str, Any]]:
    entries = fields.objects("messages", service.limits.messages)
    if not entries:
        fields.refuse("messages", f"a list of 1 to {service.limits.messages} messages")
    system = common.text_of_content(fields, "system")
    messages = [] if system is None else [{"role": "system", "content": system}]
    for entry in entries:
        role = entry.choice("role", ("user", "assistant", "system"), "")
        if not role:
            entry.refuse("role", "user, assistant or system")
        messages += _of_entry(entry, role)
        fields.leave(entry)
    return messages


def _of_entry(entry: Fields, role: str) -> list[dict[str, Any]]:
    """The messages that one entry stands for: results of tools are messages of their own."""
    if not isinstance(entry.any("content"), list):
        text = entry.text("content")
        if text is None:
            entry.refuse("content", "a text or a list of blocks")
        return [{"role": role, "content": text}]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for block in entry.objects("content", _BLOCKS_MAX) or []:
        kind = block.any("type")
        if kind in ("thinking", "redacted_thinking"):  # of earlier answers; no template's
            continue
        if kind == "text":
            parts.append({"type": "text", "text": common.text_of_part(block)})
        elif kind == "document":
            parts.append(common.document_part(block))
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind == "tool_result":
            found.append(_tool_result(block))
        else:
            raise common.unsupported_content(block)
        entry.leave(block)
    if parts or calls or not found:
        message: dict[str, Any] = {"role": role, "content": common.joined_parts(parts)}
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def _tool_use(block: Fields) -> dict[str, Any]:
    name = block.text("name", 256)
    arguments = block.any("input")
    if not name or not isinstance(arguments, dict):
        block.refuse("input", "an object, beside a name")
    function = {"name": name, "arguments": arguments}
    block.ignore("caller", *common.CACHE_MARKS)
    return {"id": block.text("id", 256) or "", "type": "function", "function": function}


def _tool_result(block: Fields) -> dict[str, Any]:
    content = common.content_of(block, "content")
    block.ignore("is_error", *common.CACHE_MARKS)  # the content tells of the error
    id = block.text("tool_use_id", 256) or ""
    return {"role": "tool", "tool_call_id": id, "content": content or ""}


def _read_tools(fields: Fields, service: Service, format: Wanted | None) -> Tools | None:
    """The tools in OpenAI's form, which templates know."""
    tools = []
    for entry in fields.objects("tools", service.limits.tools) or []:
        entry.only("type", "custom")
        schema = entry.object("input_schema")
        parameters = {} if schema is None else entry.any("input_schema")
        names = ("name", "description", "strict")
        function = {name: entry.any(name) for name in names}
        tools.append({"type": "function", "function": {**function, "parameters": parameters}})
        entry.ignore("eager_input_streaming", *common.CACHE_MARKS)
        fields.leave(entry)
    choice = fields.object("tool_choice")
    found: dict[str, Any] = {"tools": tools or None}
    if choice is not None:
        kind = choice.choice("type", ("auto", "any", "tool", "none"), "auto")
        found["tool_choice"] = {"any": "required"}.get(kind, kind)
        if kind == "tool":
            found["tool_choice"] = {"type": "function", "name": choice.text("name", 256)}
        found["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")
        fields.leave(choice)
    inner = Fields(found, aliases={"function": "", "parameters": "input_schema"})
    return read_tools(inner, service.limits, service.tool_parser, service.template, format)


# ---- Answers


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's form, in which tokens of the cache are not among the input's; and more, in a
    field that its clients do not know."""
    return {
        **_input_usage(usage.prompt_tokens, usage.cached_tokens),
        "output_tokens": usage.completion_tokens,
        "quire": {**origin_of(usage), **guesses_of(usage), **blend_of(usage)},
    }


def _input_usage(prompt_tokens: int, cached_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
    }


@dataclasses.dataclass
class _MessageView(View):
    """Blocks: a text, and one for each call. At most one is open at a time."""

    service: Service
    call: Call
    generation: Generation

    def __post_init__(self) -> None:
        kind = self.generation.tool_parser
        self._tools = None if kind is None else ToolParser(kind)
        self._open: str | None = None  # the type of the open block
        self._index = -1

    def _message(self, **fields: Any) -> dict[str, Any]:
        return {
            "id": f"msg_{self.call.id}",
            "type": "message",
            "role": "assistant",
            "model": self.service.facts.names[0],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **fields,
        }

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def first(self, prompt_tokens: int, cached_tokens: int) -> Iterable[bytes]:
        """Not before the tokens of the cache are known, which the usage does not count."""
        usage = {**_input_usage(prompt_tokens, cached_tokens), "output_tokens": 0}
        yield _event("message_start", message=self._message(usage=usage))

    def step(self, deltas: list[Delta]) -> Iterable[bytes]:
        text = "".join(delta.text for delta in deltas)
        return list(self._take(text, ended=deltas[-1].finish_reason is not None))

    def _parts(self, text: str, ended: bool) -> Iterable[Part]:
        return (text,) if self._tools is None else self._tools.parts(text, ended=ended)

    def _take(self, text: str, ended: bool) -> Iterable[bytes]:
        for part in self._parts(text, ended):
            yield from self._text(part) if isinstance(part, str) else self._call(part)

    def _text(self, text: str) -> Iterable[bytes]:
        if not text:
            return
        if self._open != "text":
            yield from self._start({"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": text}
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _call(self, call: ToolCall) -> Iterable[bytes]:
        if call.name is not None:
            yield from self._start(self._tool_block(call))
        if call.arguments:
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield _event("content_block_delta", index=self._index, delta=delta)

    def _tool_block(self, call: ToolCall) -> dict[str, Any]:
        id = call_id(self.generation.tool_parser, "toolu_", f"{self.call.id}_{call.index}")
        return {"type": "tool_use", "id": id, "name": call.name, "input": {}}

    def _start(self, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._stop()
        self._open = block["type"]
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> Iterable[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def end(self, result: Result) -> Iterable[bytes]:
        yield from self._stop()
        delta = self._ending(result.samples[0])
        yield _event("message_delta", delta=delta, usage=_usage(result.usage))
        yield _event("message_stop")

    def _ending(self, sample: Sample) -> dict[str, Any]:
        reason, sequence = "max_tokens", None
        if sample.finish_reason == "stop":
            reason, sequence = "end_turn", self._stop_sequence(sample)
            if sequence is not None:
                reason = "stop_sequence"
            elif self._tools is not None and self._tools.calls:
                reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _stop_sequence(self, sample: Sample) -> str | None:
        """The stop text that ended the answer: it stands where the text was cut."""
        if sample.ids and sample.ids[-1] in self.service.engine.info.eos_token_ids:
            return None
        rest = self._decoded(sample.ids)[len(sample.text or "") :]
        stops = [stop for stop in self.generation.options.get("stop", ()) if rest.startswith(stop)]
        return max(stops, key=len, default=None)

    def _decoded(self, ids: list[int]) -> str:
        """The text of an answer that was not cut: of special tokens it has the tags of calls."""
        tokenizer = self.service.engine.tokenizer
        kind = self.generation.tool_parser
        tags = () if kind is None else special_texts(kind)
        special = tokenizer.special_tokens
        shown = [id for id in ids if id not in special or special[id] in tags]
        return tokenizer.decode(shown, skip_special_tokens=not tags)

    def failed(self, problem: Problem) -> bytes:
        return event(problem.anthropic(), "error")

    def whole(self, result: Result) -> dict[str, Any]:
        sample = result.samples[0]
        content: list[dict[str, Any]] = []
        for part in self._parts(sample.text or "", ended=True):
            if isinstance(part, ToolCall):
                if part.name is not None:
                    content.append({**self._tool_block(part), "input": ""})
                content[-1]["input"] += part.arguments
            elif content and content[-1]["type"] == "text":
                content[-1]["text"] += part
            elif part:
                content.append({"type": "text", "text": part})
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        usage = _usage(result.usage)
        content = content or [{"type": "text", "text": ""}]
        return self._message(content=content, usage=usage, **self._ending(sample))


def _object(text: str) -> Any:
    """Arguments as a value; an empty object for those that the answer's length has cut."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
