"""Both sides of quire.vllm.QuireConnector under a fake vLLM, and random walks of them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fake_kernel import KERNELS, FakeKernel
from fake_vllm import (
    BLOCK,
    ONE_GROUP,
    PASSPORT,
    FakeGroup,
    FakeRequest,
    FakeVllm,
    config,
    new_layers,
)
from late_stream import LateStream
from quire.vllm import QuireConnector, _arena, _blocks, _parts, _scheduler, connector
from quire.vllm._identity import Shard

PROMPT = [5, 1, 4, 2, 8, 5, 7, 1, 4, 2, 8, 5, 7, 1, 4]  # three chunks and a rest

_engines = itertools.count()

_PATIENCE = 120.0  # seconds: of a machine that does something else, with a disk that does, too
# What is on disk is found, however long the disk takes.
_PATIENT = {"load_timeout": _PATIENCE, "disk_timeout_ms": int(1000 * _PATIENCE)}


def fake_passport() -> Iterator[None]:
    """Passports without a model; a fixture."""
    with fake_passports():
        yield


@contextlib.contextmanager
def fake_passports() -> Iterator[None]:
    with (
        mock.patch.object(connector, "check_weights", lambda _: None),
        mock.patch.object(_parts, "passport_of", passport_of_fake),
        mock.patch.object(_parts, "canonical_passport_of", canonical_passport_of_fake),
    ):
        yield


def passport_of_fake(
    vllm_config: Any, group: Any, shard: Shard, is_only: bool
) -> dict[str, Any]:
    """In place of quire.vllm's."""
    return {
        **PASSPORT,
        "layout": f"fake/{group.block_size}/{group.identity}",
        "shard": shard.name,
        "layers": [0, len(group.layer_names)],
        "block": group.chunk_tokens,
    }


def canonical_passport_of_fake(
    vllm_config: Any, group: Any, shard: Shard, is_only: bool
) -> Any:
    """The same."""
    if group.rows is None:
        return None
    rows = group.rows
    passport = passport_of_fake(vllm_config, group, shard, is_only)
    del passport["kind"]
    return passport | {
        "layout": f"L2THD/{group.canonical_identity}",
        "dtype": rows.dtype,
        "kv_heads": rows.heads,
        "head_dim": rows.key_dim,
    }


def sides(
    extra: dict[str, Any],
    blocks: int,
    *names: str,
    groups: tuple[FakeGroup, ...] = ONE_GROUP,
    ranks: int = 1,
    stages: int = 1,
    kernel: FakeKernel | None = None,
) -> list[QuireConnector]:
    """Both sides, or one, made in this order; WORKER: all of them."""
    gc.collect()
    engine_id = f"engine {next(_engines)}"
    options = {"chunk_tokens": BLOCK, "shared_bytes": 1 << 16, **_PATIENT, **extra}
    events = bool(options.pop("events", False))
    found = []
    for name in names:
        for rank in range(ranks * stages if name == "WORKER" else 1):
            vllm_config, kv_cache_config = config(
                options,
                blocks,
                engine_id=engine_id,
                events=events,
                groups=groups,
                ranks=ranks,
                stages=stages,
                rank=rank,
                kernel=kernel,
            )
            found.append(QuireConnector(vllm_config, name, kv_cache_config))
    return found


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
        groups: tuple[FakeGroup, ...] = ONE_GROUP,
        ranks: int = 1,
        stages: int = 1,
        is_ahead: Callable[[], bool] = lambda: False,
        kernel: FakeKernel | None = None,
    ) -> None:
        shape: dict[str, Any] = {
            "groups": groups, "ranks": ranks, "stages": stages, "kernel": kernel
        }  # fmt: skip
        if apart:
            self.scheduler, *self.workers = sides(extra, blocks, "SCHEDULER", "WORKER", **shape)
        else:
            *self.workers, self.scheduler = sides(extra, blocks, "WORKER", "SCHEDULER", **shape)
        with contextlib.ExitStack() as patches:
            if stream is not None:
                patches.enter_context(mock.patch.object(_blocks, "stream_of", lambda _: stream))
            self.engine = FakeVllm(
                self.scheduler,
                self.workers,
                new_layers(blocks, device, groups, ranks, stages),
                groups=groups,
                stages=stages,
                settle=(lambda: None) if stream is None else stream.settle,
                is_ahead=is_ahead,
                kernel=kernel or FakeKernel("rows"),
            )
        self.counts: dict[str, int] = {}

    def run(self, steps: int = 2000) -> None:
        """Until all requests are finished, so many steps at most beside those that only wait for
        the store."""
        deadline = time.monotonic() + _PATIENCE
        while self.engine.busy:
            assert steps > 0 and time.monotonic() < deadline, "requests do not come to an end"
            self.engine.step()
            steps -= not self.engine.is_asking

    def generate(self, tokens: list[int], count: int = 3, **options: Any) -> FakeRequest:
        request = FakeRequest(f"r{random.random()}", tokens, count, **options)
        self.engine.add(request)
        self.run()
        return request

    def stats(self) -> dict[str, int]:
        for side in (self.scheduler, *self.workers):
            found = side.get_kv_connector_stats()
            for name, count in (found.data if found is not None else {}).items():
                self.counts[name] = self.counts.get(name, 0) + count
        return self.counts

    @property
    def worker(self) -> Any:
        """The first one."""
        return self.workers[0]

    def flush(self) -> None:
        """What was saved is in the store, and written."""
        for worker in self.workers:
            for blocks in worker._worker._blocks:
                blocks.finish(wait=True)
            if worker._worker._store is not None:
                worker._worker._store.flush()
        self.scheduler._store.flush()

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
            worker.shutdown()


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
    try:
        data = bytearray(file.read_bytes())
    except FileNotFoundError:
        return  # the store has found it damaged before, and removed it
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


