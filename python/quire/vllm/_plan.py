"""What the scheduler side tells the worker side in a step, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from quire.vllm._adapters import Facts
from quire.vllm._arena import Slot
from quire.vllm._base import HandshakeBase, Metadata, WorkerMetadata
from quire.vllm._events import StoreEvent
from quire.vllm._order import KernelOrder

__all__ = [
    "ChunkPlace",
    "GroupBlocks",
    "Handshake",
    "LoadPlan",
    "SavePlan",
    "StepPlan",
    "WorkerReport",
]


@dataclasses.dataclass
class Handshake(HandshakeBase):  # type: ignore[misc]
    """What a worker tells at the start, and again where vLLM registers its KV again.

    layer_names: those that it holds, by group in vLLM's order; none of a group of which its stage
    has no layer. orders: of the groups of which it has some; None: it has learnt none.
    """

    rank: int
    layer_names: list[tuple[str, ...]]
    orders: list[KernelOrder | None]

    def is_same(self, other: Handshake) -> bool:
        """Whether the other one says the same."""
        if (self.rank, self.layer_names) != (other.rank, other.layer_names):
            return False
        return all(
            theirs is None if mine is None else mine.is_same(theirs)
            for mine, theirs in zip(self.orders, other.orders, strict=True)
        )


@dataclasses.dataclass
class GroupBlocks:
    """Where chunks of a group of layers go. lead: blocks of the first chunk that are left out,
    since they are before the window. blocks: the same number for each chunk, but for these."""

    chunk_count: int
    lead: int
    blocks: list[int]


@dataclasses.dataclass
class ChunkPlace:
    """Where such chunks are. first: of the fetch. slots: where they lie in the shared memory, and
    the numbers of their leases; None: the fetch is in this process."""

    first: int
    slots: list[Slot] | None


@dataclasses.dataclass
class LoadPlan:
    """Chunks that go into blocks.

    number: of the load, counted by the scheduler. request: which waits until all workers have said
    that its load has ended; None: it is computed in this step. groups: by group. places: by rank,
    of the groups of which the worker has layers; empty: the load is lost.
    """

    number: int
    request: str | None
    groups: list[GroupBlocks]
    places: list[list[ChunkPlace]]


@dataclasses.dataclass
class SavePlan:
    """Chunks that are full after this step.

    tokens: int32 [n], of the prompt up to the last one's end. first, count: chunks of their chain.
    ends_there: whether the step ends with them; only then have blocks the recurrent state of the
    last one's end. blocks: by group. windows_first: groups with a window are not saved before this
    chunk: a load has filled only what was in the window. adapter: folder of a LoRA, and what its
    files are like if the KV is of the digest in the extras.
    """

    tokens: np.ndarray[Any, Any]
    first: int
    count: int
    ends_there: bool
    blocks: list[list[int]]
    windows_first: int
    salt: bytes
    extras: list[bytes]
    ttl: float
    pin: bool
    adapter: tuple[str, Facts] | None


@dataclasses.dataclass
class StepPlan(Metadata):  # type: ignore[misc]
    """Everything for one step.

    passports: of the chunks since the last reset, by rank, of the groups of which the worker has
    layers. process: of the scheduler. arenas: descriptor and slots of its shared memory, the same
    way, if it has some. heard: failed loads that vLLM knew of when it planned the step. What a step
    computes after a load has failed may come from the blocks that it did not fill, and is not
    saved, unless waits_for_loads: no step computes from blocks that are to be loaded.
    """

    passports: list[list[dict[str, Any]]]
    process: int
    arenas: list[list[tuple[int, int]]] | None
    heard: int
    waits_for_loads: bool
    loads: list[LoadPlan] = dataclasses.field(default_factory=list)
    saves: list[SavePlan] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class WorkerReport(WorkerMetadata):  # type: ignore[misc]
    """Numbers and ranks of the loads that workers have ended, well or not; how many have failed so
    far; requests that wait for a load and will not get it; what has happened in the store of a
    worker that is another process."""

    ended: list[tuple[int, int]]
    failed: int
    lost: list[str] = dataclasses.field(default_factory=list)
    events: list[StoreEvent] = dataclasses.field(default_factory=list)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """The report of both workers."""
        return WorkerReport(
            self.ended + other.ended,
            max(self.failed, other.failed),
            self.lost + other.lost,
            self.events + other.events,
        )
