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
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from quire import _ffi, errors
from quire._arrays import input_array, int_list, output_array
from quire._numbers import int64, milliseconds, real, text

if TYPE_CHECKING:
    from quire.store import ChunkStore, Tier

__all__ = ["BlockMemory", "BlockOrder", "ChunkFetch", "ChunkSpace", "SectionName"]

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


def token_ids(tokens: Any, what: str = "tokens") -> Any:
    """Ids as an array [n] of int32 or int64 that C++ reads without a copy."""
    if isinstance(tokens, np.ndarray) and tokens.dtype in (np.int32, np.int64) and tokens.ndim == 1:
        return np.ascontiguousarray(input_array(tokens))
    return np.asarray(int_list(tokens, what), dtype=np.int64)


def _block_numbers(blocks: Any) -> Any:
    """As token_ids. A number that is none of any memory is BadArgumentError here: C++ would call it
    a token id."""
    numbers = token_ids(blocks, "blocks")
    if numbers.size and not (0 <= numbers.min() and numbers.max() < 2**31):
        raise errors.BadArgumentError(
            f"blocks has the numbers {numbers.min()} to {numbers.max()}; a block's number is at "
            "least 0 and below 2^31"
        )
    return numbers


def _at_least_zero(value: Any, name: str) -> float:
    """A finite number of seconds."""
    number = real(value, name)
    if not 0 <= number < math.inf:
        raise errors.BadArgumentError(f"{name} is {number}; it must be finite and at least 0")
    return number


def _extras(extras: Iterable[bytes]) -> list[bytes]:
    if isinstance(extras, (str, bytes)):
        raise TypeError("extras must be a list of bytes, one for each of the leading chunks")
    found = list(extras)
    for each in found:
        if not isinstance(each, bytes):
            raise TypeError(f"extras must be bytes, not {type(each).__name__}")
    return found


class BlockOrder(NamedTuple):
    """How a section's bytes lie within a block of an engine whose kernels have an order of their
    own: in runs of equal length.

    offsets: of the runs in the block, bytes, int64 [runs], in the order of the section. run_bytes:
    of each.
    """

    offsets: np.ndarray[Any, Any]
    run_bytes: int


class BlockMemory:
    """Where the sections of an engine's layers lie: arrays of blocks, which are never copied.

    Args:
        arrays: for each section an array [blocks, ...] in the CPU's memory, of any element type and
            any strides that leave at most one gap within a block. Array 0 of `("key", 3)` is
            block 0 of the keys of layer 3. All of them are kept alive.
        orders: of the sections whose bytes lie otherwise in a block, which then has no gap. What an
            order leaves out of a block is neither read nor written, so keys and values may lie in
            one block.

    A chunk is a number of whole blocks: the bytes of its section are those of its blocks, one after
    the other.

    Raises:
        BadArgumentError: an array is not on the CPU, is empty or read-only, has overlapping blocks
            or more than one gap; an order is of a section that has no array, leaves the block, or
            has runs that overlap.
    """

    def __init__(
        self,
        arrays: Mapping[SectionName, Any],
        orders: Mapping[SectionName, BlockOrder] | None = None,
    ) -> None:
        self._arrays = dict(arrays)
        self._handle = _ffi.new(_ffi.BlockMemoryHandle)
        of_section = self._add_orders(orders or {})
        for name, array in self._arrays.items():
            self._add(name, array, of_section.get(name, -1))

    def _add(self, name: Any, array: Any, order: int) -> None:
        if not isinstance(name, tuple) or len(name) != 2:
            raise errors.BadArgumentError(
                f"BlockMemory: {name!r} names no section; a name is (kind, layer)"
            )
        kind, layer = text(name[0], "the kind of a section"), int64(name[1], "layer")
        array = output_array(array, f"{kind} of {layer}")
        try:
            self._handle.add(kind, layer, array, order)
        except (BufferError, RuntimeError) as error:  # of the array's library
            if isinstance(error, errors.QuireError):
                raise
            why = str(error).partition("\n")[0]
            raise errors.BadArgumentError(
                f"BlockMemory: the array of {kind} of {layer} cannot be read where it is: {why}"
            ) from error

    def _add_orders(self, orders: Mapping[SectionName, BlockOrder]) -> dict[SectionName, int]:
        """The number of each section's order; layers that have the same one keep it once."""
        numbers: dict[int, int] = {}
        found = {}
        for name, order in orders.items():
            if name not in self._arrays:
                raise errors.BadArgumentError(f"BlockMemory: no array for the order of {name}")
            if id(order) not in numbers:
                offsets = np.ascontiguousarray(order.offsets, np.int64)
                numbers[id(order)] = int(
                    self._handle.add_order(
                        input_array(offsets), int64(order.run_bytes, "run_bytes")
                    )
                )
            found[name] = numbers[id(order)]
        return found


def _handle_of(memory: Any) -> Any:
    if not isinstance(memory, BlockMemory):
        raise TypeError(f"memory must be a BlockMemory, not {type(memory).__name__}")
    return memory._handle


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
        i, layer, kind = int64(i, "i"), int64(layer, "layer"), text(kind, "kind")
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
            _handle_of(memory),
            _block_numbers(blocks),
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
        if not isinstance(passport, Mapping):
            raise TypeError(f"a passport is a mapping of fields, not {type(passport).__name__}")
        fields = {**_PASSPORT_DEFAULTS, **passport}
        try:
            canonical = json.dumps(
                fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise errors.BadArgumentError(f"ChunkStore.space: the passport: {error}") from None
        text(canonical, "ChunkStore.space: the passport")
        super().__init__(_ffi.new(_ffi.ChunkSpaceHandle, store._handle, canonical, salt, store.key))
        self._store = store
        self.fingerprint: str = str(self._handle.fingerprint())
        self.chunk_tokens: int = int(self._handle.chunk_tokens())

    def _abandon_after_fork(self) -> None:
        super()._abandon_after_fork()
        self._open_handle = None  # as the store, whose locks a thread of the parent may hold

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
            "compute_seconds_per_token": _at_least_zero(
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
            "recompute_seconds": _at_least_zero(recompute_seconds, "recompute_seconds"),
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
            numbers = _block_numbers(blocks)
            self._handle.put_blocks(ids, index, _handle_of(memory), numbers, options)
        else:
            raise TypeError("ChunkSpace.put takes either sections, or memory and blocks")


def _as_block(array: Any) -> Any:
    """An array as one block; it is only read."""
    array = input_array(array)
    return array[None]
