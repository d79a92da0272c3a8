"""Quire's store under vLLM: a KV cache that survives a restart.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directory": "/var/kv"}}'

docs/vllm.md has the options and the limits. vLLM itself is not needed to import this.
"""

from __future__ import annotations

from quire.vllm.connector import QuireConnector

__all__ = ["QuireConnector"]
