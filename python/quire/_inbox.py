"""How outputs come from the engine's thread to the threads that wait for them.

The C++ thread puts each step's outputs into a queue, in which it is at most a few steps ahead. One
Python thread takes them from there and puts them into the mails of their requests. It holds no
engine, so that one that is dropped can go.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from quire import _ffi, errors
from quire._ffi import closed_error

# In the order of quire::FinishReason; "error" raises and is never seen in a result.
FINISH_REASONS: tuple[Any, ...] = (None, "stop", "length", "cancelled", "error")


@dataclasses.dataclass
class Output:
    """What one step gave to one sample.

    logprobs: per token the chosen one, then the best ones; empty if not asked for.
    usage: by the names that the library gives them; set with a finish reason and with the first
        tokens.
    error: why the sample has failed, its text; error_option, error_reason: of QuireError.
    """

    sample: int
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    finish_reason: Any
    usage: Mapping[str, int] | None
    error: str | None
    error_option: str = ""
    error_reason: str = ""


Item = tuple[int, Output]  # request id


class Mail:
    """What has come for one that waits: a stream, or a call with many requests. A put never blocks,
    so the garbage collector may make one at any line."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[list[Item] | BaseException] = queue.SimpleQueue()
        self.steps = 0  # of the engine; counted if the mail is told of steps
        self._told_of_steps = False

    def put(self, batch: list[Item] | BaseException) -> None:
        self._batches.put(batch)

    def tell_of_steps(self, count: int) -> None:
        """At most one empty batch is there for the steps that gave nothing."""
        self.steps += count
        if not self._told_of_steps:
            self._told_of_steps = True
            self._batches.put([])

    def take(self, block: bool) -> list[Item] | BaseException | None:
        """The next batch, or why there will be none; None if there is none now and `block` is
        False."""
        try:
            batch = self._batches.get(block)
        except queue.Empty:
            return None
        self._told_of_steps = False
        return batch

    def clear(self) -> None:
        """Nobody will take what is there."""
        while self.take(block=False) is not None:
            pass


class Addressee(Protocol):
    """A request. What still comes of one that is dropped is not handed out."""

    mail: Mail
    dropped: bool


_Request = TypeVar("_Request", bound=Addressee)


class Inbox(Generic[_Request]):
    """The requests of an engine, and the thread that hands them what has come.

    lock: guards `requests`. Reentrant: the garbage collector may close a stream, and so drop its
        request, at any line of Python. Nobody waits for a step with it.
    tickers: mails that are told of every step.
    on_step: is called after each step that gave something, or that a mail was told of.
    """

    def __init__(self, steps: Any) -> None:
        self.lock = threading.RLock()
        self.requests: dict[int, _Request] = {}
        self.tickers: set[Mail] = set()
        self.on_step: Callable[[], None] | None = None
        self._steps = steps
        self._columns = _columns()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, after it has told all requests that the engine was closed."""
        self._steps.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_may_wait(self) -> None:
        """BadStateError on the thread that hands out: it would wait for itself."""
        if threading.current_thread() is self._thread:
            raise errors.BadStateError(
                "on_step waits for an answer, and none is handed out before it returns; let "
                "another thread wait, or take what is there with Stream.poll"
            )

    def _run(self) -> None:
        end: BaseException | None = None
        while end is None:
            try:
                self._hand_out(self._steps.take())
            except errors.ClosedError:
                end = closed_error("Engine")
            except BaseException as error:
                end = error
            if end is not None:
                with self.lock:
                    mails = {request.mail for request in self.requests.values()} | self.tickers
                for mail in mails:
                    mail.put(end)
            self._call_on_step()

    def _hand_out(self, fields: Any) -> None:
        batches: dict[Mail, list[Item]] = {}
        with self.lock:
            for request_id, output in outputs_of(fields, self._columns):
                request = self.requests.get(request_id)
                if request is not None and not request.dropped:
                    batches.setdefault(request.mail, []).append((request_id, output))
            for mail in list(self.tickers):
                mail.tell_of_steps(int(fields["steps"]))
            for mail, batch in batches.items():  # none after a request was dropped
                mail.put(batch)

    def _call_on_step(self) -> None:
        on_step = self.on_step
        if on_step is None:
            return
        try:
            on_step()
        except BaseException as error:  # SystemExit, too: without this thread no answer comes
            told = (type(error), error, error.__traceback__, self._thread)
            threading.excepthook(threading.ExceptHookArgs(told))


def _columns() -> dict[str, list[str]]:
    found = _ffi.function("Engine.output_columns")()
    return {str(name): [str(column) for column in columns] for name, columns in found.items()}


def outputs_of(fields: Any, columns: Mapping[str, list[str]]) -> Iterator[Item]:
    """Request ids and outputs from the flat arrays of some steps (src/ffi/step_queue.cc)."""
    rows = np.from_dlpack(fields["outputs"]).tolist()
    if not rows:
        return
    tokens = np.from_dlpack(fields["tokens"]).tolist()
    ends = np.from_dlpack(fields["logprob_ends"]).tolist()
    entries = list(
        zip(
            np.from_dlpack(fields["logprob_tokens"]).tolist(),
            np.from_dlpack(fields["logprobs"]).tolist(),
        )
    )
    usages = iter(np.from_dlpack(fields["usage"]).tolist())
    details = zip(fields["errors"], fields["error_options"], fields["error_reasons"])
    begin = 0
    for row in rows:
        named = dict(zip(columns["outputs"], row))
        end = begin + named["token_count"]
        starts = [ends[i - 1] if i > 0 else 0 for i in range(begin, end)]
        reason = FINISH_REASONS[named["finish_reason"]]
        error, option, why = next(details) if reason == "error" else (None, "", "")
        yield (
            named["request"],
            Output(
                sample=named["sample"],
                tokens=tokens[begin:end],
                logprobs=[entries[start:stop] for start, stop in zip(starts, ends[begin:end])],
                finish_reason=reason,
                usage=dict(zip(columns["usage"], next(usages))) if named["has_usage"] else None,
                error=None if error is None else str(error),
                error_option=str(option),
                error_reason=str(why),
            ),
        )
        begin = end
