"""OpenAI's `/v1/responses`: a chat whose earlier turns the server may keep."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from quire.engine import Result, Usage
from quire.serve import generation as common
from quire.serve._streams import Delta
from quire.serve.bounded_json import parse_object
from quire.serve.calls import Call, read_body
from quire.serve.documents import check_documents, read_documents
from quire.serve.fields import Fields
from quire.serve.generation import Generation
from quire.serve.grammars import Wanted, read_inner_format
from quire.serve.kept_responses import Messages, new_response_id
from quire.serve.problems import Problem
from quire.serve.responses import View, answer, event
from quire.serve.service import Service, blend_of, guesses_of, origin_of
from quire.serve.tool_parser import Call as ToolCall
from quire.serve.tool_parser import ToolParser, call_id
from quire.serve.tools import Tools, read_tools

__all__ = ["handle"]

# Fields that a response repeats are there as objects, and in the two events that begin a stream.
_ECHO_COPIES = 4


async def handle(request: Request, service: Service) -> Any:
    asked, headers = await read_body(request, service, _read)
    asked.call = Call.of(request)
    if asked.previous is not None:
        asked.follow(service.kept.get(asked.call.tenant.name, asked.previous))
    return await answer(request, service, asked.generation, _ResponseView(asked), headers)


@dataclasses.dataclass
class _Asked:
    """system: the instructions, which are of one response alone. messages: the others. echo: fields
    that the response repeats. previous: the response that it follows."""

    service: Service
    generation: Generation
    system: Messages
    messages: Messages
    store: bool
    echo: dict[str, Any]
    previous: str | None = None
    call: Call = dataclasses.field(init=False)  # once the body was read

    def follow(self, earlier: Messages) -> None:
        """These messages came before."""
        self.messages = [*earlier, *self.messages]
        check_documents(self.generation.options, self.messages, self.service.limits)
        self.generation.prompts = [[*self.system, *self.messages]]


def _read(fields: Fields, service: Service) -> _Asked:
    service.facts.check_name(fields)
    previous = fields.text("previous_response_id", 256)
    messages = _read_input(fields, service)
    instructions = fields.text("instructions")
    wanted = _read_text(fields)
    tools = _read_tools(fields, service, wanted)
    options = common.read_sampling(fields, service.limits, service.facts)
    fields.only("kv_transfer_params")
    if options.get("n", 1) != 1:
        fields.refuse("n", "1 in this API")
    max_tokens = common.read_max_tokens(fields, "max_output_tokens")
    options["logprobs"] = None
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if tools is not None:
        options["template_args"] = {"tools": tools.entries}
    _refuse_what_is_not_there(fields)
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    options |= read_documents(fields, messages, service.limits, follows=previous is not None)
    echo = {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "metadata": _read_metadata(fields),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "previous_response_id": previous,
        "temperature": options.get("temperature"),
        "text": {"format": {"type": "text"}, **(fields.any("text") or {})},
        "tool_choice": fields.any("tool_choice") or "auto",
        "tools": fields.any("tools") or [],
        "top_p": options.get("top_p"),
    }
    generation = Generation(
        [[*system, *messages]],
        options,
        common.read_salt(fields),
        fields.boolean("stream"),
        tool_parser=None if tools is None else service.tool_parser,
        reads_samples=True,  # the last event repeats the text
        prompt_field="input",
        held_bytes=_ECHO_COPIES * len(json.dumps(echo)),
    ).hold(wanted if tools is None else tools.answer)
    store = fields.boolean("store", True)
    return _Asked(service, generation, system, messages, store, echo, previous)


def _read_metadata(fields: Fields) -> dict[str, str]:
    """What every event of the response repeats."""
    found = fields.any("metadata")
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > 16 or not all(map(_is_entry, found.items())):
        must = "an object of at most 16 texts of at most 512 characters, with names of at most 64"
        fields.refuse("metadata", must)
    return dict(found)


def _is_entry(entry: tuple[str, Any]) -> bool:
    name, value = entry
    return len(name) <= 64 and isinstance(value, str) and len(value) <= 512


def _read_text(fields: Fields) -> Wanted | None:
    """What the answer must look like."""
    text = fields.object("text")
    wanted = read_inner_format(fields, "text", text)
    if text is not None:
        text.only("verbosity", "medium")
        fields.leave(text)
    return wanted


def _refuse_what_is_not_there(fields: Fields) -> None:
    options = fields.object("stream_options")
    if options is not None:
        options.ignore("include_obfuscation")
        fields.leave(options)
    fields.only("truncation", "disabled")
    fields.only("background", False)
    fields.only("include", [], ["reasoning.encrypted_content"])  # no answer has any
    fields.only("conversation")
    fields.only("prompt")
    fields.only("reasoning")
    fields.only("max_tool_calls")
    fields.only("top_logprobs", 0)


def _read_input(fields: Fields, service: Service) -> Messages:
    value = fields.any("input")
    if isinstance(value, str) and value:
        common.check_text(value, "input")
        return [{"role": "user", "content": value}]
    entries = fields.objects("input", service.limits.messages) if isinstance(value, list) else None
    if not entries:
        fields.refuse("input", f"a text, or a list of 1 to {service.limits.messages} items")
    messages = [message for entry in entries for message in _of_item(entry)]
    for entry in entries:
        fields.leave(entry)
    return messages


def _of_item(entry: Fields) -> Messages:
    kind = entry.choice(
        "type", ("message", "function_call", "function_call_output", "reasoning"), "message"
    )
    entry.ignore("id", "status")  # of an answer, of which the item was a part
    if kind == "reasoning":  # no template has a place for it
        entry.ignore("summary", "content", "encrypted_content")
        return []
    if kind == "function_call_output":
        output = common.content_of(entry, "output") or ""
        call_id = entry.text("call_id", 256) or ""
        return [{"role": "tool", "tool_call_id": call_id, "content": output}]
    if kind == "function_call":
        name, arguments = entry.text("name", 256), entry.text("arguments")
        entry.ignore("caller")
        try:
            value = parse_object((arguments or "{}").encode())
        except Problem:
            entry.refuse("arguments", "a JSON object as a text")
        call = {"id": entry.text("call_id", 256) or "", "type": "function"}
        function = {"name": name or "", "arguments": value}
        calls = [{**call, "function": function}]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]
    role = entry.choice("role", ("user", "assistant", "system", "developer"), "")
    content = common.content_of(entry, "content")
    entry.ignore("phase")
    if not role or content is None:
        entry.refuse("role", "user, assistant, system or developer, beside a content")
    return [{"role": "system" if role == "developer" else role, "content": content}]


def _read_tools(fields: Fields, service: Service, format: Wanted | None) -> Tools | None:
    """The tools, whose functions this API does not nest, in the form that templates know."""
    tools = []
    for entry in fields.objects("tools", service.limits.tools) or []:
        entry.only("type", "function")
        names = ("name", "description", "parameters", "strict")
        tools.append({"type": "function", "function": {name: entry.any(name) for name in names}})
        entry.ignore(*common.CACHE_MARKS)
        fields.leave(entry)
    choice, parallel = fields.any("tool_choice"), fields.any("parallel_tool_calls")
    found = {"tools": tools or None, "tool_choice": choice, "parallel_tool_calls": parallel}
    inner = Fields(found, aliases={"function": ""})
    read = read_tools(inner, service.limits, service.tool_parser, service.template, format)
    fields.leave(inner)
    return read


class _ResponseView(View):
    """Items: a message, and one for each call. At most one is open at a time."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._id = new_response_id()
        self._created = int(time.time())
        kind = asked.generation.tool_parser
        self._tools = None if kind is None else ToolParser(kind)
        self._items: list[dict[str, Any]] = []
        self._open = False  # the last item has not ended
        self._number = -1  # of the last event

    # ---- Events

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": self._number, **fields}, name)

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def first(self, prompt_tokens: int, cached_tokens: int) -> Iterable[bytes]:
        return ()

    def step(self, deltas: list[Delta]) -> Iterable[bytes]:
        text = "".join(delta.text for delta in deltas)
        ended = deltas[-1].finish_reason is not None
        return list(self._take(text, ended))

    def _take(self, text: str, ended: bool) -> Iterable[bytes]:
        if self._tools is None:
            yield from self._add_text(text)
            return
        for part in self._tools.parts(text, ended=ended):
            yield from self._add_text(part) if isinstance(part, str) else self._add_call(part)

    def _add_text(self, text: str) -> Iterable[bytes]:
        if not text:
            return
        if not self._open or self._items[-1]["type"] != "message":
            yield from self._begin_message()
        self._items[-1]["content"][0]["text"] += text
        yield self._event("output_text.delta", **self._part, delta=text, logprobs=[])

    def _add_call(self, call: ToolCall) -> Iterable[bytes]:
        if call.name is not None:
            yield from self._begin_call(call)
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
            kind = "function_call_arguments.delta"
            yield self._event(kind, **place, delta=call.arguments)

    @property
    def _part(self) -> dict[str, Any]:
        """The place of the last item's text."""
        index = len(self._items) - 1
        return {"item_id": self._items[-1]["id"], "output_index": index, "content_index": 0}

    def _begin_message(self) -> Iterable[bytes]:
        yield from self._end_item()
        id = f"msg_{self._asked.call.id}_{len(self._items)}"
        item = {"id": id, "type": "message", "status": "in_progress", "role": "assistant"}
        yield self._add({**item, "content": []})
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self._event("content_part.added", **self._part, part=part)
        self._items[-1]["content"].append(part)

    def _begin_call(self, call: ToolCall) -> Iterable[bytes]:
        yield from self._end_item()
        id = f"{self._asked.call.id}_{call.index}"
        item = {"id": f"fc_{id}", "type": "function_call", "status": "in_progress"}
        called = call_id(self._asked.generation.tool_parser, "call_", id)
        yield self._add({**item, "call_id": called, "name": call.name, "arguments": ""})

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._open = True
        return self._event("output_item.added", output_index=len(self._items) - 1, item=item)

    def _end_item(self, status: str = "completed") -> Iterable[bytes]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self._event("output_text.done", **self._part, text=part["text"], logprobs=[])
            yield self._event("content_part.done", **self._part, part=part)
        else:
            place = {"item_id": item["id"], "output_index": len(self._items) - 1}
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **place, **fields)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def end(self, result: Result) -> Iterable[bytes]:
        yield from self._end_item(_status(result))
        response = self._ended(result)
        yield self._event(response["status"], response=response)

    def failed(self, problem: Problem) -> bytes:
        error = {"code": problem.code or problem.type, "message": problem.message}
        return self._event("failed", response=self._response("failed", error=error))

    # ---- Responses

    def whole(self, result: Result) -> dict[str, Any]:
        for _ in self._take(result.samples[0].text or "", ended=True):
            pass  # events are for streams; the items are what is left of them
        for _ in self._end_item(_status(result)):
            pass
        return self._ended(result)

    def _ended(self, result: Result) -> dict[str, Any]:
        self._keep()
        if _status(result) == "incomplete":
            details = {"reason": "max_output_tokens"}
            usage = _usage(result.usage)
            return self._response("incomplete", incomplete_details=details, usage=usage)
        return self._response("completed", usage=_usage(result.usage))

    def _keep(self) -> None:
        asked = self._asked
        if asked.store:
            said = [message for item in self._items for message in _said(item)]
            asked.service.kept.put(asked.call.tenant.name, self._id, [*asked.messages, *said])

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._asked.service.facts.names[0],
            "output": self._items,
            "store": self._asked.store,
            "truncation": "disabled",
            "usage": None,
            **self._asked.echo,
            **fields,
        }


def _status(result: Result) -> str:
    """What the answer is, and the item that is open at its end."""
    return "incomplete" if result.samples[0].finish_reason == "length" else "completed"


def _said(item: dict[str, Any]) -> Messages:
    """The messages of an item of an answer. A call that the answer's length has cut is none."""
    try:
        return _of_item(Fields(item))
    except Problem:
        return []


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        **blend_of(usage),
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, **origin_of(usage)},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0, **guesses_of(usage)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
