"""quire.lmcache.QuireL2Adapter under a fake LMCache server: submit, wait for the event fd, take the
result. Where lmcache is installed the adapter has LMCache's base class, and its classes are used."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import quire
from program import run_source
from quire.lmcache import QuireL2Adapter, _l2_adapter

_SHAPE = (2, 3, 16, 8)  # bf16
_SIZE = 2 * 3 * 16 * 8 * 2
_PATIENCE = 120.0  # seconds: of a machine that does something else, with a disk that does, too
_PATIENT = {"load_timeout": _PATIENCE, "disk_timeout_ms": int(1000 * _PATIENCE)}
_LAYOUTS = {0: types.SimpleNamespace(shapes=[torch.Size(_SHAPE)], dtypes=[torch.bfloat16])}


@dataclasses.dataclass(frozen=True)
class ObjectKey:
    """LMCache's key of an object."""

    chunk_hash: bytes
    model_name: str = "m/fake"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


class Memory:
    """LMCache's buffer of an object."""

    def __init__(self, seed: int | None = None, size: int = _SIZE) -> None:
        self.array = np.zeros(size, np.uint8)
        if seed is not None:
            self.array[:] = np.random.default_rng(seed).integers(0, 256, size)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.array)


class Server:
    """What LMCache's two controllers do with an adapter."""

    def __init__(self, **params: Any) -> None:
        self.adapter = QuireL2Adapter({**_PATIENT, **params})
        self.fds = {
            "store": self.adapter.get_store_event_fd(),
            "lookup": self.adapter.get_lookup_and_lock_event_fd(),
            "load": self.adapter.get_load_event_fd(),
        }
        assert len(set(self.fds.values())) == 3

    def _wait(self, what: str) -> None:
        assert select.select([self.fds[what]], [], [], _PATIENCE)[0], what
        os.eventfd_read(self.fds[what])

    def store(self, keys: list[ObjectKey], objects: list[Memory]) -> Any:
        number = self.adapter.submit_store_task(keys, objects)
        self._wait("store")
        (result,) = self.adapter.pop_completed_store_tasks().items()
        assert result[0] == number
        return result[1]

    def lookup(self, keys: list[ObjectKey], layouts: Any = _LAYOUTS) -> list[bool]:
        number = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        self._wait("lookup")
        found = self.adapter.query_lookup_and_lock_result(number)
        assert self.adapter.query_lookup_and_lock_result(number) is None, "once"
        return [found.test(i) for i in range(len(keys))]

    def load(self, keys: list[ObjectKey], objects: list[Memory]) -> list[bool]:
        number = self.adapter.submit_load_task(keys, objects)
        self._wait("load")
        loaded = self.adapter.query_load_result(number)
        return [loaded.test(i) for i in range(len(keys))]

    def restart(self, **params: Any) -> Server:
        self.adapter.close()
        return Server(**params)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(directory=str(tmp_path))
    yield server
    server.adapter.close()
    server.adapter.close()


def _keys(count: int, **fields: Any) -> list[ObjectKey]:
    return [ObjectKey(bytes([i]) * 32, **fields) for i in range(count)]


def _salts(server: Server) -> dict[str, int]:
    adapter = server.adapter
    if hasattr(adapter, "bytes_by_cache_salt"):
        return {salt: size for salt, size in adapter.bytes_by_cache_salt.items() if size}
    return dict(adapter.get_usage().bytes_by_cache_salt)


def test_objects_come_back_after_a_restart(server: Server, tmp_path: Path) -> None:
    keys, objects = _keys(5), [Memory(i) for i in range(5)]
    assert server.store(keys, objects) == 5 * _SIZE
    again = server.restart(directory=str(tmp_path))
    asked = [*keys, ObjectKey(b"other")]
    assert again.lookup(asked) == [True] * 5 + [False]
    loaded = [Memory() for _ in asked]
    assert again.load(asked, loaded) == [True] * 5 + [False]
    for mine, theirs in zip(objects, loaded, strict=False):
        assert np.array_equal(mine.array, theirs.array)
    assert not loaded[5].array.any(), "nothing is written for a miss"
    again.adapter.submit_unlock(keys)
    assert again.adapter.report_status()["locks"] == 0
    again.adapter.close()


