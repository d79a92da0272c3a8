"""quire.sglang.QuireHiCacheStorage under a fake SGLang: what a rank loads is, byte for byte, what a
rank of the same part has stored; all else is a miss and leaves the host pool as it was."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_sglang
import quire
from fake_sglang import PAGE, HostPool, Rank, content
from quire import _chunk_objects

with fake_sglang.installed():
    from quire.sglang import QuireHiCacheStorage
from quire.sglang._pages import rows_of

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
_SIZE = HostPool().page_bytes
_CHUNK_BYTES = _SIZE + 3 * 4096  # at most
_DEAD_REDIS = {"redis": "127.0.0.1:1", "redis_connect_timeout_ms": 20}
# What is on disk is found, however long the disk takes.
_PATIENT = {"load_timeout": 60.0, "disk_timeout_ms": 60_000}


def _key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Opens ranks of servers over one folder; extra options by `extra`."""
    with contextlib.ExitStack() as stack:

        def opened(pool: HostPool | None = None, **fields: Any) -> Rank:
            extra = {"directory": str(tmp_path / "kv"), **_PATIENT, **fields.get("extra", {})}
            fields["extra"] = extra
            rank = Rank(QuireHiCacheStorage, pool or HostPool(), **fields)
            stack.callback(rank.backend.close)
            return rank

        yield opened


def _fill(rank: Rank, numbers: list[int], part: int = 0) -> list[int]:
    """Pages of the pool, the first ones, with what this part has for these keys."""
    for page, number in enumerate(numbers):
        rank.pool.fill(page, content(_key(number), part, rank.pool.page_bytes))
    return list(range(len(numbers)))


def _store(rank: Rank, numbers: list[int], part: int = 0) -> None:
    assert rank.backup([_key(n) for n in numbers], _fill(rank, numbers, part)) == [True] * len(
        numbers
    )


def _loaded(rank: Rank, numbers: list[int], part: int = 0) -> list[bool]:
    """What is found; that it is right, and that nothing else is written."""
    before = bytes([7]) * rank.pool.page_bytes
    for page in range(len(numbers)):
        rank.pool.fill(page, before)
    found = rank.load([_key(n) for n in numbers], list(range(len(numbers))))
    for page, number in enumerate(numbers):
        expected = content(_key(number), part, rank.pool.page_bytes) if found[page] else before
        assert rank.pool.bytes_of(page) == expected, (number, found[page])
    return found


def _statistics(rank: Rank) -> Any:
    return rank.backend.statistics()


def _damage(folder: Path, change: Callable[[bytearray], Any]) -> int:
    files = list(folder.rglob("*.qkv"))
    for file in files:
        file.write_bytes(change(bytearray(file.read_bytes())))
    return len(files)


def _flip(data: bytearray) -> bytearray:
    data[int.from_bytes(data[12:16], "little") + 7] ^= 1
    return data


# ---- Layouts and forms


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writes_v1", [True, False], ids=["set_v1", "set"])
@pytest.mark.parametrize("reads_v1", [True, False], ids=["get_v1", "get"])
def test_pages_come_back_after_a_restart(
    opened: Callable[..., Rank], layout: str, mla: bool, writes_v1: bool, reads_v1: bool
) -> None:
    """Both forms have the same bytes, in each layout of the pool."""
    first = opened(HostPool(layout, mla=mla), v1=writes_v1, is_mla_model=mla)
    assert _statistics(first)["in_place"]
    _store(first, [1, 2, 3])
    first.backend.close()
    second = opened(HostPool(layout, mla=mla), v1=reads_v1, is_mla_model=mla)
    assert second.backend.batch_exists([_key(n) for n in (1, 2, 9, 3)]) == 2
    assert _loaded(second, [3, 1, 9, 2]) == [True, True, False, True]
    assert _statistics(second)["failures"] == {}


def test_a_pool_without_views_is_read_and_written_by_its_own_methods(
    opened: Callable[..., Rank],
) -> None:
    rank = opened(HostPool("page_first", views=False))
    assert not _statistics(rank)["in_place"]
    _store(rank, [1, 2])
    assert _loaded(rank, [2, 5, 1]) == [True, False, True]
    assert _loaded(opened(HostPool("page_first")), [1, 2]) == [True, True]


