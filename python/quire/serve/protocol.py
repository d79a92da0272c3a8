"""Connections: uvicorn's HTTP protocol over httptools, and the limits that it lacks.

The life of a connection: *idle* (no byte of a request) -> *header* -> *body* -> *answer* -> idle.
A read timer runs in each of the first three; a write timer runs while the client takes nothing of
what was written. A refusal is written only where no answer is in progress, so that it never stands
in the middle of one; else the connection is closed after that answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from quire.serve.addresses import address_key
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.request_ids import id_headers, request_id

__all__ = ["ConnectionBook", "LimitedProtocol"]


class ConnectionBook:
    """What is counted over all connections, by the event loop's thread alone.

    open: now; by address as `per_address` has them. refused: connections and requests that were
    ended by a limit, by its name.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open = 0
        self.per_address: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    def add(self, address: str) -> Problem | None:
        """Counts a connection. The problem, if it is one too many."""
        self.open += 1
        self.per_address[address] = self.per_address.get(address, 0) + 1
        if self.open > self.limits.connections:
            return self.refuse("connections", 503, "the server has too many connections")
        if self.per_address[address] > self.limits.connections_per_address:
            message = "there are too many connections from this address"
            return self.refuse("connections_per_address", 429, message)
        return None

    def is_flooded_by(self, address: str) -> bool:
        """Whether an address has more than twice its limit, and its newest connection is closed
        without a word: those that are told why stay open until they know, and all addresses share
        what may be open."""
        return self.per_address[address] > 2 * self.limits.connections_per_address

    def remove(self, address: str) -> None:
        self.open -= 1
        self.per_address[address] -= 1
        if self.per_address[address] == 0:
            del self.per_address[address]

    def refuse(self, limit: str, status: int, message: str) -> Problem:
        """Counts a limit that was met; the problem to tell."""
        self.refused[limit] = self.refused.get(limit, 0) + 1
        retry_after = 1 if status in (429, 503) else None
        return Problem(status, message, code=limit, retry_after=retry_after)


