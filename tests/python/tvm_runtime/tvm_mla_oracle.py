"""TVM's own cache of MLA layers. TVM has no kernels of MLA for the CPU (its frontend refuses them), but
its cache takes any: here plain loops in NumPy, so that what is compared is the cache itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# The empty set of keys in TVM's arithmetic: its lse, in base 2.
_EMPTY = -5e4


def view(tensor: Any) -> np.ndarray:
    """A writable array over the memory of a tensor; NumPy's own from_dlpack gives one to read."""
    return torch.from_dlpack(tensor).numpy()


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """q [rows, Hq, D] to k [keys, H, D] and v [keys, H, Dv] where visible [rows, keys]: o and the lse
    of base 2."""
    group = q.shape[1] // k.shape[1] if k.shape[0] else 1
    o = np.zeros((*q.shape[:2], v.shape[2]))
    lse = np.full(q.shape[:2], _EMPTY)
    for row in range(q.shape[0]):
        seen = np.flatnonzero(visible[row])
        for head in range(q.shape[1] if len(seen) else 0):
            scores = k[seen, head // group].astype("float64") @ q[row, head] * scale
            weights = np.exp(scores - scores.max())
            o[row, head] = weights @ v[seen, head // group] / weights.sum()
            lse[row, head] = (scores.max() + np.log(weights.sum())) / np.log(2)
    return o, lse


def _append(pages: Any, kv: Any, positions: Any) -> None:
    flat = view(pages).reshape(-1, pages.shape[-1])
    for row, slot in enumerate(view(positions)):
        if slot >= 0:
            flat[slot] = view(kv)[row]


def _copy_page(pages: Any, source: int, target: int, tokens: int) -> None:
    view(pages)[target, :tokens] = view(pages)[source, :tokens]


def _debug_get(pages: Any, positions: Any, kv: Any, layer: int) -> None:
    flat = view(pages).reshape(-1, pages.shape[-1])
    view(kv)[layer] = flat[view(positions)]


def _merge(o1: Any, lse1: Any, o2: Any, lse2: Any) -> None:
    a, b = view(lse1).astype("float64"), view(lse2).astype("float64")
    largest = np.maximum(a, b)
    w1, w2 = np.exp2(a - largest), np.exp2(b - largest)
    view(o1)[:] = (view(o1) * w1[..., None] + view(o2) * w2[..., None]) / (w1 + w2)[..., None]
    view(lse1)[:] = largest + np.log2(w1 + w2)


def _ragged(*arguments: Any) -> None:
    q, q_indptr, k, v, k_indptr, _, _, o, lse, causal, _, _, _, scale = arguments
    for i in range(len(view(q_indptr)) - 1):
        rows = slice(*view(q_indptr)[i : i + 2])
        keys = slice(*view(k_indptr)[i : i + 2])
        counts = rows.stop - rows.start, keys.stop - keys.start
        visible = np.tri(*counts, counts[1] - counts[0]) if causal else np.ones(counts)
        view(o)[rows], view(lse)[rows] = attend(
            view(q)[rows], view(k)[keys], view(v)[keys], visible, scale
        )


def _paged(*arguments: Any) -> None:
    q, q_indptr, pages, page_indptr, page_indices, last_page, o, lse, causal, scale = arguments
    assert not causal
    for i in range(len(view(q_indptr)) - 1):
        rows = slice(*view(q_indptr)[i : i + 2])
        table = view(page_indices)[slice(*view(page_indptr)[i : i + 2])]
        held = view(pages)[table].reshape(-1, 1, pages.shape[-1])
        if len(table):
            held = held[: (len(table) - 1) * pages.shape[1] + view(last_page)[i]]
        view(o)[rows], view(lse)[rows] = attend(
            view(q)[rows],
            held,
            held[..., : o.shape[-1]],
            np.ones((rows.stop - rows.start, len(held))),
            scale,
        )


def unreachable(*_: Any) -> None:
    raise AssertionError("a cache of MLA layers called a kernel of others")


def with_kernels(arguments: list[Any]) -> list[Any]:
    """Arguments of paged_attention_kv_cache_create, for MLA layers alone, with these kernels."""
    given = list(arguments)
    given[13:28] = [None, _append, ["tirx", _ragged], *[["tirx", unreachable]] * 6] + [
        ["tirx", _paged],
        [_merge, _merge],
        unreachable,
        _copy_page,
        _debug_get,
        unreachable,
    ]
    return given
