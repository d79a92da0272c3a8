"""The engine as the event loop sees it: submit a request, await the pieces of each step, cancel.

The only module of the server that knows how requests of the engine run. All methods are for the
thread of the event loop; what may wait for the engine runs in a small pool of threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from quire import errors
from quire.engine import Engine, FinishReason, Piece, Prompt, Result, SamplingOptions, Stream

__all__ = ["Answer", "Delta", "Streams"]

T = TypeVar("T")
_STEPS_PER_TURN = 16  # of one answer, before others and their sockets have a turn
_POOL_THREADS = 4  # tokenizing and templates; more would only take turns with each other


@dataclasses.dataclass
class Delta:
    """What came for one sample since the last step.

    logprobs, top_logprobs: one entry per id; empty unless they were asked for.
    """

    sample: int
    text: str
    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: FinishReason | None


class Answer:
    """A submitted request: its deltas, then its result.

    submitted, first_token: times of the event loop's clock in seconds; the latter None before it.
    measured: whether the server's metrics count it. result: set with the last delta.
    """

    def __init__(self, streams: Streams, stream: Stream, now: float, measured: bool) -> None:
        self.submitted = now
        self.measured = measured
        self.first_token: float | None = None
        self.result: Result | None = None
        self._streams = streams
        self._stream = stream
        self._deltas: list[Delta] = []
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._noted: dict[int, int] = {}  # per sample: tokens whose logprobs were given

    @property
    def prompt_ids(self) -> list[int]:
        return self._stream.prompt_ids

    @property
    def seed(self) -> int | None:
        return self._stream.seed

    async def next(self, timeout: float) -> list[Delta] | None:
        """All that came since the last call; waits until there is something. [] at the end, None
        after `timeout` seconds without anything. Raises QuireError, and what `fail` was given."""
        if not self._deltas and self._error is None and self.result is None:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._news.wait()
            except TimeoutError:
                return None
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    def fail(self, error: BaseException) -> None:
        """Ends the request; `next` raises the error once it has given what came before."""
        if self.result is None and self._error is None:
            self._error = error
            self._news.set()
        self.close()

    def close(self) -> None:
        """Ends the request if it has not ended: its pages are free before the next step."""
        self._streams._forget(self)
        self._stream.close()

    def _poll(self, now: float) -> int:
        """Takes what is new from the engine; returns the number of new tokens."""
        try:
            pieces = self._stream.poll(_STEPS_PER_TURN)
        except errors.QuireError as error:
            self.fail(error)
            return 0
        self._deltas += [self._delta(piece) for piece in pieces]
        tokens = sum(len(piece.ids) for piece in pieces)
        if tokens and self.first_token is None:
            self.first_token = now
        if pieces and pieces[-1].result is not None:
            self.result = pieces[-1].result
            self._streams._forget(self)
        if pieces:
            self._news.set()
        return tokens

    def _delta(self, piece: Piece) -> Delta:
        sample = self._stream.samples[piece.sample]
        begin = self._noted.get(piece.sample, 0)
        end = self._noted[piece.sample] = begin + len(piece.ids)
        return Delta(
            piece.sample,
            piece.text,
            piece.ids,
            (sample.logprobs or [])[begin:end],
            (sample.top_logprobs or [])[begin:end],
            piece.finish_reason,
        )


class Streams:
    """All requests of one engine.

    Args:
        engine: its `on_step` is used here.
        on_tokens: is given an answer, the number of its new tokens and the time of the event loop's
            clock, once per step and measured answer.
    """

    def __init__(self, engine: Engine, on_tokens: Callable[[Answer, int, float], None]) -> None:
        self.answers: set[Answer] = set()
        self.last_token = -float("inf")  # when an answer last got a token
        self._engine = engine
        self._on_tokens = on_tokens
        self._loop = asyncio.get_running_loop()
        self._pool = concurrent.futures.ThreadPoolExecutor(_POOL_THREADS, "quire-serve")
        self._woken = False  # a turn of _poll_all is on its way
        engine.on_step = self._wake

    async def submit(
        self, prompt: Prompt, options: SamplingOptions, *, measured: bool = True
    ) -> Answer:
        """Checks, tokenizes and submits; raises QuireError and TypeError as Engine.stream."""
        submit = functools.partial(self._engine.stream, prompt, **options)
        future = self._loop.run_in_executor(self._pool, submit)
        try:
            stream = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_result)
            raise
        answer = Answer(self, stream, self._loop.time(), measured)
        self.answers.add(answer)
        self._poll([answer])
        return answer

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that may take long in a thread of the pool."""
        return await self._loop.run_in_executor(self._pool, function, *arguments)

    async def close(self) -> None:
        """Ends all requests; the engine is the caller's to close."""
        for answer in list(self.answers):
            answer.fail(errors.ClosedError("the server ends"))
        self._engine.on_step = None
        self._pool.shutdown(wait=False)

    def _wake(self) -> None:
        """From the engine's thread, once per step. Steps share a turn of a loop that is slower."""
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._poll_all)
        except RuntimeError:
            pass  # the event loop has ended, and with it all that waited

    def _poll_all(self) -> None:
        self._woken = False  # before the answers are looked at: what comes meanwhile wakes again
        self._poll(list(self.answers))

    def _poll(self, answers: list[Answer]) -> None:
        now = self._loop.time()
        any_tokens = False
        for answer in answers:
            tokens = answer._poll(now)
            if tokens:
                any_tokens = True
                self.last_token = now
                if answer.measured:
                    self._on_tokens(answer, tokens, now)
        if any_tokens and not self._woken:  # there may be more than one turn takes
            self._woken = True
            self._loop.call_soon(self._poll_all)

    def _forget(self, answer: Answer) -> None:
        self.answers.discard(answer)


def _close_result(future: asyncio.Future[Stream]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
