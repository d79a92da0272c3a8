"""A GGUF file as a model: a small folder in the cache has its configuration and tokenizer, and a
link to the file, whose weights stay as they lie."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from quire import errors
from quire._home import cache_dir
from quire._model_folder import check_model_folder, is_gguf_file

__all__ = ["model_folder"]


def model_folder(model: str | os.PathLike[str]) -> Path:
    """The folder of a model that is given as a folder or as a GGUF file.

    The first call for a file writes its folder (some seconds), later ones find it until the file
    changes or lies elsewhere. Calls at the same time are safe: one writes, the others wait.

    Raises:
        NotFoundError: there is no such folder or file.
        CorruptError: the GGUF file is damaged, or no model that Quire reads.
        ModuleNotFoundError: a package of the extra ``quire[import]`` is missing.
    """
    check_model_folder(model)
    if not is_gguf_file(model):
        return Path(model)
    from quire.importer import FORMAT_VERSION  # folders need nothing of it

    file = Path(model).resolve()
    stat = file.stat()
    facts = f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(facts)).hexdigest()[:16]
    models = cache_dir() / "models"
    folder = models / f"{file.stem.lower()}-{digest}-gguf-v{FORMAT_VERSION}"
    if folder.is_dir():  # published by a rename, so it is complete
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by a crash
        if not folder.is_dir():
            _link(file, folder)
    return folder


def _link(file: Path, folder: Path) -> None:
    from quire.importer import GgufError, link_gguf

    try:
        link_gguf(file, folder)
    except GgufError as error:
        raise errors.CorruptError(str(error)) from error
