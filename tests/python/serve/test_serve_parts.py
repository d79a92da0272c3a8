"""Parts of the server alone: streams that meet a defect, and the thread that compiles grammars."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import gc
import io
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from quire import errors
from quire.engine import Piece, Result, StepTimes, Usage
from quire.grammar import CompiledGrammar, Grammar
from quire.serve import anthropic_messages, protocol, text_routes
from quire.serve._streams import Answer, Streams
from quire.serve.calls import Call, ClientGone, Log, read_body
from quire.serve.generation import Generation, ModelFacts
from quire.serve.grammar_probe import TooCostlyError
from quire.serve.grammar_queue import GrammarQueue
from quire.serve.guard import Guard
from quire.serve.limits import Limits
from quire.serve.metrics import _COUNTERS, _GAUGES, Histogram, Metrics
from quire.serve.problems import Problem
from quire.serve.protocol import ConnectionBook, LimitedProtocol
from quire.serve.refusal_log import RefusalLog
from quire.serve.responses import _EventAnswer, _submitted, answer, event
from quire.serve.server import _on_signals, _Server, _Uvicorn
from quire.serve.service import Service
from quire.serve.tenants import ANYONE, Tenant
from quire.serve.turns import Turns
from quire.serve.wrong_keys import WrongKeys
from uvicorn.server import ServerState

DEADLINE = 120.0


class BrokenView:
    """Its second event is a defect."""

    def begin(self, prompt_tokens: int) -> tuple[bytes, ...]:
        return (b"data: begun\n\n",)

    def first(self, prompt_tokens: int, cached_tokens: int) -> tuple[bytes, ...]:
        return ()

    def step(self, deltas: Any) -> tuple[bytes, ...]:
        raise KeyError("a defect of a view")

    def failed(self, problem: Problem) -> bytes:
        return f"data: error {problem.status}\n\n".encode()


def test_a_defect_ends_a_stream_with_an_error_event() -> None:
    """Errors without a name once ended a stream that nobody could tell from a whole one."""

    async def sent() -> list[dict[str, Any]]:
        async def next_deltas(timeout: float) -> list[Any]:
            return [SimpleNamespace()]

        submitted: Any = SimpleNamespace(
            prompt_tokens=1, cached_tokens=0, next=next_deltas, first_token=None, result=None, fail=lambda error: None
        )
        finished: list[str] = []
        service: Any = SimpleNamespace(
            limits=Limits(), finish=lambda *arguments: finished.append(arguments[-1])
        )
        answer = _EventAnswer(service, Any, BrokenView(), submitted, Call("id-1", ANYONE), {})  # type: ignore
        messages: list[dict[str, Any]] = []

        async def receive() -> Any:
            await asyncio.sleep(DEADLINE)

        async def send(message: Any) -> None:
            messages.append(message)

        with pytest.raises(KeyError):  # which the guard logs
            await answer({}, receive, send)
        assert finished == ["error"]
        return messages

    start, *bodies = asyncio.run(sent())
    assert start["status"] == 200
    assert [body["body"] for body in bodies] == [
        b"data: begun\n\n",
        b"data: error 500\n\n",
        b"",
    ]
    assert bodies[-1]["more_body"] is False


# ---- Turns of the event loop


class SlowAnswer:
    """Has a token whenever it is looked at, which takes 4 ms."""

    measured = False
    is_unread = False

    def __init__(self, loop: TurnLoop, name: str, begun: bool = True) -> None:
        self.first_token = 0.0 if begun else None
        self._loop, self._name = loop, name

    def _poll(self, now: float) -> int:
        self._loop.now += 0.004
        self._loop.looked_at.append(self._name)
        return 1


class TurnLoop:
    """An event loop of which the test takes the turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looked_at: list[str] = []
        self._ready: collections.deque[Callable[[], None]] = collections.deque()

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], None]) -> None:
        self._ready.append(call)

    call_soon_threadsafe = call_soon

    def is_closed(self) -> bool:
        return False

    def turn(self) -> str:
        """The names of the answers that one turn looks at."""
        self.looked_at.clear()
        for _ in range(len(self._ready)):  # another thread may add more
            self._ready.popleft()()
        return " ".join(self.looked_at)


def test_tokens_that_come_faster_than_they_are_sent_leave_the_loop_time_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty streams with logprobs of a fast model once kept /health/live waiting for seconds."""
    loop = TurnLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    engine: Any = SimpleNamespace(on_step=None)
    streams = _streams(engine)
    answers: dict[Any, None] = dict.fromkeys(SlowAnswer(loop, name) for name in "abcde")
    monkeypatch.setattr(streams, "answers", answers)  # in an order
    engine.on_step()
    assert [loop.turn() for _ in range(4)] == ["a b c", "d e a", "b c d", "e a b"]
    answers[SlowAnswer(loop, "new", begun=False)] = None
    assert [loop.turn() for _ in range(2)] == ["new c d", "new e a"]


# ---- What is computed and not sent


def _streams(engine: Any, **limits: Any) -> Streams:
    found = Limits(**limits)
    return Streams(engine, lambda *_: None, found, ConnectionBook(found).refuse)


class HandedOut:
    """An answer of the engine, of which the test hands out the pieces.

    most: pieces that ever waited to be taken.
    """

    prompt_ids = (1,)
    prompt_tokens = 1
    cached_tokens = 0
    samples = (None,)

    def __init__(self) -> None:
        self.most = 0
        self.closed = False
        self._waiting: collections.deque[Piece] = collections.deque()

    def hand_out(self, text: str, alternatives: int = 0, sample: int = 0) -> None:
        piece = Piece(text)
        piece.ids, piece.logprobs, piece.top_logprobs = [7], None, None
        if alternatives:
            piece.logprobs, piece.top_logprobs = [-1.0], [[(i, -2.0) for i in range(alternatives)]]
        piece.sample, piece.finish_reason, piece.result = sample, None, None
        self._waiting.append(piece)
        self.most = max(self.most, len(self._waiting))

    def poll(self, most_steps: int) -> list[Piece]:
        count = min(most_steps, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def close(self) -> None:
        self.closed = True


def _answer(
    streams: Streams, stream: HandedOut, *, keep: bool = False, key: str = ""
) -> Answer:
    opened: Any = [stream]
    answer = Answer(streams, opened, 0.0, measured=False, keep=keep, key=key)
    streams.answers[answer] = streams.holders[answer] = None
    return answer


def test_the_engine_has_the_pace_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was faster than the loop once had hundreds of megabytes of outputs wait in
    queues that no limit bounded."""
    loop = TurnLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    engine: Any = SimpleNamespace(on_step=None)
    streams = _streams(engine)
    stream = HandedOut()
    answer = _answer(streams, stream)

    def steps() -> None:
        for _ in range(2000):
            stream.hand_out("x")
            engine.on_step()

    thread = threading.Thread(target=steps)
    thread.start()
    while thread.is_alive():
        loop.turn()
    loop.turn()
    assert stream.most <= 2
    assert answer.held_bytes == streams.held_bytes == 2000 * (64 + 4)


