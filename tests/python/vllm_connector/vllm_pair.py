"""Both sides of quire.vllm.QuireConnector under a fake vLLM, and random walks of them."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from fake_vllm import BLOCK, PASSPORT, FakeRequest, FakeVllm, config, new_layers
from late_stream import LateStream
from quire.vllm import QuireConnector, _arena, _blocks, _scheduler, connector

if TYPE_CHECKING:
    import pytest

PROMPT = [5, 1, 4, 2, 8, 5, 7, 1, 4, 2, 8, 5, 7, 1, 4]  # three chunks and a rest


def fake_passport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passports without a model; a fixture."""
    monkeypatch.setattr(connector, "passport_of", passport_of_fake)


def passport_of_fake(
    vllm_config: Any, page_bytes: int, layer_count: int, chunk_tokens: int
) -> dict[str, Any]:
    """In place of quire.vllm's."""
    return {**PASSPORT, "block": chunk_tokens}


def sides(extra: dict[str, Any], blocks: int, *names: str) -> list[QuireConnector]:
    """Both sides, or one, made in this order."""
    gc.collect()
    connector._workers_here.clear()
    options = {"chunk_tokens": BLOCK, "shared_bytes": 1 << 16, **extra}
    events = bool(options.pop("events", False))
    vllm_config, kv_cache_config = config(options, blocks, events=events)
    return [QuireConnector(vllm_config, name, kv_cache_config) for name in names]


class Pair:
    """An engine with both sides of the connector. apart: as in two processes. device: where its KV
    is. stream: the KV is that of a device whose copies come late, though in the CPU's memory."""

    def __init__(
        self,
        extra: dict[str, Any],
        *,
        blocks: int = 40,
        apart: bool = False,
        device: str = "cpu",
        stream: LateStream | None = None,
    ) -> None:
        if apart:
            self.scheduler, self.worker = sides(extra, blocks, "SCHEDULER", "WORKER")
        else:
            self.worker, self.scheduler = sides(extra, blocks, "WORKER", "SCHEDULER")
        layers = new_layers(blocks, device)
        if stream is None:
            self.engine = FakeVllm(self.scheduler, self.worker, blocks, layers=layers)
        else:
            with mock.patch.object(_blocks, "stream_of", lambda _: stream):
                self.engine = FakeVllm(
                    self.scheduler, self.worker, blocks, layers=layers, settle=stream.settle
                )
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
        """What was saved is in the store, and written."""
        self.worker._worker._blocks.finish(wait=True)
        self.scheduler._store.flush()
        if self.worker._worker._store is not None:
            self.worker._worker._store.flush()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.worker.shutdown()


def damage(file: Path) -> None:
    """Flips a bit of a chunk's keys and values."""
    data = bytearray(file.read_bytes())
    data[int.from_bytes(data[12:16], "little")] ^= 1
    file.write_bytes(data)


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


def _options(rng: random.Random, folder: Path) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "directory": str(folder),
        "ram_bytes": rng.choice([0, 1 << 16, 1 << 20]),
        "chunk_tokens": BLOCK * rng.choice([1, 1, 2]),
        "prompts_only": rng.random() < 0.2,
        "shared_bytes": rng.choice([64, 512, 1 << 16]),
        "staging_bytes": rng.choice([64, 512, 1 << 16]),
        "events": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        extra["queue_bytes"] = 20_000
    if rng.random() < 0.25:
        extra |= {"redis": "127.0.0.1:1", "redis_connect_timeout_ms": 20}
    return extra


def _request(rng: random.Random, name: str) -> FakeRequest:
    shared = [rng.randrange(2) for _ in range(3)] * 4
    tail = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
    return FakeRequest(
        name,
        shared[: rng.randrange(1, 13)] + tail,
        rng.randrange(1, 8),
        cache_salt=rng.choice([None, None, "a"]),
        kv_transfer_params=rng.choice([None, None, {"quire_skip": True}]),
    )


def _life(rng: random.Random, pair: Pair, folder: Path, names: Iterator[int]) -> int:
    """One engine from its start to its end. How many tokens were brought."""
    engine = pair.engine
    every: list[FakeRequest] = []
    for _ in range(100):
        draw = rng.random()
        if draw < 0.25 and len(engine.waiting) < 6:
            every.append(_request(rng, f"r{next(names)}"))
            engine.add(every[-1])
        elif draw < 0.28 and (engine.waiting or engine.running):
            engine.abort(rng.choice(engine.waiting + engine.running))
        elif draw < 0.32:
            _damage(rng, folder)
        elif draw < 0.33 and not engine.running:
            pair.scheduler.reset_cache()
            engine.weights += 1
        else:
            engine.step()
    pair.run()
    assert len(engine.free) == len(engine.layers[0]), "blocks are lost"
    scheduler = pair.scheduler._scheduler
    assert not scheduler._requests
    if scheduler._arena is not None:
        assert scheduler._arena.free_count == scheduler._arena.slot_count, "leases are lost"
    assert not _scheduler.fetches_in_flight
    return sum(request.external for request in every)


def walk(
    seed: int,
    folder: Path,
    *,
    apart: bool | None = None,
    staged: bool | None = None,
    device: str = "cpu",
) -> None:
    """Three engines, one after the other, over one folder; requests, aborts and damage are drawn,
    and one read of shared memory in ten fails.

    apart: whether scheduler and worker are joined by shared memory; staged: whether blocks are
    those of a device whose copies come late; None: drawn, too.
    """
    rng = random.Random(seed)
    extra = _options(rng, folder)
    names = iter(range(10**6))
    hits = 0
    real = _arena.ArenaView.layer

    def layer(view: Any, slots: Any, number: int) -> Any:
        if rng.random() < 0.1:
            raise OSError("lost")
        return real(view, slots, number)

    with mock.patch.object(_arena.ArenaView, "layer", layer):
        for _ in range(3):  # restarts
            drawn = rng.random() < 0.5, rng.random() < 0.5
            pair = Pair(
                extra,
                blocks=rng.choice([12, 30, 60]),
                apart=drawn[0] if apart is None else apart,
                stream=LateStream(rng) if (drawn[1] if staged is None else staged) else None,
                device=device,
            )
            hits += _life(rng, pair, folder, names)
            pair.close()
    if not extra["prompts_only"] and "redis" not in extra and extra["shared_bytes"] > 64:
        assert hits > 0, "the walk has tested nothing"
