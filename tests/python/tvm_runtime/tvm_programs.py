"""A naive model of TVM's paged cache in NumPy, run beside one of Quire's behind TVM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm_calls import OneCache, path_to

THETA = 10000.0
NONE, NORMAL, INLINE = 0, 1, 2


def rotate(x: np.ndarray, positions: int | Sequence[int]) -> np.ndarray:
    """[heads, dim] by one position, or [n, heads, dim]; pairs (i, i + dim / 2)."""
    half = x.shape[-1] // 2
    angle = np.multiply.outer(positions, THETA ** (-np.arange(half) / half))[..., None, :]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclasses.dataclass
class Token:
    k: np.ndarray  # [layers, Hkv, dim], as given; zeros in layers that did not run
    v: np.ndarray
    position: int  # by which NORMAL has rotated the key
    stored: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # keys, by layer


@dataclasses.dataclass
class Stored:
    tokens: list[Token] = dataclasses.field(default_factory=list)
    nodes: list[Token] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    rounds: list[int] = dataclasses.field(default_factory=list)  # first node of each forward
    window: tuple[int, int] | None = None


class Program:
    """Each forward's outputs and each state's keys and values are compared with the model's."""

    def __init__(self, *, tree_lengths: bool = False, seed: int = 0, **options: Any) -> None:
        self.dtype = options.get("dtype", "float32")
        self.rope_mode = options.get("rope_mode", NONE)
        shape = {"heads": (4, 2), "dim": 64, "page_size": 16, "tokens": 2048, "chunk": 512}
        self.cache = OneCache(**{**shape, **options})
        self.kinds = options.get("kinds", (0, 0))
        self.layer_window = options.get("layer_window")
        self.tree_lengths = tree_lengths
        self.random = np.random.default_rng(seed)
        self.stored: dict[int, Stored] = {}
        self.reads_back = True  # whether all layers hold all tokens
        self.first_layer = 0
        self.tolerance = 2e-3 if self.dtype == "float16" else 2e-5

    def at_stage(self, first: int, count: int) -> None:
        """The cache has `count` layers of the model's, from `first` on; here they count from 0."""
        self.first_layer, self.cache.layers = first, count

    # ---- sequences

    def add(self, seq: int) -> None:
        self.cache.add_sequence(seq)
        self.stored[seq] = Stored()

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        end = None if position < 0 else position
        self.stored[child] = Stored(self.stored[parent].tokens[:end])

    def pop(self, seq: int, n: int) -> None:
        self.cache.popn(seq, n)
        of = self.stored[seq]
        of.tokens = of.tokens[: len(of.tokens) - n]

    def remove(self, seq: int) -> None:
        self.cache.remove_sequence(seq)
        del self.stored[seq]

    def slide(self, seq: int, window: int, sinks: int) -> None:
        self.cache.enable_sliding_window_for_seq(seq, window, sinks)
        self.stored[seq].window = (window, sinks)

    # ---- forwards

    def forward(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        parents: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        shared: int = 0,
    ) -> None:
        """`layers`: those that run; `shared`: how often layer 0 is attended to once more."""
        cache = self.cache
        heads = cache.qo_heads + 2 * cache.kv_heads
        shape = (cache.layers, sum(lengths), heads, cache.dim)
        qkv = self.random.standard_normal(shape).astype(self.dtype)
        runs = range(cache.layers) if layers is None else layers
        paths = self._append(ids, lengths, parents, qkv, set(runs))
        cache.begin(ids, lengths, parents)
        assert cache.positions() == [self._position(path) for path in paths]
        for layer in runs:
            o = cache.attend(self.first_layer + layer, qkv[layer], cache.kv_heads)
            self._compare(o, qkv[layer, :, : cache.qo_heads], paths, layer)
            for _ in range(shared if layer == 0 else 0):
                q = self.random.standard_normal(qkv.shape[1:]).astype(self.dtype)
                q = q[:, : cache.qo_heads]
                self._compare(self._attend_shared(q, paths), q, paths, 0)
        cache.end_forward()
        for seq in ids if parents is None else ():
            self._slide(self.stored[seq])
        for seq in self.stored:
            self.check(seq)
        cache.cache.check_invariants()

    def _append(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        parents: Sequence[int] | None,
        qkv: np.ndarray,
        runs: set[int],
    ) -> list[list[Token]]:
        """Adds the forward's tokens; for each row what it sees, itself last."""
        hq, hkv = self.cache.qo_heads, self.cache.kv_heads
        paths, row = [], 0
        for seq, length in zip(ids, lengths):
            of = self.stored[seq]
            if parents is not None:
                of.rounds.append(len(of.nodes))
            for _ in range(length):
                ran = np.array([layer in runs for layer in range(self.cache.layers)])
                kv = qkv[:, row, hq:].astype(np.float64) * ran[:, None, None]
                token = Token(kv[:, :hkv], kv[:, hkv:], len(of.tokens))
                if parents is None:
                    of.tokens.append(token)
                    paths.append(list(of.tokens))
                else:
                    of.parents.append(parents[row])
                    of.nodes.append(token)
                    nodes = path_to(of.parents, len(of.nodes) - 1)
                    token.position += len(nodes) - 1
                    paths.append([*of.tokens, *(of.nodes[n] for n in nodes)])
                row += 1
        return paths

    def _position(self, path: list[Token]) -> int:
        return len(path) - 1

    def _stored_key(self, token: Token, layer: int) -> np.ndarray:
        if self.rope_mode != NORMAL:
            return token.k[layer]
        if layer not in token.stored:
            rotated = rotate(token.k[layer], token.position)
            token.stored[layer] = rotated.astype(self.dtype).astype(np.float64)
        return token.stored[layer]

    def _compare(self, o: np.ndarray, q: np.ndarray, paths: list[list[Token]], layer: int) -> None:
        for row, path in enumerate(paths):
            window = self.layer_window if self.kinds[layer] == 3 else None
            seen = range(0 if window is None else max(0, len(path) - window), len(path))
            keys = np.stack([self._stored_key(path[i], layer) for i in seen])
            values = np.stack([path[i].v[layer] for i in seen])
            query = q[row].astype(np.float64)
            if self.rope_mode != NONE:
                query = rotate(query, self._position(path))
            if self.rope_mode == INLINE:
                keys = rotate(keys, seen)
            keys, values = (
                np.repeat(x, self.cache.qo_heads // self.cache.kv_heads, axis=1)
                for x in (keys, values)
            )
            scores = np.einsum("hd,nhd->hn", query, keys) * self.cache.dim**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            expected = np.einsum("hn,nhd->hd", weights, values)
            np.testing.assert_allclose(o[row], expected, rtol=self.tolerance, atol=self.tolerance)

    def _attend_shared(self, q: np.ndarray, paths: list[list[Token]]) -> np.ndarray:
        given = q
        if self.rope_mode == NORMAL:  # then the caller rotates
            rotated = [rotate(x.astype(np.float64), self._position(p)) for x, p in zip(q, paths)]
            given = np.stack(rotated).astype(self.dtype)
        o = tvm.runtime.tensor(np.full(q.shape, np.nan, self.dtype))
        unread_shape = (len(q), self.cache.kv_heads, self.cache.dim)
        unread = tvm.runtime.tensor(np.full(unread_shape, np.nan, self.dtype))
        self.cache.attention_with_shared_kv(
            0, self.cache.dim**-0.5, tvm.runtime.tensor(given), unread, unread, o
        )
        return o.numpy()

    @staticmethod
    def _slide(of: Stored) -> None:
        if of.window is None or len(of.tokens) <= of.window[0]:
            return
        window, sinks = of.window
        of.tokens = of.tokens[:sinks] + of.tokens[len(of.tokens) - (window - sinks) :]

    # ---- trees

    def commit(self, ids: Sequence[int], leaves: Sequence[int]) -> None:
        self.cache.commit(ids, leaves)
        for seq, leaf in zip(ids, leaves):
            of = self.stored[seq]
            kept = self._as_tvm(of, leaf) if self.tree_lengths else self._right(of, leaf)
            self.stored[seq] = Stored(of.tokens + [of.nodes[n] for n in kept])
            self.check(seq)
        self.cache.cache.check_invariants()

    @staticmethod
    def _right(of: Stored, leaf: int) -> list[int]:
        """The accepted path; with leaf -1 the earlier forwards' nodes where they are a chain."""
        if leaf >= 0:
            return path_to(of.parents, leaf)
        first = of.rounds[-1]
        return list(range(first)) if of.parents[:first] == list(range(-1, first - 1)) else []

    @staticmethod
    def _as_tvm(of: Stored, leaf: int) -> list[int]:
        first = of.rounds[-1]
        return [*range(first), *(first + n for n in path_to(of.parents, leaf))]

    # ---- what is stored

    def check(self, seq: int) -> None:
        of = self.stored[seq]
        rows = of.tokens + of.nodes
        assert self.cache.get_sequence_length(seq) == len(rows)
        if not rows:
            return
        if not self.reads_back:
            return
        k, v = self.cache.kv_of(seq)
        np.testing.assert_array_equal(v, np.stack([t.v for t in rows], axis=1))
        keys = np.stack(
            [[self._stored_key(t, layer) for t in rows] for layer in range(self.cache.layers)]
        )
        exact = self.rope_mode != NORMAL
        bound = {"rtol": 0 if exact else self.tolerance, "atol": 0 if exact else self.tolerance}
        np.testing.assert_allclose(k, keys, **bound)
        np.testing.assert_array_equal(k[keys == 0], 0)
