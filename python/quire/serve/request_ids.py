"""The id of a request: in its answer, in the log, and in what its client is told of a defect."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

__all__ = ["id_headers", "request_id"]

_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own `x-request-id`, if that is a short word; else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _GIVEN.fullmatch(value):
            return value.decode()
    return secrets.token_hex(8)


def id_headers(path: str, id: str) -> dict[str, str]:
    """The headers that tell a client the id, by the path that it asks for: Anthropic's clients read
    another one."""
    found = {"x-request-id": id}
    return {**found, "request-id": id} if path.startswith("/v1/messages") else found
