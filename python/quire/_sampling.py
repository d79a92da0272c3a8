"""How an answer is drawn where the caller does not say: the model's own sampling."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import _json_values as values
from quire import _numbers, errors
from quire._options import SAMPLING

# What generation_config.json may name.
_OWN = {name: option.own for name, option in SAMPLING.items() if option.own is not None}
# What draws nothing and changes nothing: options of requests that name all are their own.
_OFF = {name: own.off for name, own in _OWN.items()}
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_INTEGERS = [name for name, option in SAMPLING.items() if option.kind is values.INTEGER]
_NUMBERS = [name for name, option in SAMPLING.items() if option.kind is values.NUMBER]
# Every reader of JSON holds integers of this size.
_SEED_BITS = 53


def read_model_sampling(directory: Path) -> dict[str, Any]:
    """The sampling options that generation_config.json of a model folder names; none: greedy.

    A model is sampled if the file has "do_sample": true, or does not have do_sample and names a
    temperature, top_k, top_p or min_p. Then temperature is 1 unless it is named. Without sampling
    its repetition_penalty counts alone. CorruptError for a value out of range.
    """
    path = directory / "generation_config.json"
    fields = _read_fields(path)
    do_sample = fields.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise errors.CorruptError(f"{path}: do_sample is {_shown(do_sample)}, not true or false")
    named = [name for name in _OWN if fields.get(name) is not None]
    if do_sample is None:
        do_sample = any(name in named for name in _DRAWING)
    if not do_sample:
        named = [name for name in named if name not in _DRAWING]
    own = {name: _own_value(path, name, fields[name]) for name in named}
    return {"temperature": 1.0, **own} if do_sample else own


def _read_fields(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise errors.CorruptError(f"{path}: {error}") from error
    if not isinstance(fields, dict):
        raise errors.CorruptError(f"{path}: expected an object, found {_shown(fields)}")
    return fields


def _own_value(path: Path, name: str, value: Any) -> Any:
    words, whole = _OWN[name].words, name in _INTEGERS
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < 2**31 or (whole and value != int(value)):
        raise errors.CorruptError(f"{path}: {name} is {_shown(value)}; it must be {words}")
    if name == "top_k":
        value = 0 if value == -1 else int(value)
    low = value > 0 if name in ("top_p", "repetition_penalty") else value >= 0
    high = value <= 1 if name in ("top_p", "min_p") else True
    if not (low and high):
        raise errors.CorruptError(f"{path}: {name} is {_shown(value)}; it must be {words}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def merged(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options over others that they override one by one. A `greedy` and a `temperature` override
    each other, as they are about the same."""
    dropped = set()
    if options.get("greedy"):
        dropped = {*_DRAWING}
    elif any(name in options for name in _DRAWING):
        dropped = {"greedy"}
    return {**{k: v for k, v in base.items() if k not in dropped}, **options}


def resolved(own: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request: the caller's over the model's own, and a seed where something is
    drawn and none was given. Given again they mean the same. BadArgumentError for greedy with
    another temperature."""
    given = dict(options)
    greedy = given.pop("greedy", False)
    if not isinstance(greedy, bool):
        raise TypeError(f"greedy must be True or False, not {type(greedy).__name__}")
    if greedy and given.get("temperature", 0) != 0:
        raise errors.BadArgumentError(
            f"greedy takes the most likely token; temperature is {given['temperature']}: give one"
        )
    sampling = {**_OFF, **({} if greedy else own), **given}
    for name in _INTEGERS:
        if name in sampling:
            sampling[name] = _numbers.int64(sampling[name], name)
    for name in _NUMBERS:
        if name in sampling:
            sampling[name] = _numbers.real(sampling[name], name)
    if sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(_SEED_BITS) if draws(sampling) else 0
    return sampling


def draws(sampling: Mapping[str, Any]) -> bool:
    """Whether the answer depends on the seed."""
    return bool(sampling["temperature"] != 0.0)