def test_what_differs_in_a_name_is_another_object(server: Server) -> None:
    server.store(_keys(1), [Memory(1)])
    for fields in (
        {"cache_salt": "ann"},
        {"kv_rank": 1},
        {"object_group_id": 1},
        {"model_name": "m/other"},
    ):
        assert server.lookup(_keys(1, **fields), {0: _LAYOUTS[0], 1: _LAYOUTS[0]}) == [False]
    assert server.lookup(_keys(1), {}) == [True], "the size is known from the store"
    larger = {0: types.SimpleNamespace(shapes=[torch.Size((2, *_SHAPE))], dtypes=[torch.bfloat16])}
    assert server.lookup(_keys(1), larger) == [False]


def _damage(folder: Path, change: Any) -> None:
    for file in folder.rglob("*.qkv"):
        data = bytearray(file.read_bytes())
        file.write_bytes(change(data))


def _flip(data: bytearray) -> bytearray:
    data[int.from_bytes(data[12:16], "little") + 7] ^= 1
    return data


@pytest.mark.parametrize("change", [_flip, lambda data: data[:-1]])
def test_damage_is_a_miss_and_is_repaired(server: Server, tmp_path: Path, change: Any) -> None:
    keys = _keys(3)
    server.store(keys, [Memory(i) for i in range(3)])
    _damage(tmp_path, change)
    untouched = [Memory() for _ in keys]
    assert server.load(keys, untouched) == [False] * 3
    assert not any(each.array.any() for each in untouched)
    assert server.lookup(keys) == [False] * 3
    assert _salts(server) == {}, "LMCache hears that they are gone"
    server.store(keys, [Memory(i) for i in range(3)])
    assert server.lookup(keys) == [True] * 3


def test_what_a_lookup_has_locked_is_loaded_whatever_becomes_of_the_file(
    server: Server, tmp_path: Path
) -> None:
    keys = _keys(2)
    server.store(keys, [Memory(1), Memory(2)])
    assert server.lookup(keys) == [True, True]
    _damage(tmp_path, _flip)
    loaded = [Memory(), Memory()]
    assert server.load(keys, loaded) == [True, True]
    assert np.array_equal(loaded[1].array, Memory(2).array)
    server.adapter.submit_unlock(keys)
    assert server.load(keys, loaded) == [False, False]


def test_locks_are_counted_and_end_when_overdue(server: Server, tmp_path: Path) -> None:
    adapter = server.adapter
    now = [0.0]
    adapter._clock = lambda: now[0]
    keys = _keys(2)
    server.store(keys, [Memory(1), Memory(2)])
    server.lookup(keys)
    server.lookup(keys[:1])
    assert adapter.report_status()["locks"] == 3
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locks"] == 1
    now[0] = 301.0
    server.lookup([ObjectKey(b"x")])
    assert adapter.report_status()["locks"] == 0
    adapter.submit_unlock(keys[:1])  # too late, and nothing happens


