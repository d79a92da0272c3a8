"""The scheduler side: what is promised to vLLM, and what the worker shall load and save.

A promise is kept: chunks are verified in this process's memory before vLLM hears of them, and stay
there (the fetch is held, or a slot of shared memory leased) until the worker has copied them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import quire
from quire.vllm._arena import Arena, Slot
from quire.vllm._events import ChunkEvents, StoreEvent
from quire.vllm._options import SPACES_MAX, Options
from quire.vllm._plan import LoadPlan, SavePlan, StepPlan

__all__ = ["SchedulerSide", "fetches_in_flight"]

# A waiting request is asked for in a loop that does nothing else while no other request runs.
_POLL_SECONDS = 0.001

#: Fetches on their way to a worker of this process, by the number of the load.
fetches_in_flight: dict[int, quire.ChunkFetch] = {}
_load_numbers = itertools.count(1)


@dataclasses.dataclass
class _Promise:
    """What vLLM was told: chunks [first, first + count) of the request's chain."""

    first: int
    count: int
    fetch: quire.ChunkFetch
    fetch_first: int
    slots: list[Slot] | None
    tiers: list[str]


@dataclasses.dataclass
class _Lease:
    """Slots that a plan has given to the worker, and when."""

    slots: list[Slot]
    begin: float


@dataclasses.dataclass
class _Request:
    salt: bytes
    request: Any
    load: bool = True
    save: bool = True
    ttl: float = 0.0
    pin: bool = False
    fetch: quire.ChunkFetch | None = None
    fetch_first: int = 0
    missing_chunk: int | None = None  # was not stored when it was looked for
    promise: _Promise | None = None
    granted: _Promise | None = None  # vLLM has allocated blocks for it; goes into the next plan
    saved: int = 0  # chunks before this one were handed to the worker


