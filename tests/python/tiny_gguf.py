"""Tiny GGUF files for the tests of the importer, written with the gguf package's own writer.

The weights are made in the order of the Hugging Face checkpoint and permuted here for the file, by
a plain loop, so that the importer's inverse is checked against something that shares no code with
it.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, ExpertGatingFuncType

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
GEMMA = ("gemma2", "gemma3")
EXPERTS, EXPERT_INNER, SHARED_INNER = 4, 32, 64
OF_EXPERTS = ("mixtral", "qwen2moe", "qwen3moe")
# Both call themselves deepseek2 in files: DeepSeek-V2 as first converters wrote it, and V3, whose
# matrices of latents are stored apart.
DEEPSEEK = ("deepseek2", "deepseek3")
MAMBA_HEADS, MAMBA_HEAD_DIM, STATE_SIZE, GROUPS, TAPS = 8, 16, 16, 2, 4
Q_RANK, KV_RANK, NOPE_DIM, ROPE_DIM, V_DIM, DENSE_LAYERS = 32, 64, 32, 16, 32, 1
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    merges = ["Ġ t", "h e", "Ġt he", "i n", "e r", "1 2", "Ċ Ċ", "a b", "ab c"]
    tokens = SPECIAL_TOKENS + byte_symbols() + [merge.replace(" ", "") for merge in merges]
    return tokens, merges


def interleave_rotary(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a head from halves to pairs, as the converters of llama.cpp's files store q and k."""
    out = np.empty_like(matrix)
    half = head_dim // 2
    for head in range(matrix.shape[0] // head_dim):
        for pair in range(half):
            for second in (0, 1):
                out[head * head_dim + 2 * pair + second] = matrix[
                    head * head_dim + second * half + pair
                ]
    return out


def random_weights(
    seed: int, vocab_size: int, arch: str = "llama", tied: bool = True
) -> dict[str, np.ndarray]:
    """A checkpoint by its Hugging Face names, float32, values of about one."""
    random = np.random.default_rng(seed)
    if arch == "mamba2":
        shapes = _mamba2_shapes(vocab_size)
        if not tied:
            shapes["lm_head.weight"] = (vocab_size, HIDDEN)
        return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN)}
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        projections = {"q": queries, "k": keys, "v": keys}
        if arch in DEEPSEEK:
            projections = {}
            for name, shape in _latent_shapes(arch).items():
                shapes[f"{prefix}self_attn.{name}.weight"] = shape
        if arch == "phi3":
            projections = {"qkv": queries + 2 * keys}
        for name, rows in projections.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if arch in ("qwen2", "qwen2moe"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if arch in GEMMA:
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
        if arch in ("qwen3", "qwen3moe", "gemma3"):
            shapes[prefix + "self_attn.q_norm.weight"] = shapes[
                prefix + "self_attn.k_norm.weight"
            ] = (HEAD_DIM,)
        if arch not in DEEPSEEK:
            shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, queries)
        is_sparse = arch in OF_EXPERTS or (arch in DEEPSEEK and layer >= DENSE_LAYERS)
        for name, shape in _mlp_shapes(arch, is_sparse).items():
            block = "block_sparse_moe" if arch == "mixtral" else "mlp"
            shapes[f"{prefix}{block}.{name}.weight"] = shape
        if arch == "deepseek3" and is_sparse:
            shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _mamba2_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    inner = MAMBA_HEADS * MAMBA_HEAD_DIM
    channels = inner + 2 * GROUPS * STATE_SIZE
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (vocab_size, HIDDEN)}
    in_layer = {
        "norm.weight": (HIDDEN,),
        "mixer.in_proj.weight": (inner + channels + MAMBA_HEADS, HIDDEN),
        "mixer.conv1d.weight": (channels, 1, TAPS),
        "mixer.conv1d.bias": (channels,),
        "mixer.dt_bias": (MAMBA_HEADS,),
        "mixer.A_log": (MAMBA_HEADS,),
        "mixer.D": (MAMBA_HEADS,),
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (HIDDEN, inner),
    }
    for layer in range(LAYERS):
        shapes |= {f"backbone.layers.{layer}.{name}": shape for name, shape in in_layer.items()}
    shapes["backbone.norm_f.weight"] = (HIDDEN,)
    return shapes


_MAMBA2_NAMES = {
    "backbone.embeddings.": "token_embd.",
    "backbone.norm_f.": "output_norm.",
    "lm_head.": "output.",
    "backbone.layers.": "blk.",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    ".norm.": ".attn_norm.",
}


