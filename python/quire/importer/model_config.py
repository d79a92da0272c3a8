"""From the metadata of a GGUF file to config.json and generation_config.json of a Hugging Face
folder."""

from __future__ import annotations

from typing import Any

from .gguf_reader import GgufFile
from .model_shape import (
    ARCHITECTURES,
    DEEPSEEK,
    MIXTRAL,
    SIGMOID,
    ExpertShape,
    LatentShape,
    ModelShape,
    StateSpaceShape,
    scoring,
)
from .rope import rope_scaling

# GGUF does not have what scores are divided by: of these models, by their layers, it is the root of
# the hidden size over the heads, of all others that of the head size.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

# What transformers takes for Gemma 2, as llama.cpp does: its first converter did not write them.
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2_WINDOW = 4096

# Ends of a turn by their text: many converters write eos alone, which chat models do not use.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_PHI3_TURN_END = "<|end|>"


def build_config(file: GgufFile, shape: ModelShape, dtype: str) -> dict[str, Any]:
    """config.json, with the field names that both old and new releases of transformers read."""
    if shape.state_space is not None:
        return _state_space_config(file, shape, shape.state_space, dtype)
    metadata, arch = file.metadata, shape.architecture
    hf_class, model_type = ARCHITECTURES[arch]
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
        "rope_scaling": rope_scaling(file, shape),
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        **_token_ids(file, shape.vocab_size),
    }
    if shape.is_gemma:
        _apply_gemma(file, shape, config)
    if shape.latent is not None:
        assert shape.experts is not None
        _apply_deepseek(file, shape.latent, shape.experts, config)
    elif shape.is_mixtral:
        assert shape.experts is not None
        _apply_mixtral(file, shape.experts, config)
    elif shape.experts is not None:
        _apply_experts(file, arch, shape.experts, config)
    if arch == "phi3":
        _apply_phi3(file, shape, config)
    if arch in ("llama", "qwen3", "qwen3moe") and not shape.is_mixtral:
        config["attention_bias"] = shape.attention_bias
    if arch == "llama" and not shape.is_mixtral:
        config["mlp_bias"] = shape.mlp_bias
        _apply_sliding_window(file, config)
    return config


def _state_space_config(
    file: GgufFile, shape: ModelShape, sizes: StateSpaceShape, dtype: str
) -> dict[str, Any]:
    hf_class, model_type = ARCHITECTURES["mamba2"]
    return {
        "architectures": [hf_class],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layer_count,
        "num_heads": sizes.head_count,
        "head_dim": sizes.head_dim,
        "state_size": sizes.state_size,
        "n_groups": sizes.group_count,
        "expand": sizes.inner_size // shape.hidden_size,
        "conv_kernel": sizes.taps,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": file.metadata.number("mamba2.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rms_norm": True,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        **_token_ids(file, shape.vocab_size),
    }


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


def _apply_mixtral(file: GgufFile, experts: ExpertShape, config: dict[str, Any]) -> None:
    hf_class, model_type = MIXTRAL
    window = file.metadata.integer("llama.attention.sliding_window", 0, 1 << 31, default=0)
    config.update(
        architectures=[hf_class],
        model_type=model_type,
        intermediate_size=experts.intermediate_size,
        num_local_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        sliding_window=window or None,
    )


def _apply_experts(
    file: GgufFile, arch: str, experts: ExpertShape, config: dict[str, Any]
) -> None:
    config.update(
        num_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        moe_intermediate_size=experts.intermediate_size,
        # Files do not say it: all models of the one kind do it, none of the other.
        norm_topk_prob=file.metadata.boolean(
            f"{arch}.expert_weights_norm", default=arch == "qwen3moe"
        ),
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    if experts.shared_size:
        config["shared_expert_intermediate_size"] = experts.shared_size


def _apply_deepseek(
    file: GgufFile, latent: LatentShape, experts: ExpertShape, config: dict[str, Any]
) -> None:
    metadata = file.metadata
    scored_by = scoring(file)
    hf_class, model_type = DEEPSEEK[scored_by]
    groups = metadata.integer("deepseek2.expert_group_count", 1, experts.count, default=1)
    if experts.count % groups:
        raise metadata.error(
            "deepseek2.expert_group_count", f"{groups} does not divide {experts.count} experts"
        )
    del config["head_dim"]  # that of the part that is rotated, in each release otherwise
    config.update(
        architectures=[hf_class],
        model_type=model_type,
        attention_bias=False,
        q_lora_rank=latent.q_rank or None,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.v_dim,
        rope_interleave=True,
        first_k_dense_replace=experts.dense_layers,
        moe_layer_freq=1,
        n_routed_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        moe_intermediate_size=experts.intermediate_size,
        n_shared_experts=experts.shared_size // experts.intermediate_size or None,
        n_group=groups,
        topk_group=metadata.integer("deepseek2.expert_group_used_count", 1, groups, default=groups),
        routed_scaling_factor=metadata.number("deepseek2.expert_weights_scale", default=1.0),
        norm_topk_prob=metadata.boolean("deepseek2.expert_weights_norm", default=False),
        scoring_func="sigmoid" if scored_by == SIGMOID else "softmax",
        topk_method=_choice(scored_by, groups),
    )


def _choice(scored_by: int, groups: int) -> str:
    if scored_by == SIGMOID:
        return "noaux_tc"
    return "group_limited_greedy" if groups > 1 else "greedy"


def _apply_phi3(file: GgufFile, shape: ModelShape, config: dict[str, Any]) -> None:
    window = file.metadata.integer("phi3.attention.sliding_window", 0, 1 << 31, default=0)
    config["sliding_window"] = window or None
    config.setdefault("pad_token_id", None)  # absent, it is one of the first vocabulary
    if shape.rotary_dim != shape.head_dim:
        config["partial_rotary_factor"] = shape.rotary_dim / shape.head_dim
    if config["rope_scaling"]:
        config["original_max_position_embeddings"] = file.metadata.integer(
            "phi3.rope.scaling.original_context_length", 1, 1 << 31
        )


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
    is_phi3 = file.metadata.text("general.architecture") == "phi3"
    turn_ends = (*_TURN_ENDS, _PHI3_TURN_END) if is_phi3 else _TURN_ENDS
    found += [tokens.index(text) for text in turn_ends if text in tokens]
    ends = list(dict.fromkeys(index for index in found if index is not None))
    ids = {
        "bos_token_id": read("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": read("padding"),
    }
    return {key: value for key, value in ids.items() if value is not None}
