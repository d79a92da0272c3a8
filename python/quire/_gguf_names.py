"""The architectures that are quantised, and what GGUF calls the tensors of their checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["ARCHITECTURES", "Architecture", "GgufName", "gguf_name"]

_MODEL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_MLP = {
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_LLAMA = _MODEL | _ATTENTION | _MLP
_GEMMA = _LLAMA | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3 = _LLAMA | {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up"}
_SPARSE = _LLAMA | {"gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp"}
_LATENT = _SPARSE | {
    "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm",
    "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
}
_HYBRID = _SPARSE | {
    "post_attention_layernorm": "post_attention_norm",
    "in_proj_qkvz": "ssm_in",
    "in_proj_ba": "ssm_ba",
    "conv1d": "ssm_conv1d",
    "out_proj": "ssm_out",
}
# The last two parts of names that follow no rule, and GGUF's names.
_RECURRENT = {
    ("norm", "weight"): "ssm_norm.weight",
    ("linear_attn", "A_log"): "ssm_a",
    ("linear_attn", "dt_bias"): "ssm_dt.bias",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_EXPERTS_OF_MIXTRAL = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
# The MLP of all tokens beside experts.
_SHARED = ("shared_expert", "shared_experts")
_CHOICE_BIAS = ("gate", "e_score_correction_bias")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """`gguf`: its name there. `parts`: the last part of a tensor's name before .weight or .bias ->
    GGUF's; `experts`: the same of one of many experts. `text_config`: the field of config.json with
    the text model's own, where the checkpoint has a model of images beside it."""

    gguf: str
    parts: Mapping[str, str]
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    text_config: str = ""

    @property
    def is_gemma(self) -> bool:
        return self.gguf.startswith("gemma")

    @property
    def is_hybrid(self) -> bool:
        return self.gguf == "qwen3next"


# The name in config.json -> what it is.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _LLAMA),
    "MistralForCausalLM": Architecture("llama", _LLAMA),
    "MixtralForCausalLM": Architecture("llama", _SPARSE, _EXPERTS_OF_MIXTRAL),
    "Qwen2ForCausalLM": Architecture("qwen2", _LLAMA),
    "Qwen3ForCausalLM": Architecture("qwen3", _LLAMA),
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", _SPARSE, _EXPERTS),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", _SPARSE, _EXPERTS),
    "Qwen3NextForCausalLM": Architecture("qwen3next", _HYBRID, _EXPERTS),
    "DeepseekV2ForCausalLM": Architecture("deepseek2", _LATENT, _EXPERTS),
    "DeepseekV3ForCausalLM": Architecture("deepseek2", _LATENT, _EXPERTS),
    "Gemma2ForCausalLM": Architecture("gemma2", _GEMMA),
    "Gemma3ForCausalLM": Architecture("gemma3", _GEMMA),
    "Gemma3ForConditionalGeneration": Architecture("gemma3", _GEMMA, text_config="text_config"),
    "Phi3ForCausalLM": Architecture("phi3", _PHI3),
}


@dataclasses.dataclass(frozen=True)
class GgufName:
    """`part`: of the checkpoint's name. `expert`: -1 for a tensor of none."""

    name: str
    part: str
    expert: int = -1


def gguf_name(name: str, architecture: Architecture) -> GgufName | None:
    """None: no tensor of such a decoder."""
    *path, part, kind = ["", *name.split(".")]
    layer = _number_behind("layers", path)
    expert = _number_behind("experts", path)
    if layer is None or expert is None:
        return None
    prefix = f"blk.{layer}." if layer >= 0 else ""
    if (part, kind) == _CHOICE_BIAS and part in architecture.parts:
        return GgufName(f"{prefix}exp_probs_b.bias", part)
    if architecture.is_hybrid and "linear_attn" in name.split(".") and (part, kind) in _RECURRENT:
        gguf = _RECURRENT[part, kind]
        return GgufName(prefix + gguf, gguf.partition(".")[0])
    known = architecture.parts if expert < 0 else architecture.experts
    if part not in known or (expert >= 0 and kind != "weight"):
        return None
    suffix = "_shexp" if any(shared in path for shared in _SHARED) else ""
    return GgufName(f"{prefix}{known[part]}{suffix}.{kind}", part, expert)


def _number_behind(word: str, path: list[str]) -> int | None:
    """-1: the word is not in the path; None: no number follows."""
    if word not in path:
        return -1
    text = "".join(path[path.index(word) + 1 :][:1])
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if is_number and text == str(int(text)) else None
