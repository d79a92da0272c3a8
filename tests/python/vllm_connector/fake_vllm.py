"""A scheduler and a worker that call a KV connector in vLLM's order, with a model whose KV can be
told for every position: whatever a forward reads is compared with it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

BLOCK, LAYERS, BYTES = 4, 2, 8  # tokens of a block; bytes of a token's KV
LAYER_NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]


def config(extra: dict[str, Any], blocks: int, *, events: bool = False) -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config)."""
    vllm = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=types.SimpleNamespace(block_size=BLOCK),
        parallel_config=types.SimpleNamespace(world_size=1),
        kv_events_config=types.SimpleNamespace(enable_kv_cache_events=events),
    )
    group = types.SimpleNamespace(
        layer_names=list(reversed(LAYER_NAMES)),
        kv_cache_spec=types.SimpleNamespace(page_size_bytes=BLOCK * BYTES),
    )
    return vllm, types.SimpleNamespace(kv_cache_groups=[group], num_blocks=blocks)


PASSPORT = {
    "model": "fake",
    "revision": "r",
    "layout": "fake/4",
    "kind": "latent",
    "dtype": "u8",
    "kv_heads": 1,
    "head_dim": BYTES,
    "layers": [0, LAYERS],
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
    blocks: list[int] = dataclasses.field(default_factory=list)
    external: int = 0  # tokens that the connector has brought, over its life

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


def new_layers(blocks: int, device: str = "cpu") -> list[torch.Tensor]:
    """Memory of the KV of each layer."""
    return [
        torch.zeros(blocks, BLOCK, BYTES, dtype=torch.uint8, device=device) for _ in LAYER_NAMES
    ]


def _mix(state: int, value: int) -> int:
    """The same in every process, which hash() is not."""
    return (state * 6364136223846793005 + value * 1442695040888963407 + 0x9E3779B9) % (1 << 61)


class WrongReport(AssertionError):
    """The worker has not ended just the loads that it was told of."""


class WrongBytes(AssertionError):
    """A forward has read KV that is not that of its tokens."""


class FakeVllm:
    """One engine. step() is a step of scheduler and worker."""

    def __init__(
        self,
        scheduler: Any,
        worker: Any,
        blocks: int,
        *,
        budget: int = 24,
        layers: Any = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """settle: called where the device's own work on the KV begins, behind what was queued for
        it."""
        self.scheduler, self.worker, self.budget = scheduler, worker, budget
        self.weights = 0
        self.settle = settle
        self.free = list(range(blocks))
        self.layers: list[torch.Tensor] = layers or new_layers(blocks)
        self.planned: set[int] = set()  # loads that the worker has not ended
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.refused_blocks = 0
        self.known_blocks: set[tuple[str, int]] = set()
        worker.register_kv_caches(dict(zip(LAYER_NAMES, self.layers, strict=True)))

    # ---- The model

    def truth(self, request: FakeRequest, layer: int, begin: int, end: int) -> np.ndarray:
        salt = int.from_bytes((request.cache_salt or "").encode(), "little")
        state = _mix(salt, self.weights)
        rows = []
        for position, token in enumerate(request.all_token_ids[:end]):
            state = _mix(state ^ (state >> 31), token)
            if position >= begin:
                rows.append(np.frombuffer((state ^ layer * 77).to_bytes(8, "little"), np.uint8))
        return np.array(rows, np.uint8).reshape(-1, BYTES)

    def _rows(self, request: FakeRequest, layer: int, begin: int, end: int) -> Any:
        flat = self.layers[layer][request.blocks].reshape(-1, BYTES)
        return flat[begin:end].cpu().numpy()

    def _forward(self, request: FakeRequest, count: int, bad: set[int]) -> None:
        self.settle()
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        for layer in range(LAYERS):
            if not bad & set(request.blocks) and not np.array_equal(
                self._rows(request, layer, 0, begin), self.truth(request, layer, 0, begin)
            ):
                raise WrongBytes(f"{request.request_id} layer {layer} before {begin}")
            new = self.truth(request, layer, begin, end)
            if bad & set(request.blocks):
                new = new ^ 0x55  # computed from what is not there
            for position in range(begin, end):
                block = request.blocks[position // BLOCK]
                self.layers[layer][block, position % BLOCK] = torch.from_numpy(
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
        self._finish(request)

    def _finish(self, request: FakeRequest) -> None:
        assert self.scheduler.request_finished(request, request.blocks) == (False, None)
        self._release(request)

    def _release(self, request: FakeRequest) -> None:
        self.settle()
        for block in request.blocks:
            for layer in self.layers:
                layer[block] = 0xDD  # nobody may rely on it
        self.free.extend(request.blocks)
        request.blocks = []

    def _grow(self, request: FakeRequest, tokens: int) -> bool:
        need = -(-tokens // BLOCK) - len(request.blocks)
        if need > len(self.free):
            return False
        for _ in range(max(0, need)):
            request.blocks.append(self.free.pop(0))
        return True

    def _preempt(self, request: FakeRequest) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def _schedule(self) -> tuple[Any, list[FakeRequest]]:
        budget, counts, new, cached = self.budget, {}, [], []
        running: list[FakeRequest] = []
        preempted = False
        queue = list(self.running)
        while queue:
            request = queue.pop(0)
            count = min(budget, len(request.all_token_ids) - request.num_computed_tokens)
            if count <= 0:
                running.append(request)
                continue
            while not self._grow(request, request.num_computed_tokens + count):
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
        for request in list(self.waiting) if not preempted else []:
            if budget <= 0:
                break
            external, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            assert not is_async
            if external is None:
                continue
            assert external % BLOCK == 0
            assert external < len(request.all_token_ids)
            count = min(budget, len(request.all_token_ids) - external)
            if not self._grow(request, external + count):
                break
            blocks = list(request.blocks)
            self.scheduler.update_state_after_alloc(
                request, types.SimpleNamespace(get_block_ids=lambda b=blocks: (b,)), external
            )
            sources = self.scheduler.get_external_cache_hit_sources(request, external)
            assert sum(sources.values()) in (0, external)  # 0: it says nothing
            request.external += external
            request.num_computed_tokens = external
            self.waiting.remove(request)
            running.append(request)
            new.append(request)
            counts[request.request_id] = count
            budget -= count
        self.running = running
        every = {each.request_id: each for each in running}
        output = types.SimpleNamespace(
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
                get_block_ids=lambda name: (list(every[name].blocks),)
            ),
        )
        return output, [every[name] for name in counts]

    def _check_report(self, report: Any) -> None:
        """Each load is ended in the step that it was planned for, and once."""
        ended = [] if report is None else report.ended
        if sorted(ended) != sorted(self.planned):
            raise WrongReport(f"planned were {sorted(self.planned)}, ended are {sorted(ended)}")
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

    def step(self) -> None:
        output, scheduled = self._schedule()
        counts = output.num_scheduled_tokens
        plan = self.scheduler.build_connector_meta(output)
        self.planned |= {load.number for load in plan.loads}
        # ---- the worker
        self.worker.bind_connector_metadata(plan)
        self.worker.start_load_kv(None)
        # vLLM learns of them only after the step; the fake forward has to know now.
        bad = self.worker.get_block_ids_with_load_errors()
        for request in scheduled:
            for name in LAYER_NAMES:
                self.worker.wait_for_layer_load(name)
            self._forward(request, counts[request.request_id], bad)
        self.worker.wait_for_save()
        bad |= self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        # ---- the scheduler again
        self._check_report(report)
        self.refused_blocks += len(bad)
        self.scheduler.update_connector_output(
            types.SimpleNamespace(kv_connector_worker_meta=report)
        )
        self._note(self.scheduler.take_events())
        for request in scheduled:
            invalid = [i for i, block in enumerate(request.blocks) if block in bad]
            if invalid:
                request.num_computed_tokens = invalid[0] * BLOCK
                continue
            request.num_computed_tokens += counts[request.request_id]
            if request.num_computed_tokens == len(request.all_token_ids):
                request.all_token_ids.append(hash(tuple(request.all_token_ids)) % 7)
            if request.done:
                self.running.remove(request)
                self._finish(request)
