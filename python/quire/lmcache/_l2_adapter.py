"""quire.lmcache.QuireL2Adapter: quire.ChunkStore as a second tier of LMCache's server."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import quire
from quire import errors
from quire._chunk_objects import arrived, put_all
from quire._numbers import timeout
from quire._store_arguments import store_arguments
from quire.lmcache._base import AdapterBase, Bits, StoreResult
from quire.lmcache._lane import Lane
from quire.lmcache._objects import Objects
from quire.store import FLUSH_SECONDS

__all__ = ["QuireL2Adapter"]

_log = logging.getLogger("quire.lmcache")
_GONE = ("removed", "evicted", "expired", "corrupt")
# Objects that usage counts: Redis does not tell what it has evicted, so there they only grow.
_TOLD_MAX = 1 << 18

_WHERE = "QuireL2Adapter: adapter_params"


def _seconds(left: dict[str, Any], name: str, default: float) -> float:
    return timeout(left.pop(name, default), f"{_WHERE}: {name}")


def _options(params: Any) -> tuple[dict[str, Any], float, float]:
    if not isinstance(params, Mapping):
        raise errors.BadArgumentError(f"{_WHERE} is a {type(params).__name__}, not an object")
    left = dict(params)
    load_timeout = _seconds(left, "load_timeout", 10.0)
    lock_timeout = _seconds(left, "lock_timeout", 300.0)
    store = store_arguments(left, _WHERE)
    if left:
        raise errors.BadArgumentError(f"{_WHERE} has the unknown names {sorted(left)}")
    if not (store.get("directory") or store.get("redis")):
        raise errors.BadArgumentError(
            f"{_WHERE} has neither directory nor redis; LMCache has RAM itself"
        )
    return store, load_timeout, lock_timeout


class QuireL2Adapter(AdapterBase):  # type: ignore[misc]
    """LMCache's L2AdapterInterface over a store of checked chunks.

    Args:
        params: `adapter_params` of the plug-in: arguments of :class:`quire.ChunkStore`
            (`directory`, `redis`, `disk_bytes`, ...), `key_file` (chunks are signed),
            `load_timeout` (10 seconds: what has not come is a miss) and `lock_timeout` (300
            seconds: a lock that is not undone ends).

    A lookup brings the objects into memory and verifies them; its lock is that they stay there. So
    a load that follows copies, and cannot fail for damage. Tasks that fail are logged, and tell so
    in their results. All calls from any thread. Once it is closed, results of tasks that were
    submitted before can be taken, and locks be undone; every other call raises ClosedError.

    Raises:
        BadArgumentError: an option.
        IoError: the folder cannot be made or read.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        store, self._load_timeout, self._lock_timeout = _options(params)
        self._store = quire.ChunkStore(**store)  # which checks them
        super().__init__(max_capacity_bytes=int(store.get("disk_bytes", 0)))
        self._objects = Objects(self._store)
        self._clock: Callable[[], float] = time.monotonic
        self._mutex = threading.Lock()
        self._locked: dict[Any, list[tuple[float, quire.ChunkFetch]]] = {}
        # What LMCache was told to be stored, by the chunk's key: the object's and its bytes. Oldest
        # first.
        self._told: dict[str, tuple[Any, int]] = {}
        self._stores, self._lookups, self._loads = Lane("store"), Lane("lookup"), Lane("load")

    # ---- Event fds

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd

    # ---- Stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._stores.submit(lambda: self._put(keys, objects), StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.take_all()

    def _put(self, keys: list[Any], objects: list[Any]) -> Any:
        """Returns when all are as durable as the store promises."""
        new, chunks = {}, {}
        for key, each in zip(keys, objects, strict=True):
            size = len(each.byte_array)
            name = self._objects.chunk_key(key, size)
            new[name], chunks[name] = self._objects.new(key, each.byte_array), (key, size)
        kept = put_all(self._store, new, FLUSH_SECONDS)
        with self._mutex:
            untold = [chunks[name] for name in kept if name not in self._told]
            self._told.update((name, chunks[name]) for name in kept)
            over = [*itertools.islice(self._told, max(0, len(self._told) - _TOLD_MAX))]
            forgotten = [self._told.pop(name) for name in over]
        if untold:
            self._notify_keys_stored([key for key, _ in untold], [size for _, size in untold])
        self._tell_deleted(forgotten)
        self._tell_of_deletions()
        if len(kept) < len(chunks):
            raise errors.UnavailableError(
                f"{len(chunks) - len(kept)} of {len(chunks)} objects were not stored: the folder "
                "or Redis does not take them"
            )
        return StoreResult(True, sum(size for _, size in chunks.values()))

    def _tell_of_deletions(self) -> None:
        """What the slowest tier does not have any more is gone."""
        last = self._store.tiers[-1]
        gone = [
            key for kind, tier, key in self._store.take_events() if tier == last and kind in _GONE
        ]
        with self._mutex:
            told = [self._told.pop(key) for key in gone if key in self._told]
        self._tell_deleted(told)

    def _tell_deleted(self, told: list[tuple[Any, int]]) -> None:
        if told:
            self._notify_keys_deleted([key for key, _ in told], [size for _, size in told])

    # ---- Lookups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        return self._lookups.submit(
            lambda: self._lookup(keys, group_layout_descs), Bits(len(keys))
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def _lookup(self, keys: list[Any], layouts: Any) -> Any:
        self._end_overdue_locks()
        fetches = [self._fetch(key, self._objects.size(key, layouts)) for key in keys]
        found = Bits(len(keys))
        hits: list[Any] = []
        try:
            for i, (key, fetch) in enumerate(zip(keys, fetches, strict=True)):
                if fetch is None or not arrived(fetch, self._load_timeout):
                    continue
                found.set(i)
                hits.append(key)
                with self._mutex:
                    self._locked.setdefault(key, []).append((self._clock(), fetch))
            if hits:
                self._notify_keys_accessed(hits)
            self._tell_of_deletions()
        except BaseException:
            self.submit_unlock(hits)  # LMCache is told of no hit, and undoes no lock
            raise
        return found

    def _fetch(self, key: Any, size: int | None) -> quire.ChunkFetch | None:
        """None where nobody has said how large such objects are."""
        if size is None:
            return None
        return self._objects.fetch(key, size, self._load_timeout)

    def submit_unlock(self, keys: list[Any]) -> None:
        with self._mutex:
            ended = []
            for key in keys:
                locks = self._locked.get(key)
                if locks:  # else the lock was overdue
                    ended.append(locks.pop(0))
                    if not locks:
                        del self._locked[key]
        for _, fetch in ended:
            fetch.close()

    def _end_overdue_locks(self) -> None:
        latest = self._clock() - self._lock_timeout
        with self._mutex:
            overdue = [
                key for key, locks in self._locked.items() for at, _ in locks if at <= latest
            ]
        if overdue:
            _log.warning("QuireL2Adapter: %d locks were never undone", len(overdue))
            self.submit_unlock(overdue)

    # ---- Loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), Bits(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        loaded = Bits(len(keys))
        for i, (key, each) in enumerate(zip(keys, objects, strict=True)):
            if self._load_one(key, each.byte_array):
                loaded.set(i)
        return loaded

    def _load_one(self, key: Any, data: Any) -> bool:
        """From what a lookup has locked, or else from the store. Nothing is written unless the
        whole object is verified."""
        with self._mutex:
            locked = [fetch for _, fetch in self._locked.get(key, ())]
        if locked:
            self._objects.copy(key, locked[0], data)
            return True
        fetch = self._fetch(key, len(data))
        if fetch is None or not arrived(fetch, self._load_timeout):
            return False
        try:
            self._objects.copy(key, fetch, data)
        finally:
            fetch.close()
        return True

    # ---- Deletion, usage, the end

    def delete(self, keys: list[Any]) -> None:
        """Removes objects from the folder and Redis, after what is being stored. Objects of a group
        that this process has neither stored nor looked for are not known, and stay."""
        self._stores.submit(lambda: self._delete(keys), None)

    def _delete(self, keys: list[Any]) -> None:
        chunks = [
            self._objects.chunk_key(key, size)
            for key in keys
            for size in self._objects.sizes(key)
        ]
        self._store.remove(chunks)
        self._tell_of_deletions()

    def report_status(self) -> dict[str, Any]:
        """is_healthy: the last task of each kind has not failed. statistics: those of the store."""
        self._stores.check_open()
        lanes = {"store": self._stores, "lookup": self._lookups, "load": self._loads}
        with self._mutex:
            locked = sum(map(len, self._locked.values()))
        return {
            "is_healthy": not any(lane.failing for lane in lanes.values()),
            "failed_tasks": {name: lane.failures for name, lane in lanes.items()},
            "locks": locked,
            "statistics": self._store.statistics(),
        }

    def close(self) -> None:
        """Ends after the tasks that were submitted. Twice is fine."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        with self._mutex:
            locked, self._locked = self._locked, {}
        for locks in locked.values():
            for _, fetch in locks:
                fetch.close()
        self._store.close()
