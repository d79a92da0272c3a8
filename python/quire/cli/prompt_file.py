"""The prompts of `quire generate --file`: read and checked as a whole before anything is computed.

txt: a prompt per line; blank lines stand for nothing. jsonl: an object per line with exactly one of

    "prompt"      a text, put through the model's chat template unless "raw" is true
    "messages"    a chat: [{"role": "user", "content": "..."}]; a content may be a list of parts,
                  {"type": "text", "text": "..."} and {"type": "document", "text": "..."}
    "prompt_ids"  token ids

and, as far as it differs from the command line, "system" and "raw" (beside "prompt"), any field of
:class:`quire.SamplingOptions`, and "id", which comes back in the answer's row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from quire import _json_values as values
from quire._options import SAMPLING
from quire.cli.models import Failure
from quire.cli.text_input import STDIN, not_utf8

# Far above any prompt that a model takes; a file without line ends must not fill the memory.
_LINE_BYTES_MAX = 64 << 20
_SOURCES = ("prompt", "messages", "prompt_ids")


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
            if sys.stdin is None:
                raise Failure(f"{STDIN}: is closed")
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
    kind = _FIELDS[name]
    try:
        return kind.convert(value)
    except (TypeError, ValueError):
        raise BadLine(f'"{name}" must be {kind.words}, not {_kind(value)}') from None


def _kind(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# In the order in which messages list them.
_FIELDS = {
    "prompt": values.FULL_TEXT,
    "messages": values.MESSAGES,
    "prompt_ids": values.TOKEN_IDS,
    "system": values.TEXT,
    "raw": values.BOOLEAN,
    **{name: option.kind for name, option in SAMPLING.items() if option.kind is not None},
}
