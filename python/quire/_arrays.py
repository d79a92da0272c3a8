"""Arrays of the caller's kind: NumPy, torch, or anything with DLPack. None of them is copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire import errors
from quire._numbers import int64

__all__ = ["dtype_name", "empty_beside", "input_array", "int_list", "output_array", "shape_of"]


def dtype_name(dtype: Any) -> str:
    """ "float32", "bfloat16", ...: of a name, a NumPy dtype or scalar type, or a torch dtype."""
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        dtype = np.dtype(dtype)
    return str(dtype).removeprefix("torch.")


def int_list(values: Iterable[Any], what: str) -> list[int]:
    """Plain ints of any iterable of integers (NumPy's among them). BadArgumentError for those
    beyond 64 bits."""
    import operator

    try:
        found = [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"{what} must be integers: {error}") from None
    if found and not (-(2**63) <= min(found) and max(found) < 2**63):
        for index, value in enumerate(found):
            int64(value, f"{what}[{index}]")
    return found


def input_array(array: Any) -> Any:
    """`array`, to be read.

    Read-only NumPy arrays are copied: this way of export has no flag for them.
    """
    if isinstance(array, np.ndarray):
        return array if array.flags.writeable else array.copy()
    _check_is_array(array, "a tensor")
    return array


def _check_is_array(array: Any, what: str) -> None:
    if not hasattr(array, "__dlpack__") or isinstance(array, np.generic):
        raise TypeError(
            f"{what} must be an array of NumPy, torch or another library with DLPack, not "
            f"{type(array).__name__}"
        )


def shape_of(array: Any) -> tuple[int, ...]:
    """Its shape. TypeError for what is no array."""
    _check_is_array(array, "a tensor")
    return tuple(array.shape)


def output_array(array: Any, what: str) -> Any:
    """`array`, to be written. BadArgumentError if it is a read-only NumPy array."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise errors.BadArgumentError(f"{what} is read-only and cannot take the result")
    if not isinstance(array, np.ndarray):
        _check_is_array(array, what)
    return array


def empty_beside(array: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """A new array of `shape`, of the library and (if dtype is None) the dtype of `array`."""
    if hasattr(array, "new_empty"):  # torch
        return (
            array.new_empty(tuple(shape))
            if dtype is None
            else array.new_empty(tuple(shape), dtype=dtype)
        )
    if dtype is None:
        dtype = array.dtype if isinstance(array, np.ndarray) else np.from_dlpack(array).dtype
    return np.empty(tuple(shape), dtype=dtype)
