"""The server under abuse, between tenants, at the border of memory, overloaded and killed (R8, R12,
R20 to R22). An ordinary run is small; tools/soak runs the same with full sizes and new seeds, and
judges times there, on a machine that does nothing else.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import math
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import quire
from honest_client import HonestClient
from hostile_peers import ATTACKS, BODIES, ENDLESS, unread
from server_process import DEADLINE, LOADS, Server, events, head, read_answer, running
from tiny_model import Shape, TinyModel

ROUND = os.environ.get("QUIRE_SOAK_ROUND")
SOAK = ROUND is not None
Report = Callable[[str, Any], None]
IN_SOAK = pytest.mark.skipif(not SOAK, reason="times are judged by tools/soak")


def seeded(name: str) -> random.Random:
    return random.Random(f"{name} {ROUND or 0}")


def status_of(server: Server, field: str) -> int:
    """A number of /proc/PID/status; sizes in bytes."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    value = next(line.split() for line in text.splitlines() if line.startswith(field + ":"))
    return int(value[1]) << (10 if value[-1] == "kB" else 0)


def files_of(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


# ---- R8: abuse

# A body is sent behind its header, and on a busy machine some time later.
LIMITS_OF_SMALL_RUNS = {"header_seconds": 1, "body_grace_seconds": 3}


def test_abuse(tiny: TinyModel, record_property: Report) -> None:
    """Idle, half and unread connections are there all the time; the other peers come in turns, some
    at a time, while an honest client asks."""
    idle, half, unread_streams, attacks = (10_000, 1_000, 20, 200) if SOAK else (100, 30, 2, 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits: dict[str, float] = {"connections": 20_000, "connections_per_address": 20_000}
    limits |= {"idle_seconds": 300} | ({} if SOAK else LIMITS_OF_SMALL_RUNS)
    words = [word for name, value in limits.items() for word in ("--limit", f"{name}={value}")]
    # Room for all that run: what is judged is the server, and not who waits for pages.
    options = ("--no-prefix-cache", "--page-size", "16", "--kv-bytes", "16M", *words)
    try:
        with running(tiny.directory, *options) as server, contextlib.ExitStack() as stack:
            with HonestClient(server.host, server.port, 200 if SOAK else 5) as client:
                quiet = client.end()
            before = status_of(server, "VmRSS")
            for _ in range(idle):
                stack.enter_context(server.connect())
            check_half_headers(server, half, stack)
            check_bad_bodies(server)
            for _ in range(unread_streams):
                stack.enter_context(unread(server))
            busy = attacked(server, attacks)
            grown = status_of(server, "VmHWM") - before  # at any time
            assert grown <= (64 << 20) + (idle + half) * (16 << 10), grown
            assert not SOAK or p99(busy) <= 2 * p99(quiet), (p99(busy), p99(quiet))
            still = ('quire:kv_pages{state="used"}', "quire:num_requests_running")
            server.wait_metrics(lambda m: all(m[name] == 0 for name in still))
            assert server.request("GET", "/health")[0] == 200
            assert not [name for name in server.metrics() if 'status="500"' in name]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    record_property("connections", idle + half + unread_streams + attacks + len(BODIES))


def check_half_headers(server: Server, count: int, stack: contextlib.ExitStack) -> None:
    """All of them are ended by their limit of time, and not much later."""
    begin = time.monotonic()
    halves = [stack.enter_context(server.connect()) for _ in range(count)]
    for peer in halves:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: local")
    server.request("GET", "/health/live")  # all connections are taken by then
    assert [read_answer(peer)[0] for peer in halves] == [408] * count
    assert time.monotonic() - begin < 15 or not SOAK


def check_bad_bodies(server: Server) -> None:
    for body, field in BODIES:
        asked = time.perf_counter()
        status, _, found = server.request("POST", "/v1/completions", body)
        assert (status, found["error"]["param"]) == (400, field), body[:40]
        assert not SOAK or time.perf_counter() - asked < 0.05, body[:40]


def attacked(server: Server, attacks: int) -> list[float]:
    """First tokens of an honest client while four peers at a time do their worst."""
    rng = seeded("abuse")
    interval = 5.0 if SOAK else 0.1  # of bytes of slow peers
    kinds = [ATTACKS[i % len(ATTACKS)] for i in range(attacks)]
    rng.shuffle(kinds)
    with HonestClient(server.host, server.port) as client:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [
                pool.submit(kind, server, random.Random(rng.random()), interval) for kind in kinds
            ]
        for each in running:
            each.result()
        return client.end()


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


def test_isolation(
    tiny: TinyModel, tmp_path: Path, redis: str, record_property: Report
) -> None:
    """All tenants send the same texts; what is cached for one was computed for it, in pages, in the
    folder or in Redis, for one sample or several."""
    rng = seeded("isolation")
    requests, count = (20_000, 8) if SOAK else (120, 3)
    texts = [[rng.randrange(5, 250) for _ in range(rng.randint(20, 120))] for _ in range(5)]
    own: dict[tuple[int, str], Prefixes] = {}
    hits = 0
    # There is room for what all of them send, so that much is there to be found.
    options = ("--kv-bytes", "32M", "--kv-dir", str(tmp_path / "kv"), "--kv-redis", redis)
    with tenants(tiny, tmp_path, count, *options) as server:
        for number in range(requests):
            if number % 1000 == 999:
                texts = [[rng.randrange(5, 250) for _ in each] for each in texts]
            tenant, salt = rng.randrange(count), rng.choice(["", "", "a"])
            text = rng.choice(texts)
            prompt = text[: rng.randint(1, len(text))] + [rng.randrange(5, 250)]
            body = {"prompt": prompt, "max_tokens": rng.randint(0, 4), "return_token_ids": True}
            body |= {"n": rng.randint(1, 3), "temperature": 1}
            body |= {"cache_salt": salt} if salt else {}
            headers = {"authorization": f"Bearer {key_of(tenant)}"}
            found = server.post("/v1/completions", body, **headers)
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            earlier = own.setdefault((tenant, salt), Prefixes())
            known = earlier.known(prompt)
            assert cached <= known, (tenant, salt, cached, known)
            hits += cached > 0
            for choice in found["choices"]:
                earlier.add(prompt + choice["token_ids"])
    assert hits > requests // 10
    record_property("requests", requests)


LEAST, MOST = 0.45, 0.55  # of what an attacker may see: AUC
TIMED_LENGTHS = (8, 64, 512)  # tokens


def separation(hits: list[float], misses: list[float]) -> float:
    """AUC: how often a hit is faster than a miss."""
    ordered = sorted([(t, True) for t in hits] + [(t, False) for t in misses])
    ranks = sum(rank for rank, (_, is_hit) in enumerate(ordered, 1) if is_hit)
    n, m = len(hits), len(misses)
    return 1 - (ranks - n * (n + 1) / 2) / (n * m)


def margin(samples: int) -> float:
    """Half of the 99 % interval of the AUC of so many samples a class that tell nothing."""
    return 2.576 * math.sqrt((2 * samples + 1) / (12 * samples * samples))


@IN_SOAK
def test_timing(tmp_path: Path, record_property: Report) -> None:
    """An attacker cannot tell by time what a victim has asked; of its own prompts it can, without
    which the rest would prove nothing."""
    model = TinyModel(tmp_path / "model", Shape(positions=2048, layers=6))
    samples = 1000
    with tenants(model, tmp_path, 2) as server:
        assert attacker_sees(server, 1, max(TIMED_LENGTHS), samples) >= 0.95
        for length in TIMED_LENGTHS:
            seen = attacker_sees(server, 0, length, samples)
            assert LEAST <= seen <= MOST and abs(seen - 0.5) <= margin(samples), (length, seen)
    record_property("samples", samples)


def attacker_sees(server: Server, victim: int, length: int, samples: int) -> float:
    """How well tenant 1 tells prompts that `victim` has just asked from others."""
    rng = seeded(f"timing {victim} {length}")
    times: dict[bool, list[float]] = {True: [], False: []}
    for known in rng.sample([True, False] * samples, 2 * samples):
        prompt = [rng.randrange(5, 250) for _ in range(length)]
        other = prompt if known else [rng.randrange(5, 250) for _ in prompt]
        for tenant, ids in ((victim, other), (1, prompt)):
            begin = time.perf_counter()
            body = {"prompt": ids, "max_tokens": 1}
            headers = {"authorization": f"Bearer {key_of(tenant)}"}
            server.post("/v1/completions", body, **headers)
        times[known].append(time.perf_counter() - begin)
    return separation(times[True], times[False])


def test_separation_of_times() -> None:
    assert separation([1, 2], [3, 4]) == 1 and separation([3, 4], [1, 2]) == 0
    assert separation([1, 4], [2, 3]) == 0.5
    assert margin(1000) == pytest.approx(0.0333, abs=1e-4)


# ---- R20: memory


GUESS = {"type": "content", "content": "A quire is a stack of folded pages"}


def mixed_request(server: Server, rng: random.Random) -> None:
    """One of whatever clients do."""
    kind = rng.randrange(4)
    prompt = [rng.randrange(5, 250) for _ in range(rng.randint(1, 150))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(0, 40)}
    if kind == 0:
        server.post("/v1/completions", {**body, "prediction": GUESS})
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


def test_memory_stays_within_its_bound(
    tiny: TinyModel, tmp_path: Path, redis: str, record_property: Report
) -> None:
    """Of a server with all that takes memory: kept pages, a folder, Redis, guesses, samples that
    fork, clients that leave."""
    requests = 5_000 if SOAK else 100
    rng = seeded("memory")
    room = ("--page-size", "16", "--kv-bytes", "2M", "--max-num-sequences", "8")
    store = ("--kv-dir", str(tmp_path / "kv"), "--kv-quota", "16M", "--kv-redis", redis)
    with running(tiny.directory, *room, "--speculate", "ngram", *store) as server:
        plan = quire.Engine.plan_memory(
            tiny.directory,
            dtype="float32",
            page_size=16,
            kv_bytes=2 << 20,
            max_num_sequences=8,
            speculate="ngram",
            threads=1,
        )
        metrics = server.metrics()
        assert metrics["quire:kv_cache_bytes"] == pytest.approx(plan.kv_bytes, rel=0.01)
        assert metrics["quire:model_weight_bytes"] == pytest.approx(plan.weight_bytes, rel=0.01)
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
            traffic(requests // 2)
            server.wait_metrics(lambda m: all(m[name] == 0 for name in still))
            halfway = status_of(server, "VmRSS")
            traffic(requests // 2)
            server.wait_metrics(lambda m: all(m[name] == 0 for name in still))
        assert status_of(server, "VmRSS") - rss <= (64 << 20), "after all requests have ended"
        # Of few requests some may be the first ones to run beside each other.
        little = (4 if SOAK else 16) << 20
        assert status_of(server, "VmRSS") - halfway <= little, "once it is warm nothing grows"
        assert status_of(server, "VmHWM") - rss <= (64 << 20) + 0.05 * rss, "at any time"
        # The pool of tokenizing threads has at most four, which come as they are needed.
        assert files_of(server) <= files + 8 and status_of(server, "Threads") <= threads + 4
    record_property("requests", requests)


# ---- R21: overload


def test_overload(tmp_path: Path, record_property: Report) -> None:
    """Excess is refused at once and told when to come back; what is accepted is answered whole."""
    # Long answers in a soak: what clients and refusals cost is then little beside the answers, as
    # with a real model.
    requests, length = (2_000, 3_000) if SOAK else (150, 200)
    model = TinyModel(tmp_path / "model", Shape(positions=4096))
    limits = ("--max-num-sequences", "2", "--limit", "queue=4")
    with running(model.directory, "--no-prefix-cache", "--page-size", "16", *limits) as server:
        body = {"prompt": [7, 8, 9], "max_tokens": length, "ignore_eos": True}
        expected = server.post("/v1/completions", body)["choices"]

        def one() -> bool:
            status, headers, content = server.request("POST", "/v1/completions", body)
            if status == 200:
                assert content["choices"] == expected
            else:
                assert status in (429, 503) and int(headers["retry-after"]) >= 1, content
            return bool(status == 200)

        peaks = [offer(one, 1, requests // 10, clients=4) for _ in range(3 if SOAK else 1)]
        goodput = offer(one, 10, requests, clients=40)
        assert not SOAK or goodput >= 0.9 * max(peaks), (goodput, peaks)
        # As the server saw it: the clients here wait for each other more than for it.
        count = 1 + len(peaks) * (requests // 10) + requests
        lines = [server.wait_log(lambda line: line["event"] == "request") for _ in range(count)]
        refused = [line["seconds"] for line in lines if line["status"] != 200]
        assert refused and len(refused) < len(lines)
        assert not SOAK or p99(refused) <= 0.02
        begin = time.perf_counter()
        assert server.request("POST", "/v1/completions", body)[0] == 200
        assert time.perf_counter() - begin < 2 or not SOAK
    record_property("requests", requests)


def offer(one: Callable[[], bool], times: int, requests: int, clients: int) -> float:
    """For each request that was answered so many new ones: so many times what the server can do.
    Answers per second."""
    answered, left = 0, requests - clients
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(10 * clients) as pool:
        running = {pool.submit(one) for _ in range(clients)}
        while running:
            first = concurrent.futures.FIRST_COMPLETED
            done, running = concurrent.futures.wait(running, return_when=first)
            good = sum(each.result() for each in done)
            answered += good
            more = min(left, times * good if running or good else clients)
            left -= more
            running |= {pool.submit(one) for _ in range(more)}
    return answered / (time.perf_counter() - begin)


# ---- R22: kills


def test_kills(tmp_path: Path, record_property: Report) -> None:
    """After SIGKILL under load no stream looks whole, and the disk's KV is there at once."""
    model = TinyModel(tmp_path / "model", Shape(positions=4096))
    rng, kills = seeded("kills"), 10 if SOAK else 1
    options = ("--kv-dir", str(tmp_path / "kv"), "--page-size", "16", *LOADS)
    body = {"max_tokens": 8, "ignore_eos": True}
    kept: tuple[list[int], Any] | None = None
    for _ in range(kills):
        with running(model.directory, *options) as server:
            assert server.ready_seconds < 2 or not SOAK  # the model itself takes next to nothing
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