def test_an_engine_goes_on_without_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TurnLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    engine: Any = SimpleNamespace(on_step=None)
    streams = _streams(engine)
    call = engine.on_step
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(streams.close())
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    monkeypatch.setattr(loop, "is_closed", lambda: True)
    lost = _streams(engine)
    for _ in range(3):
        engine.on_step()
    assert lost is not streams


def test_what_waits_for_one_client_is_bounded() -> None:
    async def run() -> None:
        streams = _streams(SimpleNamespace(on_step=None), unread_bytes=10_000)
        stream = HandedOut()
        answer = _answer(streams, stream)
        for _ in range(1000):
            stream.hand_out("x" * 9)
            streams._poll_all()
            assert streams.held_bytes == answer.held_bytes <= 10_000
        assert stream.closed and answer not in streams.answers
        with pytest.raises(Problem) as caught:  # at once: what waited is gone
            await answer.next(DEADLINE)
        assert (caught.value.status, caught.value.code) == (408, "unread_bytes")

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_what_all_answers_hold_is_bounded() -> None:
    """Whole answers, which are kept until they end, and those that wait for their clients."""

    async def run() -> None:
        streams = _streams(SimpleNamespace(on_step=None), answers_bytes=100_000)
        whole, waiting, read = HandedOut(), HandedOut(), HandedOut()
        answers = [_answer(streams, whole, keep=True), _answer(streams, waiting)]
        reader = _answer(streams, read)
        got = 0
        for step in range(1000):
            whole.hand_out("x" * 20)
            waiting.hand_out("x")
            read.hand_out("x" * 50)
            streams._poll_all()
            assert streams.held_bytes <= 100_000, step
            got += len((await reader.next(DEADLINE) or [])[0].ids)
            if not whole.closed:
                await answers[0].next(DEADLINE)
        assert whole.closed and not waiting.closed and not read.closed and got == 1000
        with pytest.raises(Problem) as caught:
            await answers[0].next(DEADLINE)
        assert (caught.value.status, caught.value.code) == (503, "answers_bytes")
        for answer in (*answers, reader):
            answer.close()
        assert streams.held_bytes == 0 and not streams.holders and waiting.closed

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_the_key_that_holds_most_gives_up_an_answer() -> None:
    """The largest answer of all was ended: that of another key, if one had many smaller ones."""

    async def run() -> None:
        streams = _streams(SimpleNamespace(on_step=None), answers_bytes=100_000)
        own = HandedOut()
        answer = _answer(streams, own, keep=True, key="bob")
        own.hand_out("x" * 5_000)
        streams._poll_all()
        many = [HandedOut() for _ in range(8)]
        for stream in many:
            _answer(streams, stream, keep=True, key="ann")
            stream.hand_out("x" * 3_000)
        streams._poll_all()
        assert [stream.closed for stream in many].count(True) == 2 and not own.closed
        assert answer.held_bytes > 20_000 and streams.held_bytes <= 100_000

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_logprobs_of_a_whole_answer_count_with_what_it_takes_to_write_them() -> None:
    """357 bytes of each are taken at the end, and 128 were counted: 256 MiB of answers were more
    than a gigabyte for a moment."""

    async def run() -> None:
        streams = _streams(SimpleNamespace(on_step=None))
        for keep, least, most in ((True, 21 * 357, 21 * 600), (False, 20 * 100, 20 * 160)):
            stream = HandedOut()
            answer = _answer(streams, stream, keep=keep)
            for _ in range(10):
                stream.hand_out("x", alternatives=20)
            streams._poll_all()
            assert 10 * least < answer.held_bytes == streams.held_bytes < 10 * most
            await answer.next(DEADLINE)
            answer.close()
            assert streams.held_bytes == 0

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_body_counts_until_it_is_parsed() -> None:
    """Bodies of many connections that wait for a thread to parse them were bounded by nothing."""

    async def run() -> None:
        counts: list[int] = []
        body = json.dumps({"prompt": "x" * 100_000}).encode()

        async def stream() -> AsyncIterator[bytes]:
            yield body[:50_000]
            yield body[50_000:]

        async def parse(key: str, function: Callable[..., Any], *arguments: Any) -> Any:
            assert key == ANYONE.name
            counts.append(service.body_bytes.total())
            return function(*arguments)

        limits = Limits(bodies_bytes=len(body))
        service: Any = SimpleNamespace(
            limits=limits,
            strict=False,
            body_bytes=collections.Counter(),
            tenants=SimpleNamespace(need_keys=False),
            book=ConnectionBook(limits),
            streams=SimpleNamespace(run=parse),
        )
        request: Any = SimpleNamespace(
            headers={"content-type": "application/json"},
            stream=stream,
            scope={"state": {"call": Call("id", ANYONE)}},
        )
        found = await read_body(request, service, lambda fields, _: fields.text("prompt"))
        assert found == ("x" * 100_000, {})
        assert counts == [len(body)] and not service.body_bytes
        service.body_bytes["bob"] = 1  # of another request
        with pytest.raises(Problem) as caught:
            await read_body(request, service, lambda fields, _: None)
        assert caught.value.code == "bodies_bytes" and service.body_bytes == {"bob": 1}
        # One key with bodies that came slowly once kept those of all others out.
        service.body_bytes.clear()
        service.tenants.need_keys = True
        with pytest.raises(Problem) as caught:
            await read_body(request, service, lambda fields, _: None)
        assert caught.value.code == "bodies_bytes" and not service.body_bytes

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_defect_is_logged_by_its_place_and_without_texts() -> None:
    lines: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a secret of the prompt")

    async def run() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        metrics = SimpleNamespace(note_request=lambda *_: None)
        tenants = SimpleNamespace(find=lambda headers: ANYONE)
        service: Any = SimpleNamespace(tenants=tenants, metrics=metrics, draining=False)
        log: Any = SimpleNamespace(write=lambda *words, **facts: lines.append(facts))
        scope: Any = {"type": "http", "method": "GET", "path": "/version", "headers": []}
        scope["state"] = {"request_id": "id-1"}
        receive: Any = None
        await Guard(app, service, log, frozenset(), None)(scope, receive, send)
        assert sent[0]["status"] == 500

    asyncio.run(run())
    assert lines[0]["error"] == "ValueError" and lines[0]["at"][0].endswith(" app")
    assert lines[0]["at"][0].startswith("test_serve_parts.py:") and "secret" not in str(lines)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "no space"), ValueError("closed")])
