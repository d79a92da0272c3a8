"""The server under abuse, between tenants, at the border of memory, overloaded and killed (R8, R12,
R20 to R22). An ordinary run is small; tools/soak runs the same with full sizes and new seeds, and
judges times there, on a machine that does nothing else.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import DEADLINE, Server, events, head, read_answer, running
from tiny_model import Shape, TinyModel

ROUND = os.environ.get("QUIRE_SOAK_ROUND")
SOAK = ROUND is not None
Report = Callable[[str, Any], None]
IN_SOAK = pytest.mark.skipif(not SOAK, reason="times are judged by tools/soak")
ENDLESS = {"prompt": "x", "max_tokens": 10**7, "window": 32, "ignore_eos": True}


def seeded(name: str) -> random.Random:
    return random.Random(f"{name} {ROUND or 0}")


def status_of(server: Server, field: str) -> int:
    """A number of /proc/PID/status; sizes in bytes."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    value = next(line.split() for line in text.splitlines() if line.startswith(field + ":"))
    return int(value[1]) << (10 if value[-1] == "kB" else 0)


def files_of(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def first_token_seconds(server: Server) -> float:
    begin = time.perf_counter()
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1})
    return time.perf_counter() - begin


def p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


# ---- R8: abuse

BODIES = [b"{", b"[" * 100_000, b'{"n":1000000000,"prompt":"x"}', b'{"prompt":"\\ud800"}']
BODIES += [b'{"prompt":"x","temperature":1e999999}', b'{"prompt":"\xc0\x80"}', b'{"prompt":"x",' * 9]
BODIES += [b'{"prompt":"x","logprobs":99999}', b'{"prompt":"x","prompt":"y"}', b"\0" * 1000]


