"""One HTTP request: its id, its tenant, its body, and the line that the log gets of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TextIO, TypeVar

from starlette.requests import ClientDisconnect, Request

from quire.serve.bounded_json import parse_object
from quire.serve.fields import Fields, unknown_field
from quire.serve.problems import Problem
from quire.serve.service import Service
from quire.serve.tenants import Tenant

__all__ = ["Call", "ClientGone", "Log", "read_body"]

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
            return await service.streams.run(key, _read, body, service, reader)
        return _read(body, service, reader)


def _read(
    body: bytearray, service: Service, reader: Callable[[Fields, Service], T]
) -> tuple[T, dict[str, str]]:
    fields = Fields(parse_object(body))
    found = reader(fields, service)
    return found, _ignored(fields, service)


@contextlib.asynccontextmanager
async def _body_of(request: Request, service: Service) -> AsyncIterator[bytearray]:
    """The protocol keeps the limits of one body, and this one that of all together: those that are
    read, and those that are parsed or wait for it. A key has a half, so that no other is kept out
    by bodies that come slowly."""
    key, body_bytes = Call.of(request).tenant.name, service.body_bytes
    most = service.limits.bodies_bytes
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            body_bytes[key] += len(part)
            own_most = most // 2 if service.tenants.need_keys else most
            if body_bytes.total() > most or body_bytes[key] > own_most:
                raise service.book.refuse("bodies_bytes", 503, "too many large bodies at a time")
        yield body
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        body_bytes[key] -= len(body)
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
