"""Clients of a server, and what they see of it: first tokens, tokens in between, tokens per second.

The same work is asked of an engine in this process, which is what HTTP is compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Samples = dict[str, list[float]]
_IDLE_BYTES = 8 << 10  # that a connection without a request may take
_IDLE_PATIENCE_SECONDS = 60.0


@dataclasses.dataclass
class Seen:
    """What a client saw of one answer. times: of each token, in seconds."""

    begin: float = dataclasses.field(default_factory=time.perf_counter)
    times: list[float] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)

    def note(self, ids: list[int]) -> None:
        self.times += [time.perf_counter()] * len(ids)
        self.ids += ids

    @property
    def first_token(self) -> float:
        return self.times[0] - self.begin

    def gaps(self, since: float = 0.0, until: float = math.inf) -> list[float]:
        """Those that begin in between."""
        pairs = zip(self.times, self.times[1:])
        return [later - earlier for earlier, later in pairs if since <= earlier < until]


class Ask(Protocol):
    """Sends a prompt and notes its answer of `tokens` tokens in `seen` as it comes."""

    def __call__(self, prompt: list[int], tokens: int, seen: Seen) -> Awaitable[None]: ...


class HttpAsk:
    """Of a server: a connection for each answer, and a stream of events.

    Args:
        port: on this machine.
        path, body: of a request; the body of a prompt and a number of tokens.
    """

    def __init__(
        self, port: int, path: str, body: Callable[[list[int], int], dict[str, Any]]
    ) -> None:
        self._port, self._path, self._body = port, path, body

    async def __call__(self, prompt: list[int], tokens: int, seen: Seen) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            data = json.dumps(self._body(prompt, tokens)).encode()
            head = f"POST {self._path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            status = await reader.readline()
            while (await reader.readline()).strip():
                pass
            if b" 200 " not in status:
                raise OSError(f"{self._path}: {status!r}: {(await reader.read(400))!r}")
            await self._read_events(reader, seen)
        finally:
            writer.close()
        if len(seen.ids) != tokens:
            raise OSError(f"{self._path}: {len(seen.ids)} tokens came, and not {tokens}")

    async def _read_events(self, reader: asyncio.StreamReader, seen: Seen) -> None:
        """Of a chunked body."""
        held = b""
        while size := int(await reader.readline(), 16):
            held += (await reader.readexactly(size + 2))[:-2]
            *lines, held = held.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    seen.note(_ids(json.loads(line[6:]), len(seen.ids)))


def _ids(event: dict[str, Any], before: int) -> list[int]:
    """The token ids of an event, in llama-server's own form or in that of completions.

    llama-server sends nothing while the text ends within a character, and then the last id alone:
    the others, of which it tells the number, are -1.

    Args:
        event: of a stream.
        before: tokens that have come.
    """
    if "choices" not in event:
        if "error" in event:
            raise OSError(str(event["error"])[:200])
        ids = list(event.get("tokens") or ())
        held = event.get("tokens_predicted", 0) - before - len(ids)
        return [-1] * max(0, held) + ids
    return [id for choice in event["choices"] for id in choice.get("token_ids") or ()]


class EngineAsk:
    """Of a quire.Engine in this process, whose `on_step` it is until close()."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        engine.on_step = lambda: loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        self._engine.on_step = None

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def __call__(self, prompt: list[int], tokens: int, seen: Seen) -> None:
        with self._engine.stream(
            prompt, max_tokens=tokens, ignore_eos=True, greedy=True, logprobs=None
        ) as stream:
            while not stream.finished:
                news = self._news
                pieces = stream.poll()
                for piece in pieces:
                    seen.note(piece.ids)
                if not pieces:
                    await news.wait()


