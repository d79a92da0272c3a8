"""What can be wrong with a model's folder before anything of it is read, each in a sentence."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from quire import errors

# As hubs of models name them.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES_SHOWN = 8
LFS_BEGIN = b"version https://git-lfs.github.com/spec/"


# The weights of a folder, in the order in which engines look for them: one file; files that an
# index names; a GGUF file, or a link to one.
SINGLE_WEIGHTS = "model.safetensors"
INDEX_OF_WEIGHTS = "model.safetensors.index.json"
GGUF_WEIGHTS = "model.gguf"


def is_gguf_file(name: str | os.PathLike[str]) -> bool:
    return os.fspath(name).endswith(".gguf") and os.path.isfile(name)


def check_model_folder(name: str | os.PathLike[str], hint: str = "") -> None:
    """NotFoundError unless it is a folder or a GGUF file; it says what to do for what looks like
    something else.

    hint: what to do where nothing else is known.
    """
    text = os.fspath(name)
    if is_gguf_file(text):
        return
    if os.path.isdir(text):
        _check_holds_more_than_gguf_files(Path(text))
        return
    if not text:
        raise errors.NotFoundError("the name of the model's folder is empty")
    if os.path.isfile(text):
        raise errors.NotFoundError(
            f"{text}: is a file, neither the folder of a model nor a GGUF file, whose name ends in "
            ".gguf"
        )
    if text.endswith(".gguf"):
        raise errors.NotFoundError(f"{text}: there is no such GGUF file{hint}")
    if _HUB_NAME.fullmatch(text):
        folder = text.partition("/")[2]
        if "gguf" in folder.lower():  # each of its files is a whole model
            raise errors.NotFoundError(
                f"{text}: there is no such folder, and Quire does not download models; if it is "
                "the name of one on the Hugging Face hub, download one of its files with: "
                f"hf download {text} FILE.gguf --local-dir {folder}; then give the file: "
                f"{folder}/FILE.gguf{hint}"
            )
        raise errors.NotFoundError(
            f"{text}: there is no such folder, and Quire does not download models; if it is the "
            f"name of one on the Hugging Face hub, download it with: hf download {text} "
            f"--local-dir {folder}; then give the folder: {folder}{hint}"
        )
    raise errors.NotFoundError(f"{text}: there is no such folder with a model{hint}")


def _check_holds_more_than_gguf_files(folder: Path) -> None:
    """NotFoundError for a folder that holds files which are models, and is none itself."""
    has_weights = has_safetensors(folder) or (folder / GGUF_WEIGHTS).exists()
    if has_weights and (folder / "config.json").exists():
        return
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if not files:
        return
    shown = ", ".join(files[:_FILES_SHOWN]) + (", ..." if len(files) > _FILES_SHOWN else "")
    raise errors.NotFoundError(
        f"{folder}: is no model folder, but its GGUF files are models: give one of them, such as "
        f"{folder / files[0]} (there are: {shown})"
    )


def check_not_lfs_pointer(path: Path) -> None:
    """CorruptError if the file is the text that Git LFS leaves in place of a file."""
    with path.open("rb") as file:
        begin = file.read(len(LFS_BEGIN))
    if begin == LFS_BEGIN:
        raise errors.CorruptError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it with: "
            f"git -C {path.parent} lfs pull"
        )


def has_safetensors(folder: Path) -> bool:
    """Whether engines read the weights of a folder from safetensors files."""
    return any((folder / name).exists() for name in (SINGLE_WEIGHTS, INDEX_OF_WEIGHTS))


def safetensors_files(folder: Path) -> list[Path]:
    """The files that engines read the weights of a folder from; others may lie beside them. All
    there are, of a folder without an index that engines do not read.

    CorruptError: the index names no files of the folder.
    """
    single, index = folder / SINGLE_WEIGHTS, folder / INDEX_OF_WEIGHTS
    if single.exists():
        return [single]
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(_in_folder(folder, name) for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.CorruptError(
            f"{index}: weight_map names no *.safetensors files of this folder: {error!r}"
        ) from None


def _in_folder(folder: Path, name: str) -> Path:
    if os.path.basename(name) != name or not name.endswith(".safetensors"):
        raise ValueError(name)
    return folder / name
