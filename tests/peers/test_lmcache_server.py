"""vLLM with LMCache's server, whose second tier is quire.lmcache.QuireL2Adapter. Runs in LMCache's
environment: `./test peers`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_process import Run, random_prompt, run, save_llama

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from workers import LmcacheServer  # noqa: E402

_PATIENCE = 120.0
_TOKENS = 16  # of one of Quire's chunks, which is an object of LMCache's
PROMPT = random_prompt(700)
_BORDER = 512  # LMCache's chunks have 256 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def own(model: str) -> Run:
    """Without a connector: the prompt cold, then vLLM's own hit at the border of LMCache's."""
    cold = run(model, [PROMPT], None)
    hit = run(model, [[*PROMPT[:_BORDER], *PROMPT[:20]], PROMPT], None)
    assert (cold.cached, hit.cached) == ([0], [0, _BORDER])
    return Run([cold.answers[0], hit.answers[1]], [0, _BORDER], {}, [], "")


@contextlib.contextmanager
def lmcache_server(kv: Path, log: Path) -> Iterator[LmcacheServer]:
    adapter = {
        "type": "plugin",
        "module_path": "quire.lmcache",
        "class_name": "QuireL2Adapter",
        "adapter_params": {"directory": str(kv)},
    }
    program = Path(sys.executable).with_name("lmcache")
    server = LmcacheServer(program, log, lambda: _PATIENCE, ["--l2-adapter", json.dumps(adapter)])
    try:
        yield server
    finally:
        server.stop()


def _await(server: LmcacheServer, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not is_so():
        assert time.monotonic() < end, server.log_tail()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(0.1)
            raise AssertionError(f"LMCache's server has ended: {server.log_tail()}")


def _statistics(server: LmcacheServer) -> dict[str, Any]:
    """Of Quire's store, out of the server's status."""

    def find(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            if "fetched_tokens" in value:
                yield value
            for each in value.values():
                yield from find(each)
        elif isinstance(value, list):
            for each in value:
                yield from find(each)

    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/status") as answer:
        (found,) = find(json.load(answer))
    return found


def _run(model: str, server: LmcacheServer) -> Run:
    """Another process of vLLM each time."""
    return run(model, [PROMPT], None, transfer=server.connector())


def _flip_one_bit(file: Path) -> None:
    """In what the file has behind its header."""
    data = bytearray(file.read_bytes())
    data[int.from_bytes(data[12:16], "little") + 100] ^= 1
    file.write_bytes(data)


def test_a_prompt_is_found_by_another_server_and_damage_is_a_miss(
    model: str, own: Run, tmp_path: Path
) -> None:
    kv = tmp_path / "kv"

    def files() -> list[Path]:
        return sorted(kv.rglob("*.qkv"), key=lambda file: file.stat().st_mtime_ns)

    with lmcache_server(kv, tmp_path / "first.log") as server:
        cold = _run(model, server)
        assert (cold.cached, cold.answers) == ([0], own.answers[:1])
        _await(server, lambda: len(files()) == _BORDER // 256)

    with lmcache_server(kv, tmp_path / "second.log") as server:
        again = _run(model, server)
        assert (again.cached, again.answers) == ([_BORDER], own.answers[1:])
        assert _statistics(server)["fetched_tokens"] == len(files()) * _TOKENS

    for file in files():
        _flip_one_bit(file)
    with lmcache_server(kv, tmp_path / "third.log") as server:
        damaged = _run(model, server)
        assert (damaged.cached, damaged.answers) == ([0], own.answers[:1])
        found = _statistics(server)
        assert (found["fetched_tokens"], found["tiers"]["disk"]["corrupt"] > 0) == (0, True)
