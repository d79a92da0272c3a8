"""bench/bench: measures Quire and its peers in turn, in rounds of the same run.

usage: bench/bench [options] [CASE...]      CASE: a name as --list shows it, or a pattern (decode/*)

Without cases everything is measured that does not take long by itself. docs/benchmarks.md says how
it is measured and what came out.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import datetime
import fnmatch
import http.client
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import cases as case_list
import measure
import models
import numpy as np
import report
import serving
from cases import Case, Side
from serving_workers import LlamaServing, quire_server, vllm_server
from workers import (
    LineWorker,
    LlamaBench,
    LlamaReuse,
    LlamaServer,
    LmcacheServer,
    PairWorker,
    Patience,
    Process,
    RedisServer,
    StorePairWorker,
    UcxPerftest,
    Worker,
    WorkerError,
)

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "bench"
RESULTS = HERE / "results"
_QUICK_SECONDS = 600
# When a quick run begins no case any more. What is then under way ends with its time.
_QUICK_LAST_BEGIN = 480
# To end the children and write the results.
_QUICK_RESERVE = 15
# A child that takes longer hangs: the longest preparation is that of 131 000 tokens of context.
_PATIENCE_SECONDS = 7200.0
_GIB = 1 << 30
_PEER_STORES = ("rocksdb", "lmdb")
# Workers that are told how long to run.
_TIMED_WORKERS = ("quire", "vllm-kernel", "tvm-cache")
# A vLLM that is asked earlier prompts again.
_VLLM_AGAIN = (
    *("vllm-quire-ram", "vllm-quire-disk", "vllm-quire-redis"),
    *("vllm-lmcache", "vllm-hit", "vllm-cold"),
)
# Engines with room for one case.
_MADE_FOR_A_CASE = (
    *("quire-cold", "quire-disk", "quire-pages", "quire-redis"),
    *("quire-pair", "quire-redis-pair", "quire-apart", "quire-together"),
)
# Sides stand still while another one works: a connection outlives that.
_CONNECTION = {"peer_dead_after": 86400}
_SERVING_WORKERS = ("quire-serve", "quire-loop", "llama-serve", "vllm-serve")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.results:
        print("\n".join(report.all_lines(RESULTS)))
        return 0
    machine = Machine(options.threads)
    selected = select(options, machine)
    if options.list:
        for case in selected:
            marks = [mark for mark, on in (("quick", case.quick), ("long", case.long)) if on]
            print(f"({case.group}) {case.name}" + (f"  [{', '.join(marks)}]" if marks else ""))
        return 0
    if not selected:
        print("no case has such a name; bench/bench --list shows them", file=sys.stderr)
        return 2
    # Ended from outside, too, the children are ended and what was measured is written.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    run = Run(options, machine, selected)
    try:
        run.all()
    finally:
        run.workers.close_all()
        run.write()
    return 1 if run.failed else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/bench", description="Measures Quire beside its peers, in rounds of one run."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names or patterns; see --list")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument(
        "--quick", action="store_true", help="some cases, fewer rounds: at most 10 minutes"
    )
    parser.add_argument("--long", action="store_true", help="also the cases that take very long")
    parser.add_argument("--smoke", action="store_true", help="tiny cases, to see that all works")
    parser.add_argument(
        "--group", action="append", choices=sorted(case_list.GROUPS), help="only this group"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 5; quick: 3")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of a side in a round of attention or planning"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="default: one per core",
    )
    parser.add_argument("--no-peers", action="store_true", help="Quire alone")
    parser.add_argument(
        "--peer", action="append", metavar="NAME", help="only this peer (vLLM, llama.cpp, TVM, ...)"
    )
    parser.add_argument(
        "--vllm-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of vLLM's engine: where the CPU has no bfloat16 it may be faster in float32",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: build/bench/DATE.json")
    parser.add_argument(
        "--update-docs",
        action="store_true",
        help="record the rows in bench/results and show them in docs/benchmarks.md",
    )
    parser.add_argument(
        "--results", action="store_true", help="print the newest recorded rows and end"
    )
    options = parser.parse_args(arguments)
    short = options.quick or options.smoke
    options.rounds = options.rounds or (1 if options.smoke else 3 if options.quick else 5)
    if options.seconds is None:
        options.seconds = 0.0 if options.smoke else 0.25 if short else 0.8
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    if options.smoke and options.update_docs:
        parser.error("figures of --smoke mean nothing: they are not recorded")
    return options


def select(options: argparse.Namespace, machine: Machine) -> list[Case]:
    if options.smoke:
        cases = case_list.smoke_cases(options.threads)
        if (peers_folder() / "vllm" / "ready").exists():
            cases.append(case_list.connector_case(models.describe("embedded"), 300, quick=True))
        return cases
    chosen = []
    for case in case_list.all_cases(machine.cache_bytes, options.threads):
        if options.group and case.group not in options.group:
            continue
        if options.cases:
            # A name stands for itself, whatever brackets are in it.
            wanted = any(
                case.name == name or fnmatch.fnmatch(case.name, name) for name in options.cases
            )
        elif options.quick:
            wanted = case.quick
        else:
            wanted = options.list or options.long or not case.long
        if wanted:
            chosen.append(case)
    return chosen


class Machine:
    """What is said about the machine in results."""

    def __init__(self, threads: int) -> None:
        self.cpu = _cpu_name()
        self.cores = os.cpu_count() or 1
        self.threads = threads
        self.cache_bytes = _last_cache_bytes()
        self.memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def title(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return (
            f"{self.cpu}, {self.cores} cores, {self.cache_bytes / 2**20:.0f} MiB last cache, "
            f"{self.memory_bytes / _GIB:.0f} GiB; {threads}"
        )

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"system": platform.platform(), "python": platform.python_version()}


def _cpu_name() -> str:
    """Its name; a virtual machine may hide the rest of it, and then family and model tell."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    cpu = fields.get("model name", platform.machine())
    if any(character.isdigit() for character in cpu) or "cpu family" not in fields:
        return cpu
    return f"{cpu} of family {fields['cpu family']}, model {fields['model']}"


