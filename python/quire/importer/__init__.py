"""Models in other formats, turned into Hugging Face folders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gguf_import import import_gguf, link_gguf
    from .gguf_reader import GgufError

__all__ = ["FORMAT_VERSION", "GgufError", "import_gguf", "link_gguf"]

# Grows when the same GGUF file would be written in another way, so that cached folders are made
# again.
FORMAT_VERSION = 2

_MODULE_OF = {
    "GgufError": "gguf_reader",
    "import_gguf": "gguf_import",
    "link_gguf": "gguf_import",
}


def __getattr__(name: str) -> Any:
    """Imports what reads GGUF files, which takes as long as the start of a small model, when it is
    needed: an existing folder does not need it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
