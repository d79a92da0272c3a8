"""Counts of both sides, as vLLM's log and Prometheus take them."""

from __future__ import annotations

from typing import Any

from quire.vllm._base import HAS_VLLM, Statistics

__all__ = ["QuireStatistics", "prometheus_metrics"]

#: Name and description of each count; a reason follows a dot ("misses.corrupt").
COUNTS = {
    "lookups": "Prompts that were looked for",
    "hit_tokens": "Tokens that were found, by the tier that they came from",
    "misses": "Lookups that ended before the prompt did, by reason",
    "no_room": "Hits that were cut as the shared memory was full",
    "overdue_leases": "Loads that the worker had not ended within lease_timeout",
    "loaded_tokens": "Tokens that were copied into blocks",
    "failed_loads": "Loads whose blocks vLLM was told to compute",
    "spoiled": "Loads that could not be planned",
    "saved_tokens": "Tokens that were given to the store",
    "dropped_saves": "Chunks that were not saved: a queue was full, or a load had failed",
    "errors": "Calls that failed and were answered by a miss",
}


class QuireStatistics(Statistics):  # type: ignore[misc]
    """Counts of an interval: name -> number."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: QuireStatistics) -> QuireStatistics:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not any(self.data.values())


def prometheus_metrics(
    vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
) -> Any:
    """A KVConnectorPromMetrics with a counter `vllm:quire_NAME` for each count."""
    if not HAS_VLLM:
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

    class Metrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            self._counters = {
                name: self._counter_cls(
                    name=f"vllm:quire_{name}",
                    documentation=text,
                    labelnames=[*labelnames, "reason"],
                )
                for name, text in COUNTS.items()
            }

        def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
            for full, count in transfer_stats_data.items():
                name, _, reason = full.partition(".")
                labels = [*per_engine_labelvalues[engine_idx], reason]
                self._counters[name].labels(*labels).inc(count)

    return Metrics()
