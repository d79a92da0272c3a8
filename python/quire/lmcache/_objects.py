"""LMCache's objects as chunks of a quire.ChunkStore: one object is one chunk."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

import quire
from quire._chunk_objects import NewObject, ObjectSpace

__all__ = ["Objects"]

_SPACES_MAX = 256
_SIZES_MAX = 16  # of one kind of objects: LMCache has one, and others for ends of prompts


class Objects:
    """Keys of LMCache's and their chunks. All calls from any thread.

    The passport names the model, the rank, the group and the size; the salt is the chunk's salt;
    the name of an object is its hash.
    """

    def __init__(self, store: quire.ChunkStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._spaces: dict[tuple[Any, ...], ObjectSpace] = {}
        # Bytes that objects of a kind have had, the last ones last.
        self._sizes: dict[tuple[Any, ...], list[int]] = {}

    @staticmethod
    def _kind(key: Any) -> tuple[Any, ...]:
        return key.model_name, key.kv_rank, key.object_group_id

    def size(self, key: Any, layouts: Any = None) -> int | None:
        """Bytes of an object: as LMCache describes its group, or as the last one of it had."""
        layout = None if not layouts else layouts.get(key.object_group_id)
        if layout is None:
            return next(reversed(self.sizes(key)), None)
        return sum(
            int(math.prod(shape) * dtype.itemsize)
            for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        )

    def sizes(self, key: Any) -> list[int]:
        """All that objects of its kind have had, as far as is known."""
        with self._lock:
            return [*self._sizes.get(self._kind(key), ())]

    def space(self, key: Any, size: int) -> ObjectSpace:
        """The space of the key's model, rank, group, salt and size.

        Raises BadArgumentError for a size that no chunk has.
        """
        name = (*self._kind(key), key.cache_salt, size)
        with self._lock:
            sizes = self._sizes.setdefault(self._kind(key), [])
            if size in sizes:
                sizes.remove(size)
            sizes.append(size)
            del sizes[:-_SIZES_MAX]
            space = self._spaces.pop(name, None) or self._new_space(key, size)
            self._spaces[name] = space  # the last one used
            while len(self._spaces) > _SPACES_MAX:
                self._spaces.pop(next(iter(self._spaces)))
        return space

    def _new_space(self, key: Any, size: int) -> ObjectSpace:
        return ObjectSpace(
            self._store,
            size,
            model=key.model_name,
            layout=f"lmcache/group{key.object_group_id}",
            shard=f"rank{key.kv_rank}",
            salt=key.cache_salt,
        )

    def chunk_key(self, key: Any, size: int) -> str:
        """The key of the object's chunk in the store."""
        return self.space(key, size).key(key.chunk_hash)

    def new(self, key: Any, data: Any) -> NewObject:
        """An object of these bytes, to be stored."""
        space = self.space(key, len(data))
        return NewObject(space, key.chunk_hash, lambda: space.memory(_row(data)))

    def fetch(self, key: Any, size: int, timeout: float) -> quire.ChunkFetch:
        return self.space(key, size).fetch(key.chunk_hash, timeout)

    def copy(self, key: Any, fetch: quire.ChunkFetch, data: Any) -> None:
        """Copies an object that is here and verified to `data`."""
        space = self.space(key, len(data))
        space.copy(fetch, space.memory(_row(data)))


def _row(data: Any) -> np.ndarray[Any, Any]:
    """The bytes of an object as its one row; they are not copied."""
    return np.frombuffer(data, np.uint8)[None]
