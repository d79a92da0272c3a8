"""A bounded reader of GGUF files, versions 2 and 3: metadata, and the place of every tensor in the
mapped file.

The bytes come from strangers, so every length is compared with what the file still holds before it
sizes anything, and the work is linear in the size of the file: a hostile file ends in a GgufError
that names the file and the object. The `gguf` package has a reader of its own, but a file of 49
bytes kept it busy for more than 20 seconds.

Layout (all little-endian): magic "GGUF", u32 version, u64 tensor count, u64 metadata count;
metadata as (string key, u32 type, value); tensor infos as (string name, u32 dimension count, u64
dimensions from the fastest, u32 type, u64 offset); zeros up to a multiple of general.alignment; the
tensors, whose offsets count from here.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire._model_folder import LFS_BEGIN

# Limits. The largest real files stay far below: vocabularies have at most some 300 000 tokens and
# merges, models a few thousand tensors, chat templates some 10 kB.
MAX_METADATA_COUNT = 65_536
MAX_TENSOR_COUNT = 1_000_000  # as for safetensors
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_VALUES = (
    4_000_000  # strings and inner arrays of the whole file: each costs a Python object
)
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    _FLOAT32: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# Least bytes of one entry: an empty key, a type and a one-byte value; an empty name, one dimension,
# a type, an offset.
_METADATA_BYTES_MIN = 8 + 4 + 1
_TENSOR_INFO_BYTES_MIN = 8 + 4 + 8 + 4 + 8


class GgufError(ValueError):
    """A GGUF file that cannot be imported. The message names the file, the object in it and what is
    wrong."""

    def __init__(self, path: str | os.PathLike[str], message: str):
        super().__init__(f"{os.fspath(path)}: {message}")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor. `shape` is row-major (the slowest dimension first); quantisation blocks lie along
    the last one."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # in the file
    byte_count: int

    @property
    def row_count(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object)) if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.byte_count // self.row_count


class Metadata:
    """The key-value part, read by expected type: a missing, mistyped or absurd value is an error
    that names its key."""

    def __init__(self, path: str, values: dict[str, Any]):
        self._path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        return list(self._values)

    def error(self, key: str, message: str) -> GgufError:
        return GgufError(self._path, f'metadata "{key}": {message}')

    def integer(self, key: str, minimum: int, maximum: int, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if type(value) is not int:
            raise self._mistyped(key, "an integer")
        if not minimum <= value <= maximum:
            raise self.error(key, f"{value} lies outside of {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero: what every scale, base and epsilon of a model is."""
        value = self._values.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._mistyped(key, "a number")
        if not 0 < value < float("inf"):
            raise self.error(key, f"{value} is not a finite number above zero")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise self._mistyped(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if type(value) is not str:
            raise self._mistyped(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or any(type(item) is not str for item in value):
            raise self._mistyped(key, "an array of strings")
        return value

    def numbers(self, key: str) -> np.ndarray:
        value = self._values.get(key)
        if not isinstance(value, np.ndarray) or value.dtype == np.bool_:
            raise self._mistyped(key, "an array of numbers")
        return value

    def _mistyped(self, key: str, expected: str) -> GgufError:
        if key not in self._values:
            return self.error(key, f"is missing; it must be {expected}")
        return self.error(key, f"is not {expected}")


class GgufFile:
    """A mapped GGUF file whose header has been checked as a whole."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._map = _map_file(self.path)
        parser = _HeaderParser(self.path, self._map)
        self.version = parser.version
        self.metadata = Metadata(self.path, parser.metadata)
        self.tensors: dict[str, TensorInfo] = parser.tensors

    def tensor_error(self, name: str, message: str) -> GgufError:
        return GgufError(self.path, f'tensor "{name}": {message}')

    def rows(self, tensor: TensorInfo, begin: int, end: int) -> np.ndarray:
        """The bytes of rows [begin, end) as they lie in the file: [end - begin, row_bytes], mapped,
        not copied."""
        count = end - begin
        offset = tensor.offset + begin * tensor.row_bytes
        flat = np.frombuffer(self._map, np.uint8, count * tensor.row_bytes, offset)
        return flat.reshape(count, tensor.row_bytes)


def _map_file(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < 24:
            raise GgufError(path, "is shorter than a GGUF header (24 bytes)")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _HeaderParser:
    """One pass over the header. `_position` only grows and never passes the end of the file."""

    def __init__(self, path: str, data: mmap.mmap):
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._array_values = 0
        self.version = self._read_version()
        tensor_count = self._read(_U64, "the tensor count")
        metadata_count = self._read(_U64, "the metadata count")
        self._check_count(
            "metadata entries", metadata_count, MAX_METADATA_COUNT, _METADATA_BYTES_MIN
        )
        self._check_count("tensors", tensor_count, MAX_TENSOR_COUNT, _TENSOR_INFO_BYTES_MIN)
        self.metadata = self._read_metadata(metadata_count)
        infos = [self._read_tensor_info() for _ in range(tensor_count)]
        self.tensors = self._place_tensors(infos)

    def _error(self, message: str) -> GgufError:
        return GgufError(self._path, message)

    def _read_version(self) -> int:
        if self._data[: len(LFS_BEGIN)] == LFS_BEGIN:
            raise self._error("is a Git LFS pointer, not the file itself; fetch it: git lfs pull")
        if self._data[:4] != b"GGUF":
            raise self._error(f"is not a GGUF file: it begins with {self._data[:4]!r}")
        self._position = 4
        version = self._read(_U32, "the version")
        if version in (2, 3):
            return version
        if version in (2 << 24, 3 << 24):
            raise self._error(
                "is a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)"
            )
        raise self._error(
            f"has GGUF version {version}; versions 2 and 3 are read: convert the model again"
        )

    def _check_count(self, what: str, count: int, limit: int, least_bytes: int) -> None:
        if count > limit:
            raise self._error(f"declares {count} {what}; the limit is {limit}")
        self._check_left(count * least_bytes, f"{count} {what}")

    def _check_left(self, byte_count: int, what: str) -> None:
        left = self._size - self._position
        if byte_count > left:
            raise self._error(
                f"{what} need at least {byte_count} bytes at offset {self._position}, "
                f"but the file ends after {left}"
            )

    def _read(self, layout: struct.Struct, what: str) -> int:
        self._check_left(layout.size, what)
        value: int = layout.unpack_from(self._data, self._position)[0]
        self._position += layout.size
        return value

    def _read_string(self, limit: int, what: str) -> str:
        length = self._read(_U64, what)
        if length > limit:
            raise self._error(f"{what} has {length} bytes; the limit is {limit}")
        self._check_left(length, what)
        raw = self._data[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(
                f"{what} is not UTF-8: {error.reason} at byte {error.start}"
            ) from None

    def _read_metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            key = self._read_string(MAX_NAME_BYTES, f"the key of metadata entry {index}")
            if key in values:
                raise self._error(f'metadata "{key}": stands twice')
            what = f'metadata "{key}"'
            values[key] = self._read_value(self._read(_U32, what), what, MAX_ARRAY_DEPTH)
        return values

    def _read_value(self, value_type: int, what: str, depth_left: int) -> Any:
        if value_type == _STRING:
            return self._read_string(MAX_STRING_BYTES, what)
        if value_type == _ARRAY:
            return self._read_array(what, depth_left)
        value = self._read_scalars(value_type, 1, what)[0]
        # A float32 stands for the shortest decimal that rounds to it: 1e-05, not
        # 9.999999747378752e-06.
        return float(str(value)) if value_type == _FLOAT32 else value.item()

    def _read_scalars(self, value_type: int, count: int, what: str) -> np.ndarray:
        dtype = _SCALARS.get(value_type)
        if dtype is None:
            raise self._error(f"{what}: has the unknown value type {value_type}")
        self._check_left(count * dtype.itemsize, what)
        values: np.ndarray = np.frombuffer(self._data, dtype, count, self._position)
        self._position += count * dtype.itemsize
        if value_type != _BOOL:
            return values
        if count and values.max() > 1:
            raise self._error(f"{what}: holds a boolean that is neither 0 nor 1")
        return values.astype(np.bool_)

    def _read_array(self, what: str, depth_left: int) -> Any:
        if depth_left == 0:
            raise self._error(f"{what}: arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        item_type = self._read(_U32, what)
        count = self._read(_U64, what)
        if item_type not in (_STRING, _ARRAY):
            self._check_left(count, what)
            return self._read_scalars(item_type, count, what)
        self._array_values += count
        if self._array_values > MAX_ARRAY_VALUES:
            raise self._error(
                f"{what}: with {count} items here the arrays of the file hold more than "
                f"{MAX_ARRAY_VALUES} strings and arrays"
            )
        self._check_left(count * (8 if item_type == _STRING else 12), what)
        return [self._read_value(item_type, what, depth_left - 1) for _ in range(count)]

    def _read_tensor_info(self) -> TensorInfo:
        name = self._read_string(MAX_NAME_BYTES, "the name of a tensor")
        what = f'tensor "{name}"'
        dimension_count = self._read(_U32, what)
        if not 1 <= dimension_count <= MAX_DIMENSIONS:
            raise self._error(
                f"{what}: has {dimension_count} dimensions; 1 to {MAX_DIMENSIONS} are possible"
            )
        shape = tuple(self._read(_U64, what) for _ in range(dimension_count))[::-1]
        type_id = self._read(_U32, what)
        offset = self._read(_U64, what)
        try:
            tensor_type = GGMLQuantizationType(type_id)
        except ValueError:
            raise self._error(f"{what}: has the unknown type {type_id}") from None
        return TensorInfo(
            name, shape, tensor_type, offset, self._tensor_bytes(what, shape, tensor_type)
        )

    def _tensor_bytes(
        self, what: str, shape: tuple[int, ...], tensor_type: GGMLQuantizationType
    ) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if 0 in shape:
            raise self._error(f"{what}: has a dimension of 0 in its shape {list(shape)}")
        if shape[-1] % block_size:
            raise self._error(
                f"{what}: rows of {shape[-1]} are no whole number of {tensor_type.name} blocks "
                f"({block_size} each)"
            )
        byte_count = block_bytes
        for size in (*shape[:-1], shape[-1] // block_size):
            byte_count *= size  # Python integers do not overflow
        if byte_count > self._size:
            raise self._error(
                f"{what}: its shape {list(shape)} needs {byte_count} bytes, the file has "
                f"{self._size}"
            )
        return byte_count

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            type(alignment) is not int
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._error(
                f'metadata "general.alignment": {alignment!r} is not a power of two up to '
                f'{MAX_ALIGNMENT}'
            )
        return alignment

    def _place_tensors(self, infos: list[TensorInfo]) -> dict[str, TensorInfo]:
        """Turns offsets into file offsets. Afterwards tensors have distinct names, lie in the file
        and are disjoint."""
        alignment = self._alignment()
        data_begin = -(-self._position // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        end = data_begin
        previous = ""
        for info in sorted(infos, key=lambda item: item.offset):
            what = f'tensor "{info.name}"'
            begin = data_begin + info.offset
            if info.name in placed:
                raise self._error(f"{what}: stands twice")
            if info.offset % alignment:
                raise self._error(
                    f"{what}: its offset {info.offset} is no multiple of the alignment {alignment}"
                )
            if begin < end:
                raise self._error(f'{what}: overlaps with tensor "{previous}"')
            end = begin + info.byte_count
            if end > self._size:
                raise self._error(f"{what}: ends at byte {end}, but the file has {self._size}")
            placed[info.name] = dataclasses.replace(info, offset=begin)
            previous = info.name
        return placed
