"""JSON of strangers: its size, depth and counts are checked before it is parsed."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, NoReturn

from quire.serve.problems import Problem

__all__ = ["JsonLimits", "parse_object"]

# One match for each string (group 1 is empty where it does not end), container or colon, and for
# numbers that no field takes. Possessive, so that no input makes it look at a byte twice.
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}:]|[0-9]{40}', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class JsonLimits:
    """depth: of nested containers; keys: of all objects together; containers, strings: in all;
    string_bytes: of one string as it is written."""

    depth: int = 72  # a schema of 64 levels, within its fields
    keys: int = 10_000
    containers: int = 20_000
    strings: int = 100_000
    string_bytes: int = 4 << 20


def parse_object(body: bytes | bytearray, limits: JsonLimits = JsonLimits()) -> dict[str, Any]:
    """The object of a request's body. Problem (400) for all else."""
    _check_size(body, limits)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    infinite: list[str] = []

    def number(digits: str) -> float:
        found = float(digits)
        if math.isinf(found):
            infinite.append(digits)
        return found

    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=number
        )
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object")
    if infinite:  # an answer that repeats it would be no JSON
        name = next(name for name, field in value.items() if not _is_finite(field))
        raise Problem(400, f"{name[:64]} has a number that is out of range", param=name)
    return value


def _check_size(body: bytes | bytearray, limits: JsonLimits) -> None:
    depth = keys = containers = strings = 0
    for match in _TOKENS.finditer(body):
        token = body[match.start()]
        if token == 0x22:  # "
            strings += 1
            if not match[1]:
                raise Problem(400, "the body is not valid JSON: a string does not end")
            _check(match.end() - match.start() - 2, limits.string_bytes, "bytes in one string")
            _check(strings, limits.strings, "strings")
        elif token in b"[{":
            depth += 1
            containers += 1
            _check(depth, limits.depth, "levels of nesting")
            _check(containers, limits.containers, "lists and objects")
        elif token in b"]}":
            depth -= 1
        elif token == 0x3A:  # :
            keys += 1
            _check(keys, limits.keys, "keys")
        else:
            raise Problem(400, "the body has a number of more than 39 digits")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise Problem(400, f"the body has more than {most} {what}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise Problem(400, f"the body has the key {name[:64]!r} twice in one object")
            seen.add(name)
    return found


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _refuse_constant(name: str) -> NoReturn:
    raise Problem(400, f"the body is not valid JSON: {name} is not a JSON number")
