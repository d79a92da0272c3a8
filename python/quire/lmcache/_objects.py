"""LMCache's objects as chunks of a quire.ChunkStore: one object is one chunk."""

from __future__ import annotations

import hashlib
import math
import threading
from typing import Any

import numpy as np

import quire
from quire import errors

__all__ = ["Objects"]

_TOKENS = 16  # of a chunk: the digest of the object's hash, 16 bits each
_SECTION_BYTES = 64 << 20  # the most that a section holds
_SPACES_MAX = 256


def _sections(size: int) -> int:
    """How many equal sections an object of `size` bytes is cut into."""
    least = -(-size // _SECTION_BYTES)
    for count in range(max(1, least), max(1, least) + 256):
        if size % (count * _TOKENS) == 0:
            return count
    raise errors.BadArgumentError(
        f"QuireL2Adapter: an object of {size} bytes is not a multiple of {_TOKENS} bytes"
    )


class Objects:
    """Keys of LMCache's and their chunks. All calls from any thread.

    The passport names the model, the rank, the group and the size; the salt is the chunk's salt;
    the tokens are the digest of the object's hash, so a chunk of another object is never taken for
    it.
    """

    def __init__(self, store: quire.ChunkStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._spaces: dict[tuple[Any, ...], quire.ChunkSpace] = {}
        self._sizes: dict[tuple[Any, ...], int] = {}

    @staticmethod
    def _kind(key: Any) -> tuple[Any, ...]:
        return key.model_name, key.kv_rank, key.object_group_id

    def size(self, key: Any, layouts: Any = None) -> int | None:
        """Bytes of an object: as LMCache describes its group, or as the last one of it had."""
        layout = None if not layouts else layouts.get(key.object_group_id)
        if layout is None:
            with self._lock:
                return self._sizes.get(self._kind(key))
        return sum(
            int(math.prod(shape) * dtype.itemsize)
            for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        )

    def space(self, key: Any, size: int) -> quire.ChunkSpace:
        """The space of the key's model, rank, group, salt and size.

        Raises BadArgumentError for a size that no chunk has.
        """
        name = (*self._kind(key), key.cache_salt, size)
        with self._lock:
            self._sizes[self._kind(key)] = size
            space = self._spaces.pop(name, None) or self._new_space(key, size)
            self._spaces[name] = space  # the last one used
            while len(self._spaces) > _SPACES_MAX:
                self._spaces.pop(next(iter(self._spaces)))
        return space

    def _new_space(self, key: Any, size: int) -> quire.ChunkSpace:
        sections = _sections(size)
        passport = {
            "model": key.model_name,
            "revision": "",
            "layout": f"lmcache/group{key.object_group_id}",
            "shard": f"rank{key.kv_rank}",
            "kind": "latent",
            "dtype": "u8",
            "block": _TOKENS,
            "layers": [0, sections],
            "kv_heads": 1,
            "head_dim": size // sections // _TOKENS,
        }
        return self._store.space(passport, salt=key.cache_salt)

    @staticmethod
    def tokens(key: Any) -> np.ndarray[Any, Any]:
        """Ids int32 [16]."""
        digest = hashlib.sha256(key.chunk_hash).digest()
        return np.frombuffer(digest, "<u2").astype(np.int32)

    def chunk_key(self, key: Any, size: int) -> str:
        """The key of the object's chunk in the store."""
        return self.space(key, size).keys(self.tokens(key))[0]

    def memory(self, data: Any) -> quire.BlockMemory:
        """The bytes of one object as one block for each of its sections; they are not copied."""
        view = np.frombuffer(data, np.uint8)
        rows = view.reshape(_sections(view.size), 1, -1)
        return quire.BlockMemory({("latent", i): row for i, row in enumerate(rows)})

    def section_count(self, size: int) -> int:
        return _sections(size)