def test_abuse(tiny: TinyModel, record_property: Report) -> None:
    idle, half = (10_000, 1_000) if SOAK else (100, 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits = {"connections": 20_000, "connections_per_address": 20_000, "idle_seconds": 300}
    limits |= {} if SOAK else {"header_seconds": 1}
    words = [word for name, value in limits.items() for word in ("--limit", f"{name}={value}")]
    options = ("--no-prefix-cache", "--page-size", "16", *words)
    try:
        with running(tiny.directory, *options) as server, contextlib.ExitStack() as stack:
            quiet = [first_token_seconds(server) for _ in range(200 if SOAK else 5)]
            before = status_of(server, "VmRSS")
            for _ in range(idle):
                stack.enter_context(server.connect())
            begin = time.monotonic()
            halves = [stack.enter_context(server.connect()) for _ in range(half)]
            for peer in halves:
                peer.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: local")
            server.request("GET", "/health/live")  # all connections are taken by then
            for body in BODIES:
                asked = time.perf_counter()
                status, _, _ = server.request("POST", "/v1/completions", body)
                assert 400 <= status < 500, body[:40]
                assert not SOAK or time.perf_counter() - asked < 0.05, body[:40]
            busy = [first_token_seconds(server) for _ in range(200 if SOAK else 5)]
            assert [read_answer(peer)[0] for peer in halves] == [408] * half
            assert time.monotonic() - begin < 15 or not SOAK
            grown = status_of(server, "VmRSS") - before
            assert grown <= (64 << 20) + (idle + half) * (16 << 10), grown
            assert not SOAK or p99(busy) <= 2 * p99(quiet), (p99(busy), p99(quiet))
            server.wait_metrics(lambda m: m["quire:num_requests_running"] == 0)
            assert server.request("GET", "/health")[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    record_property("connections", idle + half + len(BODIES))


# ---- R12: isolation


@contextlib.contextmanager
def tenants(model: TinyModel, folder: Path, count: int, *options: str) -> Iterator[Server]:
    keys = folder / "keys"
    keys.write_text("".join(f"t{i} {key_of(i)}\n" for i in range(count)))
    options = ("--api-keys", str(keys), "--page-size", "16", *options)
    with running(model.directory, *options, key=key_of(0)) as server:
        yield server


def key_of(tenant: int) -> str:
    return f"key-of-tenant-{tenant:04}"


class Prefixes:
    """Of all texts of a tenant, as a tree."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def add(self, ids: list[int]) -> None:
        node = self._root
        for id in ids:
            node = node.setdefault(id, {})

    def known(self, ids: list[int]) -> int:
        """Tokens that some text begins with, too."""
        node = self._root
        for length, id in enumerate(ids):
            if id not in node:
                return length
            node = node[id]
        return len(ids)


def test_isolation(tiny: TinyModel, tmp_path: Path, record_property: Report) -> None:
    """All tenants send the same texts; what is cached for one was computed for it."""
    rng = seeded("isolation")
    requests, count = (20_000, 8) if SOAK else (120, 3)
    texts = [[rng.randrange(5, 250) for _ in range(rng.randint(20, 120))] for _ in range(5)]
    own: dict[tuple[int, str], Prefixes] = {}
    hits = 0
    # There is room for what all of them send, so that much is there to be found.
    options = ("--kv-bytes", "32M", "--kv-dir", str(tmp_path / "kv"))
    with tenants(tiny, tmp_path, count, *options) as server:
        for number in range(requests):
            if number % 1000 == 999:
                texts = [[rng.randrange(5, 250) for _ in each] for each in texts]
            tenant, salt = rng.randrange(count), rng.choice(["", "", "a"])
            text = rng.choice(texts)
            prompt = text[: rng.randint(1, len(text))] + [rng.randrange(5, 250)]
            body = {"prompt": prompt, "max_tokens": rng.randint(0, 4), "return_token_ids": True}
            body |= {"cache_salt": salt} if salt else {}
            headers = {"authorization": f"Bearer {key_of(tenant)}"}
            found = server.post("/v1/completions", body, **headers)
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            earlier = own.setdefault((tenant, salt), Prefixes())
            known = earlier.known(prompt)
            assert cached <= known, (tenant, salt, cached, known)
            hits += cached > 0
            earlier.add(prompt + found["choices"][0]["token_ids"])
    assert hits > requests // 10
    record_property("requests", requests)


def separation(hits: list[float], misses: list[float]) -> float:
    """AUC: how often a hit is faster than a miss."""
    ordered = sorted([(t, True) for t in hits] + [(t, False) for t in misses])
    ranks = sum(rank for rank, (_, is_hit) in enumerate(ordered, 1) if is_hit)
    n, m = len(hits), len(misses)
    return 1 - (ranks - n * (n + 1) / 2) / (n * m)


@IN_SOAK
def test_timing(tmp_path: Path, record_property: Report) -> None:
    """An attacker cannot tell by time what a victim has asked; of its own prompts it can."""
    model = TinyModel(tmp_path / "model", Shape(positions=2048, layers=6))
    rng, samples = seeded("timing"), 1000
    with tenants(model, tmp_path, 2) as server:
        for victim, low, high in ((0, 0.45, 0.55), (1, 0.95, 1.0)):  # 1: the positive control
            times: dict[bool, list[float]] = {True: [], False: []}
            for known in rng.sample([True, False] * samples, 2 * samples):
                prompt = [rng.randrange(5, 250) for _ in range(512)]
                other = prompt if known else [rng.randrange(5, 250) for _ in prompt]
                for tenant, ids in ((victim, other), (1, prompt)):
                    begin = time.perf_counter()
                    body = {"prompt": ids, "max_tokens": 1}
                    headers = {"authorization": f"Bearer {key_of(tenant)}"}
                    server.post("/v1/completions", body, **headers)
                times[known].append(time.perf_counter() - begin)
            assert low <= separation(times[True], times[False]) <= high, (victim, low, high)
    record_property("samples", samples)


def test_separation_of_times() -> None:
    assert separation([1, 2], [3, 4]) == 1 and separation([3, 4], [1, 2]) == 0
    assert separation([1, 4], [2, 3]) == 0.5


# ---- R20: memory


def mixed_request(server: Server, rng: random.Random) -> None:
    """One of whatever clients do."""
    kind = rng.randrange(4)
    prompt = [rng.randrange(5, 250) for _ in range(rng.randint(1, 150))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(0, 40)}
    if kind == 0:
        server.post("/v1/completions", body)
    elif kind == 1:
        body |= {"n": rng.randint(1, 3), "temperature": 1, "logprobs": 5}
        server.post("/v1/completions", {**body, "prompt": prompt[:30]})
    elif kind == 2:  # leaves in the middle
        data = json.dumps({**ENDLESS, "stream": True}).encode()
        with server.connect() as peer:
            peer.sendall(head("/v1/completions", len(data)) + data)
            peer.recv(rng.randint(1, 4000))
    else:
        server.request("POST", "/v1/completions", {**body, "temperature": -1})


def test_memory_stays_within_its_bound(tiny: TinyModel, record_property: Report) -> None:
    requests = 5_000 if SOAK else 100
    rng = seeded("memory")
    with running(tiny.directory, "--no-prefix-cache", "--page-size", "16") as server:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:

            def traffic(count: int) -> None:
                seeds = [random.Random(rng.random()) for _ in range(count)]
                list(pool.map(lambda one: mixed_request(server, one), seeds))

            traffic(50)  # pools of threads and of memory have their size then
            still = ('quire:kv_pages{state="used"}', "quire:num_requests_running")
            server.wait_metrics(lambda m: all(m[name] == 0 for name in still))
            rss, files, threads = (
                status_of(server, "VmRSS"),
                files_of(server),
                status_of(server, "Threads"),
            )
            traffic(requests)
            server.wait_metrics(lambda m: all(m[name] == 0 for name in still))
        assert status_of(server, "VmRSS") - rss <= (64 << 20), "after all requests have ended"
        assert status_of(server, "VmHWM") - rss <= (64 << 20) + 0.05 * rss, "at any time"
        # The pool of tokenizing threads has at most four, which come as they are needed.
        assert files_of(server) <= files + 8 and status_of(server, "Threads") <= threads + 4
    record_property("requests", requests)


# ---- R21: overload


def test_overload(tiny: TinyModel, record_property: Report) -> None:
    """Excess is refused at once and told when to come back; what is accepted is answered whole."""
    requests = 4_000 if SOAK else 150
    limits = ("--max-num-sequences", "2", "--limit", "queue=4")
    with running(tiny.directory, "--no-prefix-cache", "--page-size", "16", *limits) as server:
        body = {"prompt": [7, 8, 9], "max_tokens": 50, "ignore_eos": True}
        expected = server.post("/v1/completions", body)["choices"]

        def one(_: int) -> None:
            status, headers, content = server.request("POST", "/v1/completions", body)
            if status == 200:
                assert content["choices"] == expected
            else:
                assert status in (429, 503) and int(headers["retry-after"]) >= 1, content

        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            list(pool.map(one, range(requests)))
        # As the server saw it: the clients here wait for each other more than for it.
        lines = [server.wait_log(lambda line: line["event"] == "request") for _ in range(requests)]
        refused = [line["seconds"] for line in lines if line["status"] != 200]
        assert refused and len(refused) < len(lines)
        assert not SOAK or p99(refused) <= 0.02
        begin = time.perf_counter()
        assert server.request("POST", "/v1/completions", body)[0] == 200
        assert time.perf_counter() - begin < 2 or not SOAK
    record_property("requests", requests)


# ---- R22: kills


def test_kills(tmp_path: Path, record_property: Report) -> None:
    """After SIGKILL under load no stream looks whole, and the disk's KV is there at once."""
    model = TinyModel(tmp_path / "model", Shape(positions=4096))
    rng, kills = seeded("kills"), 10 if SOAK else 1
    options = ("--kv-dir", str(tmp_path / "kv"), "--page-size", "16")
    body = {"max_tokens": 8, "ignore_eos": True}
    kept: tuple[list[int], Any] | None = None
    for _ in range(kills):
        with running(model.directory, *options) as server:
            if kept is not None:
                check_kept(server, {**body, "prompt": kept[0]}, kept[1])
            prompt = [rng.randrange(5, 250) for _ in range(1100)]  # more than a chunk
            kept = prompt, server.post("/v1/completions", {**body, "prompt": prompt})["choices"]
            server.wait_metrics(lambda m: written(m) and m["quire:kv_stored_chunks_total"] > 0)
            streams = [open_endless(server) for _ in range(3)]
            for _, answer in streams:
                next(events(answer))
            server.process.send_signal(signal.SIGKILL)
            for connection, answer in streams:
                with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                    assert "[DONE]" not in list(events(answer))
                    raise http.client.IncompleteRead(b"")  # it ended without its end
                connection.close()
    assert kept is not None
    with running(model.directory, *options) as server:
        check_kept(server, {**body, "prompt": kept[0]}, kept[1])
        assert server.stop() == 0
    record_property("kills", kills)


def written(metrics: dict[str, float]) -> bool:
    name = 'quire:kv_tier_written_bytes_total{tier="disk"}'
    return metrics[name] == metrics["quire:kv_stored_bytes_total"]


def check_kept(server: Server, body: dict[str, Any], choices: Any) -> None:
    found = server.post("/v1/completions", body)
    assert found["usage"]["prompt_tokens_details"]["disk_tokens"] >= 1024
    assert found["choices"] == choices


def open_endless(server: Server) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
    data, headers = json.dumps({**ENDLESS, "stream": True}), {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", data, headers)
    answer = connection.getresponse()
    assert answer.status == 200
    return connection, answer


@IN_SOAK
def test_drains(tiny: TinyModel, record_property: Report) -> None:
    """SIGTERM loses no stream."""
    for _ in range(5):
        with running(tiny.directory, "--page-size", "16") as server:
            streams = [open_short(server) for _ in range(8)]
            for _, answer in streams:
                next(events(answer))
            server.process.send_signal(signal.SIGTERM)
            for connection, answer in streams:
                assert list(events(answer))[-1] == "[DONE]"
                connection.close()
            assert server.process.wait(DEADLINE) == 0
    record_property("drains", 5)


def open_short(server: Server) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
    body = json.dumps({**ENDLESS, "max_tokens": 2000, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection, connection.getresponse()
