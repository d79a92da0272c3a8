"""Which tensor of a GGUF file becomes which of a Hugging Face checkpoint, and the stream of
converted values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from gguf.quants import dequantize

from .gguf_reader import GgufFile, TensorInfo
from .model_shape import ExpertShape, LatentShape, ModelShape, StateSpaceShape
from .rope import LONG_ROPE_TENSORS, ROPE_FACTORS_TENSOR

# Values converted at a time: 16 MiB in float32, so that a model of any size is converted in little
# memory.
_VALUES_PER_PART = 4 << 20

# dtype as the caller names it -> as safetensors does.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint: some rows of the source, or all. `rotary_head_dim` > 0: rows
    are to be put back into the half-split rotary order. `value_offset` is added to each value."""

    name: str
    source: TensorInfo
    shape: tuple[int, ...]
    first_row: int = 0  # of the source
    rotary_head_dim: int = 0
    value_offset: float = 0.0
    # Not None: the rows of each head are those of its matrix in `source`, transposed, then those of
    # its matrix here.
    head_values: TensorInfo | None = None
    is_decay: bool = False  # the file has -exp(x) of each value x

    @property
    def row_count(self) -> int:
        """How many of the source: those of one expert, or all."""
        return self.shape[0] if len(self.source.shape) == 3 else self.source.row_count


def plan_weights(file: GgufFile, shape: ModelShape) -> list[Weight]:
    """All tensors of the checkpoint, in order. An absent, misshapen or left-over tensor of the file
    is an error."""
    weights = [_find(file, item) for item in _expected(shape)]
    known = {weight.source.name for weight in weights}
    if shape.architecture == "phi3":
        known.update(LONG_ROPE_TENSORS.values())
    elif shape.state_space is None:
        known.add(ROPE_FACTORS_TENSOR)
    known.update(weight.head_values.name for weight in weights if weight.head_values is not None)
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
    expert: int = 0  # which of the matrices in the source
    stored_shape: tuple[int, ...] = ()  # (): `shape`
    head_values: str = ""  # Weight.head_values, and its shape
    head_values_shape: tuple[int, ...] = ()
    is_decay: bool = False


def _find(file: GgufFile, item: _Expected) -> Weight:
    return Weight(
        item.name,
        _find_tensor(file, item.source, item.stored_shape or item.shape),
        item.shape,
        first_row=item.expert * item.shape[0],
        rotary_head_dim=item.rotary_head_dim,
        value_offset=item.value_offset,
        head_values=_find_tensor(file, item.head_values, item.head_values_shape)
        if item.head_values
        else None,
        is_decay=item.is_decay,
    )


def _find_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> TensorInfo:
    tensor = file.tensors.get(name)
    if tensor is None:
        of_one = name.replace("_exps.", ".0.")
        old = "; the file has one for each expert, as first converters wrote: convert it again"
        raise file.tensor_error(
            name, "is missing" + (old if of_one != name and of_one in file.tensors else "")
        )
    if tensor.shape != shape:
        raise file.tensor_error(
            name, f"has shape {list(tensor.shape)}, expected {list(shape)} from the metadata"
        )
    return tensor


def _expected(shape: ModelShape) -> Iterator[_Expected]:
    """Converters add to the norms of Gemma the 1 that these models add to them."""
    for item in _expected_as_stored(shape):
        is_shifted = shape.is_gemma and item.source.endswith("norm.weight")
        yield item._replace(value_offset=-1.0) if is_shifted else item


def _expected_as_stored(shape: ModelShape) -> Iterator[_Expected]:
    hidden, vocab = shape.hidden_size, shape.vocab_size
    layers, embedding, norm = "model.layers", "model.embed_tokens", "model.norm"
    if shape.state_space is not None:
        layers, embedding, norm = "backbone.layers", "backbone.embeddings", "backbone.norm_f"
    yield _Expected(f"{embedding}.weight", "token_embd.weight", (vocab, hidden))
    for layer in range(shape.layer_count):
        in_layer = (
            _expected_in_layer(shape, layer)
            if shape.state_space is None
            else _expected_state_space(shape.state_space, hidden)
        )
        for item in in_layer:
            yield item._replace(
                name=f"{layers}.{layer}.{item.name}",
                source=f"blk.{layer}.{item.source}",
                head_values=f"blk.{layer}.{item.head_values}" if item.head_values else "",
            )
    yield _Expected(f"{norm}.weight", "output_norm.weight", (hidden,))
    if not shape.tied_embeddings:
        yield _Expected("lm_head.weight", "output.weight", (vocab, hidden))


