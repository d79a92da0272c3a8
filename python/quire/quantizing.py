"""A model folder with weights of 8 or 4 bits, made of one with weights of 16 or 32."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire import _float8, _q4k, errors
from quire._model_folder import (
    GGUF_WEIGHTS,
    check_model_folder,
    is_gguf_file,
    safetensors_files,
)
from quire._new_folder import check_free, check_room, new_folder
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
_F32 = 0
# A scale of Q4_0 is an eighth of the greatest weight; those of the others are smaller.
_GREATEST = 8 * 65504.0

_ALIGNMENT = 32
_UINT32, _STRING = 4, 8
_VALUES_PER_PART = 4 << 20  # read, quantised and written at a time: 16 MiB as float32
_OTHER_BYTES = 64 << 20  # the files beside the weights

# The name in config.json -> the name in GGUF.
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
_PARTS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3_PARTS = _PARTS | {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up"}
# Angles of the rotation, which old folders hold and the configuration says already.
_COMPUTED = ".rotary_emb.inv_freq"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the source. head_rows > 0: the rows of each head, `head_rows` of them, are
    stored as rotary pairs. Numbers of float8 codes: see quire._float8."""

    name: str
    gguf_name: str
    path: Path
    type_name: str
    shape: tuple[int, ...]
    offset: int  # in the file
    kind: str = ""  # of WEIGHTS; "" stays float32
    head_rows: int = 0
    value_offset: float = 0.0  # added to each number
    scales: StoredTensor | None = None  # of float8 codes
    block: tuple[int, int] | None = None  # outputs and inputs with one of them

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def gguf_type(self) -> int:
        return WEIGHTS[self.kind].gguf_type if self.kind else _F32

    @property
    def byte_count(self) -> int:
        values = self.rows * self.columns
        if not self.kind:
            return 4 * values
        kind = WEIGHTS[self.kind]
        return values // kind.inputs * kind.block_bytes


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

    Reads and writes some MiB at a time. Vectors stay float32. The folder's weights are a GGUF file;
    its other files are copies.

    Args:
        model_dir: a Hugging Face folder of Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) or
            Phi-3, with safetensors in bfloat16, float16 or float32, or in float8 (e4m3) with
            scales.
        out_dir: must not exist, or be empty; it is there completely or not at all.
        weights: "q8" (Q8_0, 8.5 bits per weight), "q4" (Q4_0, 4.5 bits) or "q4k" (Q4_K, 4.5 bits
            and nearer to the weights; rows must be multiples of 256).
        embeddings: the same for the token embedding.
        head: the same for the matrix that makes logits; None: as `embeddings`. A model whose head
            is its embedding has no other one.
        progress: called with (bytes written, bytes of all weights), many times.

    Raises:
        BadArgumentError: another kind of model, of weights, or of elements; a GGUF file.
        CorruptError: a damaged configuration or safetensors file.
        FileExistsError: `out_dir` is something else than an empty folder.
        IoError: its disk has too little room.
        NotFoundError: there is no such folder, or no config.json or safetensors files in it.
    """
    for kind in (weights, embeddings, head or embeddings):
        if kind not in WEIGHTS:
            raise errors.BadArgumentError(
                f'weights of "{kind}" cannot be written; there are: {", ".join(WEIGHTS)}'
            )
    source = _folder(model_dir)
    config = _configuration(source)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        raise errors.BadArgumentError(
            f"{source}: {architecture} cannot be quantised; known are: {', '.join(_ARCHITECTURES)}"
        )
    if head not in (None, embeddings) and _is_tied(config, _ARCHITECTURES[architecture]):
        raise errors.BadArgumentError(
            f"{source}: the head is the token embedding; embeddings={embeddings!r} holds for both"
        )
    kinds = {"embed_tokens": embeddings, "lm_head": head or embeddings}
    tensors = _plan(source, config, _ARCHITECTURES[architecture], weights, kinds)
    total = sum(tensor.byte_count for tensor in tensors)
    check_free(Path(out_dir))
    check_room(Path(out_dir), total + _OTHER_BYTES)
    with new_folder(Path(out_dir)) as part:
        with open(part / GGUF_WEIGHTS, "xb") as file:
            file.write(_header(tensors, config, _ARCHITECTURES[architecture]))
            _write(file, tensors, total, progress)
        copy_other_files(source, part)
        if config.pop("quantization_config", None) is not None:
            (part / "config.json").unlink()  # a copy, with the mode of the source
            (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
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


def _is_tied(config: dict[str, Any], architecture: str) -> bool:
    """Whether the head is the embedding: of Gemma unless the configuration says otherwise."""
    return bool(config.get("tie_word_embeddings", _is_gemma(architecture)))


def _is_gemma(architecture: str) -> bool:
    return architecture.startswith("gemma")


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


def _plan(
    source: Path, config: dict[str, Any], architecture: str, weights: str, kinds: dict[str, str]
) -> list[_Tensor]:
    """`kinds`: of the parts that have others than `weights`."""
    heads = _heads(source, config)
    planned = []
    for tensor in _stored(source, architecture, _float8.block_of(config)):
        *_, part, _ = tensor.name.split(".")
        if part == "lm_head" and _is_tied(config, architecture):
            continue
        kind = kinds.get(part, weights)
        if len(tensor.shape) != 2:
            kind = ""
        elif tensor.columns % WEIGHTS[kind].inputs:
            raise errors.BadArgumentError(
                f"{tensor.path}: tensor {tensor.name} has rows of {tensor.columns}, which are no "
                f"whole blocks of {WEIGHTS[kind].inputs}"
                + ("; q8 and q4 have blocks of 32" if kind == "q4k" else "")
            )
        head_rows = 0
        if architecture == "llama" and part in heads:
            if tensor.rows % (2 * heads[part]):
                raise errors.CorruptError(
                    f"{tensor.path}: tensor {tensor.name} has {tensor.rows} rows, which are no "
                    f"{heads[part]} heads of pairs"
                )
            head_rows = tensor.rows // heads[part]
        # GGUF has what Gemma multiplies by, the checkpoint what it adds to 1.
        offset = 1.0 if _is_gemma(architecture) and part.endswith("norm") else 0.0
        planned.append(
            dataclasses.replace(tensor, kind=kind, head_rows=head_rows, value_offset=offset)
        )
    return planned


def _stored(
    source: Path, architecture: str, block: tuple[int, int] | None
) -> Iterator[_Tensor]:
    files = safetensors_files(source)
    if not files:
        other = ", but a GGUF file" if (source / GGUF_WEIGHTS).exists() else ""
        raise errors.NotFoundError(f"{source}: has no *.safetensors files to quantise{other}")
    found = {stored.name: stored for path in files for stored in read_header(path)}
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
        if is_unused or name in names_of_scales:
            continue
        gguf_name = _gguf_name(name, architecture)
        _check_can_be_quantised(stored, gguf_name is not None, name in scales)
        assert gguf_name is not None
        tensor = _Tensor(
            name, gguf_name, stored.path, stored.type_name, stored.shape, stored.offset
        )
        if name in scales:
            tensor = dataclasses.replace(tensor, scales=scales[name], block=block)
        yield tensor


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


def _gguf_name(name: str, architecture: str) -> str | None:
    """None: no tensor of a plain decoder."""
    parts = _GEMMA_PARTS if _is_gemma(architecture) else _PARTS
    if architecture == "phi3":
        parts = _PHI3_PARTS
    *path, part, kind = ["", *name.split(".")]
    if part not in parts:
        return None
    if "layers" not in path:
        return f"{parts[part]}.{kind}"
    layer = path[path.index("layers") + 1 :][:1]
    return f"blk.{layer[0]}.{parts[part]}.{kind}" if layer else None


def _header(tensors: list[_Tensor], config: dict[str, Any], architecture: str) -> bytes:
    heads = config["num_attention_heads"]
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": config.get("num_key_value_heads") or heads,
    }
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts.append(_text(key))
        if isinstance(value, str):
            parts += [struct.pack("<I", _STRING), _text(value)]
        else:
            parts.append(struct.pack("<II", _UINT32, value))
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        parts += [_text(tensor.gguf_name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", tensor.gguf_type, offset))
        offset += _aligned(tensor.byte_count)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(
    file: BinaryIO,
    tensors: list[_Tensor],
    total: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    written = 0
    for tensor in tensors:
        for part in _converted(tensor):
            file.write(part.data)
            written += part.nbytes
            if progress is not None:
                progress(written, total)
        file.write(bytes(_aligned(tensor.byte_count) - tensor.byte_count))


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
            if tensor.value_offset:
                values = values + np.float32(tensor.value_offset)
            if tensor.head_rows:
                values = _rotary_pairs(values, tensor.head_rows)
            if tensor.kind == "q4k":
                yield _q4k.quantize_rows(values)
            elif tensor.kind:
                kind = GGMLQuantizationType(tensor.gguf_type)
                yield np.ascontiguousarray(quants.quantize(values, kind))
            else:
                yield np.ascontiguousarray(values)


def _rotary_pairs(values: np.ndarray, head_rows: int) -> np.ndarray:
    """Rows of each head from two halves to pairs: the inverse of the importer's
    split_rotary_halves."""
    rows, columns = values.shape
    return (
        values.reshape(rows // head_rows, 2, head_rows // 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )
