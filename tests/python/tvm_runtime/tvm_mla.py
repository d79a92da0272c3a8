"""Caches of MLA layers behind TVM's names, and what a model computes around them, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm_calls import OneCache, create_arguments
from tvm_mla_oracle import attend, with_kernels

HEADS, NOPE, ROPE, VALUE, RANK = 2, 6, 4, 5, 8
DIM = RANK + ROPE
WIDTH = DIM + HEADS * (NOPE + ROPE)  # of a token: what is cached, then its queries
SCALE = (NOPE + ROPE) ** -0.5

PREFILL, EXTEND, DECODE = ("self",), ("self", "cross"), ("cross",)


class Mla:
    """A layer with random weights. Tokens are rows of WIDTH; their rope parts are taken as they are,
    so whoever wants rotations gives rotated ones."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.w_uk = random.standard_normal((HEADS, RANK, NOPE)).astype("float32") * RANK**-0.5
        self.w_uv = random.standard_normal((HEADS, RANK, VALUE)).astype("float32") * RANK**-0.5

    def queries(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = rows[:, DIM:].reshape(-1, HEADS, NOPE + ROPE)
        return q[..., :NOPE], q[..., NOPE:]

    def plain(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v with heads of their own: the form that is not absorbed."""
        latent, rope = rows[:, :RANK], rows[:, RANK:DIM]
        k = np.einsum("nr,hrd->nhd", latent, self.w_uk)
        k = np.concatenate([k, np.repeat(rope[:, None], HEADS, axis=1)], axis=-1)
        v = np.einsum("nr,hrd->nhd", latent, self.w_uv)
        return rows[:, DIM:].reshape(-1, HEADS, NOPE + ROPE), k, v

    def absorbed(self, rows: np.ndarray) -> np.ndarray:
        nope, rope = self.queries(rows)
        return np.concatenate([np.einsum("nhd,hrd->nhr", nope, self.w_uk), rope], axis=-1)

    def project(self, o: np.ndarray) -> np.ndarray:
        return np.einsum("nhr,hrd->nhd", o, self.w_uv)

    def expected(self, rows: np.ndarray, visible: Sequence[Sequence[int]]) -> np.ndarray:
        """The outputs of all rows, each of which sees those of its list."""
        q, k, v = self.plain(rows.astype("float64"))
        mask = np.zeros((len(rows), len(rows)))
        for row, sees in enumerate(visible):
            mask[row, list(sees)] = 1
        return attend(q, k, v, mask, SCALE)[0]


def causal(count: int) -> list[list[int]]:
    return [list(range(row + 1)) for row in range(count)]


def tensor(array: np.ndarray) -> Any:
    return tvm.runtime.tensor(np.ascontiguousarray(array, "float32"))


def output(*shape: int) -> Any:
    return tensor(np.full(shape, np.nan))


class MlaCache(OneCache):
    """A cache of `layers` MLA layers; with `oracle` TVM's own, whatever has its names now."""

    def __init__(self, *, layers: int = 2, oracle: bool = False, **options: Any) -> None:
        options = {
            "kinds": (1,) * layers,
            "heads": (HEADS, 1),
            "dim": DIM,
            "value_dim": RANK,
            **options,
        }
        arguments = create_arguments(**options)
        super().__init__(with_kernels(arguments) if oracle else arguments, **options)
        self.mla = [Mla(layer) for layer in range(self.layers)]

    def rows(self, count: int) -> np.ndarray:
        return self._random.standard_normal((self.layers, count, WIDTH)).astype("float32")

    def run(self, layer: int, rows: np.ndarray, pieces: Sequence[str]) -> np.ndarray:
        """append_mla_kv and these pieces, merged, as [rows, HEADS, VALUE]."""
        mla, count = self.mla[layer], len(rows)
        assert self.append_mla_kv(layer, tensor(rows[:, :DIM])).same_as(self.cache)
        parts = [getattr(self, f"{piece}_piece")(layer, mla, rows) for piece in pieces]
        (o, lse), *others = parts
        assert o.shape == (count, HEADS, VALUE)
        for o2, lse2 in others:
            self.merge_attn_output_inplace(o, lse, o2, lse2)
        return o.numpy()

    def self_piece(self, layer: int, mla: Mla, rows: np.ndarray) -> tuple[Any, Any]:
        o, lse = output(len(rows), HEADS, VALUE), output(len(rows), HEADS)
        q, k, v = (tensor(part) for part in mla.plain(rows))
        self.self_attention(layer, SCALE, q, k, v, o, lse)
        return o, lse

    def cross_piece(self, layer: int, mla: Mla, rows: np.ndarray) -> tuple[Any, Any]:
        o, lse = output(len(rows), HEADS, RANK), output(len(rows), HEADS)
        self.cross_attention(layer, SCALE, tensor(mla.absorbed(rows)), o, lse)
        return tensor(mla.project(o.numpy())), lse

    def mla_forward(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        rows: np.ndarray,
        pieces: Sequence[str] = EXTEND,
        parents: Sequence[int] | None = None,
    ) -> np.ndarray:
        """A whole forward; rows is [layers, n, WIDTH], the result [layers, n, HEADS, VALUE]."""
        self.begin(ids, lengths, parents)
        outputs = [self.run(layer, part, pieces) for layer, part in enumerate(rows)]
        self.end_forward()
        return np.stack(outputs)

    def latents(self, seq: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """What is stored, [layers, tokens, DIM]."""
        end = self.get_sequence_length(seq) if end is None else end
        kv = output(self.layers, end - start, DIM)
        self.debug_get_kv_mla(seq, start, end, kv)
        return kv.numpy()

    def begin(
        self, ids: Sequence[int], lengths: Sequence[int], parents: Sequence[int] | None = None
    ) -> None:
        self.calls.begin(self.cache, ids, lengths, parents)