class _Refusal(Exception):
    """Thrown by a callback through the parser, which ends it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


# A refused client is read for so long, and so far, that it gets its answer before the connection
# ends.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 << 10
_SEND_BUFFER_MAX = 2**31 - 1  # an int of C


NoteRefusal = Callable[[str, int, str, str, float], None]


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        book: of all connections of the server.
        note_refusal: is told of each refusal, as RefusalLog.note.
    """

    def __init__(self, book: ConnectionBook, note_refusal: NoteRefusal, **settings: Any) -> None:
        super().__init__(**settings)
        self._note_refusal = note_refusal
        self.url = b""
        self.parser = httptools.HttpRequestParser(self)  # without uvicorn's leniencies
        self._book = book
        self._limits = book.limits
        self._address: str | None = None
        self._running: RequestResponseCycle | None = None  # self.cycle is the one read last
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_header = False
        self._in_body = False
        self._header_bytes = 0  # of the header that has not ended
        self._body_bytes = 0
        self._framing_bytes = 0  # that came since the last ones of the body: trailers, extensions
        self._body_begin = 0.0  # since when the client could send
        self._body_bytes_before = 0  # what had come then
        self._upgrades = False  # the header asks for another protocol
        self._closing = False  # nothing more is taken
        self._discarded_bytes = 0

    # ---- The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        size = self._limits.write_buffer_bytes
        self.transport.set_write_buffer_limits(high=size)
        # The kernel's buffer grows to megabytes by itself, which a slow client would fill first.
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(size, _SEND_BUFFER_MAX))
        self._address = address_key(self.client)
        problem = self._book.add(self._address)
        if problem is not None and self._book.is_flooded_by(self._address):
            self.transport.abort()
        elif problem is not None:
            self._refuse(problem)
        else:
            self._start_read_timer(self._limits.idle_seconds, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        if self._address is not None:
            self._book.remove(self._address)
            self._address = None
        self.pipeline.clear()
        if self._answering:
            self._end_handler()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        seconds = self._limits.slow_client_seconds
        self._write_timer = self.loop.call_later(seconds, self._drop_slow_client)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # else the timer ends it, whatever is still taken
            self._stop_write_timer()

    def _drop_slow_client(self) -> None:
        self._book.refuse("slow_client", 408, "")
        self.transport.abort()

    def _close(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """A closed transport waits until the client has taken what was written, however long."""
        self._stop_write_timer()
        seconds = self._limits.slow_client_seconds
        self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # ---- Requests

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._discard(data)
            return
        self._unset_keepalive_if_required()
        if not self._in_body and not self._in_header:
            self._begin_header()
        if self._in_header:
            self._header_bytes += len(data)
        self._framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
            most = self._limits.header_bytes
            if self._in_header and self._header_bytes > most:
                raise _Refusal(self._header_too_large())
            if self._in_body and self._framing_bytes > most:
                raise _Refusal(self._header_too_large())
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, _Refusal):
                self._refuse(cause.problem)
            elif isinstance(cause, (httptools.HttpParserError, ValueError)):  # of the URL
                self._refuse(self._invalid("the request's target is not valid"))
            else:
                raise
        except _Refusal as refusal:
            self._refuse(refusal.problem)
        except httptools.HttpParserError:
            self._refuse(self._invalid("the request is not valid HTTP/1.1"))

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Reads the request again as if it did not ask for another protocol. Clients that would
        like HTTP/2 (Java's own does) send their body all the same, which the parser takes for the
        other protocol's."""
        dropped = (b"upgrade", b"connection", b"http2-settings")
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in dropped]
        self.parser = httptools.HttpRequestParser(self)
        self._upgrades = self._in_header = False
        self.data_received(b"\r\n".join([*lines, b"connection: close", b"", rest]))

    def _discard(self, data: bytes) -> None:
        """Reads on while an answer is in progress: nothing else shows that its client leaves."""
        self._discarded_bytes += len(data)
        in_work = self._running is not None and self._answering and not self._running.disconnected
        if self._discarded_bytes > _LINGER_BYTES and not in_work:
            self.flow.pause_reading()

    def _begin_header(self) -> None:
        self._in_header = True
        self._header_bytes = 0
        if not self._answering:
            self._start_read_timer(self._limits.header_seconds, self._refuse_late_header)

    def _refuse_late_header(self) -> None:
        seconds = self._limits.header_seconds
        message = f"the headers were not complete after {seconds:g} s"
        self._refuse(self._book.refuse("header_seconds", 408, message))

    def _header_too_large(self) -> Problem:
        message = f"the headers have more than {self._limits.header_bytes} bytes"
        return self._book.refuse("header_bytes", 431, message)

    def _invalid(self, message: str) -> Problem:
        return self._book.refuse("http", 400, message)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_header:  # a request that begins within the data of the one before it
            self._begin_header()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.header_bytes:
            raise _Refusal(self._header_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: as a header it could be a key that nobody in front has seen
        super().on_header(name, value)
        if len(self.headers) > self._limits.header_count:
            message = f"the request has more than {self._limits.header_count} headers"
            raise _Refusal(self._book.refuse("header_count", 431, message))

    def on_headers_complete(self) -> None:
        # A request for a tunnel asks for another protocol whatever its headers say.
        if self.parser.get_method() == b"CONNECT" or not self.url.startswith(b"/"):
            raise _Refusal(self._invalid("the request's target must be a path"))
        if self.parser.should_upgrade():
            self._upgrades = True
            return
        self._in_header = False
        self._check_headers()
        if self.parser.get_http_version() != "1.1":
            self.expect_100_continue = False  # its client would take that for the answer
        if len(self.pipeline) >= self._limits.pipelined:
            message = f"more than {self._limits.pipelined} requests wait on this connection"
            raise _Refusal(self._book.refuse("pipelined", 429, message))
        self._in_body = True
        self._body_bytes = self._body_bytes_before = self._framing_bytes = 0
        self._body_begin = self.loop.time()
        self._start_read_timer(self._limits.body_grace_seconds, self._check_body_rate)
        self.scope["state"]["request_id"] = request_id(self.headers)
        super().on_headers_complete()
        if self.pipeline:  # reading goes on, for only so is seen that the client has left
            self.flow.resume_reading()

    def _check_headers(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.header_bytes:
            raise _Refusal(self._header_too_large())
        lengths = [value for name, value in self.headers if name == b"content-length"]
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        # One framing, said once: whatever stands in front of the server reads the same.
        if len(lengths) + len(codings) > 1:
            raise _Refusal(self._invalid("the length of the body is said twice"))
        if any(coding.lower() != b"chunked" for coding in codings):
            raise _Refusal(self._invalid("transfer-encoding must be chunked"))
        if codings and self.parser.get_http_version() != "1.1":
            raise _Refusal(self._invalid("transfer-encoding is no header of HTTP/1.0"))
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise _Refusal(self._invalid("the request has more than one host"))
        if lengths and int(lengths[0]) > self._limits.body_bytes:
            raise _Refusal(self._body_too_large())

    def _body_too_large(self) -> Problem:
        message = f"the body has more than {self._limits.body_bytes} bytes"
        return self._book.refuse("body_bytes", 413, message)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = _AnswerTransport(self.transport, self._end_answer)  # type: ignore[assignment]
        if cycle.scope["http_version"] != "1.1":
            app = _until_closed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._framing_bytes = 0
        if self._body_bytes > self._limits.body_bytes:
            raise _Refusal(self._body_too_large())
        if self.cycle is not self._running:
            self._check_waiting_bodies(len(body))
        super().on_body(body)

    def _check_waiting_bodies(self, more: int) -> None:
        """Refuses more than uvicorn reads before it pauses: a client that leaves while reading is
        paused is seen by nobody."""
        waiting = more + sum(len(cycle.body) for cycle, _ in self.pipeline)
        if waiting > HIGH_WATER_LIMIT:
            message = f"requests that wait on this connection have {waiting} bytes in bodies"
            message += f"; they may have {HIGH_WATER_LIMIT}"
            raise _Refusal(self._book.refuse("pipelined", 429, message))

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._in_body = False
        self._stop_read_timer()
        super().on_message_complete()

    def _check_body_rate(self) -> None:
        """Runs once a second from the end of the grace to the end of the body."""
        limits = self._limits
        now = self.loop.time()
        if self.flow.read_paused:  # it is the server that waits
            self._body_begin, self._body_bytes_before = now, self._body_bytes
        seconds = now - self._body_begin
        came = self._body_bytes - self._body_bytes_before
        if seconds > limits.body_seconds or came < limits.body_rate_least * seconds:
            message = (
                f"the body was not complete after {limits.body_seconds:g} s, or came at less than "
                f"{limits.body_rate_least} bytes/s"
            )
            self._refuse(self._book.refuse("body_seconds", 408, message))
        else:
            wait = max(1.0, limits.body_grace_seconds - seconds)
            self._start_read_timer(wait, self._check_body_rate)

    def on_response_complete(self) -> None:
        # What is left of the body is never read: the next request would have to wait for it.
        body_left = self._in_body and self.cycle is self._running
        if self._closing or body_left:
            self._closing = True
            self.pipeline.clear()
            self._end_connection()
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif self._in_header:
            self._unset_keepalive_if_required()
            self._start_read_timer(self._limits.header_seconds, self._refuse_late_header)
        elif not self._in_body and not self._answering:
            self._forget_request()

    def _forget_request(self) -> None:
        """A connection that idles holds nothing of its last request."""
        self.cycle = self._running = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]
        self.headers = []
        self.url = b""

    # ---- Refusals

    @property
    def _answering(self) -> bool:
        """Whether an answer of this connection has not ended."""
        return self._running is not None and not self._running.response_complete

    def _refuse(self, problem: Problem) -> None:
        """Takes nothing more; tells why, unless an answer is in progress; closes."""
        self._closing = True
        self._stop_read_timer()
        self.pipeline.clear()
        id, now = self._request_id(), self.loop.time()
        self._note_refusal(problem.code or "", problem.status, id, self._address or "", now)
        if self.transport.is_closing():
            return
        if self._running is not None and self._answering:
            reads_body = self._in_body and self.cycle is self._running
            if self._running.response_started or not reads_body:
                return  # on_response_complete closes the connection
            self._end_handler()
        path = self.url.decode("latin-1")
        body = json.dumps(problem.told_at(path)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **problem.headers,
            **id_headers(path, id),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[problem.status] + lines.encode() + b"\r\n" + body)
        self._end_connection()

    def _request_id(self) -> str:
        """The id of the request that is read, by its headers as far as they came."""
        known = {} if self.scope is None else self.scope["state"]
        return known.get("request_id") or request_id(self.headers or ())

    def _end_handler(self) -> None:
        """The handler of the answer in progress sees that the client has gone."""
        assert self._running is not None
        self._running.disconnected = True
        self._running.message_event.set()

    def _end_answer(self) -> None:
        """An answer is over, and with it the connection."""
        if self._in_body and self.cycle is self._running:  # of what is left some may be on its way
            self._closing = True
            self._end_connection()
        else:
            self.transport.close()

    def _end_connection(self) -> None:
        """Closes once the client has had time to take what was written: a reset, which unread bytes
        cause, could overtake it."""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():  # not with TLS
            with contextlib.suppress(OSError):  # the client has closed already
                self.transport.write_eof()
        self._start_read_timer(_LINGER_SECONDS, self._close)

    # ---- Timers

    def _start_read_timer(self, seconds: float, action: Callable[[], None]) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(seconds, action)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _AnswerTransport:
    """What an answer has of its connection.

    close: in the place of the connection's own.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _until_closed(app: Any, cycle: RequestResponseCycle) -> Any:
    """The application, for a client of HTTP/1.0: it knows no chunks, so an answer without a length
    goes on until its connection is closed."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_unchunked(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_unchunked)

    return run
