"""A plugin of pytest: quire.lmcache under the names that LMCache 0.3.7's tests of blending import.
Of its configuration they use the format of KV alone."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from quire import lmcache


class _Config:
    @classmethod
    def from_defaults(cls, **_options: Any) -> _Config:
        return cls()


class _Metadata(NamedTuple):
    model_name: str
    world_size: int
    worker_id: int
    fmt: str
    kv_dtype: Any
    kv_shape: tuple[int, ...]


def _engine(_config: _Config, metadata: _Metadata) -> lmcache.LMCacheEngine:
    return lmcache.LMCacheEngine(fmt=metadata.fmt)


def _name(module: str, **values: Any) -> None:
    made = types.ModuleType(module)
    vars(made).update(values)
    sys.modules[module] = made


_name("lmcache")
_name("lmcache.blend")
_name("lmcache.blend.executor", CacheBlendImpl=lmcache.CacheBlendImpl)
_name("lmcache.blend.retriever", SPTBlendRetriever=lmcache.SPTBlendRetriever)
_name("lmcache.cache_engine", LMCacheEngine=_engine)
_name("lmcache.config", LMCacheEngineConfig=_Config, LMCacheEngineMetadata=_Metadata)


@pytest.fixture
def autorelease() -> Iterator[Callable[[Any], Any]]:
    """Closes what it was given, as that of LMCache's tests does."""
    given: list[Any] = []

    def release_later(each: Any) -> Any:
        given.append(each)
        return each

    yield release_later
    for each in given:
        each.close()
