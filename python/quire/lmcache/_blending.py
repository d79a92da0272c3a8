"""The blending classes of LMCache 0.3.7, over :mod:`quire.blend`.

Code that was written against ``lmcache.blend`` runs with these: an engine that stores KV,
:class:`SPTBlendRetriever` that finds it by segments, and :class:`CacheBlendImpl` that blends. What
differs, on purpose: retrieval does not block, selection is deterministic and never loses a valid
token to one without KV, rows that are undefined change nothing, and arguments are not written to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire import errors
from quire.blend import (
    BlendExecutor,
    BlendRetriever,
    FoundSegment,
    KeyRotation,
    SegmentMemory,
)
from quire.blend.executor import beside, copy_of

__all__ = ["CacheBlendImpl", "LMCacheEngine", "SPTBlendRetriever"]

_TOKEN_DIMS = {"vllm": 0, "huggingface": 1}
# (positions, q, k) -> (q, k), as LMCache's encoders are called.
PositionalEncoder = Callable[[Any, Any, Any], tuple[Any, Any]]


class LMCacheEngine:
    """Keeps KV of token sequences in memory of this process.

    ``fmt``: "vllm", KV is [tokens, heads, dim]; or "huggingface", [heads, tokens, dim].
    """

    def __init__(
        self, chunk_size: int = 256, fmt: str = "vllm", *, capacity_bytes: int = 1 << 30
    ) -> None:
        if fmt not in _TOKEN_DIMS:
            raise errors.BadArgumentError(f'LMCacheEngine: fmt is "{fmt}", not vllm or huggingface')
        self.fmt = fmt
        self._chunk_size = chunk_size
        self._capacity_bytes = capacity_bytes
        self._memory: SegmentMemory | None = None
        # Unknown before the first ``store``; known after ``close``, which what was found outlives.
        self._layer_count = sys.maxsize

    @property
    def memory(self) -> SegmentMemory:
        """What was stored. BadStateError before the first ``store``, which says how many layers
        there are."""
        if self._memory is None:
            raise errors.BadStateError("LMCacheEngine: store something first")
        return self._memory

    def store(self, tokens: Any, kv_tensors_raw: Sequence[tuple[Any, Any]]) -> None:
        """Stores the KV of a sequence that begins at position 0: k and v of each layer. The first
        one that is stored says how many layers there are; one that is refused says nothing."""
        memory = self._memory or SegmentMemory(
            len(kv_tensors_raw),
            chunk_tokens=self._chunk_size,
            token_dim=_TOKEN_DIMS[self.fmt],
            capacity_bytes=self._capacity_bytes,
        )
        memory.store(tokens, kv_tensors_raw)
        # In this order: a thread that finds something then knows how many layers to load.
        self._layer_count = memory.layer_count
        self._memory = memory

    def close(self) -> None:
        """Forgets what was stored."""
        self._memory = None


class _Stored:
    """What an engine has at the moment, as a SegmentSource: before the first ``store``, and after
    ``close``, nothing. Any layer may be asked for until it is known how many there are."""

    def __init__(self, engine: LMCacheEngine) -> None:
        self._engine = engine
        self._nothing = SegmentMemory(1, token_dim=self.token_dim)

    @property
    def layer_count(self) -> int:
        return self._engine._layer_count

    @property
    def token_dim(self) -> int:
        return _TOKEN_DIMS[self._engine.fmt]

    def find(self, tokens: Any) -> FoundSegment:
        return (self._engine._memory or self._nothing).find(tokens)


class SPTBlendRetriever(BlendRetriever):
    """Retrieves segments from an engine; ``metadata`` is taken as LMCache gives it and not read."""

    def __init__(self, cache_engine: LMCacheEngine, metadata: Any = None) -> None:
        super().__init__(_Stored(cache_engine))


class CacheBlendImpl(BlendExecutor):
    """Blends with one check layer, layer 1, by the deviation of values.

    ``force_last``: recompute the last token of each request, as generating needs; LMCache does
    not. Keys are rotated as ``rotation`` says, or by encoders that are set, or not at all.
    """

    def __init__(
        self,
        recompute_ratio: float,
        *,
        force_last: bool = False,
        rotation: KeyRotation | None = None,
    ) -> None:
        super().__init__(recompute_ratio, force_last=force_last, rotation=rotation)
        self._encoder: PositionalEncoder | None = None
        self._reverse_encoder: PositionalEncoder | None = None

    def set_positional_encoder(self, positional_encoder: PositionalEncoder) -> None:
        """How keys are rotated at positions."""
        self._encoder = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """How the rotation is undone."""
        self._reverse_encoder = reverse_positional_encoder

    def _moved_keys(
        self,
        each: Any,
        layer: int,
        keys: Any,
        old: np.ndarray,
        token_dim: int,
        *,
        new: bool = False,
    ) -> Any:
        if (self._encoder is None) != (self._reverse_encoder is None):
            lacking = "positional" if self._encoder is None else "reverse_positional"
            raise errors.BadStateError(
                f"CacheBlendImpl: one encoder moves no keys; call set_{lacking}_encoder, too"
            )
        moved = super()._moved_keys(each, layer, keys, old, token_dim, new=new)
        if self._encoder is None or self._reverse_encoder is None:
            return moved
        # Encoders may rotate in place, so each argument is an array of its own.
        _, plain = self._reverse_encoder(beside(keys, old), copy_of(moved), moved)
        _, moved = self._encoder(beside(keys, each.positions), copy_of(plain), plain)
        return moved
