"""Buffers that hand KV from producers to consumers: by token ids, or by name.

:class:`LookupBuffer` and :class:`StoreBuffer` have the methods and parameters of vLLM's
``KVLookupBufferBase`` and ``KVStoreBufferBase``, which stand here as well, so that code written
against those runs unchanged. Arrays are NumPy's or torch's; torch is not needed. Everything may be
called from any thread at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from quire import _ffi, errors
from quire._arrays import input_array
from quire._numbers import real

__all__ = [
    "BufferClosed",
    "BufferFull",
    "EntryTooLarge",
    "KVCacheBufferBase",
    "KVLookupBufferBase",
    "KVStoreBufferBase",
    "LookupBuffer",
    "StoreBuffer",
    "StoreClosed",
    "StoreUnavailable",
]

EntryTooLarge = errors.TooLargeError
BufferFull = errors.FullError
BufferClosed = errors.ClosedError
StoreClosed = errors.ClosedError
StoreUnavailable = errors.UnavailableError

_FIELDS = ("key", "value", "hidden")


class KVCacheBufferBase:
    """What both kinds of buffer have."""

    def close(self) -> None:
        """Releases what the buffer holds."""
        raise NotImplementedError


class KVLookupBufferBase(KVCacheBufferBase):
    """KV found by its tokens and removed as it is read."""

    def insert(self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any) -> None:
        """Takes an entry in."""
        raise NotImplementedError

    def drop_select(self, input_tokens: Any | None, roi: Any | None) -> list[Any]:
        """Removes a matching entry and returns its five tensors."""
        raise NotImplementedError


class KVStoreBufferBase(KVCacheBufferBase):
    """Tensors by name."""

    def put(self, key: str, value: Any | None) -> None:
        """Stores a tensor; None deletes the key."""
        raise NotImplementedError

    def get(self, key: str) -> Any | None:
        """The tensor, or None."""
        raise NotImplementedError


class _Buffer(_ffi.ClosingOwner, KVCacheBufferBase):
    """What both kinds have, wherever their entries are."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._uses_torch = False

    def _abandon_after_fork(self) -> None:
        """The child has the entries that there were, for itself."""

    @property
    def buffer_size(self) -> int:
        """Bytes that are used: of all tensors, and in a store of their keys."""
        return int(self._handle.used_bytes())

    @property
    def capacity(self) -> int:
        """Bytes that can be used."""
        return int(self._handle.capacity_bytes())

    def __len__(self) -> int:
        return int(self._handle.size())


