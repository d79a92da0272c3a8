"""Rows of numbers as Q4_K: blocks of 256 with 4-bit codes, 6-bit scales and leasts of 32 inputs."""

from __future__ import annotations

import numpy as np

__all__ = ["BLOCK", "BLOCK_BYTES", "quantize_rows"]

BLOCK = 256
BLOCK_BYTES = 144
_GROUPS = 8
_GROUP = 32
_CODE_MAX = 15
_SCALE_MAX = 63
# How much wider or narrower than the range of its inputs the codes of a group may be laid: of these
# the one with the least error is taken. A narrower grid cuts the greatest and spares the others.
_WIDTHS = np.linspace(0.76, 1.06, 9, dtype=np.float32)


def quantize_rows(values: np.ndarray) -> np.ndarray:
    """Finite float32 [rows, columns], columns a multiple of BLOCK -> uint8 [rows, bytes].

    A weight is d s q - m t. Scale and least of a group are fitted to its inputs by least squares,
    rounded to 6 bits each (s, t) of what the block shares (d, m), and the codes q are then the
    nearest ones to the scales as they are stored.
    """
    rows, columns = values.shape
    groups = np.ascontiguousarray(values, np.float32).reshape(-1, _GROUPS, _GROUP)
    scale, least = _fitted(groups)
    d, s = _shared(scale)
    m, t = _shared(least)
    step = d[:, None] * s
    floor = m[:, None] * t
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    codes = _rounded((groups + floor[:, :, None]) * inverse[:, :, None])
    blocks = np.empty((len(groups), BLOCK_BYTES), np.uint8)
    blocks[:, 0:2] = d.astype(np.float16)[:, None].view(np.uint8)
    blocks[:, 2:4] = m.astype(np.float16)[:, None].view(np.uint8)
    blocks[:, 4:16] = _six_bits(s.astype(np.uint8), t.astype(np.uint8))
    pairs = codes.astype(np.uint8).reshape(-1, _GROUPS // 2, 2, _GROUP)
    blocks[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, BLOCK // 2)
    return blocks.reshape(rows, columns // BLOCK * BLOCK_BYTES)


def _rounded(codes: np.ndarray) -> np.ndarray:
    rounded: np.ndarray = np.clip(np.rint(codes), 0, _CODE_MAX)
    return rounded


def _fitted(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and least, each at least 0, of every group: x is about scale * code - least."""
    low = np.minimum(groups.min(axis=2), 0)
    width = groups.max(axis=2) - low
    best = np.full(width.shape, np.inf, np.float32)
    scale, least = np.zeros_like(width), np.zeros_like(width)
    mean = groups.mean(axis=2)
    for part in _WIDTHS:
        step = width * (part / _CODE_MAX)
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        # The middle of the range stays where it is.
        begin = low + width * ((1 - part) / 2)
        codes = _rounded((groups - begin[:, :, None]) * inverse[:, :, None])
        fitted, floor = _least_squares(groups, codes, mean)
        error = np.square(groups - (fitted[:, :, None] * codes - floor[:, :, None])).sum(axis=2)
        is_better = error < best
        best = np.where(is_better, error, best)
        scale = np.where(is_better, fitted, scale)
        least = np.where(is_better, floor, least)
    return scale, least


def _least_squares(
    groups: np.ndarray, codes: np.ndarray, mean: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The line through (codes, inputs); through the origin where its least would be below 0."""
    middle = codes.mean(axis=2)
    spread = np.square(codes).mean(axis=2) - middle**2
    together = (codes * groups).mean(axis=2)
    slope = np.divide(
        together - middle * mean, spread, out=np.zeros_like(mean), where=spread > 1e-6
    )
    least = slope * middle - mean
    squares = np.square(codes).mean(axis=2)
    through = np.divide(together, squares, out=np.zeros_like(mean), where=squares > 0)
    is_below = (least < 0) | (slope < 0)
    return (
        np.where(is_below, np.maximum(through, 0), slope),
        np.where(is_below, 0, least).astype(np.float32),
    )


def _shared(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of 8 groups as a float16 of the block (here widened) times integers of 6 bits."""
    unit = (values.max(axis=1) / _SCALE_MAX).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, unit, out=np.zeros_like(unit), where=unit > 0)
    return unit, np.clip(np.rint(values * inverse[:, None]), 0, _SCALE_MAX)


def _six_bits(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Eight s and eight t in twelve bytes: the first four of each have bytes of their own, whose
    upper two bits belong to the last four."""
    packed = np.empty((len(s), 12), np.uint8)
    packed[:, 0:4] = s[:, :4] | (s[:, 4:] >> 4) << 6
    packed[:, 4:8] = t[:, :4] | (t[:, 4:] >> 4) << 6
    packed[:, 8:12] = (s[:, 4:] & 15) | (t[:, 4:] & 15) << 4
    return packed
