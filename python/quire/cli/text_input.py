"""Texts from outside: of files, of standard input, of the command line. All must be UTF-8; what is
not is told with its place."""

from __future__ import annotations

import os
import sys

from quire.cli.arguments import UsageError
from quire.cli.models import Failure

STDIN = "standard input"


def decode(data: bytes, source: str, offset: int = 0) -> str:
    """The text of bytes that begin `offset` bytes after the start of `source`. Failure for what is
    not UTF-8. A byte order mark at the begin is no part of the text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Failure(f"{source}: {not_utf8(error, data, offset)}") from None
    return text.removeprefix("\ufeff") if offset == 0 else text


def not_utf8(error: UnicodeDecodeError, data: bytes, offset: int = 0) -> str:
    """What is wrong, and where."""
    place = f"is not UTF-8: {error.reason} at byte {offset + error.start}"
    if offset == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{place}; it looks like UTF-16: save it as UTF-8"
    return place


def read_file(name: str | os.PathLike[str]) -> str:
    """The text of a file. Failure for what is not UTF-8, OSError for what cannot be read."""
    with open(name, "rb") as file:
        return decode(file.read(), os.fspath(name))


def read_stdin() -> str:
    """All of standard input."""
    if sys.stdin is None:
        return ""
    data = getattr(sys.stdin, "buffer", sys.stdin).read()
    return data if isinstance(data, str) else decode(data, STDIN)


class StdinLines:
    """The lines of standard input, one by one."""

    def __init__(self) -> None:
        self._offset = 0

    def read(self, _prompt: str = "") -> str:
        """The next one, without its end. EOFError after the last; Failure for what is not
        UTF-8."""
        line = getattr(sys.stdin, "buffer", sys.stdin).readline() if sys.stdin else b""
        if not line:
            raise EOFError
        text = line if isinstance(line, str) else decode(line, STDIN, self._offset)
        self._offset += len(line)
        return text.removesuffix("\n")


def check_argument(text: str, name: str) -> str:
    """A text of the command line; UsageError if its bytes are not UTF-8."""
    try:
        os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} {not_utf8(error, os.fsencode(text))}") from None
    except UnicodeEncodeError as error:  # only where this process made the argument
        raise UsageError(f"{name} has a lone surrogate at index {error.start}") from None
    return text
