"""Answers on the wire: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from quire import errors
from quire.engine import Result
from quire.serve._streams import Answer, Delta
from quire.serve.calls import Call, ClientGone, left, while_there
from quire.serve.generation import Generation
from quire.serve.prefill_pairs import told_of
from quire.serve.problems import Problem, defect
from quire.serve.service import Service

__all__ = [
    "PREFIX_HEADER",
    "STREAM_HEADERS",
    "JsonAnswer",
    "View",
    "answer",
    "encoded_headers",
    "event",
]

PREFIX_HEADER = "x-quire-prefix"
_PREFIX = re.compile(r"[0-9a-f]{16}")
_PREFIX_TOKENS = 256
_ENTRIES_ON_LOOP = 2000  # log-probabilities; more take milliseconds to be written
_PING = b": ping\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would keep events back
}


class View(Protocol):
    """How one API shows an answer. Events are bytes as they are sent: `begin` gives those of an
    answer that waits, `first` those before the first token; `step` gives one at most for each kind
    of change, whatever the number of tokens."""

    def begin(self, prompt_tokens: int) -> Iterable[bytes]: ...

    def first(self, prompt_tokens: int, cached_tokens: int) -> Iterable[bytes]: ...

    def step(self, deltas: list[Delta]) -> Iterable[bytes]: ...

    def end(self, result: Result) -> Iterable[bytes]: ...

    def failed(self, problem: Problem) -> bytes: ...

    def whole(self, result: Result) -> dict[str, Any]:
        """The complete answer; one with log-probabilities may be made on any thread."""


# Characters that JSON has as they are, and at which some clients end a line.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event, of which the data is one line, whatever a client takes as its end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for end, escaped in _LINE_ENDS.items():  # str.translate takes ten times as long as all else
        text = text.replace(end, escaped)
    head = "" if name is None else f"event: {name}\n"
    return _encoded(f"{head}data: {text}\n\n")


def _encoded(text: str) -> bytes:
    """JSON in UTF-8. What repeats a body may have lone surrogates, which stay the escapes that they
    were there."""
    return text.encode("utf-8", "backslashreplace")


class JsonAnswer:
    """A complete answer, as an application of ASGI."""

    def __init__(
        self, content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.status = status
        self._body = _encoded(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
        self._headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": "application/json",
            "content-length": str(len(self._body)),
            **self._headers,
        }
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": encoded_headers(headers),
            }
        )
        await send({"type": "http.response.body", "body": self._body})


async def answer(
    request: Request,
    service: Service,
    generation: Generation,
    view: View,
    headers: dict[str, str],
) -> JsonAnswer | _EventAnswer:
    """Submits, and gives what is to be sent. Problem for requests that are refused; ClientGone."""
    call = Call.of(request)
    told = told_of(generation.handover, service.prefill_endpoint)
    submitted = await _submitted(request.receive, service, generation, call)
    call.facts["prompt_tokens"] = submitted.prompt_tokens
    headers = {**headers, PREFIX_HEADER: _prefix(request, call, generation, submitted)}
    if generation.stream:
        return _EventAnswer(service, generation, view, submitted, call, headers)
    async with _finishing(service, generation, submitted, call):
        async with _watching(request.receive, submitted):
            while await submitted.next(service.limits.ping_seconds) != []:
                pass
            assert submitted.result is not None
            make = functools.partial(_whole, view, submitted.result, told, headers)
            if _entries(generation, submitted.result) <= _ENTRIES_ON_LOOP:
                return make()
            return await service.streams.run(call.tenant.name, make)


def _whole(
    view: View, result: Result, told: dict[str, Any], headers: dict[str, str]
) -> JsonAnswer:
    return JsonAnswer({**view.whole(result), **told}, headers=headers)


def _entries(generation: Generation, result: Result) -> int:
    """Log-probabilities that the answer has."""
    if generation.logprobs is None:
        return 0
    return result.usage.completion_tokens * (1 + generation.logprobs)


async def _submitted(
    receive: Receive, service: Service, generation: Generation, call: Call
) -> Answer:
    """ClientGone: the client has left before its request was with the engine, which never gets
    it."""
    try:
        return await while_there(receive, service.submit(generation, call.tenant))
    except ClientGone:
        call.facts["finish"] = "cancelled"
        raise


def _prefix(request: Request, call: Call, generation: Generation, submitted: Answer) -> str:
    """What balancers hash on: the client's own value, so that a conversation keeps its first one;
    else that of the prompt's beginning. It tells nothing of a text to those without the key."""
    given = request.headers.get(PREFIX_HEADER, "")
    if _PREFIX.fullmatch(given):
        return given
    salt = call.tenant.salt(generation.cache_salt) or b""
    ids = ",".join(map(str, submitted.prompt_ids[:_PREFIX_TOKENS]))
    return hashlib.sha256(salt + b"\0" + ids.encode()).hexdigest()[:16]


