"""Scheduler and worker of quire.vllm.QuireConnector as two real processes that share memory."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fake_kernel import KERNELS, FakeKernel
from fake_vllm import BLOCK, BYTES, LAYERS, FakeRequest, FakeVllm
from vllm_pair import PROMPT, Pair, fake_passport, sides
from vllm_worker_process import WorkerProcess, shared_layers

passport = pytest.fixture(autouse=True)(fake_passport)

_BLOCKS = 40


class Processes(Pair):
    """The scheduler here, its worker in another process."""

    def __init__(
        self, extra: dict[str, Any], memory: Path, kernel: FakeKernel | None = None
    ) -> None:
        self._extra, self._memory, self._kernel = extra, memory, kernel
        memory.mkdir(exist_ok=True)
        (self.scheduler,) = sides(extra, _BLOCKS, "SCHEDULER", kernel=kernel)
        self.counts = {}
        self.start_worker()

    def start_worker(self) -> None:
        """A worker, and vLLM's queues, from the start."""
        self.workers: list[Any] = [
            WorkerProcess(self._extra, _BLOCKS, self._memory, self._kernel)
        ]
        layers = shared_layers(self._memory, _BLOCKS)
        kernel = self._kernel or FakeKernel("rows")
        self.engine = FakeVllm(self.scheduler, self.workers, [[layers]], kernel=kernel)

    @property
    def arena(self) -> Any:
        return self.scheduler._scheduler._arenas[0]

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        assert self.worker.join() == 0


@pytest.mark.parametrize("kernels", [(None, None), KERNELS[2:4]], ids=["opaque", "canonical"])
def test_two_processes_load_and_save(
    kernels: tuple[FakeKernel | None, FakeKernel | None], tmp_path: Path
) -> None:
    extra = {"directory": str(tmp_path / "kv")}
    first = Processes(extra, tmp_path / "memory", kernels[0])
    first.generate(PROMPT)
    first.close()
    second = Processes(extra, tmp_path / "memory", kernels[1])
    rng = random.Random(1)
    hits = second.generate(PROMPT).external
    assert hits == 12
    for _ in range(30):
        prompt = PROMPT[: rng.randrange(1, 15)] + [rng.randrange(3) for _ in range(6)]
        hits += second.generate(prompt).external
    assert hits > 100
    stats = second.stats()
    assert stats["loaded_tokens"] == hits
    assert "errors" not in stats
    assert second.arena.free_count == second.arena.slot_count
    second.close()


def test_a_worker_that_is_killed_while_it_loads_gives_its_memory_back(tmp_path: Path) -> None:
    slots = 3
    extra = {
        "directory": str(tmp_path / "kv"),
        "shared_bytes": slots * LAYERS * BLOCK * BYTES,
        "lease_timeout": 60.0,
    }
    pair = Processes(extra, tmp_path / "memory")
    scheduler = pair.scheduler._scheduler
    now = [0.0]
    scheduler._clock = lambda: now[0]
    pair.generate(PROMPT)
    pair.worker.shutdown()  # what it has saved is on disk
    assert pair.worker.join() == 0
    pair.start_worker()
    assert pair.generate(PROMPT).external == 12
    for death in range(3):
        pair.worker.dies_before = "start_load_kv"
        request = FakeRequest(f"lost{death}", PROMPT, 3)
        pair.engine.add(request)
        with pytest.raises(EOFError):
            pair.run()
        assert pair.worker.join() == -signal.SIGKILL
        assert pair.arena.free_count == 0
        pair.scheduler.request_finished(request, request.blocks)
        pair.start_worker()
        assert pair.generate(PROMPT).external == 0, "there is no room"
        now[0] += 61.0
        assert pair.generate(PROMPT).external == 12
        assert pair.arena.free_count == slots == pair.arena.slot_count
    assert pair.stats()["overdue_leases"] == 3
    pair.close()
