"""Bytes that one process writes into the memory of another one, over Mooncake's TCP or NIXL's UCX,
in blocks. argv[1]: mooncake or nixl; argv[2] "source" or
"target": one of the two. They live for one round: NIXL's threads spin while nothing is sent."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import subprocess
import sys
import time
import zlib
from typing import Any, Protocol

import line_protocol

_HOST = "127.0.0.1"
_CALLS = 3  # a round


class Memory:
    """Pages of this process alone, all of them written to."""

    def __init__(self, size: int, fill: int) -> None:
        self.bytes = mmap.mmap(-1, size)
        self.bytes[:] = bytes([fill]) * size
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def digest(self) -> int:
        return zlib.crc32(self.bytes)

    def blocks(self, address: int, block_bytes: int) -> list[tuple[int, int]]:
        """(address, size) of the blocks of as much memory that begins there."""
        starts = range(0, self.size, block_bytes)
        return [(address + at, min(block_bytes, self.size - at)) for at in starts]


class Engine(Protocol):
    """One end."""

    def share(self) -> dict[str, Any]:
        """What the other end must know to write here."""

    def reach(self, shared: dict[str, Any]) -> None:
        """Opens the way to an end that has shared this. "block_bytes" of it: as much at a time."""

    def write(self) -> None:
        """Writes all, and returns when it is there."""


class Mooncake:
    package = "mooncake-transfer-engine-non-cuda"

    def __init__(self, memory: Memory) -> None:
        from mooncake.engine import TransferEngine

        self._memory = memory
        self._engine = TransferEngine()
        _require(self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
        _require(self._engine.register_memory(memory.address, memory.size) == 0, "register_memory")

    def share(self) -> dict[str, Any]:
        return {
            "name": f"{_HOST}:{self._engine.get_rpc_port()}",
            "address": self._memory.address,
        }

    def reach(self, shared: dict[str, Any]) -> None:
        block_bytes = shared["block_bytes"]
        here = self._memory.blocks(self._memory.address, block_bytes)
        there = self._memory.blocks(shared["address"], block_bytes)
        self._call = (
            shared["name"],
            [address for address, _ in here],
            [address for address, _ in there],
            [size for _, size in here],
        )

    def write(self) -> None:
        _require(self._engine.batch_transfer_sync_write(*self._call) == 0, "a write")


class Nixl:
    package = "nixl-cu12"

    def __init__(self, memory: Memory) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._memory = memory
        self._agent = nixl_agent(sys.argv[2], nixl_agent_config(backends=["UCX"]))
        whole = [(memory.address, memory.size, 0, "")]
        self._registered = self._agent.register_memory(whole, "DRAM")

    def share(self) -> dict[str, Any]:
        metadata: bytes = self._agent.get_agent_metadata()
        return {"metadata": metadata.hex(), "address": self._memory.address}

    def reach(self, shared: dict[str, Any]) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(shared["metadata"]))
        here, there = (
            self._agent.get_xfer_descs(
                [(at, size, 0) for at, size in self._memory.blocks(address, shared["block_bytes"])],
                "DRAM",
            )
            for address in (self._memory.address, shared["address"])
        )
        self._transfer = self._agent.initialize_xfer("WRITE", here, there, name)

    def write(self) -> None:
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
        _require(state == "DONE", f"a write ended as {state}:")


_ENGINES: dict[str, Any] = {"mooncake": Mooncake, "nixl": Nixl}


def _require(done: bool, what: str) -> None:
    if not done:
        raise RuntimeError(f"{what} failed")


# ---- One of the two processes

_end: dict[str, Any] = {}


def share(size: int) -> dict[str, Any]:
    """The target's memory."""
    _end["memory"] = Memory(size, 0)
    _end["engine"] = _ENGINES[sys.argv[1]](_end["memory"])
    shared: dict[str, Any] = _end["engine"].share()
    return shared


def reach(shared: dict[str, Any]) -> dict[str, Any]:
    """The source's memory, and its way to the target's."""
    _end["memory"] = Memory(shared["size"], 0x3C)
    _end["engine"] = _ENGINES[sys.argv[1]](_end["memory"])
    _end["engine"].reach(shared)
    return {}


def write() -> dict[str, Any]:
    begin = time.perf_counter()
    _end["engine"].write()
    return {"seconds": time.perf_counter() - begin}


def digest() -> dict[str, Any]:
    return {"digest": _end["memory"].digest()}


# ---- The process that starts them


class End:
    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, sys.argv[1], name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "gone"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def info() -> dict[str, Any]:
    package = _ENGINES[sys.argv[1]].package
    return {"version": f"{package} {importlib.metadata.version(package)}"}


def prepare(key: str, kind: str, bytes: int, message_bytes: int) -> dict[str, Any]:
    """Whether it works here."""
    run(key, kind, bytes, message_bytes)
    return {}


def run(key: str, kind: str, bytes: int, message_bytes: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        ends = [End("target"), End("source")]
        for end in ends:
            stack.callback(end.close)
        target, source = ends
        own = {"size": bytes, "block_bytes": message_bytes}
        source.ask(do="reach", shared=target.ask(do="share", size=bytes) | own)
        source.ask(do="write")  # connects
        calls = [source.ask(do="write")["seconds"] for _ in range(_CALLS)]
        same = target.ask(do="digest") == source.ask(do="digest")
        _require(same, "the comparison of both memories")
    return {"samples": {"call": calls}}


def drop(key: str) -> dict[str, Any]:
    return {}


if __name__ == "__main__":
    if sys.argv[2:]:
        calls = {"share": share, "reach": reach, "write": write, "digest": digest}
    else:
        calls = {"info": info, "prepare": prepare, "run": run, "drop": drop}
    line_protocol.serve(calls)
