"""quire.sglang.QuireHiCacheStorage: quire.ChunkStore as the third level of SGLang's HiCache."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

import quire
from quire import errors
from quire._chunk_objects import NewObject, ObjectSpace, put_all
from quire._options import STORE
from quire.sglang._base import StorageBase
from quire.sglang._options import Options, shard_name
from quire.sglang._pages import HostPages, rows_of
from quire.sglang._reader import PageReader

__all__ = ["QuireHiCacheStorage"]

_log = logging.getLogger("quire.sglang")
_Answer = TypeVar("_Answer")
_Rows = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class _Level:
    """What there is once SGLang has registered its host pool."""

    pages: HostPages
    space: ObjectSpace
    reader: PageReader


class QuireHiCacheStorage(StorageBase):  # type: ignore[misc]
    """SGLang's HiCacheStorage over a store of checked chunks: one page is one chunk.

    Args:
        storage_config: SGLang's HiCacheStorageConfig. Its `extra_config` has arguments of
            :class:`quire.ChunkStore` (`directory`, `redis`, `disk_bytes`, ...), `key_file` (chunks
            are signed), `model` and `revision` (the name of the weights; SGLang's model name and
            ""), `cache_salt`, `load_timeout` (10 seconds: what has not come is a miss) and
            `store_timeout` (30 seconds for each wait for the folder or Redis).

    Keys are SGLang's hashes of pages. A page is found by ranks of the same model, dtype, layout,
    page size and part of the model alone. What is damaged is a miss, and nothing is written to
    SGLang's memory before all bytes of the page are verified. A page that exists is in memory and
    verified. All calls from any thread; after creation and the registration of the pool none
    raises: the first error of each kind is logged, all are counted.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
        BadArgumentError: an option.
        IoError: the folder cannot be made or read.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._options = Options.read(storage_config.extra_config or {}, storage_config.model_name)
        self._shard = shard_name(storage_config)
        self._store = quire.ChunkStore(**self._options.store)
        self._level: _Level | None = None
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._failures: collections.Counter[tuple[str, str]] = collections.Counter()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Pages of this pool are kept from now on.

        Raises:
            BadArgumentError: the pool has no pages that can be kept.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = HostPages(mem_pool_host)
        fetch_bytes = int(self._options.store.get("fetch_bytes", STORE["fetch_bytes"].default))
        space = ObjectSpace(
            self._store,
            pages.bytes,
            rows=pages.rows,
            model=self._options.model,
            revision=self._options.revision,
            layout=f"sglang/{pages.layout}",
            shard=self._shard,
            salt=self._options.salt,
        )
        if space.chunk_bytes_max > fetch_bytes:
            raise errors.BadArgumentError(
                f"QuireHiCacheStorage: fetch_bytes is {fetch_bytes}; a page takes "
                f"{space.chunk_bytes_max}"
            )
        reader = PageReader(space, fetch_bytes, self._options.load_timeout)
        before, self._level = self._level, _Level(pages, space, reader)
        if before is not None:
            before.reader.forget()

    # ---- Pages of the host pool

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into the host pool. For each key, whether its page is there now; others are
        as they were."""
        return self._tried(
            "batch_get_v1", lambda: self._load(keys, host_indices), [False] * len(keys)
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages of the host pool. For each key, whether its page is stored as durably as the
        store promises."""
        return self._tried(
            "batch_set_v1", lambda: self._save(keys, host_indices), [False] * len(keys)
        )

    def _load(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        level = self._registered()
        firsts = level.pages.first_tokens(host_indices, len(keys))
        return self._read(level, keys, lambda i, copy: level.pages.write(firsts[i], copy))

    def _save(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        level = self._registered()
        firsts = level.pages.first_tokens(host_indices, len(keys))
        return self._write(level, keys, lambda i: level.pages.read(firsts[i]))

    # ---- Pages as tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page as a tensor: `target_location`, if it is given, which must be one of the page's
        size. None if there is none, and then nothing was written."""
        targets = None if target_location is None else [target_location]
        return self._tried("get", lambda: self._get([key], targets)[0], None)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """:meth:`get` of each key."""
        return self._tried(
            "batch_get", lambda: self._get(keys, target_locations), [None] * len(keys)
        )

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores a page, a tensor of the page's size. Whether it is stored as durably as the store
        promises."""
        return self._tried("set", lambda: all(self._set([key], [value])), False)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores pages. Whether all of them are stored."""
        return self._tried("batch_set", lambda: all(self._set(keys, values)), False)

    def _get(self, keys: Sequence[str], targets: Sequence[Any] | None) -> list[Any]:
        level = self._registered()
        found: list[Any] = [None] * len(keys)
        if targets is not None:
            if len(targets) != len(keys):
                raise errors.BadArgumentError(f"{len(targets)} targets for {len(keys)} keys")
            for target in targets:  # before the first one is written
                level.pages.of_size(rows_of(target))

        def take(i: int, copy: Callable[[_Rows], None]) -> None:
            found[i] = level.pages.new() if targets is None else targets[i]
            copy(rows_of(found[i]))

        self._read(level, keys, take)
        return found

    def _set(self, keys: Sequence[str], values: Sequence[Any] | None) -> list[bool]:
        level = self._registered()
        if values is None or len(values) != len(keys):
            raise errors.BadArgumentError(
                "pages are given as tensors, one for each key; addresses are not taken"
            )
        return self._write(level, keys, lambda i: level.pages.flat(values[i]))

    # ---- What is there

    def exists(self, key: str) -> bool:
        """Whether the page is stored, and undamaged."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored, and undamaged. They are read, and kept in memory for
        the next call that gets them, as far as a quarter of `fetch_bytes` goes."""
        return self._tried("batch_exists", lambda: self._leading(keys), 0)

    def _leading(self, keys: Sequence[str]) -> int:
        reader = self._registered().reader
        names = [key.encode() for key in keys]
        count = 0
        with contextlib.closing(reader.read(names)) as fetches:
            for name, fetch in zip(names, fetches, strict=True):
                if fetch is None:
                    break
                reader.keep(name, fetch)
                count += 1
        self._count(asked=len(keys), existed=count)
        return count

    # ---- Between pages and chunks

    def _registered(self) -> _Level:
        if self._level is None:
            raise errors.BadStateError("SGLang has not registered its host pool")
        return self._level

    def _read(
        self,
        level: _Level,
        keys: Sequence[str],
        take: Callable[[int, Callable[[_Rows], None]], None],
    ) -> list[bool]:
        """Calls `take` for each page that is verified, with what copies it to the rows that it is
        given."""
        done = []
        names = [key.encode() for key in keys]
        with contextlib.closing(level.reader.read(names)) as fetches:
            for i, fetch in enumerate(fetches):
                if fetch is not None:
                    with contextlib.closing(fetch) as here:
                        take(i, lambda rows: level.space.copy(here, level.space.memory(rows)))
                done.append(fetch is not None)
        self._count(missed=done.count(False), loaded=done.count(True))
        return done

    def _write(
        self, level: _Level, keys: Sequence[str], rows: Callable[[int], _Rows]
    ) -> list[bool]:
        names = [key.encode() for key in keys]
        chunks = [level.space.key(name) for name in names]

        def new(i: int) -> NewObject:
            return NewObject(level.space, names[i], lambda: level.space.memory(rows(i)))

        objects = {chunk: new(i) for i, chunk in enumerate(chunks)}
        kept = put_all(self._store, objects, self._options.store_timeout)
        done = [chunk in kept for chunk in chunks]
        self._count(stored=done.count(True), refused=done.count(False))
        if not all(done):
            self._note("set", "the folder or Redis does not take pages", "NotStored")
        return done

    # ---- The rest

    def clear(self) -> None:
        """Removes the pages of this model and rank from the folder and Redis."""
        self._tried("clear", self._clear, None)

    def _clear(self) -> None:
        level = self._registered()
        level.reader.forget()
        self._store.flush(self._options.store_timeout)
        self._store.clear(level.space.passport, cache_salt=self._options.salt)
        level.reader.forget()  # what a call beside this one has kept meanwhile

    def statistics(self) -> dict[str, Any]:
        """Counts of this object, for people and tests: SGLang has its own metrics.

        "pages": how many were asked for, existed, were loaded, missed, stored, refused. "kept": how
        many are in memory for the next call. "in_place": whether pages are read and written where
        the host pool has them. "failures": errors by call and kind. "store": those of
        :meth:`quire.ChunkStore.statistics`.

        Raises:
            ClosedError: it is closed.
        """
        level = self._level
        with self._lock:
            pages = dict(self._counts)
            failures = {f"{call}: {kind}": count for (call, kind), count in self._failures.items()}
        return {
            "pages": pages,
            "kept": 0 if level is None else level.reader.kept,
            "in_place": level is not None and level.pages.in_place,
            "failures": failures,
            "store": self._store.statistics(),
        }

    def close(self) -> None:
        """Writes what is queued and closes the store. Later calls find and store nothing. Twice is
        fine."""
        if self._level is not None:
            self._level.reader.forget()
        self._tried("close", self._store.close, None)

    def _tried(self, call: str, task: Callable[[], _Answer], failed: _Answer) -> _Answer:
        """What the task returns; `failed` where it raises."""
        try:
            return task()
        except Exception as error:
            self._note(call, str(error), type(error).__name__)
            return failed

    def _note(self, call: str, message: str, kind: str) -> None:
        with self._lock:
            self._failures[call, kind] += 1
            first = self._failures[call, kind] == 1
        if first:
            _log.error("QuireHiCacheStorage: %s: %s (later ones are only counted)", call, message)

    def _count(self, **pages: int) -> None:
        with self._lock:
            self._counts.update(pages)
