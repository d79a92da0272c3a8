"""A store for engines that are not Quire's: chunks of one passport and salt, put from and brought
back to an engine's own arrays.

    space = store.space({"model": "m", "revision": "r", "block": 64, "layers": [0, 2],
                         "dtype": "f16", "kv_heads": 8, "head_dim": 128})
    memory = quire.BlockMemory({("key", 0): k0, ("value", 0): v0, ...})   # arrays [blocks, ...]
    fetch = space.fetch(prompt_ids)
    if fetch.wait(1.0):
        for layer in range(2):
            fetch.scatter(layer, memory, block_numbers[: fetch.ready], count=fetch.ready)
    ...
    space.put(3, prompt_ids, memory=memory, blocks=[17])

Bytes are verified before they are seen; what is damaged, late or gone is a miss.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from quire import _ffi, errors
from quire._arrays import input_array, int_list, output_array
from quire._numbers import int64, milliseconds, real

if TYPE_CHECKING:
    from quire.store import ChunkStore, Tier

__all__ = ["BlockMemory", "ChunkFetch", "ChunkSpace", "SectionName"]

#: Token ids, [n]; arrays of int32 or int64 are read as they are.
Tokens: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"
#: A section of a chunk: its kind and its layer.
SectionName: TypeAlias = "tuple[Literal['key', 'value', 'latent'], int]"

TTL_MAX = 1e12  # seconds: longer than any store is there
_PASSPORT_DEFAULTS = {
    "v": 1,
    "layout": "L2THD",
    "quant": "none",
    "rope": "none",
    "shard": "canonical",
}
_NUMPY_TYPES = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}


def token_ids(tokens: Any) -> Any:
    """Ids as an array [n] of int32 or int64 that C++ reads without a copy."""
    if isinstance(tokens, np.ndarray) and tokens.dtype in (np.int32, np.int64) and tokens.ndim == 1:
        return np.ascontiguousarray(input_array(tokens))
    return np.asarray(int_list(tokens, "tokens"), dtype=np.int64)


def _extras(extras: Iterable[bytes]) -> list[bytes]:
    if isinstance(extras, (str, bytes)):
        raise TypeError("extras must be a list of bytes, one for each of the leading chunks")
    found = list(extras)
    for each in found:
        if not isinstance(each, bytes):
            raise TypeError(f"extras must be bytes, not {type(each).__name__}")
    return found


class BlockMemory:
    """Where the sections of an engine's layers lie: arrays of blocks, which are never copied.

    Args:
        arrays: for each section an array [blocks, ...] in the CPU's memory, of any element type and
            any strides that leave at most one gap within a block. Array 0 of `("key", 3)` is
            block 0 of the keys of layer 3. All of them are kept alive.

    A chunk is a number of whole blocks: the bytes of its section are those of its blocks, one after
    the other.

    Raises:
        BadArgumentError: an array is not on the CPU, is empty or read-only, has overlapping blocks
            or more than one gap.
    """

    def __init__(self, arrays: Mapping[SectionName, Any]) -> None:
        self._arrays = dict(arrays)
        self._handle = _ffi.new(_ffi.BlockMemoryHandle)
        for (kind, layer), array in self._arrays.items():
            self._handle.add(kind, int64(layer, "layer"), output_array(array, f"{kind} of {layer}"))


class ChunkFetch(_ffi.ClosingOwner):
    """The chunks of one prompt on their way, from :meth:`ChunkSpace.fetch`.

    Chunks are numbered from the fetch's `first_chunk` on. They are pinned until the fetch is closed
    or collected. All calls from any thread.
    """

    _store: Any = None

    def _state(self) -> Any:
        return self._handle.state()

    @property
    def chunk_count(self) -> int:
        """Chunks that were asked for."""
        return int(self._state()["chunks"])

    @property
    def located(self) -> bool:
        """Whether :attr:`found` is final."""
        return bool(self._state()["located"])

    @property
    def found(self) -> int:
        """Leading chunks that will come, as far as is known."""
        return int(self._state()["found"])

    @property
    def ready(self) -> int:
        """Leading chunks that are here and verified. It only grows."""
        return int(self._state()["ready"])

    @property
    def done(self) -> bool:
        """Whether nothing changes any more."""
        return bool(self._state()["done"])

    @property
    def miss(self) -> str | None:
        """Why there are no more chunks than those found: "not stored", "corrupt", "timeout", ...;
        None if all are there, or nothing is known yet."""
        miss = str(self._state()["miss"])
        return None if miss == "none" else miss

    def tier(self, i: int) -> Tier:
        """The tier that chunk `i` comes from.

        Raises:
            BadArgumentError: `i` is not below :attr:`found`.
        """
        return str(self._handle.tier(int64(i, "i")))  # type: ignore[return-value]

    def wait(self, timeout: float) -> bool:
        """Waits until the fetch is done, `timeout` seconds at most. Whether it is."""
        return bool(self._handle.wait(milliseconds(timeout, "timeout")))

    def wait_layer(self, layer: int, timeout: float) -> bool:
        """Waits until a layer of all chunks that were found is here and verified. False if it will
        not come, or not within `timeout` seconds; :attr:`miss` says why. Signed chunks come whole.
        """
        return bool(
            self._handle.wait_layer(int64(layer, "layer"), milliseconds(timeout, "timeout"))
        )

    def section(self, i: int, kind: str, layer: int) -> np.ndarray[Any, Any]:
        """One section of chunk `i`: a read-only view that keeps the chunk's memory alive, also
        after the fetch and the store are closed.

        Its shape is [tokens, ...] as the passport says; its dtype NumPy's, where it has the type,
        else the unsigned integers of the same width (bf16 as uint16). Hand it on by DLPack or
        `torch.from_numpy`.

        Raises:
            BadStateError: it is not verified yet.
            BadArgumentError: `i` is not below :attr:`found`.
            NotFoundError: the chunk has no such section.
        """
        i, layer = int64(i, "i"), int64(layer, "layer")
        array = np.from_dlpack(self._handle.section(i, kind, layer))
        named = _NUMPY_TYPES.get(str(self._handle.section_type(i, kind, layer)))
        view = array if named is None else array.view(named)
        view.flags.writeable = False
        return view

    def scatter(
        self,
        layer: int,
        memory: BlockMemory,
        blocks: Sequence[int],
        *,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Copies the layer's sections of chunks [first, first + count) into blocks of `memory`.
        Other threads of Python run meanwhile.

        blocks: block numbers, the same number for each chunk, in the order of the chunks. count:
        None = all that are ready from `first` on.

        Raises:
            BadStateError: a chunk's layer is not verified yet; nothing was written.
            BadArgumentError: a block is out of range or stands twice, blocks are not as large as
                the sections, or the memory lacks a section; nothing was written.
        """
        if count is None:
            count = self.ready - operator.index(first)
        self._handle.scatter(
            int64(layer, "layer"),
            memory._handle,
            token_ids(blocks),
            int64(first, "first"),
            int64(count, "count"),
        )

    def cancel(self) -> None:
        """What is not here yet is a miss: "cancelled"."""
        self._handle.cancel()


