"""redis://user:password@host:port,.../?prefix=...: a Redis place in one word.

Messages say what is wrong with it without its password.
"""

from __future__ import annotations

import dataclasses
from urllib.parse import parse_qsl, unquote

from quire import errors

__all__ = ["SCHEME", "RedisPlace", "parse"]

SCHEME = "redis://"


@dataclasses.dataclass(frozen=True)
class RedisPlace:
    """endpoints: "HOST:PORT", several with commas, or "unix:PATH"."""

    endpoints: str
    username: str = ""
    password: str = dataclasses.field(default="", repr=False)
    prefix: str = ""


def parse(text: str) -> RedisPlace:
    """Of "redis://[[USER]:PASSWORD@]ENDPOINTS[/][?prefix=PREFIX]", or of ENDPOINTS alone.

    USER, PASSWORD and PREFIX are percent-encoded. With "unix:PATH" the slashes are the path's.

    Raises:
        BadArgumentError: it is none.
    """
    if not text.startswith(SCHEME):
        return RedisPlace(text)
    place, _, query = text.removeprefix(SCHEME).partition("?")
    # An "@" behind the first slash is part of a path.
    has_user = "@" in place.partition("/")[0]
    user, _, place = place.partition("@") if has_user else ("", "", place)
    username, colon, password = user.partition(":")
    if has_user and not colon:
        raise _bad("has a user and no password; write USER:PASSWORD@, or :PASSWORD@ without a user")
    if not place.startswith("unix:"):
        place, _, path = place.partition("/")
        if path:
            raise _bad(
                f"ends with /{path}; Quire keeps chunks in database 0, where ?prefix= sets them "
                "apart"
            )
    if not place:
        raise _bad("names no server; write redis://HOST:PORT")
    return RedisPlace(place, unquote(username), unquote(password), _prefix(query))


def _prefix(query: str) -> str:
    prefix = ""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "prefix":
            raise _bad(f"has the parameter {name!r}; the only one there is is prefix")
        prefix = value
    return prefix


def _bad(why: str) -> errors.BadArgumentError:
    return errors.BadArgumentError(f"the Redis URL {why}")
