"""The worker side: copies verified chunks into vLLM's blocks, and full blocks into the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import quire
from quire import errors
from quire.vllm._arena import ArenaView
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
        self._layers: list[Any] = []  # of a layer: uint8 [blocks, ...], vLLM's own memory
        self._memory: quire.BlockMemory | None = None
        self._store: quire.ChunkStore | None = None
        self._passport: Mapping[str, Any] = {}
        self._spaces: dict[bytes, quire.ChunkSpace] = {}
        self._view: ArenaView | None = None
        self._arena: tuple[int, int] | None = None
        self._bad_blocks: set[int] = set()
        self._ended: list[int] = []
        self._failed = 0
        self._count: dict[str, int] = {}

    # ---- Memory

    def register(self, caches: Mapping[str, Any]) -> None:
        """vLLM's tensors, by the names of their layers.

        Raises BadArgumentError for tensors that are not pages of the size that vLLM told.
        """
        import torch

        layers = []
        for name in layer_order(list(caches)):
            tensor = caches[name]
            if tensor.device.type != "cpu":
                raise errors.BadArgumentError(
                    f"QuireConnector: the KV of {name} is on {tensor.device}; it takes that of "
                    "vLLM's CPU build only"
                )
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
        self._layers = layers
        self._memory = quire.BlockMemory({("latent", i): each for i, each in enumerate(layers)})

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

    def load(self, plan: StepPlan) -> list[Exception]:
        """Fills all blocks of the step. What cannot be filled is a bad block; why."""
        failures: list[Exception] = []
        for each in plan.loads:
            try:
                self._load(plan, each)
                self._add("loaded_tokens", each.chunk_count * self._options.chunk_tokens)
            except Exception as error:
                failures.append(error)
                self._failed += 1
                self._bad_blocks.update(each.blocks)
                self._add("failed_loads")
            self._ended.append(each.number)
        return failures

    def _load(self, plan: StepPlan, load: LoadPlan) -> None:
        assert self._memory is not None
        if load.slots is not None:
            self._load_shared(plan, load)
            return
        fetch = fetches_in_flight.pop(load.number, None)
        if fetch is None:
            raise RuntimeError(f"nothing is known of load {load.number}")
        try:
            for layer in range(len(self._layers)):
                fetch.scatter(
                    layer, self._memory, load.blocks, first=load.first, count=load.chunk_count
                )
        finally:
            fetch.close()

    def _load_shared(self, plan: StepPlan, load: LoadPlan) -> None:
        import torch

        if plan.arena is None or load.slots is None:
            raise RuntimeError("the plan names slots and no shared memory")
        if self._view is None or self._arena != plan.arena:
            self._arena = plan.arena
            self._view = ArenaView(plan.process, *plan.arena, len(self._layers), self._layer_bytes)
        blocks = torch.tensor(load.blocks)
        for number, pages in enumerate(self._layers):
            rows = torch.from_numpy(self._view.layer(load.slots, number))
            pages[blocks] = rows.reshape(len(load.blocks), *pages.shape[1:])

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

    def save(self, plan: StepPlan) -> None:
        """Copies the blocks that this step has filled into the store's queue."""
        if plan.heard < self._failed:
            # Blocks of a failed load may be in what this step has computed.
            self._add("dropped_saves", sum(each.count for each in plan.saves))
            return
        for each in plan.saves:
            self._save(plan, each)

    def _save(self, plan: StepPlan, save: SavePlan) -> None:
        assert self._memory is not None
        space = self._space(plan, save.salt)
        wanted = space.wanted(save.tokens, extras=save.extras)
        for i in range(save.count):
            index = save.first + i
            if not wanted[index]:
                continue
            try:
                space.put(
                    index,
                    save.tokens,
                    memory=self._memory,
                    blocks=save.blocks[i * self._part : (i + 1) * self._part],
                    extras=save.extras,
                    ttl=save.ttl,
                )
            except errors.FullError:
                self._add("dropped_saves")
            else:
                self._add("saved_tokens", self._options.chunk_tokens)
        if save.pin and self._store is not None:
            keys = space.keys(save.tokens, extras=save.extras)
            self._store.pin(keys[save.first : save.first + save.count])

    def close(self) -> None:
        """Writes what is queued."""
        if self._store is not None:
            close_store(self._store)
            self._store = None
        self._spaces.clear()
        self._view = None

    # ---- Counts

    def _add(self, name: str, by: int = 1) -> None:
        self._count[name] = self._count.get(name, 0) + by

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self._count = self._count, {}
        return counts