class _Changes:
    """Adapters whose files change, and sleeps of vLLM. Drawn apart, so that walks without them stay
    as they are."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._rng = random.Random(seed)
        self._folders = [folder / str(i) for i in range(3)]
        self._sizes = itertools.count(1)  # another one each time, however coarse clocks are
        for each in self._folders:
            each.mkdir()
            self._write(each)

    def _write(self, folder: Path) -> None:
        data = self._rng.randbytes(next(self._sizes))
        (folder / "adapter_model.safetensors").write_bytes(data)

    def lora(self) -> Any:
        """Of a request, or None. Now and then under another's number."""
        number = self._rng.randrange(6)
        if number >= len(self._folders):
            return None
        folder = self._folders[self._rng.randrange(3) if self._rng.random() < 0.03 else number]
        return types.SimpleNamespace(
            lora_name=f"a{number}", lora_int_id=number + 1, lora_path=str(folder)
        )

    def happen(self, engine: FakeVllm) -> None:
        draw = self._rng.random()
        if draw < 0.01:
            self._write(self._rng.choice(self._folders))
        elif draw < 0.02:
            engine.sleep(weights=self._rng.randrange(2))


def _life(
    rng: random.Random,
    pair: Pair,
    folder: Path,
    names: Iterator[int],
    changes: _Changes | None = None,
) -> int:
    """One engine from its start to its end. How many tokens were brought."""
    engine = pair.engine
    every: list[FakeRequest] = []
    for _ in range(100):
        if changes is not None:
            changes.happen(engine)
        draw = rng.random()
        if draw < 0.25 and len(engine.waiting) < 6:
            every.append(_request(rng, f"r{next(names)}"))
            if changes is not None:
                every[-1].lora_request = changes.lora()
            engine.add(every[-1])
        elif draw < 0.28 and engine.busy:
            loading = [request for request, _ in engine.loading.values()]
            alive = [each for each in loading if each.request_id not in engine.aborted]
            every_one = engine.waiting + engine.running + alive
            if every_one:
                engine.abort(rng.choice(every_one))
        elif draw < 0.32:
            _damage(rng, folder)
        elif draw < 0.33:
            # vLLM's requests keep the blocks that they have, which are of the weights before.
            pair.scheduler.reset_cache()
            engine.weights += 1
        else:
            engine.step()
    pair.run()
    assert len(engine.free) == engine.usable_blocks, "blocks are lost"
    scheduler = pair.scheduler._scheduler
    assert not scheduler._requests
    for arena in scheduler._arenas or ():
        assert arena.free_count == arena.slot_count, "leases are lost"
    assert not _scheduler.fetches_in_flight
    return sum(request.external for request in every)