def test_a_log_that_nobody_takes_ends_nothing(error: Exception) -> None:
    """At SIGTERM it ended the drain: running answers were cut, and no KV was written."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    for as_json in (False, True):
        Log(as_json, Gone()).write("info", "draining", answers=1)


def _refuse(refused: list[weakref.ref[Problem]]) -> None:
    problem = Problem(400, "no")
    refused.append(weakref.ref(problem))
    try:
        raise problem
    finally:
        del problem


def test_a_refusal_is_free_at_once() -> None:
    """What it holds by its traceback (a body of megabytes) once stayed until the collector came."""
    refused: list[weakref.ref[Problem]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        _refuse(refused)

    async def run() -> None:
        tenants = SimpleNamespace(find=lambda headers: ANYONE)
        metrics = SimpleNamespace(note_request=lambda *_: None)
        service: Any = SimpleNamespace(tenants=tenants, metrics=metrics, draining=False)
        log: Any = SimpleNamespace(write=lambda *_, **__: None)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message["type"])

        scope: Any = {"type": "http", "method": "GET", "path": "/version", "headers": []}
        scope["state"] = {"request_id": "id-1"}
        receive: Any = None
        await Guard(app, service, log, frozenset(), None)(scope, receive, send)
        assert sent == ["http.response.start", "http.response.body"]

    with _without_collector():
        asyncio.run(run())
        assert [each() for each in refused] == [None]


def test_a_failed_answer_is_free_at_once() -> None:
    failed: list[weakref.ref[Answer]] = []

    async def run() -> None:
        streams = _streams(SimpleNamespace(on_step=None))
        answer = _answer(streams, HandedOut())
        failed.append(weakref.ref(answer))
        answer.fail(Problem(408, "gone"))
        with contextlib.suppress(Problem):
            await answer.next(DEADLINE)
        answer.close()

    with _without_collector():
        asyncio.run(run())
        assert [each() for each in failed] == [None]


def _protocol(
    config: uvicorn.Config, state: ServerState, book: ConnectionBook | None = None
) -> LimitedProtocol:
    book = book or ConnectionBook(Limits())
    return LimitedProtocol(book, lambda *_: None, config=config, server_state=state, app_state={})


def test_a_connection_that_idles_holds_nothing_of_its_last_request() -> None:
    """It once held 10 KiB, and no connection that idles may hold more than 8."""
    cycles: list[weakref.ref[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cycles.append(weakref.ref(receive.__self__))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off", interface="asgi3")
        config.load()
        state = ServerState()
        connection = _protocol(config, state)
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: connection, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"GET /a HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
            while state.tasks:
                await asyncio.sleep(0)
            assert [cycle() for cycle in cycles] == [None, None]
            assert (connection.headers, connection.url) == ([], b"")
            writer.close()

    with _without_collector():
        asyncio.run(asyncio.wait_for(run(), DEADLINE))


@pytest.mark.parametrize("length", [100_000, 1 << 30])
@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_before_the_body_leaves_time_to_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool, length: int
) -> None:
    """The connection was closed at once where the answer or the client asked for that, and always
    with TLS: the rest of the body made the system reset it, and a client may lose what it was told,
    such as a 503 with its `retry-after`."""
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 2 * DEADLINE)
    served, trusted = certificates(tmp_path) if tls else (None, None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off", interface="asgi3")
        config.load()
        connection = _protocol(config, ServerState())
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: connection, "127.0.0.1", 0, ssl=served)
        async with listening as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
            writer.write(b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\nx" % length)
            begin = await reader.readuntil(b"\r\n\r\n")
            assert begin.startswith(b"HTTP/1.1 413" if length > 1 << 20 else b"HTTP/1.1 503")
            for _ in range(3):  # what was on its way
                assert not connection.transport.is_closing()
                writer.write(b"x" * 1000)
                await writer.drain()
            writer.close()
            while connection in connection.connections:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def certificates(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server at 127.0.0.1, and of its clients."""
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", key, "-out", cert, "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(cert, key)
    return served, ssl.create_default_context(cafile=cert)


