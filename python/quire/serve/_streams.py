"""The engine as the event loop sees it: submit a request, await the pieces of each step, cancel.

The only module of the server that knows how requests of the engine run. All methods are for the
thread of the event loop; what may wait for the engine runs in a small pool of threads.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from quire import errors
from quire.engine import (
    Engine,
    FinishReason,
    Piece,
    Prompt,
    Result,
    Sample,
    SamplingOptions,
    Stream,
    Usage,
)
from quire.serve.limits import Limits
from quire.serve.turns import Turns

__all__ = ["Answer", "Delta", "Streams"]

T = TypeVar("T")
_STEPS_PER_TURN = 16  # of one answer, before others and their sockets have a turn
_TURN_SECONDS = 0.01  # of taking tokens, before sockets have a turn
_THREADS = 4  # tokenizing and templates; more would only take turns with each other
_LOOK_SECONDS = 0.1  # how soon the engine's thread sees that the event loop has ended
# Memory of what waits for a client or is kept for it, about: a token's id and logprob, one of its
# alternatives, and a character of text.
_TOKEN_BYTES = 64
_ALTERNATIVE_BYTES = 128
_CHARACTER_BYTES = 4
_WRITTEN_BYTES = 400  # of a log-probability, when an answer is written as a whole
_NO_SUMS = ("miss", "prefix_miss", "blend")
_TIMES = ("queue_seconds", "prompt_seconds", "decode_seconds", "steps")


@dataclasses.dataclass
class Delta:
    """What came for one sample since `Answer.next` was called last.

    logprobs, top_logprobs: one entry per id; empty unless they were asked for.
    """

    sample: int
    text: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    @staticmethod
    def whole(index: int, sample: Sample) -> Delta:
        """All of a sample that has ended."""
        return Delta(
            index,
            sample.text or "",
            sample.ids,
            sample.logprobs or [],
            sample.top_logprobs or [],
            sample.finish_reason,
        )

    def is_news(self, keep_ids: bool) -> bool:
        """Whether a client is told of it; ids alone are news if keep_ids is set."""
        told = self.text or self.finish_reason or self.logprobs
        return bool(told or (keep_ids and self.ids))


class Answer:
    """A submitted request, of one prompt or several: its deltas, then its result. Samples are
    numbered through all prompts.

    key: of the client. prompt_ids: the tokens of the first prompt; prompt_tokens: of all prompts.
    submitted, first_token: times of the event loop's clock in seconds; the latter None before it.
    measured: whether the server's metrics count it. result: set with the last delta.
    held_bytes: of memory, about: of what `next` has not given, and of what is kept for the result.
    """

    def __init__(
        self,
        streams: Streams,
        opened: list[Stream],
        now: float,
        measured: bool,
        keep: bool,
        key: str = "",
    ) -> None:
        self.key = key
        self.prompt_ids = opened[0].prompt_ids
        self.prompt_tokens = sum(stream.prompt_tokens for stream in opened)
        self.submitted = now
        self.measured = measured
        self.first_token: float | None = None
        self.result: Result | None = None
        self.held_bytes = 0
        self._streams = streams
        self._opened = opened
        self._keep = keep
        self._results: dict[int, Result] = {}  # by prompt
        self._deltas: dict[int, Delta] = {}  # by sample: what `next` has not given
        self._unread_bytes = 0  # of these, about
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed; known with the first delta."""
        return sum(stream.cached_tokens or 0 for stream in self._opened)

    async def next(self, timeout: float) -> list[Delta] | None:
        """All that came since the last call, one delta for each sample that got something, in their
        order; waits until there is something. [] at the end, None after `timeout` seconds without
        anything. Raises QuireError, and what `fail` was given, once."""
        if not self._deltas and self._error is None and self.result is None:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._news.wait()
            except TimeoutError:
                return None
        deltas = self._take_unread()
        error = self._error
        if not deltas and error is not None:
            self._error = None
            try:
                raise error
            finally:
                del error  # its traceback has this frame: both would stay until they are found
        return [deltas[sample] for sample in sorted(deltas)]

    def _take_unread(self) -> dict[int, Delta]:
        deltas, self._deltas = self._deltas, {}
        if not self._keep:
            self._hold(-self._unread_bytes)
        self._unread_bytes = 0
        return deltas

    def _hold(self, more_bytes: int) -> None:
        self.held_bytes += more_bytes
        self._streams.held_bytes += more_bytes

    def fail(self, error: BaseException) -> None:
        """Ends the request; `next` raises the error once it has given what came before."""
        if self.result is None and self._error is None:
            self._error = error
            self._news.set()
        self._end()

    def give_up(self, error: BaseException) -> None:
        """Ends the request and what it holds: all that `next` still gives is the error."""
        self.close()
        self.result = None
        self._error = error
        self._news.set()

    def close(self) -> None:
        """Ends the request if it has not ended: its pages are free before the next step. What was
        not taken is gone."""
        self._end()
        self._take_unread()
        self._opened.clear()
        self._results.clear()
        self._hold(-self.held_bytes)
        self._streams.holders.pop(self, None)

    def _end(self) -> None:
        self._streams._forget(self)
        for stream in self._opened:
            stream.close()

    def _poll(self, now: float) -> dict[int, int]:
        """Takes what is new from the engine; returns the number of new tokens by sample."""
        tokens: dict[int, int] = {}
        try:
            for prompt, stream in enumerate(self._opened):
                self._take(prompt, stream.poll(_STEPS_PER_TURN), tokens)
            if self.result is None and len(self._results) == len(self._opened):
                self.result = _joined([self._results[i] for i in range(len(self._opened))])
        except Exception as error:  # of a defect, too: the client that waits must hear of it
            self.fail(error)
            return {}
        if tokens and self.first_token is None:
            self.first_token = now
        if self.result is not None:
            self._streams._forget(self)
            self._news.set()
        return tokens

    @property
    def is_unread(self) -> bool:
        """Whether it is not over and more waits for its client than may."""
        return self.result is None and self._unread_bytes > self._streams.limits.unread_bytes

    def _take(self, prompt: int, pieces: list[Piece], tokens: dict[int, int]) -> None:
        """Counts them in `tokens`, by sample."""
        for piece in pieces:
            index = self._add(prompt, piece)
            if piece.ids:
                tokens[index] = tokens.get(index, 0) + len(piece.ids)
        if pieces:
            self._news.set()
            if pieces[-1].result is not None:
                self._results[prompt] = pieces[-1].result

    def _add(self, prompt: int, piece: Piece) -> int:
        """Returns the number of its sample."""
        index = prompt * len(self._opened[prompt].samples) + piece.sample
        tops = piece.top_logprobs or []
        delta = self._deltas.setdefault(index, Delta(index))
        delta.text += piece.text
        delta.ids += piece.ids
        delta.logprobs += piece.logprobs or []
        delta.top_logprobs += tops
        delta.finish_reason = piece.finish_reason or delta.finish_reason
        size = _TOKEN_BYTES * len(piece.ids) + _CHARACTER_BYTES * len(piece)
        size += _ALTERNATIVE_BYTES * sum(map(len, tops))
        self._unread_bytes += size
        entries = len(piece.logprobs or ()) + sum(map(len, tops))
        self._hold(size + (_WRITTEN_BYTES * entries if self._keep else 0))
        return index


