"""The child processes that measure. They live as long as they are needed, so that start-up is in no
figure, and work one at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import generation

# CPU time that an idle process may take between two looks, in clock ticks, and how long to wait
# for it: pools of threads spin for up to 0.2 s after their last task.
_IDLE_TICKS = 0
_SETTLE_SECONDS = 2.0
_LOOK_SECONDS = 0.03

# Seconds that a child may still take.
Patience = Callable[[], float]


class WorkerError(RuntimeError):
    """A child could not do what it was asked, or is gone."""


class Worker(Protocol):
    version: str

    def prepare(self, key: str, request: dict[str, Any]) -> None: ...
    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]: ...
    def drop(self, key: str) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...


def _stat(file: Path) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name: state, parent, ...; None: it has ended."""
    try:
        return file.read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _memory(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
    return {name: int(sizes.get(name, 0)) << 10 for name in ("RssAnon", "RssFile")}


class Process:
    """A child process of our own."""

    def __init__(self, command: list[str], log: Path, **options: Any) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(command, stderr=errors, **options)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def settle(self) -> None:
        """Waits until the process has stopped computing."""
        end = time.monotonic() + _SETTLE_SECONDS
        before = self._ticks()
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            now = self._ticks()
            if now - before <= _IDLE_TICKS:
                return
            before = now

    def pause(self) -> None:
        """Stops it and its children: some engines spin while nobody asks them for anything."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _tree(self) -> list[int]:
        """Its id and those of all its children."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            if (fields := _stat(stat)) is not None:
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found = [self.process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found

    def _ticks(self) -> int:
        stats = [_stat(Path(f"/proc/{pid}/stat")) for pid in self._tree()]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats if fields is not None)

    def memory(self) -> dict[str, int]:
        """Bytes in memory: anonymous, with those of its children, and of mapped files."""
        own, *children = self._tree()
        sizes = _memory(own)
        for pid in children:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                sizes["RssAnon"] += _memory(pid)["RssAnon"]
        return sizes

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


class RedisServer(Process):
    """A Redis that keeps nothing, behind a socket in `directory`."""

    def __init__(self, directory: Path, log: Path, patience: Patience) -> None:
        path = directory / "redis.sock"
        self.endpoint = f"unix:{path}"
        options = {"port": "0", "unixsocket": str(path), "save": "", "appendonly": "no"}
        command = ["redis-server"]
        for name, value in options.items():
            command += [f"--{name}", value]
        try:
            super().__init__(command, log, stdout=subprocess.DEVNULL, cwd=directory)
        except FileNotFoundError:
            raise WorkerError("no redis-server: bench/setup stores installs it") from None
        end = time.monotonic() + patience()
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise WorkerError(f"redis-server does not start: {self.log_tail()}")
            time.sleep(_LOOK_SECONDS)


class LmcacheServer(Process):
    """LMCache's server, with a GiB for chunks in its own memory. arguments: further ones."""

    def __init__(
        self, program: Path, log: Path, patience: Patience, arguments: Sequence[str] = ()
    ) -> None:
        self.port, self.http_port = free_port(), free_port()
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        where += ["--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        # Its other way of moving chunks is for GPUs.
        how = ["--supported-transfer-mode", "auto", "--l1-size-gb", "1", "--no-l1-use-lazy"]
        how += ["--eviction-policy", "LRU", "--disable-observability"]
        command = [str(program), "server", *where, *how, *arguments]
        environment = os.environ | {"LMCACHE_DISABLE_BANNER": "1"}
        super().__init__(command, log, stdout=subprocess.DEVNULL, env=environment)
        end = time.monotonic() + patience()
        while not is_open(self.port):
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise WorkerError(f"LMCache's server does not start: {self.log_tail()}")
            time.sleep(_LOOK_SECONDS)

    def connector(self) -> dict[str, Any]:
        """Fields of vLLM's KVTransferConfig."""
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}


class LineWorker(Process):
    """A child that speaks line_protocol.py."""

    version = ""

    def __init__(
        self,
        command: list[str],
        log: Path,
        patience: Patience,
        start: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(command, log, **pipes, text=True, env=env)
        self._name = Path(command[-1]).name
        self._patience = patience
        if start is not None:
            try:
                self.version = str(self.ask(start).get("version", ""))
            except WorkerError:
                self.stop()
                raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            # There is one answer to a request, so nothing of it can wait in Python's own buffer.
            if not select.select([self.process.stdout], [], [], self._patience())[0]:
                self.stop()
                raise WorkerError(f"{self._name} took too long")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"{self._name} has ended: {self.log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        self.ask({"do": "prepare", "key": key} | request)

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = self.ask({"do": "run", "key": key} | request)["samples"]
        return samples

    def drop(self, key: str) -> None:
        self.ask({"do": "drop", "key": key})

    def close(self) -> None:
        self.stop()


class PairWorker(LineWorker):
    """A child that another one helps, which ends with it."""

    def __init__(
        self,
        helper: Process,
        command: list[str],
        log: Path,
        patience: Patience,
        start: dict[str, Any],
    ) -> None:
        self._helper = helper
        try:
            super().__init__(command, log, patience, start)
        except BaseException:
            helper.stop()
            raise

    def stop(self) -> None:
        super().stop()
        self._helper.stop()


class StorePairWorker(PairWorker):
    """Two engines that share a store: the helper computes a prompt and leaves it there, the child
    finds it. Both draw the same prompts (generation.Cases)."""

    def __init__(self, helper: LineWorker, *arguments: Any) -> None:
        self._computing = helper
        super().__init__(helper, *arguments)

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        self._computing.prepare(key, request | {"kind": "leave"})
        super().prepare(key, request)

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        """Seconds of both together."""
        left = self._computing.run(key, request | {"kind": "leave"})
        found = super().run(key, request)
        both = zip(left["call"], found["call"], strict=True)
        return {"call": [first + then for first, then in both]}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class LlamaServer(Process):
    """llama-server with one slot per sequence. Its context is divided among the slots."""

    arguments: tuple[str, ...] = ()

    def __init__(
        self,
        binary: Path,
        model: Path,
        log: Path,
        *,
        threads: int,
        slots: int,
        length: int,
        vocab_size: int,
        patience: Patience,
    ) -> None:
        self._port = free_port()
        self._patience = patience
        self.version = llama_version(binary.parent)
        begin = time.perf_counter()
        super().__init__(
            [
                *(str(binary), "-m", str(model)),
                *("-t", str(threads), "-tb", str(threads), "-fa", "on"),
                *("-c", str(slots * length), "-np", str(slots), "--port", str(self._port)),
                # Copies of old prompts beside the slots are memory that no case asks for.
                *("--cache-ram", "0", "--no-webui", "--log-disable", *self.arguments),
            ],
            log,
            stdout=subprocess.DEVNULL,
        )
        self._wait_until_ready()
        self.start_seconds = time.perf_counter() - begin
        self._pool = concurrent.futures.ThreadPoolExecutor(slots)
        engine = generation.Engine(self.generate, vocab_size, "llama-server")
        self._cases = generation.Cases(engine)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._patience()
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise WorkerError(f"llama-server has ended: {self.log_tail()}")
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.005)
        self.stop()
        raise WorkerError("llama-server took too long to start")

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._patience())
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _complete(self, prompt: list[int], tokens: int) -> None:
        status, answer = self._ask(
            "POST",
            "/completion",
            {
                "prompt": prompt,
                "n_predict": tokens,
                "cache_prompt": True,
                "ignore_eos": True,
                "samplers": ["top_k"],
                "top_k": 1,
            },
        )
        if status != 200:
            raise WorkerError(f"llama-server: status {status}: {answer[:200]!r}")

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        """The server chooses the slots: the one that holds most of a prompt, else the one that was
        unused for longest."""
        list(self._pool.map(self._complete, prompts, [tokens] * len(prompts)))

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        try:
            self._cases.prepare(key, **request)
        except (OSError, http.client.HTTPException) as error:
            raise WorkerError(f"llama-server: {error!r}; {self.log_tail()}") from None

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        try:
            samples: dict[str, list[float]] = self._cases.run(key, **request)["samples"]
        except (OSError, http.client.HTTPException) as error:
            raise WorkerError(f"llama-server: {error!r}; {self.log_tail()}") from None
        return samples

    def drop(self, key: str) -> None:
        self._cases.drop(key)

    def close(self) -> None:
        self.stop()  # first: requests that wait for an answer end with it
        self._pool.shutdown(cancel_futures=True)


