"""quire.vllm.QuireConnector: what vLLM's scheduler and workers call.

No call raises into vLLM once it is constructed: what fails is logged once per call and kind,
counted as an error, and answered by a miss. A load that fails is reported by its blocks, so that
vLLM computes them; nothing else ever stands in for bytes that were not verified.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire import errors
from quire.vllm._adapters import Adapters
from quire.vllm._base import (
    HAS_VLLM,
    ConnectorBase,
    SupportsHMA,
    TransferResults,
    is_worker,
    log,
)
from quire.vllm._events import ChunkEvents
from quire.vllm._groups import KvGroup, common_block, groups_of, has_states
from quire.vllm._identity import Shard, check_weights
from quire.vllm._kernel import cache_writer
from quire.vllm._options import Options, close_store, open_store
from quire.vllm._parts import Part, parts_of, share_memory
from quire.vllm._plan import Handshake, StepPlan, WorkerReport
from quire.vllm._scheduler import SchedulerSide
from quire.vllm._statistics import QuireStatistics, prometheus_metrics
from quire.vllm._worker import WorkerSide

__all__ = ["QuireConnector"]

_TESTED = (0, 32)  # of vLLM
_SOURCES = {"ram": "HOST", "disk": "DISK", "redis": "EXTERNAL_UNSPECIFIED"}

_F = TypeVar("_F", bound=Callable[..., Any])

# Workers of this process, so that a scheduler knows whether its worker is one of them.
_workers_here: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_workers_here.clear)

#: What a step's plan is made of.
_OUTPUT_FIELDS = (
    "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
    "scheduled_spec_decode_tokens", "kv_connector_block_state",
)  # fmt: skip


def _guarded(answer: Callable[[], Any]) -> Callable[[_F], _F]:
    """A call that answers `answer()` where it fails."""

    def guard(method: _F) -> _F:
        @functools.wraps(method)
        def guarded(self: QuireConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._failed(method.__name__, error)
                return answer()

        return guarded  # type: ignore[return-value]

    return guard


def _nothing() -> None:
    return None


def _check_apart(options: Options) -> None:
    """BadArgumentError for options that need a scheduler and a worker in one process."""
    if not options.has_slow_tier:
        raise errors.BadArgumentError(
            "QuireConnector: scheduler and worker are two processes, which have no RAM in "
            "common: give a directory or redis (or VLLM_ENABLE_V1_MULTIPROCESSING=0)"
        )
    if options.store.get("write_policy", "through") != "through":
        raise errors.BadArgumentError(
            "QuireConnector: scheduler and worker are two processes, and the worker, which has "
            "no RAM of the store's, writes through: leave write_policy out (or "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0)"
        )


def _check_version() -> None:
    if not HAS_VLLM:
        return
    import vllm

    parts = str(vllm.__version__).split(".")
    if tuple(int(part) for part in parts[:2] if part.isdigit()) != _TESTED:
        log.warning(
            "QuireConnector was tested with vLLM %d.%d; this is %s", *_TESTED, vllm.__version__
        )
    missing = sorted(
        name
        for name in getattr(ConnectorBase, "__abstractmethods__", ())
        if getattr(QuireConnector, name) is getattr(ConnectorBase, name)
    )
    if missing:
        raise errors.IncompatibleError(
            f"QuireConnector: vLLM {vllm.__version__} asks for methods that it lacks: "
            f"{', '.join(missing)}"
        )
    _check_output(vllm.__version__)


def _check_output(version: str) -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    told = {each.name for each in dataclasses.fields(SchedulerOutput)}
    untold = [name for name in _OUTPUT_FIELDS if name not in told]
    if untold:
        raise errors.IncompatibleError(
            f"QuireConnector: vLLM {version} does not tell a connector {', '.join(untold)}"
        )


def _wants_events(vllm_config: Any) -> bool:
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(getattr(events, "enable_kv_cache_events", False))


def _shards(parallel: Any) -> list[Shard]:
    """What each worker holds of the model, by rank.

    Raises BadArgumentError for workers that hold something else, or are on several hosts.
    """
    tensor = int(getattr(parallel, "tensor_parallel_size", 1))
    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    workers = int(getattr(parallel, "world_size", 1))
    contexts = [
        int(getattr(parallel, f"{name}_context_parallel_size", 1)) for name in ("decode", "prefill")
    ]
    if contexts != [1, 1] or tensor * stages != workers:
        raise errors.BadArgumentError(
            f"QuireConnector: {workers} workers by context parallel; it takes tensor and pipeline "
            "parallel"
        )
    hosts = int(getattr(parallel, "nnodes", 1))
    if hosts != 1:
        raise errors.BadArgumentError(
            f"QuireConnector: the workers are on {hosts} hosts; it takes one, whose memory they "
            "share with the scheduler"
        )
    return Shard.all_of(tensor, stages)


def _events(vllm_config: Any, options: Options, groups: list[KvGroup]) -> ChunkEvents | None:
    """Events of the first group that attends to everything. None: vLLM wants none, its hashes are
    not of that group's blocks, or there are only states, which most blocks lack."""
    block_size = int(vllm_config.cache_config.block_size)
    if not _wants_events(vllm_config) or any(each.block_size != block_size for each in groups):
        return None
    number = next((i for i, each in enumerate(groups) if each.window is None), 0)
    if groups[number].state:
        return None
    return ChunkEvents(block_size, options.chunk_tokens, number)


