"""What can be wrong with a model's folder before anything of it is read, each in a sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire import errors

# As hubs of models name them.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LFS_BEGIN = b"version https://git-lfs.github.com/spec/"


# The weights of a folder that are a GGUF file, or a link to one.
GGUF_WEIGHTS = "model.gguf"


def is_gguf_file(name: str | os.PathLike[str]) -> bool:
    return os.fspath(name).endswith(".gguf") and os.path.isfile(name)


def check_model_folder(name: str | os.PathLike[str], hint: str = "") -> None:
    """NotFoundError unless it is a folder or a GGUF file; it says what to do for what looks like
    something else.

    hint: what to do where nothing else is known.
    """
    text = os.fspath(name)
    if os.path.isdir(text) or is_gguf_file(text):
        return
    if not text:
        raise errors.NotFoundError("the name of the model's folder is empty")
    if os.path.isfile(text):
        raise errors.NotFoundError(
            f"{text}: is a file, neither the folder of a model nor a GGUF file, whose name ends in "
            ".gguf"
        )
    if _HUB_NAME.fullmatch(text):
        folder = text.partition("/")[2]
        raise errors.NotFoundError(
            f"{text}: there is no such folder, and Quire does not download models; if it is the "
            f"name of one on the Hugging Face hub, download it with: hf download {text} "
            f"--local-dir {folder}; then give the folder: {folder}{hint}"
        )
    raise errors.NotFoundError(f"{text}: there is no such folder with a model{hint}")


def check_not_lfs_pointer(path: Path) -> None:
    """CorruptError if the file is the text that Git LFS leaves in place of a file."""
    with path.open("rb") as file:
        begin = file.read(len(_LFS_BEGIN))
    if begin == _LFS_BEGIN:
        raise errors.CorruptError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it with: "
            f"git -C {path.parent} lfs pull"
        )
