"""Objects of other servers' caches as chunks of a quire.ChunkStore: one object is one chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import quire
from quire import errors

__all__ = ["NewObject", "ObjectSpace", "arrived", "put_all"]

_TOKENS = 16  # of a chunk: the digest of the object's name, 16 bits each
_SECTION_BYTES = 64 << 20  # the most that a section holds


def _section_count(size: int, rows: int) -> int:
    """How many equal sections an object of `size` bytes is cut into. A section is whole rows, or a
    part of one."""
    least = max(1, -(-size // _SECTION_BYTES))
    for count in range(least, least + 256):
        if size % (count * _TOKENS) == 0 and (rows % count == 0 or count % rows == 0):
            return count
    raise errors.BadArgumentError(
        f"an object of {size} bytes is not a multiple of {_TOKENS} bytes, or cannot be cut into "
        f"sections of at most {_SECTION_BYTES} bytes"
    )


class ObjectSpace:
    """Objects of one size under one passport and salt. All calls from any thread.

    The tokens of a chunk are the digest of the object's name, so a chunk of another object is never
    taken for it.

    Args:
        size: bytes of an object.
        rows: the number of equal rows that its bytes may lie apart in.
        model, revision, layout, shard: fields of the passport.

    Raises:
        BadArgumentError: a size that no chunk has, or a field of the passport.
    """

    def __init__(
        self,
        store: quire.ChunkStore,
        size: int,
        *,
        rows: int = 1,
        model: str,
        revision: str = "",
        layout: str,
        shard: str,
        salt: str = "",
    ) -> None:
        self._sections = _section_count(size, rows)
        #: The most that a chunk takes: its header and its sections end at multiples of 4096 bytes.
        self.chunk_bytes_max = size + (self._sections + 2) * 4096
        passport = {
            "model": model,
            "revision": revision,
            "layout": layout,
            "shard": shard,
            "kind": "latent",
            "dtype": "u8",
            "block": _TOKENS,
            "layers": [0, self._sections],
            "kv_heads": 1,
            "head_dim": size // self._sections // _TOKENS,
        }
        self._space = store.space(passport, salt=salt)
        self.passport = quire.Passport(
            fingerprint=self._space.fingerprint,
            model=model,
            revision=revision,
            tokenizer="",
            adapter="",
            numerics="",
            chunk_tokens=_TOKENS,
        )

    @staticmethod
    def _tokens(name: bytes) -> np.ndarray[Any, Any]:
        """Ids int32 [16]."""
        digest = hashlib.sha256(name).digest()
        return np.frombuffer(digest, "<u2").astype(np.int32)

    def key(self, name: bytes) -> str:
        """The key of the object's chunk in the store."""
        return self._space.keys(self._tokens(name))[0]

    def known(self, name: bytes) -> bool:
        """Whether it is stored, as far as that is known without asking the folder or Redis."""
        return self._space.known_prefix(self._tokens(name)) == 1

    def wanted(self, name: bytes) -> bool:
        return self._space.wanted(self._tokens(name))[0]

    def fetch(self, name: bytes, timeout: float) -> quire.ChunkFetch:
        """Starts to bring the object. Does not wait."""
        return self._space.fetch(self._tokens(name), timeout=timeout)

    def put(self, name: bytes, memory: quire.BlockMemory) -> None:
        """FullError: the queue of a tier is full."""
        self._space.put(0, self._tokens(name), memory=memory, blocks=[0])

    def memory(self, rows: np.ndarray[Any, Any]) -> quire.BlockMemory:
        """The bytes of one object, uint8 [rows, n], as one block for each of its sections. They are
        not copied; rows may have gaps between them."""
        count = self._sections
        apart = rows.shape[0] // count
        if apart:
            parts = [rows[i * apart : (i + 1) * apart] for i in range(count)]
        else:
            of_row = count // rows.shape[0]
            size = rows.shape[1] // of_row
            parts = [row[i * size : (i + 1) * size] for row in rows for i in range(of_row)]
        return quire.BlockMemory({("latent", i): part[None] for i, part in enumerate(parts)})

    def copy(self, fetch: quire.ChunkFetch, memory: quire.BlockMemory) -> None:
        """Copies an object that is here and verified."""
        for section in range(self._sections):
            fetch.scatter(section, memory, [0])


def arrived(fetch: quire.ChunkFetch, timeout: float) -> bool:
    """Waits at most `timeout` seconds. Whether the object is in memory and verified; if not, the
    fetch is closed."""
    if fetch.wait(timeout) and fetch.ready == 1:
        return True
    fetch.close()
    return False


@dataclasses.dataclass(frozen=True)
class NewObject:
    """An object to be stored. memory: asked for its bytes if the store wants them."""

    space: ObjectSpace
    name: bytes
    memory: Callable[[], quire.BlockMemory]


def _put(store: quire.ChunkStore, new: NewObject, timeout: float) -> None:
    memory = new.memory()
    # What a tier drops because it is out of order, another one may have.
    with contextlib.suppress(errors.FullError, errors.UnavailableError):
        try:
            new.space.put(new.name, memory)
        except errors.FullError:
            store.flush(timeout)  # then the queue is empty
            new.space.put(new.name, memory)


def put_all(store: quire.ChunkStore, objects: Mapping[str, NewObject], timeout: float) -> set[str]:
    """Stores objects, each under its chunk's key. Returns the keys of those that a tier has, as
    durably as the store promises. Waits for at most `timeout` seconds each time that a queue is
    full, and at the end.

    Raises:
        TimeoutError: they were not written within that time.
    """
    # What is stored already is not to be evicted by the rest.
    store.pin(objects)
    try:
        for each in objects.values():
            if each.space.wanted(each.name):
                _put(store, each, timeout)
        store.flush(timeout)
        return {key for key, each in objects.items() if each.space.known(each.name)}
    finally:
        store.unpin(objects)
