"""Which tensor of a GGUF file becomes which of a Hugging Face checkpoint, and the stream of
converted values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from gguf.quants import dequantize

from .gguf_reader import GgufFile, TensorInfo
from .model_config import ROPE_FACTORS_TENSOR, ModelShape

# Values converted at a time: 16 MiB in float32, so that a model of any size is converted in little
# memory.
_VALUES_PER_PART = 4 << 20

# dtype as the caller names it -> as safetensors does.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint. `rotary_head_dim` > 0: rows are to be put back into the
    half-split rotary order. `value_offset` is added to each value."""

    name: str
    source: TensorInfo
    rotary_head_dim: int = 0
    value_offset: float = 0.0


def plan_weights(file: GgufFile, shape: ModelShape) -> list[Weight]:
    """All tensors of the checkpoint, in order. An absent, misshapen or left-over tensor of the file
    is an error."""
    weights = [_find(file, item) for item in _expected(shape)]
    known = {weight.source.name for weight in weights} | {ROPE_FACTORS_TENSOR}
    for name in file.tensors:
        if name not in known:
            raise file.tensor_error(
                name, f"is not part of a {shape.architecture} model as the importer knows it"
            )
    return weights


class _Expected(NamedTuple):
    name: str
    source: str  # as GGUF names it
    shape: tuple[int, ...]
    rotary_head_dim: int = 0
    value_offset: float = 0.0


def _find(file: GgufFile, item: _Expected) -> Weight:
    tensor = file.tensors.get(item.source)
    if tensor is None:
        raise file.tensor_error(item.source, "is missing")
    if tensor.shape != item.shape:
        raise file.tensor_error(
            item.source,
            f"has shape {list(tensor.shape)}, expected {list(item.shape)} from the metadata",
        )
    return Weight(item.name, tensor, item.rotary_head_dim, item.value_offset)


def _expected(shape: ModelShape) -> Iterator[_Expected]:
    """Converters add to the norms of Gemma the 1 that these models add to them."""
    for item in _expected_as_stored(shape):
        is_shifted = shape.is_gemma and item.source.endswith("norm.weight")
        yield item._replace(value_offset=-1.0) if is_shifted else item


def _expected_as_stored(shape: ModelShape) -> Iterator[_Expected]:
    hidden, vocab = shape.hidden_size, shape.vocab_size
    yield _Expected("model.embed_tokens.weight", "token_embd.weight", (vocab, hidden))
    for layer in range(shape.layer_count):
        for item in _expected_in_layer(shape):
            yield item._replace(
                name=f"model.layers.{layer}.{item.name}", source=f"blk.{layer}.{item.source}"
            )
    yield _Expected("model.norm.weight", "output_norm.weight", (hidden,))
    if not shape.tied_embeddings:
        yield _Expected("lm_head.weight", "output.weight", (vocab, hidden))


def _expected_in_layer(shape: ModelShape) -> Iterator[_Expected]:
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.head_count * head_dim, shape.kv_head_count * head_dim
    # Converters for the llama architecture permute the rows of q and k so that rotary pairs lie
    # side by side; those for the others keep the order of the checkpoint.
    rotary = head_dim if shape.architecture == "llama" else 0
    projections = [
        ("self_attn.q_proj", "attn_q", (queries, hidden), rotary),
        ("self_attn.k_proj", "attn_k", (keys, hidden), rotary),
        ("self_attn.v_proj", "attn_v", (keys, hidden), 0),
        ("self_attn.o_proj", "attn_output", (hidden, queries), 0),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), 0),
        ("mlp.up_proj", "ffn_up", (inner, hidden), 0),
        ("mlp.down_proj", "ffn_down", (hidden, inner), 0),
    ]
    yield _Expected("input_layernorm.weight", "attn_norm.weight", (hidden,))
    for name, source, matrix, rotary_head_dim in projections:
        yield _Expected(f"{name}.weight", f"{source}.weight", matrix, rotary_head_dim)
        if _has_bias(shape, source):
            yield _Expected(f"{name}.bias", f"{source}.bias", matrix[:1], rotary_head_dim)
    if shape.architecture in ("qwen3", "gemma3"):
        yield _Expected("self_attn.q_norm.weight", "attn_q_norm.weight", (head_dim,))
        yield _Expected("self_attn.k_norm.weight", "attn_k_norm.weight", (head_dim,))
    if not shape.is_gemma:
        yield _Expected("post_attention_layernorm.weight", "ffn_norm.weight", (hidden,))
        return
    for name, source in (
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ):
        yield _Expected(f"{name}.weight", f"{source}.weight", (hidden,))


def _has_bias(shape: ModelShape, source: str) -> bool:
    if source.startswith("ffn"):
        return shape.mlp_bias and shape.architecture == "llama"
    if shape.architecture == "qwen2":  # always on q, k and v, never on the output
        return source != "attn_output"
    return shape.attention_bias


def converted_parts(file: GgufFile, weight: Weight, dtype: str) -> Iterator[np.ndarray]:
    """The values of a weight in `dtype`, in row order, in parts of bounded size. bfloat16 comes as
    its bits (uint16)."""
    tensor = weight.source
    unit = max(weight.rotary_head_dim, 1)  # a head is converted as a whole
    row_step = max(_VALUES_PER_PART // (tensor.shape[-1] * unit), 1) * unit
    for begin in range(0, tensor.row_count, row_step):
        values = _read_values(file, tensor, begin, min(begin + row_step, tensor.row_count))
        if weight.value_offset:
            values = values + np.float32(weight.value_offset)
        if weight.rotary_head_dim:
            values = split_rotary_halves(values, weight.rotary_head_dim)
        yield _convert(file, tensor, values, dtype)


def _read_values(file: GgufFile, tensor: TensorInfo, begin: int, end: int) -> np.ndarray:
    """float32 [rows, columns]; a vector comes as one column, so that its values are rows like those
    of a matrix."""
    try:
        values = dequantize(file.rows(tensor, begin, end), tensor.type)
    except NotImplementedError:
        raise file.tensor_error(
            tensor.name, f"the gguf package cannot dequantise {tensor.type.name}"
        ) from None
    return values.reshape(-1, 1) if len(tensor.shape) == 1 else values


def split_rotary_halves(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (0, 1), (2, 3), ... to two halves: all firsts, then
    all seconds."""
    rows, columns = values.shape
    return (
        values.reshape(rows // head_dim, head_dim // 2, 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )


def _convert(file: GgufFile, tensor: TensorInfo, values: np.ndarray, dtype: str) -> np.ndarray:
    if not np.isfinite(values).all():
        raise file.tensor_error(
            tensor.name, "holds a value that is not finite; the file is damaged"
        )
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):
        converted = values.astype(np.float16) if dtype == "float16" else _bfloat16_bits(values)
    infinity = 0x7C00 if dtype == "float16" else 0x7F80
    if ((converted.view(np.uint16) & 0x7FFF) == infinity).any():
        raise file.tensor_error(
            tensor.name, f"holds a value that {dtype} cannot; import it with a wider type"
        )
    return converted


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds finite float32 values to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
