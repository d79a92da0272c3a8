"""Where Quire keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$QUIRE_HOME, else quire in the user's cache folder."""
    home = os.environ.get("QUIRE_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
