"""The worker side: copies verified chunks into vLLM's blocks, and full blocks into the store."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import quire
from quire import errors
from quire.vllm import _blocks
from quire.vllm._arena import ArenaView, SharedChunks
from quire.vllm._events import StoreEvent
from quire.vllm._groups import NULL_BLOCK, KvGroup
from quire.vllm._options import SPACES_MAX, Options, close_store, open_store
from quire.vllm._plan import LoadPlan, SavePlan, StepPlan, WorkerReport
from quire.vllm._scheduler import fetches_in_flight

__all__ = ["WorkerSide"]


class WorkerSide:
    """Everything that vLLM's model runner asks. One thread calls it."""

    def __init__(
        self,
        options: Options,
        groups: Sequence[KvGroup],
        block_count: int,
        *,
        rank: int = 0,
        tells_events: bool = False,
    ) -> None:
        self._options, self._groups, self._rank = options, list(groups), rank
        self._tells_events = tells_events
        self._is_apart = False  # from the scheduler, which then has another store
        self._block_count = block_count
        self._blocks: list[_blocks.Blocks] = []  # vLLM's own memory, of each group
        self._store: quire.ChunkStore | None = None
        self._passports: list[dict[str, Any]] = []
        self._spaces: dict[bytes, list[quire.ChunkSpace]] = {}
        self._views: list[ArenaView] = []
        self._arenas: list[tuple[int, int]] = []
        self._bad_blocks: set[int] = set()
        self._ended: list[tuple[int, int]] = []
        self._received: set[str] = set()  # requests whose loads have ended
        self._lost: set[str] = set()  # those whose loads have failed
        self._lost_untold: list[str] = []
        self._failed = 0
        self._errors: list[Exception] = []
        self._count: dict[str, int] = {}

    # ---- Memory

    def register(self, caches: Mapping[str, Any]) -> None:
        """vLLM's tensors, by the names of their layers.

        Raises BadArgumentError for tensors that are not pages of the size that vLLM told, or not on
        one device that the connector knows.
        """
        layers = [
            [self._pages(caches, group, name) for name in group.layer_names]
            for group in self._groups
        ]
        devices = {str(each.device) for group in layers for each in group}
        if len(devices) != 1:
            raise errors.BadArgumentError(
                f"QuireConnector: the KV is on the devices {sorted(devices)}; it takes one"
            )
        stream = _blocks.stream_of(layers[0][0].device)
        for group, each in zip(self._groups, layers, strict=True):
            staging = self._options.staging_bytes // len(self._groups)
            self._blocks.append(
                _blocks.HostBlocks(each, group.part)
                if stream is None
                else _blocks.DeviceBlocks(each, group.part, stream, staging)
            )

    def _pages(self, caches: Mapping[str, Any], group: KvGroup, name: str) -> Any:
        """A layer's tensor as bytes [blocks, ...]."""
        import torch

        tensor = caches.get(name)
        if tensor is None:
            raise errors.BadArgumentError(f"QuireConnector: vLLM registers no KV of {name}")
        pages = tensor.view(torch.uint8)
        if pages.shape[0] != self._block_count and pages.dim() > 1:
            pages = pages.transpose(0, 1)  # keys of all blocks, then values
        if pages.shape[0] != self._block_count or pages[0].numel() != group.page_bytes:
            raise errors.BadArgumentError(
                f"QuireConnector: the KV of {name} has the shape {tuple(tensor.shape)}, not "
                f"{self._block_count} blocks of {group.page_bytes} bytes"
            )
        return pages

    # ---- The store

    def _group_spaces(self, plan: StepPlan, salt: bytes) -> list[quire.ChunkSpace]:
        """One for each group."""
        if self._store is None:
            # RAM of this process is of use for the scheduler only if it is the same process.
            shared = plan.process == os.getpid()
            self._is_apart = not shared
            self._store = open_store(self._options, with_ram=shared)
        passports = plan.passports[self._rank]
        if self._passports != passports:
            self._passports = passports
            self._spaces.clear()
        spaces = self._spaces.pop(salt, None)
        if spaces is None:
            spaces = [self._store.space(each, salt=salt) for each in passports]
        self._spaces[salt] = spaces
        while len(self._spaces) > SPACES_MAX:
            self._spaces.pop(next(iter(self._spaces)))
        return spaces

    # ---- Loads

    def load(self, plan: StepPlan) -> None:
        """Fills all blocks of the step. A load that fails is reported: by the request that waits
        for it, else by its blocks."""
        for each in plan.loads:
            try:
                self._load(plan, each)
                chunks = max(group.chunk_count for group in each.groups)
                self._add("loaded_tokens", chunks * self._options.chunk_tokens)
            except Exception as error:
                self._errors.append(error)
                self._failed += 1
                self._add("failed_loads")
                if each.request is not None:
                    self._lost.add(each.request)
                    self._lost_untold.append(each.request)
                else:
                    self._bad_blocks.update(each.groups[0].blocks)
            if each.request is not None:
                self._received.add(each.request)
            self._ended.append((each.number, self._rank))

    def _load(self, plan: StepPlan, load: LoadPlan) -> None:
        if len(self._blocks) != len(self._groups):
            raise errors.BadStateError("QuireConnector: vLLM has registered no KV")
        fetches = fetches_in_flight.pop(load.number, [])
        try:
            if not load.places:
                raise RuntimeError(f"load {load.number} is lost")
            places = load.places[self._rank]
            for number, (place, target) in enumerate(zip(places, load.groups, strict=True)):
                source: _blocks.Source
                if place.slots is not None:
                    source = SharedChunks(self._arena_views(plan)[number], place.slots)
                elif fetches:
                    source = _blocks.FetchedChunks(fetches[number], place.first)
                else:
                    raise RuntimeError(f"nothing is known of load {load.number}")
                self._blocks[number].load(source, target.chunk_count, target.blocks, target.lead)
        finally:
            for fetch in fetches:
                fetch.close()

    def _arena_views(self, plan: StepPlan) -> list[ArenaView]:
        """One for each group."""
        if plan.arenas is None:
            raise RuntimeError("the plan names slots and no shared memory")
        arenas = plan.arenas[self._rank]
        if self._arenas != arenas:
            self._views = [
                ArenaView(plan.process, *arena, len(group.layer_names), group.layer_bytes)
                for arena, group in zip(arenas, self._groups, strict=True)
            ]
            self._arenas = arenas
        return self._views

    def take_bad_blocks(self) -> set[int]:
        """Blocks that were not filled, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests that waited for a load that has ended since the last call, and those of them
        that have not got it."""
        received, self._received = self._received, set()
        lost, self._lost = self._lost, set()
        return received, lost

    def take_report(self) -> WorkerReport | None:
        """Loads that have ended since the last call, and what has happened in the store."""
        events: list[StoreEvent] = []
        if self._tells_events and self._is_apart and self._store is not None:
            events.extend(self._store.take_events())
        if not self._ended and not events:
            return None
        ended, self._ended = self._ended, []
        lost, self._lost_untold = self._lost_untold, []
        return WorkerReport(ended, self._failed, lost, events)

    # ---- Saves

    def save(self, plan: StepPlan | None) -> None:
        """Copies the blocks that this step has filled; those in the CPU's memory into the store's
        queue, those of a GPU when the GPU has copied them, which a later call finds."""
        for each in self._blocks:
            each.finish()
        if plan is None or not self._blocks:
            return
        for save in plan.saves:
            # Blocks of a failed load may be in what this step has computed, unless requests wait
            # for their loads.
            if plan.heard < self._failed and not plan.waits_for_loads:
                self._add("dropped_saves", save.count * len(self._groups))
            else:
                self._save(plan, save)

    def _save(self, plan: StepPlan, save: SavePlan) -> None:
        spaces = self._group_spaces(plan, save.salt)
        for group, blocks, space, filled in zip(
            self._groups, self._blocks, spaces, save.blocks, strict=True
        ):
            wanted = space.wanted(save.tokens, extras=save.extras)
            lead = group.never_needed
            for index in range(save.first, save.first + save.count):
                begin = (index - save.first) * group.part
                chunk = filled[begin + lead : begin + group.part]
                if group.window is not None and (
                    index < save.windows_first or NULL_BLOCK in chunk
                ):
                    continue  # they are not there any more, or have not all been filled
                if wanted[index]:
                    blocks.save(chunk, functools.partial(self._put, space, save, index), lead)
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
            for each in self._blocks:
                each.finish(wait=True)
        finally:
            self._blocks.clear()
            if self._store is not None:
                close_store(self._store)
                self._store = None
            self._spaces.clear()
            self._views.clear()

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
