"""`quire serve` as a process of its own, and clients that are nothing but sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from program import process
from prometheus_client.parser import text_string_to_metric_families

DEADLINE = 120.0  # of whatever a test waits for: far above what it takes
# Options for a test that reads a stream later: nothing that waits for its client ends it.
PATIENT = ("--limit", "unread_bytes=1G", "--limit", "answers_bytes=1G")
PATIENT += ("--limit", "slow_client_seconds=600")
# Stored KV is waited for, however busy the disk is, and so is its writing.
LOADS = ("--kv-load-timeout", "600", "--kv-io-timeout", "600")


class Server:
    """A running server. Its log is read by a thread, line by line.

    ready_seconds: from its start to the line that says that it is ready.
    """

    def __init__(self, model: Path, *options: str, key: str | None = None) -> None:
        arguments = ["serve", str(model), "--port", "0", "--log-format", "json"]
        arguments += ["--dtype", "float32", "--threads", "1", "--served-model-name", "tiny"]
        arguments += options
        begin = time.perf_counter()
        self.process = process(*arguments)
        self.key = key
        self.log: list[dict[str, Any]] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        ready = self.process.stdout.readline().decode()
        self.ready_seconds = time.perf_counter() - begin
        found = re.search(r"ready on (https?)://(.*):(\d+)$", ready)
        assert found, (ready, self.stop())
        self.scheme, self.host, self.port = found[1], found[2], int(found[3])

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self._lines.put(line.decode())
        self._lines.put("")

    def wait_log(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line of the log that matches."""
        while True:
            line = self._lines.get(timeout=DEADLINE)
            assert line, "the log has ended"
            if line.startswith("{"):
                self.log.append(json.loads(line))
                if matches(self.log[-1]):
                    return self.log[-1]

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=DEADLINE)

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content (of JSON the value) of one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE)
        if self.key is not None:
            headers.setdefault("authorization", f"Bearer {self.key}")
        if body is not None:
            headers.setdefault("content-type", "application/json")
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if found.get("content-type") == "application/json":
            return answer.status, found, json.loads(content)
        return answer.status, found, content.decode()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The answer of a request that succeeds."""
        status, _, content = self.request("POST", path, body, **headers)
        assert status == 200, content
        return content

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels: 'quire:kv_pages{state="free"}'."""
        _, _, page = self.request("GET", "/metrics")
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return found

    def wait_metrics(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The metrics once the condition holds."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            found = self.metrics()
            if holds(found):
                return found
        raise AssertionError(found)

    def stop(self) -> int:
        """Ends it in order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code


@contextlib.contextmanager
def running(model: Path, *options: str, key: str | None = None) -> Iterator[Server]:
    server = Server(model, *options, key=key)
    try:
        yield server
    finally:
        server.process.kill() if server.process.poll() is None else None
        server.process.wait(DEADLINE)


def read_answer(peer: socket.socket) -> tuple[int, bytes]:
    """Status and everything else until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := peer.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 "), data
    return int(data.split(b" ", 2)[1]), data


def head(path: str, length: int | None, *more: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    if length is not None:
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, *more, "", ""]).encode()


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """The events of a stream: values of JSON, and "[DONE]"."""
    for line in answer:
        if line.startswith(b"data: "):
            text = line[6:].decode().rstrip("\n")
            yield text if text == "[DONE]" else json.loads(text)
