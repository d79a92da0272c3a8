"""The engine's own thread as Python sees it: streams that are polled, threads that join a step,
interrupts, forks and the end of the interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import pytest
import quire
from tiny_model import TinyModel

PROMPTS = ["The quick brown fox", "A quire is a stack of folded pages", "x"]
# More work than any machine does before the test has done what it is about.
LONG: dict[str, Any] = dict(max_tokens=1_000_000, ignore_eos=True, window=64, sinks=2)


@pytest.fixture
def own(tiny: TinyModel) -> Iterator[quire.Engine]:
    """An engine that the test may close."""
    with quire.Engine(tiny.directory, dtype="float32", threads=1, page_size=16) as engine:
        yield engine


def polled(stream: quire.Stream, stepped: threading.Event) -> list[quire.Piece]:
    """All pieces, waiting for steps between the polls."""
    pieces: list[quire.Piece] = []
    while not stream.finished:
        pieces += stream.poll()
        if not stream.finished:
            assert stepped.wait(60)
            stepped.clear()
    return pieces


def test_polled_streams_give_the_answers_of_generate(own: quire.Engine) -> None:
    expected = [own.generate(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    stepped = threading.Event()
    own.on_step = stepped.set
    streams = [own.stream(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    for stream, whole in zip(streams, expected):
        pieces = polled(stream, stepped)
        assert "".join(pieces) == whole.text
        assert [id for piece in pieces for id in piece.ids] == whole.ids
        assert stream.result is not None and stream.result is pieces[-1].result
        assert (stream.result.ids, stream.result.logprobs) == (whole.ids, whole.logprobs)
        assert stream.poll() == [] and list(stream) == []


def test_an_on_step_that_raises_ends_a_polled_stream(own: quire.Engine) -> None:
    """What had come with it was lost: the answer had a gap, or never an end."""
    stepped = threading.Event()
    own.on_step = stepped.set

    def fail() -> None:
        raise ZeroDivisionError

    stream = own.stream(PROMPTS[0], on_step=fail, **LONG)
    with pytest.raises(ZeroDivisionError):
        while not stream.poll():
            assert stepped.wait(60)
            stepped.clear()
    assert stream.finished and stream.poll() == [] and stream.result is None
    assert own.stats()["running"] == 0


def test_an_event_loop_serves_streams(own: quire.Engine) -> None:
    expected = [own.generate(prompt, max_tokens=20, ignore_eos=True).text for prompt in PROMPTS]

    async def serve() -> list[str]:
        loop = asyncio.get_running_loop()
        stepped = asyncio.Event()
        own.on_step = lambda: loop.call_soon_threadsafe(stepped.set)
        streams = [own.stream(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
        texts = [""] * len(streams)
        while not all(stream.finished for stream in streams):
            await asyncio.wait_for(stepped.wait(), 60)
            stepped.clear()
            for i, stream in enumerate(streams):
                texts[i] += "".join(stream.poll())
        own.on_step = None
        return texts

    assert asyncio.run(serve()) == expected


def test_a_poll_never_waits(own: quire.Engine) -> None:
    stream = own.stream("The quick", max_tokens=200, ignore_eos=True)
    taken = threading.Event()

    def take() -> None:
        for _ in stream:
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    taken.wait(60)
    assert isinstance(stream.poll(), list)  # the other thread has the stream
    thread.join()
    assert stream.finished and stream.poll() == []


def test_a_prompt_of_another_thread_joins_the_next_step(own: quire.Engine) -> None:
    """The second request ends long before the first, which was there before it."""
    first = own.stream("The quick", **LONG)
    next(first)
    done: list[int] = []

    def work() -> None:
        done.append(len(own.generate("x", max_tokens=3, ignore_eos=True).ids))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [3] and own.stats()["running"] == 1
    first.close()
    assert own.stats()["running"] == 0


def test_a_closed_stream_wakes_the_thread_that_waits(own: quire.Engine) -> None:
    own.generate("warm", max_tokens=1)
    stream = own.stream("The quick", **LONG)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            for _ in stream:
                pass
        except quire.CancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    stream.close()
    stream.close()
    thread.join(60)
    assert not thread.is_alive() and stream.finished and stream.result is None
    assert own.stats()["running"] == 0


def test_a_closed_engine_ends_streams_and_waiting_calls(own: quire.Engine) -> None:
    stream = own.stream("The quick", **LONG)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            own.generate(["The quick"] * 50, **LONG)
        except quire.QuireError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    next(stream)
    own.close()
    thread.join(60)
    assert not thread.is_alive() and isinstance(raised[0], quire.ClosedError)
    with pytest.raises(quire.ClosedError, match="Engine"):
        while not stream.finished:
            stream.poll()
    assert stream.finished and stream.poll() == []


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_step_callback_that_raises_is_reported_and_ends_nothing(
    own: quire.Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """After a SystemExit no answer came any more."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def fail() -> None:
        raise error("the callback")

    own.on_step = fail
    assert len(own.generate("x", max_tokens=3, ignore_eos=True).ids) == 3
    own.on_step = None
    assert told and str(told[0].exc_value) == "the callback"
    assert len(own.generate("y", max_tokens=3, ignore_eos=True).ids) == 3
    with pytest.raises(TypeError, match="callable"):
        own.on_step = 5  # type: ignore[assignment]


