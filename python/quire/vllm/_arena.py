"""Shared memory between a scheduler and a worker that are two processes.

The scheduler copies verified chunks into slots and leases them; the worker maps the memory and only
reads it. There is no file: the memory ends with the last process that has it. A slot that is leased
is not written again before the worker has said that the load has ended, or its lease is overdue.
Each lease of a slot has a number of its own, which stands in the memory before the first byte of
the chunk is written: a worker that comes too late finds another number and has read nothing.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

import quire
from quire import errors
from quire.vllm._blocks import HostBlocks, block_memory
from quire.vllm._groups import KvGroup
from quire.vllm._order import KernelOrder

__all__ = ["Arena", "ArenaView", "SharedChunks", "Slot"]

#: A slot and the number of its lease.
Slot = tuple[int, int]


def _header_bytes(slot_count: int) -> int:
    """Bytes of the numbers of all leases, uint64 [slots], in whole pages."""
    return -(-slot_count * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """Slots of a chunk each, as the worker's blocks have it: a group's layers one after the
    other."""

    def __init__(self, bytes_max: int, group: KvGroup) -> None:
        self._part, self.layer_count = group.part, len(group.layer_names)
        chunk_bytes = group.layer_bytes * self.layer_count
        self.slot_count = max(1, bytes_max // chunk_bytes)
        header = _header_bytes(self.slot_count)
        self.bytes = header + self.slot_count * chunk_bytes
        self.descriptor = os.memfd_create("quire-vllm", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.bytes)
        self._map = mmap.mmap(self.descriptor, self.bytes)
        self._numbers = np.frombuffer(self._map, np.uint64, self.slot_count)
        pages = np.frombuffer(self._map, np.uint8, offset=header).reshape(-1, group.page_bytes)
        self._layers = [pages[self._part * i :] for i in range(self.layer_count)]
        self.set_order(None)
        self._free = list(range(self.slot_count))
        self._leased: set[Slot] = set()

    def set_order(self, order: KernelOrder | None) -> None:
        """How keys and values lie in the worker's blocks; None: chunks are blocks as they are.
        REQUIRES: nothing is leased."""
        self._memory = block_memory(self._layers, order)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def lease(self, fetch: quire.ChunkFetch, first: int, count: int) -> list[Slot]:
        """Copies chunks [first, first + count), as far as there is room; the slots they are in."""
        keep = max(0, len(self._free) - count)
        numbers, count = self._free[keep:], len(self._free) - keep
        del self._free[keep:]
        self._numbers[numbers] += np.uint64(1)
        slots = [(number, int(self._numbers[number])) for number in numbers]
        self._leased.update(slots)
        try:
            step = self.layer_count * self._part
            pages = [number * step + i for number in numbers for i in range(self._part)]
            for layer in range(self.layer_count if count else 0):
                fetch.scatter(layer, self._memory, pages, first=first, count=count)
        except BaseException:
            self.release(slots)
            raise
        return slots

    def release(self, slots: list[Slot]) -> None:
        """Ends leases; those that have ended already (they were overdue) are left as they are."""
        for slot in slots:
            if slot in self._leased:
                self._leased.remove(slot)
                self._free.append(slot[0])

    def close(self) -> None:
        """The map itself goes when the last array over it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class ArenaView:
    """The worker's view of the scheduler's arena, read-only."""

    def __init__(
        self, process: int, descriptor: int, slot_count: int, layer_count: int, layer_bytes: int
    ):
        header = _header_bytes(slot_count)
        size = header + slot_count * layer_count * layer_bytes
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(opened).st_size
            if found != size:
                raise OSError(
                    f"the shared memory of process {process} has {found} bytes, not {size}"
                )
            self._map = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._numbers = np.frombuffer(self._map, np.uint64, slot_count)
        self._slots = np.frombuffer(self._map, np.uint8, offset=header).reshape(
            slot_count, layer_count, layer_bytes
        )

    def layer(self, slots: list[Slot], layer: int) -> np.ndarray[Any, Any]:
        """Bytes of a layer of the chunks in these slots, [slots, layer_bytes]; a copy.

        Raises BadStateError where a lease has ended: the slot may hold another chunk.
        """
        places = [place for place, _ in slots]
        copy: np.ndarray[Any, Any] = self._slots[places, layer]
        # After the copy: the number changes before the first byte does.
        if self._numbers[places].tolist() != [number for _, number in slots]:
            raise errors.BadStateError(
                "a load came after its lease had ended; raise lease_timeout if steps are that long"
            )
        return copy


class SharedChunks:
    """Chunks in slots of an arena, as a source of blocks."""

    def __init__(self, view: ArenaView, slots: list[Slot]) -> None:
        self._view, self._slots = view, slots

    def copy(
        self, layer: int, first: int, count: int, target: HostBlocks, blocks: list[int]
    ) -> None:
        target.write(layer, blocks, self._view.layer(self._slots[first : first + count], layer))