class LookupBuffer(_Buffer, KVLookupBufferBase):
    """A lookup buffer within this process.

    ``capacity`` bytes bound all tensors of all entries. ``prefer``: of the entries that match a
    query, ``"fifo"`` takes the one inserted first, ``"longest"`` the one that matches in most
    tokens.

    With ``s`` and ``q`` the tokens of an entry and a query where their roi is set, and ``m`` the
    smaller length, the entry matches iff ``m > 0`` and the first ``m`` are equal.
    """

    def __init__(self, capacity: int, *, prefer: Literal["fifo", "longest"] = "fifo") -> None:
        self._open(_ffi.create("LookupBuffer", {"capacity_bytes": capacity, "prefer": prefer}))

    def _open(self, handle: Any) -> None:
        super().__init__(handle)

    def insert(
        self,
        input_tokens: Any,
        roi: Any,
        key: Any,
        value: Any,
        hidden: Any,
        timeout: float | None = None,
    ) -> None:
        """Copies an entry in.

        ``input_tokens``: [T] integers or floats; ``roi``: [T] bool or 0 and 1, the tokens that the
        KV is of; ``key``, ``value``, ``hidden``: any tensors, or None. Blocks while there is no
        room, for at most ``timeout`` seconds (None: for ever): then BufferFull. EntryTooLarge for
        what never fits, BufferClosed, ValueError for tokens or roi that are not as described.
        """
        tensors = dict(zip(_FIELDS, (key, value, hidden), strict=True))
        self.insert_bundle(input_tokens, roi, tensors, timeout=timeout)

    def insert_bundle(
        self,
        tokens: Any,
        roi: Any,
        tensors: Mapping[str, Any],
        *,
        owned: bool = False,
        timeout: float | None = None,
    ) -> None:
        """As :meth:`insert`, with tensors by name.

        ``owned``: the caller never writes to the arrays again, so that they need not be copied.
        """
        present = {name: array for name, array in tensors.items() if not _is_nothing(array)}
        self._note_library(tokens, *present.values())
        self._handle.insert(
            input_array(tokens),
            input_array(roi),
            list(present),
            [_as_tensor(array) for array in present.values()],
            owned,
            _nanoseconds(timeout),
        )

    def drop_select(
        self,
        input_tokens: Any | None = None,
        roi: Any | None = None,
        timeout: float | None = None,
        block: bool = True,
    ) -> list[Any]:
        """Removes the entry that matches and returns ``[tokens, roi, key, value, hidden]`` of it.

        Without tokens any entry matches, without roi all tokens count. Blocks until an entry
        matches, for at most ``timeout`` seconds (None: for ever); then, and with ``block=False`` at
        once, five None. The arrays are torch's if the query is (without one, if the last call's
        were), else NumPy's.
        """
        found = self.drop_select_bundle(input_tokens, roi, timeout=timeout, block=block)
        if found is None:
            return [None] * 5
        tokens, mask, tensors = found
        return [tokens, mask, *(tensors.get(name) for name in _FIELDS)]

    def drop_select_bundle(
        self,
        tokens: Any | None = None,
        roi: Any | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> tuple[Any, Any, dict[str, Any]] | None:
        """As :meth:`drop_select`: tokens, roi and the tensors by name, or None."""
        if tokens is not None:
            self._note_library(tokens)
        found = self._handle.drop_select(
            None if tokens is None else input_array(tokens),
            None if roi is None or tokens is None else input_array(roi),
            _nanoseconds(timeout) if block else 0,
        )
        if len(found) == 0:
            return None
        # By the query: another thread may have given other arrays while this one waited.
        as_torch = self._uses_torch if tokens is None else _is_torch(tokens)
        stored_tokens, stored_roi, names, stored = found
        bundle = {
            str(name): _from_tensor(tensor, as_torch)
            for name, tensor in zip(names, stored, strict=True)
        }
        roi = _from_tensor(stored_roi, as_torch) != 0
        return _from_tensor(stored_tokens, as_torch), roi, bundle

    @property
    def waiting(self) -> int:
        """Calls that block now."""
        return int(self._handle.waiting())

    def _note_library(self, *arrays: Any) -> None:
        self._uses_torch = any(_is_torch(array) for array in arrays)


class StoreBuffer(_Buffer, KVStoreBufferBase):
    """A store within this process, of at most ``capacity`` bytes of tensors and keys.

    When there is no room, ``put`` drops the tensor and counts it in :attr:`dropped`: a cache must
    not take its server down. With ``strict`` it raises instead.
    """

    def __init__(self, capacity: int, *, strict: bool = False) -> None:
        self._open(_ffi.create("StoreBuffer", {"capacity_bytes": capacity}), strict)

    def _open(self, handle: Any, strict: bool) -> None:
        super().__init__(handle)
        self._strict = strict
        self._dropped = 0

    def put(self, key: str, value: Any | None) -> None:
        """Stores a copy in place of what ``key`` had; None deletes it.

        ``key``: 1 to 512 bytes of UTF-8. Any element type of whole bytes, any shape, NaN payloads
        included; strides are not kept.
        """
        if value is None:
            self._handle.delete(key)
            return
        self._uses_torch = _is_torch(value)
        try:
            self._handle.put(key, _as_tensor(value))
        except (errors.FullError, errors.TooLargeError):
            if self._strict:
                raise
            self._dropped += 1

    def put_async(self, key: str, value: Any | None) -> Future[None]:
        """A future of :meth:`put`; done already, as nothing here takes long."""
        future: Future[None] = Future()
        try:
            self.put(key, value)
            future.set_result(None)
        except (errors.QuireError, TypeError) as error:
            future.set_exception(error)
        return future

    def get(self, key: str) -> Any | None:
        """A fresh array, equal bit for bit, or None. torch's if the last ``put`` was, else
        NumPy's."""
        tensor = self._handle.get(key)
        return None if tensor is None else _from_tensor(tensor, self._uses_torch)

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        return bool(self._handle.delete(key))

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        return bool(self._handle.exists(key))

    def mput(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """:meth:`put` of several, in their order."""
        for key, value in items.items() if isinstance(items, Mapping) else items:
            self.put(key, value)

    def mget(self, keys: Sequence[str]) -> list[Any | None]:
        """:meth:`get` of several."""
        return [self.get(key) for key in keys]

    def mexists(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` of several."""
        return [self.exists(key) for key in keys]

    def prefix_hits(self, keys: Sequence[str]) -> int:
        """How many keys from the first on are there without a gap."""
        return int(self._handle.prefix_hits(list(keys)))

    @property
    def dropped(self) -> int:
        """Tensors that found no room."""
        return self._dropped


def _is_nothing(array: Any) -> bool:
    """None, or an empty list in its place."""
    return array is None or (isinstance(array, (list, tuple)) and len(array) == 0)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _as_tensor(array: Any) -> Any:
    if _is_torch(array):
        array = array.detach()
    return input_array(array)


def _from_tensor(tensor: Any, as_torch: bool) -> Any:
    if as_torch:
        return sys.modules["torch"].from_dlpack(tensor)
    return np.from_dlpack(tensor)


def _nanoseconds(timeout: float | None) -> int:
    """-1: for ever."""
    if timeout is None:
        return -1
    seconds = real(timeout, "timeout")
    if not seconds >= 0:
        raise errors.BadArgumentError(f"timeout is {timeout}; it must be at least 0, or None")
    return int(min(seconds * 1e9, 2.0**62))
