"""Shared memory between a scheduler and a worker that are two processes.

The scheduler copies verified chunks into slots and leases them; the worker maps the memory and only
reads it. There is no file: the memory ends with the last process that has it. A slot that is leased
is not written again before the worker has said that the load has ended, so a worker that dies
leaves its slots leased, and vLLM ends without it anyway.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

import quire

__all__ = ["Arena", "ArenaView"]


class Arena:
    """slots of chunk_bytes; chunk i's layers lie one after the other, layer_bytes each."""

    def __init__(self, bytes_max: int, layer_bytes: int, layer_count: int) -> None:
        self.layer_bytes, self.layer_count = layer_bytes, layer_count
        chunk_bytes = layer_bytes * layer_count
        self.slot_count = max(1, bytes_max // chunk_bytes)
        self.bytes = self.slot_count * chunk_bytes
        self.descriptor = os.memfd_create("quire-vllm", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.bytes)
        self._map = mmap.mmap(self.descriptor, self.bytes)
        slots = np.frombuffer(self._map, np.uint8).reshape(
            self.slot_count, layer_count, layer_bytes
        )
        self._memory = quire.BlockMemory(
            {("latent", layer): slots[:, layer] for layer in range(layer_count)}
        )
        self._free = list(range(self.slot_count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def lease(self, fetch: quire.ChunkFetch, first: int, count: int) -> list[int]:
        """Copies chunks [first, first + count), as far as there is room; the slots they are in."""
        keep = max(0, len(self._free) - count)
        slots, count = self._free[keep:], len(self._free) - keep
        del self._free[keep:]
        try:
            for layer in range(self.layer_count if count else 0):
                fetch.scatter(layer, self._memory, slots, first=first, count=count)
        except BaseException:
            self.release(slots)
            raise
        return slots

    def release(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def close(self) -> None:
        """The map itself goes when the last array over it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class ArenaView:
    """The worker's view of the scheduler's arena, read-only."""

    def __init__(
        self, process: int, descriptor: int, size: int, layer_count: int, layer_bytes: int
    ):
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(opened).st_size != size:
                raise OSError(f"the shared memory of process {process} has another size")
            self._map = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._slots = np.frombuffer(self._map, np.uint8).reshape(-1, layer_count, layer_bytes)

    def layer(self, slots: list[int], layer: int) -> np.ndarray[Any, Any]:
        """Bytes of a layer of the chunks in these slots, [slots, layer_bytes]; a copy."""
        copy: np.ndarray[Any, Any] = self._slots[slots, layer]
        return copy
