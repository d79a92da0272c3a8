"""A small Llama in TVM's relax frontend, with its paged KV cache, compiled for the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tvm
import tvm_kv_cache
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache

LAYERS = 2
HIDDEN = 32
QO_HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
VOCABULARY = 61
PAGE_SIZE = tvm_kv_cache.PAGE_SIZE
ROPE_THETA = tvm_kv_cache.ROPE_THETA
SM_SCALE = HEAD_DIM**-0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        self.qkv_proj = nn.Linear(HIDDEN, (QO_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(QO_HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache, layer: int) -> nn.Tensor:
        batch, rows, _ = x.shape
        qkv = op.reshape(
            self.qkv_proj(x), (batch, rows, QO_HEADS + 2 * KV_HEADS, HEAD_DIM)
        )
        o = cache.attention_with_fused_qkv(layer, qkv, QO_HEADS, sm_scale=SM_SCALE)
        return self.o_proj(op.reshape(o, (batch, rows, QO_HEADS * HEAD_DIM)))


class Block(nn.Module):
    def __init__(self) -> None:
        self.attention = Attention()
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norm_1 = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.norm_2 = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache, layer: int) -> nn.Tensor:
        x = x + self.attention(self.norm_1(x), cache, layer)
        gate, up = op.split(self.gate_up(self.norm_2(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up)


class Llama(tvm_kv_cache.CacheModule):
    def __init__(self) -> None:
        super().__init__(
            layers=LAYERS, qo_heads=QO_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, token_ids: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
        x = self.embedding(token_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.head(self.norm(x))


@functools.cache
def compiled() -> tuple[Any, list[Any]]:
    """The executable and the weights."""
    model = Llama()
    model.to("float32")
    module, named = model.export_tvm(
        spec={
            "forward": {
                "token_ids": nn.spec.Tensor([1, "rows"], "int32"),
                "cache": nn.spec.Object(object_type=PagedKVCache),
                "$": {"param_mode": "packed", "effect_mode": "none"},
            },
            "create_cache": tvm_kv_cache.create_spec(),
        }
    )[:2]
    random = np.random.default_rng(6)
    weights = [
        tvm.runtime.tensor(
            (random.standard_normal([int(d) for d in parameter.shape]) * 0.3).astype("float32")
        )
        for _, parameter in named
    ]
    return tvm.compile(module, target="llvm"), weights


def new_machine() -> Any:
    return relax.VirtualMachine(compiled()[0], tvm.cpu())


def new_cache(
    machine: Any,
    *,
    sequences: int = 8,
    tokens: int = 512,
    chunk: int = 64,
    windows: bool = False,
) -> Any:
    return tvm_kv_cache.new_cache(
        machine, sequences=sequences, tokens=tokens, chunk=chunk, windows=windows
    )


def logits(machine: Any, cache: Any, token_ids: list[int]) -> np.ndarray:
    ids = tvm.runtime.tensor(np.array([token_ids], dtype="int32"))
    return machine["forward"](ids, cache, compiled()[1]).numpy()[0]
