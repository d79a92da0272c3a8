"""vLLM's classes, or plain ones where it is not installed, as in tests of the connector."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

__all__ = [
    "HAS_VLLM",
    "BlockRemoved",
    "BlockStored",
    "ConnectorBase",
    "HandshakeBase",
    "Metadata",
    "Statistics",
    "SupportsHMA",
    "TransferResults",
    "WorkerMetadata",
    "event_extra_keys",
    "event_hashes",
    "is_worker",
    "log",
]

HAS_VLLM = importlib.util.find_spec("vllm") is not None

log = logging.getLogger("vllm.quire" if HAS_VLLM else "quire.vllm")

ConnectorBase: Any
HandshakeBase: Any
Metadata: Any
WorkerMetadata: Any
Statistics: Any
SupportsHMA: Any
TransferResults: Any  # None: vLLM cannot be told that a load has failed but by blocks
BlockStored: Any
BlockRemoved: Any

if HAS_VLLM:
    from vllm.distributed import kv_events as _kv_events
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as _vllm_base
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as _vllm_metrics

    ConnectorBase = _vllm_base.KVConnectorBase_V1
    HandshakeBase = getattr(_vllm_base, "KVConnectorHandshakeMetadata", object)
    Metadata = _vllm_base.KVConnectorMetadata
    WorkerMetadata = getattr(_vllm_base, "KVConnectorWorkerMetadata", object)
    Statistics = _vllm_metrics.KVConnectorStats
    SupportsHMA = _vllm_base.SupportsHMA
    TransferResults = getattr(_vllm_base, "KVConnectorTransferResults", None)
    BlockStored, BlockRemoved = _kv_events.BlockStored, _kv_events.BlockRemoved
else:
    import types as _types

    class _Connector:
        """What the connector uses of vLLM's base class."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._vllm_config = vllm_config
            self._kv_transfer_config = vllm_config.kv_transfer_config
            self._connector_metadata: Any = None

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            self._connector_metadata = None

    class _Statistics:
        def __init__(self, data: dict[str, Any]) -> None:
            self.data = data

    class _BlockStored(_types.SimpleNamespace):
        """Blocks that are in a medium from now on."""

    class _BlockRemoved(_types.SimpleNamespace):
        """Blocks that are not any more."""

    class _HybridMemory:
        """A connector of several groups of layers."""

    class _TransferResults(_types.SimpleNamespace):
        """Ids of requests: finished_recving, and failed_recving of these."""

    ConnectorBase, Metadata, WorkerMetadata, Statistics = _Connector, object, object, _Statistics
    HandshakeBase = object
    SupportsHMA, TransferResults = _HybridMemory, _TransferResults
    BlockStored, BlockRemoved = _BlockStored, _BlockRemoved


def is_worker(role: Any) -> bool:
    """Whether a KVConnectorRole is that of a worker."""
    return str(getattr(role, "name", role)) == "WORKER"


def event_hashes(hashes: Sequence[Any]) -> list[Any]:
    """Hashes of blocks as vLLM's events have them."""
    if not HAS_VLLM:
        return list(hashes)
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return [maybe_convert_block_hash(each) for each in hashes]


def event_extra_keys(request: Any, first: int, last: int, block_size: int) -> list[Any] | None:
    """What the hashes of blocks [first, last) have in them beside tokens, as vLLM's events have it;
    None for nothing."""
    if not HAS_VLLM:
        return None
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    found = [
        generate_block_hash_extra_keys(request, i * block_size, (i + 1) * block_size, 0)[0]
        for i in range(first, last)
    ]
    keys: list[Any] | None = to_event_extra_keys(found) if any(found) else None
    return keys
