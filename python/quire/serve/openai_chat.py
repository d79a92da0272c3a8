"""`/v1/chat/completions`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from quire.engine import Result, Sample
from quire.serve import generation as common
from quire.serve.calls import Call, read_body
from quire.serve.documents import read_documents
from quire.serve.fields import Fields
from quire.serve.generation import Generation
from quire.serve.grammars import read_wanted
from quire.serve.prefill_pairs import read_handover
from quire.serve.problems import Problem
from quire.serve.responses import View, answer, event
from quire.serve.service import Service, usage_of
from quire.serve.tokens import TokenTexts
from quire.serve.tool_parser import Call as ToolCall
from quire.serve.tool_parser import ToolParser, call_id
from quire.serve.tools import read_tools
from quire.serve._streams import Delta

__all__ = ["DONE", "ChatView", "handle"]

DONE = b"data: [DONE]\n\n"


async def handle(request: Request, service: Service) -> Any:
    generation, headers = await read_body(request, service, _read)
    view = ChatView(service, Call.of(request), generation)
    return await answer(request, service, generation, view, headers)


def _read(fields: Fields, service: Service) -> Generation:
    """The request of a body. Problem for what is wrong with it."""
    service.facts.check_name(fields)
    stream, include_usage = common.read_stream(fields)
    logprobs = _read_logprobs(fields, service)
    options: dict[str, Any] = {
        **common.read_sampling(fields, service.limits, service.facts),
        "max_tokens": common.read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        "stop": common.read_stop(fields, service.limits),
        "template_args": common.read_template_args(fields) or None,
    }
    messages = common.read_messages(fields, service.limits)
    options |= read_documents(fields, messages, service.limits)
    _refuse_what_is_not_there(fields)
    wanted = read_wanted(fields)
    tools = read_tools(fields, service.limits, service.tool_parser, service.template, wanted)
    if tools is not None:
        options["template_args"] = {**(options["template_args"] or {}), "tools": tools.entries}
    return Generation(
        [messages],
        {name: value for name, value in options.items() if value is not None}
        | {"logprobs": logprobs},
        common.read_salt(fields),
        stream,
        include_usage,
        logprobs,
        fields.boolean("return_token_ids"),
        None if tools is None else service.tool_parser,
    ).hand_over(read_handover(fields, stream)).hold(wanted if tools is None else tools.answer)


def _read_logprobs(fields: Fields, service: Service) -> int | None:
    wanted = fields.boolean("logprobs")
    most = fields.integer("top_logprobs", 0, service.limits.logprobs)
    if most and not wanted:
        fields.refuse("top_logprobs", "given together with logprobs: true")
    return (most or 0) if wanted else None


def _refuse_what_is_not_there(fields: Fields) -> None:
    """Fields that would change the answer, and that the server cannot follow."""
    fields.only("modalities", ["text"])
    fields.only("audio")
    fields.only("web_search_options")
    fields.only("functions")
    fields.only("function_call", "none", "auto")
    fields.only("reasoning_effort")
    fields.only("add_generation_prompt", True)
    fields.only("continue_final_message", False)
    fields.only("add_special_tokens", False)
    fields.only("echo", False)
    fields.only("chat_template")
    fields.only("verbosity", "medium")


@dataclasses.dataclass
class ChatView(View):
    """Chunks and answers in OpenAI's form."""

    service: Service
    call: Call
    generation: Generation

    def __post_init__(self) -> None:
        self._head = {
            "id": f"chatcmpl-{self.call.id}",
            "created": int(time.time()),
            "model": self.service.facts.names[0],
        }
        self._texts = TokenTexts(self.service.engine.tokenizer)
        self._begun: set[int] = set()
        self._tools: dict[int, ToolParser] = {}

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def first(self, prompt_tokens: int, cached_tokens: int) -> Iterable[bytes]:
        return ()

    def step(self, deltas: list[Delta]) -> Iterable[bytes]:
        keep = self.generation.return_ids
        choices = [self._choice(delta) for delta in deltas if delta.is_news(keep)]
        return (self._chunk(choices),) if choices else ()

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        told = {"usage": usage} if self.generation.include_usage else {}
        return event({**self._head, "object": "chat.completion.chunk", "choices": choices, **told})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {}
        text, calls, finish_reason = self._split(delta)
        if delta.sample not in self._begun:
            self._begun.add(delta.sample)
            content["role"] = "assistant"
        if text or "role" in content:
            content["content"] = text
        if calls:
            content["tool_calls"] = [self._call(delta.sample, call) for call in calls]
        choice = {"index": delta.sample, "delta": content, "finish_reason": finish_reason}
        if self.generation.logprobs is not None:
            entries = self._texts.entries(delta.ids, delta.logprobs, delta.top_logprobs)
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self.generation.return_ids:
            choice["token_ids"] = delta.ids
        return choice

    def _split(self, delta: Delta) -> tuple[str, list[ToolCall], str | None]:
        """Text, calls and finish reason of a step."""
        if self.generation.tool_parser is None:
            return delta.text, [], delta.finish_reason
        parser = self._tools.setdefault(delta.sample, ToolParser(self.generation.tool_parser))
        text, calls = parser.put(delta.text)
        if delta.finish_reason is None:
            return text, calls, None
        rest, more = parser.finish()
        called = parser.calls > 0 and delta.finish_reason == "stop"
        return text + rest, calls + more, "tool_calls" if called else delta.finish_reason

    def _call(self, sample: int, call: ToolCall) -> dict[str, Any]:
        """A part of a call; its id and name come first."""
        part: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.name is not None:
            id = f"{self.call.id}_{sample}_{call.index}"
            part["id"] = call_id(self.generation.tool_parser, "call_", id)
            part["type"] = "function"
            part["function"]["name"] = call.name
        return part

    def end(self, result: Result) -> Iterable[bytes]:
        if self.generation.include_usage:
            yield self._chunk([], usage=usage_of(result))
        yield DONE

    def failed(self, problem: Problem) -> bytes:
        return event(problem.openai())

    def whole(self, result: Result) -> dict[str, Any]:
        choices = [self._whole_choice(i, sample) for i, sample in enumerate(result.samples)]
        kind = {"object": "chat.completion"}
        return {**self._head, **kind, "choices": choices, "usage": usage_of(result)}

    def _whole_choice(self, index: int, sample: Sample) -> dict[str, Any]:
        choice = self._choice(Delta.whole(index, sample))
        message = {"refusal": None, **choice.pop("delta")}
        if "tool_calls" in message:
            message["tool_calls"] = joined(message["tool_calls"])
            message["content"] = message["content"] or None
        return {"logprobs": None, **choice, "message": message}


def joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole calls, without their index, from the parts of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for part in parts:
        index = part.pop("index")
        if index in found:
            found[index]["function"]["arguments"] += part["function"]["arguments"]
        else:
            found[index] = part
    return list(found.values())
