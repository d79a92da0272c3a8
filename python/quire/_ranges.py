"""Values of options: for one that is out of range argparse reports the option, the value and the
range."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import struct
from pathlib import Path

from quire import errors
from quire._key_file import read_key_file

INT_MAX = 2**63 - 1
_ACTIVATIONS = ("int8", "bfloat16", "float32")
_KV_DTYPES = ("bfloat16", "float32", "float16", "int8", "fp8")


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer from `least` to `most`."""

    least: int
    most: int = INT_MAX

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also: thousands of digits
            raise argparse.ArgumentTypeError(f"{_shown(text)} is not {self.words}") from None
        if not self.least <= value <= self.most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is out of range: {self.words}")
        return value

    @property
    def words(self) -> str:
        return f"an integer from {_power(self.least)} to {_power(self.most)}"


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite number of float32 from `least` to `most`; `above`: without `least` itself."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is not {self.words}") from None
        try:
            (narrow,) = struct.unpack("f", struct.pack("f", value))  # as the library takes it
        except OverflowError:
            narrow = math.inf
        low = narrow > self.least if self.above else narrow >= self.least
        if not (math.isfinite(narrow) and low and narrow <= self.most):
            raise argparse.ArgumentTypeError(f"{_shown(text)} is out of range: {self.words}")
        return value

    @property
    def words(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.least:g}"
        high = f"at most {self.most:g}"
        bounds = [low] if math.isfinite(self.least) else []
        bounds += [high] if math.isfinite(self.most) else []
        return f"a number {' and '.join(bounds)}" if bounds else "a finite number"


def size(text: str) -> int:
    """Bytes of "512M", "1.5GiB", ..."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a size: 1000000, 512M, 2G, ... in bytes, KiB, MiB, GiB or TiB"
        )
    number = float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")
    if number >= 2**63:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is out of range: at most 2^63 - 1 bytes")
    return int(number)


def place(text: str) -> str:
    """A file, a folder or an address: not nothing, which would be as if it were not given."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    if "\0" in text:  # as YAML can write it
        raise argparse.ArgumentTypeError(f"{_shown(text)} has a NUL")
    return text


def addresses(text: str) -> list[str]:
    """Addresses of processes, with commas between them, as of address()."""
    return [address(word) for word in text.split(",")]


def address(text: str) -> str:
    """HOST:PORT, ucx:HOST:PORT or unix:PATH."""
    if text.startswith("unix:"):
        if text == "unix:":
            raise argparse.ArgumentTypeError("'unix:' names no file; give unix:PATH")
        return text
    host, _, port = text.removeprefix("ucx:").rpartition(":")
    if not host or re.fullmatch(r"\d{1,5}", port, re.ASCII) is None or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is no address: HOST:PORT, such as 127.0.0.1:7000, "
            "ucx:HOST:PORT or unix:PATH"
        )
    return text


def readable_file(text: str) -> str:
    """A file that can be opened."""
    try:
        with open(place(text), "rb"):
            return text
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: {error.strerror}") from None


def secret_file(text: str) -> str:
    """A file that the secret of connections can be read from."""
    from quire import _prefill  # loads the library, which --help does not need

    try:
        return _prefill.ReadSecretFile(place(text))
    except errors.BadArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None


def kv_dtype(text: str) -> str:
    """A type of keys and values, or two with a comma."""
    names = text.split(",")
    if len(names) > 2 or any(name not in _KV_DTYPES for name in names):
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a type of KV: one of {', '.join(_KV_DTYPES)}, or two of them "
            "with a comma, of keys and of values"
        )
    return text


def activations(text: str) -> str:
    """A type of rows that meet quantised weights."""
    name = "bfloat16" if text == "bf16" else text
    if name not in _ACTIVATIONS:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a type of activations: one of {', '.join(_ACTIVATIONS)}"
        )
    return name


def kernel_path(text: str) -> str:
    """One of those that this machine runs."""
    import quire

    known = quire.kernel_paths()
    if text not in known:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not one of {', '.join(known)}, which this machine can run"
        )
    return text


def cache_salt(text: str) -> bytes:
    """A salt of 1 to 4096 bytes."""
    salt = os.fsencode(text)
    if not 1 <= len(salt) <= 4096:
        raise argparse.ArgumentTypeError(f"{len(salt)} bytes are out of range: 1 to 4096 bytes")
    return salt


def switch(text: str) -> bool:
    """True of "true", False of "false"."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text == "true"


def key_file(text: str) -> str:
    """A file that a signing key can be read from."""
    try:
        read_key_file(Path(place(text)))
    except errors.BadArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return text


def token_ids(text: str) -> list[int]:
    """Token ids with commas or blanks between them."""
    try:
        ids = [int(word) for word in re.split(r"[\s,]+", text.strip("[] \t\n")) if word]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"token ids are numbers with commas between them: {error}"
        ) from None
    if not ids:
        raise argparse.ArgumentTypeError("there must be at least one token id")
    for id in ids:
        if not 0 <= id < 2**31:
            raise argparse.ArgumentTypeError(f"{id} is not a token id: from 0 to 2^31 - 1")
    return ids


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _power(value: int) -> str:
    return {2**63 - 1: "2^63 - 1", 2**64 - 1: "2^64 - 1"}.get(value, str(value))
