"""quire.vllm.QuireConnector under a fake vLLM: random walks of requests, aborts, preemption, damage,
a dead Redis, full queues and lost memory. A forward that reads a wrong byte fails the test."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import quire
from fake_vllm import BLOCK, PASSPORT, FakeRequest, FakeVllm, config
from quire.vllm import QuireConnector, _arena, _scheduler, connector


@pytest.fixture(autouse=True)
def passport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        connector,
        "passport_of",
        lambda config, page_bytes, layers, chunk: {**PASSPORT, "block": chunk},
    )


class Pair:
    """An engine with both sides of the connector. apart: as in two processes."""

    def __init__(self, extra: dict[str, Any], *, blocks: int = 40, apart: bool = False) -> None:
        gc.collect()
        connector._workers_here.clear()
        sides = ["SCHEDULER", "WORKER"] if apart else ["WORKER", "SCHEDULER"]
        made = {
            side: QuireConnector(config_[0], side, config_[1])
            for config_ in [
                config({"chunk_tokens": BLOCK, "shared_bytes": 1 << 16, **extra}, blocks)
            ]
            for side in sides
        }
        self.scheduler, self.worker = made["SCHEDULER"], made["WORKER"]
        self.engine = FakeVllm(self.scheduler, self.worker, blocks)
        self.counts: dict[str, int] = {}

    def run(self, steps: int = 2000) -> None:
        """Until all requests are finished."""
        for _ in range(steps):
            if not (self.engine.waiting or self.engine.running):
                return
            self.engine.step()
        raise AssertionError("requests do not come to an end")

    def generate(self, tokens: list[int], count: int = 3, **options: Any) -> FakeRequest:
        request = FakeRequest(f"r{random.random()}", tokens, count, **options)
        self.engine.add(request)
        self.run()
        return request

    def stats(self) -> dict[str, int]:
        for side in (self.scheduler, self.worker):
            found = side.get_kv_connector_stats()
            for name, count in (found.data if found is not None else {}).items():
                self.counts[name] = self.counts.get(name, 0) + count
        return self.counts

    def flush(self) -> None:
        self.scheduler._store.flush()
        if self.worker._worker._store is not None:
            self.worker._worker._store.flush()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.worker.shutdown()


@pytest.fixture(params=[False, True], ids=["one process", "two processes"])
def apart(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


PROMPT = [5, 1, 4, 2, 8, 5, 7, 1, 4, 2, 8, 5, 7, 1, 4]  # three chunks and a rest


def test_a_second_engine_finds_what_the_first_has_saved(tmp_path: Path, apart: bool) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=apart)
    first.generate(PROMPT)
    assert first.generate(PROMPT).external == 12
    assert first.stats()["hit_tokens.ram"] if not apart else True
    first.close()
    second = Pair({"directory": str(tmp_path)}, apart=apart)
    assert second.generate(PROMPT).external == 12
    assert second.generate(PROMPT[:12]).external == 8, "one token is left to compute"
    assert second.generate(PROMPT, cache_salt="other").external == 0
    assert second.stats()["hit_tokens.disk"] >= 12
    assert "errors" not in second.stats()
    second.close()


def test_generated_tokens_are_saved_unless_prompts_only(tmp_path: Path) -> None:
    for folder, extra, expected in (("a", {}, 20), ("b", {"prompts_only": True}, 12)):
        pair = Pair({"directory": str(tmp_path / folder), **extra})
        answer = pair.generate(PROMPT, 9)
        assert pair.generate(answer.all_token_ids, 1).external == expected
        pair.close()


def test_a_request_may_skip_expire_and_pin(tmp_path: Path) -> None:
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT, kv_transfer_params={"quire_skip": True})
    assert (
        pair.generate(PROMPT, kv_transfer_params={"quire_ttl": 1000, "quire_pin": True}).external
        == 0
    )
    assert pair.generate(PROMPT, kv_transfer_params={"quire_skip": "load"}).external == 0
    assert pair.generate(PROMPT).external == 12
    store = pair.scheduler._store
    kept = store.list("ram")
    assert kept and all(chunk.expires is not None for chunk in kept)  # the first request kept none
    assert store.statistics()["pins"] >= 3
    pair.close()


def test_one_flipped_bit_is_a_miss_and_is_repaired(tmp_path: Path, apart: bool) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=apart)
    first.generate(PROMPT)
    first.close()
    damaged = sorted(tmp_path.rglob("*.qkv"))
    for file in damaged:
        data = bytearray(file.read_bytes())
        data[int.from_bytes(data[12:16], "little")] ^= 1
        file.write_bytes(data)
    second = Pair({"directory": str(tmp_path)}, apart=apart)
    assert second.generate(PROMPT).external == 0
    assert second.stats()["misses.corrupt"] >= 1
    second.flush()
    assert second.generate(PROMPT).external == 12
    second.close()


def test_a_miss_is_asked_for_once(tmp_path: Path) -> None:
    pair = Pair({"directory": str(tmp_path)}, blocks=5)
    for i in range(3):
        pair.engine.add(FakeRequest(f"r{i}", [i, *PROMPT], 3))
    pair.run()
    assert pair.stats()["lookups"] == 3
    pair.close()


def test_a_reset_leaves_nothing_of_the_weights_before(tmp_path: Path, apart: bool) -> None:
    pair = Pair({"directory": str(tmp_path)}, apart=apart)
    pair.generate(PROMPT)
    assert pair.generate(PROMPT).external == 12
    assert pair.scheduler.reset_cache() is True
    pair.engine.weights = 1
    assert pair.generate(PROMPT).external == 0
    pair.flush()
    assert pair.generate(PROMPT).external == 12
    pair.close()
    again = Pair({"directory": str(tmp_path)}, apart=apart)
    assert again.generate(PROMPT).external == 12  # of the weights that are on disk
    again.close()


def test_shared_memory_that_is_full_or_lost_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=True)
    first.generate(PROMPT)
    first.close()
    small = Pair({"directory": str(tmp_path), "shared_bytes": 2 * 2 * 32}, apart=True)
    assert small.generate(PROMPT).external == 8, "two slots"
    assert small.stats()["no_room"] == 1
    assert small.scheduler._scheduler._arena.free_count == 2
    monkeypatch.setattr(_arena.ArenaView, "layer", lambda *_: 1 / 0)
    request = small.generate(PROMPT)
    assert request.done
    assert small.engine.refused_blocks == 2
    assert small.stats()["failed_loads"] == 1
    assert small.scheduler._scheduler._arena.free_count == 2
    small.close()


def test_failures_never_reach_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT)

    def fail(*_: object, **__: object) -> Any:
        raise OSError("broken")

    for owner, name in (
        (quire.ChunkSpace, "fetch"),
        (quire.ChunkSpace, "put"),
        (quire.ChunkSpace, "wanted"),
        (quire.ChunkFetch, "wait"),
        (quire.ChunkFetch, "scatter"),
        (_scheduler.SchedulerSide, "allocated"),
        (_scheduler.SchedulerSide, "finish"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert pair.generate([*PROMPT, 1]).done, name
    assert pair.stats()["errors"] > 0
    assert pair.generate(PROMPT).external == 12
    pair.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"unknown": 1}, "unknown names"),
        ({"chunk_tokens": 6}, "multiple of vLLM's block"),
        ({}, "two processes"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=message):
        Pair({**({"ram_bytes": 1 << 20} if extra else {}), **extra}, apart=not extra)


def _damage(rng: random.Random, folder: Path) -> None:
    files = sorted(folder.rglob("*.qkv"))
    if not files:
        return
    file = rng.choice(files)
    if rng.random() < 0.3:
        file.unlink(missing_ok=True)
        return
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


@pytest.mark.parametrize("seed", range(16))
def test_walk(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print of a failure: the seed is the case's number."""
    rng = random.Random(seed)
    extra: dict[str, Any] = {
        "directory": str(tmp_path),
        "ram_bytes": rng.choice([0, 1 << 16, 1 << 20]),
        "chunk_tokens": BLOCK * rng.choice([1, 1, 2]),
        "prompts_only": rng.random() < 0.2,
        "shared_bytes": rng.choice([64, 512, 1 << 16]),
    }
    if rng.random() < 0.3:
        extra["queue_bytes"] = 20_000
    if rng.random() < 0.25:
        extra |= {"redis": "127.0.0.1:1", "redis_connect_timeout_ms": 20}
    weights = 0
    real_layer = _arena.ArenaView.layer

    def layer(view: Any, slots: list[int], number: int) -> Any:
        if rng.random() < 0.1:
            raise OSError("lost")
        return real_layer(view, slots, number)

    monkeypatch.setattr(_arena.ArenaView, "layer", layer)
    names = iter(range(10**6))
    hits = 0
    for _ in range(3):  # restarts
        pair = Pair(extra, blocks=rng.choice([12, 30, 60]), apart=rng.random() < 0.5)
        engine = pair.engine
        engine.weights = weights = 0
        every: list[FakeRequest] = []
        for _ in range(100):
            draw = rng.random()
            if draw < 0.25 and len(engine.waiting) < 6:
                shared = [rng.randrange(2) for _ in range(3)] * 4
                tail = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
                request = FakeRequest(
                    f"r{next(names)}",
                    shared[: rng.randrange(1, 13)] + tail,
                    rng.randrange(1, 8),
                    cache_salt=rng.choice([None, None, "a"]),
                    kv_transfer_params=rng.choice([None, None, {"quire_skip": True}]),
                )
                every.append(request)
                engine.add(request)
            elif draw < 0.28 and (engine.waiting or engine.running):
                engine.abort(rng.choice(engine.waiting + engine.running))
            elif draw < 0.32:
                _damage(rng, tmp_path)
            elif draw < 0.33 and not engine.running:
                pair.scheduler.reset_cache()
                engine.weights = weights = weights + 1
            else:
                engine.step()
        pair.run()
        assert len(engine.free) == len(engine.layers[0]), "blocks are lost"
        scheduler = pair.scheduler._scheduler
        assert not scheduler._requests
        if scheduler._arena is not None:
            assert scheduler._arena.free_count == scheduler._arena.slot_count
        assert not _scheduler.fetches_in_flight
        hits += sum(request.external for request in every)
        pair.close()
    if not extra["prompts_only"] and "redis" not in extra and extra["shared_bytes"] > 64:
        assert hits > 0, "the walk has tested nothing"
