"""A model folder with weights of 8 or 4 bits, made of one with weights of 16 or 32."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire import _float8, _q4k, errors
from quire._gguf_names import ARCHITECTURES, Architecture, gguf_name
from quire._model_folder import (
    GGUF_WEIGHTS,
    INDEX_OF_WEIGHTS,
    check_model_folder,
    has_safetensors,
    is_gguf_file,
    safetensors_files,
)
from quire._new_folder import NewFile, check_free, check_room, new_folder
from quire._safetensors_header import FLOATS, StoredTensor, as_float32, read_header
from quire.packing import copy_other_files

__all__ = ["WEIGHTS", "quantize_model"]


@dataclasses.dataclass(frozen=True)
class _Kind:
    gguf_type: int
    inputs: int  # of a block
    block_bytes: int


WEIGHTS = {
    "q8": _Kind(8, 32, 34),
    "q4": _Kind(2, 32, 18),
    "q4k": _Kind(12, _q4k.BLOCK, _q4k.BLOCK_BYTES),
}
# Those of tensors that are not quantised.
_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
# A scale of Q4_0 is an eighth of the greatest weight; those of the others are smaller.
_GREATEST = 8 * 65504.0

_ALIGNMENT = 32
_UINT32, _STRING = 4, 8
_VALUES_PER_PART = 4 << 20  # read, quantised and written at a time: 16 MiB as float32
_OTHER_BYTES = 64 << 20  # the files beside the weights

# Angles of the rotation, which old folders hold and the configuration says already.
_COMPUTED = ".rotary_emb.inv_freq"
# Matrices that stay as they are: those that choose experts, which few bits would send elsewhere,
# the one of latent attention that engines widen when they load it, and the small ones of recurrent
# layers: what says how much a state takes and forgets, and the convolution.
_KEPT = ("gate", "shared_expert_gate", "kv_b_proj", "in_proj_ba", "conv1d")
# Layers of Qwen3-Next that predict several tokens, which engines do not read.
_OF_SEVERAL_TOKENS = "mtp."
# What a model that knows images has beside its text model.
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
# What transformers takes for fields that the text model's object leaves out, as engines do.
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Where config.json has the number of experts.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields that stand beside the text model's object and hold for it.
_FIELDS_OF_ALL = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the source. head_rows > 0: the rows of each head, `head_rows` of them, are
    stored as rotary pairs. Numbers of float8 codes: see quire._float8."""

    name: str
    gguf_name: str
    part: str  # of the name
    path: Path
    type_name: str
    shape: tuple[int, ...]
    offset: int  # in the file
    expert: int = -1  # -1: of none
    kind: str = ""  # of WEIGHTS; "": is not quantised
    head_rows: int = 0
    value_offset: float = 0.0  # added to each number
    is_log: bool = False  # of rates, which GGUF has themselves, below zero
    scales: StoredTensor | None = None  # of float8 codes
    block: tuple[int, int] | None = None  # outputs and inputs with one of them

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def written_type(self) -> str:
        """Where it is not quantised: vectors are float32, matrices stay what they are."""
        is_plain = len(self.shape) == 2 and self.scales is None
        return self.type_name if is_plain else "F32"

    @property
    def gguf_type(self) -> int:
        return WEIGHTS[self.kind].gguf_type if self.kind else _TYPES[self.written_type]

    @property
    def byte_count(self) -> int:
        values = self.rows * self.columns
        if not self.kind:
            return FLOATS[self.written_type].itemsize * values
        kind = WEIGHTS[self.kind]
        return values // kind.inputs * kind.block_bytes


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A tensor of the file: one of the source, or those of all experts one after the other."""

    tensors: list[_Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.tensors[0]
        return first.shape if first.expert < 0 else (len(self.tensors), *first.shape)

    @property
    def byte_count(self) -> int:
        return sum(tensor.byte_count for tensor in self.tensors)


def quantize_model(
    model_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    weights: str = "q8",
    embeddings: str = "q8",
    head: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a model folder whose matrices have codes of 8 or 4 bits, and returns it.

    Reads and writes some MiB at a time. Vectors stay float32; what chooses experts stays as it is.
    The folder's weights are a GGUF file; its other files are copies. A model that knows images
    becomes its text model.

    Args:
        model_dir: a Hugging Face folder of Llama, Mistral, Mixtral, Qwen2, Qwen3 (also with
            experts), Qwen3-Next, Gemma 2, Gemma 3, Phi-3 or DeepSeek-V2 or V3, with safetensors in
            bfloat16, float16 or float32, or in float8 (e4m3) with scales.
        out_dir: must not exist, or be empty; it is there completely or not at all.
        weights: "q8" (Q8_0, 8.5 bits per weight), "q4" (Q4_0, 4.5 bits) or "q4k" (Q4_K, 4.5 bits
            and nearer to the weights; rows must be multiples of 256).
        embeddings: the same for the token embedding.
        head: the same for the matrix that makes logits; None: as `embeddings`. A model whose head
            is its embedding has no other one.
        progress: called with (bytes written, bytes of all weights), many times.

    Raises:
        BadArgumentError: another kind of model, of weights, or of elements; a GGUF file.
        CorruptError: a damaged configuration or safetensors file, or an expert that is missing.
        FileExistsError: `out_dir` is something else than an empty folder.
        IoError: its disk has too little room, or cannot be written.
        NotFoundError: there is no such folder, or a file or a tensor of the model is missing.
        TooLargeError: as :class:`quire.Engine` for `model_dir`.
    """
    for kind in (weights, embeddings, head or embeddings):
        if kind not in WEIGHTS:
            raise errors.BadArgumentError(
                f'weights of "{kind}" cannot be written; there are: {", ".join(WEIGHTS)}'
            )
    source = _folder(model_dir)
    config = _configuration(source)
    architecture = _architecture(source, config)
    written = _written_configuration(source, config, architecture)
    if head not in (None, embeddings) and _is_tied(written, architecture):
        raise errors.BadArgumentError(
            f"{source}: the head is the token embedding; embeddings={embeddings!r} holds for both"
        )
    kinds = {"embed_tokens": embeddings, "lm_head": head or embeddings}
    block = _float8.block_of(config)
    entries = _plan(source, written, architecture, _Kinds(weights, kinds), block)
    _check_engines_take(source)
    total = sum(entry.byte_count for entry in entries)
    check_free(Path(out_dir))
    check_room(Path(out_dir), total + _OTHER_BYTES)
    with new_folder(Path(out_dir)) as part:
        with NewFile(part / GGUF_WEIGHTS) as file:
            file.write(_header(entries, written, architecture.gguf))
            _write(file, entries, total, progress)
        copy_other_files(source, part)
        if written != config:
            (part / "config.json").unlink()  # a copy, with the mode of the source
            with NewFile(part / "config.json") as file:
                file.write(json.dumps(written, indent=2).encode())
    return Path(out_dir)