def _stored_mamba2(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    stored = {}
    for name, value in weights.items():
        if name.endswith("A_log"):
            value = -np.exp(value)
        if name.endswith(("A_log", ".D")):
            value = value[:, None]
        if name.endswith("conv1d.weight"):
            value = value[:, 0]
        if name.endswith("mixer.norm.weight"):
            value = value.reshape(GROUPS, -1)
        for ours, theirs in _MAMBA2_NAMES.items():
            name = name.replace(ours, theirs)
        stored[name] = value
    return stored


def _add_mamba2(writer: GGUFWriter) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_inner_size(MAMBA_HEADS * MAMBA_HEAD_DIM)
    writer.add_ssm_state_size(STATE_SIZE)
    writer.add_ssm_time_step_rank(MAMBA_HEADS)
    writer.add_ssm_group_count(GROUPS)


def _latent_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    queries = HEADS * (NOPE_DIM + ROPE_DIM)
    first: dict[str, tuple[int, ...]] = {"q_proj": (queries, HIDDEN)}
    if arch == "deepseek3":
        first = {
            "q_a_proj": (Q_RANK, HIDDEN),
            "q_a_layernorm": (Q_RANK,),
            "q_b_proj": (queries, Q_RANK),
        }
    return first | {
        "kv_a_proj_with_mqa": (KV_RANK + ROPE_DIM, HIDDEN),
        "kv_a_layernorm": (KV_RANK,),
        "kv_b_proj": (HEADS * (NOPE_DIM + V_DIM), KV_RANK),
        "o_proj": (HIDDEN, HEADS * V_DIM),
    }


def _mlp_shapes(arch: str, is_sparse: bool) -> dict[str, tuple[int, ...]]:
    def plain(inner: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
        wide, narrow = (inner, HIDDEN), (HIDDEN, inner)
        shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
        return {prefix + name: shape for name, shape in shapes.items()}

    if arch == "phi3":
        return {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    if not is_sparse:
        return plain(INNER)
    shapes: dict[str, tuple[int, ...]] = {"gate": (EXPERTS, HIDDEN)}
    if arch == "mixtral":
        named = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
        for expert in range(EXPERTS):
            shapes |= {f"experts.{expert}.{name}": shape for name, shape in named.items()}
        return shapes
    for expert in range(EXPERTS):
        shapes |= plain(EXPERT_INNER, f"experts.{expert}.")
    if arch in DEEPSEEK:
        shapes |= plain(2 * EXPERT_INNER, "shared_experts.")
    if arch == "qwen2moe":
        shapes |= plain(SHARED_INNER, "shared_expert.") | {"shared_expert_gate": (1, HIDDEN)}
    return shapes


_GGUF_PARTS = {
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
    "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm",
    "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
    "k_b_proj": "attn_k_b",
    "v_b_proj": "attn_v_b",
    "w1": "ffn_gate",
    "w2": "ffn_down",
    "w3": "ffn_up",
    "qkv_proj": "attn_qkv",
    "gate_up_proj": "ffn_up",
    "gate": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
}
_GEMMA_PARTS = _GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, arch: str = "llama") -> str:
    *path, part, kind = name.split(".")
    layer = f"blk.{path[path.index('layers') + 1]}." if "layers" in path else ""
    if kind == "e_score_correction_bias":
        return f"{layer}exp_probs_b.bias"
    group = {"experts": "_exps", "shared_expert": "_shexp", "shared_experts": "_shexp"}
    suffix = next((group[name] for name in path if name in group), "")
    return f"{layer}{(_GEMMA_PARTS if arch in GEMMA else _GGUF_PARTS)[part]}{suffix}.{kind}"


def stored_weights(
    weights: dict[str, np.ndarray], arch: str, fused: bool = False
) -> dict[str, np.ndarray]:
    """By the names and in the shapes of the file: those of all experts are one, a gate with one
    output is a vector. `fused`: gate and up of experts are one, as the latest converters write."""
    if fused:
        return _with_fused_experts(stored_weights(weights, arch))
    if arch == "mamba2":
        return _stored_mamba2(weights)
    stored: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        if arch in ("llama", "mixtral") and ("q_proj" in name or "k_proj" in name):
            value = interleave_rotary(value, HEAD_DIM)
        if arch in GEMMA and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        named = gguf_name(name, arch)
        if arch == "deepseek3" and "kv_b_proj" in name:
            heads = value.reshape(HEADS, NOPE_DIM + V_DIM, KV_RANK)
            keys, values = heads[:, :NOPE_DIM], heads[:, NOPE_DIM:]
            stored[named.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            stored[named.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
            continue
        if ".experts." in name:
            value = np.concatenate([stored.get(named, value[None][:0]), value[None]])
        stored[named] = value
    return stored


def _with_fused_experts(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    fused = dict(stored)
    for name, gates in stored.items():
        if name.endswith("ffn_gate_exps.weight"):
            ups = fused.pop(name.replace("gate", "up"))
            del fused[name]
            fused[name.replace("gate", "gate_up")] = np.concatenate([gates, ups], axis=1)
    return fused


# Kinds that the gguf package reads and cannot write: where a block has float16 scales, and what
# codes and scales of a group multiply them by at most.
_READ_ONLY = {
    "IQ4_NL": [(0, 127)],
    "IQ4_XS": [(0, 32 * 127)],
    "Q2_K": [(80, 15 * 3), (82, 15)],
    "Q3_K": [(108, 32 * 4)],
    "Q4_K": [(0, 63 * 15), (2, 63)],
    "Q5_K": [(0, 63 * 31), (2, 63)],
    "Q6_K": [(208, 128 * 32)],
}


# What converters leave in float32.
_SMALL_PARTS = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")


def encode(value: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The rows as stored. Of a kind that cannot be written: random blocks, their weights not larger
    than those of `value` (twice that in kinds with a summand)."""
    if kind.name not in _READ_ONLY:
        return quants.quantize(value, kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(value.size)
    blocks = random.integers(0, 256, (value.size // block, block_bytes), dtype=np.uint8)
    for place, factor in _READ_ONLY[kind.name]:
        scale = np.abs(value).max() / factor * random.uniform(-1, 1, len(blocks))
        blocks[:, place : place + 2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*value.shape[:-1], -1)


def write_model(
    path,
    weights: dict[str, np.ndarray],
    arch: str = "llama",
    pre: str = "smollm",
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    change=None,
    extra_tensors=(),
    vocabulary=None,
    other_types=None,
    fused=False,
) -> None:
    """`change` is called with the writer after the metadata, to add to them. `vocabulary` adds
    another tokenizer. `other_types`: those of matrices, by the last part of their names. `fused`:
    see stored_weights."""
    named = {"deepseek3": "deepseek2", "mixtral": "llama"}
    writer = GGUFWriter(path, named.get(arch, arch))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    if arch == "mamba2":
        _add_mamba2(writer)
    else:
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_rope_freq_base(10000.0)
    if arch in DEEPSEEK:
        _add_deepseek(writer, arch)
    elif arch != "mamba2":
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch in GEMMA:
        writer.add_sliding_window(6)
    if arch in OF_EXPERTS or arch in DEEPSEEK:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        if arch != "mixtral":
            writer.add_expert_feed_forward_length(EXPERT_INNER)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(SHARED_INNER)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(5.0)
        writer.add_final_logit_softcapping(3.0)
    (vocabulary or add_byte_level_vocabulary)(writer, pre)
    if change:
        change(writer)
    others = {gguf_name(f"{part}.weight"): kind for part, kind in (other_types or {}).items()}
    for name, value in stored_weights(weights, arch, fused).items():
        is_matrix = value.ndim > 1 and not any(part in name for part in _SMALL_PARTS)
        kind = matrix_type if is_matrix else GGMLQuantizationType.F32
        for other, other_kind in others.items():
            kind = other_kind if is_matrix and name.endswith(other) else kind
        writer.add_tensor(name, encode(value, kind), raw_dtype=kind)
    for name, value in extra_tensors:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_deepseek(writer: GGUFWriter, arch: str) -> None:
    writer.add_kv_lora_rank(KV_RANK)
    writer.add_rope_dimension_count(ROPE_DIM)
    writer.add_leading_dense_block_count(DENSE_LAYERS)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.5)
    if arch == "deepseek2":
        writer.add_head_count_kv(HEADS)
        writer.add_key_length(NOPE_DIM + ROPE_DIM)
        writer.add_value_length(V_DIM)
        return
    writer.add_head_count_kv(1)
    writer.add_key_length(KV_RANK + ROPE_DIM)
    writer.add_value_length(KV_RANK)
    writer.add_key_length_mla(NOPE_DIM + ROPE_DIM)
    writer.add_value_length_mla(V_DIM)
    writer.add_q_lora_rank(Q_RANK)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)


def add_byte_level_vocabulary(writer: GGUFWriter, pre: str) -> None:
    tokens, merges = byte_level_vocabulary()
    special = len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * special + [1] * (len(tokens) - special))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def vocab_size() -> int:
    return len(byte_level_vocabulary()[0])
