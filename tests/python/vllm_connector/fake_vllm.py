"""A scheduler and a worker that call a KV connector in vLLM's order, with a model whose KV can be
told for every position: whatever a forward reads is compared with it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

BLOCK, LAYERS, BYTES = 4, 2, 8  # tokens of a block; bytes of a token's KV


class FullAttentionSpec(types.SimpleNamespace):
    """vLLM's name of the kind of KV."""


class SlidingWindowSpec(types.SimpleNamespace):
    """The same."""


@dataclasses.dataclass(frozen=True)
class FakeGroup:
    """A group of layers. window: tokens that one attends to; None: all. block: tokens of a
    block."""

    window: int | None = None
    block: int = BLOCK
    layers: int = LAYERS

    def names(self, number: int) -> list[str]:
        return [f"model.layers.{10 * number + i}.attn" for i in range(self.layers)]

    def skipped(self, computed: int) -> int:
        """Blocks that no token behind these attends to."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block


ONE_GROUP = (FakeGroup(),)
LAYER_NAMES = ONE_GROUP[0].names(0)


def config(
    extra: dict[str, Any],
    blocks: int,
    *,
    events: bool = False,
    groups: tuple[FakeGroup, ...] = ONE_GROUP,
    ranks: int = 1,
    rank: int = 0,
) -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config)."""
    vllm = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=types.SimpleNamespace(block_size=BLOCK),
        parallel_config=types.SimpleNamespace(
            world_size=ranks, tensor_parallel_size=ranks, rank=rank
        ),
        kv_events_config=types.SimpleNamespace(enable_kv_cache_events=events),
    )
    found = []
    for number, group in enumerate(groups):
        kind = FullAttentionSpec if group.window is None else SlidingWindowSpec
        spec = kind(
            page_size_bytes=group.block * BYTES,
            block_size=group.block,
            sliding_window=group.window,
        )
        names = list(reversed(group.names(number)))
        found.append(types.SimpleNamespace(layer_names=names, kv_cache_spec=spec))
    return vllm, types.SimpleNamespace(kv_cache_groups=found, num_blocks=blocks)


PASSPORT = {
    "model": "fake",
    "revision": "r",
    "kind": "latent",
    "dtype": "u8",
    "kv_heads": 1,
    "head_dim": BYTES,
}


@dataclasses.dataclass
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: list[Any] = dataclasses.field(default_factory=list)
    all_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    blocks: list[list[int]] = dataclasses.field(default_factory=list)  # of each group
    external: int = 0  # tokens that the connector has brought, over its life
    weights: list[int] = dataclasses.field(default_factory=list)  # that the KV is of, by position

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def block_hashes(self) -> list[int]:
        """Of whole blocks; each commits to what is before it."""
        ends = range(BLOCK, len(self.all_token_ids) + 1, BLOCK)
        return [hash((self.cache_salt, *self.all_token_ids[:end])) for end in ends]

    @property
    def done(self) -> bool:
        return len(self.all_token_ids) >= self.num_prompt_tokens + self.max_tokens


#: Memory of the KV of each layer, by rank and group.
Layers: TypeAlias = "list[list[list[torch.Tensor]]]"


def new_layers(
    blocks: int,
    device: str = "cpu",
    groups: tuple[FakeGroup, ...] = ONE_GROUP,
    ranks: int = 1,
) -> Layers:
    return [
        [
            [
                torch.zeros(blocks, group.block, BYTES, dtype=torch.uint8, device=device)
                for _ in range(group.layers)
            ]
            for group in groups
        ]
        for _ in range(ranks)
    ]


def _mix(state: int, value: int) -> int:
    """The same in every process, which hash() is not."""
    return (state * 6364136223846793005 + value * 1442695040888963407 + 0x9E3779B9) % (1 << 61)


class WrongReport(AssertionError):
    """The worker has not ended just the loads that it was told of."""


class WrongBytes(AssertionError):
    """A forward has read KV that is not that of its tokens."""