class Streams:
    """All requests of one engine.

    What is computed and not sent is bounded: the engine has the pace of the event loop, which takes
    what comes whether or not a client does; an answer that then waits for its client is given up at
    `unread_bytes`, and where all together hold more than `answers_bytes` the largest one of the key
    that holds most.

    held_bytes: of all `holders`, the answers that were not closed.

    Args:
        engine: its `on_step` is used here.
        on_tokens: is given an answer, the number of its new tokens by sample and the time of the
            event loop's clock, once per step and measured answer.
        refuse: counts a limit that was met and gives the error of it, as ConnectionBook.refuse.
    """

    def __init__(
        self,
        engine: Engine,
        on_tokens: Callable[[Answer, dict[int, int], float], None],
        limits: Limits,
        refuse: Callable[[str, int, str], BaseException],
    ) -> None:
        self.limits = limits
        self.answers: dict[Answer, None] = {}  # the one that was looked at last is the last one
        self.holders: dict[Answer, None] = {}
        self.held_bytes = 0
        self.last_token = -float("inf")  # when an answer last got a token
        self._engine = engine
        self._on_tokens = on_tokens
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(_THREADS)
        self._woken = False  # a turn of _poll_all is on its way
        self._behind = False  # not all that was handed out was looked at
        self._closed = False
        self._changed = threading.Condition()  # guards the two; the loop ends no turn without it
        engine.on_step = self._wake

    async def submit(
        self,
        prompts: list[Prompt],
        options: SamplingOptions,
        *,
        key: str = "",
        measured: bool = True,
        keep: bool = True,
        held_bytes: int = 0,
    ) -> Answer:
        """Checks, tokenizes and submits all prompts or none; raises QuireError and TypeError as
        Engine.stream. key: whose turn it takes. keep: as there. held_bytes: that others keep for
        the answer until it is closed."""
        work = (self._open_all, prompts, options, keep)
        opened = await self._turns.run(key, *work, unwanted=_close_all)
        answer = Answer(self, opened, self._loop.time(), measured, keep, key)
        self.answers[answer] = None
        self.holders[answer] = None
        answer._hold(held_bytes)
        self._keep_total()
        if answer in self.answers:  # else it was given up for others
            self._poll(answer, self._loop.time())
        return answer

    def _open_all(
        self, prompts: list[Prompt], options: SamplingOptions, keep: bool
    ) -> list[Stream]:
        with contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(self._engine.stream(prompt, keep=keep, **options))
                for prompt in prompts
            ]
            stack.pop_all()
            return opened

    async def run(self, key: str, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that may take long in another thread, once it is the key's turn."""
        return await self._turns.run(key, function, *arguments)

    async def close(self) -> None:
        """Ends all requests; the engine is the caller's to close."""
        for answer in list(self.answers):
            answer.fail(errors.ClosedError("the server ends"))
        self._engine.on_step = None
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._turns.close()

    def _wake(self) -> None:
        """From the engine's thread, after it has handed out what came. It returns once what was
        handed out before was looked at: so the engine is ahead of a loop that is slower by two of
        these, and by the steps that the library has. Steps share a turn of the loop."""
        with self._changed:
            while self._behind and not self._closed and not self._loop.is_closed():
                self._changed.wait(_LOOK_SECONDS)
            self._behind = True
            try:
                self._turn_soon(self._loop.call_soon_threadsafe)
            except RuntimeError:
                pass  # the event loop has ended, and with it all that waited

    def _turn_soon(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        if not self._woken:
            self._woken = True
            call_soon(self._poll_all)

    def _poll_all(self) -> None:
        """One turn. The engine goes on after one that leaves nothing to a next turn."""
        self._woken = False  # before the answers are looked at: what comes meanwhile wakes again
        try:
            self._poll_some()
        finally:
            with self._changed:
                if not self._woken:
                    self._behind = False
                    self._changed.notify_all()

    def _poll_some(self) -> None:
        """Looks at the answers that wait for their first token, then at the others in turns, until
        the time of a turn is over: where tokens come faster than they are sent, connections are
        served all the same."""
        now = self._loop.time()
        begun = [answer for answer in self.answers if answer.first_token is not None]
        for answer in [answer for answer in self.answers if answer.first_token is None]:
            if answer in self.answers:  # else it was given up for another one
                self._poll(answer, now)
        for answer in begun:
            if self._loop.time() - now >= _TURN_SECONDS:
                return self._turn_soon(self._loop.call_soon)
            if answer in self.answers:
                del self.answers[answer]
                self.answers[answer] = None
                self._poll(answer, now)

    def _poll(self, answer: Answer, now: float) -> None:
        tokens = answer._poll(now)
        if not tokens:
            return
        self.last_token = now
        if answer.measured:
            self._on_tokens(answer, tokens, now)
        self._keep_bounds(answer)
        self._turn_soon(self._loop.call_soon)  # there may be more than one turn takes

    def _keep_bounds(self, answer: Answer) -> None:
        limits = self.limits
        if answer.is_unread:
            message = f"the client did not take its answer: more than {limits.unread_bytes} bytes"
            answer.give_up(self._refuse("unread_bytes", 408, f"{message} of it waited"))
        self._keep_total()

    def _keep_total(self) -> None:
        limits = self.limits
        while self.held_bytes > limits.answers_bytes:
            message = f"answers take more than {limits.answers_bytes} bytes, and this one most"
            self._largest().give_up(self._refuse("answers_bytes", 503, message))

    def _largest(self) -> Answer:
        """The largest answer of the key that holds most."""
        held: collections.Counter[str] = collections.Counter()
        for holder in self.holders:
            held[holder.key] += holder.held_bytes
        ((key, _),) = held.most_common(1)
        own = (holder for holder in self.holders if holder.key == key)
        return max(own, key=lambda holder: holder.held_bytes)

    def _forget(self, answer: Answer) -> None:
        self.answers.pop(answer, None)


def _close_all(opened: list[Stream]) -> None:
    for stream in opened:
        stream.close()


def _joined(results: list[Result]) -> Result:
    """One result of those of several prompts: all samples, and the sums of what was used. They
    were computed together, so the times are those of the one that took longest."""
    if len(results) == 1:
        return results[0]
    usages = [result.usage for result in results]
    longest = max(usages, key=lambda u: u.queue_seconds + u.prompt_seconds + u.decode_seconds)
    sums: dict[str, Any] = {
        field.name: sum(getattr(usage, field.name) for usage in usages)
        for field in dataclasses.fields(Usage)
        if field.name not in _NO_SUMS
    }
    sums |= {name: getattr(longest, name) for name in _TIMES}
    first: dict[str, Any] = {
        name: next((found for u in usages if (found := getattr(u, name)) is not None), None)
        for name in _NO_SUMS
    }
    prompt_ids = [id for result in results for id in result.prompt_ids]
    samples = [sample for result in results for sample in result.samples]
    return Result(prompt_ids, samples, Usage(**sums, **first), results[0].seed)
