"""The header of a safetensors file, checked: what a damaged file says is never believed. And its
floating-point elements, as numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from quire import errors

__all__ = ["FLOATS", "StoredTensor", "as_float32", "read_header"]

# How elements are read from a file; bfloat16 as its bits.
FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}

# The format's own limit; headers of real models have some MB.
_HEADER_BYTES_MAX = 100_000_000
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `byte_count` bytes of the file from `offset` on."""

    name: str
    path: Path
    type_name: str  # "BF16"
    shape: tuple[int, ...]
    offset: int
    byte_count: int


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a file, in the header's order; reads the header alone.

    Raises:
        CorruptError: the file is truncated, its header is no JSON object of tensors, or a tensor's
            bytes do not fit its shape or the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise errors.CorruptError(f"{path}: has {size} bytes, fewer than a header's length")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _HEADER_BYTES_MAX):
            raise errors.CorruptError(
                f"{path}: says that its header has {length} bytes; the file has {size}, and a "
                f"header at most {_HEADER_BYTES_MAX}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.CorruptError(f"{path}: the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise errors.CorruptError(f"{path}: the header is no JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    return [_tensor(path, name, entry, data, size) for name, entry in header.items()]


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    what = f"{path}: tensor {name[:200]}"
    if not isinstance(entry, dict):
        raise errors.CorruptError(f"{what} is described by no JSON object")
    type_name, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(type_name, str):
        raise errors.CorruptError(f"{what} has no dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise errors.CorruptError(
            f'{what}: "shape" and "data_offsets" must be lists of integers from 0 on, the second '
            "of two"
        )
    begin, end = offsets
    if begin > end or end > size - data:
        raise errors.CorruptError(
            f"{what} lies at [{begin}, {end}) of {size - data} bytes of data: the file is "
            "truncated or damaged"
        )
    element = _ELEMENT_BYTES.get(type_name)
    if element is not None and math.prod(shape) * element != end - begin:
        raise errors.CorruptError(
            f"{what} of {type_name} and shape {shape} has {end - begin} bytes, not "
            f"{math.prod(shape) * element}"
        )
    return StoredTensor(name, path, type_name, tuple(shape), data + begin, end - begin)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def as_float32(raw: np.ndarray) -> np.ndarray:
    """Elements that were read with one of FLOATS."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)
