"""What the scheduler side tells the worker side in a step, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from quire.vllm._arena import Slot
from quire.vllm._base import Metadata, WorkerMetadata
from quire.vllm._events import StoreEvent

__all__ = ["LoadPlan", "SavePlan", "StepPlan", "WorkerReport"]


@dataclasses.dataclass
class LoadPlan:
    """Chunks that go into blocks.

    number: of the load, counted by the scheduler. first, chunk_count: chunks of the fetch. blocks:
    the same number for each chunk. slots: where the chunks lie in the shared memory, and the
    numbers of their leases; None: the fetch is in this process.
    """

    number: int
    first: int
    chunk_count: int
    blocks: list[int]
    slots: list[Slot] | None


@dataclasses.dataclass
class SavePlan:
    """Chunks that are full after this step.

    tokens: int32 [n], of the prompt up to the last one's end. first, count: chunks of their chain.
    """

    tokens: np.ndarray[Any, Any]
    first: int
    count: int
    blocks: list[int]
    salt: bytes
    extras: list[bytes]
    ttl: float
    pin: bool


@dataclasses.dataclass
class StepPlan(Metadata):  # type: ignore[misc]
    """Everything for one step. passport: of the chunks since the last reset; process: of the
    scheduler; arena: descriptor and slots of its shared memory, if it has some. heard: failed loads
    that vLLM knew of when it planned the step. What a step computes after a load has failed may
    come from the blocks that it did not fill, and is not saved."""

    passport: dict[str, Any]
    process: int
    arena: tuple[int, int] | None
    heard: int
    loads: list[LoadPlan] = dataclasses.field(default_factory=list)
    saves: list[SavePlan] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class WorkerReport(WorkerMetadata):  # type: ignore[misc]
    """Numbers of the loads that a worker has ended, well or not; how many have failed so far; what
    has happened in the store of a worker that is another process."""

    ended: list[int]
    failed: int
    events: list[StoreEvent] = dataclasses.field(default_factory=list)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both; there is one worker."""
        return WorkerReport(
            self.ended + other.ended, max(self.failed, other.failed), self.events + other.events
        )
