"""From the metadata of a GGUF file of the llama or Gemma family to config.json and
generation_config.json of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gguf.quants import dequantize

from .gguf_reader import GgufFile

# general.architecture -> (class, model_type) of transformers. Mistral's GGUF files call themselves
# llama; those with a sliding window become MistralForCausalLM (see _hf_names).
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# GGUF does not have what scores are divided by: of these models, by their layers, it is the root of
# the hidden size over the heads, of all others that of the head size.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Bounds for sizes in the metadata. The sizes are compared with the tensors' shapes as well; these
# keep the products small.
_SIZE_MAX = 1 << 24
_LAYERS_MAX = 4096

# What transformers takes for Gemma 2, as llama.cpp does: its first converter did not write them.
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2_WINDOW = 4096

# Ends of a turn by their text: many converters write eos alone, which chat models do not use.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")

ROPE_FACTORS_TENSOR = "rope_freqs.weight"
# The Llama 3.1 to 3.3 models all have these; GGUF keeps only the factors that follow from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What the tensors' shapes follow from."""

    architecture: str  # as GGUF names it
    layer_count: int
    hidden_size: int
    intermediate_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def is_gemma(self) -> bool:
        return self.architecture in _GEMMA_27B_LAYERS


def read_shape(file: GgufFile) -> ModelShape:
    metadata = file.metadata
    parts = metadata.integer("split.count", 0, 1 << 16, default=1)
    if parts > 1:
        part = metadata.integer("split.no", 0, 1 << 16, default=0) + 1
        raise metadata.error(
            "split.count",
            f"the file is part {part} of {parts} of a model; join them with: "
            "llama-gguf-split --merge FIRST_PART.gguf WHOLE.gguf",
        )
    arch = metadata.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise metadata.error(
            "general.architecture", f'"{arch}" is not one of {", ".join(_ARCHITECTURES)}'
        )
    if metadata.integer(f"{arch}.expert_count", 0, _SIZE_MAX, default=0):
        raise metadata.error(f"{arch}.expert_count", "mixtures of experts are not imported")
    hidden_size = metadata.integer(f"{arch}.embedding_length", 1, _SIZE_MAX)
    head_count = metadata.integer(f"{arch}.attention.head_count", 1, hidden_size)
    return ModelShape(
        architecture=arch,
        layer_count=metadata.integer(f"{arch}.block_count", 1, _LAYERS_MAX),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(f"{arch}.feed_forward_length", 1, _SIZE_MAX),
        head_count=head_count,
        kv_head_count=_kv_head_count(file, arch, head_count),
        head_dim=_head_dim(file, arch, hidden_size // head_count),
        vocab_size=_vocab_size(file),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


def _kv_head_count(file: GgufFile, arch: str, head_count: int) -> int:
    key = f"{arch}.attention.head_count_kv"
    count = file.metadata.integer(key, 1, head_count, default=head_count)
    if head_count % count:
        raise file.metadata.error(key, f"{count} does not divide the {head_count} heads")
    return count


def _head_dim(file: GgufFile, arch: str, default: int) -> int:
    key = f"{arch}.attention.key_length"
    head_dim = file.metadata.integer(key, 2, _SIZE_MAX, default=default)
    if head_dim % 2:
        raise file.metadata.error(key, f"{head_dim} is odd; rotary positions need pairs")
    for other in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if file.metadata.integer(other, 1, _SIZE_MAX, default=head_dim) != head_dim:
            raise file.metadata.error(
                other, f"differs from the head size {head_dim}; only equal sizes are imported"
            )
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.tensor_error("token_embd.weight", "is missing")
    return embedding.shape[0]


def build_config(file: GgufFile, shape: ModelShape, dtype: str) -> dict[str, Any]:
    """config.json, with the field names that both old and new releases of transformers read."""
    metadata, arch = file.metadata, shape.architecture
    hf_class, model_type = _ARCHITECTURES[arch]
    config: dict[str, Any] = {
        "architectures": [hf_class],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layer_count,
        "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count,
        "head_dim": shape.head_dim,
        "max_position_embeddings": metadata.integer(f"{arch}.context_length", 1, 1 << 31),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", default=10000.0),
        "rope_scaling": _rope_scaling(file, shape),
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        **_token_ids(file, shape.vocab_size),
    }
    if shape.is_gemma:
        _apply_gemma(file, shape, config)
    if arch in ("llama", "qwen3"):
        config["attention_bias"] = shape.attention_bias
    if arch == "llama":
        config["mlp_bias"] = shape.mlp_bias
        _apply_sliding_window(file, config)
    return config


def _apply_gemma(file: GgufFile, shape: ModelShape, config: dict[str, Any]) -> None:
    metadata, arch = file.metadata, shape.architecture
    del config["hidden_act"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    is_27b = shape.layer_count == _GEMMA_27B_LAYERS[arch]
    config["query_pre_attn_scalar"] = (
        shape.hidden_size // shape.head_count if is_27b else shape.head_dim
    )
    config["sliding_window"] = metadata.integer(
        f"{arch}.attention.sliding_window",
        1,
        1 << 31,
        default=_GEMMA2_WINDOW if arch == "gemma2" else None,
    )
    if arch == "gemma3":
        config["rope_local_base_freq"] = metadata.number(
            "gemma3.rope.freq_base_swa", default=10000.0
        )
        return
    for cap, default in _GEMMA2_CAPS.items():
        config[cap] = metadata.number(f"gemma2.{cap}", default=default)


def build_generation_config(file: GgufFile, shape: ModelShape) -> dict[str, Any]:
    return {"_from_model_config": True, **_token_ids(file, shape.vocab_size)}


def _apply_sliding_window(file: GgufFile, config: dict[str, Any]) -> None:
    window = file.metadata.integer("llama.attention.sliding_window", 0, 1 << 31, default=0)
    if not window:
        return
    config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)
    for key in ("attention_bias", "mlp_bias"):
        if config.pop(key):
            raise file.metadata.error(
                "llama.attention.sliding_window", "does not go together with biases"
            )


def _token_ids(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """bos, eos and pad. A chat model ends its turn with eot or eom, or a token with the text of
    one, so all of these are ends of a sequence."""

    def read(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in file.metadata:
            return None
        return file.metadata.integer(key, 0, vocab_size - 1)

    found = [read(name) for name in ("eos", "eot", "eom")]
    tokens = file.metadata.texts("tokenizer.ggml.tokens")
    found += [tokens.index(text) for text in _TURN_ENDS if text in tokens]
    ends = list(dict.fromkeys(index for index in found if index is not None))
    ids = {
        "bos_token_id": read("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": read("padding"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _rope_scaling(file: GgufFile, shape: ModelShape) -> dict[str, Any] | None:
    metadata, prefix = file.metadata, f"{shape.architecture}.rope.scaling"
    factor = f"{prefix}.factor"
    if factor not in metadata and f"{shape.architecture}.rope.scale_linear" in metadata:
        factor = f"{shape.architecture}.rope.scale_linear"  # its name in the first files
    # Files that name no type mean linear scaling with their factor.
    has_factor = factor in metadata and metadata.number(factor) != 1
    kind = metadata.text(f"{prefix}.type", default="linear" if has_factor else "none")
    if ROPE_FACTORS_TENSOR in file.tensors:
        if kind != "none":
            raise metadata.error(
                f"{prefix}.type", f'"{kind}" beside the tensor "{ROPE_FACTORS_TENSOR}"'
            )
        return _llama3_scaling(file, shape)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(factor)}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise metadata.error(f"{prefix}.type", f'"{kind}" is not one of none, linear, yarn')
    scaling["original_max_position_embeddings"] = metadata.integer(
        f"{prefix}.original_context_length", 1, 1 << 31
    )
    for theirs, ours in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"{prefix}.{theirs}" in metadata:
            scaling[ours] = metadata.number(f"{prefix}.{theirs}")
    return scaling


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """By what each frequency is divided under Llama 3's rope scaling: 1 for short waves, `factor`
    for long ones."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    waves_per_context = _LLAMA3_CONTEXT * frequencies / (2 * np.pi)
    smooth = np.clip((waves_per_context - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GgufFile, shape: ModelShape) -> dict[str, Any]:
    """Recovers the parameters from the factors and proves them: they must give the same factors
    again."""
    tensor = file.tensors[ROPE_FACTORS_TENSOR]
    if tensor.shape != (shape.head_dim // 2,):
        raise file.tensor_error(
            tensor.name, f"has shape {list(tensor.shape)}, expected {[shape.head_dim // 2]}"
        )
    factors = dequantize(file.rows(tensor, 0, 1), tensor.type).ravel().astype(np.float64)
    factor = float(factors[-1])  # the longest wave
    theta = file.metadata.number(f"{shape.architecture}.rope.freq_base", default=10000.0)
    # 1e-3: the factors were computed in float32.
    if not factor >= 1 or not np.allclose(
        factors, llama3_factors(shape.head_dim, theta, factor), rtol=1e-3
    ):
        raise file.tensor_error(
            tensor.name,
            "its factors are not those of Llama 3 (low 1, high 4, context 8192), which "
            "is the only such scaling that config.json can express",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
