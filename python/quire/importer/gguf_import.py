"""The import as a whole: a GGUF file in, a Hugging Face folder out that is there completely or not
at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from quire._model_folder import GGUF_WEIGHTS
from quire._new_folder import NewFile, check_free, check_room, new_folder

from .gguf_reader import GgufFile
from .model_config import build_config, build_generation_config
from .model_shape import read_shape
from .safetensors_writer import Declaration, SafetensorsWriter
from .tokenizer import ImportedTokenizer, build_tokenizer
from .weights import DTYPES, Weight, converted_parts, plan_weights

Progress: TypeAlias = Callable[[int, int], None]

# Tokenizer, configuration and the header of the weights: some MiB.
_OTHER_BYTES = 64 << 20


def import_gguf(
    path: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: Progress | None = None,
) -> Path:
    """Writes the model of a GGUF file as a Hugging Face folder and returns the folder.

    The folder must not exist, or be empty. It is made under another name beside its place and
    renamed when it is complete, so an import that fails or is killed leaves no half folder under
    the asked name. GgufError says what is wrong with the file; FileExistsError, IoError and other
    OSErrors what is wrong with the folder, or that its disk has too little room.

    progress: called with (bytes written, bytes of all weights), many times.
    """
    if dtype not in DTYPES:
        raise ValueError(f'dtype "{dtype}" is not one of {", ".join(DTYPES)}')
    out = Path(out_dir)
    check_free(out)
    file = GgufFile(path)
    shape = read_shape(file)
    weights = plan_weights(file, shape)
    configs = {
        "config.json": build_config(file, shape, dtype),
        "generation_config.json": build_generation_config(file, shape),
    }
    tokenizer = build_tokenizer(file, shape.vocab_size)
    declarations = [
        Declaration(weight.name, DTYPES[dtype], weight.shape) for weight in weights
    ]
    total = sum(item.byte_count for item in declarations)
    check_room(out, total + _OTHER_BYTES)

    with new_folder(out) as part:
        for name, config in configs.items():
            _write_json(part / name, config)
        _write_tokenizer(part, tokenizer)
        with SafetensorsWriter(os.fspath(part / "model.safetensors"), declarations) as writer:
            _write_weights(writer, file, weights, dtype, lambda n: progress and progress(n, total))
    return out


def link_gguf(path: str | os.PathLike[str], out_dir: Path) -> None:
    """Writes a model folder whose weights are a link to the GGUF file: configuration and tokenizer
    alone, so in seconds and some MiB.

    It is there completely or not at all. GgufError says what is wrong with the file.
    """
    file = GgufFile(path)
    shape = read_shape(file)
    plan_weights(file, shape)
    tokenizer = build_tokenizer(file, shape.vocab_size)
    with new_folder(out_dir) as part:
        _write_json(part / "config.json", build_config(file, shape, "bfloat16"))
        _write_json(part / "generation_config.json", build_generation_config(file, shape))
        _write_tokenizer(part, tokenizer)
        (part / GGUF_WEIGHTS).symlink_to(Path(path).resolve())


def _write_text(path: Path, text: str) -> None:
    with NewFile(path) as file:
        file.write(text.encode())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_tokenizer(folder: Path, imported: ImportedTokenizer) -> None:
    _write_text(folder / "tokenizer.json", imported.tokenizer.to_str(pretty=True))
    _write_json(folder / "tokenizer_config.json", imported.config)
    if imported.templates:
        (folder / "additional_chat_templates").mkdir()
    for name, template in imported.templates.items():
        _write_text(folder / "additional_chat_templates" / f"{name}.jinja", template)


def _write_weights(
    writer: SafetensorsWriter,
    file: GgufFile,
    weights: list[Weight],
    dtype: str,
    on_part: Callable[[int], object],
) -> None:
    written = 0
    with np.errstate(all="ignore"):
        for weight in weights:
            for part in converted_parts(file, weight, dtype):
                writer.write(part)
                written += part.nbytes
                on_part(written)
