"""Quire's store under SGLang's HiCache: a third level of checked pages that survives a restart.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
            "backend_name": "quire", "module_path": "quire.sglang",
            "class_name": "QuireHiCacheStorage", "interface_v1": 1, "directory": "/var/kv"}'

docs/sglang.md has the options and the limits. SGLang itself is not needed to import this.
"""

from __future__ import annotations

from quire.sglang._backend import QuireHiCacheStorage

__all__ = ["QuireHiCacheStorage"]
