"""Arguments of quire.ChunkStore in the configuration of another server, which is JSON."""

from __future__ import annotations

from typing import Any

from quire import errors
from quire._key_file import read_key_file
from quire._numbers import text
from quire._options import STORE

__all__ = ["store_arguments"]


def store_arguments(left: dict[str, Any], where: str) -> dict[str, Any]:
    """Takes them out of `left`, the options that nobody has read yet; `key_file` stands for a key.
    where: what errors begin with.

    Raises:
        BadArgumentError: a key itself, or a place that is no text. The store checks the rest.
        OSError: the key's file cannot be read.
    """
    found = {name: left.pop(name) for name in ("directory", *STORE) if name in left}
    for name in ("directory", "redis"):
        if found.get(name) is not None:
            text(found[name], f"{where}: {name}")
    if "key" in found:
        raise errors.BadArgumentError(f"{where}: key is given by its file, as key_file")
    if (key_file := left.pop("key_file", None)) is not None:
        found["key"] = read_key_file(text(key_file, f"{where}: key_file"))
    return found
