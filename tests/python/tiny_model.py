"""A small llama with random weights as a Hugging Face folder, and its logits in plain NumPy
float64. No torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = "<|im_end|>"
_STORED_TYPES = {
    "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int8": "I8",
    "uint8": "U8"
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", EOS]
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "A quire is a stack of folded pages; sixteen pages make a quire.",
    "Größe, naïve café, 你好世界, 🙂🙃 and 1234567890.",
]


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int = 48
    intermediate: int = 80
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    positions: int = 256
    theta: float = 10000.0
    eps: float = 1e-5


def train_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer


class TinyModel:
    """The folder and the weights that are in it."""

    def __init__(
        self, directory: Path, shape: Shape = Shape(), *, seed: int = 1, chat: bool = True
    ) -> None:
        self.directory = directory
        self.shape = shape
        self.tokenizer = train_tokenizer()
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.eos = self.tokenizer.token_to_id(EOS)
        self.weights = _random_weights(shape, self.vocab_size, np.random.default_rng(seed))
        directory.mkdir(parents=True, exist_ok=True)
        self._write(chat)

    def _write(self, chat: bool) -> None:
        shape = self.shape
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.positions,
            "rms_norm_eps": shape.eps,
            "rope_theta": shape.theta,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "bos_token_id": 0,
            "eos_token_id": self.eos,
            "torch_dtype": "float32",
        }
        tokenizer_config = {"bos_token": "<|endoftext|>", "eos_token": {"content": EOS}}
        if chat:
            tokenizer_config["chat_template"] = CHAT_TEMPLATE
        (self.directory / "config.json").write_text(json.dumps(config))
        (self.directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        self.tokenizer.save(str(self.directory / "tokenizer.json"))
        write_safetensors(self.directory / "model.safetensors", self.weights)

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [n, vocab_size]."""
        shape, w = (
            self.shape,
            {name: value.astype(np.float64) for name, value in self.weights.items()},
        )
        x = w["model.embed_tokens.weight"][ids]
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            y = _rms_norm(x, w[prefix + "input_layernorm.weight"], shape.eps)
            q = (y @ w[prefix + "self_attn.q_proj.weight"].T).reshape(
                len(ids), shape.heads, shape.head_dim
            )
            k = (y @ w[prefix + "self_attn.k_proj.weight"].T).reshape(
                len(ids), shape.kv_heads, shape.head_dim
            )
            v = (y @ w[prefix + "self_attn.v_proj.weight"].T).reshape(
                len(ids), shape.kv_heads, shape.head_dim
            )
            positions = np.arange(len(ids))
            o = attention(rotate(q, positions, shape.theta), rotate(k, positions, shape.theta), v)
            x = x + o.reshape(len(ids), -1) @ w[prefix + "self_attn.o_proj.weight"].T
            y = _rms_norm(x, w[prefix + "post_attention_layernorm.weight"], shape.eps)
            gate = y @ w[prefix + "mlp.gate_proj.weight"].T
            up = y @ w[prefix + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[prefix + "mlp.down_proj.weight"].T
        return _rms_norm(x, w["model.norm.weight"], shape.eps) @ w["lm_head.weight"].T


def _random_weights(
    shape: Shape, vocab_size: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape.hidden)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, shape.hidden, np.sqrt(shape.hidden))}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(
                shape.heads * shape.head_dim, shape.hidden, 2
            ),
            prefix + "self_attn.k_proj.weight": matrix(
                shape.kv_heads * shape.head_dim, shape.hidden, 2
            ),
            prefix + "self_attn.v_proj.weight": matrix(
                shape.kv_heads * shape.head_dim, shape.hidden
            ),
            prefix + "self_attn.o_proj.weight": matrix(shape.hidden, shape.heads * shape.head_dim),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    # Large logits, so that the most likely token is so by a margin far above rounding.
    return weights | {
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(vocab_size, shape.hidden, 3),
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, object] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _STORED_TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def rotate(
    x: np.ndarray, positions: np.ndarray, theta: float, *, interleaved: bool = False
) -> np.ndarray:
    """RoPE of x [n, heads, d] in float64."""
    d = x.shape[-1]
    angles = positions[:, None] * theta ** (-2.0 * np.arange(d // 2) / d)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : d // 2], x[..., d // 2 :])
    first, second = a * cos - b * sin, b * cos + a * sin
    out = np.empty(x.shape, np.float64)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = first, second
    else:
        out[..., : d // 2], out[..., d // 2 :] = first, second
    return out


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None
) -> np.ndarray:
    """Causal attention of the last len(q) tokens to all of k and v, in float64: [n, Hq, D], [t,
    Hkv, D], [t, Hkv, Dv]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("nhd,thd->hnt", q, k) * (
        1 / np.sqrt(q.shape[-1]) if scale is None else scale
    )
    visible = np.arange(len(k))[None, :] <= np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnt,thd->nhd", p / p.sum(-1, keepdims=True), v)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