class SchedulerSide:
    """Everything that vLLM's scheduler asks. One thread calls it."""

    def __init__(
        self,
        store: quire.ChunkStore,
        options: Options,
        passport: dict[str, Any],
        arena: Arena | None,
        clock: Callable[[], float] = time.monotonic,
        events: ChunkEvents | None = None,
    ) -> None:
        self._store, self._options = store, options
        self._base_passport = passport
        self._passport = passport
        self._resets = 0
        self._block_size = options.block_size
        self._chunk = options.chunk_tokens
        self._arena = arena
        self._events = events
        self._requests: dict[str, _Request] = {}
        self._spaces: dict[bytes, quire.ChunkSpace] = {}
        self._clock = clock
        self._leases: dict[int, _Lease] = {}  # by the number of the load, oldest first
        self._count: dict[str, int] = {}
        self._spoiled: list[list[int]] = []  # blocks that vLLM counts on and nobody will fill
        self._heard = 0

    # ---- Requests

    def add(self, request: Any) -> None:
        """vLLM has a new request."""
        parameters = getattr(request, "kv_transfer_params", None) or {}
        skip = parameters.get("quire_skip", False)
        state = _Request(salt=(request.cache_salt or "").encode(), request=request)
        usable = request.prompt_token_ids is not None and not request.lora_request
        state.load = usable and skip not in (True, "load")
        state.save = usable and skip not in (True, "save")
        state.ttl = float(parameters.get("quire_ttl", 0.0))
        state.pin = bool(parameters.get("quire_pin", False))
        self._requests[request.request_id] = state

    def finish(self, request_id: str) -> None:
        """vLLM has no such request any more."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._withdraw(state)
            self._drop_fetch(state)

    def _state(self, request: Any) -> _Request:
        if request.request_id not in self._requests:
            self.add(request)
        return self._requests[request.request_id]

    def _withdraw(self, state: _Request) -> None:
        """Ends a promise that no plan has."""
        for promise in (state.promise, state.granted):
            if promise is not None and promise.slots is not None and self._arena is not None:
                self._arena.release(promise.slots)
        state.promise = state.granted = None

    def _drop_fetch(self, state: _Request) -> None:
        if state.fetch is not None:
            state.fetch.close()
        state.fetch = None

    # ---- Spaces

    def _space(self, salt: bytes) -> quire.ChunkSpace:
        space = self._spaces.pop(salt, None)
        if space is None:
            space = self._store.space(self._passport, salt=salt)
        self._spaces[salt] = space  # the last one used
        while len(self._spaces) > SPACES_MAX:
            self._spaces.pop(next(iter(self._spaces)))
        return space

    def _extras(self, request: Any, chunk_count: int) -> list[bytes]:
        """Digests of what else than tokens the chunks stand for: images and the like."""
        extras = [b""] * chunk_count
        for feature in getattr(request, "mm_features", None) or ():
            offset, length = feature.mm_position.offset, feature.mm_position.length
            for chunk in range(offset // self._chunk, (offset + length - 1) // self._chunk + 1):
                if chunk < chunk_count:
                    place = offset - chunk * self._chunk
                    extras[chunk] += f"{feature.identifier}@{place}\0".encode()
        while extras and not extras[-1]:
            extras.pop()
        return extras

    # ---- Promises

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens beyond `computed` that a load would bring; None: ask again."""
        state = self._state(request)
        ids = request.all_token_ids
        # One token at least is left to compute.
        chunk_count = (len(ids) - 1) // self._chunk
        first = computed // self._chunk
        if not state.load or computed % self._chunk or chunk_count <= first:
            self._withdraw(state)
            return 0
        if state.missing_chunk is not None:
            if state.saved > state.missing_chunk:
                state.missing_chunk = None  # the request itself has put it there since
            elif first >= state.missing_chunk:
                self._withdraw(state)
                return 0
        promise = state.promise
        if promise is not None and promise.first == first and promise.count <= chunk_count - first:
            return promise.count * self._chunk
        self._withdraw(state)
        if state.fetch is not None and first < state.fetch_first:
            self._drop_fetch(state)  # blocks that vLLM had are gone
        if state.fetch is None:
            self._start(state, ids, chunk_count, first)
        return self._answer(state, chunk_count, first)

    def _start(self, state: _Request, ids: Any, chunk_count: int, first: int) -> None:
        tokens = np.fromiter(ids[: chunk_count * self._chunk], np.int32, chunk_count * self._chunk)
        state.fetch = self._space(state.salt).fetch(
            tokens,
            first_chunk=first,
            timeout=self._options.load_timeout,
            extras=self._extras(state.request, chunk_count),
        )
        state.fetch_first = first
        self._add("lookups")

    def _answer(self, state: _Request, chunk_count: int, first: int) -> int | None:
        fetch = state.fetch
        assert fetch is not None
        if not fetch.wait(_POLL_SECONDS):
            return None
        skip = first - state.fetch_first
        ready = fetch.ready
        count = min(ready - skip, chunk_count - first)
        if state.fetch_first + ready < chunk_count:
            state.missing_chunk = state.fetch_first + ready
            self._add("misses", reason=fetch.miss)
        if count <= 0:
            self._drop_fetch(state)
            return 0
        slots = None
        if self._arena is not None:
            self._end_overdue_leases(self._arena)
            slots = self._arena.lease(fetch, skip, count)
            if len(slots) < count:
                self._add("no_room")
            count = len(slots)
            if count == 0:
                self._drop_fetch(state)
                state.missing_chunk = first
                return 0
        tiers = [str(fetch.tier(skip + i)) for i in range(count)]
        keys = self._learn(state, first, count)
        self.note([("stored", tier, key) for tier, key in zip(tiers, keys, strict=False)])
        state.promise = _Promise(first, count, fetch, state.fetch_first, slots, tiers)
        return count * self._chunk

    def spoil(self, blocks: list[int]) -> None:
        """vLLM counts on a load into these blocks that cannot be planned: the worker reports them,
        and vLLM computes them."""
        self._spoiled.append(blocks)
        self._add("spoiled")

    def allocated(self, request: Any, external: int) -> None:
        """vLLM has blocks for `external` tokens that were promised; 0: it takes none.

        Raises RuntimeError for tokens that were not promised.
        """
        state = self._state(request)
        if external == 0:
            return
        promise = state.promise
        if promise is None or external > promise.count * self._chunk or external % self._chunk:
            raise RuntimeError(
                f"vLLM takes {external} tokens; promised were "
                f"{0 if promise is None else promise.count * self._chunk}"
            )
        state.granted = promise
        state.promise = None
        kept = external // self._chunk
        if promise.slots is not None and self._arena is not None:
            self._arena.release(promise.slots[kept:])
            promise.slots = promise.slots[:kept]
        promise.count = kept
        promise.tiers = promise.tiers[:kept]
        for tier in promise.tiers:
            self._add("hit_tokens", self._chunk, reason=tier)

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the granted load by tier."""
        state = self._state(request)
        found: dict[str, int] = {}
        for tier in state.granted.tiers if state.granted is not None else ():
            found[tier] = found.get(tier, 0) + self._chunk
        return found

    # ---- Steps

    def plan(self, output: Any) -> StepPlan:
        """The plan of one step."""
        arena = None if self._arena is None else (self._arena.descriptor, self._arena.slot_count)
        plan = StepPlan(self._passport, os.getpid(), arena, self._heard)
        spoiled, self._spoiled = self._spoiled, []
        plan.loads.extend(LoadPlan(-1, 0, 0, blocks, None) for blocks in spoiled)
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            groups = output.kv_connector_block_state.get_block_ids(request_id)
            blocks = list(groups[0]) if groups else []
            if state.granted is not None:
                plan.loads.append(self._load(state, state.granted, blocks))
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            full = (computed.get(request_id, 0) + scheduled - drafts) // self._chunk
            save = self._save(state, full, blocks)
            if save is not None:
                plan.saves.append(save)
        return plan

    def _blocks_of(self, blocks: list[int], first: int, count: int) -> list[int]:
        part = self._chunk // self._block_size
        found = blocks[first * part : (first + count) * part]
        if len(found) != count * part:
            raise RuntimeError(f"chunks {first} to {first + count} have no {count * part} blocks")
        return found

    def _load(self, state: _Request, promise: _Promise, blocks: list[int]) -> LoadPlan:
        part = self._chunk // self._block_size
        if len(blocks) < (promise.first + promise.count) * part:
            self._withdraw(state)
            self._drop_fetch(state)
            self._add("spoiled")
            return LoadPlan(-1, 0, 0, blocks, None)
        state.granted = None
        number = next(_load_numbers)
        if promise.slots is None:
            # Chunks before `first` are of no use any more: vLLM has them.
            fetches_in_flight[number] = promise.fetch
        else:
            self._leases[number] = _Lease(promise.slots, self._clock())
            promise.fetch.close()
        state.fetch = None
        return LoadPlan(
            number,
            promise.first - promise.fetch_first,
            promise.count,
            self._blocks_of(blocks, promise.first, promise.count),
            promise.slots,
        )

    def _save(self, state: _Request, full: int, blocks: list[int]) -> SavePlan | None:
        request = state.request
        ids = request.all_token_ids
        # Tokens that are drawn while the next step is planned are not known yet: it is saved then.
        known = request.num_prompt_tokens if self._options.prompts_only else len(ids)
        full = min(full, known // self._chunk)
        first = state.saved
        if not state.save or full <= first:
            return None
        state.saved = full
        self._learn(state, first, full - first)
        end = full * self._chunk
        return SavePlan(
            tokens=np.fromiter(ids[:end], np.int32, end),
            first=first,
            count=full - first,
            blocks=self._blocks_of(blocks, first, full - first),
            salt=state.salt,
            extras=self._extras(request, full),
            ttl=state.ttl,
            pin=state.pin,
        )

    # ---- Events

    def _learn(self, state: _Request, first: int, count: int) -> list[str]:
        """vLLM may be told of these chunks. Their keys; none where it wants no events."""
        if self._events is None:
            return []
        end = (first + count) * self._chunk
        tokens = np.fromiter(state.request.all_token_ids[:end], np.int32, end)
        extras = self._extras(state.request, first + count)
        keys = self._space(state.salt).keys(tokens, extras=extras)
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

    def ended(self, numbers: list[int], failed: int) -> None:
        """Loads that the worker has ended, and how many have failed so far."""
        self._heard = max(self._heard, failed)
        for number in numbers:
            lease = self._leases.pop(number, None)
            if lease is not None and self._arena is not None:
                self._arena.release(lease.slots)

    def _end_overdue_leases(self, arena: Arena) -> None:
        """The worker has not ended these loads: it is gone, or a step takes long. One that comes
        later finds that its lease has ended."""
        latest = self._clock() - self._options.lease_timeout
        for number, lease in list(self._leases.items()):
            if lease.begin > latest:
                break
            del self._leases[number]
            arena.release(lease.slots)
            self._add("overdue_leases")

    # ---- Control

    def reset(self) -> bool:
        """The weights may be others from now on: what is stored is not found any more, and chunks
        go under a passport of their own."""
        self._resets += 1
        number = f"{os.getpid()}.{os.urandom(8).hex()}.{self._resets}"
        revision = f"{self._base_passport['revision']}+reset.{number}"
        self._passport = {**self._base_passport, "revision": revision}
        self._spaces.clear()
        if self._events is not None:
            self._events.forget()
        for state in self._requests.values():
            self._withdraw(state)
            self._drop_fetch(state)
            state.missing_chunk = None
            state.save = False  # its blocks are of the weights before
        return True

    def close(self) -> None:
        for request_id in list(self._requests):
            self.finish(request_id)
        self._spaces.clear()
        if self._arena is not None:
            self._arena.close()

    # ---- Counts

    def _add(self, name: str, by: int = 1, *, reason: str | None = None) -> None:
        full = name if reason is None else f"{name}.{reason}"
        self._count[full] = self._count.get(full, 0) + by

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self._count = self._count, {}
        return counts