class _EventAnswer:
    """A stream, as an application of ASGI. It ends with the view's end or with an error event,
    unless the client has gone."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        view: View,
        submitted: Answer,
        call: Call,
        headers: dict[str, str],
    ) -> None:
        self.status = 200
        self._service = service
        self._generation = generation
        self._view = view
        self._answer = submitted
        self._call = call
        self._headers = {**STREAM_HEADERS, **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _finishing(self._service, self._generation, self._answer, self._call):
            async with _watching(receive, self._answer):
                headers = encoded_headers(self._headers)
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                try:
                    async for part in self._parts():
                        await _send_part(send, part, more=True)
                except ClientGone:
                    raise
                except Exception as error:
                    problem = self._problem_of(error)
                    try:
                        await _send_part(send, self._view.failed(problem), more=True)
                        await _send_part(send, b"", more=False)
                        if isinstance(error, errors.QuireError):
                            raise problem from None
                        raise  # of a defect the log has more
                    finally:
                        del problem  # its traceback has this frame: both would stay
                await _send_part(send, b"", more=False)

    def _problem_of(self, error: Exception) -> Problem:
        """What the client is told of a stream that fails."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, errors.QuireError):
            return self._service.failure(error, self._generation, self._call.tenant)
        return defect(self._call.id)

    async def _parts(self) -> AsyncIterator[bytes]:
        """What is sent at a time: the events of a step together."""
        begin = b"".join(self._view.begin(self._answer.prompt_tokens))
        if begin:
            yield begin
        has_begun = False
        while True:
            deltas = await self._answer.next(self._service.limits.ping_seconds)
            if deltas is None:
                yield _PING
                continue
            part = b""
            if not has_begun:
                has_begun = True
                answer = self._answer
                part += b"".join(self._view.first(answer.prompt_tokens, answer.cached_tokens))
            if not deltas:
                assert self._answer.result is not None
                yield part + b"".join(self._view.end(self._answer.result))
                return
            part += b"".join(self._view.step(deltas))
            if part:
                yield part


async def _send_part(send: Send, part: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})


@contextlib.asynccontextmanager
async def _watching(receive: Receive, submitted: Answer) -> AsyncIterator[None]:
    """While it is open, the answer fails with ClientGone once the client has gone."""

    async def watch() -> None:
        await left(receive)
        submitted.fail(ClientGone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


@contextlib.asynccontextmanager
async def _finishing(
    service: Service, generation: Generation, submitted: Answer, call: Call
) -> AsyncIterator[None]:
    """Ends the answer, whatever happens, and notes what became of it."""
    failed = "error"
    try:
        yield
    except (ClientGone, asyncio.CancelledError):
        failed = "cancelled"
        raise
    except errors.QuireError as error:
        raise service.failure(error, generation, call.tenant) from None
    finally:
        service.finish(submitted, generation, call.tenant, failed)
        _note(call, submitted, failed)


def _note(call: Call, submitted: Answer, failed: str) -> None:
    if submitted.first_token is not None:
        seconds = submitted.first_token - submitted.submitted
        call.facts["first_token_seconds"] = round(seconds, 4)
    result = submitted.result
    if result is None:
        call.facts["finish"] = failed
        return
    usage = result.usage
    call.facts["cached_tokens"] = usage.cached_tokens
    call.facts["completion_tokens"] = usage.completion_tokens
    for name in ("queue_seconds", "prompt_seconds", "decode_seconds"):
        call.facts[name] = round(getattr(usage, name), 4)
    call.facts["steps"] = usage.steps
    if usage.miss is not None:
        call.facts["miss"] = usage.miss
    if usage.prefix_miss is not None:
        call.facts["prefix_miss"] = usage.prefix_miss.kind
        call.facts["miss_position"] = usage.prefix_miss.position
    call.facts["finish"] = ",".join(sample.finish_reason or "" for sample in result.samples)


def encoded_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