def test_an_address_holds_no_more_connections_by_being_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that were told why stayed open for a second more: an address that came again and again
    had all that the server may have open."""
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 2 * DEADLINE)
    book = ConnectionBook(Limits(connections_per_address=2))

    async def run() -> None:
        config = uvicorn.Config(lambda: None, log_config=None, lifespan="off", interface="asgi3")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        make = lambda: _protocol(config, state, book)  # noqa: E731
        async with await loop.create_server(make, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            writers = []
            for number in range(7):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writers.append(writer)
                if number < 2:
                    continue  # the server waits for a request
                data = b""
                with contextlib.suppress(ConnectionResetError):
                    data = await reader.read()
                assert data.startswith(b"HTTP/1.1 429" if number < 4 else b"") and book.open <= 4
                assert bool(data) == (number < 4)
            assert book.refused == {"connections_per_address": 5}
            for writer in writers:
                writer.close()
            while book.open:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    assert book.per_address == {}


@pytest.mark.parametrize("large", [False, True])
def test_a_client_that_leaves_is_seen_behind_a_request_that_waits(large: bool) -> None:
    """uvicorn paused reading for a pipelined request: an answer without a stream held its pages
    until it was complete, for nobody. A large body that waits, and what follows, does so, too."""
    begun, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off", interface="asgi3")
        config.load()
        book = ConnectionBook(Limits())
        connection = _protocol(config, ServerState(), book)
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: connection, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
            await begun.wait()
            size = 1 << 20 if large else 10
            writer.write(b"POST /b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size)
            writer.write(b"x" * size)
            await writer.drain()
            while not (book.refused or connection.pipeline):
                await asyncio.sleep(0)
            writer.close()
            await gone.wait()
            assert book.refused == ({"pipelined": 1} if large else {})

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


class PeerTransport(asyncio.Transport):
    """A connection to a peer that takes nothing more. sent_eof: what writing its end gives."""

    def __init__(self, sent_eof: Exception | None = None) -> None:
        self.options: list[tuple[int, int, int]] = []
        self.written = b""
        self.closing = self.aborted = False
        self._sent_eof = sent_eof

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        peer = SimpleNamespace(
            setsockopt=lambda *option: self.options.append(option),
            family=socket.AF_INET,
            getsockname=lambda: ("127.0.0.1", 1),
            getpeername=lambda: ("127.0.0.1", 2),
        )
        return {"socket": peer, "peername": ("127.0.0.1", 2)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._sent_eof is not None:
            raise self._sent_eof

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


def _connected(transport: PeerTransport, limits: Limits) -> LimitedProtocol:
    config = uvicorn.Config(lambda: None, log_config=None, lifespan="off", interface="asgi3")
    config.load()
    connection = _protocol(config, ServerState(), ConnectionBook(limits))
    connection.connection_made(transport)
    return connection


def test_a_closed_connection_ends_in_time_whatever_its_client_takes() -> None:
    """asyncio tells that there is room again on closed connections, too: that stopped the timer,
    and a client that took no more had its connection for ever."""

    async def run() -> None:
        transport = PeerTransport()
        connection = _connected(transport, Limits())
        connection.pause_writing()
        connection._close()
        connection.resume_writing()
        timer = connection._write_timer
        assert timer is not None and not timer.cancelled() and not transport.aborted
        timer._run()
        assert transport.aborted
        connection.connection_lost(None)

        connection = _connected(PeerTransport(), Limits())
        connection.pause_writing()
        connection.resume_writing()  # an open one: there is nothing to end
        assert connection._write_timer is None
        connection.connection_lost(None)

    asyncio.run(run())


def test_a_refused_client_that_has_left_is_no_defect() -> None:
    """Each was a traceback in the log: the end of what is written cannot be told to it."""

    async def run() -> None:
        transport = PeerTransport(OSError(errno.ENOTCONN, "not connected"))
        connection = _connected(transport, Limits(connections=0))
        assert transport.written.startswith(b"HTTP/1.1 503")
        assert connection._read_timer is not None  # closes it
        connection.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize(("size", "taken"), [(4096, 4096), (2**31, 2**31 - 1), (2**40, 2**31 - 1)])
def test_a_write_buffer_of_any_size_is_taken(size: int, taken: int) -> None:
    async def run() -> None:
        transport = PeerTransport()
        connection = _connected(transport, Limits(write_buffer_bytes=size))
        assert transport.options == [(socket.SOL_SOCKET, socket.SO_SNDBUF, taken)]
        with socket.socket() as real:
            real.setsockopt(*transport.options[0])
        connection.connection_lost(None)

    asyncio.run(run())


# ---- Refusals in the log, and wrong keys


def test_lines_of_refusals_are_bounded() -> None:
    lines: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(write=lambda level, event, **facts: lines.append(facts))
    refusals = RefusalLog(log)
    for number in range(1000):
        refusals.note("http", 400, f"id-{number}", "::1", 100.0)
    refusals.note("header_bytes", 431, "other", "::1", 100.0)
    assert [line["id"] for line in lines] == [*(f"id-{i}" for i in range(10)), "other"]
    assert lines[0] == {"id": "id-0", "address": "::1", "status": 400, "error": "http"}
    refusals.note("http", 400, "later", "::1", 109.0)
    assert len(lines) == 11
    for id in ("next", "last"):
        refusals.note("http", 400, id, "::1", 110.0)
    assert [line.get("left_out") for line in lines[11:]] == [991, None]


def test_wrong_keys_are_counted_by_address() -> None:
    wrong = WrongKeys(60)
    assert [wrong.note("a", 5.0) for _ in range(62)] == [None] * 60 + [1, 1]
    assert wrong.note("b", 5.0) is None
    assert wrong.note("a", 6.0) is None and wrong.note("a", 6.0) == 1  # one a second is forgotten
    assert [wrong.note("a", 1000.0) for _ in range(61)] == [None] * 60 + [1]
    few = WrongKeys(1)
    assert [few.note("a", now) for now in (0.0, 0.0, 15.0, 60.0)] == [None, 60, 45, None]


def test_addresses_with_wrong_keys_are_bounded() -> None:
    wrong = WrongKeys(1)
    for number in range(10_050):
        assert wrong.note(str(number), 0.0) is None
    assert len(wrong) == 10_000
    assert wrong.note("10049", 0.0) is not None and wrong.note("0", 0.0) is None


@contextlib.contextmanager
def _without_collector() -> Any:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_client_that_leaves_before_its_request_is_with_the_engine() -> None:
    """Its grammar was compiled, and its prompt computed for a step, for nobody."""
    ended: list[str] = []

    async def run() -> None:
        async def submit(generation: Any, tenant: Tenant) -> None:
            try:
                await asyncio.sleep(DEADLINE)
            except asyncio.CancelledError:
                ended.append(tenant.name)
                raise

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        service: Any = SimpleNamespace(submit=submit)
        generation = Generation([], {})
        with pytest.raises(ClientGone):
            await _submitted(receive, service, generation, Call("id", ANYONE))
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    assert ended == [ANYONE.name]


@pytest.mark.parametrize(("tokens", "apart"), [(10, False), (1000, True)])
def test_many_logprobs_are_written_beside_the_event_loop(tokens: int, apart: bool) -> None:
    """16 answers of 6 000 tokens with 20 alternatives each held all streams for seconds."""
    threads: list[threading.Thread] = []

    class Whole(BrokenView):
        def whole(self, result: Result) -> dict[str, Any]:
            threads.append(threading.current_thread())
            return {"object": "whole"}

    async def run() -> None:
        async def next_deltas(timeout: float) -> list[Any]:
            return []

        async def submit(generation: Any, tenant: Tenant) -> Any:
            result = Result([1], [], Usage(1, 0, tokens))
            return SimpleNamespace(
                prompt_tokens=1, prompt_ids=[1], next=next_deltas, result=result, first_token=None
            )

        async def receive() -> Any:
            await asyncio.sleep(DEADLINE)

        turns = Turns(2)
        service: Any = SimpleNamespace(
            limits=Limits(),
            prefill_endpoint=None,
            submit=submit,
            streams=turns,
            finish=lambda *arguments: None,
        )
        request: Any = SimpleNamespace(
            scope={"state": {"call": Call("id", ANYONE)}}, headers={}, receive=receive
        )
        generation = Generation([], {}, logprobs=20)
        found = await answer(request, service, generation, Whole(), {})  # type: ignore[arg-type]
        assert found.status == 200
        turns.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    assert (threads != [threading.main_thread()]) == apart


# ---- The end


@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_waits_for_nothing(signals: int) -> None:
    """It ended answers alone: with a prompt of another process in work, or a request on its way to
    the engine, the server went on for all of the drain's time."""

    async def run() -> None:
        options: Any = SimpleNamespace(json_log=True, drain_seconds=None)  # for ever
        engine: Any = SimpleNamespace(end_prefill=lambda: None)
        server = _Server(engine, options, [])
        server._log = SimpleNamespace(write=lambda *_, **__: None)  # type: ignore[assignment]
        looks: list[bool] = []

        class Busy:
            streams = SimpleNamespace(answers=())
            ended = False
            begin_drain = staticmethod(lambda: None)

            @property
            def is_busy(self) -> bool:
                looks.append(True)
                return signals == 2 or len(looks) < 5

            def end_answers(self) -> None:
                self.ended = True

        service: Any = Busy()
        hurrying = asyncio.Event()
        draining = asyncio.create_task(server._drain(service, hurrying))
        while len(looks) < 3:
            await asyncio.sleep(0)
        if signals == 2:
            hurrying.set()
        await draining
        assert service.ended

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_signals_that_follow_the_first_end_what_runs() -> None:
    async def run() -> None:
        ending, told = asyncio.Event(), []
        with _on_signals(ending, lambda: told.append(ending.is_set())):
            for expected in (0, 1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
                while not ending.is_set() or len(told) < expected:
                    await asyncio.sleep(0)
                assert told == [True] * expected

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_clients_that_take_nothing_are_not_waited_for_in_a_hurry() -> None:
    app: Any = None
    server = _Uvicorn(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=31))
    server.hurry()  # answers are ended, and clients are still told
    assert (server.config.timeout_graceful_shutdown, server.force_exit) == (5, False)
    server.should_exit = True  # it waits for them
    server.hurry()
    assert server.force_exit


