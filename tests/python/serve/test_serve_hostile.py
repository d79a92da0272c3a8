"""Slow and hostile peers: each is ended by a limit, which is counted, and others go on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_peers import BROKEN, raw, unread
from quire.serve.bounded_json import JsonLimits, parse_object
from quire.serve.problems import Problem
from server_process import DEADLINE, Server, head, read_answer, running
from tiny_model import TinyModel

# So short that no test waits long, and so long that no honest request of the tests meets them: a
# body is sent behind its header, and on a busy machine some time later.
LIMITS = {
    "header_seconds": "2",
    "body_grace_seconds": "3",
    "idle_seconds": "3",
    "body_bytes": "1M",
    "connections_per_address": "40",
    "slow_client_seconds": "1",
    "unread_bytes": "1G",
    "write_buffer_bytes": "4K",
    "pipelined": "4",
}


@pytest.fixture(scope="module")
def strict(tiny: TinyModel) -> Iterator[Server]:
    """A server whose limits are near."""
    limits = [word for name, value in LIMITS.items() for word in ("--limit", f"{name}={value}")]
    with running(
        tiny.directory, "--no-prefix-cache", "--page-size", "16", "--strict", *limits
    ) as server:
        yield server
        assert server.stop() == 0


@contextlib.contextmanager
def counted(server: Server, limit: str, times: int = 1) -> Iterator[None]:
    name = f'quire:http_limit_total{{limit="{limit}"}}'
    before = server.metrics().get(name, 0)
    yield
    assert server.metrics().get(name, 0) - before == times


def test_half_headers_are_ended(strict: Server) -> None:
    with counted(strict, "header_seconds", 20), contextlib.ExitStack() as stack:
        peers = [stack.enter_context(strict.connect()) for _ in range(20)]
        for peer in peers:
            peer.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: local")
        assert strict.request("GET", "/health/live")[0] == 200  # others are answered meanwhile
        assert [read_answer(peer)[0] for peer in peers] == [408] * 20


def test_an_idle_connection_is_closed(strict: Server) -> None:
    with strict.connect() as peer:
        assert peer.recv(1) == b""
    with strict.connect() as peer:
        peer.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_answer(peer)[0] == 200


def test_a_slow_body_is_ended(strict: Server) -> None:
    with counted(strict, "body_seconds"), strict.connect() as peer:
        peer.sendall(head("/v1/completions", 1000) + b"{")
        assert read_answer(peer)[0] == 408


@pytest.mark.parametrize("size", [1_048_577, 1 << 30])
def test_a_long_body_is_refused_at_its_header(strict: Server, size: int) -> None:
    with counted(strict, "body_bytes"), strict.connect() as peer:
        peer.sendall(head("/v1/completions", size))
        status, answer = read_answer(peer)
    assert status == 413 and b"more than 1048576 bytes" in answer


def test_a_body_of_the_limit_is_read(strict: Server) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    body += b" " * (1_048_576 - len(body))
    assert strict.request("POST", "/v1/completions", body)[0] == 200


def test_an_endless_chunked_body_is_ended(strict: Server) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with counted(strict, "body_bytes"), strict.connect() as peer:
        peer.sendall(head("/v1/completions", None, "transfer-encoding: chunked"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1000):
                peer.sendall(chunk)
            raise AssertionError("64 MiB were taken")
        status, _ = read_answer(peer)
    assert status == 413


@pytest.mark.parametrize(("data", "status", "limit"), BROKEN)
def test_broken_requests(strict: Server, data: bytes, status: int, limit: str) -> None:
    with counted(strict, limit):
        assert raw(strict, data)[0] == status


def test_too_many_connections_of_an_address(strict: Server) -> None:
    # Those that were refused while they sent much stay for a second.
    strict.wait_metrics(lambda m: m["quire:http_connections"] == 1)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(strict.connect()) for _ in range(60)]
        statuses = []
        for peer in peers:
            data = b""
            while part := peer.recv(65536):  # the others are closed without a word when idle
                data += part
            statuses.append(data[9:12])
    assert 18 <= statuses.count(b"429") <= 22
    assert strict.request("GET", "/health/live")[0] == 200


def test_pipelined_requests_are_answered_in_order(strict: Server) -> None:
    paths = ["/v1/models", "/version", "/health/live"]
    data = b"".join(head(path, None, method="GET") for path in paths)
    with strict.connect() as peer:
        peer.sendall(data)
        _, answer = read_answer(peer)
    places = [answer.index(word) for word in (b'"object":"list"', b'"version"', b'"status":"ok"')]
    assert places == sorted(places)


def test_too_many_pipelined_requests_end_the_connection(strict: Server) -> None:
    body = b'{"prompt":"x","max_tokens":3}'
    one = head("/v1/completions", len(body)) + body
    with counted(strict, "pipelined"), strict.connect() as peer:
        peer.sendall(one * 50)
        status, answer = read_answer(peer)
    assert status == 200 and answer.count(b"HTTP/1.1 200") == 1 and b"429" not in answer[:12]


def test_a_client_that_does_not_read_is_dropped(strict: Server) -> None:
    body = {"prompt": "x", "max_tokens": 100000, "window": 32, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}).encode()
    with counted(strict, "slow_client"), socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(DEADLINE)
        peer.connect((strict.host, strict.port))
        peer.sendall(head("/v1/completions", len(data), "x-request-id: slow") + data)
        found = strict.wait_log(lambda line: line.get("id") == "slow")
    assert found["finish"] == "cancelled" and found["status"] == 200
    strict.wait_metrics(lambda m: m['quire:kv_pages{state="used"}'] == 0)


def test_an_answer_that_nobody_reads_ends_with_an_error(tiny: TinyModel) -> None:
    """Long before the client counts as slow: what waits for it is bounded."""
    near = ("--limit", "unread_bytes=1M", "--limit", "write_buffer_bytes=4K")
    options = ("--no-prefix-cache", "--page-size", "16", *near)
    with running(tiny.directory, *options) as server, contextlib.ExitStack() as stack:
        with counted(server, "unread_bytes"):
            peer = stack.enter_context(unread(server))
            name = 'quire:http_limit_total{limit="unread_bytes"}'
            server.wait_metrics(lambda m: m.get(name) == 1)
            server.wait_metrics(lambda m: m['quire:kv_pages{state="used"}'] == 0)
        _, answer = read_answer(peer)  # all that came before, then why there is no more
        assert server.wait_log(lambda line: line["event"] == "request")["finish"] == "error"
    last = answer.rsplit(b"data: ", 1)[1]
    assert b'"code":"unread_bytes"' in last and b"text_completion" in answer


def test_an_upgrade_is_answered_as_http(strict: Server) -> None:
    """As Java's client asks by itself."""
    body = b'{"prompt":"x","max_tokens":1}'
    more = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAA")
    status, answer = raw(strict, head("/v1/completions", len(body), *more) + body)
    assert status == 200 and b"text_completion" in answer


