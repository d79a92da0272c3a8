"""Attention kernels that keep keys and values in blocks in an order of their own, and vLLM's
interface to them: what quire.vllm calls to learn the order. Some of them have none."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import numpy as np
import torch

__all__ = ["BROKEN_KERNELS", "KERNELS", "FakeKernel", "bind_caches"]


@dataclasses.dataclass(frozen=True)
class FakeKernel:
    """order: of the elements of a block. A token has keys [heads, key_dim], then values; all of its
    elements together are the bytes that fake_vllm's tokens have."""

    order: str
    heads: int = 2
    key_dim: int = 1
    value_dim: int = 1
    element: torch.dtype = torch.bfloat16

    @property
    def element_bytes(self) -> int:
        return torch.empty(0, dtype=self.element).element_size()

    @property
    def row(self) -> int:
        """Elements of a token."""
        return self.heads * (self.key_dim + self.value_dim)

    @functools.cache  # noqa: B019  # kernels are constants of the tests
    def places(self, block_size: int) -> np.ndarray[Any, Any]:
        """Where the elements of each token lie in a block, [tokens, row], counted in elements."""
        keys = self.heads * self.key_dim
        if self.order == "rows":
            return np.arange(block_size * self.row).reshape(block_size, self.row)
        if self.order == "planes":
            of_keys = np.arange(block_size * keys).reshape(block_size, keys)
            values = self.row - keys
            of_values = np.arange(block_size * values).reshape(block_size, values)
            return np.concatenate([of_keys, of_keys.size + of_values], axis=1)
        if self.order == "heads":
            size = block_size * (self.key_dim + self.value_dim)
            heads = np.arange(self.heads * size).reshape(self.heads, size)
            split = block_size * self.key_dim
            # Keys of a head lie dimension by dimension, values token by token.
            of_keys = heads[:, :split].reshape(self.heads, self.key_dim, block_size)
            of_values = heads[:, split:].reshape(self.heads, block_size, self.value_dim)
            return np.concatenate(
                [
                    of_keys.transpose(2, 0, 1).reshape(block_size, -1),
                    of_values.transpose(1, 0, 2).reshape(block_size, -1),
                ],
                axis=1,
            )
        return np.random.default_rng(7).permutation(block_size * self.row).reshape(block_size, -1)

    def put(self, memory: torch.Tensor, block: int, token: int, row: torch.Tensor) -> None:
        """row: bytes of one token."""
        page = memory[block].view(-1, self.element_bytes)
        page[torch.from_numpy(self.places(memory.shape[1])[token])] = row.view(
            -1, self.element_bytes
        ).to(memory.device)

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Bytes of the tokens of blocks, [tokens, bytes of a token]."""
        places = torch.from_numpy(self.places(pages.shape[1]).ravel()).to(pages.device)
        elements = pages.reshape(len(pages), -1, self.element_bytes)[:, places]
        return elements.reshape(-1, self.row * self.element_bytes)

    # ---- As vLLM has it

    def specify(self, spec: Any) -> None:
        """Adds what vLLM says of such KV."""
        spec.num_kv_heads, spec.dtype = self.heads, self.element
        spec.head_size, spec.head_size_v = self.key_dim, self.value_dim

    def layer(self) -> Any:
        """vLLM's attention of a layer."""
        return types.SimpleNamespace(impl=self, kv_cache=None)

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        rows = torch.cat([key.flatten(1), value.flatten(1)], 1).to(self.element)
        size = kv_cache.shape[1]
        for slot, row in zip(slot_mapping.tolist(), rows.view(torch.uint8), strict=True):
            self.put(kv_cache, slot // size, slot % size, row)


KERNELS = [
    FakeKernel("rows"),
    FakeKernel("planes"),
    FakeKernel("heads"),
    FakeKernel("random"),
]


class _Rounds(FakeKernel):
    """Stores other values than the few that an order is learnt by."""

    def put(self, memory: torch.Tensor, block: int, token: int, row: torch.Tensor) -> None:
        bits = row.view(torch.int16)
        super().put(memory, block, token, (bits & ~1).view(torch.uint8))


class _Turns(FakeKernel):
    """Has another order in each block."""

    def put(self, memory: torch.Tensor, block: int, token: int, row: torch.Tensor) -> None:
        super().put(memory, block, (token + block) % memory.shape[1], row)


class _Repeats(FakeKernel):
    """Stores keys twice, and no values."""

    def put(self, memory: torch.Tensor, block: int, token: int, row: torch.Tensor) -> None:
        keys = row[: self.heads * self.key_dim * self.element_bytes]
        super().put(memory, block, token, torch.cat([keys, keys]))


class _Gathers(FakeKernel):
    """Has another order where a call brings less than a block."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        if len(key) < kv_cache.shape[1]:
            key, value = value, key
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class _Fails(FakeKernel):
    """Cannot be called."""

    def do_kv_cache_update(self, *_: object) -> None:
        raise RuntimeError("no such kernel")


BROKEN_KERNELS = [each("heads") for each in (_Rounds, _Turns, _Repeats, _Gathers, _Fails)]


def bind_caches(worker: Any, caches: dict[str, torch.Tensor]) -> None:
    """vLLM gives each layer its KV before the connector hears of it."""
    layers = worker._vllm_config.compilation_config.static_forward_context
    for name, cache in caches.items():
        if name in layers:
            layers[name].kv_cache = cache
