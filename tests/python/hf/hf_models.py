"""Small transformers models with random weights, for the tests of quire.hf."""

from __future__ import annotations

from typing import Any

import torch
import transformers

PAD = 3

_SMALL: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=PAD,
)
_WINDOW = 12

# Name of the model: its class without "ForCausalLM" and "Config", and what is not as in _SMALL.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1)),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", dict(sliding_window=_WINDOW, query_pre_attn_scalar=16)),
    "gemma3": ("Gemma3", dict(sliding_window=_WINDOW, query_pre_attn_scalar=16)),
    "mistral": ("Mistral", dict(sliding_window=_WINDOW)),
    "phi3": ("Phi3", dict(sliding_window=_WINDOW)),
    "gpt_oss": (
        "GptOss",
        dict(sliding_window=_WINDOW, num_local_experts=2, num_experts_per_tok=1),
    ),
}


def model(name: str, seed: int = 0, **others: Any) -> Any:
    """A model that computes attention with "quire"; the same weights for the same seed."""
    kind, fields = MODELS[name]
    config_class = getattr(transformers, kind + ("TextConfig" if kind == "Gemma3" else "Config"))
    torch.manual_seed(seed)
    config = config_class(**{**_SMALL, **fields, **others})
    made = getattr(transformers, kind + "ForCausalLM")(config)
    if kind == "GptOss":  # transformers leaves these at 0, where they would be hard to tell apart
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    made.set_attn_implementation("quire")
    return made.eval()


def random_ids(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Token ids int64 [rows, columns], none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(PAD + 1, _SMALL["vocab_size"], (rows, columns), generator=generator)


def reference(made: Any) -> Any:
    """A context in which the model computes attention by transformers' own code."""
    return _Eager(made)


class _Eager:
    def __init__(self, made: Any) -> None:
        self._model = made

    def __enter__(self) -> None:
        self._model.set_attn_implementation("eager")

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("quire")