def test_a_client_that_waits_for_100(strict: Server) -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    with strict.connect() as peer:
        peer.sendall(head("/v1/completions", len(body), "expect: 100-continue"))
        assert peer.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(body)
        assert read_answer(peer)[0] == 200


def test_a_half_closed_client_has_left(strict: Server) -> None:
    body = {"prompt": "x", "max_tokens": 100000, "window": 32, "ignore_eos": True}
    data = json.dumps(body).encode()
    with strict.connect() as peer:
        peer.sendall(head("/v1/completions", len(data), "x-request-id: half") + data)
        strict.wait_metrics(lambda m: m["quire:num_requests_running"] == 1)
        peer.shutdown(socket.SHUT_WR)
        line = strict.wait_log(lambda line: line.get("id") == "half")
    assert line["status"] == 499 and line["finish"] == "cancelled"


def test_strict_refuses_unknown_fields(strict: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "foo": 1}
    status, _, found = strict.request("POST", "/v1/completions", body)
    assert status == 400 and found["error"]["param"] == "foo"
    assert found["error"]["message"] == "foo is not a field of this request"


# ---- HTTP/1.0


def asked_of_old(path: str, body: dict[str, Any], *more: str) -> bytes:
    data = json.dumps(body).encode()
    return head(path, len(data), *more).replace(b"HTTP/1.1", b"HTTP/1.0") + data


