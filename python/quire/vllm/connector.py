"""quire.vllm.QuireConnector: what vLLM's scheduler and workers call.

No call raises into vLLM once it is constructed: what fails is logged once per call and kind,
counted as an error, and answered by a miss. A load that fails is reported by its blocks, so that
vLLM computes them; nothing else ever stands in for bytes that were not verified.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from quire import errors
from quire.vllm._arena import Arena
from quire.vllm._base import HAS_VLLM, ConnectorBase, SupportsHMA, TransferResults, is_worker
from quire.vllm._events import ChunkEvents
from quire.vllm._groups import KvGroup, common_block, groups_of
from quire.vllm._identity import passport_of
from quire.vllm._options import Options, close_store, open_store
from quire.vllm._plan import StepPlan, WorkerReport
from quire.vllm._scheduler import SchedulerSide
from quire.vllm._statistics import QuireStatistics, prometheus_metrics
from quire.vllm._worker import WorkerSide

__all__ = ["QuireConnector"]

_log = logging.getLogger("vllm.quire" if HAS_VLLM else "quire.vllm")
_TESTED = (0, 32)  # of vLLM
_SOURCES = {"ram": "HOST", "disk": "DISK", "redis": "EXTERNAL_UNSPECIFIED"}

_F = TypeVar("_F", bound=Callable[..., Any])

# Workers of this process, so that a scheduler knows whether its worker is one of them.
_workers_here: weakref.WeakSet[Any] = weakref.WeakSet()


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


def _check_version() -> None:
    if not HAS_VLLM:
        return
    import vllm

    parts = str(vllm.__version__).split(".")
    if tuple(int(part) for part in parts[:2] if part.isdigit()) != _TESTED:
        _log.warning(
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


def _wants_events(vllm_config: Any) -> bool:
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(getattr(events, "enable_kv_cache_events", False))


def _check_parallel(parallel: Any, ranks: int) -> None:
    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    contexts = [
        int(getattr(parallel, f"{name}_context_parallel_size", 1)) for name in ("decode", "prefill")
    ]
    tensor = int(getattr(parallel, "tensor_parallel_size", 1))
    if stages != 1 or contexts != [1, 1] or tensor != ranks:
        raise errors.BadArgumentError(
            f"QuireConnector: {ranks} workers by pipeline or context parallel; it takes tensor "
            "parallel alone"
        )


def _arenas(options: Options, parts: list[KvGroup]) -> list[Arena]:
    """Shared memory of all parts, of as many chunks each."""
    chunk_bytes = [part.layer_bytes * len(part.layer_names) for part in parts]
    return [
        Arena(
            options.shared_bytes * each // sum(chunk_bytes), part.layer_bytes, len(part.layer_names)
        )
        for part, each in zip(parts, chunk_bytes, strict=True)
    ]


def _events(vllm_config: Any, options: Options, groups: list[KvGroup]) -> ChunkEvents | None:
    """Events of the first group that attends to everything. None: vLLM wants none, or its hashes
    are not of that group's blocks."""
    block_size = int(vllm_config.cache_config.block_size)
    if not _wants_events(vllm_config) or any(each.block_size != block_size for each in groups):
        return None
    number = next((i for i, each in enumerate(groups) if each.window is None), 0)
    return ChunkEvents(block_size, options.chunk_tokens, number)


class QuireConnector(ConnectorBase, SupportsHMA):  # type: ignore[misc]
    """A KV connector of vLLM over quire.ChunkStore.

    Raises, at the start only:
        BadArgumentError: an option, a model whose KV it cannot keep (a recurrent state and others),
            pipeline parallel, or KV that is neither a CPU's nor a CUDA GPU's.
        IncompatibleError: a vLLM whose interface has methods that the connector lacks.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _check_version()
        self._seen_failures: set[tuple[str, str]] = set()
        self._errors = 0
        parallel = vllm_config.parallel_config
        ranks = int(getattr(parallel, "world_size", 1))
        _check_parallel(parallel, ranks)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        self._options = Options.read(extra, common_block(kv_cache_config))
        groups = groups_of(kv_cache_config, self._options.chunk_tokens)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if is_worker(role):
            self._worker = WorkerSide(
                self._options,
                groups,
                kv_cache_config.num_blocks,
                rank=int(getattr(parallel, "rank", 0)) % ranks,
                tells_events=_wants_events(vllm_config),
            )
            _workers_here.add(self)
            return
        passports = [
            passport_of(vllm_config, group, rank=rank, rank_count=ranks, is_only=len(groups) == 1)
            for rank in range(ranks)
            for group in groups
        ]
        apart = len(_workers_here) == 0
        if apart and not self._options.has_slow_tier:
            raise errors.BadArgumentError(
                "QuireConnector: scheduler and worker are two processes, which have no RAM in "
                "common: give a directory or redis (or VLLM_ENABLE_V1_MULTIPROCESSING=0)"
            )
        self._store = open_store(self._options)
        self._scheduler = SchedulerSide(
            self._store,
            self._options,
            groups,
            passports,
            _arenas(self._options, groups * ranks) if apart or ranks > 1 else None,
            events=_events(vllm_config, self._options, groups),
        )
        if self._scheduler.waits_for_loads and TransferResults is None:
            raise errors.IncompatibleError(
                "QuireConnector: this vLLM cannot be told that a load has failed where a model has "
                "several groups of layers, windows, or several workers"
            )

    def _failed(self, call: str, error: Exception) -> None:
        self._errors += 1
        seen = (call, type(error).__name__)
        if seen not in self._seen_failures:
            self._seen_failures.add(seen)
            _log.error(
                "QuireConnector.%s failed; it goes on without: %s", call, error, exc_info=error
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
        # call has no answer that stands for it.
        return self._here.plan(scheduler_output)

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
