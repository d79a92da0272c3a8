"""Servers that are measured: each as a process of its own, asked by the clients of serving.py."""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import serving
from workers import LlamaServer, Patience, Process, WorkerError, free_port

_LOOK_SECONDS = 0.005
_BEYOND_PLAN_BYTES = 150 << 20  # Python, its packages, buffers of connections


class ServingClients:
    """The clients of one server. memory_bound: bytes that it may have; None: nothing is said."""

    def __init__(
        self,
        server: Process,
        name: str,
        ask: serving.Ask,
        vocab_size: int,
        memory_bound: int | None = None,
    ) -> None:
        self._server, self._name, self._ask, self._vocab_size = server, name, ask, vocab_size
        self._memory_bound = memory_bound
        self._runs = 0

    def run(self, request: dict[str, Any]) -> serving.Samples:
        """Prompts differ from run to run, and not from server to server."""
        self._runs += 1
        try:
            samples = asyncio.run(
                serving.measure(self._ask, self._vocab_size, self._runs, **request)
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerError(f"{self._name}: {error!r}; {self._server.log_tail()}") from None
        memory = float(sum(self._server.memory().values()))
        samples["memory"] = [memory]
        if self._memory_bound is not None:
            samples["memory by its bound"] = [memory / self._memory_bound]
        return samples


class CompletionServer(Process):
    """A server with `/health` and `/v1/completions` that gives ids.

    Args:
        command: without the port.
        patience: seconds that it may still take to start.
        memory_bound: of ServingClients.
    """

    def __init__(
        self,
        name: str,
        version: str,
        command: list[str],
        log: Path,
        vocab_size: int,
        patience: Patience,
        memory_bound: int | None = None,
        **options: Any,
    ) -> None:
        self.version = version
        self.port = port = free_port()
        arguments = [*command, "--port", str(port)]
        begin = time.perf_counter()
        super().__init__(arguments, log, stdout=subprocess.DEVNULL, **options)
        self._wait_until_ready(name, port, patience)
        self.start_seconds = time.perf_counter() - begin

        def body(prompt: list[int], tokens: int) -> dict[str, Any]:
            asked = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True}
            return asked | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}

        ask = serving.HttpAsk(port, "/v1/completions", body)
        self._clients = ServingClients(self, name, ask, vocab_size, memory_bound)

    def _wait_until_ready(self, name: str, port: int, patience: Patience) -> None:
        end = time.monotonic() + patience()
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise WorkerError(f"{name} has ended: {self.log_tail()}")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience())
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            finally:
                connection.close()
            time.sleep(_LOOK_SECONDS)
        self.stop()
        raise WorkerError(f"{name} took too long to start")

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        self._clients.run(request)

    def run(self, key: str, request: dict[str, Any]) -> serving.Samples:
        return self._clients.run(request)

    def drop(self, key: str) -> None:
        """It holds nothing of a case."""

    def close(self) -> None:
        self.stop()


def quire_server(
    model: Path, log: Path, load: dict[str, Any], vocab_size: int, patience: Patience
) -> CompletionServer:
    command = [sys.executable, "-m", "quire", "serve", str(model), "--served-model-name", "m"]
    command += ["--threads", str(load["threads"]), "--kv-bytes", str(load["kv_bytes"])]
    command += ["--max-num-sequences", str(load["sequences"]), "--limit", "wait_seconds=100000"]
    command += ["--limit", "connections_per_address=10000"]
    import quire

    version = f"Quire {quire.__version__}"
    plan = quire.Engine.plan_memory(
        model,
        threads=load["threads"],
        kv_bytes=load["kv_bytes"],
        max_num_sequences=load["sequences"],
    )
    bound = plan.total_bytes + _BEYOND_PLAN_BYTES
    return CompletionServer("quire serve", version, command, log, vocab_size, patience, bound)


def vllm_server(
    python: str,
    model: Path,
    log: Path,
    load: dict[str, Any],
    dtype: str,
    vocab_size: int,
    patience: Patience,
) -> CompletionServer:
    cores = sorted(os.sched_getaffinity(0))[: load["threads"]]
    environment = os.environ | {
        # Whole gibibytes; one more, since blocks of 128 tokens are not filled to the end.
        "VLLM_CPU_KVCACHE_SPACE": str(1 - (-load["kv_bytes"] >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--dtype", dtype, "--enforce-eager"]
    command += ["--max-num-seqs", str(load["sequences"]), "--max-model-len", str(load["length"])]
    return CompletionServer("vLLM", "vLLM", command, log, vocab_size, patience, env=environment)


class LlamaServing(LlamaServer):
    """llama-server, asked by many clients."""

    def __init__(self, *arguments: Any, vocab_size: int, **options: Any) -> None:
        super().__init__(*arguments, vocab_size=vocab_size, **options)

        def body(prompt: list[int], tokens: int) -> dict[str, Any]:
            asked = {"prompt": prompt, "n_predict": tokens, "cache_prompt": True, "stream": True}
            return asked | {"ignore_eos": True, "samplers": ["top_k"], "top_k": 1}

        ask = serving.HttpAsk(self._port, "/completion", body)
        self._clients = ServingClients(self, "llama-server", ask, vocab_size)

    def prepare(self, key: str, request: dict[str, Any]) -> None:
        self._clients.run(request)

    def run(self, key: str, request: dict[str, Any]) -> serving.Samples:
        return self._clients.run(request)

    def drop(self, key: str) -> None:
        """It holds nothing of a case."""
