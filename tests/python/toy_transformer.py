"""A transformer of 4 layers with random weights in float32, small enough to be read: rotated keys,
4 query heads, 2 of keys, which can hand its layers to a BlendExecutor."""

from __future__ import annotations

import dataclasses

import numpy as np
from quire.blend import BlendExecutor, KeyRotation

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 4, 4, 2, 8, 32, 50
SEGMENTS = (6, 7, 5)
QUESTION = 4


@dataclasses.dataclass
class Prefill:
    hidden: np.ndarray  # [tokens, WIDTH]
    layers: list[tuple[np.ndarray, np.ndarray]]  # k and v, [tokens, KV_HEADS, DIM]


class ToyTransformer:
    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

        self._embedding = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
        self._weights = [
            {
                "q": matrix(WIDTH, HEADS * DIM),
                "k": matrix(WIDTH, KV_HEADS * DIM),
                "v": matrix(WIDTH, KV_HEADS * DIM),
                "o": matrix(HEADS * DIM, WIDTH),
                "up": matrix(WIDTH, 2 * WIDTH),
                "down": matrix(2 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ]
        self._inv_freq = 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
        self.rotation = KeyRotation(self._inv_freq.tolist())
        self.prompt = rng.integers(0, VOCABULARY, sum(SEGMENTS) + QUESTION)
        self.in_segments = np.arange(len(self.prompt)) < sum(SEGMENTS)
        # Each segment computed alone, the question not at all.
        alone = []
        begin = 0
        for length in SEGMENTS:
            alone.append(self.prefill(self.prompt[begin : begin + length]).layers)
            begin += length
        nothing = np.zeros((QUESTION, KV_HEADS, DIM), np.float32)
        self.cached = [
            tuple(np.concatenate([*(part[layer][i] for part in alone), nothing]) for i in (0, 1))
            for layer in range(LAYERS)
        ]
        positions = [*(np.arange(length) for length in SEGMENTS), np.zeros(QUESTION, np.int64)]
        self.original_positions = np.concatenate(positions)
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []  # of the last blended pass

    def prefill(self, tokens: np.ndarray) -> Prefill:
        hidden = self._embedding[tokens]
        positions = np.arange(len(tokens))
        layers = []
        for layer in range(LAYERS):
            q, k, v = self._project(layer, hidden, positions)
            layers.append((k, v))
            hidden = self._finish(layer, hidden, q, k, v, positions)
        return Prefill(hidden, layers)

    def blended(
        self,
        executor: BlendExecutor,
        valid: np.ndarray,
        *,
        exact: np.ndarray | None = None,
        undefined: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The hidden states of the rows that are left, and which these are."""
        count = len(self.prompt)
        hidden, rows, positions = self._embedding[self.prompt], np.arange(count), np.arange(count)
        valid = valid & self.in_segments
        self.seen = []
        for layer in range(LAYERS):
            cached = [array.copy() for array in self.cached[layer]]
            for array in cached:
                if undefined is not None:
                    array[~valid] = undefined
            q, k, v = self._project(layer, hidden, positions)
            out = executor.blend(
                layer, *cached, valid, self.original_positions, q, k, v, positions,
                np.array([0, count], np.int32), 0, exact_mask=exact,
            )  # fmt: skip
            hidden = hidden[np.searchsorted(rows, out.local_indices)]
            rows, positions = out.local_indices, out.positions
            self.seen.append((out.k, out.v))
            hidden = self._finish(layer, hidden, out.q, out.k, out.v, positions)
        return hidden, rows

    def _project(
        self, layer: int, hidden: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights = self._weights[layer]
        normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
        q = (normed @ weights["q"]).reshape(-1, HEADS, DIM)
        k = (normed @ weights["k"]).reshape(-1, KV_HEADS, DIM)
        v = (normed @ weights["v"]).reshape(-1, KV_HEADS, DIM)
        return self._rotated(q, positions), self._rotated(k, positions), v

    def _rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angles = positions[:, None, None] * self._inv_freq
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def _finish(
        self,
        layer: int,
        hidden: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        positions: np.ndarray,
    ) -> np.ndarray:
        """Attention of each row to all keys up to its position, then the MLP."""
        group = HEADS // KV_HEADS
        keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, keys) / np.float32(np.sqrt(DIM))
        scores[:, np.arange(len(k))[None, :] > positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, values).reshape(len(q), -1)
        hidden = hidden + out @ self._weights[layer]["o"]
        up = hidden @ self._weights[layer]["up"]
        return hidden + np.maximum(up, 0) @ self._weights[layer]["down"]
