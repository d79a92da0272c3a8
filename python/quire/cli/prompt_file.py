"""The prompts of `quire generate --file`: read and checked as a whole before anything is computed.

txt: a prompt per line; blank lines stand for nothing. jsonl: an object per line with exactly one of

    "prompt"      a text, put through the model's chat template unless "raw" is true
    "messages"    a chat: [{"role": "user", "content": "..."}]
    "prompt_ids"  token ids

and, as far as it differs from the command line, "system" and "raw" (beside "prompt"), any field of
:class:`quire.SamplingOptions`, and "id", which comes back in the answer's row.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from quire.cli.models import Failure
from quire.cli.text_input import STDIN, not_utf8

# Far above any prompt that a model takes; a file without line ends must not fill the memory.
_LINE_BYTES_MAX = 64 << 20
_SOURCES = ("prompt", "messages", "prompt_ids")
# What crosses to the engine as a 64-bit number.
_INT_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """One request. `prompt` is a text, messages or token ids; `id` is None if there was none."""

    number: int
    prompt: Any
    system: str | None = None
    raw: bool | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    id: Any = None


class BadLine(Exception):
    """What is wrong with a line."""


@dataclasses.dataclass(frozen=True)
class PromptFile:
    """The requests of a file, in order."""

    name: str
    lines: list[PromptLine]

    @staticmethod
    def read(name: str, format: str | None) -> PromptFile:
        """Reads a path, or "-" for standard input. Format None: by the ending of the name."""
        if format is None:
            format = "jsonl" if name.endswith((".jsonl", ".ndjson")) else "txt"
        parse = _parse_object if format == "jsonl" else _parse_text
        if name == "-":
            return _collect(STDIN, sys.stdin.buffer, parse)
        with open(name, "rb") as file:
            return _collect(name, file, parse)

    def failure(self, bad: Sequence[tuple[int, object]]) -> Failure:
        """The error for bad lines, given as (number, what is wrong)."""
        number, reason = bad[0]
        more = f" (and {len(bad) - 1} more bad lines)" if len(bad) > 1 else ""
        return Failure(f"{self.name}:{number}: {reason}{more}; nothing was computed")


def _collect(
    name: str, file: BinaryIO, parse: Callable[[int, str], PromptLine | None]
) -> PromptFile:
    found = PromptFile(name, [])
    bad: list[tuple[int, object]] = []
    for number, raw in _numbered_lines(name, file):
        try:
            line = parse(number, _decode(raw))
        except BadLine as error:
            bad.append((number, error))
            continue
        if line is not None:
            found.lines.append(line)
    if bad:
        raise found.failure(bad)
    if not found.lines:
        raise Failure(f"{name}: has no prompts")
    return found


def _numbered_lines(name: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > _LINE_BYTES_MAX:
            raise Failure(f"{name}:{number}: is longer than {_LINE_BYTES_MAX} bytes")
        yield number, line


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise BadLine(not_utf8(error, raw)) from None


def _parse_text(number: int, text: str) -> PromptLine | None:
    return PromptLine(number, text) if text.strip() else None


def _parse_object(number: int, text: str) -> PromptLine | None:
    if not text.strip():
        return None
    fields = _read_object(text)
    sources = [name for name in _SOURCES if name in fields]
    if len(sources) != 1:
        raise BadLine(
            f'needs exactly one of "prompt", "messages", "prompt_ids"; it has '
            f"{' and '.join(sources) or 'none'}"
        )
    for name in ("system", "raw"):
        if name in fields and sources != ["prompt"]:
            raise BadLine(f'"{name}" goes with "prompt" only')
    checked = {name: check_field(name, value) for name, value in fields.items() if name != "id"}
    prompt = checked.pop(sources[0])
    return PromptLine(
        number,
        prompt,
        checked.pop("system", None),
        checked.pop("raw", None),
        checked,
        fields.get("id"),
    )


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadLine(f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadLine("is nested too deep") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadLine(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLine(f'must be an object such as {{"prompt": "Hello"}}, not {_kind(value)}')
    return value


def _no_constant(name: str) -> None:
    raise BadLine(f"is not JSON: {name} is no number")


def check_field(name: str, value: Any) -> Any:
    """The value as the engine takes it. BadLine for unknown names and wrong types."""
    if name not in _FIELDS:
        raise BadLine(f'there is no field "{name}"; fields are {", ".join(_FIELDS)}, id')
    expected, convert = _FIELDS[name]
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise BadLine(f'"{name}" must be {expected}, not {_kind(value)}') from None


def _kind(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---- Conversions: TypeError or ValueError for a value of another kind


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > _INT_MAX:
        raise TypeError
    return value


def _seed(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(number):
        raise ValueError
    return number


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _prompt_text(value: Any) -> str:
    text = _text(value)
    if not text:
        raise ValueError
    return text


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError
    return value


def _ids(value: Any) -> list[int]:
    return [_integer(id) for id in _list(value)]


def _messages(value: Any) -> list[dict[str, Any]]:
    messages = _list(value)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError
    return messages


def _stops(value: Any) -> list[Any]:
    entries = [value] if isinstance(value, str) else _list(value)
    return [entry if isinstance(entry, str) else _ids(entry) for entry in entries]


def _salt(value: Any) -> bytes:
    salt = _text(value).encode()  # UnicodeEncodeError, of a lone surrogate, is a ValueError
    if not 1 <= len(salt) <= 4096:
        raise ValueError
    return salt


def _speculate(value: Any) -> str:
    if value not in ("none", "ngram", "model"):
        raise ValueError
    return str(value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError
    return {_integer(int(id)): _number(bias) for id, bias in value.items()}


def _or_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


# In words, and the conversion.
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "prompt": ("a text that is not empty", _prompt_text),
    "messages": ('a list of objects such as {"role": "user", "content": "Hello"}', _messages),
    "prompt_ids": ("a list of token ids", _ids),
    "system": ("a text", _text),
    "raw": ("true or false", _boolean),
    "max_tokens": ("an integer", _or_null(_integer)),
    "greedy": ("true or false", _boolean),
    "temperature": ("a number", _number),
    "top_k": ("an integer", _integer),
    "top_p": ("a number", _number),
    "min_p": ("a number", _number),
    "repetition_penalty": ("a number", _number),
    "presence_penalty": ("a number", _number),
    "frequency_penalty": ("a number", _number),
    "logit_bias": ("an object from token ids to numbers", _logit_bias),
    "seed": ("an integer from 0 to 2^64 - 1", _seed),
    "n": ("an integer", _integer),
    "logprobs": ("an integer or null", _or_null(_integer)),
    "ignore_eos": ("true or false", _boolean),
    "stop": ("a text, or a list of texts and lists of token ids", _stops),
    "window": ("an integer", _integer),
    "sinks": ("an integer", _integer),
    "cache_salt": ("a text of 1 to 4096 bytes", _salt),
    "speculate": ('"none", "ngram" or "model"', _speculate),
    "draft_tokens": ("an integer", _integer),
    "draft_branches": ("an integer", _integer),
    "template_args": ("an object from names to values", _object),
}
