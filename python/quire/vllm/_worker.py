"""The worker side: copies verified chunks into vLLM's blocks, and full blocks into the store."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import quire
from quire import errors
from quire.vllm import _blocks
from quire.vllm._arena import ArenaView, SharedChunks
from quire.vllm._events import StoreEvent
from quire.vllm._identity import layer_order
from quire.vllm._options import SPACES_MAX, Options, close_store, open_store
from quire.vllm._plan import LoadPlan, SavePlan, StepPlan, WorkerReport
from quire.vllm._scheduler import fetches_in_flight

__all__ = ["WorkerSide"]


class WorkerSide:
    """Everything that vLLM's model runner asks. One thread calls it."""

    def __init__(
        self, options: Options, block_count: int, layer_bytes: int, *, tells_events: bool = False
    ) -> None:
        self._options = options
        self._tells_events = tells_events
        self._is_apart = False  # from the scheduler, which then has another store
        self._block_count, self._layer_bytes = block_count, layer_bytes
        self._layer_count = 0
        self._blocks: _blocks.Blocks | None = None  # vLLM's own memory
        self._store: quire.ChunkStore | None = None
        self._passport: Mapping[str, Any] = {}
        self._spaces: dict[bytes, quire.ChunkSpace] = {}
        self._view: ArenaView | None = None
        self._arena: tuple[int, int] | None = None
        self._bad_blocks: set[int] = set()
        self._ended: list[int] = []
        self._failed = 0
        self._errors: list[Exception] = []
        self._count: dict[str, int] = {}

    # ---- Memory

    def register(self, caches: Mapping[str, Any]) -> None:
        """vLLM's tensors, by the names of their layers.

        Raises BadArgumentError for tensors that are not pages of the size that vLLM told, or not on
        one device that the connector knows.
        """
        import torch

        layers = []
        for name in layer_order(list(caches)):
            tensor = caches[name]
            pages = tensor.view(torch.uint8)
            if pages.shape[0] != self._block_count and pages.dim() > 1:
                pages = pages.transpose(0, 1)  # keys of all blocks, then values
            page_bytes = pages[0].numel()
            if pages.shape[0] != self._block_count or page_bytes * self._part != self._layer_bytes:
                raise errors.BadArgumentError(
                    f"QuireConnector: the KV of {name} has the shape {tuple(tensor.shape)}, not "
                    f"{self._block_count} blocks of {self._layer_bytes // self._part} bytes"
                )
            layers.append(pages)
        devices = {str(each.device) for each in layers}
        if len(devices) != 1:
            raise errors.BadArgumentError(
                f"QuireConnector: the KV is on the devices {sorted(devices)}; it takes one"
            )
        self._layer_count = len(layers)
        stream = _blocks.stream_of(layers[0].device)
        self._blocks = (
            _blocks.HostBlocks(layers)
            if stream is None
            else _blocks.DeviceBlocks(layers, self._part, stream, self._options.staging_bytes)
        )

    @property
    def _part(self) -> int:
        """Blocks of a chunk."""
        return self._options.chunk_tokens // self._options.block_size

    # ---- The store

    def _space(self, plan: StepPlan, salt: bytes) -> quire.ChunkSpace:
        if self._store is None:
            # RAM of this process is of use for the scheduler only if it is the same process.
            shared = plan.process == os.getpid()
            self._is_apart = not shared
            self._store = open_store(self._options, with_ram=shared)
        if self._passport != plan.passport:
            self._passport = plan.passport
            self._spaces.clear()
        space = self._spaces.pop(salt, None) or self._store.space(self._passport, salt=salt)
        self._spaces[salt] = space
        while len(self._spaces) > SPACES_MAX:
            self._spaces.pop(next(iter(self._spaces)))
        return space

    # ---- Loads

    def load(self, plan: StepPlan) -> None:
        """Fills all blocks of the step. What cannot be filled is a bad block."""
        for each in plan.loads:
            try:
                self._load(plan, each)
                self._add("loaded_tokens", each.chunk_count * self._options.chunk_tokens)
            except Exception as error:
                self._errors.append(error)
                self._failed += 1
                self._bad_blocks.update(each.blocks)
                self._add("failed_loads")
            self._ended.append(each.number)

    def _load(self, plan: StepPlan, load: LoadPlan) -> None:
        if load.slots is not None:
            shared = SharedChunks(self._arena_view(plan), load.slots)
            self._registered.load(shared, load.chunk_count, load.blocks)
            return
        fetch = fetches_in_flight.pop(load.number, None)
        if fetch is None:
            raise RuntimeError(f"nothing is known of load {load.number}")
        try:
            fetched = _blocks.FetchedChunks(fetch, load.first)
            self._registered.load(fetched, load.chunk_count, load.blocks)
        finally:
            fetch.close()

    @property
    def _registered(self) -> _blocks.Blocks:
        if self._blocks is None:
            raise errors.BadStateError("QuireConnector: vLLM has registered no KV")
        return self._blocks

    def _arena_view(self, plan: StepPlan) -> ArenaView:
        if plan.arena is None:
            raise RuntimeError("the plan names slots and no shared memory")
        if self._view is None or self._arena != plan.arena:
            self._arena = plan.arena
            self._view = ArenaView(plan.process, *plan.arena, self._layer_count, self._layer_bytes)
        return self._view

    def take_bad_blocks(self) -> set[int]:
        """Blocks that were not filled, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Loads that have ended since the last call, and what has happened in the store."""
        events: list[StoreEvent] = []
        if self._tells_events and self._is_apart and self._store is not None:
            events.extend(self._store.take_events())
        if not self._ended and not events:
            return None
        ended, self._ended = self._ended, []
        return WorkerReport(ended, self._failed, events)

    # ---- Saves

    def save(self, plan: StepPlan | None) -> None:
        """Copies the blocks that this step has filled; those in the CPU's memory into the store's
        queue, those of a GPU when the GPU has copied them, which a later call finds."""
        if self._blocks is None:
            return
        self._blocks.finish()
        if plan is None:
            return
        if plan.heard < self._failed:
            # Blocks of a failed load may be in what this step has computed.
            self._add("dropped_saves", sum(each.count for each in plan.saves))
            return
        for each in plan.saves:
            self._save(plan, each)

    def _save(self, plan: StepPlan, save: SavePlan) -> None:
        space = self._space(plan, save.salt)
        wanted = space.wanted(save.tokens, extras=save.extras)
        for i in range(save.count):
            index = save.first + i
            blocks = save.blocks[i * self._part : (i + 1) * self._part]
            if wanted[index]:
                self._registered.save(blocks, functools.partial(self._put, space, save, index))
            elif save.pin:
                self._pin(space, save, index)

    def _put(
        self,
        space: quire.ChunkSpace,
        save: SavePlan,
        index: int,
        memory: quire.BlockMemory,
        blocks: list[int],
    ) -> None:
        """Gives the store a chunk. Called while others are loaded or saved, too: raises nothing."""
        try:
            space.put(
                index, save.tokens, memory=memory, blocks=blocks, extras=save.extras, ttl=save.ttl
            )
            self._add("saved_tokens", self._options.chunk_tokens)
            if save.pin:
                self._pin(space, save, index)
        except errors.FullError:
            self._add("dropped_saves")
        except Exception as error:
            self._errors.append(error)

    def _pin(self, space: quire.ChunkSpace, save: SavePlan, index: int) -> None:
        if self._store is not None:
            self._store.pin([space.keys(save.tokens, extras=save.extras)[index]])

    def close(self) -> None:
        """Writes what was saved and what is queued."""
        try:
            if self._blocks is not None:
                self._blocks.finish(wait=True)
        finally:
            self._blocks = None
            if self._store is not None:
                close_store(self._store)
                self._store = None
            self._spaces.clear()
            self._view = None

    def take_errors(self) -> list[Exception]:
        """What has failed since the last call, beside what was raised."""
        found, self._errors = self._errors, []
        return found

    # ---- Counts

    def _add(self, name: str, by: int = 1) -> None:
        self._count[name] = self._count.get(name, 0) + by

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self._count = self._count, {}
        return counts
