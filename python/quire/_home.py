"""Where Quire keeps what can be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from quire import errors


def cache_dir() -> Path:
    """$QUIRE_HOME, else quire in the user's cache folder. NotFoundError for a user without a
    home."""
    home = os.environ.get("QUIRE_HOME")
    if home:
        return Path(home)
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches) / "quire"
    try:
        return Path.home() / ".cache" / "quire"
    except RuntimeError:  # no HOME, and no entry of the user's among the system's
        raise errors.NotFoundError(
            "this user has no home folder; set QUIRE_HOME to a folder for what Quire keeps"
        ) from None


def write_whole(place: Path, text: str) -> None:
    """Writes a file, whole or not at all, and makes its folder. OSError where it cannot be kept."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, place)
    except BaseException:
        os.unlink(part)
        raise
