"""What the program writes to: streams that may be closed, terminals that may be no UTF-8, progress
of long work."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

# Terminal control characters in an answer are shown, not obeyed: a model may have learnt any of
# them.
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def prepare_streams() -> None:
    if sys.stdout is None:  # closed by who started us
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal without UTF-8 gets "?", not a traceback.
        sys.stdout.reconfigure(errors="replace")


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:  # without "[Errno 21]"
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return re.sub(r"\s*\n\s*", " ", str(error)) or type(error).__name__


def printable(text: str) -> str:
    """The text as standard output should get it."""
    return text.translate(_CONTROL) if sys.stdout.isatty() else text


def note(text: str) -> None:
    """A line beside the output, in its right place even where both go to one terminal."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


class Progress:
    """How far a known number of requests is: a bar that is drawn over itself on a terminal, a line
    now and then elsewhere."""

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
        self._bar = stream.isatty()
        self._drawn = self._start - self._BAR_SECONDS if self._bar else self._start
        self._width = 0

    def update(self, done: int, tokens: int) -> None:
        """Called as often as one likes."""
        now = self._clock()
        if now - self._drawn < (self._BAR_SECONDS if self._bar else self._LINE_SECONDS):
            return
        self._drawn = now
        self._show(done, tokens)

    def clear(self) -> None:
        """Removes the bar, so that other lines can be written."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def summary(self, done: int, tokens: int) -> str:
        seconds = self._clock() - self._start
        speed = self._speed(tokens)
        return f"{done}/{self._total} requests, {tokens} new tokens{speed}, {seconds:.1f} s"

    def _show(self, done: int, tokens: int) -> None:
        if not self._bar:
            print(self.summary(done, tokens), file=self._stream, flush=True)
            return
        filled = self._BAR_WIDTH * done // max(self._total, 1)
        line = (
            f"[{'#' * filled}{'-' * (self._BAR_WIDTH - filled)}] {done}/{self._total}, "
            f"{tokens} tokens{self._speed(tokens)}{self._time_left(done)}"
        )
        # One column stays free: a full line would wrap and the next bar stand below it.
        line = line[: _columns(self._stream) - 1]
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def _speed(self, tokens: int) -> str:
        seconds = self._clock() - self._start
        return f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""

    def _time_left(self, done: int) -> str:
        if done == 0:
            return ""
        left = (self._clock() - self._start) / done * (self._total - done)
        return f", {left:.0f} s left"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
