"""The worker side of quire.vllm.QuireConnector in a process of its own, as vLLM's executor has it."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fake_kernel import FakeKernel, bind_caches
from fake_vllm import BLOCK, BYTES, LAYER_NAMES

__all__ = ["WorkerProcess", "shared_layers"]

_CALLS = (
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "get_handshake_metadata",
    "get_transfer_results",
    "build_connector_worker_meta",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "get_kv_connector_stats",
    "shutdown",
)


def shared_layers(folder: Path, blocks: int) -> list[torch.Tensor]:
    """Memory of the KV of each layer in files, which several processes map."""
    size = blocks * BLOCK * BYTES
    return [
        torch.from_file(
            str(folder / name), shared=True, size=size, dtype=torch.uint8
        ).view(blocks, BLOCK, BYTES)
        for name in LAYER_NAMES
    ]


def _serve(
    calls: Connection,
    extra: dict[str, Any],
    blocks: int,
    memory: Path,
    kernel: FakeKernel | None,
) -> None:
    from vllm_pair import sides

    (worker,) = sides(extra, blocks, "WORKER", kernel=kernel)
    caches = dict(zip(LAYER_NAMES, shared_layers(memory, blocks), strict=True))
    bind_caches(worker, caches)
    worker.register_kv_caches(caches)
    calls.send(None)
    while True:
        name, arguments = calls.recv()
        if name == "die":
            signal.raise_signal(signal.SIGKILL)
        calls.send(getattr(worker, name)(*arguments))
        if name == "shutdown":
            return


class WorkerProcess:
    """Answers FakeVllm's calls by those of a worker in another process, which has mapped the same
    memory. dies_before: a call in place of which the process is killed."""

    def __init__(
        self, extra: dict[str, Any], blocks: int, memory: Path, kernel: FakeKernel | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, extra, blocks, memory, kernel))
        self._process.start()
        theirs.close()
        self._calls.recv()
        self.dies_before = ""

    def register_kv_caches(self, caches: dict[str, Any]) -> None:
        """It has mapped them itself."""

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self._calls.send(("die" if name == self.dies_before else name, arguments))
            return self._calls.recv()  # EOFError if it is dead

        return call

    def join(self) -> int | None:
        """Its exit code."""
        self._process.join()
        return self._process.exitcode
