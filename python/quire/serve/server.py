"""The process: an engine, a listening socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import uvicorn

import quire
from quire import errors
from quire._prefill import OncePerCause
from quire.engine import Engine
from quire.serve.addresses import is_loopback
from quire.serve.app import make_app
from quire.serve.calls import Log
from quire.serve.generation import ModelFacts
from quire.serve.guarantees import guarantee_pages, guarantee_shares
from quire.serve.limits import Limits
from quire.serve.notify import notify
from quire.serve.protocol import LimitedProtocol
from quire.serve.refusal_log import RefusalLog
from quire.serve.service import Service
from quire.serve.tenants import Tenants

__all__ = ["ServerOptions", "bind", "serve"]

_BACKLOG = 2048
_FILES_BESIDE_CONNECTIONS = 256
_HURRY_SECONDS = 5  # that clients have after a second signal to take what they are told
_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """host: that clients may name beside those of this machine. names: of the model, for clients.
    tool_parser: one of tool_parser.PARSERS; None: by the template. prefill_listen: where other
    processes have their prompts computed; None: nowhere. drain_seconds: that running answers get
    after SIGTERM. tls_cert, tls_key: files in PEM; None: plain HTTP. origins: of web pages that may
    ask. reads_verdict: whether the model's verdict about blending is asked for at the start, which
    may read the weights, and not by the first request with documents. in_effect: what the log gets
    of the options, by their names.
    """

    host: str
    names: tuple[str, ...]
    tenants: Tenants
    limits: Limits
    strict: bool = False
    tool_parser: str | None = None
    prefill_listen: str | None = None
    drain_seconds: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: Sequence[str] = ()
    json_log: bool = False
    reads_verdict: bool = False
    in_effect: Mapping[str, str] = dataclasses.field(default_factory=dict)


def serve(
    engine: Engine,
    options: ServerOptions,
    sockets: list[socket.socket],
    on_ready: Callable[[str], None],
) -> int:
    """Answers until SIGINT, SIGTERM or SIGHUP; returns the exit code. `on_ready` is told the URL.

    The first signal refuses newcomers and lets answers end, and prompts for other processes; the
    second one, or `drain_seconds`, ends them with an error. The second one waits for nothing else
    either. sockets: of `bind`.
    """
    url = _url(options, sockets[0])
    _allow_files(options.limits)
    return asyncio.run(_Server(engine, options, sockets).run(lambda: on_ready(url)))


class _Server:
    def __init__(
        self, engine: Engine, options: ServerOptions, sockets: list[socket.socket]
    ) -> None:
        self._engine = engine
        self._options = options
        self._sockets = sockets
        self._log = Log(options.json_log)

    async def run(self, on_ready: Callable[[], None]) -> int:
        options = self._options
        info = self._engine.info
        facts = ModelFacts(
            options.names, info.vocab_size, info.max_position_embeddings, int(time.time())
        )
        self._log.write(
            "info", "started", version=quire.__version__, options=dict(options.in_effect)
        )
        service = Service(
            self._engine,
            facts,
            options.tenants,
            options.limits,
            strict=options.strict,
            tool_parser=options.tool_parser,
        )
        # Without keys a browser is kept from being turned against its own machine by a DNS name.
        open_to_all = options.tenants.need_keys or not is_loopback(options.host)
        hosts = None if open_to_all else _LOOPBACK_NAMES | {options.host}
        app = make_app(service, self._log, hosts=hosts, origins=options.origins)
        server = _Uvicorn(_uvicorn_config(app, service, self._log, options))
        ending, hurrying = asyncio.Event(), asyncio.Event()

        def end_now() -> None:
            hurrying.set()
            service.end_answers()
            server.hurry()

        with _on_signals(ending, end_now):
            listening = asyncio.create_task(server.serve(sockets=self._sockets))
            watching = asyncio.create_task(service.watch_progress())
            dividing = asyncio.create_task(self._divide_store())
            reading = asyncio.create_task(self._read_verdict())
            await server.wait_started(listening)
            service.prefill_endpoint = self._serve_prefill()
            on_ready()
            self._notify("READY=1")
            await _first(ending, listening)
            await self._drain(service, hurrying)
            server.should_exit = True
            await listening
            watching.cancel()
            await dividing
            await reading
        return await self._end(service)

    def _serve_prefill(self) -> str | None:
        """Prompts of other processes, from now on; where they have them computed."""
        listen = self._options.prefill_listen
        if listen is None:
            return None
        loop = asyncio.get_running_loop()

        def refused(why: str) -> None:
            note = functools.partial(self._log.write, "warning", "prefill refused", reason=why)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(note)

        endpoint = self._engine.serve_prefill(listen, on_refused=OncePerCause(refused))
        self._log.write("info", "prefill", endpoint=endpoint)
        return endpoint

    def _notify(self, state: str) -> None:
        try:
            notify(state)
        except OSError as error:  # a service manager that has gone ends no server
            self._log.write("warning", "notify", state=state, error=str(error))

    async def _drain(self, service: Service, hurrying: asyncio.Event) -> None:
        service.begin_drain()
        self._notify("STOPPING=1")
        running = len(service.streams.answers)
        self._log.write("info", "draining", answers=running)
        await asyncio.to_thread(self._engine.end_prefill)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_seconds):
                while service.is_busy and not hurrying.is_set():
                    await asyncio.sleep(0.02)
        service.end_answers()

    async def _divide_store(self) -> None:
        try:
            await asyncio.to_thread(guarantee_pages, self._engine, self._options.tenants)
            self._log.write("info", "pages", divided=self._options.tenants.need_keys)
            await asyncio.to_thread(guarantee_shares, self._engine, self._options.tenants)
        except (errors.QuireError, OSError, ValueError) as error:
            self._log.write("error", "store", error=str(error))
            return
        if self._engine.store is not None:
            self._log.write("info", "store", tiers=self._engine.store.tiers)

    async def _read_verdict(self) -> None:
        if not self._options.reads_verdict:
            return
        try:
            verdict = await asyncio.to_thread(self._engine.blend_verdict)
        except (errors.QuireError, OSError, ValueError) as error:
            self._log.write("error", "blend", error=str(error))
            return
        passes = None if verdict is None else verdict.passes
        self._log.write("info", "blend", verdict=passes)

    async def _end(self, service: Service) -> int:
        await service.streams.close()
        service.grammars.close()
        code = 0
        try:
            await asyncio.to_thread(self._engine.flush_store)
        except errors.QuireError as error:
            self._log.write("error", "store", error=str(error))
            code = 1
        self._log.write("info", "ended")
        return code


class _Uvicorn(uvicorn.Server):
    """uvicorn, whose signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def hurry(self) -> None:
        """Does not wait for clients any more that take nothing: not for long where it does not wait
        yet, for what they are told is on its way."""
        self.config.timeout_graceful_shutdown = _HURRY_SECONDS
        self.force_exit = self.should_exit

    async def wait_started(self, listening: asyncio.Task[None]) -> None:
        while not self.started:
            if listening.done():
                listening.result()
                raise errors.InternalError("the server ended before it listened")
            await asyncio.sleep(0.005)


def _uvicorn_config(
    app: object, service: Service, log: Log, options: ServerOptions
) -> uvicorn.Config:
    protocol = functools.partial(LimitedProtocol, service.book, RefusalLog(log).note)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=protocol,  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(options.limits.idle_seconds),
        # Answers have ended by then, and what clients have not taken goes with the protocol's
        # timers.
        timeout_graceful_shutdown=math.ceil(options.limits.slow_client_seconds) + 1,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )


@contextlib.contextmanager
def _on_signals(ending: asyncio.Event, end_now: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def heard() -> None:
        if ending.is_set():
            end_now()
        ending.set()

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup asks for
        signals.append(signal.SIGHUP)  # its terminal has gone
    for number in signals:
        loop.add_signal_handler(number, heard)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _first(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Until the event comes or the task is done; a task that failed raises."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()


def bind(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host. They do not listen yet: until `serve` does, clients
    are refused and do not wait. OSError: the address is taken or not this machine's."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            if port == 0:
                break  # each address would get a port of its own
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return sockets


def _url(options: ServerOptions, listener: socket.socket) -> str:
    scheme = "http" if options.tls_cert is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _allow_files(limits: Limits) -> None:
    """Each connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _FILES_BESIDE_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
