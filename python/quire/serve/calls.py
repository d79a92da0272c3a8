"""One HTTP request: its id, its tenant, its body, and the line that the log gets of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, TextIO

from starlette.requests import ClientDisconnect, Request

from quire.serve.bounded_json import parse_object
from quire.serve.fields import Fields
from quire.serve.problems import Problem
from quire.serve.service import Service
from quire.serve.tenants import Tenant

__all__ = ["Call", "ClientGone", "Log", "check_unknown", "read_fields"]

_LARGE_BODY_BYTES = (
    64 << 10
)  # more takes milliseconds to parse, and is parsed beside the event loop


class ClientGone(Exception):
    """The client has closed its connection: there is nobody to answer."""


@dataclasses.dataclass
class Call:
    """A request that the guard let in.

    facts: what the log says of it beside status and time; nothing of its text.
    """

    id: str
    tenant: Tenant
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
        print(line, file=self._stream, flush=True)


async def read_fields(request: Request, service: Service) -> Fields:
    """The body of a request as an object. Problem for all else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps pages of other origins out, which cannot send it without being asked.
        shown = kind[:80] or "missing"
        raise Problem(415, f"content-type is {shown}; it must be application/json")
    async with _body_of(request, service) as body:
        if len(body) > _LARGE_BODY_BYTES:
            return Fields(await service.streams.run(parse_object, body))
        return Fields(parse_object(body))


@contextlib.asynccontextmanager
async def _body_of(request: Request, service: Service) -> AsyncIterator[bytearray]:
    """The protocol keeps the limits of one body, and this one that of all together: those that are
    read, and those that are parsed or wait for it."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            service.body_bytes += len(part)
            if service.body_bytes > service.limits.bodies_bytes:
                raise service.book.refuse("bodies_bytes", 503, "too many large bodies at a time")
        yield body
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        service.body_bytes -= len(body)


def check_unknown(fields: Fields, service: Service) -> dict[str, str]:
    """Headers that name the fields which nobody read. Problem (400) with --strict."""
    unknown = fields.unknown()
    if not unknown:
        return {}
    if service.strict:
        name = unknown[0][:80]
        raise Problem(400, f"{name} is not a field of this request", param=name)
    names = ", ".join(unknown[:16]).encode("ascii", "backslashreplace").decode()
    return {"x-quire-ignored": "".join(c if 32 <= ord(c) < 127 else "?" for c in names)[:512]}
