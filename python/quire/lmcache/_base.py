"""LMCache's classes, or plain ones where it is not installed, as in tests of the adapter."""

from __future__ import annotations

import importlib.util
from typing import Any

__all__ = ["AdapterBase", "Bits", "StoreResult"]

AdapterBase: Any
Bits: Any
StoreResult: Any

if importlib.util.find_spec("lmcache") is not None:
    from lmcache import lmcache_native as _native
    from lmcache.v1.distributed import internal_api as _internal_api
    from lmcache.v1.distributed.l2_adapters import base as _lmcache_base

    AdapterBase = _lmcache_base.L2AdapterInterface
    Bits = _native.Bitmap
    StoreResult = _internal_api.L2StoreResult
else:

    class _Adapter:
        """What the adapter uses of LMCache's base class: the bytes of each salt."""

        def __init__(self, max_capacity_bytes: int = 0) -> None:
            self._max_capacity_bytes = max_capacity_bytes
            self.bytes_by_cache_salt: dict[str, int] = {}

        def _count(self, keys: list[Any], sizes: list[int]) -> None:
            for key, size in zip(keys, sizes, strict=True):
                held = self.bytes_by_cache_salt.get(key.cache_salt, 0)
                self.bytes_by_cache_salt[key.cache_salt] = held + size

        def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            self._count(keys, sizes)

        def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
            self._count(keys, [-size for size in sizes])

        def _notify_keys_accessed(self, keys: list[Any]) -> None:
            """Nobody listens."""

    class _Bits:
        """A bit for each key of a task."""

        def __init__(self, size: int) -> None:
            self._bits = [False] * size

        def set(self, index: int) -> None:
            self._bits[index] = True

        def test(self, index: int) -> bool:
            return self._bits[index]

    class _StoreResult(int):
        """Bytes that were stored; -1: the task has failed."""

        def __new__(cls, success: bool, bytes_transferred: int) -> _StoreResult:
            return super().__new__(cls, bytes_transferred if success else -1)

        def is_successful(self) -> bool:
            return self >= 0

    AdapterBase, Bits, StoreResult = _Adapter, _Bits, _StoreResult
