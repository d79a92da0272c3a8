"""The exceptions of Quire: one class for each outcome of the C++ library.

All derive from :class:`QuireError` and from the builtin that fits, so ``except ValueError`` works
as well. The table from outcomes to kinds stands in ``src/ffi/errors.cc``; a test compares it with
the classes here.
"""

from __future__ import annotations

import builtins
from typing import Any, TypeVar

__all__ = [
    "BadArgumentError",
    "BadStateError",
    "CancelledError",
    "ClosedError",
    "CorruptError",
    "FullError",
    "IncompatibleError",
    "InternalError",
    "IoError",
    "NeedsReplayError",
    "NotFoundError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "QuireError",
    "RemoteError",
    "SequenceExistsError",
    "TimeoutError",
    "TooLargeError",
    "UnavailableError",
    "UnknownSequenceError",
    "WrongRoleError",
]


class QuireError(Exception):
    """Base of all errors of Quire. ``code`` is the name of the outcome in C++."""

    code = ""

    def __str__(self) -> str:
        # KeyError would print the repr of its message, OSError only part of its arguments.
        return str(self.args[0]) if self.args else self.code

    @property
    def option(self) -> str:
        """The option that it is about, by its name in the library, such as "predicted_tokens" or
        "window"; empty if it is about none."""
        return self._detail("option")

    @property
    def reason(self) -> str:
        """A word of ``quire::RefusalReason``, where callers have to tell causes of one outcome
        apart, such as "no_guess_room"; else empty."""
        return self._detail("reason")

    def _detail(self, name: str) -> str:
        """What :func:`about` gave, or the library (src/ffi/errors.cc)."""
        found: Any = self.__dict__.get("_about")
        if found is None:
            found = getattr(self.__dict__.get("__tvm_ffi_error__"), "extra_context", None)
        return "" if found is None else str(found[name])


class UnknownSequenceError(QuireError, KeyError):
    """No sequence (or request) with this id."""

    code = "UnknownSequence"


class SequenceExistsError(QuireError, ValueError):
    """The id is taken."""

    code = "SequenceExists"


class BadArgumentError(QuireError, ValueError):
    """A value is out of range, or of the wrong shape or dtype."""

    code = "BadArgument"


class BadStateError(QuireError, RuntimeError):
    """The call is not legal now."""

    code = "BadState"


class OutOfPagesError(QuireError, RuntimeError):
    """The cache has too few free pages: remove or pop sequences and call again.

    Nothing has changed.
    """

    code = "OutOfPages"


class OutOfMemoryError(QuireError, MemoryError):
    """The host's allocator refused, or the machine has less memory than it would take."""

    code = "OutOfMemory"


class TooLargeError(QuireError, ValueError):
    """Over a configured limit."""

    code = "TooLarge"


class NeedsReplayError(QuireError, RuntimeError):
    """The state at that position is gone: compute again from the position in the message."""

    code = "NeedsReplay"


class NotFoundError(QuireError, FileNotFoundError, LookupError):
    """A file, folder or key is not there."""

    code = "NotFound"


class TimeoutError(QuireError, builtins.TimeoutError):  # noqa: A001 (no other name fits as well)
    """The deadline passed."""

    code = "Timeout"


class FullError(QuireError, RuntimeError):
    """A bounded queue or buffer has no room."""

    code = "Full"


class ClosedError(QuireError, RuntimeError):
    """The object was closed."""

    code = "Closed"


class WrongRoleError(QuireError, RuntimeError):
    """Asked of the wrong side of a transfer."""

    code = "WrongRole"


class RemoteError(QuireError, ConnectionError):
    """The other side reported a failure."""

    code = "Remote"


class UnavailableError(QuireError, ConnectionError):
    """The other side cannot be reached now."""

    code = "Unavailable"


class CorruptError(QuireError, ValueError):
    """Bytes that fail their checks."""

    code = "Corrupt"


class IncompatibleError(QuireError, ValueError):
    """Sound bytes of another model, version or layout."""

    code = "Incompatible"


class IoError(QuireError, OSError):
    """Reading or writing failed."""

    code = "IoError"


class CancelledError(QuireError, RuntimeError):
    """The request was cancelled."""

    code = "Cancelled"


class InternalError(QuireError, RuntimeError):
    """A defect of Quire. The object that raised it refuses further use."""

    code = "Internal"


BY_CODE: dict[str, type[QuireError]] = {cls.code: cls for cls in QuireError.__subclasses__()}
"""The class of each outcome, by the outcome's name in C++."""


_Error = TypeVar("_Error", bound=QuireError)


def about(error: _Error, option: str, reason: str = "") -> _Error:
    """The error, which says from now on what it is about: `option` and `reason` of QuireError."""
    error.__dict__["_about"] = {"option": option, "reason": reason}
    return error


def bad_option(option: str, message: str) -> BadArgumentError:
    """A refusal of this option's value."""
    return about(BadArgumentError(message), option)


def from_text(text: str) -> QuireError:
    """The error that a text of the form ``"OutOfPages: what happened"`` stands for."""
    code, separator, message = text.partition(": ")
    if separator and code in BY_CODE:
        return BY_CODE[code](message)
    return InternalError(text)
