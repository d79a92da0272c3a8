"""vLLM's own operator that writes keys and values into blocks, of a layer's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.vllm._groups import KvRows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CacheWriter", "NotLearntError", "cache_writer"]


class NotLearntError(Exception):
    """Why the order of a kernel's blocks is not known."""


@dataclasses.dataclass(frozen=True)
class CacheWriter:
    """Writes into the blocks of a layer, the tensor `cache`. element: torch's type of what is
    stored; given: of what the operator takes. update: keys, values, slots."""

    element: Any
    given: Any
    cache: Any
    update: Callable[[Tensor, Tensor, Tensor], object]

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """keys, values: [tokens, heads, dim] of elements. slots: block * tokens of a block + token,
        int64 [tokens]."""
        device = self.cache.device
        keys, values = (each.to(self.given).to(device) for each in (keys, values))
        self.update(keys, values, slots.to(device))


def _element(rows: KvRows, cache_dtype: str) -> Any:
    import torch

    if rows.dtype == "u8":
        return torch.float8_e5m2 if "e5m2" in cache_dtype else torch.float8_e4m3fn
    return {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[rows.dtype]


def cache_writer(vllm_config: Any, layer_name: str, rows: KvRows) -> CacheWriter:
    """The operator of a layer. Raises NotLearntError where its attention has none to call."""
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise NotLearntError(f"{type(layer.impl).__name__} has no operator of its own to write KV")
    cache = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
    return CacheWriter(
        element=_element(rows, str(vllm_config.cache_config.cache_dtype)),
        given=vllm_config.model_config.dtype,
        cache=cache,
        update=lambda keys, values, slots: update(layer, keys, values, cache, slots),
    )
