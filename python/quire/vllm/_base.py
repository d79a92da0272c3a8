"""vLLM's classes, or plain ones where it is not installed: the tests drive the connector without."""

from __future__ import annotations

import importlib.util
from typing import Any

__all__ = ["HAS_VLLM", "Metadata", "Statistics", "WorkerMetadata", "ConnectorBase", "is_worker"]

HAS_VLLM = importlib.util.find_spec("vllm") is not None

ConnectorBase: Any
Metadata: Any
WorkerMetadata: Any
Statistics: Any

if HAS_VLLM:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as _vllm_base
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as _vllm_metrics

    ConnectorBase = _vllm_base.KVConnectorBase_V1
    Metadata = _vllm_base.KVConnectorMetadata
    WorkerMetadata = getattr(_vllm_base, "KVConnectorWorkerMetadata", object)
    Statistics = _vllm_metrics.KVConnectorStats
else:

    class _Connector:
        """What the connector uses of vLLM's base class."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._kv_transfer_config = vllm_config.kv_transfer_config
            self._connector_metadata: Any = None

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            self._connector_metadata = None

    class _Statistics:
        def __init__(self, data: dict[str, Any]) -> None:
            self.data = data

    ConnectorBase, Metadata, WorkerMetadata, Statistics = _Connector, object, object, _Statistics


def is_worker(role: Any) -> bool:
    """Whether a KVConnectorRole is that of a worker."""
    return str(getattr(role, "name", role)) == "WORKER"
