"""The order in which a kernel has keys and values within vLLM's blocks. It is learnt: elements of
distinct values are written through vLLM's own operator, and looked for in the bytes of the block.

What has been learnt is checked with random values, in parts of blocks and with tokens out of order,
in every layer. A kernel whose blocks are not a permutation of elements is found out: it has no
order, and chunks are its blocks as they are.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

import quire
from quire.vllm._groups import KvGroup, KvRows
from quire.vllm._kernel import CacheWriter, NotLearntError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KernelOrder", "check_order", "learn_order"]

# Numbers that all element types of KV have, FP8's with two bits of mantissa among them. An
# element's index is written digit by digit.
_SIZES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_DIGITS = (*_SIZES, *(-size for size in _SIZES))
_SCRATCH_BLOCKS = 3
_SEED = 5


@dataclasses.dataclass(frozen=True, eq=False)
class KernelOrder:
    """How the keys of a block, [tokens, heads, key_dim], and its values lie in the block."""

    key: quire.BlockOrder
    value: quire.BlockOrder

    def is_same(self, other: KernelOrder | None) -> bool:
        """Whether keys and values lie in the same places."""
        return other is not None and all(
            mine.run_bytes == theirs.run_bytes and np.array_equal(mine.offsets, theirs.offsets)
            for mine, theirs in ((self.key, other.key), (self.value, other.value))
        )


class _Scratch:
    """The last blocks of a layer, which no request has yet. Their bytes come back at the end.

    pages: the layer's blocks, uint8 [blocks, ...]. Bits are elements as unsigned integers.
    """

    def __init__(self, writer: CacheWriter, pages: Any, group: KvGroup, rows: KvRows) -> None:
        if len(pages) < _SCRATCH_BLOCKS:
            raise NotLearntError(f"there are {len(pages)} blocks; {_SCRATCH_BLOCKS} are needed")
        if writer.cache.untyped_storage().data_ptr() != pages.untyped_storage().data_ptr():
            raise NotLearntError("the layer has another tensor than the one that is registered")
        self.block_size, self.rows = group.block_size, rows
        self._writer, self._pages = writer, pages
        self._first = len(pages) - _SCRATCH_BLOCKS
        self._kept = pages[self._first :].clone()
        self._unsigned = np.dtype(f"u{rows.element_bytes}")

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._pages[self._first :] = self._kept

    def write(self, keys: Tensor, values: Tensor, places: Any) -> None:
        """keys, values: [tokens, heads, dim], of the type that is stored. places: of the tokens in
        the scratch blocks, one after the other."""
        import torch

        slots = torch.as_tensor(places, dtype=torch.int64) + self._first * self.block_size
        self._writer.write(keys, values, slots)

    def bits(self, block: int) -> Any:
        """What a block has, [elements]."""
        page = self._pages[self._first + block].cpu().contiguous()
        return page.numpy().ravel().view(self._unsigned)

    def bits_of(self, elements: Tensor) -> Any:
        """Elements of the stored type as bits, of the same shape."""
        import torch

        return elements.contiguous().view(torch.uint8).numpy().view(self._unsigned)

    def shapes(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the keys and of the values of `tokens` tokens."""
        rows = self.rows
        return (tokens, rows.heads, rows.key_dim), (tokens, rows.heads, rows.value_dim)


def _find_places(scratch: _Scratch, element: Any) -> Any:
    """Where each element of a block lies, counted in elements: keys, then values."""
    import torch

    key_shape, value_shape = scratch.shapes(scratch.block_size)
    key_count = int(np.prod(key_shape))
    count = key_count + int(np.prod(value_shape))
    digits = torch.tensor(_DIGITS, dtype=torch.float32)
    bits = scratch.bits_of(digits.to(element))
    by_bits = np.argsort(bits)
    found = np.zeros(count, np.int64)
    factor = 1
    while factor < count:
        own = torch.from_numpy(np.arange(count) // factor % len(_DIGITS))
        elements = digits[own].to(element)
        scratch.write(
            elements[:key_count].reshape(key_shape),
            elements[key_count:].reshape(value_shape),
            np.arange(scratch.block_size),
        )
        read = scratch.bits(0)
        at = by_bits[np.searchsorted(bits, read, sorter=by_bits).clip(max=len(bits) - 1)]
        if not np.array_equal(bits[at], read):
            raise NotLearntError("the kernel stores other values than it is given")
        found += factor * at
        factor *= len(_DIGITS)
    places = np.full(count, -1, np.int64)
    places[found.clip(max=count - 1)] = np.arange(count)
    if not np.array_equal(found[places], np.arange(count)):
        raise NotLearntError("the kernel's blocks are no permutation of keys and values")
    return places[:key_count], places[key_count:]


def _runs(places: Any, element_bytes: int) -> quire.BlockOrder:
    """Elements that follow each other in the block, too, are one run: the longest that all are."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    run = int(np.gcd.reduce(np.append(ends, len(places))))
    return quire.BlockOrder(places[::run] * element_bytes, run * element_bytes)


def learn_order(writer: CacheWriter, pages: Any, group: KvGroup, rows: KvRows) -> KernelOrder:
    """The order of a layer's blocks, which check_order has still to take.

    Raises NotLearntError where they have none.
    """
    with _Scratch(writer, pages, group, rows) as scratch:
        keys, values = _find_places(scratch, writer.element)
    return KernelOrder(_runs(keys, rows.element_bytes), _runs(values, rows.element_bytes))


def _draw(rng: np.random.Generator, shape: tuple[int, ...], element: Any) -> Tensor:
    """Any finite numbers of the type."""
    import torch

    size = torch.empty(0, dtype=element).element_size()
    raw = rng.integers(0, 256, int(np.prod(shape)) * size, np.uint8)
    drawn = torch.from_numpy(raw).view(element).reshape(shape).to(torch.float32)
    return torch.where(torch.isfinite(drawn), drawn, 1.0).to(element)


def check_order(
    order: KernelOrder, writer: CacheWriter, pages: Any, group: KvGroup, rows: KvRows
) -> None:
    """Writes random values into a layer's blocks: all tokens of two of them, out of order, and then
    some of them again.

    Raises NotLearntError where a byte is not where the order says.
    """
    rng = np.random.default_rng(_SEED)
    tokens = 2 * group.block_size
    with _Scratch(writer, pages, group, rows) as scratch:
        shapes = scratch.shapes(tokens)
        expected = [np.zeros(shape, f"u{rows.element_bytes}") for shape in shapes]
        for count in (tokens, max(1, tokens // 3), 1):
            written = rng.permutation(tokens)[:count]
            new = [_draw(rng, (count, *shape[1:]), writer.element) for shape in shapes]
            scratch.write(new[0], new[1], written + group.block_size)
            for whole, part in zip(expected, new, strict=True):
                whole[written] = scratch.bits_of(part)
            for block in range(2):
                own = slice(block * group.block_size, (block + 1) * group.block_size)
                found = scratch.bits(block + 1).view(np.uint8)
                for name, whole in zip((order.key, order.value), expected, strict=True):
                    runs = name.offsets[:, None] + np.arange(name.run_bytes)
                    if not np.array_equal(found[runs].ravel(), whole[own].view(np.uint8).ravel()):
                        raise NotLearntError("the kernel's blocks are not always in one order")