class FakeVllm:
    """One engine. step() is a step of scheduler and workers.

    Where there are several groups, windows or workers, the connector's loads are waited for: the
    request gets blocks, and is computed once all workers have said that its load has ended.
    """

    def __init__(
        self,
        scheduler: Any,
        workers: list[Any],
        layers: Layers,
        *,
        groups: tuple[FakeGroup, ...] = ONE_GROUP,
        budget: int = 24,
        settle: Callable[[], None] = lambda: None,
        is_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """settle: called where the device's own work on the KV begins, behind what was queued for
        it. is_ahead: whether the next step is planned before the ends of this step's loads are
        told; asked where requests wait for their loads."""
        self.scheduler, self.workers, self.budget = scheduler, workers, budget
        self.weights = 0
        self.settle, self.is_ahead = settle, is_ahead
        self.groups, self.layers = groups, layers
        self.waits = len(groups) * len(workers) > 1 or groups[0].window is not None
        # Block 0 is that of nobody where a table may lack blocks.
        blocks = len(layers[0][0][0])
        self.usable_blocks = blocks - self.waits
        self.free = list(range(int(self.waits), blocks))
        self.planned: set[int] = set()  # loads that the workers have not ended
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.loading: dict[str, tuple[FakeRequest, int]] = {}  # and the tokens that will be there
        self.aborted: set[str] = set()  # requests whose blocks are free when their load has ended
        self._untold: list[Callable[[], None]] = []  # of the step before
        self.refused_blocks = 0
        self.refused_loads = 0
        self.known_blocks: set[tuple[str, int]] = set()
        for worker, of_rank in zip(workers, layers, strict=True):
            caches = {
                name: layer
                for number, group in enumerate(groups)
                for name, layer in zip(group.names(number), of_rank[number], strict=True)
            }
            worker.register_kv_caches(caches)

    # ---- The model

    def truth(self, request: FakeRequest, layer: int, begin: int, end: int) -> np.ndarray:
        """Commits to all tokens before, and to the weights that each was computed with. layer: a
        number that tells it from those of other groups and ranks."""
        state = int.from_bytes((request.cache_salt or "").encode(), "little")
        rows = []
        for position, token in enumerate(request.all_token_ids[:end]):
            state = _mix(state ^ (state >> 31), token + (request.weights[position] << 20))
            if position >= begin:
                rows.append(np.frombuffer((state ^ layer * 77).to_bytes(8, "little"), np.uint8))
        return np.array(rows, np.uint8).reshape(-1, BYTES)

    def _every_layer(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(number, group, memory)."""
        for rank, of_rank in enumerate(self.layers):
            for group, layers in enumerate(of_rank):
                for i, layer in enumerate(layers):
                    yield 1000 * rank + 100 * group + i, group, layer

    def _forward(self, request: FakeRequest, count: int, bad: set[int]) -> None:
        self.settle()
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        request.weights[begin:] = [self.weights] * count
        is_bad = any(bad & set(blocks) for blocks in request.blocks)
        for number, group, memory in self._every_layer():
            size, window = self.groups[group].block, self.groups[group].window
            blocks = request.blocks[group]
            first = 0 if window is None else max(0, begin - window + 1)
            assert 0 not in blocks[first // size : -(-end // size)] or not self.waits
            rows = memory[blocks].reshape(-1, BYTES)[first:begin].cpu().numpy()
            if not is_bad and not np.array_equal(
                rows, self.truth(request, number, first, begin)
            ):
                raise WrongBytes(f"{request.request_id} layer {number} before {begin}")
            new = self.truth(request, number, begin, end)
            if is_bad:
                new = new ^ 0x55  # computed from what is not there
            for position in range(begin, end):
                memory[blocks[position // size], position % size] = torch.from_numpy(
                    new[position - begin].copy()
                )

    # ---- The scheduler

    def add(self, request: FakeRequest) -> None:
        self.waiting.append(request)
        self.scheduler.on_new_request(request)

    def abort(self, request: FakeRequest) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if request.request_id in self.loading:
            self.aborted.add(request.request_id)
            self._tell_end(request)
        else:
            self._finish(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.loading)

    def _tell_end(self, request: FakeRequest) -> None:
        if self.waits:
            told = self.scheduler.request_finished_all_groups(request, tuple(request.blocks))
        else:
            told = self.scheduler.request_finished(request, [*request.blocks, []][0])
        assert told == (False, None)

    def _finish(self, request: FakeRequest) -> None:
        self._tell_end(request)
        self._release(request)

    def _release(self, request: FakeRequest) -> None:
        for blocks in request.blocks:
            self._free([each for each in blocks if each or not self.waits])
        request.blocks = []

    def _free(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self.settle()
        for _, _, memory in self._every_layer():
            memory[blocks] = 0xDD  # nobody may rely on it
        self.free.extend(blocks)

    def _skip(self, request: FakeRequest) -> None:
        """Blocks before the windows are free again."""
        for number, group in enumerate(self.groups):
            if not request.blocks:
                return
            blocks = request.blocks[number]
            skipped = min(len(blocks), group.skipped(request.num_computed_tokens))
            self._free([each for each in blocks[:skipped] if each])
            blocks[:skipped] = [0] * skipped

    def _grow(self, request: FakeRequest, tokens: int, computed: int) -> bool:
        """Blocks for so many tokens, of which `computed` are there before the next forward."""
        request.blocks = request.blocks or [[] for _ in self.groups]
        need = []
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            size = -(-tokens // group.block)
            null = max(0, min(size, group.skipped(computed)) - len(blocks)) if self.waits else 0
            need.append((null, max(0, size - len(blocks) - null)))
        if sum(count for _, count in need) > len(self.free):
            if not any(request.blocks):
                request.blocks = []
            return False
        for blocks, (null, count) in zip(request.blocks, need, strict=True):
            blocks.extend([0] * null)
            blocks.extend(self.free.pop(0) for _ in range(count))
        return True

    def _preempt(self, request: FakeRequest) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def _schedule(self) -> tuple[Any, list[FakeRequest]]:
        budget, counts, cached = self.budget, {}, []
        running: list[FakeRequest] = []
        preempted = False
        queue = list(self.running)
        while queue:
            request = queue.pop(0)
            count = min(budget, len(request.all_token_ids) - request.num_computed_tokens)
            if count <= 0:
                running.append(request)
                continue
            self._skip(request)
            computed = request.num_computed_tokens
            while not self._grow(request, computed + count, computed):
                preempted = True
                victim = queue.pop() if queue else request
                self._preempt(victim)
                if victim is request:
                    break
            else:
                counts[request.request_id] = count
                budget -= count
                cached.append(request)
                running.append(request)
        new = [] if preempted else self._admit(budget, counts)
        self.running = running + new
        return self._output(counts, new, cached), [
            each for each in self.running if each.request_id in counts
        ]

    def _admit(self, budget: int, counts: dict[str, int]) -> list[FakeRequest]:
        """Requests that have waited and are computed in this step."""
        new: list[FakeRequest] = []
        for request in list(self.waiting):
            if budget <= 0:
                break
            external, waits = 0, False
            if request.num_computed_tokens == 0:
                external, waits = self.scheduler.get_num_new_matched_tokens(request, 0)
                if external is None:
                    continue
                assert all(external % group.block == 0 for group in self.groups)
                assert external < len(request.all_token_ids)
                assert waits == (self.waits and external > 0)
            computed = request.num_computed_tokens + external
            count = 0 if waits else min(budget, len(request.all_token_ids) - computed)
            if not self._grow(request, computed + count, computed):
                if not counts:
                    self._take_back(request)
                break
            self._tell_blocks(request, external)
            self.waiting.remove(request)
            if waits:
                self.loading[request.request_id] = request, computed
                continue
            request.num_computed_tokens = computed
            new.append(request)
            counts[request.request_id] = count
            budget -= count
        return new

    def _take_back(self, request: FakeRequest) -> None:
        """Nobody can be computed as others, whose loads have ended, have the blocks."""
        for other in reversed(self.waiting):
            if other.blocks and other is not request:
                self._release(other)
                other.num_computed_tokens = 0
                return

    def _tell_blocks(self, request: FakeRequest, external: int) -> None:
        blocks = tuple(list(each) for each in request.blocks)
        self.scheduler.update_state_after_alloc(
            request, types.SimpleNamespace(get_block_ids=lambda: blocks), external
        )
        sources = self.scheduler.get_external_cache_hit_sources(request, external)
        assert sum(sources.values()) in (0, external)  # 0: it says nothing
        request.external += external
        if external:
            # What is loaded is of the weights that are there now.
            request.weights[request.num_computed_tokens :] = [self.weights] * external

    def _output(
        self, counts: dict[str, int], new: list[FakeRequest], cached: list[FakeRequest]
    ) -> Any:
        every = {each.request_id: each for each in self.running}
        return types.SimpleNamespace(
            scheduled_new_reqs=[
                types.SimpleNamespace(
                    req_id=each.request_id, num_computed_tokens=each.num_computed_tokens
                )
                for each in new
            ],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=[each.request_id for each in cached],
                num_computed_tokens=[each.num_computed_tokens for each in cached],
            ),
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens={},
            kv_connector_block_state=types.SimpleNamespace(
                get_block_ids=lambda name: tuple(list(each) for each in every[name].blocks)
            ),
        )

    def _check_report(self, report: Any) -> None:
        """Each load is ended in the step that it was planned for, once by each worker."""
        ended = [] if report is None else report.ended
        expected = [(load, rank) for load in self.planned for rank in range(len(self.workers))]
        if sorted(ended) != sorted(expected):
            raise WrongReport(f"planned were {sorted(expected)}, ended are {sorted(ended)}")
        self.planned = set()

    def _note(self, events: list[Any]) -> None:
        """What a router would know: tier and hash of each block."""
        for event in events:
            blocks = {(event.ownership, each) for each in event.block_hashes}
            if hasattr(event, "token_ids"):
                assert len(event.token_ids) == len(event.block_hashes) * BLOCK
                assert not blocks & self.known_blocks, "told twice"
                self.known_blocks |= blocks
            else:
                assert blocks <= self.known_blocks, "removed what was never told"
                self.known_blocks -= blocks

    def _end_loads(self, received: list[set[str]], lost: set[str]) -> None:
        """Requests that waited are computed next; without what was not loaded."""
        assert all(each == received[0] for each in received), "a worker has not ended a load"
        assert lost <= received[0]
        for name in sorted(received[0]):
            request, computed = self.loading.pop(name)
            if name in self.aborted:
                self.aborted.remove(name)
                self._release(request)
                continue
            if name in lost:
                self.refused_loads += 1
                computed = 0
                self._release(request)
            request.num_computed_tokens = computed
            self.waiting.insert(0, request)

    def _work(self, plan: Any, scheduled: list[FakeRequest], counts: dict[str, int]) -> set[int]:
        """What the workers do in a step. Blocks that were not loaded. What else is to be told is
        added to `_untold`."""
        bad: set[int] = set()
        for worker in self.workers:
            worker.bind_connector_metadata(plan)
            worker.start_load_kv(None)
            # vLLM learns of them only after the step; the fake forward has to know now.
            bad |= worker.get_block_ids_with_load_errors()
        for request in scheduled:
            for worker in self.workers:
                worker.wait_for_layer_load(LAYER_NAMES[0])
            self._forward(request, counts[request.request_id], bad)
        received: list[set[str]] = []
        lost: set[str] = set()
        for worker in self.workers:
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            received.append(results.finished_recving)
            lost |= results.failed_recving
            bad |= worker.get_block_ids_with_load_errors()
        if self.waits:
            assert not bad, "vLLM takes no blocks where there are several groups"
        else:
            assert not received[0] | lost
        report = self._take_report()
        self._untold.append(lambda: self._tell(received, lost, report))
        return bad

    def _take_report(self) -> Any:
        reports = [worker.build_connector_worker_meta() for worker in self.workers]
        report = functools.reduce(
            lambda a, b: a if b is None else b if a is None else a.aggregate(b), reports
        )
        for worker in self.workers:
            worker.clear_connector_metadata()
        self._check_report(report)
        return report

    def _tell(self, received: list[set[str]], lost: set[str], report: Any) -> None:
        """The scheduler hears of what the workers have done."""
        self._end_loads(received, lost)
        self.scheduler.update_connector_output(
            types.SimpleNamespace(kv_connector_worker_meta=report)
        )
        self._note(self.scheduler.take_events())

    def _tell_all(self) -> None:
        untold, self._untold = self._untold, []
        for each in untold:
            each()

    def step(self) -> None:
        output, scheduled = self._schedule()
        counts = output.num_scheduled_tokens
        plan = self.scheduler.build_connector_meta(output)
        self.planned |= {load.number for load in plan.loads}
        self._tell_all()
        bad = self._work(plan, scheduled, counts)
        if not (self.waits and self.is_ahead()):
            self._tell_all()
        self.refused_blocks += len(bad)
        for request in scheduled:
            invalid = [i for i, block in enumerate(request.blocks[0]) if block in bad]
            if invalid:
                request.num_computed_tokens = invalid[0] * BLOCK
                continue
            request.num_computed_tokens += counts[request.request_id]
            if request.num_computed_tokens == len(request.all_token_ids):
                request.all_token_ids.append(hash(tuple(request.all_token_ids)) % 7)
            if request.done:
                self.running.remove(request)
                self._finish(request)
