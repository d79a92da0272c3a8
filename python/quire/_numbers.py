"""Numbers of the caller, checked before they cross to C++: an error names the argument."""

from __future__ import annotations

import math
import operator
import os
from typing import Any

from quire import errors

_YEAR = 365 * 86400.0  # which no wait takes


def int64(value: Any, name: str) -> int:
    """A plain int. BadArgumentError for what is no integer or does not fit 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise errors.BadArgumentError(
            f"{name} must be an integer, not {type(value).__name__}"
        ) from None
    if not -(2**63) <= number < 2**63:
        raise errors.BadArgumentError(f"{name} is {shown(number)}; it does not fit 64 bits")
    return number


def real(value: Any, name: str) -> float:
    """A plain float. BadArgumentError for what is no number or too large for one."""
    kind = type(value).__name__
    if isinstance(value, (str, bytes)):
        raise errors.BadArgumentError(f"{name} must be a number, not {kind}")
    try:
        return float(value)
    except OverflowError:
        raise errors.BadArgumentError(f"{name} is too large for a floating-point number") from None
    except (TypeError, ValueError):
        raise errors.BadArgumentError(f"{name} must be a number, not {kind}") from None


def milliseconds(seconds: Any, name: str, most: float = _YEAR) -> int:
    """Seconds as milliseconds, `most` where it is longer, as infinity is. BadArgumentError for
    negative ones and NaN."""
    return round(min(seconds_of(seconds, name), most) * 1e3)


def nanoseconds(seconds: Any, name: str) -> int:
    """Seconds as nanoseconds, a year at most. Errors are those of `milliseconds`."""
    return round(min(seconds_of(seconds, name), _YEAR) * 1e9)


def seconds_of(value: Any, name: str) -> float:
    """Seconds of at least 0, infinity too. Errors are those of `milliseconds`."""
    number = real(value, name)
    if not number >= 0:
        raise errors.BadArgumentError(f"{name} is {number}; it must be at least 0 seconds")
    return number


def timeout(seconds: Any, name: str, most: float = math.inf) -> float:
    """Seconds above 0, `most` at most. BadArgumentError for all else."""
    number = real(seconds, name)
    if not 0 < number <= most:
        limit = "" if math.isinf(most) else f" and at most {most:g} seconds"
        raise errors.BadArgumentError(f"{name} is {number}; it must be above 0{limit}")
    return number


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as they are. BadArgumentError for an integer or a text that cannot cross to C++."""
    for name, value in fields.items():
        if isinstance(value, str):
            text(value, name)
        elif isinstance(value, int):
            int64(value, name)
    return fields


def text(value: Any, name: str) -> str:
    """A text that is valid Unicode. BadArgumentError for what is no text or has a lone
    surrogate."""
    if not isinstance(value, str):
        raise errors.BadArgumentError(f"{name} must be a text, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise errors.BadArgumentError(
            f"{name} has a lone surrogate at index {error.start}; it is not valid Unicode"
        ) from None
    return value


def file_name(path: Any, name: str) -> str:
    """The path of a file as the library takes it. BadArgumentError for one that is not valid UTF-8,
    or has a NUL: the system would take the part before it."""
    found = os.fsdecode(path)
    if "\0" in found or not _is_utf8(found):
        why = "has a NUL" if "\0" in found else "is not valid UTF-8"
        raise errors.BadArgumentError(f"{name}: {found!r} {why}; name another file")
    return found


def _is_utf8(found: str) -> bool:
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def octets(value: Any, name: str) -> bytes:
    """The bytes of a text in UTF-8, or of bytes. TypeError for what is neither: bytes(5) would be
    five zeros. BadArgumentError as of `text`."""
    if isinstance(value, str):
        return text(value, name).encode()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{name} must be a text or bytes, not {type(value).__name__}")
    return bytes(value)


def shown(number: int) -> str:
    """An integer in a message; Python refuses to print those of thousands of digits."""
    return str(number) if number.bit_length() < 200 else f"an integer of {number.bit_length()} bits"