def _last_cache_bytes() -> int:
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=32 << 20)


def peers_folder() -> Path:
    """Where bench/setup has built the peers."""
    return Path(os.environ.get("QUIRE_PEERS") or Path.home() / ".cache" / "quire-peers")


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 0


def take_memory_from_the_host(count: int) -> None:
    """Writes to so many bytes, at most half of what is free, and gives them back. The host of a
    virtual machine finds memory when it is first written to, which takes longer than a start; else
    the first side would pay for what the next one gets from it."""
    np.ones(min(count, available_bytes() // 2), np.uint8)


class Unavailable(RuntimeError):
    """A side cannot take part, and why."""


class Workers:
    """The child processes that are alive. One kind of worker serves many cases; what the next case
    does not use is closed, so that its memory is free."""

    def __init__(
        self,
        options: argparse.Namespace,
        selected: list[Case],
        build: Path,
        logs: Path,
        patience: Patience,
    ) -> None:
        self._threads = options.threads
        self._vllm_dtype = options.vllm_dtype
        self._selected = selected
        self._build = build
        self._logs = logs
        self._patience = patience
        self._peers = peers_folder()
        self._alive: dict[tuple[Any, ...], Worker] = {}
        self._missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._redis: RedisServer | None = None
        self.quire = self._quire()
        self._has_bf16 = bool(self.quire.ask({"do": "info"})["bf16_dot"])

    def _quire(self) -> LineWorker:
        return LineWorker(
            [str(self._build / "bench_worker")], self._logs / "quire.log", self._patience
        )

    def key(self, side: Side, case: Case) -> tuple[Any, ...]:
        if side.worker in _TIMED_WORKERS:
            return (side.worker,)
        if side.worker == "llama-server" or side.worker in _SERVING_WORKERS:
            return (side.worker, case.model, case.sequences, case.length)
        if side.worker in _MADE_FOR_A_CASE:
            return (side.worker, case.model, case.length)
        return (side.worker, case.model)

    def keep_only(self, keys: set[tuple[Any, ...]]) -> None:
        for key in [key for key in self._alive if key not in keys]:
            self._alive.pop(key).close()

    @contextlib.contextmanager
    def alone(self, worker: Worker) -> Iterator[None]:
        """No other one works meanwhile, not even at waiting."""
        others = [each for each in self._alive.values() if each is not worker]
        paused = [each for each in others if isinstance(each, Process)]
        for each in paused:
            each.pause()
        try:
            yield
        finally:
            for each in paused:
                each.resume()

    def get(self, side: Side, case: Case) -> Worker:
        """Raises Unavailable."""
        key = self.key(side, case)
        if key[0] == "quire":
            return self.quire
        if key[0] in self._missing:
            raise Unavailable(self._missing[key[0]])
        if key not in self._alive:
            try:
                self._alive[key] = self._start(side.worker, case)
            except WorkerError as error:
                raise Unavailable(str(error)) from None
        self.versions[side.worker] = self._alive[key].version
        return self._alive[key]

    def places(self, side: Side) -> dict[str, str]:
        """Where a side that keeps chunks may do so: an empty folder of its own, and a Redis."""
        if side.request.get("kind") != "chunks":
            return {}
        directory = tempfile.mkdtemp(dir=self._scratch())
        endpoint = ""
        if side.request["place"] in ("redis", "hiredis"):
            endpoint = self._redis_endpoint()
        return {"directory": directory, "redis": endpoint}

    def _redis_endpoint(self) -> str:
        if self._redis is None:
            log = self._logs / "redis.log"
            self._redis = RedisServer(self._scratch(), log, self._patience)
        return self._redis.endpoint

    def _scratch(self) -> Path:
        if self._folder is None:
            (ROOT / "build" / "bench").mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=ROOT / "build" / "bench")
        return Path(self._folder.name)

    def lost(self, side: Side, case: Case) -> None:
        """After a failure the process is not used again."""
        if side.worker == "quire":
            self.quire.close()
            self.quire = self._quire()
        elif worker := self._alive.pop(self.key(side, case), None):
            worker.close()

    def close_all(self) -> None:
        self.keep_only(set())
        self.quire.close()
        if self._redis is not None:
            self._redis.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self, kind: str, case: Case) -> Worker:
        log = self._logs / f"{kind}.log"
        threads = self._threads
        if kind == "vllm-kernel":
            start = {"do": "info", "threads": threads}
            return LineWorker(
                [self._vllm(), str(HERE / "vllm_kernel_worker.py")], log, self._patience, start
            )
        if kind == "vllm-engine":
            return self._vllm_engine(log, self._load(case))
        if kind in _VLLM_AGAIN:
            return self._vllm_again(kind, log, case)
        if kind == "tvm-cache":
            return self._tvm_cache(log)
        if kind in ("quire-hf", "transformers"):
            return self._transformers(kind, log, case)
        if kind == "quire-engine":
            return self._quire_engine(log, self._load(case))
        if kind in ("quire-plain", "quire-ngram"):
            guesses = {"speculate": "ngram" if kind == "quire-ngram" else "none"}
            return self._quire_engine(log, self._load(case, alone=True) | guesses)
        if kind in ("quire-disk", "quire-cold", "quire-pages", "quire-redis"):
            return self._quire_engine(log, self._load(case, alone=True) | self._tier(kind))
        if kind.startswith("quire-blend-"):
            return self._blends(kind.removeprefix("quire-blend-"), log, case)
        if kind == "quire-pair":
            return self._pair(log, self._load(case, alone=True) | {"prefix_cache": False})
        if kind == "quire-redis-pair":
            return self._redis_pair(log, self._load(case, alone=True))
        if kind in ("quire-apart", "quire-together"):
            return self._on_two_cores(log, self._load(case, alone=True), kind == "quire-apart")
        if kind in _SERVING_WORKERS:
            return self._serving(kind, log, case)
        if kind == "llama-server":
            return self._llama_server(log, case)
        if kind == "llama-reuse":
            return self._llama_server(log, case, LlamaReuse)
        if kind in ("llama-bench", "llama-batched-bench"):
            return self._llama_bench(kind, log, case)
        if kind.endswith("-plain"):
            return self._llama_bench(kind.removesuffix("-plain"), log, case, repack=False)
        if kind == "quire-start":
            packed = models.packed_folder(case.model, self._peers / "models")
            load = self._load(case, alone=True) | {"model": str(packed)}
            return QuireStart(lambda: self._quire_engine(log, load), case)
        if kind == "llama-start":
            return LlamaStart(lambda: self._llama_server(log, case), case)
        if kind == "quire-serve-start":
            return ServerStart(lambda: self._serving("quire-serve", log, case), case)
        if kind == "llama-serve-start":
            return ServerStart(lambda: self._serving("llama-serve", log, case), case)
        if kind == "ucx-perftest":
            return UcxPerftest(self._ucx_perftest(), log, self._patience)
        if kind in ("mooncake", "nixl"):
            return self._transfer_peer(kind, log)
        raise AssertionError(kind)

    def _vllm_engine(self, log: Path, load: dict[str, Any]) -> LineWorker:
        return LineWorker(
            [self._vllm(), str(HERE / "vllm_engine_worker.py")],
            log,
            self._patience,
            load | {"dtype": self._vllm_dtype},
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        )

    def _vllm_again(self, kind: str, log: Path, case: Case) -> LineWorker:
        """A vLLM that finds an earlier prompt in one place alone, or nowhere."""
        load = self._load(case, alone=True)
        if kind == "vllm-lmcache":
            return self._vllm_with_lmcache(log, load)
        if kind == "vllm-quire-ram":
            return self._vllm_engine(log, load | _quire_connector({"ram_bytes": _GIB}))
        if kind in ("vllm-hit", "vllm-cold"):
            return self._vllm_engine(log, load | {"prefix_cache": kind == "vllm-hit"})
        if kind == "vllm-quire-disk":
            tier = {"directory": tempfile.mkdtemp(dir=self._scratch())}
        else:
            tier = {"redis": self._redis_endpoint()}
        load |= _quire_connector(tier | {"ram_bytes": 0})
        # What is measured is what this one leaves: prompts are the same in each process.
        before = self._vllm_engine(log, load)
        before.prepare(case.sides[0].name, case.sides[0].request)
        before.ask({"do": "end"})
        before.close()
        return self._vllm_engine(log, load)

    def _vllm_with_lmcache(self, log: Path, load: dict[str, Any]) -> LineWorker:
        """LMCache's server keeps the chunks, in its own RAM. Its connector holds blocks beyond the
        end of a request, so that vLLM's own prefix cache could not be emptied: there is none."""
        folder = self._peers / "lmcache"
        if not (folder / "ready").exists():
            self._no("vllm-lmcache", reason="no LMCache: bench/setup lmcache installs it")
        log_of_server = log.with_suffix(".server.log")
        server = LmcacheServer(folder / "bin" / "lmcache", log_of_server, self._patience)
        command = [str(folder / "bin" / "python"), str(HERE / "vllm_engine_worker.py")]
        own = {"dtype": self._vllm_dtype, "prefix_cache": False, "connector": server.connector()}
        return PairWorker(server, command, log, self._patience, load | own)

    def _quire_engine(self, log: Path, load: dict[str, Any]) -> LineWorker:
        return LineWorker(
            [sys.executable, str(HERE / "quire_engine_worker.py")], log, self._patience, load
        )

    def _pair(self, log: Path, load: dict[str, Any]) -> LineWorker:
        """An engine all of whose prompts another process computes, with as many threads."""
        helper, peers = self._prefill_process(log, load)
        command = [sys.executable, str(HERE / "quire_engine_worker.py")]
        return PairWorker(helper, command, log, self._patience, load | peers)

    def _prefill_process(
        self, log: Path, load: dict[str, Any]
    ) -> tuple[LineWorker, dict[str, Any]]:
        """One that computes prompts, and the options of an engine that has all of them from it."""
        endpoint = f"unix:{tempfile.mkdtemp(dir=self._scratch())}/socket"
        helper = self._quire_engine(
            log.with_suffix(".prefill.log"), load | _CONNECTION | {"listen": endpoint}
        )
        peers = {"prefill_from": [endpoint], "prefill_remote": "always", "on_peer_loss": "fail"}
        return helper, peers | {"prefill_timeout": 3600} | _CONNECTION

    def _redis_pair(self, log: Path, load: dict[str, Any]) -> LineWorker:
        """An engine that finds each prompt in a Redis, where another one has put it."""
        load |= {"prefix_cache": False, "kv_redis": self._redis_endpoint()}
        helper = self._quire_engine(log.with_suffix(".prefill.log"), load)
        command = [sys.executable, str(HERE / "quire_engine_worker.py")]
        return StorePairWorker(helper, command, log, self._patience, load)

    def _on_two_cores(self, log: Path, load: dict[str, Any], apart: bool) -> LineWorker:
        """Clients of an engine that has one core, and one that computes all its prompts on another
        one; or of an engine that has both cores."""
        cores = sorted(os.sched_getaffinity(0))
        here, there = cores[0], cores[len(cores) // 2]
        own = {name: value for name, value in load.items() if name != "length"}
        command = [sys.executable, str(HERE / "quire_loop_worker.py")]
        if not apart:
            own |= {"threads": 2, "cores": [here, there]}
            return LineWorker(command, log, self._patience, own)
        helper, peers = self._prefill_process(log, load | {"threads": 1, "cores": [there]})
        own |= {"threads": 1, "cores": [here]}
        return PairWorker(helper, command, log, self._patience, own | peers)

    def _blends(self, place: str, log: Path, case: Case) -> LineWorker:
        directory = tempfile.mkdtemp(dir=self._scratch()) if place == "disk" else None
        command = [sys.executable, str(HERE / "quire_blend_worker.py")]
        start = self._load(case, alone=True) | {"place": place, "directory": directory}
        return LineWorker(command, log, self._patience, start)

    def _tvm_cache(self, log: Path) -> LineWorker:
        if importlib.util.find_spec("tvm") is None:
            self._no("tvm-cache", reason="no apache-tvm: requirements/test.txt has it")
        return LineWorker(
            [sys.executable, str(HERE / "tvm_cache_worker.py")],
            log,
            self._patience,
            {"do": "info", "threads": self._threads},
            # Pages that nobody wrote to would be read from one page of zeros, which is faster.
            env=os.environ | {"MALLOC_PERTURB_": "211"},
        )

    def _transformers(self, kind: str, log: Path, case: Case) -> LineWorker:
        if importlib.util.find_spec("transformers") is None:
            reason = "no transformers: requirements/test.txt has it"
            self._no("quire-hf", "transformers", reason=reason)
        start = {
            "do": "load",
            "model": str(models.folder(case.model, self._peers / "models")),
            "threads": self._threads,
            "ours": kind == "quire-hf",
        }
        command = [sys.executable, str(HERE / "hf_cache_worker.py")]
        return LineWorker(command, log, self._patience, start)

    def _tier(self, kind: str) -> dict[str, Any]:
        """Options of an engine that finds earlier prompts in one place alone, or nowhere."""
        if kind == "quire-disk":
            return {"prefix_cache": False, "kv_dir": tempfile.mkdtemp(dir=self._scratch())}
        if kind == "quire-redis":
            return {"prefix_cache": False, "kv_redis": self._redis_endpoint()}
        return {"prefix_cache": kind == "quire-pages"}

    def _serving(self, kind: str, log: Path, case: Case) -> Worker:
        model = models.served_folder(case.model, self._peers / "models")
        vocab_size = models.describe(case.model).vocab_size
        load = self._load(case, alone=True) | {"model": str(model)}
        if kind == "quire-serve":
            return quire_server(model, log, load, vocab_size, self._patience)
        if kind == "quire-loop":
            del load["length"]
            command = [sys.executable, str(HERE / "quire_loop_worker.py")]
            return LineWorker(command, log, self._patience, load)
        if kind == "llama-serve":
            return self._llama_server(log, case, LlamaServing)
        python, dtype = self._vllm(), self._vllm_dtype
        return vllm_server(python, model, log, load, dtype, vocab_size, self._patience)

    def _llama_server(
        self, log: Path, case: Case, kind: type[LlamaServer] = LlamaServer
    ) -> LlamaServer:
        return kind(
            self._llama("llama-server"),
            self._gguf(case),
            log,
            threads=self._threads,
            slots=case.sequences,
            length=case.length,
            vocab_size=models.describe(case.model).vocab_size,
            patience=self._patience,
        )

    def _load(self, case: Case, alone: bool = False) -> dict[str, Any]:
        """An engine is made once for all cases of its model, as large as the largest one needs."""
        same = (
            [case]
            if alone
            else [c for c in self._selected if c.model == case.model and c.group == "d"]
        )
        model = models.describe(case.model)
        sequences = max(c.sequences for c in same)
        # Two pages of 256 tokens more for each sequence: the last one is not full.
        room = 0 if alone else 512 * sequences
        tokens = max(c.tokens for c in same) + room
        return {
            "do": "load",
            "model": str(models.source(case.model, self._peers / "models")),
            "threads": self._threads,
            "kv_bytes": tokens * model.kv_bytes_per_token,
            "sequences": sequences,
            "length": max(c.length for c in same),
        }

    def _gguf(self, case: Case) -> Path:
        """A quantised model's own file; else in the type that llama.cpp computes faster with on
        this CPU."""
        if models.describe(case.model).is_quantised:
            return models.quantised_file(case.model, self._peers / "models")
        dtype: Literal["bf16", "f16"] = "bf16" if self._has_bf16 else "f16"
        return models.gguf_file(case.model, self._peers / "models", dtype)

    def _vllm(self) -> str:
        if not (self._peers / "vllm" / "ready").exists():
            self._no(
                "vllm-kernel",
                "vllm-engine",
                "vllm-serve",
                *_VLLM_AGAIN,
                reason="no vLLM: bench/setup vllm builds it",
            )
        return str(self._peers / "vllm" / "bin" / "python")

    def _llama_bench(self, name: str, log: Path, case: Case, repack: bool = True) -> LlamaBench:
        binary, model = self._llama(name), self._gguf(case)
        patience = self._patience
        return LlamaBench(
            binary, model, log, threads=self._threads, patience=patience, repack=repack
        )

    def _llama(self, name: str) -> Path:
        binary = self._peers / "llama" / "bin" / name
        if not binary.exists():
            reason = "no llama.cpp: bench/setup llama builds it"
            self._no(name, "llama-serve", "llama-reuse", reason=reason)
        return binary

    def _ucx_perftest(self) -> str:
        binary = shutil.which("ucx_perftest")
        if binary is None:
            self._no("ucx-perftest", reason="no ucx_perftest: bench/setup ucx installs it")
        return str(binary)

    def _transfer_peer(self, kind: str, log: Path) -> LineWorker:
        folder = self._peers / kind
        if not (folder / "ready").exists():
            self._no(kind, reason=f"no {kind}: bench/setup {kind} installs it")
        command = [str(folder / "bin" / "python"), str(HERE / "transfer_peer_worker.py"), kind]
        return LineWorker(command, log, self._patience, {"do": "info"})

    def _no(self, *kinds: str, reason: str) -> None:
        for kind in kinds:
            self._missing[kind] = reason
        raise Unavailable(reason)


def _quire_connector(options: dict[str, Any]) -> dict[str, Any]:
    """What vllm_engine_worker.py is told to run with quire.vllm.QuireConnector."""
    return {
        "connector": {
            "kv_connector": "QuireConnector",
            "kv_connector_module_path": "quire.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options,
        }
    }


class QuireStart:
    """Starts Quire's Python process anew in each round."""

    version = ""

    def __init__(self, start: Any, case: Case) -> None:
        self._start, self._case = start, case

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        """The files come into the page cache, and the bytecode of a checkout to where an
        installation has it."""
        compileall.compile_dir(HERE.parent / "python" / "quire", quiet=1)
        self.run(key, request)

    def _take_memory(self) -> None:
        weights = models.describe(self._case.model).step_bytes(0)
        take_memory_from_the_host(2 * int(weights) + _GIB)

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        self._take_memory()
        begin = time.perf_counter()
        worker = self._start()
        seconds = getattr(worker, "start_seconds", time.perf_counter() - begin)
        self.version = worker.version
        try:
            before = sum(worker.memory().values())
            # The context is full but for the answer.
            worker.run(key, {"kind": "prefill", "tokens": request["context"] - 8})
            after = sum(worker.memory().values())
        finally:
            worker.close()
        return {
            "start": [seconds],
            "memory at start": [float(before)],
            "memory, context full": [float(after)],
        }

    def drop(self, key: str) -> None:
        """It has ended."""

    def settle(self) -> None:
        """It has ended."""

    def close(self) -> None:
        """It has ended."""


class LlamaStart(QuireStart):
    """The same with llama-server, which says itself how long it took."""


class ServerStart(QuireStart):
    """Starts a server anew in each round, until it answers; then come connections that stay."""

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        self._take_memory()
        server = self._start()
        self.version = server.version
        try:

            def memory() -> int:
                return sum(server.memory().values())

            samples = {
                "start": [float(server.start_seconds)],
                "memory at start": [float(memory())],
            }
            if request["connections"]:
                samples |= serving.idle_connections(server.port, memory, request["connections"])
        except (OSError, http.client.HTTPException) as error:
            raise WorkerError(f"{key}: {error!r}; {server.log_tail()}") from None
        finally:
            server.close()
        return samples


class Run:
    """One call of bench/bench."""

    def __init__(self, options: argparse.Namespace, machine: Machine, selected: list[Case]) -> None:
        self._options = options
        self._machine = machine
        self._selected = selected
        self._begin = time.monotonic()
        self._date = datetime.datetime.now(datetime.UTC)
        self._results: list[dict[str, Any]] = []
        self._rows: dict[str, list[measure.Row]] = {}
        self._case: Case | None = None
        self._said: set[str] = set()
        self.failed = False
        results = ROOT / "build" / "bench"
        stamp = self._date.strftime("%Y%m%d-%H%M%S")
        self._json = options.json or results / f"{stamp}.json"
        build = Path(
            os.environ.get("QUIRE_BENCH_WORKER_DIR") or ROOT / "build" / "release" / "bench"
        )
        # vLLM takes one thread for itself unless it is told; the children inherit this.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        logs = self._json.with_suffix(".logs")
        self.workers = Workers(options, selected, build, logs, self._patience)
        self._probe_bytes = (32 << 20) if options.smoke else _GIB
        self._info = self.workers.quire.ask({"do": "info"})
        self._single = self._probe(repetitions=3, single=True)

    def all(self) -> None:
        options = self._options
        print(f"{self._machine.title()}; kernels {self._info['kernel_path']}")
        print(
            f"{len(self._selected)} cases, {options.rounds} rounds each; {self._bounds()}",
            flush=True,
        )
        for case in self._selected:
            if options.quick and time.monotonic() - self._begin > _QUICK_LAST_BEGIN:
                self._say(
                    f"{case.name}: not measured: --quick ends after {_QUICK_SECONDS // 60} minutes"
                )
                continue
            try:
                self._measure(case)
            except (WorkerError, Unavailable) as error:
                self.failed = True
                self._say(f"{case.name}: not measured: {error}")

    def _patience(self) -> float:
        if not self._options.quick:
            return _PATIENCE_SECONDS
        return max(1.0, self._begin + _QUICK_SECONDS - _QUICK_RESERVE - time.monotonic())

    def _bounds(self) -> str:
        figures = {
            name: sorted(values)[len(values) // 2] * 1e-9 for name, values in self._single.items()
        }
        text = (
            f"memory {figures['read_1']:.1f} GB/s (1 thread), {figures['read_n']:.1f} (all); "
            f"float32 {figures['f32_1']:.0f}, {figures['f32_n']:.0f} GFLOP/s"
        )
        return text + (f"; bfloat16 {figures['bf16_n']:.0f}" if "bf16_n" in figures else "")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _measure(self, case: Case) -> None:
        self._case = case
        sides = [side for side in case.sides if self._takes_part(side)]
        self.workers.keep_only({self.workers.key(side, case) for side in sides})
        needed = case.side_bytes * len(sides)
        # Smoke cases are so small that they run beside whatever else does.
        if not self._options.smoke and needed > available_bytes() - 2 * _GIB:
            self._say(f"{case.name}: not measured: needs {needed / _GIB:.1f} GiB of free memory")
            return
        try:
            sides = [side for side in sides if self._prepare(side, case)]
            measured = measure.measure(case, sides, self._options.rounds, self)
        except WorkerError:
            for side in sides:  # which of them it was cannot be known from here
                self.workers.lost(side, case)
            raise
        for side in sides:
            self._drop(side, case)
        rows = measure.rows(case, measured)
        for row in rows:
            print(report.line(row), flush=True)
        self._rows.setdefault(case.group, []).extend(rows)
        self._results.append(measure.as_json(case, measured, rows))

    def _takes_part(self, side: Side) -> bool:
        if side.request.get("place") in _PEER_STORES:
            return self._is_wanted(side) and self._has_store(side)
        if side.request.get("way") == "ucx" and not self._info["ucx"]:
            self._say_once(f"{side.name}: no libquire_ucx.so: bench/setup ucx; measured without it")
            return False
        # Quire behind TVM's names needs TVM.
        return side.worker.startswith("quire") or self._is_wanted(side)

    def _is_wanted(self, side: Side) -> bool:
        return not self._options.no_peers and (
            not self._options.peer or side.name in self._options.peer
        )

    def _has_store(self, side: Side) -> bool:
        """Whether Quire's worker, in which it runs, was built with it."""
        if side.request["place"] in self._info["peer_stores"]:
            return True
        self._say_once(
            f"{side.name}: no library when the benchmark was built: bench/setup stores installs "
            "it; measured without it"
        )
        return False

    def _prepare(self, side: Side, case: Case) -> bool:
        try:
            worker = self.workers.get(side, case)
            worker.prepare(side.name, side.request | self.workers.places(side))
            return True
        except (WorkerError, Unavailable) as error:
            if side.name == "Quire":
                raise
            text = f"{side.name} ({side.worker}): {error}"
            if isinstance(error, WorkerError):
                self.workers.lost(side, case)
                text = f"{case.name}: {text}"
            self._say_once(f"{text}; measured without it")
            return False

    def _drop(self, side: Side, case: Case) -> None:
        try:
            self.workers.get(side, case).drop(side.name)
        except (WorkerError, Unavailable):
            self.workers.lost(side, case)

    # ---- measure.Runner

    def run(self, side: Side) -> measure.Samples:
        assert self._case is not None
        worker = self.workers.get(side, self._case)
        limits: dict[str, Any] = {}
        if side.worker in _TIMED_WORKERS:
            limits = {
                "seconds": self._options.seconds,
                "min_calls": 1 if self._options.smoke else 3,
            }
        request = side.request if side.worker not in _TIMED_WORKERS else {}
        with self.workers.alone(worker):
            samples = worker.run(side.name, request | limits)
            worker.settle()
        return samples

    def probe(self, single: bool) -> measure.Probe:
        return self._probe(repetitions=1, single=single)

    def _probe(self, repetitions: int, single: bool) -> measure.Probe:
        return self.workers.quire.ask(
            {
                "do": "probe",
                "threads": self._options.threads,
                "bytes": self._probe_bytes,
                "repetitions": repetitions,
                "single": single,
            }
        )

    # ---- Results

    def write(self) -> None:
        self._json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "date": self._date.isoformat(timespec="seconds"),
            "machine": self._machine.as_json(),
            "versions": self.workers.versions | {"quire": _commit(), "worker": self._info},
            "options": {name: str(value) for name, value in vars(self._options).items()},
            "bounds": self._single,
            "cases": self._results,
        }
        self._json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"results: {self._json}")
        if self._options.update_docs:
            self._record()

    def _record(self) -> None:
        date, commit = self._date.strftime("%Y-%m-%d"), _commit()
        rows = [
            report.Recorded(row, group, date, commit)
            for group, group_rows in self._rows.items()
            for row in group_rows
        ]
        report.record(RESULTS, self._machine.title(), rows)
        page = ROOT / "docs" / "benchmarks.md"
        report.update(page, RESULTS)
        print(f"recorded: {report.results_file(RESULTS, self._machine.title())}; table: {page}")


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