class Work:
    """What clients do. Prompts are new in each call: nothing of them is known to the server."""

    def __init__(self, ask: Ask, vocab_size: int, seed: int) -> None:
        self._ask = ask
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(100, self._vocab_size) for _ in range(tokens)]

    async def _answer(self, prompt: list[int], tokens: int) -> Seen:
        seen = Seen()
        await self._ask(prompt, tokens, seen)
        return seen

    async def clients(self, clients: int, prompt: int, tokens: int, times: int = 1) -> Samples:
        """All at the same time, each `times` one after the other, always with a new prompt."""

        async def client() -> list[Seen]:
            return [await self._answer(self._prompt(prompt), tokens) for _ in range(times)]

        begin = time.perf_counter()
        clients_seen = await asyncio.gather(*[client() for _ in range(clients)])
        end = time.perf_counter()
        seen = [one for answers in clients_seen for one in answers]
        gaps = [gap for one in seen for gap in one.gaps()]
        return {
            "call": [end - begin],
            "first token": [one.first_token for one in seen],
            "between tokens": [statistics.median(gaps)],
            "between tokens, p99": [_p99(gaps)],
        }

    async def chats(
        self, clients: int, common: int, turns: int, question: int, tokens: int
    ) -> Samples:
        """Conversations behind one beginning: a turn is all that was said and a new question."""
        beginning = self._prompt(common)

        async def chat() -> list[float]:
            text, firsts = list(beginning), []
            for _ in range(turns):
                text += self._prompt(question)
                seen = await self._answer(text, tokens)
                firsts.append(seen.first_token)
                text += seen.ids
            return firsts

        begin = time.perf_counter()
        firsts = await asyncio.gather(*[chat() for _ in range(clients)])
        return {
            "call": [time.perf_counter() - begin],
            "first token, turn 1": [chat[0] for chat in firsts],
            "first token, later": [first for chat in firsts for first in chat[1:]],
        }

    async def branches(self, branches: int, prompt: int, own: int, tokens: int) -> Samples:
        """One beginning, computed once; then answers to it that differ in their last tokens."""
        beginning = self._prompt(prompt)
        first = await self._answer(beginning + self._prompt(own), 1)
        begin = time.perf_counter()
        answers = [self._answer(beginning + self._prompt(own), tokens) for _ in range(branches)]
        seen = await asyncio.gather(*answers)
        end = time.perf_counter()
        return {
            "call": [end - begin],
            "first token, alone": [first.first_token],
            "first token": [one.first_token for one in seen],
            "between tokens": [statistics.median(gap for one in seen for gap in one.gaps())],
        }

    async def arrivals(self, clients: int, prompts: int, prompt: int, tokens: int) -> Samples:
        """Answers that are written while long prompts arrive, one behind the other. Quiet are the
        steps behind the last prompt: answers are longest there, so their steps take longest."""
        streams = [Seen() for _ in range(clients)]
        asked = [self._ask(self._prompt(32), tokens, seen) for seen in streams]
        tasks = [asyncio.ensure_future(each) for each in asked]
        try:
            await _until_grown(tasks, streams, 16)
            begin = min(seen.times[-1] for seen in streams)  # of the gap in which a prompt arrives
            firsts = [await self._answer(self._prompt(prompt), 1) for _ in range(prompts)]
            end = time.perf_counter()
            await _until_grown(tasks, streams, 64)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
        p99 = _p99([gap for seen in streams for gap in seen.gaps(begin, end)])
        quiet_p99 = _p99([gap for seen in streams for gap in seen.gaps(end)])
        return {
            "first token": [seen.first_token for seen in firsts],
            "between tokens, quiet p99": [quiet_p99],
            "between tokens, p99": [p99],
            "p99 by its bound": [p99 / max(_max_step_seconds(), 1.25 * quiet_p99)],
            "p99 by its quiet value": [p99 / quiet_p99],
        }


def _max_step_seconds() -> float:
    """--max-step-ms of `quire serve`, by default."""
    from quire import _options

    milliseconds: int = _options.ENGINE["max_step_ms"].default
    return milliseconds / 1000


async def _until_grown(tasks: list[asyncio.Future[None]], streams: list[Seen], by: int) -> None:
    """Until each stream has more than `by` tokens more; raises what a task failed with."""
    wanted = [len(seen.times) + by for seen in streams]
    while any(len(seen.times) <= most for seen, most in zip(streams, wanted, strict=True)):
        done, _ = await asyncio.wait(tasks, timeout=0.005, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if len(done) == len(tasks):
            raise RuntimeError("all answers ended before the last prompt did: ask for more tokens")


def _p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


async def measure(ask: Ask, vocab_size: int, seed: int, kind: str, **shape: Any) -> Samples:
    work = Work(ask, vocab_size, seed)
    samples: Samples = await getattr(work, kind)(**shape)
    return samples


def idle_connections(port: int, memory: Callable[[], int], connections: int) -> Samples:
    """Connections that have asked once and stay open, and the memory that the server has for them.

    memory: bytes of the server. REQUIRES: one in which no connections were before, whose memory it
        would use again.
    """

    def ask(stack: contextlib.ExitStack) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_IDLE_PATIENCE_SECONDS)
        stack.enter_context(contextlib.closing(connection))
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise OSError(f"/health: {answer.status}")

    with contextlib.ExitStack() as stack:
        ask(stack)  # what the first one of all brings is not that of a connection
        before = memory()
        for _ in range(connections):
            ask(stack)
        grown = memory() - before
    return {
        "memory of idle connections": [float(grown)],
        "idle connection by its bound": [grown / connections / _IDLE_BYTES],
    }