# ---- Texts that are tokenized alone


class Texts:
    """A service of /tokenize, /detokenize and /v1/messages/count_tokens, whose tokenizer waits
    until it is told to go on. begun: texts that it was given."""

    def __init__(self, *, need_keys: bool = True, **limits: Any) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Semaphore(0)
        self.turns = Turns(2)
        found = Limits(**limits)
        tokenizer = SimpleNamespace(
            encode=self._encode,
            decode=lambda ids, **_: self._encode(f"{ids}") and "text",
            encode_chat=lambda messages, **_: self._encode(messages[0]["content"]),
            chat_template=None,
        )
        self.service: Any = SimpleNamespace(
            limits=found,
            strict=False,
            body_bytes=collections.Counter(),
            texts=collections.Counter(),
            tenants=SimpleNamespace(need_keys=need_keys),
            book=ConnectionBook(found),
            streams=self.turns,
            tool_parser=None,
            template="",
            engine=SimpleNamespace(tokenizer=tokenizer),
            facts=ModelFacts(("tiny",), 100, 100, 0),
        )

    def _encode(self, text: str, **options: Any) -> list[int]:
        self.begun.append(text)
        assert self.go_on.acquire(timeout=DEADLINE)
        return [1, 2]

    def ask(
        self,
        body: dict[str, Any],
        leaving: asyncio.Event,
        route: Callable[..., Any] = text_routes.tokenize,
        tenant: Tenant = ANYONE,
    ) -> asyncio.Task[Any]:
        """The answer to a client that is there until the event is set."""
        data = json.dumps(body).encode()

        async def stream() -> AsyncIterator[bytes]:
            yield data

        async def receive() -> dict[str, str]:
            await leaving.wait()
            return {"type": "http.disconnect"}

        request: Any = SimpleNamespace(
            headers={"content-type": "application/json"},
            stream=stream,
            receive=receive,
            scope={"state": {"call": Call("id", tenant)}},
        )
        return asyncio.create_task(route(request, self.service))