def test_a_pool_whose_views_are_copies_is_not_written_in_place(
    opened: Callable[..., Rank],
) -> None:
    class Copying(HostPool):
        def get_data_page(self, index: Any, flat: bool = True) -> Any:
            return super().get_data_page(index, flat).clone()

    rank = opened(Copying())
    assert not _statistics(rank)["in_place"]
    _store(rank, [1])
    assert _loaded(rank, [1]) == [True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_several_sections(
    opened: Callable[..., Rank], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pages of over 64 MiB have: sections are whole rows, or parts of them."""
    monkeypatch.setattr(_chunk_objects, "_SECTION_BYTES", _SIZE // 4)
    rank = opened(HostPool(layout))
    _store(rank, [1, 2])
    assert _loaded(rank, [2, 1, 3]) == [True, True, False]
    assert _loaded(opened(HostPool(layout), v1=False), [1, 2]) == [True, True]


def test_one_page_at_a_time(opened: Callable[..., Rank]) -> None:
    backend, pool = (rank := opened()).backend, rank.pool
    pool.fill(0, content(_key(1), 0, _SIZE))
    value = pool.get_data_page(0, flat=False)  # with gaps
    assert not backend.exists(_key(1)) and backend.get(_key(1)) is None
    assert backend.set(_key(1), value) is True
    assert backend.exists(_key(1))
    found = backend.get(_key(1))
    assert found.dtype == torch.bfloat16 and torch.equal(
        found.view(torch.uint8), value.flatten().view(torch.uint8)
    )
    target = pool.get_dummy_flat_data_page()
    assert backend.get(_key(1), target) is target
    assert backend.batch_get([_key(2), _key(1)])[0] is None


def test_rows_of_tensors() -> None:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).reshape(2, 3, 4, 5)
    for tensor in (base, base[:, 1], base[:, :2], base[1:, 2, 1:3], base[:, :, :, :1][0, 0]):
        rows = rows_of(tensor)
        assert rows.tobytes() == tensor.contiguous().numpy().tobytes()
        rows[-1, -2:] = 255
        assert tensor.flatten()[-1] == -1, "they are the tensor's own bytes"
    for wrong in (base[:, :2, :2], base[:, :2, :, :2], base[0, 0, 0, :1].expand(3), base[:0], [1]):
        with pytest.raises(quire.BadArgumentError):
            rows_of(wrong)


# ---- What is kept apart


_TWO = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2}


@pytest.mark.parametrize(
    ("pool", "fields"),
    [
        ({}, {"tp_rank": 1}),
        ({}, {"tp_size": 4}),
        ({}, {"pp_rank": 1}),
        ({}, {"pp_size": 4}),
        ({}, {"attn_cp_rank": 1}),
        ({}, {"attn_cp_size": 4}),
        ({}, {"model_name": "m/other"}),
        ({}, {"extra": {"revision": "2"}}),
        ({}, {"extra": {"cache_salt": "ann"}}),
        ({}, {"is_mla_model": True}),
        ({"layout": "page_first"}, {}),
        ({"dtype": torch.float16}, {}),
        ({"dtype": torch.float8_e4m3fn, "heads": 4}, {}),
        ({"page": 8, "heads": 1}, {}),
    ],
)
def test_foreign_pages_are_not_found(
    opened: Callable[..., Rank], pool: dict[str, Any], fields: dict[str, Any]
) -> None:
    rank = opened(**_TWO)
    _store(rank, [1])
    other = opened(HostPool(**pool), **{**_TWO, **fields})
    assert not other.backend.exists(_key(1)) and _loaded(other, [1]) == [False]
    _store(other, [1], part=1)
    assert _loaded(rank, [1]) == [True]
    assert _loaded(other, [1], part=1) == [True]


def test_ranks_that_have_the_same_pages_share_them(opened: Callable[..., Rank]) -> None:
    writer = opened(HostPool(mla=True), is_mla_model=True, tp_rank=0, tp_size=2)
    _store(writer, [1])
    reader = opened(HostPool(mla=True), is_mla_model=True, tp_rank=1, tp_size=2)
    assert _loaded(reader, [1]) == [True]
    _store(opened(dp_rank=0), [2])
    assert _loaded(opened(dp_rank=1), [2]) == [True]


# ---- Damage


@pytest.mark.parametrize("change", [_flip, lambda data: data[:-1]])
def test_damage_is_a_miss_and_is_repaired(
    opened: Callable[..., Rank], tmp_path: Path, change: Callable[[bytearray], Any]
) -> None:
    rank = opened()
    _store(rank, [1, 2, 3])
    assert _damage(tmp_path, change) == 3
    assert _loaded(rank, [1, 2, 3]) == [False] * 3
    assert rank.backend.batch_exists([_key(1)]) == 0
    _store(rank, [1, 2, 3])
    assert _loaded(rank, [1, 2, 3]) == [True] * 3


def test_swapped_files_are_misses(opened: Callable[..., Rank], tmp_path: Path) -> None:
    rank = opened()
    _store(rank, [1, 2])
    first, second = tmp_path.rglob("*.qkv")
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert _loaded(rank, [1, 2]) == [False, False]


def test_what_exists_is_loaded_whatever_becomes_of_the_file(
    opened: Callable[..., Rank], tmp_path: Path
) -> None:
    rank = opened()
    _store(rank, [1, 2])
    assert rank.backend.batch_exists([_key(1), _key(2)]) == 2
    assert _statistics(rank)["kept"] == 2
    _damage(tmp_path, _flip)
    assert _loaded(rank, [1, 2]) == [True, True]
    assert _statistics(rank)["kept"] == 0
    assert _loaded(rank, [1, 2]) == [False, False]


# ---- Bounds


def test_what_is_kept_is_bounded(opened: Callable[..., Rank], tmp_path: Path) -> None:
    rank = opened(extra={"fetch_bytes": 4 * _CHUNK_BYTES})
    _store(rank, list(range(12)))
    assert rank.backend.batch_exists([_key(n) for n in range(12)]) == 12
    assert _statistics(rank)["kept"] == 1
    assert _loaded(rank, list(range(12))) == [True] * 12
    assert _statistics(rank)["store"]["misses"].get("no room", 0) == 0


def test_a_full_folder_and_a_full_queue(opened: Callable[..., Rank], tmp_path: Path) -> None:
    rank = opened(extra={"disk_bytes": 40_000, "queue_bytes": 10_000})
    for first in range(0, 60, 6):
        numbers = list(range(first, first + 6))
        rank.backup([_key(n) for n in numbers], _fill(rank, numbers))
    found = [ok for n in range(0, 60, 6) for ok in _loaded(rank, list(range(n, n + 6)))]
    assert 0 < sum(found) < 60
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.qkv")) <= 40_000


def test_a_dead_redis_answers_at_once_and_stores_nothing(
    opened: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = opened(extra={"directory": None, **_DEAD_REDIS})
    begin = time.monotonic()
    keys = [_key(n) for n in range(12)]
    for _ in range(3):
        assert rank.backup(keys, list(range(12))) == [False] * 12
        assert _loaded(rank, list(range(12))) == [False] * 12
        assert rank.backend.batch_exists(keys) == 0
        assert rank.backend.set(keys[0], rank.pool.get_data_page(0)) is False
    assert time.monotonic() - begin < _PATIENT["load_timeout"], "no call has waited for it"
    assert _statistics(rank)["pages"]["refused"] == 3 * 13
    assert caplog.text.count("does not take pages") == 1, "logged once"


def test_a_dead_redis_beside_a_folder(opened: Callable[..., Rank]) -> None:
    rank = opened(extra=_DEAD_REDIS)
    _store(rank, [1, 2])
    assert _loaded(rank, [1, 3, 2]) == [True, False, True]


# ---- Errors


def test_nothing_is_raised(
    opened: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = opened()
    backend, keys = rank.backend, [_key(1), _key(2)]
    _store(rank, [1, 2])
    good = rank.indices([0, 1])
    for wrong in (good[:-1], good.flip(0), good - PAGE, None, rank.indices([99, 0])):
        assert backend.batch_get_v1(keys, wrong) == [False, False]
        assert backend.batch_set_v1([_key(3), _key(4)], wrong) == [False, False]
    short = torch.zeros(3, dtype=torch.bfloat16)
    assert backend.batch_get(keys, [short, short]) == [None, None]
    assert backend.get(keys[0], 1234) is None, "an address"
    assert backend.batch_get(keys, [short]) == [None, None]
    for value in (None, short, "text", rank.pool.kv_buffer):
        assert backend.set(_key(3), value) is False
    assert backend.batch_set([_key(3)], None) is False
    assert backend.exists(None) is False  # type: ignore[arg-type]
    assert not backend.exists(_key(3)) and not backend.exists(_key(4))
    with monkeypatch.context() as patch:
        patch.setattr(quire.ChunkSpace, "fetch", lambda *_, **__: 1 / 0)
        patch.setattr(quire.ChunkSpace, "put", lambda *_, **__: 1 / 0)
        for _ in range(3):
            assert _loaded(rank, [1, 2]) == [False, False]
            assert backend.batch_exists(keys) == 0
            assert backend.batch_set_v1([_key(5)], rank.indices([0])) == [False]
    assert _statistics(rank)["failures"]["batch_exists: ZeroDivisionError"] == 3
    assert caplog.text.count("batch_exists: division by zero") == 1
    assert _loaded(rank, [1, 2]) == [True, True]


def test_before_a_pool_is_there_and_after_the_end_all_is_a_miss(tmp_path: Path) -> None:
    config = fake_sglang.HiCacheStorageConfig(extra_config={"directory": str(tmp_path)})
    backend = QuireHiCacheStorage(config, {})
    pool = HostPool()

    def nothing() -> None:
        indices = torch.arange(PAGE)
        assert backend.exists("a") is False and backend.get("a") is None
        assert backend.set("a", pool.get_data_page(0)) is False
        assert backend.batch_get_v1(["a"], indices) == [False]
        assert backend.batch_set_v1(["a"], indices) == [False]
        assert backend.batch_set(["a"], [pool.get_data_page(0)]) is False
        assert backend.clear() is None and backend.get_stats() is None

    nothing()
    backend.register_mem_pool_host(pool)
    assert backend.set("a", pool.get_data_page(0)) is True
    backend.close()
    backend.close()
    nothing()
    with pytest.raises(quire.ClosedError):
        backend.statistics()


def test_two_threads(opened: Callable[..., Rank]) -> None:
    """SGLang's threads for prefetch and backup."""
    rank = opened(HostPool(pages=24), extra={"fetch_bytes": 12 * _CHUNK_BYTES})
    numbers = list(range(12))
    _store(rank, numbers)
    done: list[bool] = []

    def backup() -> None:
        for n in range(100, 130):
            rank.pool.fill(20, content(_key(n), 0, _SIZE))
            done.extend(rank.backup([_key(n)], [20]))

    thread = threading.Thread(target=backup)
    thread.start()
    for _ in range(10):
        rank.backend.batch_exists([_key(n) for n in numbers])
        assert _loaded(rank, numbers) == [True] * 12
    thread.join()
    assert done == [True] * 30
    assert _loaded(rank, list(range(100, 116))) == [True] * 16


def test_clear_removes_the_pages_of_this_rank(opened: Callable[..., Rank]) -> None:
    ranks = [opened(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for part, rank in enumerate(ranks):
        _store(rank, [1, 2], part)
    assert ranks[0].backend.batch_exists([_key(1)]) == 1
    ranks[0].backend.clear()
    assert _loaded(ranks[0], [1, 2]) == [False, False]
    assert _loaded(ranks[1], [1, 2], part=1) == [True, True]
    _store(ranks[0], [1])
    assert _loaded(ranks[0], [1, 2]) == [True, False]


def test_what_a_call_beside_clear_has_kept_is_gone(
    opened: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when weights are updated while another thread of SGLang asks."""
    rank = opened()
    _store(rank, [1])
    clear = quire.ChunkStore.clear

    def asked_meanwhile(*args: Any, **options: Any) -> int:
        assert rank.backend.batch_exists([_key(1)]) == 1
        return clear(*args, **options)

    monkeypatch.setattr(quire.ChunkStore, "clear", asked_meanwhile)
    rank.backend.clear()
    assert _loaded(rank, [1]) == [False]


# ---- Creation


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"no_such": 1}, "unknown names.*no_such"),
        ({"directory": None}, "none of directory, redis, ram_bytes"),
        ({"load_timeout": 0}, "load_timeout is 0.0; it must be above 0"),
        ({"load_timeout": float("nan")}, "load_timeout is nan"),
        ({"store_timeout": "soon"}, "store_timeout must be a number"),
        ({"key": "secret"}, "key_file"),
        ({"model": 3}, "the extra config: model must be a text, not int"),
        ({"revision": None}, "the extra config: revision must be a text, not NoneType"),
        ({"key_file": 5}, "the extra config: key_file must be a text, not int"),
        ({"model": ""}, "no name of the model"),
        ({"disk_bytes": -1}, "disk"),
        ({"fetch_bytes": 100}, "fetch_bytes is 100; a page takes"),
    ],
)
def test_options_are_refused_by_name(
    opened: Callable[..., Rank], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(quire.BadArgumentError, match=message):
        opened(extra=extra)


def test_options(opened: Callable[..., Rank], tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    signed = opened(extra={"key_file": str(key_file), "prefetch_threshold": 64})
    _store(signed, [1])
    assert _loaded(signed, [1]) == [True]
    assert _loaded(opened(extra={"model": "m/fake", "key_file": str(key_file)}), [1]) == [True]
    in_ram = opened(extra={"directory": None, "ram_bytes": 1 << 20}, model_name="m/other")
    _store(in_ram, [1])
    assert _loaded(in_ram, [1]) == [True]


def test_pools_of_other_kinds_are_refused(opened: Callable[..., Rank]) -> None:
    class Odd(HostPool):
        def get_dummy_flat_data_page(self) -> Any:
            return torch.zeros(5, dtype=torch.uint8)

    with pytest.raises(quire.BadArgumentError, match="5 bytes is not a multiple of 16"):
        opened(Odd())
    with pytest.raises(quire.BadArgumentError, match="object has no layout, page_size"):
        opened().backend.register_mem_pool_host(object())


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_it_says_so() -> None:
    code = "import quire.sglang\nquire.sglang.QuireHiCacheStorage(None, {})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the package sglang is missing: pip install sglang" in done.stderr


# ---- Walks


class _Walk:
    """Two ranks over one folder, and what they have stored."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.exact = seed % 2 == 0  # nothing is lost: hits are what the model has
        self.layout = self.rng.choice(LAYOUTS)
        self.extra: dict[str, Any] = {"directory": str(folder)}
        if not self.exact:
            self.extra["disk_bytes"] = self.rng.choice([0, 50_000])
            self.extra["queue_bytes"] = self.rng.choice([10_000, 1 << 20])
            self.extra["fetch_bytes"] = self.rng.choice([1, 20]) * _CHUNK_BYTES
            self.extra |= self.rng.choice([{}, _DEAD_REDIS])
        if self.rng.random() < 0.3:
            self.extra["ram_bytes"] = 8_000
        self.stored: list[set[int]] = [set(), set()]
        self.ranks = [self._open(rank) for rank in (0, 1)]
        self.hits = 0

    def _open(self, rank: int) -> Rank:
        return Rank(
            QuireHiCacheStorage,
            HostPool(self.layout, views=self.rng.random() < 0.7),
            v1=self.rng.random() < 0.6,
            tp_rank=rank,
            tp_size=2,
            extra=self.extra,
        )

    def step(self) -> None:
        part = self.rng.randrange(2)
        rank, stored = self.ranks[part], self.stored[part]
        numbers = self.rng.sample(range(20), self.rng.randrange(1, 7))
        keys = [_key(n) for n in numbers]
        draw = self.rng.random()
        if draw < 0.35:
            done = rank.backup(keys, _fill(rank, numbers, part))
            assert not self.exact or all(done)
            stored.update(numbers)
        elif draw < 0.55:
            count = rank.backend.batch_exists(keys)
            leading = next((i for i, n in enumerate(numbers) if n not in stored), len(numbers))
            assert count == leading if self.exact else count <= leading
        elif draw < 0.85:
            found = _loaded(rank, numbers, part)
            for ok, number in zip(found, numbers, strict=True):
                assert ok == (number in stored) if self.exact else not ok or number in stored
            self.hits += sum(found)
        elif draw < 0.90:
            rank.backend.close()
            self.ranks[part] = self._open(part)
        elif draw < 0.92:
            rank.backend.clear()
            if self.exact:  # else Redis may be dead, and pages stay
                stored.clear()
        elif not self.exact:
            self._damage()

    def _damage(self) -> None:
        files = sorted(self.folder.rglob("*.qkv"))
        for file in self.rng.sample(files, min(3, len(files))):
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(file.read_bytes())
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                file.write_bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_walk(seed: int, tmp_path: Path) -> None:
    walk = _Walk(seed, tmp_path)
    try:
        for _ in range(80):
            walk.step()
        failures = [rank.backend.statistics()["failures"] for rank in walk.ranks]
    finally:
        for rank in walk.ranks:
            rank.backend.close()
    assert walk.hits > 0
    assert not walk.exact or failures == [{}, {}]
