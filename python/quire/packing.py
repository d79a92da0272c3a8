"""A model's weights in the order in which kernels read them: mapped at the start, not copied."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire import _ffi
from quire._arrays import dtype_name
from quire._numbers import file_name
from quire._new_folder import check_free, check_room, new_folder
from quire.identity import keep_source, model_identity

__all__ = ["copy_other_files", "pack_model"]

# What may lie in a model folder beside its tokenizer and configuration: weights in any form.
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = "model.safetensors"
_WATCH_SECONDS = 0.1


def pack_model(
    model_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: Any = "bfloat16",
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a model folder with packed weights (docs/formats/packed.md) and returns it.

    Engines take it as they take the folder that it was made of, and give the same bits. They start
    faster and share the weights' memory with each other. Stores and snapshots know it as the same
    model, unless weights were rounded.

    Args:
        model_dir: a Hugging Face folder.
        out_dir: must not exist, or be empty; it is there completely or not at all. Takes as many
            bytes as the weights take in memory.
        dtype: "bfloat16" or "float32", as engines of the folder will compute: with "bfloat16"
            float32 weights are rounded, as an engine of that dtype would.
        threads: 0: one per core.
        progress: called now and then with (bytes written, bytes of all weights), from another
            thread.

    Raises:
        FileExistsError: `out_dir` is something else than an empty folder.
        IoError: its disk has too little room, or cannot be written.
        NotFoundError, CorruptError, BadArgumentError: as :class:`quire.Engine` for `model_dir`.
    """
    from quire.engine import Engine

    source = Path(model_dir)
    file_name(out_dir, "out_dir")
    check_free(Path(out_dir))
    weight_bytes = Engine.plan_memory(source, dtype=dtype, threads=1).weight_bytes
    check_room(Path(out_dir), weight_bytes)
    with new_folder(Path(out_dir)) as part, _watched(part, weight_bytes, progress):
        _ffi.function("pack_model")(
            {
                "model_directory": os.fspath(source),
                "path": os.fspath(part / _WEIGHTS),
                "dtype": dtype_name(dtype),
                "threads": threads,
            }
        )
        copy_other_files(source, part)
        if not _is_rounded(source, dtype_name(dtype)):
            keep_source(part, model_identity(source))
    return Path(out_dir)


def copy_other_files(source: Path, part: Path) -> None:
    """What a model folder has beside its weights: configuration, tokenizer, templates."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy(file, part)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, part / _TEMPLATES)


@contextlib.contextmanager
def _watched(
    part: Path, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[None]:
    """Tells how large the weights' file is while the library writes it."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            with contextlib.suppress(FileNotFoundError):  # matrices are still being packed
                progress((part / _WEIGHTS).stat().st_size, total)

    thread = threading.Thread(target=watch, name="quire-pack-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_rounded(source: Path, dtype: str) -> bool:
    """Whether matrices of `source` are rounded where an engine computes in `dtype`: they then take
    less memory than as they are stored."""
    from quire.engine import Engine

    plans = [Engine.plan_memory(source, dtype=name, threads=1) for name in (dtype, "float32")]
    return plans[0].weight_bytes != plans[1].weight_bytes