def _expected_in_layer(shape: ModelShape, layer: int) -> Iterator[_Expected]:
    hidden, head_dim = shape.hidden_size, shape.head_dim
    experts = shape.experts
    if experts is not None and layer < experts.dense_layers:
        experts = None
    yield _Expected("input_layernorm.weight", "attn_norm.weight", (hidden,))
    if shape.latent is not None:
        yield from _expected_latent(shape.latent, shape.head_count, hidden)
    for name, source, matrix, rotary_head_dim in _projections(shape, experts is None):
        yield _Expected(f"{name}.weight", f"{source}.weight", matrix, rotary_head_dim)
        if _has_bias(shape, source):
            yield _Expected(f"{name}.bias", f"{source}.bias", matrix[:1], rotary_head_dim)
    if experts is not None:
        yield from _expected_experts(shape, experts)
    if shape.architecture in ("qwen3", "qwen3moe", "gemma3"):
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


def _projections(shape: ModelShape, is_dense: bool) -> list[tuple[str, str, tuple[int, int], int]]:
    """The matrices of plain attention and of an MLP that is no mixture: name, source, shape, and
    the head size where rows are rotary pairs."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.head_count * head_dim, shape.kv_head_count * head_dim
    output = ("self_attn.o_proj", "attn_output", (hidden, queries), 0)
    down = ("mlp.down_proj", "ffn_down", (hidden, inner), 0)
    if shape.architecture == "phi3":
        return [
            ("self_attn.qkv_proj", "attn_qkv", (queries + 2 * keys, hidden), 0),
            output,
            ("mlp.gate_up_proj", "ffn_up", (2 * inner, hidden), 0),
            down,
        ]
    # Converters for the llama architecture permute the rows of q and k so that rotary pairs lie
    # side by side; those for the others keep the order of the checkpoint.
    rotary = head_dim if shape.architecture == "llama" else 0
    attention = [
        ("self_attn.q_proj", "attn_q", (queries, hidden), rotary),
        ("self_attn.k_proj", "attn_k", (keys, hidden), rotary),
        ("self_attn.v_proj", "attn_v", (keys, hidden), 0),
        output,
    ]
    if shape.latent is not None:
        attention = []
    if not is_dense:
        return attention
    return [
        *attention,
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), 0),
        ("mlp.up_proj", "ffn_up", (inner, hidden), 0),
        down,
    ]


def _expected_state_space(sizes: StateSpaceShape, hidden: int) -> Iterator[_Expected]:
    inner, channels, heads = sizes.inner_size, sizes.channels, sizes.head_count
    yield _Expected("norm.weight", "attn_norm.weight", (hidden,))
    yield _Expected("mixer.in_proj.weight", "ssm_in.weight", (inner + channels + heads, hidden))
    yield _Expected(
        "mixer.conv1d.weight",
        "ssm_conv1d.weight",
        (channels, 1, sizes.taps),
        stored_shape=(channels, sizes.taps),
    )
    yield _Expected("mixer.conv1d.bias", "ssm_conv1d.bias", (channels,))
    yield _Expected("mixer.dt_bias", "ssm_dt.bias", (heads,))
    yield _Expected("mixer.A_log", "ssm_a", (heads,), stored_shape=(heads, 1), is_decay=True)
    yield _Expected("mixer.D", "ssm_d", (heads,), stored_shape=(heads, 1))
    yield _Expected(
        "mixer.norm.weight",
        "ssm_norm.weight",
        (inner,),
        stored_shape=(sizes.group_count, inner // sizes.group_count),
    )
    yield _Expected("mixer.out_proj.weight", "ssm_out.weight", (hidden, inner))


def _expected_latent(latent: LatentShape, heads: int, hidden: int) -> Iterator[_Expected]:
    queries, values = heads * (latent.nope_dim + latent.rope_dim), heads * latent.v_dim
    rank, attention = latent.kv_rank, "self_attn"
    if latent.q_rank:
        steps = [
            ("q_a_proj", "attn_q_a", (latent.q_rank, hidden)),
            ("q_b_proj", "attn_q_b", (queries, latent.q_rank)),
        ]
        yield _Expected(
            f"{attention}.q_a_layernorm.weight", "attn_q_a_norm.weight", (latent.q_rank,)
        )
    else:
        steps = [("q_proj", "attn_q", (queries, hidden))]
    steps += [
        ("kv_a_proj_with_mqa", "attn_kv_a_mqa", (rank + latent.rope_dim, hidden)),
        ("o_proj", "attn_output", (hidden, values)),
    ]
    for name, source, matrix in steps:
        yield _Expected(f"{attention}.{name}.weight", f"{source}.weight", matrix)
    yield _Expected(f"{attention}.kv_a_layernorm.weight", "attn_kv_a_norm.weight", (rank,))
    of_heads = _Expected(
        f"{attention}.kv_b_proj.weight",
        "attn_kv_b.weight",
        (heads * (latent.nope_dim + latent.v_dim), rank),
    )
    if latent.is_split:
        of_heads = of_heads._replace(
            source="attn_k_b.weight",
            stored_shape=(heads, rank, latent.nope_dim),
            head_values="attn_v_b.weight",
            head_values_shape=(heads, latent.v_dim, rank),
        )
    yield of_heads


def _expected_experts(shape: ModelShape, experts: ExpertShape) -> Iterator[_Expected]:
    hidden, inner, shared = shape.hidden_size, experts.intermediate_size, experts.shared_size
    block = "block_sparse_moe" if shape.is_mixtral else "mlp"
    shared_name = "shared_expert" if shape.latent is None else "shared_experts"
    yield _Expected(f"{block}.gate.weight", "ffn_gate_inp.weight", (experts.count, hidden))
    if experts.has_choice_bias:
        yield _Expected(
            "mlp.gate.e_score_correction_bias", "exp_probs_b.bias", (experts.count,)
        )
    for name, name_of_mixtral, source in (
        ("gate_proj", "w1", "ffn_gate"),
        ("up_proj", "w3", "ffn_up"),
        ("down_proj", "w2", "ffn_down"),
    ):
        is_down = source == "ffn_down"
        for expert in range(experts.count):
            named = name_of_mixtral if shape.is_mixtral else name
            item = _Expected(
                f"{block}.experts.{expert}.{named}.weight",
                f"{source}_exps.weight",
                (hidden, inner) if is_down else (inner, hidden),
            )
            yield _of_all_experts(item, experts, expert, source)
        if shared:
            yield _Expected(
                f"mlp.{shared_name}.{name}.weight",
                f"{source}_shexp.weight",
                (hidden, shared) if is_down else (shared, hidden),
            )
    if experts.shared_size and shape.latent is None:
        yield _Expected(
            "mlp.shared_expert_gate.weight",
            "ffn_gate_inp_shexp.weight",
            (1, hidden),
            stored_shape=(hidden,),
        )


def _of_all_experts(
    item: _Expected, experts: ExpertShape, expert: int, source: str
) -> _Expected:
    """A matrix of one expert, in the tensor of all."""
    rows, columns = item.shape
    if not experts.is_fused or source == "ffn_down":
        return item._replace(expert=expert, stored_shape=(experts.count, rows, columns))
    return item._replace(
        source="ffn_gate_up_exps.weight",
        expert=2 * expert + (source == "ffn_up"),
        stored_shape=(experts.count, 2 * rows, columns),
    )


def _has_bias(shape: ModelShape, source: str) -> bool:
    if shape.is_mixtral:
        return False
    if source.startswith("ffn"):
        return shape.mlp_bias and shape.architecture == "llama"
    if shape.architecture in ("qwen2", "qwen2moe"):  # always on q, k and v, never on the output
        return source != "attn_output"
    return shape.attention_bias and shape.architecture != "phi3"


def converted_parts(file: GgufFile, weight: Weight, dtype: str) -> Iterator[np.ndarray]:
    """The values of a weight in `dtype`, in row order, in parts of bounded size. bfloat16 comes as
    its bits (uint16)."""
    tensor = weight.source
    if weight.head_values is not None:
        yield from _converted_heads(file, tensor, weight.head_values, dtype)
        return
    unit = max(weight.rotary_head_dim, 1)  # a head is converted as a whole
    row_step = max(_VALUES_PER_PART // (tensor.shape[-1] * unit), 1) * unit
    end = weight.first_row + weight.row_count
    for begin in range(weight.first_row, end, row_step):
        values = _read_values(file, tensor, begin, min(begin + row_step, end))
        if weight.is_decay:
            values = _logarithms_of_decays(file, tensor, values)
        if weight.value_offset:
            values = values + np.float32(weight.value_offset)
        if weight.rotary_head_dim:
            values = split_rotary_halves(values, weight.rotary_head_dim)
        yield _convert(file, tensor, values, dtype)


def _logarithms_of_decays(file: GgufFile, tensor: TensorInfo, values: np.ndarray) -> np.ndarray:
    if not (values < 0).all():
        raise file.tensor_error(
            tensor.name, "holds a rate that is not below zero; the file is damaged"
        )
    return np.log(-values.astype(np.float64)).astype(np.float32)


def _converted_heads(
    file: GgufFile, keys: TensorInfo, values: TensorInfo, dtype: str
) -> Iterator[np.ndarray]:
    for head in range(keys.shape[0]):
        for tensor in (keys, values):
            rows = tensor.shape[1]
            read = _read_values(file, tensor, head * rows, (head + 1) * rows)
            yield _convert(file, tensor, read.T if tensor is keys else read, dtype)


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
