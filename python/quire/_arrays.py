"""Arrays of the caller's kind: NumPy, torch, or anything with DLPack. None of them is copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire import errors

__all__ = ["dtype_name", "empty_beside", "input_array", "int_list", "output_array"]


def dtype_name(dtype: Any) -> str:
    """ "float32", "bfloat16", ...: of a name, a NumPy dtype or scalar type, or a torch dtype."""
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        dtype = np.dtype(dtype)
    return str(dtype).removeprefix("torch.")


def int_list(values: Iterable[Any], what: str) -> list[int]:
    """Plain ints of any iterable of integers (NumPy's among them)."""
    import operator

    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"{what} must be integers: {error}") from None


def input_array(array: Any) -> Any:
    """`array`, to be read.

    Read-only NumPy arrays are copied: this way of export has no flag for them.
    """
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return array.copy()
    return array


def output_array(array: Any, what: str) -> Any:
    """`array`, to be written. BadArgumentError if it is a read-only NumPy array."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise errors.BadArgumentError(f"{what} is read-only and cannot take the result")
    return array


def empty_beside(array: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """A new array of `shape`, of the library and (if dtype is None) the dtype of `array`."""
    if hasattr(array, "new_empty"):  # torch
        return (
            array.new_empty(tuple(shape))
            if dtype is None
            else array.new_empty(tuple(shape), dtype=dtype)
        )
    return np.empty(tuple(shape), dtype=dtype or np.asarray(array).dtype)
