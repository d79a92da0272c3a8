"""KV of segments of text in memory of this process, found by their tokens."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire import errors
from quire.blend.rows import as_numpy


@dataclasses.dataclass(frozen=True)
class _Chunk:
    number: int  # of this memory, from 1 on
    first_position: int
    layers: tuple[tuple[Any, Any], ...]  # k and v of each layer
    bytes: int  # with its token ids


_Key = tuple[int, bytes]  # the number of the chunk before it, or 0, and the bytes of its token ids


@dataclasses.dataclass(frozen=True)
class _FoundInMemory:
    """A FoundSegment. It keeps the chunks, also where the memory evicts them."""

    token_count: int
    positions: np.ndarray
    chunks: tuple[_Chunk, ...]
    token_dim: int

    def load(self, layer: int) -> tuple[Any, Any]:
        """Copies, which the caller may write to."""
        k, v = (
            _joined([chunk.layers[layer][i] for chunk in self.chunks], self.token_dim)
            for i in (0, 1)
        )
        return k, v


class SegmentMemory:
    """Keeps KV of segments, at most ``capacity_bytes`` of it; the least recently used goes first.

    A segment is stored in chunks of ``chunk_tokens`` and found by its leading chunks, the last of
    which may be shorter. What is found was stored for the same tokens from the segment's first one
    on: ids are compared, no hashes. Calls may come from any thread.
    """

    def __init__(
        self,
        layer_count: int,
        *,
        chunk_tokens: int = 256,
        token_dim: int = 0,
        capacity_bytes: int = 1 << 30,
    ) -> None:
        if layer_count < 1 or chunk_tokens < 1 or capacity_bytes < 0 or token_dim not in (0, 1):
            raise errors.BadArgumentError(
                f"SegmentMemory: layer_count={layer_count}, chunk_tokens={chunk_tokens}, "
                f"capacity_bytes={capacity_bytes}, token_dim={token_dim}; the first two are at "
                "least 1, token_dim is 0 or 1"
            )
        self.layer_count = layer_count
        self.token_dim = token_dim
        self._chunk_tokens = chunk_tokens
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        # A chunk was used later than those behind it, so it is not evicted before them.
        self._chunks: OrderedDict[_Key, _Chunk] = OrderedDict()
        self._numbers = itertools.count(1)

    @property
    def used_bytes(self) -> int:
        """Bytes of the KV and of the token ids that are kept."""
        return self._used_bytes

    def store(
        self, tokens: Any, layers: Sequence[tuple[Any, Any]], *, first_position: int = 0
    ) -> None:
        """Copies the KV of a segment in.

        ``layers``: k and v of each layer, keys rotated at ``first_position``, ``first_position`` +
        1, ... TooLargeError for a chunk that does not fit at all, BadArgumentError for a number of
        layers or tokens that does not fit.
        """
        ids = as_numpy(tokens, np.int64, "tokens")
        if len(layers) != self.layer_count:
            raise errors.BadArgumentError(
                f"SegmentMemory: {len(layers)} layers were given, not {self.layer_count}"
            )
        for k, v in layers:
            for array in (k, v):
                if array.shape[self.token_dim] != len(ids):
                    raise errors.BadArgumentError(
                        f"SegmentMemory: {len(ids)} tokens, but KV of shape {list(array.shape)}"
                    )
        new = [
            self._chunk(ids, layers, begin, end, first_position) for begin, end in self._cuts(ids)
        ]
        if any(chunk.bytes > self._capacity_bytes for _, chunk in new):
            raise errors.TooLargeError(
                f"SegmentMemory: a chunk of {max(chunk.bytes for _, chunk in new)} bytes is larger "
                f"than capacity_bytes={self._capacity_bytes}"
            )
        with self._lock:
            keys: list[_Key] = []
            before = 0
            for tokens_of_chunk, chunk in new:
                keys.append((before, tokens_of_chunk))
                before = self._put(keys[-1], chunk)
            self._use(keys)
            while self._used_bytes > self._capacity_bytes:
                _, evicted = self._chunks.popitem(last=False)
                self._used_bytes -= evicted.bytes

    def find(self, tokens: Any) -> _FoundInMemory:
        """The stored leading chunks of a segment."""
        ids = as_numpy(tokens, np.int64, "tokens")
        chunks: list[_Chunk] = []
        keys: list[_Key] = []
        positions = []
        with self._lock:
            for begin, end in self._cuts(ids):
                key = chunks[-1].number if chunks else 0, ids[begin:end].tobytes()
                chunk = self._chunks.get(key)
                if chunk is None:
                    break
                keys.append(key)
                chunks.append(chunk)
                positions.append(np.arange(end - begin, dtype=np.int64) + chunk.first_position)
            self._use(keys)
        joined = np.concatenate(positions) if positions else np.empty(0, np.int64)
        return _FoundInMemory(len(joined), joined, tuple(chunks), self.token_dim)

    def _cuts(self, ids: np.ndarray) -> list[tuple[int, int]]:
        size = self._chunk_tokens
        return [(begin, min(begin + size, len(ids))) for begin in range(0, len(ids), size)]

    def _chunk(
        self,
        ids: np.ndarray,
        layers: Sequence[tuple[Any, Any]],
        begin: int,
        end: int,
        first_position: int,
    ) -> tuple[bytes, _Chunk]:
        part = (slice(None),) * self.token_dim + (slice(begin, end),)
        copied = tuple((_copied(k[part]), _copied(v[part])) for k, v in layers)
        tokens = ids[begin:end].tobytes()
        size = len(tokens) + sum(int(array.nbytes) for pair in copied for array in pair)
        return tokens, _Chunk(next(self._numbers), first_position + begin, copied, size)

    def _put(self, key: _Key, chunk: _Chunk) -> int:
        """Its number: that of the chunk which it replaces, so that those behind it are found."""
        replaced = self._chunks.get(key)
        if replaced is not None:
            self._used_bytes -= replaced.bytes
            chunk = dataclasses.replace(chunk, number=replaced.number)
        self._used_bytes += chunk.bytes
        self._chunks[key] = chunk
        return chunk.number

    def _use(self, keys: list[_Key]) -> None:
        for key in reversed(keys):
            self._chunks.move_to_end(key)


def _copied(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _joined(arrays: list[Any], token_dim: int) -> Any:
    if len(arrays) == 1:
        return _copied(arrays[0])
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays, axis=token_dim)
    import torch

    return torch.cat(arrays, dim=token_dim)
