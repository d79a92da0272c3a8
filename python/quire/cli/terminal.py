"""What the program writes to: streams that may be closed, terminals that may be no UTF-8, progress
of long work."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

# Terminal control characters in an answer are shown, not obeyed: a model may have learnt any of
# them.
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def prepare_streams() -> None:
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal without UTF-8 gets "?", not a traceback.
        sys.stdout.reconfigure(errors="replace")
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="backslashreplace")


def leave_stdout() -> None:
    """What still waits to be written to it goes nowhere: it takes no more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def joined_lines(text: str) -> str:
    """The text with a space for each end of a line and the white space around it."""
    return re.sub(r"\s*\n\s*", " ", text)


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:  # without "[Errno 21]"
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return joined_lines(str(error)) or type(error).__name__


def told_line(text: str) -> str:
    """What another process has said, as one line without control characters."""
    return joined_lines(text).translate(_CONTROL)


def printable(text: str) -> str:
    """The text as standard output should get it."""
    return text.translate(_CONTROL) if sys.stdout.isatty() else text


def note(text: str) -> None:
    """A line beside the output, in its right place even where both go to one terminal."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def moment(seconds: float) -> str:
    """A time in seconds since 1970, in UTC; as a number where no calendar has it: a file may say
    anything."""
    try:
        found = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.0f} s after 1970"
    return found.isoformat(timespec="seconds")


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


class _Display:
    """Something that changes: a line that is drawn over itself on a terminal, one now and then
    elsewhere."""

    _BAR_SECONDS = 0.1  # an eye follows ten a second
    _LINE_SECONDS = 10.0  # a log stays short
    _BAR_WIDTH = 20  # so that the numbers beside it have room on 80 columns

    def __init__(
        self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._is_bar = stream.isatty()
        self._drawn = self._start - self._BAR_SECONDS if self._is_bar else self._start
        self._width = 0

    def clear(self) -> None:
        """Removes the bar, so that other lines can be written."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def _is_due(self) -> bool:
        now = self._clock()
        if now - self._drawn < (self._BAR_SECONDS if self._is_bar else self._LINE_SECONDS):
            return False
        self._drawn = now
        return True

    def _draw(self, line: str) -> None:
        """Over what was drawn before."""
        # One column stays free: a full line would wrap and the next bar stand below it.
        line = line[: _columns(self._stream) - 1]
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def _bar(self, done: int) -> str:
        filled = self._BAR_WIDTH * min(done, self._total) // max(self._total, 1)
        return f"[{'#' * filled}{'-' * (self._BAR_WIDTH - filled)}]"

    def _seconds(self) -> float:
        return self._clock() - self._start

    def _time_left(self, done: int) -> str:
        if done == 0:
            return ""
        return f", {self._seconds() / done * max(self._total - done, 0):.0f} s left"


class Progress(_Display):
    """How far a known number of requests is."""

    def update(self, done: int, tokens: int) -> None:
        """Called as often as one likes."""
        if not self._is_due():
            return
        if not self._is_bar:
            print(self.summary(done, tokens), file=self._stream, flush=True)
            return
        self._draw(
            f"{self._bar(done)} {done}/{self._total}, {tokens} tokens{self._speed(tokens)}"
            f"{self._time_left(done)}"
        )

    def summary(self, done: int, tokens: int) -> str:
        speed = self._speed(tokens)
        return (
            f"{done}/{self._total} requests, {tokens} new tokens{speed}, {self._seconds():.1f} s"
        )

    def _speed(self, tokens: int) -> str:
        seconds = self._seconds()
        return f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""


class PromptProgress(_Display):
    """How many tokens of a prompt are computed; on a terminal alone."""

    def update(self, done: int) -> None:
        """Called as often as one likes. Nothing is shown of a prompt that one step computes."""
        if not self._is_bar:
            return
        if done < self._total and self._is_due():
            text = f"{done:,} of {self._total:,} prompt tokens"
            self._draw(f"{self._bar(done)} {text}{self._time_left(done)}")


class FileProgress(_Display):
    """How much of a file is written. `what`: "written", for example."""

    def __init__(
        self,
        what: str,
        total: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(total, stream, clock)
        self._what = what

    def update(self, done: int) -> None:
        """Called as often as one likes, with bytes."""
        if not self._is_due():
            return
        text = f"{done / 2**20:,.0f} of {self._total / 2**20:,.0f} MiB {self._what}"
        if self._is_bar:
            self._draw(f"{self._bar(done)} {text}{self._time_left(done)}")
        else:
            print(f"({text})", file=self._stream, flush=True)


@contextlib.contextmanager
def written_progress(stream: TextIO) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that is told the bytes written and their total; it shows them on `stream`
    until the block ends."""
    shown: FileProgress | None = None

    def tell(done: int, total: int) -> None:
        nonlocal shown
        shown = shown or FileProgress("written", total, stream)
        shown.update(done)

    try:
        yield tell
    finally:
        if shown is not None:
            shown.clear()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
