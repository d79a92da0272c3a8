"""Kinds of values in JSON: what each is in words, and its conversion to what the engine takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

# What crosses to the engine as a 64-bit number.
_INT_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Kind:
    """`convert` raises TypeError or ValueError for a value of another kind; `words` say what it
    must be."""

    words: str
    convert: Callable[[Any], Any]


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


def _full_text(value: Any) -> str:
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


def _draft_kind(value: Any) -> str:
    if value not in ("none", "ngram", "model"):
        raise ValueError
    return str(value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError
    return {_integer(int(id)): _number(bias) for id, bias in value.items()}


def _integer_or_null(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _texts(value: Any) -> list[str]:
    return [_full_text(text) for text in _list(value)]


def _blend(value: Any) -> Any:
    if isinstance(value, dict) or value == "auto":
        return value
    ratio = _number(value)
    if not 0 <= ratio <= 1:
        raise ValueError
    return ratio


def _documents(value: Any) -> list[str] | str:
    return "auto" if value == "auto" else _texts(value)


DOCUMENTS = Kind('a list of texts that are not empty, or "auto"', _documents)
BLEND = Kind('a number from 0 to 1, "auto", or an object of options', _blend)
BOOLEAN = Kind("true or false", _boolean)
DRAFT_KIND = Kind('"none", "ngram" or "model"', _draft_kind)
FULL_TEXT = Kind("a text that is not empty", _full_text)
INTEGER = Kind("an integer", _integer)
# null: no limit for max_tokens, none for logprobs.
LIMIT = Kind("an integer", _integer_or_null)
INTEGER_OR_NULL = Kind("an integer or null", _integer_or_null)
LOGIT_BIAS = Kind("an object from token ids to numbers", _logit_bias)
MESSAGES = Kind('a list of objects such as {"role": "user", "content": "Hello"}', _messages)
NUMBER = Kind("a number", _number)
OBJECT = Kind("an object from names to values", _object)
SALT = Kind("a text of 1 to 4096 bytes", _salt)
SEED = Kind("an integer from 0 to 2^64 - 1", _seed)
STOPS = Kind("a text, or a list of texts and lists of token ids", _stops)
TEXT = Kind("a text", _text)
TEXTS = Kind("a list of texts that are not empty", _texts)
TOKEN_IDS = Kind("a list of token ids", _ids)
