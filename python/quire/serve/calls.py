"""One HTTP request: its id, its tenant, its body, and the line that the log gets of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TextIO, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from quire import errors
from quire.serve.bounded_json import parse_object
from quire.serve.fields import Fields, unknown_field
from quire.serve.problems import Problem, from_engine
from quire.serve.service import Service
from quire.serve.tenants import Tenant

__all__ = ["Call", "ClientGone", "Log", "answer_beside", "left", "read_body", "while_there"]

T = TypeVar("T")

# More takes milliseconds to parse and to check, which is done beside the event loop.
_LARGE_BODY_BYTES = 64 << 10


class ClientGone(Exception):
    """The client has closed its connection: there is nobody to answer."""


@dataclasses.dataclass
class Call:
    """A request that the guard let in.

    route: the one that answers, of those with a name in their path; metrics tell of it.
    facts: what the log says of it beside status and time; nothing of its text.
    """

    id: str
    tenant: Tenant
    route: str = "other"
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(request: Request) -> Call:
        call = request.scope["state"]["call"]
        assert isinstance(call, Call)
        return call


class Log:
    """A line per event, as text or JSON."""

    def __init__(self, as_json: bool, stream: TextIO | None = None) -> None:
        self._as_json = as_json
        self._stream = sys.stderr if stream is None else stream

    def write(self, level: str, event: str, **facts: Any) -> None:
        now = time.time()
        if self._as_json:
            fields = {"time": round(now, 3), "level": level, "event": event, **facts}
            line = json.dumps(fields)
        else:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            # As JSON, so that no text of a client ends the line or looks like another field.
            words = [f"{name}={json.dumps(value)}" for name, value in facts.items()]
            line = " ".join([f"{stamp} {level} {event}", *words])
        # A log that nobody reads any more, or without room, ends no request and no drain.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=self._stream, flush=True)


async def read_body(
    request: Request, service: Service, reader: Callable[[Fields, Service], T]
) -> tuple[T, dict[str, str]]:
    """What the reader makes of a body, and the headers that name the fields which it left. Problem
    for what is no JSON object, and as the reader raises. The reader may be called on any thread."""
    async with _reading(request, service, reader) as found:
        return found


async def answer_beside(
    request: Request,
    service: Service,
    reader: Callable[[Fields, Service], Callable[[dict[str, str]], T]],
) -> T:
    """What the function of the reader makes of the headers that name the fields which were left: in
    a thread, once it is the key's turn. Its body counts until then, and it ends with its client
    (ClientGone), so clients that have left have nothing that waits."""
    async with _reading(request, service, reader) as (make, headers):
        with _counted(request, service) as key:
            try:
                return await while_there(request.receive, service.streams.run(key, make, headers))
            except errors.QuireError as error:
                raise from_engine(error) from None


@contextlib.contextmanager
def _counted(request: Request, service: Service) -> Iterator[str]:
    """Counts a text of a key, of which the name is given. Problem for one too many."""
    key, texts, limits = Call.of(request).tenant.name, service.texts, service.limits
    if service.tenants.need_keys and texts[key] >= limits.queue_per_key:
        message = f"this key has {texts[key]} texts that wait to be tokenized or are"
        raise service.book.refuse("queue_per_key", 429, message)
    if texts.total() >= limits.queue:
        message = f"{texts.total()} texts wait to be tokenized or are"
        raise service.book.refuse("queue", 503, message)
    texts[key] += 1
    try:
        yield key
    finally:
        texts[key] -= 1
        if not texts[key]:
            del texts[key]


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns. ClientGone: its client has left first, and the work is cancelled."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        del working, work  # a failure's traceback has this frame: all would stay


async def left(receive: Receive) -> None:
    """Returns once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _reading(
    request: Request, service: Service, reader: Callable[[Fields, Service], T]
) -> AsyncIterator[tuple[T, dict[str, str]]]:
    """What `read_body` gives. The body counts, but takes no memory, until this is left."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps pages of other origins out, which cannot send it without being asked.
        shown = kind[:80] or "missing"
        raise Problem(415, f"content-type is {shown}; it must be application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Problem(415, f"content-encoding is {coding[:80]}; send the body as it is")
    async with _body_of(request, service) as body:
        if len(body) > _LARGE_BODY_BYTES:
            key = Call.of(request).tenant.name
            found = await service.streams.run(key, _read, body, service, reader)
        else:
            found = _read(body, service, reader)
        body.clear()
        yield found


def _read(
    body: bytearray, service: Service, reader: Callable[[Fields, Service], T]
) -> tuple[T, dict[str, str]]:
    fields = Fields(parse_object(body))
    found = reader(fields, service)
    return found, _ignored(fields, service)


@contextlib.asynccontextmanager
async def _body_of(request: Request, service: Service) -> AsyncIterator[bytearray]:
    """The protocol keeps the limits of one body, and this one that of all together: those that are
    read, and those that are parsed, or tokenized at once, or wait for it. A key has a half, so that
    no other is kept out by bodies that come slowly."""
    key, body_bytes = Call.of(request).tenant.name, service.body_bytes
    most = service.limits.bodies_bytes
    body = bytearray()
    size = 0
    try:
        async for part in request.stream():
            body += part
            size += len(part)
            body_bytes[key] += len(part)
            own_most = most // 2 if service.tenants.need_keys else most
            if body_bytes.total() > most or body_bytes[key] > own_most:
                raise service.book.refuse("bodies_bytes", 503, "too many large bodies at a time")
        yield body
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        body_bytes[key] -= size
        if not body_bytes[key]:
            del body_bytes[key]


def _ignored(fields: Fields, service: Service) -> dict[str, str]:
    """Headers that name the fields which nobody read. Problem (400) with --strict."""
    unknown = fields.unknown()
    if not unknown:
        return {}
    if service.strict:
        raise unknown_field(unknown[0])
    names = ", ".join(unknown[:16]).encode("ascii", "backslashreplace").decode()
    return {"x-quire-ignored": "".join(c if 32 <= ord(c) < 127 else "?" for c in names)[:512]}
