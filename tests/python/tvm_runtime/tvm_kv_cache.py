"""TVM's paged KV cache for the CPU, as the relax frontend's compiled models make it."""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm_ffi import Shape

PAGE_SIZE = 16  # TVM's kernels know no other
ROPE_THETA = 10000

SIZES = (
    "max_batch_size",
    "max_total_seq_len",
    "prefill_chunk_size",
    "page_size",
    "support_sliding_window",
)


def cache_expression(
    *, layers: int, qo_heads: int, kv_heads: int, head_dim: int, **sizes: Any
) -> PagedKVCache:
    """Inside a module that is exported: a float32 cache with plain attention; `sizes` are the
    arguments that SIZES names. With windows TVM's cache is one of RopeMode.INLINE."""
    return TIRPagedKVCache(
        attn_kind="mha",
        **sizes,
        layer_partition=relax.ShapeExpr([0, layers]),
        num_hidden_layers=layers,
        num_attention_heads=qo_heads,
        num_key_value_heads=kv_heads,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        mla_original_qk_head_dim=0,
        mla_original_v_head_dim=0,
        rope_mode=RopeMode.NORMAL,
        rope_scale=1,
        rope_theta=ROPE_THETA,
        rope_scaling={},
        rope_ext_factors=relax.prim_value(0),
        rotary_dim=head_dim,
        enable_disaggregation=False,
        dtype="float32",
        target=tvm.target.Target("llvm"),
    )


def create_spec() -> dict[str, Any]:
    """Of a module's create_cache, for export_tvm."""
    return {**{name: int for name in SIZES}, "$": {"param_mode": "none", "effect_mode": "none"}}


def new_cache(
    machine: Any, *, sequences: int, tokens: int, chunk: int, windows: bool = False
) -> Any:
    """A cache from the create_cache of a machine's module."""
    sizes = (sequences, tokens, chunk, PAGE_SIZE, int(windows))
    return machine["create_cache"](*(Shape([size]) for size in sizes))


class CacheModule(nn.Module):
    """A module that makes caches; one that also runs a model derives from it."""

    def __init__(self, **shape: int) -> None:
        self._shape = shape

    # TVM reads the names of the arguments.
    def create_cache(
        self,
        max_batch_size: Any,
        max_total_seq_len: Any,
        prefill_chunk_size: Any,
        page_size: Any,
        support_sliding_window: Any,
    ) -> PagedKVCache:
        return cache_expression(
            max_batch_size=max_batch_size,
            max_total_seq_len=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            support_sliding_window=support_sliding_window,
            **self._shape,
        )


@functools.cache
def compiled_alone(**shape: int) -> Any:
    """The executable of CacheModule; `shape` as in cache_expression."""
    module = CacheModule(**shape).export_tvm(spec={"create_cache": create_spec()})[0]
    return tvm.compile(module, target="llvm")
