"""Peers that would hurt a server (R8), and what each of them must be told."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
from collections.abc import Callable

from server_process import DEADLINE, Server, head, read_answer

PATH = "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": 10**7, "window": 32, "ignore_eos": True}

# Broken framing and smuggling: the bytes, the status, the limit that counts them.
BROKEN: list[tuple[bytes, int, str]] = [
    (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", 431, "header_bytes"),
    (b"GET / HTTP/1.1\r\nx: " + b"a" * 20000 + b"\r\n\r\n", 431, "header_bytes"),
    (b"GET / HTTP/1.1\r\nx: " + b"a" * 20000, 431, "header_bytes"),
    (b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 20) + b"\r\n\r\n", 431, "header_bytes"),
    (
        head(PATH, None, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\nx: " + b"a" * (1 << 20),
        431,
        "header_bytes",
    ),
    (
        head(PATH, None, "transfer-encoding: chunked") + b"2;x=" + b"a" * (1 << 20),
        431,
        "header_bytes",
    ),
    (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n", 431, "header_count"),
    (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", 431, "header_count"),
    (b"\x16\x03\x01\x02\x00\x01\x00", 400, "http"),
    (b"GET  HTTP/9\r\n\r\n", 400, "http"),
    (b"GET http://a/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "http"),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400, "http"),
    (b"CONNECT /a HTTP/1.1\r\nhost: a\r\n\r\n", 400, "http"),
    (b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n", 400, "http"),
    (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "http"),
    (head(PATH, 5, "transfer-encoding: chunked") + b"0\r\n\r\n", 400, "http"),
    (head(PATH, 5, "content-length: 6") + b"{}", 400, "http"),
    (head(PATH, None, "content-length: -1"), 400, "http"),
    (head(PATH, None, "content-length: 1e3"), 400, "http"),
    (head(PATH, None, "transfer-encoding: gzip, chunked"), 400, "http"),
    (head(PATH, None, "transfer-encoding: chunked") + b"zz\r\n", 400, "http"),
    (  # whoever speaks HTTP/1.0 in front reads another body
        head(PATH, None, "transfer-encoding: chunked").replace(b"/1.1", b"/1.0") + b"0\r\n\r\n",
        400,
        "http",
    ),
    (head(PATH, 2, "a : b") + b"{}", 400, "http"),
    (head(PATH, 2, "a: b\n c") + b"{}", 400, "http"),
]

# Bodies that are refused with 400, and the field that the answer names.
BODIES: list[tuple[bytes, str | None]] = [
    (b"{", None),
    (b"\0" * 1000, None),
    (b"[" * 2_000_000, None),
    (b'{"prompt":' + b"[" * 2_000_000, None),
    (b'{"prompt":"x",' * 9, None),
    (b'{"prompt":"x","prompt":"y"}', None),
    (b'{"prompt":"\xc0\x80"}', None),
    (b'{"a":' + b"9" * 100_000 + b"}", None),
    (b'{"prompt":"\\ud800"}', "prompt"),
    (b'{"prompt":"x","temperature":1e999999}', "temperature"),
    (b'{"prompt":"x","n":1000000000}', "n"),
    (b'{"prompt":"x","logprobs":99999}', "logprobs"),
    (b'{"prompt":"x","window":4,"sinks":9}', "sinks"),
]


def raw(server: Server, data: bytes) -> tuple[int, bytes]:
    """The answer to bytes that are sent as they are."""
    with server.connect() as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(data)
        return read_answer(peer)


def unread(server: Server) -> socket.socket:
    """A stream whose client takes nothing. It is the caller's."""
    data = json.dumps({**ENDLESS, "stream": True, "logprobs": 20}).encode()
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.settimeout(DEADLINE)
    peer.connect((server.host, server.port))
    peer.sendall(head(PATH, len(data), "connection: close") + data)
    return peer


def trickle(server: Server, data: bytes, rest: bytes, interval: float) -> int:
    """Sends `data`, and a byte of `rest` every `interval` seconds until there is an answer: its
    status."""
    with server.connect() as peer:
        poll = select.poll()  # select() takes no file number above 1 023
        poll.register(peer, select.POLLIN)
        peer.sendall(data)
        for byte in rest:
            if poll.poll(interval * 1000):
                return read_answer(peer)[0]
            peer.sendall(bytes([byte]))
        raise AssertionError(f"{len(rest)} bytes were taken, one every {interval} s")


def send_broken(server: Server, rng: random.Random, interval: float) -> None:
    data, status, _ = rng.choice(BROKEN)
    assert raw(server, data)[0] == status, data[:60]


def send_bad_body(server: Server, rng: random.Random, interval: float) -> None:
    body, field = rng.choice(BODIES)
    status, _, found = server.request("POST", PATH, body)
    assert (status, found["error"]["param"]) == (400, field), body[:60]


def send_body_of_any_size(server: Server, rng: random.Random, interval: float) -> None:
    """1 B to 1 GiB; one that is too long is refused at its header."""
    size = 1 << rng.randrange(31)
    if size > 8 << 20:
        assert raw(server, head(PATH, size) + b"{")[0] == 413
    else:
        assert server.request("POST", PATH, b"x" * size)[0] == 400


def send_chunks_without_end(server: Server, rng: random.Random, interval: float) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with server.connect() as peer:
        peer.sendall(head(PATH, None, "transfer-encoding: chunked"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1000):
                peer.sendall(chunk)
            raise AssertionError("64 MiB were taken")
        assert read_answer(peer)[0] == 413


def send_header_slowly(server: Server, rng: random.Random, interval: float) -> None:
    line = f"POST {PATH} HTTP/1.1\r\nx: ".encode()
    assert trickle(server, line, b"a" * 100, interval) == 408


def send_body_slowly(server: Server, rng: random.Random, interval: float) -> None:
    assert trickle(server, head(PATH, 1000), b" " * 100, interval) == 408


def pipeline_too_many(server: Server, rng: random.Random, interval: float) -> None:
    body = b'{"prompt":"x","max_tokens":3}'
    status, answer = raw(server, (head(PATH, len(body)) + body) * 200)
    assert status == 200 and answer.count(b"HTTP/1.1 200") < 200


def leave_in_the_middle(server: Server, rng: random.Random, interval: float) -> None:
    data = json.dumps({**ENDLESS, "stream": True}).encode()
    with server.connect() as peer:
        peer.sendall(head(PATH, len(data)) + data)
        peer.recv(rng.randint(1, 4000))


Attack = Callable[[Server, random.Random, float], None]
# interval: seconds between two bytes of a slow peer.
ATTACKS: tuple[Attack, ...] = (
    send_broken,
    send_bad_body,
    send_body_of_any_size,
    send_chunks_without_end,
    send_header_slowly,
    send_body_slowly,
    pipeline_too_many,
    leave_in_the_middle,
)
