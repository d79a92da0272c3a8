"""Models in other formats, turned into Hugging Face folders."""

from .gguf_import import FORMAT_VERSION, import_gguf
from .gguf_reader import GgufError

__all__ = ["FORMAT_VERSION", "GgufError", "import_gguf"]