@pytest.mark.parametrize("more", [(), ("connection: keep-alive",), ("expect: 100-continue",)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_stream_for_http_1_0_ends_with_its_connection(
    strict: Server, path: str, more: tuple[str, ...]
) -> None:
    """It had chunks, whose sizes stood within the events for such a client."""
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 5, "stream": True}
    if path == "/v1/responses":
        body = {"input": "x", "max_output_tokens": 5, "stream": True}
    status, answer = raw(strict, asked_of_old(path, body, *more))
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert status == 200 and headers.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in headers and b"connection: close" in headers
    # Each line is an event's.
    assert all(line.startswith((b"data: ", b"event: ")) for line in content.split(b"\n") if line)
    assert content.count(b"data: ") >= 2 and content.endswith(b"\n\n")


def test_other_answers_for_http_1_0_have_their_length(strict: Server) -> None:
    whole = asked_of_old("/v1/completions", {"prompt": "x", "max_tokens": 1}, "connection: keep-alive")
    bad = asked_of_old("/v1/completions", {"prompt": "x", "max_tokens": -1})
    for data, expected in ((whole, 200), (bad, 400)):
        status, answer = raw(strict, data)
        headers, _, content = answer.partition(b"\r\n\r\n")
        assert status == expected and b"connection: close" in headers and json.loads(content)
        assert f"content-length: {len(content)}\r\n".encode() in headers + b"\r\n"
    status, answer = raw(strict, b"HEAD /metrics HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert status == 200 and answer.endswith(b"\r\n\r\n")


def test_an_upgrade_of_http_1_0_stays_one(strict: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    more = ("connection: upgrade", "upgrade: h2c")
    status, answer = raw(strict, asked_of_old("/v1/completions", body, *more))
    assert status == 200 and b"chunked" not in answer and answer.endswith(b"[DONE]\n\n")


# ---- Refusals before a route


def test_a_refusal_of_the_protocol_has_an_id_and_a_line(tiny: TinyModel) -> None:
    """It had neither: nobody could find it again, or see who sent what."""
    near = ("--limit", "header_seconds=0.3", "--limit", "body_grace_seconds=0.3")
    long = b"GET / HTTP/1.1\r\nx-request-id: mine-%d\r\n"
    asked = {
        "header_bytes": (431, long % 1 + b"x: " + b"a" * 20000),
        "header_count": (431, long % 2 + b"x: y\r\n" * 101 + b"\r\n"),
        "http": (400, b"GET / HTTP/1.1\r\na : b\r\n\r\n"),
        "body_bytes": (413, head("/v1/messages", 1 << 30, "x-request-id: mine-3")),
        "header_seconds": (408, long % 4 + b"a: b\r\nc"),
        "body_seconds": (408, head("/v1/completions", 1000, "x-request-id: mine-5") + b"{"),
    }
    with running(tiny.directory, *near) as server:
        for limit, (expected, data) in asked.items():
            status, answer = raw(server, data)
            headers, _, content = answer.partition(b"\r\n\r\n")
            names = dict(line.split(b": ", 1) for line in headers.split(b"\r\n")[1:])
            id = names[b"x-request-id"].decode()
            assert status == expected and (limit == "http" or id.startswith("mine-"))
            line = server.wait_log(lambda line: line["event"] == "refused")
            assert (line["id"], line["status"], line["error"]) == (id, expected, limit)
            assert line["address"] == "127.0.0.1"
            error = json.loads(content)
            if limit == "body_bytes":  # as Anthropic's clients read it
                assert error["type"] == "error" and names[b"request-id"] == b"mine-3"
        # The handler that waited for the body has the same id.
        assert server.wait_log(lambda line: line.get("id") == "mine-5")["status"] == 499


def test_a_body_that_is_encoded_is_named(server: Server) -> None:
    """It was called JSON that is not valid UTF-8."""
    headers = {"content-encoding": "gzip"}
    status, _, found = server.request("POST", "/v1/completions", b"\x1f\x8b\x08", **headers)
    assert status == 415 and "content-encoding is gzip" in found["error"]["message"]


# ---- JSON

DEEP = b'{"prompt":' + b"[" * 2_000_000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (DEEP[:900_000], "72 levels"),
        (b'{"a":"' + b'\\"' * 400_000, "a string does not end"),
        (b'{"prompt":"x","temperature":1e999999}', "temperature has a number that is out of range"),
        (b'{"a":' + b"9" * 100_000 + b"}", "39 digits"),
        (b'{"prompt":"\xff"}', "not valid UTF-8 at byte 11"),
        (b'{"prompt":"\xc0\x80"}', "not valid UTF-8"),
        (b'{"prompt":NaN}', "NaN is not a JSON number"),
        (b'{"prompt":"a","metadata":{"a":1e999}}', "metadata has a number that is out of range"),
        (b'{"prompt":"x","prompt":"y"}', "'prompt' twice"),
        (b'{"prompt":"x"', "not valid JSON"),
        (b'{"prompt":"x"}{}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"", "not valid JSON"),
        (b'{"prompt":"\\ud800"}', "lone surrogate"),
        (b"{" + b",".join(b'"k%d":1' % i for i in range(10_001)) + b"}", "10000 keys"),
        (b'{"a":[' + b",".join([b"[]"] * 20_000) + b"]}", "20000 lists"),
        (b'{"a":[' + b",".join([b'""'] * 100_001) + b"]}", "100000 strings"),
    ],
)
def test_hostile_json(server: Server, body: bytes, words: str) -> None:
    status, _, found = server.request("POST", "/v1/completions", body)
    assert status == 400 and words in found["error"]["message"]


def test_what_an_answer_repeats_may_have_lone_surrogates(server: Server) -> None:
    """They once ended in a status of 500."""
    blend = {"messages": [{"role": "user", "content": "x"}], "documents": ["y"], "blend": {}}
    blend["blend"] = {"\ud800" + "z" * 999: 1}
    status, _, found = server.request("POST", "/v1/chat/completions", blend)
    assert status == 400 and found["error"]["param"] == "blend.\ud800" + "z" * 121
    asked = {"input": "x", "max_output_tokens": 1, "metadata": {"a": "\ud800"}}
    assert server.post("/v1/responses", asked)["metadata"] == asked["metadata"]
    _, _, events = server.request("POST", "/v1/responses", {**asked, "stream": True})
    assert '"metadata":{"a":"\\ud800"}' in events


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        (JsonLimits(depth=3), b'{"a":[[]]}', b'{"a":[[[]]]}'),
        (JsonLimits(keys=2), b'{"a":{"b":1}}', b'{"a":{"b":1,"c":1}}'),
        (JsonLimits(strings=2), b'{"a":"b"}', b'{"a":"b","c":1}'),
        (JsonLimits(string_bytes=3), b'{"a":"\\n1"}', b'{"a":"\\n12"}'),
        (JsonLimits(), b'{"a":' + b"9" * 39 + b"}", b'{"a":' + b"9" * 40 + b"}"),
    ],
)
def test_limits_of_json(limits: JsonLimits, least: bytes, most: bytes) -> None:
    assert parse_object(least, limits) == json.loads(least)
    with pytest.raises(Problem):
        parse_object(most, limits)


def test_a_key_that_stands_twice_is_found_in_the_time_of_parsing() -> None:
    """Each key was once compared with all others: a body of 64 KiB held the event loop for a
    second."""

    def seconds(body: bytes) -> float:
        begin = time.thread_time()
        with contextlib.suppress(Problem):
            parse_object(body)
        return time.thread_time() - begin

    keys = [b'"k%04d":1' % number for number in range(7000)]
    sound, twice = (b"{" + b",".join([*keys, last]) + b"}" for last in (b'"z":1', keys[-1]))
    with pytest.raises(Problem, match="'k6999' twice"):
        parse_object(twice)
    assert min(seconds(twice) for _ in range(3)) < 10 * min(seconds(sound) for _ in range(3))


def test_text_that_looks_like_structure_counts_as_text() -> None:
    value: Any = {"a": '[[[{{{":":' * 1000 + '\\"', "b": "\\"}
    assert parse_object(json.dumps(value).encode(), JsonLimits(depth=1, keys=2)) == value


def test_many_hostile_bodies_at_a_time(server: Server) -> None:
    """The deepest one is refused within its first bytes: what is parsed stays small."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: server.request("POST", "/tokenize", DEEP), range(8)))
    assert [status for status, _, _ in found] == [400] * 8