def test_a_lookup_that_fails_locks_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache is told of no hit, so it never unlocks: they stayed in memory for lock_timeout."""
    keys = _keys(2)
    server.store(keys, [Memory(1), Memory(2)])
    assert server.lookup(keys[:1]) == [True]
    with monkeypatch.context() as patch:
        patch.setattr(server.adapter, "_notify_keys_accessed", lambda *_: 1 / 0, raising=False)
        assert server.lookup(keys) == [False, False]
    assert server.adapter.report_status()["locks"] == 1
    server.adapter.submit_unlock(keys[:1])
    assert server.adapter.report_status()["locks"] == 0


def test_usage_follows_stores_deletions_and_evictions(tmp_path: Path) -> None:
    server = Server(directory=str(tmp_path))
    ann = _keys(2, cache_salt="ann")
    server.store(_keys(3), [Memory(i) for i in range(3)])
    server.store(ann, [Memory(5), Memory(6)])
    server.store(ann, [Memory(5), Memory(6)])
    assert _salts(server) == {"": 3 * _SIZE, "ann": 2 * _SIZE}, "twice stored is counted once"
    server.adapter.delete(ann[:1])
    server.store(ann[1:], [Memory(6)])  # deletions and stores are done one after the other
    assert server.lookup([*ann[:1], *ann]) == [False, False, True]
    assert _salts(server) == {"": 3 * _SIZE, "ann": _SIZE}
    small = server.restart(directory=str(tmp_path / "small"), disk_bytes=40_000)
    many = [ObjectKey(bytes([i, 1])) for i in range(24)]
    for key in many:
        small.store([key], [Memory(1)])
    left = sum(small.lookup(many))
    assert 0 < left < 24
    assert _salts(small) == {"": left * _SIZE}
    oldest = next(key for key, found in zip(many, small.lookup(many), strict=True) if found)
    new = ObjectKey(b"new")
    assert small.store([oldest, new], [Memory(1), Memory(1)]) == 2 * _SIZE
    assert small.lookup([oldest, new]) == [True, True], "the new one has not evicted the other"
    small.adapter.close()


def test_objects_of_all_sizes_are_deleted(server: Server) -> None:
    """A prompt's end is shorter than other objects of the group."""
    keys = _keys(3)
    server.store(keys[:1], [Memory(1)])
    server.store(keys[1:2], [Memory(2, size=_SIZE // 2)])
    server.adapter.delete(keys[:2])
    server.store(keys[2:], [Memory(3)])  # behind the deletion
    assert server.lookup(keys) == [False, False, True]
    assert _salts(server) == {"": _SIZE}


def test_usage_is_bounded_where_nobody_tells_of_evictions(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_l2_adapter, "_TOLD_MAX", 4)
    keys = [ObjectKey(bytes([i, 2])) for i in range(10)]
    for i, key in enumerate(keys):
        server.store([key], [Memory(i)])
    assert len(server.adapter._told) == 4
    assert _salts(server) == {"": 4 * _SIZE}
    assert all(server.lookup(keys)), "they are there still"


def test_a_task_that_fails_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.store(_keys(1), [Memory(1, size=_SIZE + 1)]) == -1
    assert "not a multiple of 16 bytes" in caplog.text
    assert not server.adapter.report_status()["is_healthy"]
    with monkeypatch.context() as patch:
        patch.setattr(quire.ChunkSpace, "fetch", lambda *_, **__: 1 / 0)
        assert server.lookup(_keys(2)) == [False, False]
        assert server.load(_keys(1), [Memory()]) == [False]
    assert server.adapter.report_status()["failed_tasks"] == {"store": 1, "lookup": 1, "load": 1}
    assert server.store(_keys(1), [Memory(1)]) == _SIZE
    assert server.lookup(_keys(1)) == server.load(_keys(1), [Memory()]) == [True]
    assert server.adapter.report_status()["is_healthy"]


def test_a_dead_redis_beside_a_folder(tmp_path: Path) -> None:
    """The folder has the objects, so they are stored."""
    dead = {"redis": "127.0.0.1:1", "redis_connect_timeout_ms": 20}
    server = Server(directory=str(tmp_path), **dead)
    for i in range(8):
        assert server.store([ObjectKey(bytes([i]))], [Memory(i)]) == _SIZE
    assert server.lookup(_keys(1)) == [False]
    assert server.lookup([ObjectKey(bytes([7]))]) == [True]
    server.adapter.close()
    alone = Server(**dead)
    assert alone.store(_keys(1), [Memory(1)]) == -1
    alone.adapter.close()


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(quire.BadArgumentError, match="neither directory nor redis"):
        QuireL2Adapter({})
    for wrong, message in (
        ({"no_such": 1}, "adapter_params has the unknown names .'no_such'."),
        ({"redis": 6379}, "adapter_params: redis must be a text, not int"),
        ({"key": "secret"}, "adapter_params: key is given by its file, as key_file"),
        ({"load_timeout": "2"}, "adapter_params: load_timeout must be a number, not str"),
        ({"load_timeout": float("nan")}, "adapter_params: load_timeout is nan"),
        ({"lock_timeout": 0}, "adapter_params: lock_timeout is 0.0; it must be above 0"),
        ({"key_file": 5}, "adapter_params: key_file must be a text, not int"),
        ({"disk_bytes": "1 GB"}, "disk_bytes"),
        ({"disk_bytes": None}, "disk_bytes"),
        ({"disk_bytes": []}, "disk_bytes"),
    ):
        with pytest.raises(quire.BadArgumentError, match=message):
            QuireL2Adapter({"directory": str(tmp_path), **wrong})
    with pytest.raises(quire.BadArgumentError, match="adapter_params is a list, not an object"):
        QuireL2Adapter(["directory"])  # type: ignore[arg-type]
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    server = Server(directory=str(tmp_path / "kv"), key_file=str(key_file))
    server.store(_keys(1), [Memory(1)])
    assert server.lookup(_keys(1)) == [True]
    server.adapter.close()


def test_large_objects_have_several_sections(server: Server) -> None:
    size = (64 << 20) + 96
    layouts = {0: types.SimpleNamespace(shapes=[torch.Size((size,))], dtypes=[torch.uint8])}
    big = Memory(3, size=size)
    assert server.store(_keys(1), [big]) == size
    assert server.lookup(_keys(1), layouts) == [True]
    loaded = Memory(size=size)
    assert server.load(_keys(1), [loaded]) == [True]
    assert np.array_equal(loaded.array, big.array)


def test_a_closed_adapter_says_so(tmp_path: Path) -> None:
    """Tasks that were submitted before are done; later ones would never be, and an event fd's
    number may be that of another file."""
    server = Server(directory=str(tmp_path))
    adapter, keys = server.adapter, _keys(2)
    stored = adapter.submit_store_task(keys, [Memory(1), Memory(2)])
    adapter.close()
    adapter.close()
    assert adapter.pop_completed_store_tasks() == {stored: 2 * _SIZE}
    assert adapter.pop_completed_store_tasks() == {}
    calls: list[Any] = [
        lambda: adapter.submit_store_task(keys, [Memory(1), Memory(2)]),
        lambda: adapter.submit_lookup_and_lock_task(keys, _LAYOUTS),
        lambda: adapter.submit_load_task(keys, [Memory(), Memory()]),
        lambda: adapter.delete(keys),
        adapter.report_status,
        adapter.get_store_event_fd,
        adapter.get_lookup_and_lock_event_fd,
        adapter.get_load_event_fd,
    ]
    for call in calls:
        with pytest.raises(quire.ClosedError, match="QuireL2Adapter: it was closed"):
            call()
    assert adapter.query_lookup_and_lock_result(1) is None
    assert adapter.query_load_result(1) is None
    adapter.submit_unlock(keys)
    again = Server(directory=str(tmp_path))
    assert again.lookup(keys) == [True, True]
    again.adapter.close()


_FORKED = """
import os, sys
import quire
from quire.lmcache import QuireL2Adapter
adapter = QuireL2Adapter({"directory": sys.argv[1]})
child = os.fork()
if child == 0:
    try:
        adapter.submit_load_task([], [])
    except quire.ClosedError:
        adapter.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
adapter.submit_load_task([], [])
adapter.close()
"""


def test_the_child_of_a_fork_has_no_adapter(tmp_path: Path) -> None:
    """Its tasks were taken, and none was ever done: it has none of the threads."""
    run_source(_FORKED, str(tmp_path))


def test_a_task_beside_the_end_is_done_or_refused(tmp_path: Path) -> None:
    """Never taken and forgotten."""
    for i in range(20):
        adapter = QuireL2Adapter({"directory": str(tmp_path / str(i))})
        taken: list[int] = []

        def submit(adapter: Any = adapter, taken: list[int] = taken) -> None:
            with contextlib.suppress(quire.ClosedError):
                for _ in range(10_000):
                    taken.append(adapter.submit_load_task([], []))

        thread = threading.Thread(target=submit)
        thread.start()
        adapter.close()
        thread.join()
        assert all(adapter.query_load_result(each) is not None for each in taken)


def _damage_two(rng: random.Random, folder: Path) -> None:
    files = sorted(folder.rglob("*.qkv"))
    for file in rng.sample(files, min(2, len(files))):
        with contextlib.suppress(FileNotFoundError):  # a deletion is done meanwhile
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_walk(seed: int, tmp_path: Path) -> None:
    """Whatever is loaded is what was stored last under that key."""
    rng = random.Random(seed)
    params: dict[str, Any] = {
        "directory": str(tmp_path),
        "disk_bytes": rng.choice([0, 60_000]),
        "queue_bytes": rng.choice([10_000, 1 << 20]),
    }
    server = Server(**params)
    keys = [ObjectKey(bytes([i]), cache_salt=rng.choice(["", "a"])) for i in range(12)]
    hits = 0
    for _ in range(60):
        chosen = rng.sample(keys, rng.randrange(1, 5))
        seeds = [keys.index(key) for key in chosen]
        draw = rng.random()
        if draw < 0.4:
            server.store(chosen, [Memory(each) for each in seeds])
        elif draw < 0.75:
            found = server.lookup(chosen)
            loaded = [Memory() for _ in chosen]
            done = server.load(chosen, loaded)
            assert [b or not a for a, b in zip(found, done, strict=True)] == [True] * len(chosen)
            for each, memory, ok in zip(seeds, loaded, done, strict=True):
                assert np.array_equal(memory.array, Memory(each if ok else None).array)
            hits += sum(found)
            server.adapter.submit_unlock([k for k, a in zip(chosen, found, strict=True) if a])
        elif draw < 0.85:
            server.adapter.delete(chosen)
        elif draw < 0.95:
            _damage_two(rng, tmp_path)
        else:
            server = server.restart(**params)
    assert hits > 0
    assert server.adapter.report_status()["locks"] == 0
    assert server.adapter.report_status()["failed_tasks"] == {"store": 0, "lookup": 0, "load": 0}
    server.adapter.close()

