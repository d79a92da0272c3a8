"""Parts: the chunks of one group of layers on one worker. Each has a key space of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.vllm._arena import Arena
from quire.vllm._groups import KvGroup
from quire.vllm._identity import Shard, canonical_passport_of, passport_of

__all__ = ["Part", "parts_of", "share_memory"]


@dataclasses.dataclass
class Part:
    """rank: of the worker. number: of the group in vLLM's tables of blocks. passport: of its opaque
    chunks. canonical: of its canonical ones; None: it has none. arena: memory that is shared with
    the worker; None: the worker is in this process."""

    rank: int
    number: int
    group: KvGroup
    passport: dict[str, Any]
    canonical: dict[str, Any] | None
    arena: Arena | None = None


def parts_of(
    vllm_config: Any, shards: Sequence[Shard], groups: Sequence[Sequence[KvGroup]]
) -> list[Part]:
    """shards, groups: of each worker, by rank. A stage that has no layer of a group has no part of
    it."""
    found = []
    for rank, (shard, of_rank) in enumerate(zip(shards, groups, strict=True)):
        for number, group in enumerate(of_rank):
            if group.layer_names:
                place = (vllm_config, group, shard, len(of_rank) == 1)
                passport, canonical = passport_of(*place), canonical_passport_of(*place)
                found.append(Part(rank, number, group, passport, canonical))
    return found


def share_memory(parts: Sequence[Part], bytes_max: int) -> None:
    """Makes the shared memory of all parts, of as many chunks each."""
    chunk_bytes = [part.group.layer_bytes * len(part.group.layer_names) for part in parts]
    for part, each in zip(parts, chunk_bytes, strict=True):
        part.arena = Arena(bytes_max * each // sum(chunk_bytes), part.group)
