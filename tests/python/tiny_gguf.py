"""Tiny GGUF files for the tests of the importer, written with the gguf package's own writer.

The weights are made in the order of the Hugging Face checkpoint and permuted here for the file, by
a plain loop, so that the importer's inverse is checked against something that shares no code with
it.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
GEMMA = ("gemma2", "gemma3")
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
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, HIDDEN)}
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if arch == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if arch in GEMMA:
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
        if arch in ("qwen3", "gemma3"):
            shapes[prefix + "self_attn.q_norm.weight"] = shapes[
                prefix + "self_attn.k_norm.weight"
            ] = (HEAD_DIM,)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, queries)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (
            INNER,
            HIDDEN,
        )
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, INNER)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


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
}
_GEMMA_PARTS = _GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, arch: str = "llama") -> str:
    *path, part, kind = name.split(".")
    layer = f"blk.{path[path.index('layers') + 1]}." if "layers" in path else ""
    return f"{layer}{(_GEMMA_PARTS if arch in GEMMA else _GGUF_PARTS)[part]}.{kind}"


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
    return blocks.reshape(value.shape[0], -1)


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
) -> None:
    """`change` is called with the writer after the metadata, to add to them. `vocabulary` adds
    another tokenizer. `other_types`: those of matrices whose names have the key in them."""
    writer = GGUFWriter(path, arch)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if arch in GEMMA:
        writer.add_sliding_window(6)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(5.0)
        writer.add_final_logit_softcapping(3.0)
    (vocabulary or add_byte_level_vocabulary)(writer, pre)
    if change:
        change(writer)
    for name, value in weights.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleave_rotary(value, HEAD_DIM)
        kind = matrix_type if value.ndim == 2 else GGMLQuantizationType.F32
        for part, other in (other_types or {}).items():
            kind = other if part in name else kind
        if arch in GEMMA and name.endswith("norm.weight"):
            value = value + np.float32(1)
        writer.add_tensor(gguf_name(name, arch), encode(value, kind), raw_dtype=kind)
    for name, value in extra_tensors:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
