"""Matrices that a Hugging Face folder holds as float8 codes (e4m3) with scales: read as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire import errors
from quire._safetensors_header import FLOATS, StoredTensor, as_float32

__all__ = ["FLOAT8", "Scales", "block_of", "is_of_activations", "read_scales", "scale_names"]

FLOAT8 = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")


def _numbers() -> np.ndarray:
    """What each code stands for."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, fraction * 2.0**-9, normal)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


_NUMBERS = _numbers()


def scale_names(weight: str) -> tuple[str, ...]:
    """Names that the scales of the tensor `weight` may have."""
    return tuple(weight + suffix for suffix in _SCALES)


# Those of what enters a matrix, and of keys and values (old folders: of the outputs that become
# them).
_SCALES_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_activations_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


def is_of_activations(name: str) -> bool:
    return name.endswith(_SCALES_OF_ACTIVATIONS)


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs with one scale, by config.json; None where it names no blocks."""
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return None
    sizes = quantisation.get("weight_block_size")
    groups = quantisation.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("strategy") == "block":
            sizes = weights.get("block_structure")
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and size >= 1 for size in sizes):
        raise errors.CorruptError(
            f"config.json: quantization_config has blocks of {sizes!r}; two sizes are expected"
        )
    return sizes[0], sizes[1]


@dataclasses.dataclass(frozen=True)
class Scales:
    """values: [blocks of outputs, blocks of inputs], float32; block: the sizes of one."""

    values: np.ndarray
    block: tuple[int, int]

    def numbers(self, codes: np.ndarray, first: int) -> np.ndarray:
        """float32 numbers of `codes` [rows, inputs], uint8: rows of the matrix from `first` on."""
        rows, columns = codes.shape
        outputs = np.arange(first, first + rows) // self.block[0]
        inputs = np.arange(columns) // self.block[1]
        numbers: np.ndarray = _NUMBERS[codes] * self.values[outputs[:, None], inputs[None, :]]
        return numbers


def read_scales(
    stored: StoredTensor, shape: tuple[int, ...], block: tuple[int, int] | None
) -> Scales:
    """The scales of a matrix of this shape.

    Raises:
        BadArgumentError: they are no floating-point numbers.
        CorruptError: they do not fit the matrix.
    """
    dtype = FLOATS.get(stored.type_name)
    if dtype is None:
        raise errors.BadArgumentError(
            f"{stored.path}: tensor {stored.name} is stored as {stored.type_name}; scales must be "
            "F16, BF16 or F32"
        )
    n, k = shape
    if block is None:
        block = (n, k) if stored.byte_count == dtype.itemsize else (1, k)
    blocks = (-(-n // block[0]), -(-k // block[1]))
    if stored.shape != blocks and (block[1] != k or int(np.prod(stored.shape)) != blocks[0]):
        raise errors.CorruptError(
            f"{stored.path}: tensor {stored.name} is {list(stored.shape)}, its matrix is "
            f"{list(shape)}; scales of blocks of {block[0]} outputs and {block[1]} inputs are "
            "expected"
        )
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        raw = np.fromfile(file, dtype, blocks[0] * blocks[1])
    return Scales(as_float32(raw).reshape(blocks), block)