_SHAPES: list[tuple[FakeGroup, ...]] = [
    ONE_GROUP,
    (FakeGroup(), FakeGroup(window=6, layers=3)),
    (FakeGroup(window=9), FakeGroup(layers=1), FakeGroup(window=9)),
    (FakeGroup(block=2), FakeGroup(window=3, block=4)),
    (FakeGroup(layers=1), FakeGroup(window=13)),
    (FakeGroup(), FakeGroup(layers=1)),
    (FakeGroup(window=5),),
]

#: Groups with recurrent states.
STATES: list[tuple[FakeGroup, ...]] = [
    (FakeGroup(), FakeGroup(state=True)),
    (FakeGroup(state=True, layers=1), FakeGroup(layers=1), FakeGroup(state=True, layers=3)),
    (FakeGroup(window=6), FakeGroup(state=True)),
    (FakeGroup(block=2), FakeGroup(state=True), FakeGroup(window=5)),
    (FakeGroup(state=True),),
]


class NothingFound(AssertionError):
    """No request of a walk found anything in the store."""


def walk(
    seed: int,
    folder: Path,
    *,
    apart: bool | None = None,
    staged: bool | None = None,
    device: str = "cpu",
    groups: tuple[FakeGroup, ...] | None = ONE_GROUP,
    ranks: int | None = 1,
    stages: int | None = 1,
    lost_share: float = 0.1,
    has_kernels: bool = False,
    changes: Path | None = None,
) -> None:
    """Three engines, one after the other, over one folder; requests, aborts and damage are drawn,
    and lost_share of the reads of shared memory fail.

    apart: whether scheduler and worker are joined by shared memory; staged: whether blocks are
    those of a device whose copies come late; groups: of layers; ranks: workers of each of the
    pipeline stages. None: drawn, too.
    has_kernels: each engine has a kernel of another order, and blocks of another size.
    changes: a folder for adapters, whose files change; and vLLM sleeps.
    """
    rng = random.Random(seed)
    extra = _options(rng, folder)
    if has_kernels and "queue_bytes" in extra:
        extra["queue_bytes"] *= 2  # keys and values of a layer are two sections
    if groups is None:
        groups = rng.choice(_SHAPES)
    if ranks is None:
        ranks = rng.choice([1, 2])
    if stages is None:
        stages = rng.choice([1, 2, 3])
    names = iter(range(10**6))
    hits = 0
    made = None if changes is None else _Changes(seed, changes)
    real = _arena.ArenaView.layer

    def layer(view: Any, slots: Any, number: int) -> Any:
        if rng.random() < lost_share:
            raise OSError("lost")
        return real(view, slots, number)

    with mock.patch.object(_arena.ArenaView, "layer", layer):
        for _ in range(3):  # restarts
            drawn = rng.random() < 0.5, rng.random() < 0.5
            if has_kernels:
                sizes = [each for each in (1, 2, 4, 8) if extra["chunk_tokens"] % each == 0]
                groups = tuple(
                    each if each.state else dataclasses.replace(each, block=rng.choice(sizes))
                    for each in groups
                )
            pair = Pair(
                extra,
                blocks=rng.choice([12, 30, 60]) * len(groups) * (4 if has_kernels else 1),
                apart=ranks * stages > 1 or (drawn[0] if apart is None else apart),
                stream=LateStream(rng) if (drawn[1] if staged is None else staged) else None,
                device=device,
                groups=groups,
                ranks=ranks,
                stages=stages,
                is_ahead=lambda: rng.random() < 0.5,
                kernel=rng.choice(KERNELS) if has_kernels else None,
            )
            hits += _life(rng, pair, folder, names, made)
            pair.close()
    # A short queue before a slow disk may drop a part of every chunk, and such a chunk is missed.
    drops = "redis" in extra or "queue_bytes" in extra
    # States are found where a step has ended, which other prompts may not share.
    drops = drops or any(group.state for group in groups) or changes is not None
    if not extra["prompts_only"] and not drops and extra["shared_bytes"] > 512:
        if hits == 0:
            raise NothingFound("the walk has tested nothing")
