"""The worker side: copies verified chunks into vLLM's blocks, and full blocks into the store."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import quire
from quire import errors
from quire.vllm import _blocks
from quire.vllm._adapters import is_unchanged
from quire.vllm._arena import ArenaView, SharedChunks
from quire.vllm._base import log
from quire.vllm._events import StoreEvent
from quire.vllm._groups import NULL_BLOCK, KvGroup, KvRows
from quire.vllm._identity import is_canonical
from quire.vllm._kernel import CacheWriter, NotLearntError
from quire.vllm._options import SPACES_MAX, Options, close_store, open_store
from quire.vllm._order import KernelOrder, check_order, learn_order
from quire.vllm._plan import Handshake, LoadPlan, SavePlan, StepPlan, WorkerReport
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
        tells_layers: bool = False,
        tells_events: bool = False,
        writer_of: Callable[[str, KvRows], CacheWriter] | None = None,
    ) -> None:
        """groups: of the model, with the layers that this worker has. tells_layers: the scheduler
        knows only those of the first stage. writer_of: vLLM's operator of a layer, by its name;
        None: orders are not learnt."""
        self._options, self._rank = options, rank
        self._layer_names = [group.layer_names for group in groups]
        # Numbers, in vLLM's tables of blocks, of the groups of which it has layers.
        self._numbers = [i for i, group in enumerate(groups) if group.layer_names]
        self._groups = [groups[i] for i in self._numbers]
        self._tells_layers = tells_layers
        self._tells_events = tells_events
        self._is_apart = False  # from the scheduler, which then has another store
        self._block_count = block_count
        self._writer_of = writer_of
        self._stream: _blocks.Stream | None = None  # None: the KV is in the CPU's memory
        self._layers: list[list[Any]] = []  # vLLM's own memory, of each group, in bytes
        self._orders: list[KernelOrder | None] = []  # what was learnt of each group
        self._canonical: list[bool] = []  # whether its chunks are
        self._blocks: list[_blocks.Blocks] = []  # the same memory, in this form
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
        """vLLM's tensors, by the names of their layers. Again: what was saved from those before
        is kept.

        Raises BadArgumentError for tensors that are not pages of the size that vLLM told, or not on
        one device that the connector knows.
        """
        for each in self._blocks:
            each.finish(wait=True)
        self._layers = [
            [self._pages(caches, group, name) for name in group.layer_names]
            for group in self._groups
        ]
        devices = {str(each.device) for layers in self._layers for each in layers}
        if not devices:
            return  # a stage without layers that have KV
        if len(devices) != 1:
            raise errors.BadArgumentError(
                f"QuireConnector: the KV is on the devices {sorted(devices)}; it takes one"
            )
        self._orders = [None] * len(self._groups)
        self._stream = _blocks.stream_of(self._layers[0][0].device)
        if self._writer_of is not None:
            self._orders = [
                None if group.state else self._learn(group, layers, self._writer_of)
                for group, layers in zip(self._groups, self._layers, strict=True)
            ]
        self._make_blocks([each is not None for each in self._orders])

    def _learn(
        self,
        group: KvGroup,
        layers: Sequence[Any],
        writer_of: Callable[[str, KvRows], CacheWriter],
    ) -> KernelOrder | None:
        """The order of a group's blocks, the same one in all layers; None: they have none."""
        names, rows = group.layer_names, group.rows
        try:
            if rows is None:
                raise NotLearntError("a block has something else than keys and values")
            if self._stream is None and not all(each[0].is_contiguous() for each in layers):
                raise NotLearntError("a block has gaps")
            order = learn_order(writer_of(names[0], rows), layers[0], group, rows)
            for name, pages in zip(names, layers, strict=True):
                check_order(order, writer_of(name, rows), pages, group, rows)
        except Exception as error:  # whatever vLLM's operator raises
            log.warning(
                "QuireConnector: the order within blocks of %s and others is not known (%s); their "
                "chunks are found by processes of the same kernel and size of blocks only",
                names[0],
                error,
            )
            return None
        log.info("QuireConnector: the order within blocks of %s and others is learnt", names[0])
        return order

    def handshake(self) -> Handshake | None:
        """What the scheduler has to know before the first request; None: nothing."""
        if not self._tells_layers and all(each is None for each in self._orders):
            return None
        return Handshake(self._rank, self._layer_names, self._orders)

    def _make_blocks(self, canonical: list[bool]) -> None:
        """Blocks as the places that canonical chunks, or opaque ones, of each group lie in."""
        self._canonical, self._blocks = canonical, []
        staging = self._options.staging_bytes // len(self._groups)
        for number, (group, layers) in enumerate(zip(self._groups, self._layers, strict=True)):
            order = self._orders[number] if canonical[number] else None
            self._blocks.append(
                _blocks.HostBlocks(layers, group.part, order)
                if self._stream is None
                else _blocks.DeviceBlocks(layers, group.part, self._stream, staging, order)
            )

    def _follow(self, plan: StepPlan) -> None:
        """The scheduler says which form chunks have. It has heard of the orders before the first
        step, or never."""
        canonical = [is_canonical(each) for each in plan.passports[self._rank]]
        lacks = [each is None for each in self._orders]
        if any(each and lack for each, lack in zip(canonical, lacks, strict=True)):
            raise errors.BadStateError(
                "QuireConnector: vLLM has registered blocks again, and their order is not known "
                "any more"
            )
        if self._blocks and canonical != self._canonical:
            self._make_blocks(canonical)

    def _pages(self, caches: Mapping[str, Any], group: KvGroup, name: str) -> Any:
        """A layer's tensor as bytes [blocks, ...]."""
        import torch

        tensor = caches.get(name)
        if tensor is None:
            raise errors.BadArgumentError(f"QuireConnector: vLLM registers no KV of {name}")
        if not isinstance(tensor, torch.Tensor):
            raise errors.BadArgumentError(
                f"QuireConnector: vLLM registers the KV of {name} as a {type(tensor).__name__}, "
                "not as a tensor"
            )
        pages = tensor.view(torch.uint8)
        if group.state:
            pages = self._with_padding(pages, group)
        elif pages.shape[0] > self._block_count and pages.shape[0] % self._block_count == 0:
            # The kernel has smaller blocks.
            part = pages.shape[0] // self._block_count
            pages = pages.view(self._block_count, part, *pages.shape[1:])
        elif pages.shape[0] != self._block_count and pages.dim() > 1:
            pages = pages.transpose(0, 1)  # keys of all blocks, then values
        if pages.shape[0] != self._block_count or pages[0].numel() != group.page_bytes:
            raise errors.BadArgumentError(
                f"QuireConnector: the KV of {name} has the shape {tuple(tensor.shape)}, not "
                f"{self._block_count} blocks of {group.page_bytes} bytes"
            )
        return pages

    def _with_padding(self, pages: Any, group: KvGroup) -> Any:
        """Blocks of states [blocks, ...] with some of what follows each of them in its page."""
        is_whole = pages[0].is_contiguous() and pages[0].numel() <= group.page_bytes
        if is_whole and group.page_bytes <= pages.stride(0):
            return pages.as_strided(
                (len(pages), group.page_bytes), (pages.stride(0), 1), pages.storage_offset()
            )
        return pages  # which is refused

    # ---- The store

    def _group_spaces(self, plan: StepPlan, salt: bytes) -> list[quire.ChunkSpace]:
        """One for each group that it has layers of."""
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
        fetches = fetches_in_flight.pop(load.number, [])
        try:
            if len(self._blocks) != len(self._groups):
                raise errors.BadStateError("QuireConnector: vLLM has registered no KV")
            self._follow(plan)
            if not load.places:
                raise RuntimeError(f"load {load.number} is lost")
            places = load.places[self._rank]
            targets = [load.groups[i] for i in self._numbers]
            for number, (place, target) in enumerate(zip(places, targets, strict=True)):
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
        if plan is None or not plan.saves or not self._blocks:
            return
        self._follow(plan)
        for save in plan.saves:
            # Blocks of a failed load may be in what this step has computed, unless requests wait
            # for their loads.
            if plan.heard < self._failed and not plan.waits_for_loads:
                self._add("dropped_saves", save.count * len(self._groups))
                continue
            try:
                self._save(plan, save)
            except Exception as error:  # others are saved
                self._errors.append(error)

    def _save(self, plan: StepPlan, save: SavePlan) -> None:
        if save.adapter is not None and not is_unchanged(*save.adapter):
            self._add("dropped_saves", save.count * len(self._groups))
            return
        spaces = self._group_spaces(plan, save.salt)
        own = [save.blocks[i] for i in self._numbers]
        for group, blocks, space, filled in zip(
            self._groups, self._blocks, spaces, own, strict=True
        ):
            wanted = space.wanted(save.tokens, extras=save.extras)
            pinned = space.keys(save.tokens, extras=save.extras) if save.pin else []
            lead = group.never_needed
            for index in range(save.first, save.first + save.count):
                begin = (index - save.first) * group.part
                chunk = filled[begin + lead : begin + group.part]
                if group.window is not None and (
                    index < save.windows_first or NULL_BLOCK in chunk
                ):
                    continue  # they are not there any more, or have not all been filled
                is_last = index == save.first + save.count - 1
                if group.state and not (save.ends_there and is_last):
                    continue  # a block has the state of another token, or none
                pin = pinned[index : index + 1]
                if wanted[index]:
                    put = functools.partial(self._put, space, save, index, pin)
                    blocks.save(chunk, put, lead)
                else:
                    self._pin(pin)

    def _put(
        self,
        space: quire.ChunkSpace,
        save: SavePlan,
        index: int,
        pin: list[str],
        memory: quire.BlockMemory,
        blocks: list[int],
    ) -> None:
        """Gives the store a chunk; pin: its key, if it is pinned. Called while others are loaded or
        saved, too: raises nothing."""
        try:
            space.put(
                index, save.tokens, memory=memory, blocks=blocks, extras=save.extras, ttl=save.ttl
            )
            self._add("saved_tokens", self._options.chunk_tokens)
            self._pin(pin)
        except errors.FullError:
            self._add("dropped_saves")
        except Exception as error:
            self._errors.append(error)

    def _pin(self, keys: list[str]) -> None:
        if keys and self._store is not None:
            self._store.pin(keys)

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