def test_an_interrupt_cancels_and_leaves_the_engine_usable(own: quire.Engine) -> None:
    expected = own.generate("x", max_tokens=5, ignore_eos=True).ids
    started = threading.Event()

    def begun() -> None:
        if own.stats(wait=False)["running"] > 0:  # else it is the last step of the request before
            started.set()

    own.stats()
    own.on_step = begun

    def interrupt() -> None:
        started.wait(60)
        own.on_step = None
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        own.generate(["The quick"] * 100, **LONG)
    thread.join()
    stats = own.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert own.generate("x", max_tokens=5, ignore_eos=True).ids == expected


# The instructions after which the interpreter looks for signals.
_LOOKS_FOR_SIGNALS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


class _InterruptAt:
    """Raises KeyboardInterrupt at the `count`-th place in some functions where a signal may be
    handled, once."""

    def __init__(self, count: int, functions: Iterable[Any]) -> None:
        self._left = count
        self._codes = {function.__code__ for function in functions}
        self._last: dict[int, str] = {}  # instruction of each frame, by the id of the frame

    @property
    def raised(self) -> bool:
        return self._left <= 0

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in self._codes or self.raised:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and not self.raised:
            last = self._last.get(id(frame))
            self._last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self._left -= last in _LOOKS_FOR_SIGNALS
            if self.raised:
                raise KeyboardInterrupt
        return self._instruction

    def __enter__(self) -> _InterruptAt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_an_interrupt_at_any_place_leaves_no_request(own: quire.Engine, way: str) -> None:
    def run() -> None:
        if way == "generate":
            own.generate(["x", "The quick"], max_tokens=1)
        else:
            own.stream("x", **LONG)  # and is dropped

    places = [quire.Engine._submit, quire.Engine._generate_each, quire.Stream.__init__]
    count = 0
    while True:
        count += 1
        with _InterruptAt(count, places) as interrupt:
            with contextlib.suppress(KeyboardInterrupt):
                run()
        stats = own.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0), f"place {count}"
        assert not own._inbox.requests, f"place {count}"
        if not interrupt.raised:
            break
    assert count > 10


def test_a_closed_stream_holds_nothing(own: quire.Engine) -> None:
    """What had come and was not taken once stayed as long as the stream."""
    stream = own.stream("The quick", **LONG)
    next(stream)
    own.generate("x", max_tokens=20, ignore_eos=True)  # steps that nobody takes
    assert not stream._mail._batches.empty()
    stream.close()
    own.generate("x", max_tokens=20, ignore_eos=True)
    assert (stream._mail.take(False), stream._mail.take(False)) == ([], None)  # and a wake-up


def test_stats_wait_for_what_was_asked_before(own: quire.Engine) -> None:
    stream = own.stream("The quick", **LONG)
    next(stream)
    assert own.stats(wait=False)["pages_total"] > 0
    del stream
    assert own.stats()["running"] == own.stats()["waiting"] == 0


def test_on_step_may_not_wait_for_an_answer(own: quire.Engine) -> None:
    """It would wait for itself, and once did."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    streams: queue.SimpleQueue[quire.Stream] = queue.SimpleQueue()

    def wait() -> None:
        own.on_step = None
        stream = streams.get(timeout=60)
        for call in (lambda: own.generate("y"), lambda: next(stream)):
            try:
                call()
                found.put("an answer")
            except quire.BadStateError as error:
                found.put(str(error))

    own.on_step = wait  # before the request: its last step may be over when stream() returns
    stream = own.stream("x", max_tokens=4)
    streams.put(stream)
    for _ in range(2):
        assert "on_step waits for an answer" in found.get(timeout=60)
    assert list(stream)[-1].result is not None, "nothing has changed"


_PROGRAM = """
import os, sys, threading
import quire
engine = quire.Engine(sys.argv[1], dtype="float32", threads=2)
stream = engine.stream("The quick", max_tokens=200, ignore_eos=True)
next(stream)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        try:
            engine.generate("x")
        except quire.ClosedError:
            sys.exit(7)
        sys.exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(list(stream)) > 10
if sys.argv[2] == "daemon":
    work = lambda: engine.generate(["The"] * 99, max_tokens=200)
    threading.Thread(target=work, daemon=True).start()
if sys.argv[2] == "drop":
    before = threading.active_count()
    stream.close()
    del stream, engine
    for thread in threading.enumerate():
        if thread.name == "quire-engine":
            thread.join(60)
            assert not thread.is_alive()
print("end")
"""


@pytest.mark.parametrize("how", ["plain", "fork", "daemon", "drop"])
def test_a_program_ends_whatever_the_engine_does(tiny: TinyModel, how: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(tiny.directory), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
