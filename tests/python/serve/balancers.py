"""Programs that stand in front of servers: each answers as one of them."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import free_port
from server_process import DEADLINE, Server


@contextlib.contextmanager
def front_of(command: list[str], port: int, folder: Path, key: str | None = None) -> Iterator[Server]:
    """The program of the command, which listens on the port, once it answers."""
    log = folder / "balancer.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)
    front = object.__new__(Server)
    front.host, front.port, front.key, front.process = "127.0.0.1", port, key, process
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if front.request("GET", "/health")[0] == 200:
                    break
        assert process.poll() is None, log.read_text()[-2000:]
        yield front
    finally:
        process.terminate()
        process.wait(DEADLINE)


@contextlib.contextmanager
def vllm_router(folder: Path, *options: str) -> Iterator[Server]:
    program = Path(sys.executable).with_name("vllm-router")
    if not program.exists():
        pytest.skip("vllm-router is not installed")
    port = free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port), *options]
    with front_of(command, port, folder) as front:
        yield front