class ChunkSpace(_ffi.Owner):
    """The chunks of one passport and one salt in a store, from :meth:`ChunkStore.space`.

    Keys of the chains that were asked for last are kept, so that asking again for a prompt that
    has grown costs little. All calls from any thread.
    """

    def __init__(self, store: ChunkStore, passport: Mapping[str, Any], salt: bytes) -> None:
        fields = {**_PASSPORT_DEFAULTS, **passport}
        try:
            canonical = json.dumps(
                fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise errors.BadArgumentError(f"ChunkStore.space: the passport: {error}") from None
        super().__init__(_ffi.new(_ffi.ChunkSpaceHandle, store._handle, canonical, salt, store.key))
        self._store = store
        self.fingerprint: str = str(self._handle.fingerprint())
        self.chunk_tokens: int = int(self._handle.chunk_tokens())

    def keys(self, tokens: Tokens, *, extras: Iterable[bytes] = ()) -> list[str]:
        """Keys of the whole chunks of a prompt, stored or not, for :meth:`ChunkStore.pin` and
        others."""
        return [str(key) for key in self._handle.keys(token_ids(tokens), _extras(extras))]

    def known_prefix(self, tokens: Tokens, *, extras: Iterable[bytes] = ()) -> int:
        """How many leading chunks are stored, as far as that is known without asking the folder or
        Redis.

        tokens: ids, [n]. extras: for each of the leading chunks the bytes that it was put with
        (digests of images, a LoRA), b"" for none.
        """
        return int(self._handle.known_prefix(token_ids(tokens), _extras(extras)))

    def wanted(self, tokens: Tokens, *, extras: Iterable[bytes] = ()) -> list[bool]:
        """For each whole chunk, whether the store does not have it, as far as that is known without
        asking the folder or Redis."""
        return [bool(each) for each in self._handle.wanted(token_ids(tokens), _extras(extras))]

    def fetch(
        self,
        tokens: Tokens,
        *,
        first_chunk: int = 0,
        timeout: float | None = None,
        extras: Iterable[bytes] = (),
        prefetch: bool = False,
        compute_seconds_per_token: float = 0.0,
    ) -> ChunkFetch:
        """Starts to bring the leading chunks of a prompt that are stored. Does not wait.

        tokens: ids, [n]; what is behind the last whole chunk is ignored. first_chunk: chunks before
        it are not read. timeout: seconds after which what is not here is a miss; None = the tiers'
        own limits. prefetch: they are kept in RAM also where the store was opened with
        `promote=False`. compute_seconds_per_token: what is predicted to take longer than computing
        is not read; 0 = read all.

        Raises:
            BadArgumentError: a negative first_chunk, or more extras than chunks.
        """
        options = {
            "extras": _extras(extras),
            "first_chunk": int64(first_chunk, "first_chunk"),
            "prefetch": bool(prefetch),
            "compute_seconds_per_token": real(
                compute_seconds_per_token, "compute_seconds_per_token"
            ),
        }
        if timeout is not None:
            options["timeout_ms"] = max(1, milliseconds(timeout, "timeout"))
        fetch = ChunkFetch(self._handle.fetch(token_ids(tokens), options))
        fetch._store = self._store  # which closes when it is collected
        return fetch

    def put(
        self,
        index: int,
        tokens: Tokens,
        sections: Mapping[SectionName, Any] | None = None,
        *,
        memory: BlockMemory | None = None,
        blocks: Sequence[int] | None = None,
        extras: Iterable[bytes] = (),
        ttl: float = 0,
        priority: int | None = None,
        recompute_seconds: float = 0.0,
    ) -> None:
        """Gives the store one chunk; copies its bytes and does not wait for a disk or Redis.

        index: the chunk of the prompt's chain. tokens: ids, from position 0 to at least the
        chunk's end. Either sections: an array [tokens, ...] for each section of the passport; or
        memory and blocks: the block numbers that the chunk lies in. extras: as for
        :meth:`known_prefix`. ttl: seconds until it expires; 0 = never. priority: 0 to 100, None =
        the store's. recompute_seconds: what computing it takes; 0 = not known.

        Raises:
            FullError: the queue of a tier is full and the tier drops the chunk (counted in
                `dropped_writes`).
            BadArgumentError: no whole chunk at `index`, a section lacks or has the wrong size, a
                block out of range.
        """
        options: dict[str, Any] = {
            "extras": _extras(extras),
            "ttl_ms": milliseconds(ttl, "ttl", most=TTL_MAX),
            "recompute_seconds": real(recompute_seconds, "recompute_seconds"),
        }
        if priority is not None:
            options["priority"] = int64(priority, "priority")
            if options["priority"] < 0:
                raise errors.BadArgumentError(f"priority is {priority}; it must be in [0, 100]")
        index, ids = int64(index, "index"), token_ids(tokens)
        if sections is not None and memory is None and blocks is None:
            whole = BlockMemory({name: _as_block(array) for name, array in sections.items()})
            self._handle.put_sections(ids, index, whole._handle, options)
        elif sections is None and memory is not None and blocks is not None:
            self._handle.put_blocks(ids, index, memory._handle, token_ids(blocks), options)
        else:
            raise TypeError("ChunkSpace.put takes either sections, or memory and blocks")


def _as_block(array: Any) -> Any:
    """An array as one block; it is only read."""
    array = input_array(array)
    return array[None]
