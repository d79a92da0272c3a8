"""The steps of blending, as pure functions on arrays.

KV of a layer is [tokens, heads, dim] or [tokens, channels] with ``token_dim`` 0, or [heads, tokens,
dim] with ``token_dim`` 1. ``kinds`` says for each row of a batch what the cache has: INVALID (it is
computed), MOVED (computed with other tokens before it) or EXACT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire import _ffi, errors
from quire._arrays import empty_beside, input_array, output_array
from quire._numbers import int64, real

INVALID, MOVED, EXACT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class KeyRotation:
    """How the keys of a layer are rotated.

    ``inv_freq``: the frequencies of the model (:func:`quire.rope_frequencies`), scaled as it scales
    them; twice as many dimensions of each head are rotated. ``pairing``: "half_split" (Llama,
    Qwen) or "interleaved" (GPT-J). ``first_dim``: where these dimensions begin in a head.
    ``head_dim``: numbers of a head, needed where heads are one dimension with others.
    ``old_inv_freq``: the frequencies by which cached keys were rotated, where they are others.
    """

    inv_freq: Sequence[float]
    pairing: str = "half_split"
    first_dim: int = 0
    head_dim: int = 0
    old_inv_freq: Sequence[float] = ()

    def _fields(self) -> dict[str, Any]:
        return {
            "inv_freq": [float(value) for value in self.inv_freq],
            "old_inv_freq": [float(value) for value in self.old_inv_freq],
            "pairing": self.pairing,
            "first_dim": self.first_dim,
            "head_dim": self.head_dim,
        }


class BlendDocument(NamedTuple):
    """Rows [begin, end) of a batch that were taken from one text.

    ``ratio``: a budget of its own; None: it shares that of its request.
    """

    begin: int
    end: int
    ratio: float | None = None


def as_numpy(values: Any, dtype: Any, what: str) -> np.ndarray:
    """Integers of any array or sequence, as a contiguous array of one dimension."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iub"):
        raise errors.BadArgumentError(
            f"{what} must be integers in one dimension, not {array.dtype} {list(array.shape)}"
        )
    if array.size > 0 and array.dtype.kind != "b":
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise errors.BadArgumentError(f"{what} has numbers that do not fit {np.dtype(dtype)}")
    return np.array(array, dtype)


def shift_keys(
    keys: Any,
    old_positions: Any,
    new_positions: Any,
    rotation: KeyRotation,
    *,
    token_dim: int = 0,
    valid: Any = None,
    out: Any = None,
) -> Any:
    """Keys at other positions: one rotation by the difference, in float32, rounded once.

    Rows that stay where they are keep their bits. ``valid`` [tokens]: rows of 0 are not read and
    not written. ``out``: takes the result; it may be ``keys``. Returns ``out``, else a new array.
    """
    moved = empty_beside(keys, keys.shape) if out is None else output_array(out, "out")
    old = as_numpy(old_positions, np.int64, "old_positions")
    marks = np.ones(len(old), np.uint8)
    if valid is not None:
        marks = as_numpy(valid, np.uint8, "valid")
    _ffi.function("blend_shift_keys")(
        keys if out is keys else input_array(keys),
        token_dim,
        old,
        as_numpy(new_positions, np.int64, "new_positions"),
        marks,
        rotation._fields(),
        moved,
    )
    return moved


def token_deviations(
    fresh_k: Any,
    fresh_v: Any,
    cached_k: Any,
    cached_v: Any,
    kinds: Any,
    *,
    metric: str = "v_l2",
    token_dim: int = 0,
    rows: Any = None,
) -> np.ndarray:
    """How far cached KV is from fresh KV: float32 [rows of the batch].

    -inf for rows that are not MOVED, whose numbers are not read. ``metric``: "v_l2", "k_l2",
    "kv_l2" or "cosine"; arrays that it does not read may be None. ``rows``: the fresh arrays hold
    these rows of the batch alone.
    """
    arrays = [
        None if array is None else input_array(array)
        for array in (fresh_k, fresh_v, cached_k, cached_v)
    ]
    deviations = _ffi.function("blend_deviations")(
        metric,
        token_dim,
        *arrays,
        None if rows is None else as_numpy(rows, np.int64, "rows"),
        as_numpy(kinds, np.uint8, "kinds"),
    )
    return np.from_dlpack(deviations)


def select_tokens(
    query_start_loc: Any,
    kinds: Any,
    deviations: Any,
    options: Mapping[str, Any],
    *,
    check_index: int = 0,
    documents: Sequence[tuple[Any, ...]] = (),
    candidates: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a batch that are recomputed, int64 and ascending, and their ``query_start_loc``.

    ``options``: fields of the C++ ``BlendOptions``: metric, check_layers, ratios, thresholds,
    link_tokens, force_last, min_tokens. ``documents``: (begin, end) or (begin, end, ratio) each,
    ascending. ``candidates``: the rows that the check layer before this one has selected.
    """
    each = [_document(*document) for document in documents]
    bounds = np.array([[one.begin, one.end - one.begin] for one in each], np.int64).reshape(-1, 2)
    for one in each:
        if one.ratio is not None and one.ratio < 0:
            raise errors.BadArgumentError(f"blend: the ratio of {one} is not in [0, 1]")
    rows, starts = _ffi.function("blend_select_tokens")(
        as_numpy(query_start_loc, np.int32, "query_start_loc"),
        as_numpy(kinds, np.uint8, "kinds"),
        np.array(deviations, np.float32),
        bounds,
        [-1.0 if one.ratio is None else one.ratio for one in each],
        None if candidates is None else as_numpy(candidates, np.int64, "candidates"),
        dict(options),
        check_index,
    )
    return np.from_dlpack(rows), np.from_dlpack(starts)


def _document(begin: Any, end: Any, ratio: Any = None) -> BlendDocument:
    """Its rows as integers, none of them rounded."""
    rows = [int64(row, "blend: a row of a document") for row in (begin, end)]
    return BlendDocument(rows[0], rows[1], None if ratio is None else real(ratio, "blend: ratio"))


def scatter_rows(some: Any, rows: Any, out: Any, *, token_dim: int = 0) -> None:
    """``out[rows[i]] = some[i]`` along the tokens. ``rows`` ascend."""
    _ffi.function("blend_scatter_rows")(
        input_array(some), token_dim, as_numpy(rows, np.int64, "rows"), output_array(out, "out")
    )


def gather_rows(array: Any, rows: Any, *, token_dim: int = 0) -> Any:
    """A new array of ``array[rows[i]]`` along the tokens. ``rows`` ascend."""
    each = as_numpy(rows, np.int64, "rows")
    shape = list(array.shape)
    shape[token_dim] = len(each)
    some = empty_beside(array, shape)
    _ffi.function("blend_gather_rows")(input_array(array), token_dim, each, some)
    return some


def batch_positions(query_start_loc: Any, context_lengths: Any) -> np.ndarray:
    """The position of each row in its request, int64, behind the tokens that are in the cache."""
    positions = _ffi.function("blend_positions")(
        as_numpy(query_start_loc, np.int32, "query_start_loc"),
        as_numpy(context_lengths, np.int64, "context_lengths"),
    )
    return np.from_dlpack(positions)
