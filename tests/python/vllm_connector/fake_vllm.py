"""A scheduler and a worker that call a KV connector in vLLM's order, with a model whose KV can be
told for every position: whatever a forward reads is compared with it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from fake_kernel import FakeKernel, bind_caches

BLOCK, LAYERS, BYTES = 4, 2, 8  # tokens of a block; bytes of a token's KV


class FullAttentionSpec(types.SimpleNamespace):
    """vLLM's name of the kind of KV."""


class SlidingWindowSpec(types.SimpleNamespace):
    """The same."""


class MambaSpec(types.SimpleNamespace):
    """The same, of recurrent states."""


@dataclasses.dataclass(frozen=True)
class FakeGroup:
    """A group of layers. window: tokens that one attends to; None: all. block: tokens of a
    block. state: whether a block has the recurrent state behind its tokens, in a part of it."""

    window: int | None = None
    block: int = BLOCK
    layers: int = LAYERS
    state: bool = False

    @property
    def state_bytes(self) -> int:
        return self.block * BYTES - 3

    def names(self, number: int, stage: int = 0, stages: int = 1) -> list[str]:
        """Of the layers that a pipeline stage has."""
        own = self.of_stage(stage, stages)
        return [f"model.layers.{10 * number + i}.attn" for i in own]

    def of_stage(self, stage: int, stages: int) -> range:
        """Layers of a pipeline stage, which may be none."""
        return range(self.layers * stage // stages, self.layers * (stage + 1) // stages)

    def skipped(self, computed: int) -> int:
        """Blocks that no token behind these attends to."""
        if self.state:
            return max(0, computed - 1) // self.block
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block

    def spec(self) -> Any:
        """vLLM's."""
        size: dict[str, Any] = {
            "page_size_bytes": self.block * BYTES, "block_size": self.block
        }  # fmt: skip
        if self.state:
            return MambaSpec(
                **size,
                state_content_size_bytes=self.state_bytes,
                mamba_cache_mode="align",
                mamba_type="fake",
                shapes=((self.state_bytes,),),
                dtypes=("int8",),
            )
        if self.window is None:
            return FullAttentionSpec(**size)
        return SlidingWindowSpec(**size, sliding_window=self.window)

    def registered(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory of a layer as vLLM registers it."""
        return memory.view(len(memory), 1, 1, -1)[..., : self.state_bytes] if self.state else memory


ONE_GROUP = (FakeGroup(),)
LAYER_NAMES = ONE_GROUP[0].names(0)


def config(
    extra: dict[str, Any],
    blocks: int,
    *,
    engine_id: str = "engine",
    events: bool = False,
    groups: tuple[FakeGroup, ...] = ONE_GROUP,
    ranks: int = 1,
    stages: int = 1,
    rank: int = 0,
    kernel: FakeKernel | None = None,
) -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config). ranks: workers of each of the pipeline stages. rank: of all
    workers; the scheduler has that of the first. kernel: of all layers; None: vLLM says nothing of
    theirs."""
    vllm = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(
            kv_connector_extra_config=extra, engine_id=engine_id
        ),
        cache_config=types.SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        compilation_config=types.SimpleNamespace(static_forward_context={}),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
        parallel_config=types.SimpleNamespace(
            world_size=ranks * stages,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            rank=rank,
        ),
        kv_events_config=types.SimpleNamespace(enable_kv_cache_events=events),
    )
    found = []
    for number, group in enumerate(groups):
        spec = group.spec()
        names = list(reversed(group.names(number, rank // ranks, stages)))
        if kernel is not None and not group.state:
            kernel.specify(spec)
            layers = vllm.compilation_config.static_forward_context
            layers.update({name: kernel.layer() for name in names})
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
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
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
        name = None if self.lora_request is None else self.lora_request.lora_name
        return [hash((name, self.cache_salt, *self.all_token_ids[:end])) for end in ends]

    @property
    def done(self) -> bool:
        return len(self.all_token_ids) >= self.num_prompt_tokens + self.max_tokens


#: Memory of the KV of each layer, by worker and group.
Layers: TypeAlias = "list[list[list[torch.Tensor]]]"


def new_layers(
    blocks: int,
    device: str = "cpu",
    groups: tuple[FakeGroup, ...] = ONE_GROUP,
    ranks: int = 1,
    stages: int = 1,
) -> Layers:
    return [
        [
            [
                torch.zeros(blocks, group.block, BYTES, dtype=torch.uint8, device=device)
                for _ in group.of_stage(stage, stages)
            ]
            for group in groups
        ]
        for stage in range(stages)
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

    Where there are pipeline stages, as many steps are planned before the first of them is told.
    """

    def __init__(
        self,
        scheduler: Any,
        workers: list[Any],
        layers: Layers,
        *,
        groups: tuple[FakeGroup, ...] = ONE_GROUP,
        stages: int = 1,
        budget: int = 24,
        settle: Callable[[], None] = lambda: None,
        is_ahead: Callable[[], bool] = lambda: False,
        kernel: FakeKernel = FakeKernel("rows"),  # noqa: B008  # has no state
    ) -> None:
        """settle: called where the device's own work on the KV begins, behind what was queued for
        it. is_ahead: whether the next step is planned before the ends of this step's loads are
        told; asked where requests wait for their loads. kernel: which writes the KV."""
        self.scheduler, self.workers, self.budget = scheduler, workers, budget
        self.weights = 0
        self.adapters: dict[int, int] = {}  # by their numbers: what was read of the file
        self.settle, self.is_ahead = settle, is_ahead
        self.groups, self.layers, self.kernel = groups, layers, kernel
        self.stages, self.ranks = stages, len(workers) // stages
        self.has_states = any(group.state for group in groups)
        self.waits = (
            len(groups) * len(workers) > 1 or groups[0].window is not None or self.has_states
        )
        # Block 0 is that of nobody where a table may lack blocks.
        blocks = next(len(each) for _, _, each in self._every_layer())
        self.usable_blocks = blocks - self.waits
        self.free = list(range(int(self.waits), blocks))
        self.planned: set[int] = set()  # loads that the workers have not ended
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.loading: dict[str, tuple[FakeRequest, int]] = {}  # and the tokens that will be there
        self.aborted: set[str] = set()  # requests whose blocks are free when their load has ended
        self._untold: list[Callable[[], None]] = []  # of each of the steps before
        self.is_asking = False  # the last step has left a request for the connector to look for
        self.refused_blocks = 0
        self.refused_loads = 0
        self.known_blocks: set[tuple[str, int]] = set()
        self.register()

    def register(self) -> None:
        """The workers tell the scheduler what they learn of the KV's memory."""
        for rank, (worker, of_worker) in enumerate(zip(self.workers, self.layers, strict=True)):
            caches = {
                name: group.registered(layer)
                for number, group in enumerate(self.groups)
                for name, layer in zip(
                    group.names(number, rank // self.ranks, self.stages),
                    of_worker[number],
                    strict=True,
                )
            }
            if hasattr(worker, "_vllm_config"):  # else it is in another process, which does so
                bind_caches(worker, caches)
            worker.register_kv_caches(caches)
        told = {rank: each.get_handshake_metadata() for rank, each in enumerate(self.workers)}
        if any(told.values()):
            self.scheduler.set_xfer_handshake_metadata_pp_aware(
                {
                    divmod(rank, self.ranks): each
                    for rank, each in told.items()
                    if each is not None
                }
            )

    def sleep(self, *, weights: int = 0, registers: bool = False) -> None:
        """Levels 1 and 2 of vLLM's sleep mode, and the end of the sleep: all requests are aborted,
        caches are emptied, the connector is reset, and the KV's memory is another one, at the same
        addresses. weights: added to these. registers: the workers hear of the memory again."""
        loading = [request for request, _ in self.loading.values()]
        for request in [*self.waiting, *self.running, *loading]:
            if request.request_id not in self.aborted:
                self.abort(request)
        while self.busy:
            self.step()
        assert self.scheduler.reset_cache() is True
        self.settle()
        for _, _, memory in self._every_layer():
            memory.zero_()
        self.weights += weights
        if registers:
            self.register()

    # ---- The model

    def load_adapter(self, lora: Any) -> int:
        """vLLM reads it when it is added or first used, and keeps it under its number."""
        if lora.lora_int_id not in self.adapters:
            data = Path(lora.lora_path, "adapter_model.safetensors").read_bytes()
            self.adapters[lora.lora_int_id] = int.from_bytes(data, "little")
        return self.adapters[lora.lora_int_id]

    def truth(self, request: FakeRequest, layer: int, begin: int, end: int) -> np.ndarray:
        """Commits to all tokens before, to the adapter, and to the weights that each was computed
        with. layer: a number that tells it from those of other groups and ranks."""
        state = int.from_bytes((request.cache_salt or "").encode(), "little")
        if request.lora_request is not None:
            state = _mix(state, self.load_adapter(request.lora_request))
        rows = []
        for position, token in enumerate(request.all_token_ids[:end]):
            state = _mix(state ^ (state >> 31), token + (request.weights[position] << 20))
            if position >= begin:
                rows.append(np.frombuffer((state ^ layer * 77).to_bytes(8, "little"), np.uint8))
        return np.array(rows, np.uint8).reshape(-1, BYTES)

    def _every_layer(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(number, group, memory)."""
        for worker, of_worker in enumerate(self.layers):
            stage, rank = divmod(worker, self.ranks)
            for group, layers in enumerate(of_worker):
                own = self.groups[group].of_stage(stage, self.stages)
                for i, layer in zip(own, layers, strict=True):
                    yield 1000 * rank + 100 * group + i, group, layer

    def _forward(self, request: FakeRequest, count: int, bad: set[int]) -> None:
        self.settle()
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        request.weights[begin:] = [self.weights] * count
        is_bad = any(bad & set(blocks) for blocks in request.blocks)
        for number, group, memory in self._every_layer():
            if self.groups[group].state:
                self._forward_state(request, number, group, memory, end, is_bad)
                continue
            size, window = self.groups[group].block, self.groups[group].window
            blocks = request.blocks[group]
            # Of a window, whole blocks: vLLM's prefix cache gives them to others, who may read all.
            first = 0 if window is None else max(0, begin - window + 1) // size * size
            assert 0 not in blocks[first // size : -(-end // size)] or not self.waits
            rows = self.kernel.rows(memory[blocks])[first:begin].cpu().numpy()
            if not is_bad and not np.array_equal(
                rows, self.truth(request, number, first, begin)
            ):
                raise WrongBytes(f"{request.request_id} layer {number} before {begin}")
            new = self.truth(request, number, begin, end)
            if is_bad:
                new = new ^ 0x55  # computed from what is not there
            for position in range(begin, end):
                row = torch.from_numpy(new[position - begin].copy())
                self.kernel.put(memory, blocks[position // size], position % size, row)

    def _state(self, request: FakeRequest, number: int, end: int) -> torch.Tensor:
        """The state behind so many tokens."""
        row = self.truth(request, number, end - 1, end)
        return torch.from_numpy(np.resize(row, self.groups[number // 100 % 10].state_bytes))

    def _forward_state(
        self,
        request: FakeRequest,
        number: int,
        group: int,
        memory: torch.Tensor,
        end: int,
        is_bad: bool,
    ) -> None:
        """The state goes from the block of the last token before to that of the last one."""
        size, begin = self.groups[group].block, request.num_computed_tokens
        pages = self.groups[group].registered(memory)
        blocks = request.blocks[group]
        if begin and not is_bad:
            block = blocks[(begin - 1) // size]
            assert block, "the state before is gone"
            if not torch.equal(pages[block].view(-1), self._state(request, number, begin)):
                raise WrongBytes(f"{request.request_id} state {number} before {begin}")
        block = blocks[(end - 1) // size]
        assert block
        pages[block].view(-1)[:] = self._state(request, number, end) ^ (0x55 * is_bad)

    # ---- The scheduler

    def _count(self, request: FakeRequest, computed: int, budget: int) -> int:
        """Tokens of the next step. Where there are states, one step of a prompt ends with its last
        whole block. (In vLLM all do but the last one.)"""
        known = len(request.all_token_ids)
        end = min(computed + budget, known)
        if self.has_states:
            size = max(group.block for group in self.groups)
            last = known // size * size
            if computed < last < end:
                end = last
        return end - computed

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
            skipped = size - 1 if group.state else min(size, group.skipped(computed))
            null = max(0, skipped - len(blocks)) if self.waits else 0
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
        self.is_asking = False
        running: list[FakeRequest] = []
        preempted = False
        queue = list(self.running)
        while queue:
            request = queue.pop(0)
            count = self._count(request, request.num_computed_tokens, budget)
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
                    if not counts:
                        self._take_back(request)
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
                    self.is_asking = True
                    continue
                assert all(external % group.block == 0 for group in self.groups)
                assert external < len(request.all_token_ids)
                assert waits == (self.waits and external > 0)
            computed = request.num_computed_tokens + external
            count = 0 if waits else self._count(request, computed, budget)
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

    def _tell_all(self, but: int = 0) -> None:
        """Steps but for the last few."""
        count = len(self._untold) - but
        untold, self._untold = self._untold[: max(0, count)], self._untold[max(0, count) :]
        for each in untold:
            each()

    def step(self) -> None:
        output, scheduled = self._schedule()
        counts = output.num_scheduled_tokens
        plan = self.scheduler.build_connector_meta(output)
        self.planned |= {load.number for load in plan.loads}
        self._tell_all(but=self.stages - 1)
        bad = self._work(plan, scheduled, counts)
        if not (self.waits and self.is_ahead()):
            self._tell_all()
        self.refused_blocks += len(bad)
        for request in scheduled:
            invalid = [i for i, block in enumerate(request.blocks[0]) if block in bad]
            if invalid:
                request.num_computed_tokens = invalid[0] * self.groups[0].block
                continue
            request.num_computed_tokens += counts[request.request_id]
            if request.num_computed_tokens == len(request.all_token_ids):
                request.all_token_ids.append(hash(tuple(request.all_token_ids)) % 7)
            if request.done:
                self.running.remove(request)
                self._finish(request)
