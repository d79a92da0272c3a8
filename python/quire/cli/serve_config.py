"""Options of `quire serve` that stand in the environment or in a file, as words of the command
line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from quire.cli import arguments, models
from quire.cli.arguments import UsageError

__all__ = ["environment_names", "environment_words", "file_words", "read"]

_PREFIX = "QUIRE_"
_FILE_BYTES_MAX = 1 << 20
_NOT_STORED = ("--help", "--dry-run")  # what is done once, and is no setting


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The options that can stand elsewhere, by their name with dashes."""
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if names and names[0] not in _NOT_STORED:
            yield names[0], action


def _variable(name: str) -> str:
    return _PREFIX + name[2:].upper().replace("-", "_")


def environment_names(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> set[str]:
    """The options that the environment says something of: also switches that it leaves off, for
    which there is no word."""
    return {name for name, _ in _options(parser) if _variable(name) in environment}


def environment_words(
    parser: argparse.ArgumentParser, environment: Mapping[str, str], given: set[str]
) -> list[str]:
    """The environment's options; none for those that are `given` on the command line."""
    words: list[str] = []
    for name, action in _options(parser):
        variable = _variable(name)
        value = environment.get(variable)
        if value is None or name in given:
            continue
        if action.nargs == 0:
            if value not in ("0", "1"):
                parser.error(f"{variable} is {value!r}; it must be 0 or 1")
            words += [name] if value == "1" else []
        else:
            _check(parser, action, variable, value)
            words.append(f"{name}={value}")
    return words


def read(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """The entries of a YAML file. UsageError for what is no mapping; OSError."""
    with models.naming_missing_packages("serve"):
        import yaml

    with open(path, "rb") as file:
        content = file.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise UsageError(f"{path}: has more than {_FILE_BYTES_MAX} bytes")
    try:
        values = yaml.safe_load(content)
        twice = _twice(yaml.compose(content, yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f'{path}: must have lines such as "port: 8001"')
    if twice:
        raise UsageError(f"{path}: {twice[0]} is given twice")
    if not isinstance(values.get("model", ""), str):
        raise UsageError(f"{path}: model must be a folder")
    return values


def _twice(node: Any) -> list[str]:
    """Names that a mapping of YAML has more than once, of which the reader takes the last."""
    is_mapping = node is not None and node.id == "mapping"
    names = [name.value for name, _ in node.value] if is_mapping else []
    return [name for index, name in enumerate(names) if name in names[:index]]


def file_words(
    parser: argparse.ArgumentParser, path: str, values: Mapping[str, Any], given: set[str]
) -> list[str]:
    """The options of a file; none for those that are `given` elsewhere. All are checked."""
    options = dict(_options(parser))
    words: list[str] = []
    for entry, value in values.items():
        name = "--" + entry
        if name not in options or name == "--config":
            names = [other[2:] for other in options if other != "--config"]
            hint = arguments.meant(entry, names)
            raise UsageError(f"{path}: there is no option {entry!r}{hint}")
        found = _words(parser, options[name], f"{path}: {entry}", name, value)
        words += [] if name in given else found
    return words


def _words(
    parser: argparse.ArgumentParser, action: argparse.Action, place: str, name: str, value: Any
) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{place} is {value!r}; it must be true or false")
        return [name] if value else []
    if isinstance(value, dict) and isinstance(action, arguments.Collect):
        texts = [f"{key}={_text(place, each)}" for key, each in value.items()]
    elif isinstance(value, list) and _repeats(action):
        texts = [_text(place, each) for each in value]
    else:
        texts = [_text(place, value)]
    for text in texts:
        _check(parser, action, place, text)
    return [f"{name}={text}" for text in texts]


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action, (argparse._AppendAction, arguments.Collect))


def _text(place: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UsageError(f"{place} is {value!r}; it must be a text or a number")
    return str(value)


def _check(
    parser: argparse.ArgumentParser, action: argparse.Action, place: str, value: str
) -> None:
    """An error that names the place: argparse would name an option that nobody typed."""
    try:
        converted = action.type(value) if callable(action.type) else value
    except argparse.ArgumentTypeError as error:
        parser.error(f"{place}: {error}")
    if action.choices is not None and converted not in action.choices:
        parser.error(f"{place} is {value!r}; it must be one of {', '.join(action.choices)}")