def _folder(model: str | os.PathLike[str]) -> Path:
    check_model_folder(model)
    if is_gguf_file(model):
        raise errors.BadArgumentError(
            f"{os.fspath(model)}: is a GGUF file, and folders are quantised; turn it into one "
            f"(quire import {os.fspath(model)} DIR --dtype float32) and quantise that"
        )
    return Path(model)


def _configuration(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.NotFoundError(
            f"{path}: there is no such file; give a Hugging Face model folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise errors.CorruptError(f"{path}: is no JSON: {error}") from None
    names = config.get("architectures") or [] if isinstance(config, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise errors.CorruptError(
            f'{path}: is no JSON object whose "architectures" are a list of names'
        )
    return config


def _architecture(source: Path, config: dict[str, Any]) -> Architecture:
    name = (config.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise errors.BadArgumentError(
            f"{source}: {name} cannot be quantised; known are: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _written_configuration(
    source: Path, config: dict[str, Any], architecture: Architecture
) -> dict[str, Any]:
    """That of the new folder: of the text model alone, without a quantisation of the source."""
    written = {name: value for name, value in config.items() if name != "quantization_config"}
    if not architecture.text_config:
        return written
    text = config.get(architecture.text_config)
    if not isinstance(text, dict):
        raise errors.CorruptError(
            f'{source / "config.json"}: "{architecture.text_config}" is no JSON object'
        )
    of_all = {name: config[name] for name in _FIELDS_OF_ALL if config.get(name) is not None}
    of_text = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    return {**_TEXT_DEFAULTS, **text, **of_all, **of_text}


def _is_tied(config: dict[str, Any], architecture: Architecture) -> bool:
    """Whether the head is the embedding: of Gemma unless the configuration says otherwise."""
    tied = config.get("tie_word_embeddings")
    return architecture.is_gemma if tied is None else bool(tied)


def _heads(source: Path, config: dict[str, Any]) -> dict[str, int]:
    """Heads of the parts whose rows are rotary pairs."""
    query = config.get("num_attention_heads")
    key = config.get("num_key_value_heads") or query
    for field, value in (("num_attention_heads", query), ("num_key_value_heads", key)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise errors.CorruptError(
                f"{source / 'config.json'}: {field} is {value!r}, not an integer from 1 on"
            )
    assert isinstance(query, int) and isinstance(key, int)
    return {"q_proj": query, "k_proj": key}


@dataclasses.dataclass(frozen=True)
class _Kinds:
    """Names in WEIGHTS. `of_parts`: for parts that have others than the rest."""

    of_rest: str
    of_parts: dict[str, str]

    def of(self, tensor: _Tensor) -> str:
        if len(tensor.shape) != 2 or tensor.part in _KEPT:
            return ""
        return self.of_parts.get(tensor.part, self.of_rest)


def _plan(
    source: Path,
    config: dict[str, Any],
    architecture: Architecture,
    kinds: _Kinds,
    block: tuple[int, int] | None,
) -> list[_Entry]:
    heads = _heads(source, config) if architecture.gguf == "llama" else {}
    entries: dict[str, _Entry] = {}
    for tensor in _stored(source, config, architecture, block):
        if tensor.part == "lm_head" and _is_tied(config, architecture):
            continue
        planned = _planned(tensor, architecture, kinds.of(tensor), heads.get(tensor.part, 0))
        entries.setdefault(tensor.gguf_name, _Entry([])).tensors.append(planned)
    for entry in entries.values():
        entry.tensors.sort(key=lambda tensor: tensor.expert)
        _check_is_whole(source, entry)
    _check_experts(source, config, list(entries.values()))
    return list(entries.values())


def _planned(tensor: _Tensor, architecture: Architecture, kind: str, heads: int) -> _Tensor:
    """`heads`: of a matrix whose rows are rotary pairs; 0 for others."""
    if kind and tensor.columns % WEIGHTS[kind].inputs:
        raise errors.BadArgumentError(
            f"{tensor.path}: tensor {tensor.name} has rows of {tensor.columns}, which are no "
            f"whole blocks of {WEIGHTS[kind].inputs}"
            + ("; q8 and q4 have blocks of 32" if kind == "q4k" else "")
        )
    if heads and tensor.rows % (2 * heads):
        raise errors.CorruptError(
            f"{tensor.path}: tensor {tensor.name} has {tensor.rows} rows, which are no "
            f"{heads} heads of pairs"
        )
    # GGUF has what these models multiply by, the checkpoint what they add to 1.
    is_shifted = architecture.is_gemma or architecture.is_hybrid
    is_shifted = is_shifted and tensor.part.endswith("norm") and tensor.part != "ssm_norm"
    return dataclasses.replace(
        tensor,
        kind=kind,
        head_rows=tensor.rows // heads if heads else 0,
        value_offset=1.0 if is_shifted else 0.0,
        is_log=tensor.part == "ssm_a",
    )


def _check_is_whole(source: Path, entry: _Entry) -> None:
    """An entry is one tensor, or the equal matrices of the experts 0, 1, 2, ..."""
    first = entry.tensors[0]
    for place, tensor in enumerate(entry.tensors):
        if tensor.expert < 0 and len(entry.tensors) > 1:
            raise errors.CorruptError(
                f"{source}: {first.name} and {entry.tensors[1].name} stand for the same tensor"
            )
        if tensor.expert not in (-1, place):
            raise errors.CorruptError(
                f"{source}: there is {tensor.name}, and none of expert {place} before it"
            )
        if tensor.shape != first.shape:
            raise errors.CorruptError(
                f"{source}: {tensor.name} has the shape {list(tensor.shape)}, "
                f"{first.name} {list(first.shape)}; experts must be alike"
            )


def _check_experts(source: Path, config: dict[str, Any], entries: list[_Entry]) -> None:
    """The same number everywhere, and that of the configuration."""
    expected = next((config[name] for name in _EXPERT_COUNTS if config.get(name) is not None), None)
    where = f"{source / 'config.json'} says"
    for entry in entries:
        if entry.tensors[0].expert < 0:
            continue
        last = entry.tensors[-1]
        if expected is None:
            expected, where = last.expert + 1, f"{last.name} says"
        if last.expert + 1 != expected:
            raise errors.CorruptError(
                f"{source}: {last.name} is the last of {last.expert + 1} experts; "
                f"{where} {expected!r}"
            )


def _stored(
    source: Path,
    config: dict[str, Any],
    architecture: Architecture,
    block: tuple[int, int] | None,
) -> Iterator[_Tensor]:
    files = safetensors_files(source)
    if not files:
        other = ", but a GGUF file" if (source / GGUF_WEIGHTS).exists() else ""
        raise errors.NotFoundError(f"{source}: has no *.safetensors files to quantise{other}")
    found = _found(files)
    scales = {
        name: found[scale]
        for name, stored in found.items()
        if stored.type_name == _float8.FLOAT8
        for scale in _float8.scale_names(name)
        if scale in found
    }
    names_of_scales = {stored.name for stored in scales.values()}
    for name, stored in found.items():
        is_unused = name.endswith(_COMPUTED) or _float8.is_of_activations(name)
        is_of_images = bool(architecture.text_config) and name.startswith(_OF_IMAGES)
        if is_unused or is_of_images or name in names_of_scales:
            continue
        if architecture.is_hybrid and name.startswith(_OF_SEVERAL_TOKENS):
            continue
        if _is_behind_the_last_layer(name, config):
            continue
        place = gguf_name(name, architecture)
        if place is not None and place.part == "conv1d":
            stored = _convolution(stored)
        _check_can_be_quantised(stored, place is not None, name in scales)
        assert place is not None
        tensor = _Tensor(
            name,
            place.name,
            place.part,
            stored.path,
            stored.type_name,
            stored.shape,
            stored.offset,
            expert=place.expert,
        )
        if name in scales:
            tensor = dataclasses.replace(tensor, scales=scales[name], block=block)
        yield tensor


def _found(files: list[Path]) -> dict[str, StoredTensor]:
    """The tensors of the files by their names."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        if not path.exists():
            raise errors.NotFoundError(
                f"{path}: there is no such file, and {INDEX_OF_WEIGHTS} names it"
            )
        for stored in read_header(path):
            other = found.setdefault(stored.name, stored)
            if other.path != path:
                raise errors.CorruptError(
                    f"{path}: tensor {stored.name} stands in {other.path.name}, too"
                )
    return found


def _is_behind_the_last_layer(name: str, config: dict[str, Any]) -> bool:
    """Layers that predict several tokens stand there, which engines do not read."""
    count = config.get("num_hidden_layers")
    layer = name.partition(".layers.")[2].partition(".")[0]
    is_number = layer.isascii() and layer.isdigit() and len(layer) < 10
    return is_number and isinstance(count, int) and int(layer) >= count


def _convolution(stored: StoredTensor) -> StoredTensor:
    """One with a row of taps for each channel has a 1 between the two, and GGUF has not."""
    if len(stored.shape) != 3 or stored.shape[1] != 1:
        raise errors.CorruptError(
            f"{stored.path}: tensor {stored.name} has the shape {list(stored.shape)}, "
            "not [channels, 1, taps]"
        )
    return dataclasses.replace(stored, shape=(stored.shape[0], stored.shape[2]))


def _check_can_be_quantised(stored: StoredTensor, is_known: bool, has_scales: bool) -> None:
    if ".packed" in stored.name:
        raise errors.BadArgumentError(
            f"{stored.path}: is of a packed folder; quantise the folder that it was made of"
        )
    if stored.type_name == _float8.FLOAT8 and not has_scales:
        raise errors.NotFoundError(
            f"{stored.path}: tensor {stored.name} has codes of 8 bits and no scales; "
            f"{stored.name}_scale or {stored.name}_scale_inv is expected"
        )
    is_plain = len(stored.shape) == 2 if has_scales else len(stored.shape) in (1, 2)
    is_plain = is_plain and (has_scales or stored.type_name in FLOATS)
    if not is_plain or 0 in stored.shape or not is_known:
        raise errors.BadArgumentError(
            f"{stored.path}: tensor {stored.name} of {stored.type_name} cannot be quantised; "
            "weights must be F32, F16, BF16 or F8_E4M3 matrices and vectors of a plain decoder"
        )


def _check_engines_take(source: Path) -> None:
    """Raises what an engine of the source would: the folder that is made would not be better."""
    from quire.engine import Engine

    if has_safetensors(source):  # of files with other names engines know nothing
        Engine.plan_memory(source, threads=1)


def _header(entries: list[_Entry], config: dict[str, Any], architecture: str) -> bytes:
    metadata: dict[str, Any] = {"general.architecture": architecture}
    if architecture == "llama":  # whose rows are rotary pairs of heads
        heads = config["num_attention_heads"]
        metadata[f"{architecture}.attention.head_count"] = heads
        key_heads = config.get("num_key_value_heads") or heads
        metadata[f"{architecture}.attention.head_count_kv"] = key_heads
    experts = max((entry.tensors[-1].expert + 1 for entry in entries), default=0)
    if experts:
        metadata[f"{architecture}.expert_count"] = experts
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        parts.append(_text(key))
        if isinstance(value, str):
            parts += [struct.pack("<I", _STRING), _text(value)]
        else:
            parts.append(struct.pack("<II", _UINT32, value))
    offset = 0
    for entry in entries:
        first, sizes = entry.tensors[0], entry.shape[::-1]
        parts += [_text(first.gguf_name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", first.gguf_type, offset))
        offset += _aligned(entry.byte_count)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(
    file: NewFile,
    entries: list[_Entry],
    total: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    written = 0
    for entry in entries:
        for tensor in entry.tensors:
            for part in _converted(tensor):
                file.write(part)
                written += part.nbytes
                if progress is not None:
                    progress(written, total)
        file.write(bytes(_aligned(entry.byte_count) - entry.byte_count))


def _converted(tensor: _Tensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor as GGUF stores them, in parts of whole heads."""
    from gguf import GGMLQuantizationType, quants

    unit = max(tensor.head_rows, 1)
    step = max(_VALUES_PER_PART // (tensor.columns * unit), 1) * unit
    dtype = np.dtype(np.uint8) if tensor.scales else FLOATS[tensor.type_name]
    scales = tensor.scales and _float8.read_scales(tensor.scales, tensor.shape, tensor.block)
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, tensor.rows, step):
            rows = min(step, tensor.rows - first)
            raw = np.fromfile(file, dtype, rows * tensor.columns).reshape(rows, tensor.columns)
            values = scales.numbers(raw, first) if scales else as_float32(raw)
            _check_values(tensor, values)
            if tensor.value_offset:
                values = values + np.float32(tensor.value_offset)
            if tensor.is_log:
                values = -np.exp(values.astype(np.float64)).astype(np.float32)
            if tensor.head_rows:
                values = _rotary_pairs(values, tensor.head_rows)
            if tensor.kind == "q4k":
                yield _q4k.quantize_rows(values)
            elif tensor.kind:
                kind = GGMLQuantizationType(tensor.gguf_type)
                yield np.ascontiguousarray(quants.quantize(values, kind))
            elif tensor.written_type == "F32":
                yield np.ascontiguousarray(values)
            else:
                yield raw


def _check_values(tensor: _Tensor, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise errors.CorruptError(
            f"{tensor.path}: tensor {tensor.name} holds a value that is not finite"
        )
    greatest = float(np.abs(values).max(initial=0))
    if tensor.kind and greatest > _GREATEST:
        raise errors.BadArgumentError(
            f"{tensor.path}: tensor {tensor.name} holds {greatest:g}; scales in float16 "
            f"reach no further than {_GREATEST:g}"
        )


def _rotary_pairs(values: np.ndarray, head_rows: int) -> np.ndarray:
    """Rows of each head from two halves to pairs: the inverse of the importer's
    split_rotary_halves."""
    rows, columns = values.shape
    return (
        values.reshape(rows // head_rows, 2, head_rows // 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )
