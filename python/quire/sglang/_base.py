"""SGLang's base class; where SGLang is not installed, one that says so when it is created."""

from __future__ import annotations

from typing import Any

__all__ = ["StorageBase"]

StorageBase: Any

try:
    from sglang.srt.mem_cache import hicache_storage as _hicache_storage
except ModuleNotFoundError as error:
    if error.name != "sglang":  # SGLang lacks something itself
        raise

    class _Missing:
        def __new__(cls, *_: Any) -> _Missing:
            raise ModuleNotFoundError(
                "quire.sglang: the package sglang is missing: pip install sglang", name="sglang"
            )

    StorageBase = _Missing
else:
    StorageBase = _hicache_storage.HiCacheStorage
