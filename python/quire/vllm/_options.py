"""`kv_connector_extra_config`: the store, and how the connector uses it."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from typing import Any

import quire
from quire import errors
from quire._numbers import int64, timeout
from quire._store_arguments import store_arguments

__all__ = ["SPACES_MAX", "Options", "close_store", "open_store"]

SPACES_MAX = 256  # salts whose spaces are kept; one that comes again is made again

_RAM_BYTES = 1 << 30
_ARENA_BYTES = 256 << 20
_STAGING_BYTES = 256 << 20  # a few steps of a long prompt's chunks, 16 MB each of an 8B model
_CHUNK_TOKENS = 128  # small blocks are joined up to this
_SECONDS_MAX = 86400.0
LAYOUTS = ("auto", "opaque")
_WHERE = "QuireConnector: kv_connector_extra_config"


def _integer(left: dict[str, Any], name: str, default: int) -> int:
    number = int64(left.pop(name, default), f"{_WHERE}: {name}")
    if number < 1:
        raise errors.BadArgumentError(f"{_WHERE}: {name} is {number}; it must be at least 1")
    return number


def _seconds(left: dict[str, Any], name: str, default: float) -> float:
    return timeout(left.pop(name, default), f"{_WHERE}: {name}", _SECONDS_MAX)


def _flag(left: dict[str, Any], name: str) -> bool:
    value = left.pop(name, False)
    if not isinstance(value, bool):
        raise errors.BadArgumentError(f"{_WHERE}: {name} is {value!r}; it must be true or false")
    return value


@dataclasses.dataclass(frozen=True)
class Options:
    """store: arguments of quire.ChunkStore. block_size: tokens of vLLM's block. chunk_tokens: a
    multiple of it. load_timeout: seconds after which what has not come is a miss. prompts_only:
    generated tokens are not saved. shared_bytes: of the memory between scheduler and worker, where
    they are two processes. lease_timeout: seconds after which a part of it that the worker has not
    given back is used again. staging_bytes: of the pinned memory between a GPU's blocks and the
    store. layout: "auto": chunks are canonical where the order of the kernel's blocks can be
    learnt; "opaque": they are blocks as the kernel has them."""

    store: Mapping[str, Any]
    block_size: int
    chunk_tokens: int
    load_timeout: float
    prompts_only: bool
    shared_bytes: int
    lease_timeout: float
    staging_bytes: int
    layout: str

    @classmethod
    def read(
        cls, extra: Mapping[str, Any], block_size: int, *, joins_blocks: bool = True
    ) -> Options:
        """joins_blocks: whether a chunk is of several small blocks, if nothing else is said.

        Raises BadArgumentError for an unknown name or a wrong value.
        """
        if not isinstance(extra, Mapping):
            raise errors.BadArgumentError(f"{_WHERE} is a {type(extra).__name__}, not an object")
        left = dict(extra)
        store = store_arguments(left, _WHERE)
        store.setdefault("ram_bytes", _RAM_BYTES)
        default_chunk = block_size
        if joins_blocks:
            default_chunk *= max(1, _CHUNK_TOKENS // block_size)
        options = cls(
            store=store,
            block_size=block_size,
            chunk_tokens=_integer(left, "chunk_tokens", default_chunk),
            load_timeout=_seconds(left, "load_timeout", 2.0),
            prompts_only=_flag(left, "prompts_only"),
            shared_bytes=_integer(left, "shared_bytes", _ARENA_BYTES),
            lease_timeout=_seconds(left, "lease_timeout", 60.0),
            staging_bytes=_integer(left, "staging_bytes", _STAGING_BYTES),
            layout=str(left.pop("layout", LAYOUTS[0])),
        )
        if left:
            raise errors.BadArgumentError(f"{_WHERE} has the unknown names {sorted(left)}")
        if options.layout not in LAYOUTS:
            raise errors.BadArgumentError(
                f"{_WHERE}: layout is {options.layout!r}; it must be one of {LAYOUTS}"
            )
        if options.chunk_tokens % block_size:
            raise errors.BadArgumentError(
                f"{_WHERE}: chunk_tokens is {options.chunk_tokens}; it must be a multiple of "
                f"vLLM's block of {block_size} tokens"
            )
        return options

    @property
    def has_slow_tier(self) -> bool:
        return bool(self.store.get("directory") or self.store.get("redis"))


# Scheduler and worker of one process share a store.
_stores: dict[str, tuple[quire.ChunkStore, int]] = {}
_stores_lock = threading.Lock()


def _leave_the_parents_stores() -> None:
    """Those that a process inherits at its fork count as closed, and the lock as nobody's."""
    global _stores_lock
    _stores.clear()
    _stores_lock = threading.Lock()


os.register_at_fork(after_in_child=_leave_the_parents_stores)


def open_store(options: Options, *, with_ram: bool = True) -> quire.ChunkStore:
    """The process's store of these options; close_store gives it back."""
    fields = {**options.store, **({} if with_ram else {"ram_bytes": 0})}
    name = repr(sorted(fields.items()))
    with _stores_lock:
        store, users = _stores.get(name, (None, 0))
        if store is None:
            store = quire.ChunkStore(**fields)
        _stores[name] = (store, users + 1)
    return store


def close_store(store: quire.ChunkStore) -> None:
    """Writes what is queued and closes the store when its last user has gone."""
    with _stores_lock:
        for name, (known, users) in list(_stores.items()):
            if known is not store:
                continue
            if users > 1:
                _stores[name] = (store, users - 1)
                return
            del _stores[name]
    store.close()
