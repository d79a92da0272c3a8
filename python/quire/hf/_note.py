"""What QuireCache.save() notes beside the keys and values: a JSON object in its first file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire import errors, snapshot

__all__ = ["FILE", "VERSION", "read_note"]

FILE = "{}.quire"
VERSION = 1
# What is so where the note does not tell, as older ones do not.
_OF_POSITIONS = {"counted": False, "must_count": False}


def _are_numbers(value: Any, end: int, first: int = 0) -> bool:
    """Whether it is a list of integers in [first, end)."""
    return isinstance(value, list) and all(
        type(each) is int and first <= each < end for each in value
    )


def _is_table(value: Any, rows: int, columns: int, end: int, first: int = 0) -> bool:
    return (
        isinstance(value, list)
        and len(value) == rows
        and all(_are_numbers(row, end, first) and len(row) == columns for row in value)
    )


def _wrong_field(fields: dict[str, Any]) -> str | None:
    """The name of the first field that no save() writes."""
    lengths: Any
    rows: Any
    columns, lengths, rows = (fields.get(name) for name in ("columns", "lengths", "rows"))
    if type(columns) is not int or not 0 < columns < 2**31:
        return "columns"
    if not _are_numbers(lengths, columns + 1) or not lengths:
        return "lengths"
    if not _are_numbers(rows, len(lengths)) or set(rows) != set(range(len(lengths))):
        return "rows"
    shown, ids, weights = (fields.get(name, 0) for name in ("shown", "input_ids", "weights"))
    tokens = [lengths[row] for row in rows]
    if shown is None:
        if tokens != [columns] * len(rows):
            return "shown"
    elif not _is_table(shown, len(rows), columns, 2) or [sum(row) for row in shown] != tokens:
        return "shown"
    if ids is not None and not _is_table(ids, len(rows), columns, 2**63, -(2**63)):
        return "input_ids"
    if not isinstance(weights, list) or not all(isinstance(each, str) for each in weights):
        return "weights"
    for name in _OF_POSITIONS:
        if not isinstance(fields[name], bool):
            return name
    return None


def read_note(folder: Path) -> dict[str, Any]:
    """The note of a folder, whose fields are those that save() writes.

    Raises IncompatibleError for another one; else as snapshot.info.
    """
    file = folder / FILE.format(0)
    try:
        fields = json.loads(snapshot.info(file).sampler)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise errors.IncompatibleError(f"{file}: was not written by QuireCache.save") from error
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise errors.IncompatibleError(
            f"{file}: was not written by QuireCache.save, or by another version of it"
        )
    fields = {**_OF_POSITIONS, **fields}
    wrong = _wrong_field(fields)
    if wrong is not None:
        raise errors.IncompatibleError(
            f"{file}: was not written by QuireCache.save: {wrong} is not what that writes"
        )
    return fields
