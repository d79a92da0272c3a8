"""Tenants: the API keys of `--api-keys FILE`, and what is derived from them."""

from __future__ import annotations

import dataclasses
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from quire import errors

__all__ = ["Tenant", "Tenants", "read_api_keys"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]{16,512}")
_TENANTS_MAX = 10_000
_FILE_BYTES_MAX = 8 << 20
_SHARE_MAX = 1_000_000


@dataclasses.dataclass(frozen=True)
class Tenant:
    """One API key.

    name: of logs. share: its weight against other keys where the server is full.
    secret: the key itself, from which salts come; empty where no keys are asked for.
    """

    name: str
    share: int = 1
    secret: bytes = dataclasses.field(default=b"", repr=False)

    def salt(self, client_salt: str | None) -> bytes | None:
        """The salt of KV. It comes from the key, so that no client can name another tenant's; what
        the client sends only divides its own KV further. None: no salt."""
        client = b"" if client_salt is None else client_salt.encode()
        if not self.secret:
            return client or None
        return hmac.digest(self.secret, b"quire cache salt 1\0" + client, "sha256")


ANYONE = Tenant("-")


class Tenants:
    """The keys that are known; none: every request is of one tenant and needs no key."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self._digest_key = secrets.token_bytes(32)
        self._tenants = {self._digest(tenant.secret): tenant for tenant in tenants}
        self.share_total = sum(tenant.share for tenant in self) or 1

    @property
    def need_keys(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def find(self, headers: Mapping[str, str]) -> Tenant | None:
        """The tenant of `Authorization: Bearer KEY` or `x-api-key: KEY`; None: the key is missing
        or unknown. The time does not depend on how much of a key was right: what is looked for is a
        digest that nobody outside can choose. Nor does it grow with the number of keys."""
        if not self._tenants:
            return ANYONE
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        given = key.strip().encode("latin-1", "replace")
        found = self._tenants.get(self._digest(given))
        return found if found is not None and hmac.compare_digest(found.secret, given) else None

    def _digest(self, secret: bytes) -> bytes:
        return hmac.digest(self._digest_key, secret, "sha256")


def read_api_keys(path: Path) -> Tenants:
    """The keys of a file: a line for each, "NAME KEY" or "NAME KEY SHARE"; "#" begins a comment.

    BadArgumentError, which names the line and never its key, for what is none; OSError.
    """
    with open(path, "rb") as file:
        content = file.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise errors.BadArgumentError(f"{path}: has more than {_FILE_BYTES_MAX} bytes")
    tenants: list[Tenant] = []
    seen: set[str | bytes] = set()  # names and keys
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            try:
                tenants.append(_tenant(words, seen))
            except ValueError as error:
                raise errors.BadArgumentError(f"{path}: line {number}: {error}") from None
    if not 1 <= len(tenants) <= _TENANTS_MAX:
        raise errors.BadArgumentError(
            f"{path}: has {len(tenants)} keys; it must have 1 to {_TENANTS_MAX}"
        )
    return Tenants(tenants)


def _tenant(words: list[str], seen: set[str | bytes]) -> Tenant:
    if not 2 <= len(words) <= 3:
        raise ValueError('must be "NAME KEY" or "NAME KEY SHARE"')
    name, key, share = (*words, "1")[:3]
    if not _NAME.fullmatch(name):
        raise ValueError("the name must have 1 to 64 letters, digits, dots, dashes, underscores")
    if not _KEY.fullmatch(key):
        raise ValueError("the key must have 16 to 512 printable ASCII characters")
    if not re.fullmatch(r"[1-9][0-9]{0,6}", share) or int(share) > _SHARE_MAX:
        raise ValueError(f"the share must be an integer from 1 to {_SHARE_MAX}")
    secret = key.encode()
    if name in seen or secret in seen:
        raise ValueError("the name or the key stands in an earlier line")
    seen.update((name, secret))
    return Tenant(name, int(share), secret)
