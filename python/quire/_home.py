"""Where Quire keeps what can be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """$QUIRE_HOME, else quire in the user's cache folder."""
    home = os.environ.get("QUIRE_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


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
