"""vLLM's attention kernel for CPUs, called directly: the peer of attention_bench.cc. Runs in vLLM's
own environment (bench/setup), which has no Quire."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import line_protocol

BLOCK = 128  # vLLM's own choice on CPUs
_cases: dict[str, tuple[Callable[[int], None], int]] = {}
_next_layer: dict[str, int] = {}


def info(threads: int) -> dict[str, Any]:
    import torch
    import vllm
    from vllm.platforms import current_platform

    if hasattr(current_platform, "import_kernels"):
        current_platform.import_kernels()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return {"version": f"vLLM {vllm.__version__}, torch {torch.__version__}"}


def prepare(key: str, threads: int, layers: int, **shape: Any) -> dict[str, Any]:
    del threads  # set once, by info
    _cases[key] = (attention(layers=layers, **shape), layers)
    _next_layer[key] = 0
    run(key, 0.0, 1)
    return {}


def run(key: str, seconds: float, min_calls: int) -> dict[str, Any]:
    call, layers = _cases[key]
    calls: list[float] = []
    begin = time.perf_counter()
    while len(calls) < min_calls or time.perf_counter() - begin < seconds:
        layer = _next_layer[key]
        _next_layer[key] = (layer + 1) % layers
        before = time.perf_counter()
        call(layer)
        calls.append(time.perf_counter() - before)
    return {"samples": {"call": calls}}


def drop(key: str) -> dict[str, Any]:
    _cases.pop(key, None)
    return {}


def attention(
    *,
    kind: str,
    dtype: str,
    kv_heads: int,
    heads: int,
    head_dim: int,
    sequences: int,
    prefix: int,
    own: int,
    rows: int,
    layers: int,
) -> Callable[[int], None]:
    """A call for one layer. Blocks lie in random order; those of the prefix are in every table."""
    import torch
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    assert kind == "attention"
    element = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(1)
    prefix_blocks, own_blocks = -(-prefix // BLOCK), -(-own // BLOCK)
    block_count = prefix_blocks + sequences * own_blocks
    caches = torch.empty((layers, block_count, kv_heads, 2 * BLOCK, head_dim), dtype=element)
    caches.view(-1, 2 * BLOCK, head_dim)[:] = torch.randn(
        (2 * BLOCK, head_dim), generator=generator
    ).to(element)
    order = torch.randperm(block_count, generator=generator).to(torch.int32)
    shared = order[:prefix_blocks].expand(sequences, prefix_blocks)
    table = torch.cat([shared, order[prefix_blocks:].view(sequences, own_blocks)], 1).contiguous()
    queries = torch.randn((sequences * rows, heads, head_dim), generator=generator).to(element)
    out = torch.empty_like(queries)
    starts = torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32)
    lengths = torch.full((sequences,), prefix + own, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=sequences,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=lengths,
        dtype=element,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(element, BLOCK, head_dim),
        enable_kv_split=True,
    )

    def call(layer: int) -> None:
        keys, values = caches[layer].chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )

    return call


if __name__ == "__main__":
    line_protocol.serve({"info": info, "prepare": prepare, "run": run, "drop": drop})
    sys.exit(0)