class LlamaReuse(LlamaServer):
    """One that moves parts of its last prompt to where they stand in the next one."""

    arguments = ("--cache-reuse", "256")


class LlamaBench:
    """llama-bench or llama-batched-bench, one call a round. They time themselves, without loading
    the model."""

    def __init__(
        self,
        binary: Path,
        model: Path,
        log: Path,
        *,
        threads: int,
        patience: Patience,
        repack: bool = True,
    ) -> None:
        self._binary, self._model, self._log, self._threads = binary, model, log, str(threads)
        self._patience = patience
        self._repack = repack
        self.version = llama_version(binary.parent)

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        """Each call warms up by itself."""

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        """Seconds of a prompt, or of one decode step."""
        tokens, repetitions = request["tokens"], str(request.get("repetitions", 1))
        if self._binary.name == "llama-batched-bench":
            return {"call": [self._batched(request["depth"], request["batch"], tokens) / tokens]}
        if request["kind"] == "prefill":
            result = self._call("-p", str(tokens), "-n", "0", "-r", repetitions, "-o", "jsonl")
            return {"call": [ns * 1e-9 for ns in result["samples_ns"]]}
        result = self._call("-p", "0", "-n", str(tokens), "-r", repetitions, "-o", "jsonl")
        return {"call": [ns * 1e-9 / tokens for ns in result["samples_ns"]]}

    def _batched(self, prompt: int, batch: int, tokens: int) -> float:
        counts = ("-npp", str(prompt), "-ntg", str(tokens), "-npl", str(batch))
        context = ("-c", str(batch * (prompt + tokens + 64)), "-tb", self._threads)
        result = self._call(*counts, *context, "--output-format", "jsonl")
        return float(result["t_tg"])

    def _call(self, *arguments: str) -> dict[str, Any]:
        command = [str(self._binary), "-m", str(self._model), "-t", self._threads, "-fa", "on"]
        if not self._repack:
            is_bench = self._binary.name == "llama-bench"
            command += ["--repack", "0"] if is_bench else ["--no-repack"]
        try:
            with open(self._log, "wb") as errors:
                done = subprocess.run(
                    [*command, *arguments],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    check=False,
                    timeout=self._patience(),
                )
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{self._binary.name} took too long") from None
        lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
        if done.returncode != 0 or not lines:
            raise WorkerError(f"{self._binary.name} ended with {done.returncode}: see {self._log}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    def drop(self, key: str) -> None:
        """It holds nothing."""

    def settle(self) -> None:
        """It has ended."""

    def close(self) -> None:
        """It has ended."""


class UcxPerftest:
    """ucx_perftest: one call a round, messages of one size. "tls" of a request: the transports that
    it may use; without it, those of UCX_TLS."""

    def __init__(self, binary: str, log: Path, patience: Patience) -> None:
        self._binary, self._log, self._patience = binary, log, patience
        self.version = "UCX"

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        """Each call warms up by itself."""

    def run(self, key: str, request: dict[str, Any]) -> dict[str, list[float]]:
        """Seconds of `bytes` bytes."""
        size = request["message_bytes"]
        count = -(-request["bytes"] // size)
        env = os.environ | ({"UCX_TLS": request["tls"]} if "tls" in request else {})
        with open(self._log, "wb") as errors, socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            taken.close()
            command = [self._binary, "-p", port]
            with subprocess.Popen(command, stdout=errors, stderr=errors, env=env) as server:
                try:
                    microseconds = self._client(port, size, count, env)
                finally:
                    server.kill()
        return {"call": [microseconds * 1e-6 * request["bytes"] / size]}

    def _client(self, port: str, size: int, count: int, env: dict[str, str]) -> float:
        """Microseconds of a message."""
        test = ["-t", "tag_bw", "-s", str(size), "-n", str(count), "-w", "2", "-f"]
        command = [self._binary, "127.0.0.1", "-p", port, *test]
        until = time.monotonic() + self._patience()
        while time.monotonic() < until:  # the server does not say when it listens
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=600, env=env
            )
            # Messages, and microseconds of one: a percentile, the last ones, all.
            rows = [line.removeprefix("Final:").split() for line in done.stdout.splitlines()]
            rows = [row for row in rows if row and row[0].isdigit()]
            if done.returncode == 0 and rows:
                return float(rows[-1][3])
        raise WorkerError(f"ucx_perftest: no result: {done.stdout[-200:]}{done.stderr[-200:]}")

    def drop(self, key: str) -> None:
        """It holds nothing."""

    def settle(self) -> None:
        """It has ended."""

    def close(self) -> None:
        """It has ended."""


def llama_version(binaries: Path) -> str:
    done = subprocess.run(
        [str(binaries / "llama-server"), "--version"], capture_output=True, text=True, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "version" in line]
    return "llama.cpp " + (lines[0].split(":", 1)[1].strip() if lines else "")