def _make_parts(
    vllm_config: Any,
    shards: Sequence[Shard],
    shared_bytes: int,
    of_workers: Sequence[Sequence[KvGroup]],
) -> list[Part]:
    """shared_bytes: 0 where the one worker is in this process."""
    parts = parts_of(vllm_config, shards, of_workers)
    if shared_bytes:
        share_memory(parts, shared_bytes)
    return parts


class QuireConnector(ConnectorBase, SupportsHMA):  # type: ignore[misc]
    """A KV connector of vLLM over quire.ChunkStore.

    Raises, at the start only:
        BadArgumentError: an option, a model whose KV it cannot keep (chunked attention and others),
            context parallel, several hosts, or KV that is neither a CPU's nor a CUDA GPU's.
        IncompatibleError: a vLLM whose interface has methods that the connector lacks.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _check_version()
        self._engine_id = getattr(self._kv_transfer_config, "engine_id", None)
        self._seen_failures: set[tuple[str, str]] = set()
        self._errors = 0
        parallel = vllm_config.parallel_config
        shards = _shards(parallel)
        has_stages = shards[0].stage_count > 1
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        self._options = Options.read(
            extra,
            common_block(kv_cache_config),
            # States are stored at the ends of chunks where a step ends, and those end with blocks.
            joins_blocks=not has_states(kv_cache_config),
        )
        groups = groups_of(kv_cache_config, self._options.chunk_tokens)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if is_worker(role):
            self._worker = WorkerSide(
                self._options,
                groups,
                kv_cache_config.num_blocks,
                rank=int(getattr(parallel, "rank", 0)) % len(shards),
                tells_layers=has_stages,
                tells_events=_wants_events(vllm_config),
                writer_of=functools.partial(cache_writer, vllm_config)
                if self._options.layout == "auto"
                else None,
            )
            _workers_here.add(self)
            return
        apart = not any(each._engine_id == self._engine_id for each in _workers_here)
        if apart:
            _check_apart(self._options)
        check_weights(vllm_config)  # fails here, and not when workers are heard

        shared_bytes = self._options.shared_bytes if apart or len(shards) > 1 else 0
        self._store = open_store(self._options)
        try:
            self._scheduler = SchedulerSide(
                self._store,
                self._options,
                groups,
                functools.partial(_make_parts, vllm_config, shards, shared_bytes),
                worker_count=len(shards),
                is_told=has_stages,
                events=_events(vllm_config, self._options, groups),
                adapters=Adapters(getattr(vllm_config, "lora_config", None)),
            )
            if self._scheduler.waits_for_loads and TransferResults is None:
                raise errors.IncompatibleError(
                    "QuireConnector: this vLLM cannot be told that a load has failed where a model "
                    "has several groups of layers, windows, or several workers"
                )
        except BaseException:
            close_store(self._store)
            raise

    def _failed(self, call: str, error: Exception) -> None:
        self._errors += 1
        seen = (call, type(error).__name__)
        if seen not in self._seen_failures:
            self._seen_failures.add(seen)
            # What names itself needs no traceback.
            is_named = isinstance(error, (errors.QuireError, OSError))
            log.error(
                "QuireConnector.%s failed; it goes on without: %s: %s",
                call,
                type(error).__name__,
                error,
                exc_info=None if is_named else error,
            )

    @property
    def _here(self) -> SchedulerSide:
        if self._scheduler is None:
            raise errors.BadStateError("QuireConnector: a call of the scheduler's on a worker")
        return self._scheduler

    @property
    def _there(self) -> WorkerSide:
        if self._worker is None:
            raise errors.BadStateError("QuireConnector: a call of a worker's on the scheduler")
        return self._worker

    # ---- Scheduler

    @_guarded(_nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What the workers have learnt, once they have registered their KV."""
        self._here.hear([each for each in metadata.values() if isinstance(each, Handshake)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """The same, by pipeline stage and rank."""
        self.set_xfer_handshake_metadata(metadata)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later."""
        return False

    @_guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._here.add(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self._here.matched(request, num_computed_tokens)
        return found, bool(found) and self._here.waits_for_loads

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        try:
            self._here.allocated(request, blocks.get_block_ids(), num_external_tokens)
        except Exception as error:
            self._failed("update_state_after_alloc", error)
            if num_external_tokens > 0:
                self._here.spoil(request.request_id, blocks.get_block_ids())

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        if num_external_tokens == 0:
            return {}
        sources: Any = str
        if HAS_VLLM:
            from vllm.v1.metrics.cache_hit_source import CacheHitSource

            sources = CacheHitSource.__getitem__
        found: dict[Any, int] = {}
        for tier, tokens in self._here.sources(request).items():
            name = sources(_SOURCES[tier])
            found[name] = found.get(name, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        # A plan that lacks a load would leave blocks that vLLM believes to be filled, so this one
        # call has no answer that stands for it. What fails for one request is in the plan.
        plan = self._here.plan(scheduler_output)
        for error in self._here.take_errors():
            self._failed("build_connector_meta", error)
        return plan

    @_guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._here.ended(report.ended, report.failed, report.lost)
            self._here.note(report.events)

    @_guarded(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._here.finish(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, where vLLM's hybrid manager is on."""
        return self.request_finished(request, [])

    @_guarded(list)
    def take_events(self) -> list[Any]:
        """Blocks that the store has and has no more, under vLLM's hashes."""
        return self._here.events()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool:
        return self._here.reset()

    # ---- Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._there.register(kv_caches)

    @_guarded(_nothing)
    def get_handshake_metadata(self) -> Handshake | None:
        return self._there.handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._plan()
        if plan is not None:
            self._there.load(plan)
            self._tell_errors("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there when start_load_kv returns: they were in memory before."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole chunks are saved, at the end of the step."""

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        self._there.save(self._plan())
        self._tell_errors("wait_for_save")

    @_guarded(lambda: TransferResults(finished_recving=set(), failed_recving=set()))
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose loads this worker has ended, and those that it has not filled."""
        received, lost = self._there.take_finished()
        return TransferResults(finished_recving=received, failed_recving=lost)

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._there.take_bad_blocks()

    @_guarded(_nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._there.take_report()

    def _tell_errors(self, call: str) -> None:
        for error in self._there.take_errors():
            self._failed(call, error)

    def _plan(self) -> StepPlan | None:
        plan = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else None

    # ---- Both

    @_guarded(_nothing)
    def get_kv_connector_stats(self) -> QuireStatistics | None:
        side = self._worker if self._worker is not None else self._here
        counts = side.take_counts()
        if self._errors:
            counts["errors"], self._errors = self._errors, 0
        return QuireStatistics(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> QuireStatistics:
        return QuireStatistics(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> Any:
        return prometheus_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_guarded(_nothing)
    def shutdown(self) -> None:
        """Writes what is queued and ends. Twice is fine."""
        if self._worker is not None:
            _workers_here.discard(self)
            self._worker.close()
            self._tell_errors("shutdown")
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.close()
            close_store(self._store)
