"""redis://user:password@host:port,.../?prefix=...: a Redis place in one word; rediss:// with TLS.

Messages say what is wrong with it without its password.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import parse_qsl, unquote

from quire import errors

__all__ = ["SCHEME", "TLS_SCHEME", "RedisPlace", "is_url", "parse"]

SCHEME = "redis://"
TLS_SCHEME = "rediss://"

# Parameters of rediss:// that are texts, by name.
_TLS_TEXTS = {
    "ca": "tls_ca_file",
    "cert": "tls_cert_file",
    "key": "tls_key_file",
    "name": "tls_server_name",
}


@dataclasses.dataclass(frozen=True)
class RedisPlace:
    """endpoints: "HOST:PORT", several with commas, or "unix:PATH". tls and what begins so: as
    the options of quire.ChunkStore."""

    endpoints: str
    username: str = ""
    password: str = dataclasses.field(default="", repr=False)
    prefix: str = ""
    tls: bool = False
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_server_name: str = ""
    tls_verify: bool = True


def is_url(text: str) -> bool:
    return text.startswith((SCHEME, TLS_SCHEME))


def parse(text: str) -> RedisPlace:
    """Parses "redis://[[USER]:PASSWORD@]ENDPOINTS[/][?prefix=PREFIX]", or ENDPOINTS alone; with TLS
    "rediss://", and parameters ca, cert, key (PEM files), name (whose certificate the servers must
    have, instead of each one's host) and verify=no (any certificate will do).

    USER, PASSWORD and parameters are percent-encoded. With "unix:PATH" the slashes are the path's.

    Raises:
        BadArgumentError: it is none.
    """
    if not is_url(text):
        return RedisPlace(text)
    tls = text.startswith(TLS_SCHEME)
    place, _, query = text.removeprefix(TLS_SCHEME if tls else SCHEME).partition("?")
    # An "@" after the first slash is part of a path. The last one before it ends the password: what
    # stands after that is told in messages.
    authority, slash, rest = place.partition("/")
    user, has_user, authority = authority.rpartition("@")
    place = authority + slash + rest
    username, colon, password = user.partition(":")
    if has_user and not colon:
        raise _bad("has a user and no password; write USER:PASSWORD@, or :PASSWORD@ without a user")
    if not place.startswith("unix:"):
        place, _, path = place.partition("/")
        if "@" in path:
            raise _bad('has an "@" after a "/"; in USER and PASSWORD write "/" as %2F')
        if path:
            raise _bad(
                f"ends with /{path}; Quire keeps chunks in database 0, where ?prefix= sets them "
                "apart"
            )
    if not place:
        raise _bad("names no server; write redis://HOST:PORT")
    return RedisPlace(
        place, unquote(username), unquote(password), tls=tls, **_parameters(query, tls)
    )


def _parameters(query: str, tls: bool) -> dict[str, Any]:
    known = ["prefix", *_TLS_TEXTS, "verify"] if tls else ["prefix"]
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known and "@" in name:
            raise _bad('has an "@" after a "?"; in USER and PASSWORD write "?" as %3F')
        if name not in known:
            raise _bad(f"has the parameter {name!r}; there is {', '.join(known)}")
        if name == "verify":
            if value not in ("yes", "no"):
                raise _bad(f"has verify={value!r}; it is yes or no")
            found["tls_verify"] = value == "yes"
        else:
            found[_TLS_TEXTS.get(name, name)] = value
    return found


def _bad(why: str) -> errors.BadArgumentError:
    return errors.BadArgumentError(f"the Redis URL {why}")
