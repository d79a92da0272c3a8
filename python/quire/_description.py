"""How an engine stands: what holds which KV, and which requests wait."""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Mapping
from typing import Any

__all__ = ["Description", "HeldBlock", "HeldSequence", "WaitingRequest", "read_description"]

_RETAINED = -1
_DIGEST_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class HeldBlock:
    """A range of tokens that the same sequences see.

    parent: index of the block before it; None: none, or it was left out. begin, end: positions.
    bytes: of the pages that begin in it. sequences: described ones that see it. stored_tokens: of
    its first tokens, those that the chunk store has as well. salt_digest: of the salt whose
    requests may use it; "": no salt.
    """

    parent: int | None
    begin: int
    end: int
    bytes: int
    sequences: int
    stored_tokens: int
    salt_digest: str


@dataclasses.dataclass(frozen=True)
class HeldSequence:
    """What one sample of a request has, or the prefix cache keeps.

    holder: "request"; "kept" by the prefix cache; "internal", of a prompt of another process or
    of a document that is learnt. request_id: the request's number; None: it has none. block: index
    of the one in which it ends; None: none, or it was left out.
    """

    holder: str
    request_id: int | None
    sample: int
    tokens: int
    block: int | None
    salt_digest: str


@dataclasses.dataclass(frozen=True)
class WaitingRequest:
    """seconds: since it was submitted."""

    request_id: int
    prompt_tokens: int
    seconds: float
    salt_digest: str


@dataclasses.dataclass(frozen=True)
class Description:
    """How things stood between two steps. No text is in it.

    stats: as of :meth:`Engine.stats`. blocks: parents come before their children. sequences: of
    requests, then those that are kept, the last used first. waiting: requests, in their order. cut:
    there are more than 1000 of one kind, and the rest was left out. salt_key: of the digests, the
    same for an engine's life; with it salts can be tried, so it is not for others.
    """

    stats: dict[str, int]
    blocks: tuple[HeldBlock, ...]
    sequences: tuple[HeldSequence, ...]
    waiting: tuple[WaitingRequest, ...]
    cut: bool
    salt_key: bytes = dataclasses.field(repr=False)

    def salt_digest(self, cache_salt: bytes) -> str:
        """The digest by which blocks of this salt are told."""
        if not cache_salt:
            return ""
        return hmac.digest(self.salt_key, cache_salt, "sha256").hex()[:_DIGEST_DIGITS]


def read_description(fields: Mapping[str, Any]) -> Description:
    """The description in the library's columns."""
    return Description(
        stats={str(name): int(value) for name, value in fields["stats"].items()},
        blocks=tuple(
            HeldBlock(
                parent=_index(row["parent"]),
                **_numbers(row, "begin", "end", "bytes", "sequences", "stored_tokens"),
                salt_digest=str(row["salt_digest"]),
            )
            for row in _rows(fields["blocks"])
        ),
        sequences=tuple(_sequence(row) for row in _rows(fields["sequences"])),
        waiting=tuple(
            WaitingRequest(
                **_numbers(row, "request_id", "prompt_tokens"),
                seconds=float(row["seconds"]),
                salt_digest=str(row["salt_digest"]),
            )
            for row in _rows(fields["waiting"])
        ),
        cut=bool(fields["cut"]),
        salt_key=bytes(fields["salt_key"]),
    )


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = [str(name) for name in columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _numbers(row: Mapping[str, Any], *names: str) -> dict[str, int]:
    return {name: int(row[name]) for name in names}


def _index(value: Any) -> int | None:
    return None if value < 0 else int(value)


def _sequence(row: Mapping[str, Any]) -> HeldSequence:
    id = int(row["request_id"])
    return HeldSequence(
        holder="request" if id >= 0 else "kept" if id == _RETAINED else "internal",
        request_id=_index(id),
        block=_index(row["block"]),
        **_numbers(row, "sample", "tokens"),
        salt_digest=str(row["salt_digest"]),
    )
