"""The scheduler side: what is promised to vLLM, and what the worker shall load and save.

A promise is kept: chunks are verified in this process's memory before vLLM hears of them, and stay
there (the fetch is held, or a slot of shared memory leased) until the worker has copied them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import quire
from quire import errors
from quire._numbers import milliseconds
from quire.vllm._adapters import Adapter, Adapters
from quire.vllm._arena import Arena, Slot
from quire.vllm._base import log
from quire.vllm._events import ChunkEvents, StoreEvent
from quire.vllm._groups import NULL_BLOCK, KvGroup
from quire.vllm._lookup import Lookup
from quire.vllm._options import SPACES_MAX, Options
from quire.vllm._parts import Part
from quire.vllm._plan import ChunkPlace, GroupBlocks, Handshake, LoadPlan, SavePlan, StepPlan

__all__ = ["SchedulerSide", "fetches_in_flight"]

# A waiting request is asked for in a loop that does nothing else while no other request runs. Where
# others do, their next step waits no longer than this, however many requests are asked for.
_POLL_SECONDS = 0.001

#: Fetches on their way to a worker of this process, of each group, by the number of the load.
fetches_in_flight: dict[int, list[quire.ChunkFetch]] = {}
_load_numbers = itertools.count(1)


@dataclasses.dataclass
class _Promise:
    """What vLLM was told: chunks [first, border) of the request's chain. begins, slots: of each
    part, the first chunk to be loaded and where it and those after it lie. tiers: of chunks from
    `first` on."""

    first: int
    border: int
    lookup: Lookup
    begins: list[int]
    slots: list[list[Slot]] | None
    tiers: list[str]


@dataclasses.dataclass
class _Lease:
    """Slots of each group that a plan has given to a worker, and when."""

    slots: list[list[Slot]]
    begin: float


@dataclasses.dataclass
class _Request:
    salt: bytes
    request: Any
    adapter: Adapter | None = None  # its LoRA
    load: bool = True
    save: bool = True
    ttl: float = 0.0
    pin: bool = False
    lookup: Lookup | None = None
    has_no_room: bool = False  # shared memory was full for it, which is counted
    missing_chunk: int | None = None  # was not stored when it was looked for
    promise: _Promise | None = None
    granted: _Promise | None = None  # vLLM has allocated blocks for it; goes into the next plan
    tiers: list[str] = dataclasses.field(default_factory=list)  # of the load taken last, by chunk
    loaded: int = 0  # chunks before this one were loaded, windows in part
    saved: int = 0  # chunks before this one were handed to the worker


class SchedulerSide:
    """Everything that vLLM's scheduler asks. One thread calls it.

    groups: as vLLM tells the scheduler. Where there are pipeline stages, these are the first
    stage's, and the others' have other layers. parts_of: makes the parts, given the groups of each
    worker by rank; there are worker_count. is_told: the workers tell their layers; before that
    there are no parts, and nothing is kept.
    """

    def __init__(
        self,
        store: quire.ChunkStore,
        options: Options,
        groups: Sequence[KvGroup],
        parts_of: Callable[[Sequence[Sequence[KvGroup]]], list[Part]],
        *,
        worker_count: int = 1,
        is_told: bool = False,
        clock: Callable[[], float] = time.monotonic,
        events: ChunkEvents | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._store, self._options = store, options
        self._groups = list(groups)
        self._parts_of, self._worker_count = parts_of, worker_count
        self._parts: list[Part] = []
        self._parts_by_rank: list[list[int]] = [[] for _ in range(worker_count)]
        self._base_passports: list[dict[str, Any]] = []
        self._passports: list[dict[str, Any]] = []
        self._arenas: list[Arena] | None = None
        self._first_part = 0  # what events and tiers are told of
        self._told: dict[int, Handshake] = {}  # by rank
        self._is_stopped = False  # nothing is stored or found any more
        self._silence = "no worker has told which layers it holds" if is_told else None
        self._resets = 0
        self._chunk = options.chunk_tokens
        self._events = events
        self._adapters = adapters or Adapters()
        self._requests: dict[str, _Request] = {}
        self._spaces: dict[bytes, list[quire.ChunkSpace]] = {}
        self._clock = clock
        # By the number of the load and the rank, oldest first.
        self._leases: dict[tuple[int, int], _Lease] = {}
        self._count: dict[str, int] = {}
        self._errors: list[Exception] = []
        self._loads: list[LoadPlan] = []  # of requests that wait for them; go into the next plan
        self._in_flight: set[int] = set()  # loads with fetches that a worker of this process takes
        self._patience = _POLL_SECONDS  # that is left to the next plan
        self._heard = 0
        if not is_told:
            self._make_parts([self._groups] * worker_count)

    @property
    def waits_for_loads(self) -> bool:
        """Whether a request is computed only after its load has ended everywhere. Where one worker
        loads one group without a window, vLLM takes a list of blocks that were not filled, and
        computes from the first one on. Else it cannot: what is before may be outside of a window,
        and other workers have computed from them already."""
        return self._worker_count * len(self._groups) > 1 or self._groups[0].window is not None

    def _make_parts(self, groups: Sequence[Sequence[KvGroup]]) -> None:
        """groups: of each worker, by rank."""
        self._parts = parts = self._parts_of(groups)
        for i, part in enumerate(parts):
            self._parts_by_rank[part.rank].append(i)
        self._base_passports = [part.passport for part in parts]
        self._passports = list(self._base_passports)
        arenas = [part.arena for part in parts if part.arena is not None]
        self._arenas = arenas or None
        # Events name blocks of this group, on the first worker that has some of it.
        group = next((i for i, each in enumerate(self._groups) if each.window is None), 0)
        self._first_part = next(i for i, part in enumerate(parts) if part.number == group)

    def hear(self, told: Sequence[Handshake]) -> None:
        """What the workers say once they have registered their KV: which layers they hold, where
        that is not known; and the order of their blocks: chunks of such a group are canonical from
        now on. Said again it changes nothing.

        Raises BadStateError for something else than was said before: nothing is stored or found
        any more. The same once there was a request: chunks stay as they are.
        """
        known = [each for each in told if each.rank in self._told]
        if not all(each.is_same(self._told[each.rank]) for each in known):
            self._stop()
            raise errors.BadStateError(
                "a worker tells of other blocks than before; nothing is stored or found any more"
            )
        if self._parts and len(known) == len(told):
            return
        if self._requests or self._spaces or self._resets:
            raise errors.BadStateError("a worker tells of its blocks after the start")
        if not self._parts and not self._hear_layers(told):
            return
        self._told.update((each.rank, each) for each in told)
        for each in told:
            for i, order in zip(self._parts_by_rank[each.rank], each.orders, strict=True):
                part = self._parts[i]
                if order is None or part.canonical is None:
                    continue
                self._base_passports[i] = self._passports[i] = part.canonical
                if part.arena is not None:
                    part.arena.set_order(order)

    def _stop(self) -> None:
        self._is_stopped = True
        for state in self._requests.values():
            self._let_go(state)
            state.load = state.save = False

    def _hear_layers(self, told: Sequence[Handshake]) -> bool:
        """Whether all workers have told which layers they hold."""
        names = {each.rank: each.layer_names for each in told}
        silent = [rank for rank in range(self._worker_count) if rank not in names]
        if silent:
            self._silence = f"the workers {silent} have not told which layers they hold"
            return False
        self._make_parts(
            [
                [
                    dataclasses.replace(group, layer_names=tuple(own))
                    for group, own in zip(self._groups, names[rank], strict=True)
                ]
                for rank in range(self._worker_count)
            ]
        )
        self._silence = None
        return True

    # ---- Requests

    def add(self, request: Any) -> None:
        """vLLM has a new request.

        Raises BadArgumentError for a wrong parameter: such a request has nothing to do with the
        store.
        """
        self.finish(request.request_id)  # one of the same name has no end of its own
        state = _Request(salt=(request.cache_salt or "").encode(), request=request)
        state.load = state.save = False
        self._requests[request.request_id] = state
        if self._silence is not None:
            log.error("QuireConnector: nothing is stored or found: %s", self._silence)
            self._silence = None
        usable = request.prompt_token_ids is not None
        if request.lora_request:
            state.adapter = self._adapters.of(request.lora_request)
            usable &= state.adapter is not None
        # Where a prompt has both, its ids stand for nothing at the places of embeddings.
        usable &= getattr(request, "prompt_embeds", None) is None
        skip, state.ttl, state.pin = _parameters(getattr(request, "kv_transfer_params", None))
        if usable and self._parts and not self._is_stopped:
            # vLLM computes all tokens of such a request, for logits of its prompt.
            reads = not getattr(request, "skip_reading_prefix_cache", False)
            state.load = reads and skip not in (True, "load")
            state.save = skip not in (True, "save")

    def finish(self, request_id: str) -> None:
        """vLLM has no such request any more."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._let_go(state)

    def _state(self, request: Any) -> _Request:
        if request.request_id not in self._requests:
            self.add(request)
        return self._requests[request.request_id]

    def _withdraw(self, state: _Request) -> None:
        """Ends a promise that no plan has."""
        for promise in (state.promise, state.granted):
            if promise is not None and promise.slots is not None:
                self._release(range(len(self._parts)), promise.slots)
        state.promise = state.granted = None

    def _let_go(self, state: _Request) -> None:
        """Ends such a promise and what is looked for, which hold memory."""
        self._withdraw(state)
        self._drop_lookup(state)

    def _drop_lookup(self, state: _Request) -> None:
        if state.lookup is not None:
            state.lookup.close()
        state.lookup = None

    def _release(self, parts: Iterable[int], slots: list[list[Slot]]) -> None:
        if self._arenas is not None:
            for part, each in zip(parts, slots, strict=True):
                self._arenas[part].release(each)

    # ---- Spaces

    def _space(self, salt: bytes, part: int) -> quire.ChunkSpace:
        spaces = self._spaces.pop(salt, None)
        if spaces is None:
            spaces = [self._store.space(each, salt=salt) for each in self._passports]
        self._spaces[salt] = spaces  # the last one used
        while len(self._spaces) > SPACES_MAX:
            self._spaces.pop(next(iter(self._spaces)))
        return spaces[part]

    def _extras(self, state: _Request, chunk_count: int) -> list[bytes]:
        """Digests of what else than tokens the chunks stand for: a LoRA, images and the like."""
        lora = b""
        if state.adapter is not None:
            assert state.adapter.digest is not None
            lora = b"\0lora\0" + state.adapter.digest  # no identifier begins like that
        extras = [lora] * chunk_count
        for feature in getattr(state.request, "mm_features", None) or ():
            offset, length = feature.mm_position.offset, feature.mm_position.length
            for chunk in range(offset // self._chunk, (offset + length - 1) // self._chunk + 1):
                if chunk < chunk_count:
                    place = offset - chunk * self._chunk
                    extras[chunk] += f"{feature.identifier}@{place}\0".encode()
        while extras and not extras[-1]:
            extras.pop()
        return extras

    def _knows_adapter(self, state: _Request, seconds: float) -> bool:
        """Whether the files of the request's LoRA are digested. Waits so long at most. One that has
        no digest has nothing to do with the store."""
        if state.adapter is None:
            return True
        if not state.adapter.wait(seconds):
            return False
        if state.adapter.digest is None:
            self._let_go(state)
            state.load = state.save = False
        return True

    # ---- Promises

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens beyond `computed` that a load would bring; None: ask again."""
        state = self._state(request)
        if state.load and not self._knows_adapter(state, self._patience):
            self._patience = 0.0
            return None
        ids = request.all_token_ids
        # One token at least is left to compute.
        chunk_count = (len(ids) - 1) // self._chunk
        first = computed // self._chunk
        if not state.load or computed % self._chunk or chunk_count <= first:
            self._let_go(state)
            return 0
        if state.missing_chunk is not None:
            if state.saved > state.missing_chunk:
                state.missing_chunk = None  # the request itself has put it there since
            elif first >= state.missing_chunk:
                self._let_go(state)
                return 0
        promise = state.promise
        if promise is not None and promise.first == first and promise.border <= chunk_count:
            return (promise.border - first) * self._chunk
        self._withdraw(state)
        lookup = state.lookup
        if lookup is not None and (first < lookup.first or chunk_count < lookup.border):
            self._drop_lookup(state)  # blocks that vLLM had are gone
        if state.lookup is None:
            state.missing_chunk = None
            state.lookup = self._start(state, ids, chunk_count, first)
        return self._answer(state, state.lookup, chunk_count, first)

    def _start(self, state: _Request, ids: Any, chunk_count: int, first: int) -> Lookup:
        tokens = np.fromiter(ids[: chunk_count * self._chunk], np.int32, chunk_count * self._chunk)
        extras = self._extras(state, chunk_count)

        def fetch(part: int, first: int, border: int) -> quire.ChunkFetch:
            return self._space(state.salt, part).fetch(
                tokens[: border * self._chunk],
                first_chunk=first,
                timeout=self._options.load_timeout,
                extras=extras[:border],
            )

        self._add("lookups")
        return Lookup([part.group for part in self._parts], fetch, first, chunk_count)

    def _answer(
        self, state: _Request, lookup: Lookup, chunk_count: int, first: int
    ) -> int | None:
        if not lookup.poll(self._patience):
            self._patience = 0.0
            return None
        if lookup.missing is not None and state.missing_chunk is None:
            state.missing_chunk = lookup.missing
            self._add("misses", reason=lookup.miss)
        room = self._room(state, lookup, first)
        if room is None:
            return None  # a shorter one is looked for
        if lookup.border <= first or not room:
            self._drop_lookup(state)
            state.missing_chunk = first
            return 0
        border = lookup.border
        begins = [lookup.begin(part, first) for part in range(len(self._parts))]
        fetch, fetch_first = lookup.fetch(self._first_part)
        # Where the model has nothing but states, one stands for all tokens before it.
        tiers = [str(fetch.tier(max(0, i - fetch_first))) for i in range(first, border)]
        keys = self._learn(state, first, border - first)
        self.note([("stored", tier, key) for tier, key in zip(tiers, keys, strict=False)])
        # Last: what fails behind it would keep the slots for ever.
        slots = None if self._arenas is None else self._lease(self._arenas, lookup, begins)
        state.promise = _Promise(first, border, lookup, begins, slots, tiers)
        return (border - first) * self._chunk

    def _room(self, state: _Request, lookup: Lookup, first: int) -> bool | None:
        """Whether shared memory has room for what was found; None: for a part of it, which has to
        be looked for."""
        if self._arenas is None or lookup.border <= first:
            return True
        self._end_overdue_leases()
        free = [arena.free_count for arena in self._arenas]
        lacks = [i for i, each in enumerate(free) if lookup.border - lookup.begin(i, first) > each]
        if not lacks:
            return True
        if not state.has_no_room:
            state.has_no_room = True
            self._add("no_room")
        leads = [free[i] for i in lacks if self._parts[i].group.window is None]
        if not leads or min(leads) == 0:
            return False
        lookup.limit(first + min(leads))
        return self._room(state, lookup, first) if lookup.poll(0.0) else None

    def _lease(
        self, arenas: Sequence[Arena], lookup: Lookup, begins: Sequence[int]
    ) -> list[list[Slot]]:
        """Copies what was found to shared memory, which has room for it."""
        slots: list[list[Slot]] = []
        try:
            for part, (arena, begin) in enumerate(zip(arenas, begins, strict=True)):
                fetch, first = lookup.fetch(part)
                slots.append(arena.lease(fetch, begin - first, lookup.border - begin))
        except BaseException:
            self._release(range(len(slots)), slots)
            raise
        return slots

    def spoil(self, request_id: str, blocks: Sequence[list[int]]) -> None:
        """vLLM counts on a load into these blocks that cannot be planned: the worker reports it,
        and vLLM computes them."""
        state = self._requests.get(request_id)
        if state is not None:
            self._let_go(state)  # no later plan may load into what is computed
        self._loads.append(self._lost_load(request_id, blocks))

    def _lost_load(self, request_id: str, blocks: Sequence[list[int]]) -> LoadPlan:
        self._add("spoiled")
        groups = [GroupBlocks(0, 0, list(each)) for each in blocks]
        request = request_id if self.waits_for_loads else None
        return LoadPlan(next(_load_numbers), request, groups, [])

    def allocated(self, request: Any, blocks: Sequence[list[int]], external: int) -> None:
        """vLLM has blocks for `external` tokens that were promised; 0: it takes none, or has taken
        them in a call before.

        Raises RuntimeError for tokens that were not promised.
        """
        state = self._state(request)
        if external == 0:
            if state.granted is None:
                self._let_go(state)
            return
        promise = state.promise
        border = 0 if promise is None else promise.first + external // self._chunk
        if promise is None or border > promise.border or external % self._chunk:
            raise RuntimeError(f"vLLM takes {external} tokens that were not promised")
        if border < promise.border:
            self._shorten(promise, border)
        state.granted, state.promise = promise, None
        state.tiers = promise.tiers
        for tier in promise.tiers:
            self._add("hit_tokens", self._chunk, reason=tier)
        if self.waits_for_loads:
            self._loads.append(self._load(state, promise, blocks))

    def _shorten(self, promise: _Promise, border: int) -> None:
        """vLLM takes less. Windows before a border that was not promised were not looked for."""
        if any(group.window is not None for group in self._groups):
            raise RuntimeError(f"vLLM takes chunks to {border}; promised was {promise.border}")
        for part, slots in enumerate(promise.slots or ()):
            kept = border - promise.begins[part]
            if self._arenas is not None:
                self._arenas[part].release(slots[kept:])
            del slots[kept:]
        promise.border = border
        promise.tiers = promise.tiers[: border - promise.first]

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the load that vLLM has taken last, by tier."""
        found: dict[str, int] = {}
        for tier in self._state(request).tiers:
            found[tier] = found.get(tier, 0) + self._chunk
        return found

    # ---- Steps

    def plan(self, output: Any) -> StepPlan:
        """The plan of one step."""
        self._patience = _POLL_SECONDS
        plan = StepPlan(
            passports=self._by_rank(self._passports),
            process=os.getpid(),
            arenas=None,
            heard=self._heard,
            waits_for_loads=self.waits_for_loads,
        )
        if self._arenas is not None:
            plan.arenas = self._by_rank([(a.descriptor, a.slot_count) for a in self._arenas])
        plan.loads, self._loads = self._loads, []
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            blocks = output.kv_connector_block_state.get_block_ids(request_id)
            if state.granted is not None:
                plan.loads.append(self._load_or_lost(state, state.granted, blocks))
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            reached = computed.get(request_id, 0) + scheduled - drafts
            try:
                save = self._save(state, reached, blocks)
            except Exception as error:
                state.save = False
                self._errors.append(error)
                save = None
            if save is not None:
                plan.saves.append(save)
        return plan

    def _load_or_lost(
        self, state: _Request, promise: _Promise, blocks: Sequence[list[int]]
    ) -> LoadPlan:
        """A load that cannot be planned is in the plan as one that is lost."""
        try:
            return self._load(state, promise, blocks)
        except Exception as error:
            self._errors.append(error)
            self._let_go(state)
            return self._lost_load(state.request.request_id, blocks)

    def _by_rank(self, of_parts: Sequence[Any]) -> list[list[Any]]:
        return [[of_parts[i] for i in own] for own in self._parts_by_rank]

    def _load(
        self, state: _Request, promise: _Promise, blocks: Sequence[list[int]]
    ) -> LoadPlan:
        request_id = state.request.request_id
        border = promise.border
        # The same in all parts of a group.
        begins = {
            part.number: begin for part, begin in zip(self._parts, promise.begins, strict=True)
        }
        targets = [
            _target(group, blocks[i], begins[i], border) for i, group in enumerate(self._groups)
        ]
        if not all(targets):
            self._let_go(state)
            return self._lost_load(request_id, blocks)
        state.granted, state.lookup = None, None
        state.loaded = border
        number = next(_load_numbers)
        firsts = [
            begin - promise.lookup.fetch(part)[1] for part, begin in enumerate(promise.begins)
        ]
        fetches = promise.lookup.take()
        if promise.slots is None:
            fetches_in_flight[number] = fetches
            self._in_flight.add(number)
            places = self._by_rank([ChunkPlace(first, None) for first in firsts])
        else:
            places = self._by_rank([ChunkPlace(0, each) for each in promise.slots])
            for rank, slots in enumerate(self._by_rank(promise.slots)):
                self._leases[number, rank] = _Lease(slots, self._clock())
            for fetch in fetches:
                fetch.close()
        groups = [each for each in targets if each is not None]
        return LoadPlan(number, request_id if self.waits_for_loads else None, groups, places)

    def _save(
        self, state: _Request, reached: int, blocks: Sequence[list[int]]
    ) -> SavePlan | None:
        """reached: tokens that are computed after the step."""
        request = state.request
        ids = request.all_token_ids
        # Tokens that are drawn while the next step is planned are not known yet: it is saved then.
        known = request.num_prompt_tokens if self._options.prompts_only else len(ids)
        full = min(reached, known) // self._chunk
        first = state.saved
        if full <= first or not self._knows_adapter(state, 0.0) or not state.save:
            return None
        filled = [_blocks_of(group, blocks[i], first, full) for i, group in enumerate(self._groups)]
        if not all(filled):
            return None
        state.saved = full
        self._learn(state, first, full - first)
        end = full * self._chunk
        return SavePlan(
            tokens=np.fromiter(ids[:end], np.int32, end),
            first=first,
            count=full - first,
            ends_there=reached == end,
            blocks=filled,
            windows_first=state.loaded,
            salt=state.salt,
            extras=self._extras(state, full),
            ttl=state.ttl,
            pin=state.pin,
            adapter=None if state.adapter is None else (state.adapter.path, state.adapter.facts),
        )

    # ---- Events

    def _learn(self, state: _Request, first: int, count: int) -> list[str]:
        """vLLM may be told of these chunks. Their keys; none where it wants no events."""
        if self._events is None:
            return []
        end = (first + count) * self._chunk
        tokens = np.fromiter(state.request.all_token_ids[:end], np.int32, end)
        extras = self._extras(state, first + count)
        keys = self._space(state.salt, self._first_part).keys(tokens, extras=extras)
        self._events.learn(state.request, keys[first:], first)
        return keys[first:]

    def note(self, events: list[StoreEvent]) -> None:
        """What has happened in a store."""
        if self._events is not None:
            self._events.note(events)

    def events(self) -> list[Any]:
        """vLLM's events since the last call."""
        if self._events is None:
            return []
        self._events.note(self._store.take_events())
        return self._events.take()

    # ---- What the worker tells

    def ended(self, loads: list[tuple[int, int]], failed: int, lost: list[str]) -> None:
        """Loads that workers have ended, how many have failed so far, and requests whose load
        has."""
        self._heard = max(self._heard, failed)
        for load in loads:
            self._in_flight.discard(load[0])
            lease = self._leases.pop(load, None)
            if lease is not None:
                self._release(self._parts_by_rank[load[1]], lease.slots)
        for request_id in lost:
            state = self._requests.get(request_id)
            if state is not None:
                state.load, state.loaded = False, 0  # it is computed, and not looked for again

    def _end_overdue_leases(self) -> None:
        """Workers have not ended these loads: one is gone, or a step takes long. One that comes
        later finds that its lease has ended."""
        latest = self._clock() - self._options.lease_timeout
        for load, lease in list(self._leases.items()):
            if lease.begin > latest:
                break
            del self._leases[load]
            self._release(self._parts_by_rank[load[1]], lease.slots)
            self._add("overdue_leases")

    # ---- Control

    def reset(self) -> bool:
        """The weights may be others from now on: what is stored is not found any more, and chunks
        go under a passport of their own."""
        self._resets += 1
        number = f"{os.getpid()}.{os.urandom(8).hex()}.{self._resets}"
        self._passports = [
            {**each, "revision": f"{each['revision']}+reset.{number}"}
            for each in self._base_passports
        ]
        self._spaces.clear()
        if self._events is not None:
            self._events.forget()
        for state in self._requests.values():
            self._let_go(state)
            state.missing_chunk = None
            state.save = False  # its blocks are of the weights before
        return True

    def close(self) -> None:
        for request_id in list(self._requests):
            self.finish(request_id)
        for number in self._in_flight:
            for fetch in fetches_in_flight.pop(number, ()):
                fetch.close()
        self._spaces.clear()
        self._adapters.close()
        for arena in self._arenas or ():
            arena.close()

    # ---- Counts

    def _add(self, name: str, by: int = 1, *, reason: str | None = None) -> None:
        full = name if reason is None else f"{name}.{reason}"
        self._count[full] = self._count.get(full, 0) + by

    def take_errors(self) -> list[Exception]:
        """What has failed in plans since the last call."""
        found, self._errors = self._errors, []
        return found

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self._count = self._count, {}
        return counts


def _parameters(given: Any) -> tuple[bool | str, float, bool]:
    """`quire_skip`, `quire_ttl` and `quire_pin` of a request's kv_transfer_params."""
    if not isinstance(given, Mapping):
        given = {}
    skip, pin = given.get("quire_skip", False), given.get("quire_pin", False)
    if not isinstance(skip, bool) and skip not in ("load", "save"):
        raise errors.BadArgumentError(
            f'quire_skip is {skip!r}; it must be true, false, "load" or "save"'
        )
    if not isinstance(pin, bool):
        raise errors.BadArgumentError(f"quire_pin is {pin!r}; it must be true or false")
    ttl = given.get("quire_ttl", 0.0)
    milliseconds(ttl, "quire_ttl")
    return skip, float(ttl), pin


def _blocks_of(group: KvGroup, blocks: list[int], first: int, border: int) -> list[int]:
    """Blocks of chunks [first, border); [] if there are fewer."""
    found = list(blocks[first * group.part : border * group.part])
    return found if len(found) == (border - first) * group.part else []


def _target(group: KvGroup, blocks: list[int], begin: int, border: int) -> GroupBlocks | None:
    """Where chunks [begin, border) of a group go; None: there are no blocks for them."""
    # Where vLLM has chunks before `begin`, it has what is in the window of them, too.
    lead = group.lead(border) if begin == group.first_needed(border) else 0
    found = list(blocks[begin * group.part + lead : border * group.part])
    if len(found) != (border - begin) * group.part - lead:
        return None
    if group.window is not None and NULL_BLOCK in found:
        return None
    return GroupBlocks(border - begin, lead, found)
