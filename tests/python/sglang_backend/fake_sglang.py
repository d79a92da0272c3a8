"""SGLang as its backend sees it: the base class and configuration of HiCache (0.5.23), host pools
in each layout, and what the cache controller does with them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8


class HiCacheStorage(ABC):
    """The methods of SGLang's class, abstract where they are."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        pass

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        pass

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: Any, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> int:
        return next((i for i, key in enumerate(keys) if not self.exists(key)), len(keys))

    def clear(self) -> None:
        pass

    def get_stats(self) -> Any:
        return None


@dataclasses.dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = "m/fake"
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`sglang.srt.mem_cache.hicache_storage` can be imported meanwhile."""
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"]
    modules = {name: types.ModuleType(name) for name in names}
    for name in names[:-1]:
        modules[name].__path__ = []
    for parent, child in zip(names, names[1:], strict=False):
        setattr(modules[parent], child.rpartition(".")[2], modules[child])
    modules[names[-1]].HiCacheStorage = HiCacheStorage  # type: ignore[attr-defined]
    modules[names[-1]].HiCacheStorageConfig = HiCacheStorageConfig  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class HostPool:
    """Host memory of `pages` pages of bfloat16, in one of SGLang's layouts. Without views it has
    the methods that copy alone."""

    def __init__(
        self,
        layout: str = "layer_first",
        *,
        mla: bool = False,
        pages: int = 16,
        views: bool = True,
        page: int = PAGE,
        heads: int = HEADS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout, self.page_size, self.size, self.dtype = layout, page, pages * page, dtype
        self._views = views
        token = (1, heads * DIM) if mla else (heads, DIM)
        shape: tuple[int, ...] = {
            "layer_first": (LAYERS, self.size, *token),
            "page_first": (self.size, LAYERS, *token),
            "page_first_direct": (pages, LAYERS, page, *token),
        }[layout]
        self._axis = (1 if layout == "layer_first" else 0) + (not mla)
        self.kv_buffer = torch.zeros(shape if mla else (2, *shape), dtype=dtype)
        self.page_bytes = LAYERS * page * heads * DIM * dtype.itemsize * (1 if mla else 2)

    def _page(self, index: int) -> torch.Tensor:
        if self.layout == "page_first_direct":
            return self.kv_buffer.narrow(self._axis, index // self.page_size, 1)
        return self.kv_buffer.narrow(self._axis, index, self.page_size)

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        if not self._views and not flat:
            raise TypeError("get_data_page() got an unexpected keyword argument 'flat'")
        return self._page(int(index)).flatten() if flat else self._page(int(index))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_bytes // self.dtype.itemsize, dtype=self.dtype)

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        page = self._page(int(index))
        page.copy_(data_page.reshape(page.shape))

    def bytes_of(self, page: int) -> bytes:
        return self._page(page * self.page_size).contiguous().view(torch.uint8).numpy().tobytes()

    def fill(self, page: int, content: bytes) -> None:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(self.dtype)
        self.set_from_flat_data_page(page * self.page_size, data)


class Rank:
    """One rank of a server: its pool, its backend, and what the controller calls."""

    def __init__(self, backend_class: Any, pool: HostPool, v1: bool = True, **fields: Any) -> None:
        extra = {"backend_name": "quire", "module_path": "quire.sglang", **fields.pop("extra")}
        config = HiCacheStorageConfig(
            extra_config={**extra, "class_name": "QuireHiCacheStorage", "interface_v1": int(v1)},
            **fields,
        )
        self.backend = backend_class(config, {})
        self.pool, self._v1 = pool, v1
        self.backend.register_mem_pool_host(pool)

    def indices(self, pages: list[int]) -> torch.Tensor:
        """The tokens of pages in the pool."""
        size = self.pool.page_size
        return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])

    def backup(self, keys: list[str], pages: list[int]) -> list[bool]:
        """Stores pages of the pool."""
        if self._v1:
            return self.backend.batch_set_v1(keys, self.indices(pages))
        values = [self.pool.get_data_page(page * self.pool.page_size) for page in pages]
        return [self.backend.batch_set(keys, values)] * len(keys)

    def load(self, keys: list[str], pages: list[int]) -> list[bool]:
        """Loads pages into the pool."""
        if self._v1:
            return self.backend.batch_get_v1(keys, self.indices(pages))
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        found = self.backend.batch_get(keys, targets)
        for page, each in zip(pages, found, strict=True):
            if each is not None:
                self.pool.set_from_flat_data_page(page * self.pool.page_size, each)
        return [each is not None for each in found]


def content(key: str, rank: int, size: int) -> bytes:
    """What a rank has computed for the page of this key."""
    seed = int(key[:8], 16) * 64 + rank
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