async def _loop_turns() -> None:
    """More turns of the event loop than anything takes that waits for no thread and no time."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (text_routes.tokenize, {"prompt": "second"}),
        (text_routes.detokenize, {"tokens": [5, 6]}),
        (
            anthropic_messages.count_tokens,
            {"messages": [{"role": "user", "content": "second"}]},
        ),
    ],
)
def test_a_text_of_a_client_that_left_does_not_wait(
    route: Callable[..., Any], body: dict[str, Any]
) -> None:
    """One client that asked and closed, again and again, had thousands of texts wait for a thread,
    which nothing counted: hundreds of megabytes within seconds."""

    async def run() -> None:
        texts = Texts()
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = texts.ask({"prompt": "first"}, stays)
        second = texts.ask(body, leaves, route)
        await _loop_turns()
        service = texts.service
        size = len(json.dumps({"prompt": "first"})) + len(json.dumps(body))
        assert service.body_bytes.total() == size and len(texts.turns._waiting) == 1
        leaves.set()
        await _loop_turns()
        assert second.done() and isinstance(second.exception(), ClientGone)
        assert len(texts.turns._waiting) == 0
        texts.go_on.release()
        assert (await first).status == 200 and texts.begun == ["first"]
        assert not service.body_bytes and not service.texts
        texts.turns.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


@pytest.mark.parametrize(
    ("need_keys", "code", "status"), [(True, "queue_per_key", 429), (False, "queue", 503)]
)
def test_texts_that_are_tokenized_are_bounded(need_keys: bool, code: str, status: int) -> None:
    async def run() -> None:
        limits = {"queue_per_key": 3, "queue": 9 if need_keys else 3}
        texts = Texts(need_keys=need_keys, **limits)
        stays = asyncio.Event()
        tasks = [texts.ask({"prompt": f"{i}"}, stays) for i in range(4)]
        await _loop_turns()
        refused = tasks.pop()
        assert refused.done()
        problem = refused.exception()
        assert isinstance(problem, Problem)
        assert (problem.status, problem.code, problem.retry_after) == (status, code, 1)
        if need_keys:
            tasks.append(texts.ask({"prompt": "of another key"}, stays, tenant=Tenant("bob")))
        texts.go_on.release(len(tasks))
        assert [(await task).status for task in tasks] == [200] * len(tasks)
        assert not texts.service.texts and not texts.service.body_bytes
        texts.turns.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


# ---- Threads


class Jobs:
    """Work that ends when it is told to."""

    def __init__(self, turns: Turns) -> None:
        self.begun: list[str] = []
        self._turns = turns
        self._ends: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def ask(self, key: str, name: str) -> asyncio.Task[str]:
        self._ends[name] = threading.Event()
        return asyncio.create_task(self._turns.run(key, self._work, name, unwanted=self.unwanted))

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def unwanted(self, result: str) -> None:
        self.begun.append("unwanted " + result)

    def _work(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()
        assert self._ends[name].wait(DEADLINE)
        return name

    async def wait_begun(self, *names: str) -> None:
        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.begun) >= len(names), DEADLINE)

        await asyncio.to_thread(wait)
        assert set(self.begun) == set(names)


def test_long_work_of_a_key_leaves_a_thread_and_the_next_turn_to_others() -> None:
    """Texts of 4 MiB at /tokenize, which nothing counts, once made all others wait for minutes."""

    async def run() -> None:
        turns = Turns(3)
        jobs = Jobs(turns)
        ann = [jobs.ask("ann", f"a{i}") for i in range(5)]
        await jobs.wait_begun("a0", "a1")  # and no third one
        bob = [jobs.ask("bob", f"b{i}") for i in range(2)]
        await jobs.wait_begun("a0", "a1", "b0")
        jobs.end("a0")  # "ann" waits for longer, and "bob" has fewer: its turn comes after hers
        await jobs.wait_begun("a0", "a1", "b0", "a2")
        jobs.end("a1")
        await jobs.wait_begun("a0", "a1", "b0", "a2", "b1")
        jobs.end("b0", "b1")
        assert await asyncio.gather(*bob) == ["b0", "b1"]
        jobs.end("a2", "a3")
        turns.close()
        *others, last = await asyncio.gather(*ann, return_exceptions=True)
        assert others == ["a0", "a1", "a2", "a3"] and isinstance(last, errors.ClosedError)
        with pytest.raises(errors.ClosedError):
            await jobs.ask("cid", "c0")

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_work_that_nobody_waits_for_does_not_begin() -> None:
    async def run() -> None:
        turns = Turns(2)
        jobs = Jobs(turns)
        first, second, third = (jobs.ask("ann", name) for name in ("a", "b", "c"))
        await jobs.wait_begun("a")
        first.cancel()  # its result comes all the same
        second.cancel()
        await asyncio.wait((first, second))
        jobs.end("a", "b", "c")
        assert await third == "c" and sorted(jobs.begun) == ["a", "c", "unwanted a"]
        turns.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_work_of_those_who_left_is_free_at_once() -> None:
    """It waited for its turn with all that it had, such as a body of megabytes: 256 connections of
    an address that ask and leave, again and again, filled the memory."""

    class Body:
        pass

    async def run() -> None:
        turns = Turns(2)
        jobs = Jobs(turns)
        first = jobs.ask("ann", "a")
        await jobs.wait_begun("a")
        bodies = [Body() for _ in range(3)]
        left = [asyncio.create_task(turns.run("ann", id, body)) for body in bodies]
        await asyncio.sleep(0)
        held = [weakref.ref(body) for body in bodies]
        bodies.clear()
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        left.clear()
        del task
        assert [each() for each in held] == [None] * 3 and len(turns._waiting) == 0
        jobs.end("a")
        assert await first == "a"
        turns.close()

    with _without_collector():
        asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_what_fails_in_a_thread_is_free_at_once() -> None:
    refused: list[weakref.ref[Problem]] = []

    async def run() -> None:
        turns = Turns(2)
        with contextlib.suppress(Problem):
            await turns.run("ann", _refuse, refused)
        turns.close()
        turns._pool.shutdown()  # the thread tells its failure before it forgets it

    with _without_collector():
        asyncio.run(run())
        assert [each() for each in refused] == [None]


def test_a_system_without_threads_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that it refused later cost a place for ever: four of them ended all tokenizing."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        turns, engine = Turns(2), SlowEngine()
        queue = _queue(engine)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        found = [turns.run("ann", str, number) for number in range(5)]
        assert await asyncio.gather(*found) == ["0", "1", "2", "3", "4"]
        engine.go_on.release()
        assert (await _begin(queue, "ann", "a")).handle.text == "a"
        turns.close()
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_system_without_threads_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(errors.OutOfMemoryError, match="cannot start 4 threads quire-serve: can't"):
        Turns(4)
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)


# ---- Grammars


class SlowEngine:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.compiled: list[str] = []

    def compile_grammar(self, grammar: Grammar, special_texts: Any) -> CompiledGrammar:
        self.begun.release()
        assert self.go_on.acquire(timeout=DEADLINE)
        self.compiled.append(grammar.text)
        handle = SimpleNamespace(text=grammar.text, bytes=lambda: 1000)
        return CompiledGrammar(handle, special_texts)


class NoProbe:
    """Takes all but what is "costly"."""

    def check(self, grammar: Grammar, special_texts: Any) -> None:
        if grammar.text == "costly":
            raise TooCostlyError("grammar: it is too costly")

    def close(self) -> None:
        pass


def _queue(engine: SlowEngine, **limits: Any) -> GrammarQueue:
    found = Limits(**limits)
    return GrammarQueue(engine, found, ConnectionBook(found).refuse, NoProbe())  # type: ignore[arg-type]


def _begin(queue: GrammarQueue, tenant: str, text: str) -> asyncio.Task[CompiledGrammar]:
    return asyncio.create_task(queue.compile(Grammar("regex", text), (), tenant))


def test_grammars_are_bounded_for_each_key_and_in_all() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, grammars=4, grammars_per_key=3)
        tasks = [_begin(queue, "ann", text) for text in "abc"]
        await asyncio.sleep(0)
        for tenant, expected in (("ann", (429, "grammars_per_key")), ("bob", None), ("cid", (503, "grammars"))):
            task = _begin(queue, tenant, "d")
            await asyncio.sleep(0)
            if expected is None:
                tasks.append(task)
                continue
            with pytest.raises(Problem) as caught:
                await task
            assert (caught.value.status, caught.value.code) == expected
            assert caught.value.retry_after is not None
        engine.go_on.release(len(tasks) + 1)
        assert [(await task).handle.text for task in tasks] == ["a", "b", "c", "d"]
        assert (await _begin(queue, "ann", "e")).handle.text == "e"  # there is room again
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_keys_take_turns() -> None:
    """However many one key has, another one waits for one of them."""

    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine)
        tasks = [_begin(queue, "ann", text) for text in "abcd"]
        tasks += [_begin(queue, "bob", text) for text in "xy"] + [_begin(queue, "cid", "z")]
        await asyncio.sleep(0)
        engine.go_on.release(len(tasks))
        await asyncio.gather(*tasks)
        assert engine.compiled == ["a", "b", "x", "z", "c", "y", "d"]
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_what_is_compiled_is_given_at_once_within_a_bound() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, grammar_cache_bytes=2500)
        engine.go_on.release(4)
        first = await _begin(queue, "ann", "a")
        await _begin(queue, "ann", "b")
        held = _begin(queue, "bob", "a"), _begin(queue, "ann", "a")
        assert [await task for task in held] == [first, first]
        await _begin(queue, "ann", "c")  # there is room for two: "b" was used longest ago
        assert await _begin(queue, "ann", "a") is first
        await _begin(queue, "ann", "b")
        assert engine.compiled == ["a", "b", "c", "b"]
        # Nobody waits behind one that is compiled for what is kept.
        slow = _begin(queue, "ann", "e")
        await asyncio.sleep(0)
        assert await _begin(queue, "bob", "b") is not None and not slow.done()
        engine.go_on.release()
        await slow
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_costly_grammar_is_refused_and_counted() -> None:
    async def run() -> None:
        limits = Limits()
        book = ConnectionBook(limits)
        queue = GrammarQueue(SlowEngine(), limits, book.refuse, NoProbe())  # type: ignore[arg-type]
        with pytest.raises(TooCostlyError):
            await _begin(queue, "ann", "costly")
        with pytest.raises(TooCostlyError):  # now at once, whoever has a turn
            await _begin(queue, "bob", "costly")
        assert book.refused == {"grammar_seconds": 2}
        for number in range(64):
            queue.give_up(Grammar("regex", f"one {number}"), "it is too costly")
        assert Grammar("regex", "costly") not in queue._costly
        with pytest.raises(TooCostlyError, match="it is too costly"):
            await _begin(queue, "ann", "one 3")
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def of_grammar(error: errors.QuireError) -> errors.QuireError:
    return errors.about(error, "grammar")


COSTLY_TOKEN = "the grammar is too costly: one token took more than 0.1 s; grammar failed for token 1"


@pytest.mark.parametrize(
    ("error", "status", "param", "given_up"),
    [
        (of_grammar(errors.BadArgumentError("no token is allowed")), 400, "f", []),
        (of_grammar(errors.TooLargeError(COSTLY_TOKEN)), 400, "f", ["grammar: " + COSTLY_TOKEN]),
        (errors.BadArgumentError("a grammar that is not the cause"), 400, None, []),
        (errors.OutOfPagesError("there is no page"), 503, None, []),
        (errors.TooLargeError("2147483648 tokens, at most 2147483647"), 413, None, []),
    ],
)
def test_an_answer_that_its_grammar_ends_has_the_name_of_the_field(
    error: errors.QuireError, status: int, param: str | None, given_up: list[str]
) -> None:
    told: list[str] = []
    paused: list[str] = []
    grammars = SimpleNamespace(give_up=lambda grammar, why: told.append(why), pause=paused.append)
    service: Any = SimpleNamespace(grammars=grammars, tenants=SimpleNamespace(need_keys=True))
    generation = Generation(["x"], {"grammar": Grammar("regex", "a")}, grammar_field="f")
    found = Service.failure(service, error, generation, Tenant("ann"))
    assert (found.status, found.param, told) == (status, param, given_up)
    assert paused == ["ann"] * len(given_up)
    service.tenants.need_keys = False  # all are one tenant: nobody is paused for another one
    Service.failure(service, error, generation, Tenant("ann"))
    assert len(paused) == len(given_up)
    assert param is None or found.message.startswith("f: ")


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\n", "\x0b", "\x1e"])
def test_an_event_is_one_line_for_every_client(end: str) -> None:
    found = event({"text": f"a{end}b"}, "name").decode()
    assert [line.split(":")[0] for line in found.splitlines()] == ["event", "data", ""]
    assert json.loads(found.splitlines()[1].removeprefix("data: ")) == {"text": f"a{end}b"}


def test_a_key_is_paused_for_new_grammars_alone() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, grammar_pause_seconds=50.0)
        engine.go_on.release(3)
        first = await _begin(queue, "ann", "a")
        queue.pause("ann")
        assert await _begin(queue, "ann", "a") is first
        with pytest.raises(Problem, match="no new one for a while") as caught:
            await _begin(queue, "ann", "b")
        assert (caught.value.status, caught.value.retry_after) == (429, 50)
        assert (await _begin(queue, "bob", "b")).handle.text == "b"
        queue._paused["ann"] = asyncio.get_running_loop().time()  # it is over
        assert (await _begin(queue, "ann", "c")).handle.text == "c"
        assert queue._paused == {}
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_client_that_leaves_gives_up_its_turn() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, grammars_per_key=2)
        first, second = _begin(queue, "ann", "a"), _begin(queue, "ann", "b")
        await asyncio.sleep(0)
        second.cancel()
        third = _begin(queue, "ann", "c")
        engine.go_on.release(2)
        assert (await first).handle.text == "a" and (await third).handle.text == "c"
        assert engine.compiled == ["a", "c"]
        assert engine.begun.acquire() and engine.begun.acquire()
        fourth, fifth = _begin(queue, "ann", "d"), _begin(queue, "ann", "e")
        await asyncio.to_thread(engine.begun.acquire, timeout=DEADLINE)
        queue.close()
        with pytest.raises(errors.ClosedError):
            await fifth
        engine.go_on.release()
        assert (await fourth).handle.text == "d"

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_requests_that_come_together_share_a_grammar() -> None:
    """Nine with one schema, before it was known: the ninth was told that its key has too many."""

    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, grammars_per_key=1)
        tasks = [_begin(queue, "ann", "a") for _ in range(9)]
        await asyncio.sleep(0)
        tasks.pop().cancel()  # the others go on waiting
        with pytest.raises(Problem):
            await _begin(queue, "ann", "b")
        engine.go_on.release()
        assert {(await task).handle.text for task in tasks} == {"a"} and engine.compiled == ["a"]
        # Another key has a place of its own: it would wait for the turn of the first.
        others = [_begin(queue, name, "c") for name in ("ann", "bob")]
        engine.go_on.release()
        assert [(await task).handle.text for task in others] == ["c", "c"]
        assert engine.compiled == ["a", "c"] and not queue._turns
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_turn_that_was_given_up_stops_no_other() -> None:
    """One that gives up is in the queue until its task goes on: where its grammar was known by
    then, nothing was compiled any more."""

    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine)
        first = _begin(queue, "ann", "a")
        same = asyncio.create_task(queue.compile(Grammar("regex", "a"), ("x",), "ann"))
        other = _begin(queue, "bob", "b")
        await asyncio.sleep(0)
        (work,) = queue._turns["ann"]
        queue._keep(work, CompiledGrammar(SimpleNamespace(text="a", bytes=lambda: 1000), ()))
        work.done.cancel()  # as asyncio does, before the task that waits goes on
        queue._running = None  # and in the same turn the first one ends
        queue._begin_next()
        assert queue._running is not None and queue._running.grammar.text == "b"
        engine.go_on.release(2)
        assert (await first).handle.text == "a" and (await other).handle.text == "b"
        with pytest.raises(asyncio.CancelledError):
            await same
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, wait_seconds=0.01, grammars_per_key=1)
        with pytest.raises(Problem, match="not compiled within 0.01 s") as caught:
            await _begin(queue, "ann", "a")
        assert caught.value.status == 503
        with pytest.raises(Problem) as caught:  # the thread still works on the first
            await _begin(queue, "ann", "b")
        assert caught.value.status == 429
        engine.go_on.release(2)
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_the_time_between_tokens_is_that_of_each_sample() -> None:
    """With n = 2 and two prompts it was a quarter of that, also for who is let in."""

    class TwoSamples(HandedOut):
        samples = (None, None)  # type: ignore[assignment]

    async def run() -> None:
        service: Any = Service.__new__(Service)
        latency = Histogram((0.0, 2.0))
        service.metrics = SimpleNamespace(inter_token_latency=latency)
        service._last_tokens, service._places = {}, {}
        limits = Limits()
        engine: Any = SimpleNamespace(on_step=None)
        streams = Streams(engine, service._note_tokens, limits, ConnectionBook(limits).refuse)
        prompts: Any = [TwoSamples(), TwoSamples()]
        answer = Answer(streams, prompts, 0.0, measured=True, keep=False)
        for now in (1.0, 3.0, 5.0):
            for prompt in prompts:
                prompt.hand_out("x", sample=0)
                prompt.hand_out("x", sample=1)
            streams._poll(answer, now)
        assert (latency.count, latency.sum) == (8, 16.0)
        for _ in range(3):  # together
            prompts[1].hand_out("x", sample=1)
        streams._poll(answer, 12.0)
        assert (latency.count, latency.sum, latency._counts) == (11, 23.0, [2, 8, 1])
        answer.close()

    asyncio.run(run())


def test_counters_never_fall() -> None:
    """Tokens behind a stop text leave the engine's count when the answer is cut."""
    fields = (*_GAUGES, *_COUNTERS, "pages_total", "pages_free", "retained_pages", "pages_in_use")
    engine: Any = SimpleNamespace(
        step_times=lambda: StepTimes((), (0,), 0.0),
        store=None,
        prefill_peers=dict,
        prefill_refusals=dict,
    )
    metrics = Metrics(ConnectionBook(Limits()))

    def shown(count: int) -> str:
        page = metrics.text(dict.fromkeys(fields, count), engine)
        return next(line for line in page.splitlines() if line.startswith("quire:generation_tok"))

    assert shown(20) == "quire:generation_tokens_total 20"
    assert shown(17) == "quire:generation_tokens_total 20"
    assert shown(21) == "quire:generation_tokens_total 21"
