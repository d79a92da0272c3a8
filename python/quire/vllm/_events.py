"""KV events: which of vLLM's blocks the store has, under vLLM's own hashes of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from quire.vllm._base import BlockRemoved, BlockStored, event_hashes, event_extra_keys

__all__ = ["ChunkEvents", "StoreEvent"]

#: What happened, in which tier, to the chunk of this key: as quire.ChunkStore.take_events.
StoreEvent = tuple[str, str, str]

_MEDIA = {"ram": "CPU", "disk": "STORAGE", "redis": "STORAGE"}
_CHUNKS_MAX = 65536


@dataclasses.dataclass
class _Chunk:
    """hashes: of its blocks. parent: of the block before them. lora: vLLM's request for an
    adapter, or None. tiers: that vLLM was told of."""

    hashes: list[Any]
    parent: Any
    tokens: list[int]
    lora: Any
    extra_keys: list[Any] | None
    tiers: set[str] = dataclasses.field(default_factory=set)


class ChunkEvents:
    """Chunks of requests of this process, the newest 65536, and what was told of them. group: of
    layers, whose chunks they are.

    A block may be in several chunks: after it come different ones. So what is told of it begins
    with the first of them and ends with the last one.
    """

    def __init__(self, block_size: int, chunk_tokens: int, group: int = 0) -> None:
        self._block_size, self._chunk_tokens, self._group = block_size, chunk_tokens, group
        self._chunks: dict[str, _Chunk] = {}
        self._uses: Counter[tuple[str, Any]] = Counter()  # of tier and hash: chunks that have it
        self._told: list[Any] = []

    def learn(self, request: Any, keys: Sequence[str], first: int) -> None:
        """Chunks from `first` on of the request's chain have these keys."""
        part = self._chunk_tokens // self._block_size
        for index, key in enumerate(keys, first):
            begin, end = index * part, (index + 1) * part
            if key in self._chunks or end > len(request.block_hashes):
                continue
            hashes = event_hashes(request.block_hashes[max(0, begin - 1) : end])
            tokens = slice(begin * self._block_size, end * self._block_size)
            self._chunks[key] = _Chunk(
                hashes[-part:],
                hashes[0] if begin else None,
                list(request.all_token_ids[tokens]),
                request.lora_request or None,
                event_extra_keys(request, begin, end, self._block_size),
            )
        while len(self._chunks) > _CHUNKS_MAX:
            self._remove_all(self._chunks.pop(next(iter(self._chunks))))

    def note(self, events: Iterable[StoreEvent]) -> None:
        """What has happened in a store."""
        for kind, tier, key in events:
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            if kind == "stored" and tier not in chunk.tiers:
                self._store(chunk, tier)
            elif kind != "stored" and tier in chunk.tiers:
                self._remove(chunk, tier)

    def forget(self) -> None:
        """Nothing that is stored is found any more."""
        for chunk in self._chunks.values():
            self._remove_all(chunk)
        self._chunks.clear()

    def take(self) -> list[Any]:
        """vLLM's events since the last call."""
        told, self._told = self._told, []
        return told

    def _store(self, chunk: _Chunk, tier: str) -> None:
        chunk.tiers.add(tier)
        # A hash commits to what is before it, so these come first.
        known = sum(self._uses[tier, each] > 0 for each in chunk.hashes)
        self._uses.update((tier, each) for each in chunk.hashes)
        if known == len(chunk.hashes):
            return
        self._told.append(
            BlockStored(
                block_hashes=chunk.hashes[known:],
                parent_block_hash=chunk.hashes[known - 1] if known else chunk.parent,
                token_ids=chunk.tokens[known * self._block_size :],
                block_size=self._block_size,
                lora_id=None if chunk.lora is None else chunk.lora.lora_int_id,
                medium=_MEDIA[tier],
                lora_name=None if chunk.lora is None else chunk.lora.lora_name,
                extra_keys=None if chunk.extra_keys is None else chunk.extra_keys[known:],
                group_idx=self._group,
                ownership=f"quire-{tier}",
            )
        )

    def _remove(self, chunk: _Chunk, tier: str) -> None:
        chunk.tiers.remove(tier)
        self._uses.subtract((tier, each) for each in chunk.hashes)
        gone = [each for each in chunk.hashes if self._uses[tier, each] == 0]
        for each in gone:
            del self._uses[tier, each]
        if gone:
            self._told.append(
                BlockRemoved(
                    block_hashes=gone,
                    medium=_MEDIA[tier],
                    group_idx=self._group,
                    ownership=f"quire-{tier}",
                )
            )

    def _remove_all(self, chunk: _Chunk) -> None:
        for tier in sorted(chunk.tiers):
            self._remove(chunk, tier)
