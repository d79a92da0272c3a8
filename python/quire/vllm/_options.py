"""`kv_connector_extra_config`: the store, and how the connector uses it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import quire
from quire import errors

__all__ = ["SPACES_MAX", "Options", "close_store", "open_store"]

SPACES_MAX = 256  # salts whose spaces are kept; one that comes again is made again

_STORE_FIELDS = (
    "directory", "redis", "ram_bytes", "disk_bytes", "durability", "eviction", "write_policy",
    "admit_after", "priority", "redis_ttl", "redis_prefix", "queue_bytes", "fetch_bytes",
    "disk_timeout_ms", "redis_timeout_ms", "redis_connect_timeout_ms",
)  # fmt: skip
_RAM_BYTES = 1 << 30
_ARENA_BYTES = 256 << 20
_STAGING_BYTES = 256 << 20  # a few steps of a long prompt's chunks, 16 MB each of an 8B model
_CHUNK_TOKENS = 128  # small blocks are joined up to this


@dataclasses.dataclass(frozen=True)
class Options:
    """store: arguments of quire.ChunkStore. block_size: tokens of vLLM's block. chunk_tokens: a
    multiple of it. load_timeout: seconds after which what has not come is a miss. prompts_only:
    generated tokens are not saved. shared_bytes: of the memory between scheduler and worker, where
    they are two processes. lease_timeout: seconds after which a part of it that the worker has not
    given back is used again. staging_bytes: of the pinned memory between a GPU's blocks and the
    store."""

    store: Mapping[str, Any]
    block_size: int
    chunk_tokens: int
    load_timeout: float
    prompts_only: bool
    shared_bytes: int
    lease_timeout: float
    staging_bytes: int

    @classmethod
    def read(cls, extra: Mapping[str, Any], block_size: int) -> Options:
        """Raises BadArgumentError for an unknown name or a wrong value."""
        left = dict(extra)
        store = {name: left.pop(name) for name in _STORE_FIELDS if name in left}
        key_file = left.pop("key_file", None)
        if key_file is not None:
            from quire.store import read_key_file

            store["key"] = read_key_file(key_file)
        store.setdefault("ram_bytes", _RAM_BYTES)
        default_chunk = block_size * max(1, _CHUNK_TOKENS // block_size)
        options = cls(
            store=store,
            block_size=block_size,
            chunk_tokens=int(left.pop("chunk_tokens", default_chunk)),
            load_timeout=float(left.pop("load_timeout", 2.0)),
            prompts_only=bool(left.pop("prompts_only", False)),
            shared_bytes=int(left.pop("shared_bytes", _ARENA_BYTES)),
            lease_timeout=float(left.pop("lease_timeout", 60.0)),
            staging_bytes=int(left.pop("staging_bytes", _STAGING_BYTES)),
        )
        if left:
            raise errors.BadArgumentError(
                f"QuireConnector: kv_connector_extra_config has the unknown names {sorted(left)}"
            )
        if options.chunk_tokens < 1 or options.chunk_tokens % block_size:
            raise errors.BadArgumentError(
                f"QuireConnector: chunk_tokens is {options.chunk_tokens}; it must be a multiple of "
                f"vLLM's block of {block_size} tokens"
            )
        return options

    @property
    def has_slow_tier(self) -> bool:
        return bool(self.store.get("directory") or self.store.get("redis"))


# Scheduler and worker of one process share a store.
_stores: dict[str, tuple[quire.ChunkStore, int]] = {}
_stores_lock = threading.Lock()


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
