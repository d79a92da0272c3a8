"""`/v1/completions`: texts or token ids, one or several; no chat template."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from quire.engine import Prompt, Result
from quire.serve import generation as common
from quire.serve._streams import Delta
from quire.serve.calls import Call, read_body
from quire.serve.fields import Fields
from quire.serve.generation import Generation
from quire.serve.grammars import read_wanted
from quire.serve.openai_chat import DONE
from quire.serve.prefill_pairs import read_handover
from quire.serve.problems import Problem
from quire.serve.responses import View, answer, event
from quire.serve.service import Service, usage_of
from quire.serve.tokens import TokenTexts

__all__ = ["handle"]

_MAX_TOKENS = 16  # OpenAI's default of this API


async def handle(request: Request, service: Service) -> Any:
    generation, headers = await read_body(request, service, _read)
    view = _CompletionView(service, Call.of(request), generation)
    return await answer(request, service, generation, view, headers)


def _read(fields: Fields, service: Service) -> Generation:
    service.facts.check_name(fields)
    stream, include_usage = common.read_stream(fields)
    logprobs = fields.integer("logprobs", 0, service.limits.logprobs)
    max_tokens = common.read_max_tokens(fields, "max_tokens")
    options: dict[str, Any] = {
        **common.read_sampling(fields, service.limits, service.facts),
        "max_tokens": _MAX_TOKENS if max_tokens is None else max_tokens,
        "stop": common.read_stop(fields, service.limits),
    }
    fields.only("suffix", "")
    fields.only("echo", False)
    fields.only("add_special_tokens", True)
    positions = common.TOKENS_MAX if options.get("window") else service.facts.positions
    return Generation(
        read_prompts(fields, service, positions),
        {name: value for name, value in options.items() if value is not None}
        | {"logprobs": logprobs},
        common.read_salt(fields),
        stream,
        include_usage,
        logprobs,
        fields.boolean("return_token_ids"),
        prompt_field="prompt",
    ).hand_over(read_handover(fields, stream)).hold(read_wanted(fields))


def read_prompts(fields: Fields, service: Service, positions: int) -> list[Prompt]:
    """A text or token ids, or a list of these. positions: the most tokens that ever fit."""
    value = fields.any("prompt")
    is_one = isinstance(value, str) or (
        isinstance(value, list) and value and type(value[0]) is int
    )
    if is_one:
        return [_prompt("prompt", value, service, positions)]
    most = service.limits.prompts
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        must = f"a text that is not empty, a list of token ids, or a list of 1 to {most} of these"
        fields.refuse("prompt", must)
    return [_prompt(f"prompt[{i}]", each, service, positions) for i, each in enumerate(value)]


def _prompt(place: str, value: Any, service: Service, positions: int) -> Prompt:
    if isinstance(value, str) and value:
        common.check_text(value, place)
        return value
    if isinstance(value, list) and len(value) > positions:  # megabytes that would wait for a turn
        message = f"{place} has {len(value)} tokens; the model has {positions} positions"
        raise Problem(413, message, param=place, code="context_length_exceeded")
    vocab_size = service.facts.vocab_size
    if isinstance(value, list) and value and all(type(id) is int for id in value):
        wrong = next((id for id in value if not 0 <= id < vocab_size), None)
        if wrong is None:
            return value
        message = f"{place} has the token id {wrong}; it must be below {vocab_size}"
    else:
        message = f"{place} must be a text that is not empty, or a list of token ids"
    raise Problem(400, message, param=place, code="invalid_value")


@dataclasses.dataclass
class _CompletionView(View):
    service: Service
    call: Call
    generation: Generation

    def __post_init__(self) -> None:
        self._head = {
            "id": f"cmpl-{self.call.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.service.facts.names[0],
        }
        self._texts = TokenTexts(self.service.engine.tokenizer)
        self._lengths: dict[int, int] = {}  # characters of tokens so far, per sample

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def first(self, prompt_tokens: int, cached_tokens: int) -> Iterable[bytes]:
        return ()

    def step(self, deltas: list[Delta]) -> Iterable[bytes]:
        keep = self.generation.return_ids
        choices = [self._choice(delta) for delta in deltas if delta.is_news(keep)]
        return (self._chunk(choices, None),) if choices else ()

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        told = {"usage": usage} if self.generation.include_usage else {}
        return event({**self._head, "choices": choices, **told})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": delta.sample,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        return {**choice, "token_ids": delta.ids} if self.generation.return_ids else choice

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """The older form: four lists."""
        if self.generation.logprobs is None:
            return None
        tokens = [self._texts.text(id) for id in delta.ids]
        offsets = []
        for token in tokens:
            offsets.append(self._lengths.get(delta.sample, 0))
            self._lengths[delta.sample] = offsets[-1] + len(token)
        best = [self._best(top) for top in delta.top_logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": delta.logprobs,
            "top_logprobs": best or None,
            "text_offset": offsets,
        }

    def _best(self, top: list[tuple[int, float]]) -> dict[str, float]:
        """By text: of tokens that have the same one the likeliest, which comes first."""
        found: dict[str, float] = {}
        for id, value in top:
            found.setdefault(self._texts.text(id), value)
        return found

    def end(self, result: Result) -> Iterable[bytes]:
        if self.generation.include_usage:
            yield self._chunk([], usage_of(result))
        yield DONE

    def failed(self, problem: Problem) -> bytes:
        return event(problem.openai())

    def whole(self, result: Result) -> dict[str, Any]:
        choices = [self._choice(Delta.whole(i, sample)) for i, sample in enumerate(result.samples)]
        return {**self._head, "choices": choices, "usage": usage_of(result)}
