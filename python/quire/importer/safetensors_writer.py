"""Writes one safetensors file, tensor by tensor, so that a model need not fit in memory.

Layout: u64 length of the header, the header (JSON: name -> dtype, shape, byte range after the
header), the tensors without gaps in the order in which they were declared.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path

import numpy as np

from quire._new_folder import NewFile

# The header is padded to this, so that the first tensor starts on a cache line of the mapped file.
_HEADER_ALIGNMENT = 64
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclasses.dataclass(frozen=True)
class Declaration:
    name: str
    dtype: str  # as safetensors writes it: "BF16", "F16", "F32"
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """A context: write() takes the parts of all tensors in declared order; the exit checks that
    none is missing."""

    def __init__(self, path: str, declarations: list[Declaration]):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for item in declarations:
            begin, end = end, end + item.byte_count
            header[item.name] = {
                "dtype": item.dtype,
                "shape": list(item.shape),
                "data_offsets": [begin, end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(8 + len(encoded)) % _HEADER_ALIGNMENT)
        self._bytes_left = end
        self._path = path
        self._file = NewFile(Path(path))
        self._file.write(struct.pack("<Q", len(encoded)) + encoded)

    def write(self, part: np.ndarray) -> None:
        data = np.ascontiguousarray(part)
        if data.nbytes > self._bytes_left:
            raise ValueError(
                f"{self._path}: {data.nbytes} bytes written where {self._bytes_left} are left"
            )
        self._bytes_left -= data.nbytes
        self._file.write(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        with self._file:
            if error_type is not None:
                return
            if self._bytes_left:
                raise ValueError(f"{self._path}: closed with {self._bytes_left} bytes missing")
