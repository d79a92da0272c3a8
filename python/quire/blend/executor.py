"""Blending one layer after the other, between an engine's projections and its attention."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire import _ffi, errors
from quire._arrays import empty_beside, output_array
from quire.blend import rows as steps
from quire.blend.rows import EXACT, INVALID, MOVED, KeyRotation, as_numpy

_ANY_LAYER = 2**63 - 1


@dataclasses.dataclass
class BlendOutput:
    """What goes on from a layer, arrays of the caller's library.

    ``q``: the rows of the selected tokens. ``k``, ``v``: all rows, recomputed ones in the place of
    cached ones. ``positions``: of the rows of ``q``, in their requests. ``local_indices``: int64,
    which rows of the batch they are. ``query_start_loc``: of the rows of ``q``, if this layer has
    selected, else None.
    """

    q: Any
    k: Any
    v: Any
    positions: Any
    local_indices: Any
    query_start_loc: Any | None


@dataclasses.dataclass
class _Pass:
    """What a forward pass over one batch has selected."""

    rows: np.ndarray  # int64, of the batch
    kinds: np.ndarray  # uint8 [row_count]
    positions: np.ndarray  # int64 [row_count]
    query_start_loc: np.ndarray  # int32, of all rows
    documents: Sequence[tuple[Any, ...]]


class BlendExecutor:
    """Selects and blends for one forward pass after the other; a pass begins at layer 0 or at the
    first check layer.

    Up to ``check_layers[0]`` all tokens are computed, and fresh KV is kept. There, and at each
    later check layer, the tokens that go on are selected: of a request's cached tokens the share
    ``ratio`` (``ratios``: one for each check layer, never rising) that deviates most by ``metric``
    ("v_l2", "k_l2", "kv_l2", "cosine"), and always those that the cache lacks and, with
    ``force_last``, the last one. ``thresholds``, ``link_tokens``, ``min_tokens``: see the C++
    ``BlendOptions``.

    ``rotation``: how keys are rotated, for all layers or one for each; None: keys have no
    positions. ``inplace``: the retrieved arrays become the result; else no argument is written.
    """

    def __init__(
        self,
        ratio: float | None = None,
        *,
        ratios: Sequence[float] | None = None,
        check_layers: Sequence[int] = (1,),
        metric: str = "v_l2",
        thresholds: Sequence[float] = (),
        link_tokens: int = 0,
        force_last: bool = True,
        min_tokens: int = 0,
        rotation: KeyRotation | Sequence[KeyRotation | None] | None = None,
        inplace: bool = False,
    ) -> None:
        if ratio is not None and ratios is not None:
            raise errors.BadArgumentError("blend: give ratio or ratios, not both")
        if ratios is None:
            ratios = [0.15 if ratio is None else ratio] * len(check_layers)
        self._options: dict[str, Any] = {
            "metric": metric,
            "check_layers": [operator.index(layer) for layer in check_layers],
            "ratios": [float(one) for one in ratios],
            "thresholds": [float(one) for one in thresholds],
            "link_tokens": link_tokens,
            "force_last": force_last,
            "min_tokens": min_tokens,
        }
        _ffi.function("blend_check_options")(self._options, _ANY_LAYER)
        self._rotation = rotation
        self._inplace = inplace
        self._pass: _Pass | None = None

    def blend(
        self,
        layer_id: int,
        retrieved_k: Any,
        retrieved_v: Any,
        valid_mask: Any,
        original_positions: Any,
        fresh_q: Any,
        fresh_k: Any,
        fresh_v: Any,
        positions: Any,
        query_start_loc: Any,
        token_dim: int = 0,
        *,
        exact_mask: Any = None,
        documents: Sequence[tuple[Any, ...]] = (),
    ) -> BlendOutput:
        """Blends one layer of a batch of N tokens.

        ``retrieved_k``, ``retrieved_v``: N cached rows, keys rotated at ``original_positions``
        [N]; rows where ``valid_mask`` [N] is 0 may hold anything; None if nothing was found.
        ``fresh_q``, ``fresh_k``, ``fresh_v``, ``positions``: N rows up to the first check layer,
        then the rows that the last selection kept. ``query_start_loc``: [requests + 1], of all N
        rows, in each call. ``token_dim``: the axis of tokens. ``exact_mask`` [N]: cached rows that
        are never recomputed. ``documents``: rows (begin, end) or (begin, end, ratio) of texts.

        BadArgumentError for arrays that do not fit together, BadStateError for a layer after the
        first check layer in a pass that has not come to it; the pass is as it was then.
        """
        layer = operator.index(layer_id)
        checks = self._options["check_layers"]
        if layer < 0 or token_dim not in (0, 1):
            raise errors.BadArgumentError(
                f"blend: layer_id is {layer}, token_dim {token_dim}; the first is at least 0, the "
                "second 0 or 1"
            )
        if layer < checks[0]:
            self._pass = None
            count = fresh_q.shape[token_dim]
            everything = beside(fresh_q, np.arange(count, dtype=np.int64))
            return BlendOutput(fresh_q, fresh_k, fresh_v, positions, everything, None)
        if (retrieved_k is None) != (retrieved_v is None):
            name = "retrieved_k" if retrieved_k is None else "retrieved_v"
            raise errors.BadArgumentError(
                f"blend: {name} of layer {layer} is None, and the other one is not"
            )
        cached = (retrieved_k, retrieved_v)
        old = as_numpy(original_positions, np.int64, "original_positions")
        if layer == checks[0]:
            begun = _Pass(
                rows=np.empty(0, np.int64),
                kinds=_kinds(valid_mask, exact_mask, retrieved_k),
                positions=as_numpy(positions, np.int64, "positions"),
                query_start_loc=as_numpy(query_start_loc, np.int32, "query_start_loc"),
                documents=documents,
            )
            return self._begin(begun, layer, cached, old, fresh_q, fresh_k, fresh_v, positions,
                               query_start_loc, token_dim)  # fmt: skip
        if self._pass is None:
            raise errors.BadStateError(
                f"blend: layer {layer} comes before layer {checks[0]}, which selects, in this pass"
            )
        return self._go_on(self._pass, layer, cached, old, fresh_q, fresh_k, fresh_v, positions,
                           query_start_loc, token_dim)  # fmt: skip

    def _begin(
        self,
        begun: _Pass,
        layer: int,
        cached: tuple[Any, Any],
        old: np.ndarray,
        q: Any,
        k: Any,
        v: Any,
        positions: Any,
        query_start_loc: Any,
        token_dim: int,
    ) -> BlendOutput:
        """The first check layer: all rows are fresh, and their KV is kept."""
        deviations = self._deviations(begun, layer, cached, None, old, k, v, None, token_dim)
        begun.rows, starts = self._select(begun, deviations, 0, None)
        output = BlendOutput(
            steps.gather_rows(q, begun.rows, token_dim=token_dim),
            k,
            v,
            positions[begun.rows],
            beside(q, begun.rows),
            _as_given(query_start_loc, starts),
        )
        self._pass = begun
        return output

    def _go_on(
        self,
        going: _Pass,
        layer: int,
        cached: tuple[Any, Any],
        old: np.ndarray,
        q: Any,
        k: Any,
        v: Any,
        positions: Any,
        query_start_loc: Any,
        token_dim: int,
    ) -> BlendOutput:
        """A later layer: fresh rows are the selected ones. Those that a check layer drops take
        cached KV at once; an engine keeps their fresh KV of this layer (docs/blend.md)."""
        rows, starts = going.rows, None
        if q.shape[token_dim] != len(rows):
            raise errors.BadArgumentError(
                f"blend: layer {layer} has {q.shape[token_dim]} fresh rows, but {len(rows)} were "
                "selected"
            )
        if cached[0] is None:  # nothing was found, so every row is fresh
            if bool((going.kinds != INVALID).any()):
                raise errors.BadArgumentError(
                    f"blend: retrieved_k of layer {layer} is None, but valid_mask had rows at "
                    f"layer {self._options['check_layers'][0]}"
                )
            return BlendOutput(q, k, v, positions, beside(q, rows), None)
        checks: list[int] = self._options["check_layers"]
        if self._inplace:
            _check_rows(going, layer, (k, v), cached, token_dim)
            if layer in checks:
                steps.gather_rows(q, [], token_dim=token_dim)
        blended = self._moved_keys(going, layer, cached[0], old, token_dim)
        if layer in checks:
            deviations = self._deviations(
                going, layer, cached, blended, old, k, v, rows, token_dim
            )
            rows, starts = self._select(going, deviations, checks.index(layer), rows)
            kept = np.searchsorted(going.rows, rows)
            q, k, v = (steps.gather_rows(each, kept, token_dim=token_dim) for each in (q, k, v))
            positions = positions[kept]
        values = output_array(cached[1], "retrieved_v") if self._inplace else copy_of(cached[1])
        for fresh, out in ((k, blended), (v, values)):
            steps.scatter_rows(_like_rows(fresh, out, token_dim), rows, out, token_dim=token_dim)
        going.rows = rows
        new_starts = None if starts is None else _as_given(query_start_loc, starts)
        return BlendOutput(q, blended, values, positions, beside(q, rows), new_starts)

    def _select(
        self, each: _Pass, deviations: np.ndarray, check_index: int, candidates: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        return steps.select_tokens(
            each.query_start_loc,
            each.kinds,
            deviations,
            self._options,
            check_index=check_index,
            documents=each.documents,
            candidates=candidates,
        )

    def _deviations(
        self,
        each: _Pass,
        layer: int,
        cached: tuple[Any, Any],
        moved: Any,
        old: np.ndarray,
        k: Any,
        v: Any,
        rows: np.ndarray | None,
        token_dim: int,
    ) -> np.ndarray:
        if cached[0] is None:
            return np.full(len(each.kinds), -np.inf, np.float32)
        keys, values = cached
        if self._options["metric"] in ("k_l2", "kv_l2"):
            keys = moved
            if keys is None:  # the retrieved keys are not part of the result here
                keys = self._moved_keys(each, layer, cached[0], old, token_dim, new=True)
        return steps.token_deviations(
            _like_rows(k, keys, token_dim),
            _like_rows(v, values, token_dim),
            keys,
            values,
            each.kinds,
            metric=self._options["metric"],
            token_dim=token_dim,
            rows=rows,
        )

    def _moved_keys(
        self,
        each: _Pass,
        layer: int,
        keys: Any,
        old: np.ndarray,
        token_dim: int,
        *,
        new: bool = False,
    ) -> Any:
        """The retrieved keys at their new positions; rows that are invalid are undefined."""
        rotation = self._rotation
        if isinstance(rotation, Sequence):
            if layer >= len(rotation):
                raise errors.BadArgumentError(
                    f"blend: layer {layer} has no rotation, only {len(rotation)} layers have"
                )
            rotation = rotation[layer]
        inplace = self._inplace and not new
        if rotation is None:
            return output_array(keys, "retrieved_k") if inplace else copy_of(keys)
        return steps.shift_keys(
            keys,
            old,
            each.positions,
            rotation,
            token_dim=token_dim,
            valid=each.kinds != INVALID,
            out=keys if inplace else None,
        )


def _kinds(valid_mask: Any, exact_mask: Any, retrieved_k: Any) -> np.ndarray:
    valid = as_numpy(valid_mask, np.int64, "valid_mask") != 0
    kinds = np.where(valid, MOVED, INVALID).astype(np.uint8)
    if exact_mask is not None:
        exact = as_numpy(exact_mask, np.int64, "exact_mask") != 0
        if exact.shape != valid.shape or bool((exact & ~valid).any()):
            raise errors.BadArgumentError("blend: exact_mask has rows that valid_mask lacks")
        kinds[exact] = EXACT
    if retrieved_k is None and bool(valid.any()):
        raise errors.BadArgumentError("blend: valid_mask has rows, but retrieved_k is None")
    return kinds


def _check_rows(
    going: _Pass, layer: int, fresh: tuple[Any, Any], cached: tuple[Any, Any], token_dim: int
) -> None:
    """BadArgumentError for rows that do not fit. Before keys are moved where they are: moved once
    more, by a call that repeats a refused one, they would be wrong."""
    for name, new, kept in zip(("k", "v"), fresh, cached, strict=True):
        counts = (new.shape[token_dim], kept.shape[token_dim])
        if counts != (len(going.rows), len(going.kinds)):
            raise errors.BadArgumentError(
                f"blend: layer {layer} has {counts[0]} rows of fresh_{name} and {counts[1]} of "
                f"retrieved_{name}; there are {len(going.rows)} and {len(going.kinds)}"
            )
        none = steps.gather_rows(_like_rows(new, kept, token_dim), [], token_dim=token_dim)
        steps.scatter_rows(none, [], kept, token_dim=token_dim)


def _like_rows(fresh: Any, cached: Any, token_dim: int) -> Any:
    """Fresh rows in the shape of the cached ones: heads apart, or one dimension."""
    if token_dim != 0 or len(fresh.shape) == len(cached.shape):
        return fresh
    return fresh.reshape((fresh.shape[0], *cached.shape[1:]))


def copy_of(array: Any) -> Any:
    copied = empty_beside(array, array.shape)
    copied[:] = array
    return copied


def beside(array: Any, values: np.ndarray) -> Any:
    """The values in the library of `array`, on the host."""
    if isinstance(array, np.ndarray):
        return values
    torch = sys.modules["torch"]
    return torch.from_numpy(values)


def _as_given(query_start_loc: Any, starts: np.ndarray) -> Any:
    """The values with library, dtype and device of `query_start_loc`."""
    if hasattr(query_start_loc, "new_tensor"):
        return query_start_loc.new_tensor(starts.tolist())
    return starts.astype(np.asarray(query_start_loc).dtype)
