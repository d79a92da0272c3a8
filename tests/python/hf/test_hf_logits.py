"""Logits and greedy answers against Hugging Face transformers, an independent implementation of the
same models.

How far two right float32 evaluations may lie apart depends on the model, so the bound is computed,
not chosen: the reference is evaluated in float64 once as it is and a few times with every weight
moved at random by what float32 products of that size may lose. A float32 evaluation is the exact
one of such a neighbouring model (backward analysis), so it differs by about as much as the
neighbours do.
"""

from __future__ import annotations

import copy
import json
import math
import shutil

import numpy as np
import pytest
import quire
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, quants
from quire import quantizing
from quire.embedded import embedded_model_dir
from safetensors.numpy import load_file, save_file

# One thread: torch's workers spin while they wait, which takes the cores from everything else on a
# busy machine.
torch.set_num_threads(1)

# Relative rounding error of one float32 operation.
UNIT = 2.0**-24
# Neighbours drawn, and by how much more than the largest of them a right evaluation may differ:
# neighbours are a sample of the errors, not their maximum, and rounding also happens between the
# products.
NEIGHBOURS = 4
MARGIN = 2

SMALL = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    max_position_embeddings=512,
    rms_norm_eps=1e-3,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}


def heads(queries: int, keys: int, head_dim: int | None = None) -> dict:
    sizes = {"num_attention_heads": queries, "num_key_value_heads": keys}
    return sizes if head_dim is None else sizes | {"head_dim": head_dim}


CASES = {
    "llama": ("Llama", dict(**heads(4, 4), tie_word_embeddings=False)),
    "llama-gqa-tied": ("Llama", dict(**heads(8, 2), tie_word_embeddings=True)),
    "llama-mqa-wide-heads": ("Llama", dict(**heads(4, 1, 32), tie_word_embeddings=False)),
    "llama-llama3": (
        "Llama",
        dict(**heads(4, 2, 32), rope_parameters=LLAMA3, tie_word_embeddings=True),
    ),
    "llama-linear": (
        "Llama",
        dict(**heads(4, 2), rope_parameters=LINEAR, tie_word_embeddings=False),
    ),
    "llama-yarn": (
        "Llama",
        dict(**heads(4, 2, 32), rope_parameters=YARN, tie_word_embeddings=False),
    ),
    "llama-biases": (
        "Llama",
        dict(**heads(4, 2), attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    ),
    "qwen2": ("Qwen2", dict(**heads(4, 2), tie_word_embeddings=False)),
    "qwen2-seven-to-one-tied": (
        "Qwen2",
        dict(hidden_size=112, **heads(7, 1), tie_word_embeddings=True),
    ),
    "qwen3": ("Qwen3", dict(**heads(4, 2, 32), tie_word_embeddings=False)),
    "qwen3-tied": ("Qwen3", dict(**heads(8, 4, 16), tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(**heads(8, 2), sliding_window=None, tie_word_embeddings=False)),
    "mistral-wide-heads-tied": (
        "Mistral",
        dict(**heads(2, 1, 64), sliding_window=None, tie_word_embeddings=True),
    ),
}

WINDOW = {"sliding_window": 16}
GEMMA = dict(tie_word_embeddings=True, query_pre_attn_scalar=24)
CASES |= {
    "mistral-window": ("Mistral", dict(**heads(8, 2), **WINDOW, tie_word_embeddings=False)),
    "qwen2-window-from-layer-1": (
        "Qwen2",
        dict(
            **heads(4, 2),
            **WINDOW,
            use_sliding_window=True,
            max_window_layers=1,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3-window-by-layer-types": (
        "Qwen3",
        dict(
            **heads(4, 2, 32),
            **WINDOW,
            use_sliding_window=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False,
        ),
    ),
    "gemma2": ("Gemma2", dict(hidden_size=96, **heads(4, 2, 32), **WINDOW, **GEMMA)),
    "gemma2-tight-caps": (
        "Gemma2",
        dict(
            **heads(8, 1, 16),
            **WINDOW,
            **GEMMA,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma2-no-caps-bias": (
        "Gemma2",
        dict(
            **heads(4, 4, 16),
            **WINDOW,
            **GEMMA,
            attention_bias=True,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
    ),
    "gemma3": (
        "Gemma3Text",
        dict(num_hidden_layers=7, hidden_size=96, **heads(4, 2, 32), **WINDOW, **GEMMA),
    ),
    "gemma3-linear-final-cap": (
        "Gemma3Text",
        dict(
            **heads(4, 1, 32),
            **WINDOW,
            **GEMMA,
            final_logit_softcapping=3.0,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
}

CASES |= {
    "phi3": ("Phi3", dict(**heads(4, 2), tie_word_embeddings=False)),
    "phi3-window-part-of-heads-tied": (
        "Phi3",
        dict(
            **heads(4, 1, 32),
            **WINDOW,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        ),
    ),
    "phi3-longrope": (
        "Phi3",
        dict(
            **heads(4, 2),
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + i / 2 for i in range(8)],
            },
        ),
    ),
    # The text part of a model that knows images.
    "gemma3-of-images": (
        "Gemma3",
        dict(num_hidden_layers=7, hidden_size=96, **heads(4, 2, 32), **WINDOW, **GEMMA),
    ),
}
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
CASES |= {
    "mixtral": (
        "Mixtral",
        dict(**heads(4, 2), num_local_experts=6, tie_word_embeddings=False),
    ),
    "mixtral-window-tied": (
        "Mixtral",
        dict(
            **heads(8, 2, 16),
            **WINDOW,
            num_local_experts=5,
            num_experts_per_tok=3,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(**heads(4, 2), **EXPERTS, shared_expert_intermediate_size=40),
    ),
    "qwen3-moe": ("Qwen3Moe", dict(**heads(4, 2, 32), **EXPERTS, norm_topk_prob=True)),
    "qwen3-moe-some-experts-biases-tied": (
        "Qwen3Moe",
        dict(
            **heads(8, 2, 16),
            **EXPERTS,
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}

MAMBA = dict(num_heads=8, head_dim=16, state_size=12, n_groups=2, layer_norm_epsilon=1e-3)
HYBRID = dict(
    **heads(4, 2, 32),
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    tie_word_embeddings=False,
)
RECURRENT_CASES = {
    "mamba2": ("Mamba2", MAMBA),
    "mamba2-biases-one-group-tied": (
        "Mamba2",
        MAMBA | dict(use_bias=True, use_conv_bias=False, n_groups=1, tie_word_embeddings=True),
    ),
    "mamba2-steps-bounded": (
        "Mamba2",
        MAMBA
        | dict(expand=1, num_heads=4, n_groups=4, conv_kernel=3, time_step_limit=(0.3, 0.9)),
    ),
    "qwen3-next": ("Qwen3Next", HYBRID),
    "qwen3-next-dense-tied": (
        "Qwen3Next",
        HYBRID
        | dict(
            num_experts=0,
            linear_num_key_heads=4,
            layer_types=["full_attention", "linear_attention"] * 2,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-next-some-experts": (
        "Qwen3Next",
        HYBRID
        | dict(
            **heads(2, 1, 24),
            num_hidden_layers=5,
            layer_types=None,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            attention_bias=True,
            linear_conv_kernel_dim=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5e5,
                "partial_rotary_factor": 0.5,
            },
        ),
    ),
}
CASES |= RECURRENT_CASES

DEEPSEEK = dict(
    **heads(4, 4),
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_shared_experts=2,
    first_k_dense_replace=1,
    tie_word_embeddings=False,
)
GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
LATENT_CASES = {
    "deepseek-v2": ("DeepseekV2", DEEPSEEK),
    "deepseek-v2-groups-plain-queries-biases-tied": (
        "DeepseekV2",
        DEEPSEEK
        | GROUPS
        | dict(
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "deepseek-v2-yarn": (
        "DeepseekV2",
        DEEPSEEK
        | dict(
            **heads(8, 8),
            v_head_dim=40,
            n_shared_experts=1,
            rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        ),
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | GROUPS),
    "deepseek-v3-yarn-half-split-one-group": (
        "DeepseekV3",
        DEEPSEEK
        | dict(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            attention_bias=True,
            rope_interleave=False,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
}
CASES |= LATENT_CASES

# Every name of an activation that is known.
CASES |= {
    f"llama-{name}": ("Llama", dict(**heads(4, 2), hidden_act=name, tie_word_embeddings=False))
    for name in (
        "swish",
        "gelu",
        "gelu_new",
        "gelu_pytorch_tanh",
        "relu",
        "relu2",
        "quick_gelu",
    )
}
CASES |= {
    "mistral-relu": ("Mistral", dict(**heads(8, 2), sliding_window=None, hidden_act="relu")),
    "qwen2-quick-gelu": ("Qwen2", dict(**heads(4, 2), hidden_act="quick_gelu")),
    "qwen3-relu2": ("Qwen3", dict(**heads(4, 2, 32), hidden_act="relu2")),
    "gemma2-gelu": (
        "Gemma2",
        dict(hidden_size=96, **heads(4, 2, 32), **WINDOW, **GEMMA, hidden_activation="gelu"),
    ),
    "gemma3-silu": (
        "Gemma3Text",
        dict(hidden_size=96, **heads(4, 2, 32), **WINDOW, **GEMMA, hidden_activation="silu"),
    ),
    "deepseek-v2-gelu": ("DeepseekV2", DEEPSEEK | dict(hidden_act="gelu")),
    "deepseek-v3-relu2": ("DeepseekV3", DEEPSEEK | GROUPS | dict(hidden_act="relu2")),
}


def _of_images(options: dict) -> transformers.Gemma3Config:
    """Text with `options`, and images as small as they can be."""
    images = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return transformers.Gemma3Config(
        text_config={**SMALL, **options},
        vision_config={**images, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )


def random_model(kind: str, options: dict, seed: int) -> torch.nn.Module:
    """A model in which every part matters: norms away from one and biases away from zero."""
    torch.manual_seed(seed)
    if kind == "Gemma3":
        model = transformers.Gemma3ForConditionalGeneration(_of_images(options)).eval()
    else:
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
        causal = "Gemma3" if kind == "Gemma3Text" else kind
        model = getattr(transformers, f"{causal}ForCausalLM")(config).eval()
    # Experts one by one: the grouped product knows no float64.
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model


def round_parameters(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The same model with weights that `dtype` holds. (model.to(dtype) would round the rotary
    frequencies as well.)"""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(dtype))
    return rounded


def logits_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def neighbour(model: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
    """Every weight moved by sqrt(K) roundings, the usual error of a sum of K products, and the
    rotary frequencies by four: they and the angles are rounded by themselves."""

    def move(values: torch.Tensor, roundings: float) -> None:
        noise = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1
        values.mul_(1 + roundings * UNIT * noise)

    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            move(parameter, math.sqrt(parameter.shape[-1]))
        for name, buffer in moved.named_buffers():
            if name.endswith("inv_freq"):
                move(buffer, 4)
    return moved


class Reference:
    """A model in float64 with some neighbours."""

    def __init__(self, model: torch.nn.Module, neighbours: int = NEIGHBOURS):
        generator = torch.Generator().manual_seed(11)
        self.exact = copy.deepcopy(model).double()
        self.neighbours = [neighbour(self.exact, generator) for _ in range(neighbours)]

    def logits_and_bound(self, ids: list[int]) -> tuple[np.ndarray, float]:
        """Exact logits, and by how much those of a float32 evaluation may differ."""
        logits = logits_of(self.exact, ids)
        return logits, MARGIN * max(
            float(np.abs(logits_of(other, ids) - logits).max()) for other in self.neighbours
        )


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SMALL["vocab_size"], count).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path, name):
    kind, options = CASES[name]
    model = random_model(kind, options, seed=sum(map(ord, name)))
    model.save_pretrained(tmp_path)
    ids = random_ids(70, seed=1)
    expected, bound = Reference(model).logits_and_bound(ids)
    with quire.Engine(tmp_path, dtype="float32", threads=1) as engine:
        actual = engine.logits(ids)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= bound
    # The bound is one of float32: transformers' own float32 keeps it, and weights in bfloat16 are
    # far outside of it.
    assert np.abs(logits_of(model, ids) - expected).max() <= bound
    assert (
        np.abs(logits_of(round_parameters(model, torch.bfloat16), ids) - expected).max()
        > 20 * bound
    )


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("Llama", {"hidden_act": "mish"}, 'hidden_act: "mish" is not known; known are silu, swish'),
        ("Mamba2", {"hidden_act": "gelu"}, "hidden_act: it must be silu for this architecture"),
    ],
    ids=str,
)
def test_activations_that_are_refused(tmp_path, kind, change, message):
    options = CASES["llama" if kind == "Llama" else "mamba2"][1]
    random_model(kind, options, seed=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(quire.BadArgumentError, match=message):
        quire.Engine(tmp_path, dtype="float32", threads=1)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text"])
@pytest.mark.parametrize("count", [20, 32, 33, 64])
def test_dynamic_rope_has_its_own_theta_up_to_the_original_length(tmp_path, kind, count):
    """Up to 32 tokens as if nothing scaled; behind them the theta of 64 tokens, which is that of
    transformers where it computes a prompt of 64."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    if kind == "Gemma3Text":
        dynamic = {
            "full_attention": dynamic,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    options = dict(
        **heads(4, 2, 32),
        max_position_embeddings=32,
        rope_parameters=dynamic,
        tie_word_embeddings=True,
        **(WINDOW if kind == "Gemma3Text" else {}),
        **({"layer_types": ["full_attention", "sliding_attention"] * 2} if kind != "Llama" else {}),
        num_hidden_layers=4,
    )
    model = random_model(kind, options, seed=8)
    model.save_pretrained(tmp_path)
    ids = random_ids(64, seed=3)
    whole = count if count <= 32 else 64  # of what transformers computes
    expected, bound = Reference(model).logits_and_bound(ids[:whole])
    with quire.Engine(tmp_path, dtype="float32", threads=1) as engine:
        actual = engine.logits(ids[:count])
    assert np.abs(actual - expected[:count]).max() <= bound
    # Greedy decoding that passes the original length has the same theta from its first token on.
    if count > 32:
        return
    with quire.Engine(tmp_path, dtype="float32", threads=1) as engine:
        answer = engine.generate(ids[:count], max_tokens=64 - count, ignore_eos=True)
        tokens = ids[:count] + answer.ids
        logits = engine.logits(tokens)
    for at, token in enumerate(answer.ids):
        assert logits[count + at - 1].argmax() == token


@pytest.mark.parametrize("name", RECURRENT_CASES | LATENT_CASES)
def test_cuts_of_a_prompt_cannot_be_seen(tmp_path, name):
    """Longer than the distance of two checkpoints of recurrent layers; chunks of one token are
    decoding."""
    kind, options = CASES[name]
    model = random_model(kind, options, seed=12)
    model.save_pretrained(tmp_path)
    ids = random_ids(150, seed=9)
    expected, bound = Reference(model, neighbours=2).logits_and_bound(ids)
    logits = []
    for chunk in (1, 24, 64, 150):
        with quire.Engine(
            tmp_path, dtype="float32", threads=1, prefill_chunk=chunk, max_num_sequences=2
        ) as engine:
            logits.append(engine.logits(ids))
        assert np.abs(logits[-1] - expected).max() <= bound
        np.testing.assert_array_equal(logits[-1], logits[0])


def test_recurrent_states_that_are_not_kept_are_computed_again(tmp_path):
    """The same text again, and one that parts from it: states are kept at the end of what was
    computed and at some multiples of 64 tokens."""
    kind, options = CASES["qwen3-next"]
    model = random_model(kind, options, seed=13)
    model.save_pretrained(tmp_path)
    ids = random_ids(140, seed=10)
    settings = dict(dtype="float32", threads=1, max_num_sequences=2)
    with quire.Engine(tmp_path, **settings) as engine:
        first = engine.generate([ids], max_tokens=8, ignore_eos=True, greedy=True)[0]
        assert (first.usage.cached_tokens, first.usage.recomputed_tokens) == (0, 0)
        again = engine.generate([ids], max_tokens=8, ignore_eos=True, greedy=True)[0]
        assert again.ids == first.ids
        assert (again.usage.cached_tokens, again.usage.recomputed_tokens) == (128, 11)
        longer = ids + first.ids + [5]
        goes_on = engine.generate([longer], max_tokens=8, ignore_eos=True, greedy=True)[0]
        assert (goes_on.usage.cached_tokens, goes_on.usage.recomputed_tokens) == (147, 0)
        stats = engine.stats()
        assert stats["recomputed_tokens"] == 11 and stats["retained_states"] > 0
    with quire.Engine(tmp_path, prefix_cache=False, **settings) as engine:
        answer = engine.generate([longer], max_tokens=8, ignore_eos=True, greedy=True)[0]
        assert answer.ids == goes_on.ids
        assert engine.stats()["states_free"] == engine.stats()["states_total"]


@pytest.mark.parametrize("path", quire.kernel_paths())
def test_every_kernel_path_keeps_the_bound(tmp_path, path):
    model = random_model("Qwen3", CASES["qwen3-tied"][1], seed=9)
    model.save_pretrained(tmp_path)
    ids = random_ids(70, seed=6)
    expected, bound = Reference(model).logits_and_bound(ids)
    with quire.Engine(tmp_path, dtype="float32", threads=1, kernel_path=path) as engine:
        assert engine.info.kernel_path == path
        assert np.abs(engine.logits(ids) - expected).max() <= bound


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("qwen3-next")])
def test_what_quantize_does_not_quantise_is_the_model(tmp_path, monkeypatch, name):
    """Here that is all: names, norms, rates and convolutions become those of the file and back."""
    kind, options = CASES[name]
    model = random_model(kind, options, seed=14)
    model.save_pretrained(tmp_path / "source")
    monkeypatch.setattr(quantizing._Kinds, "of", lambda kinds, tensor: "")
    made = quantizing.quantize_model(tmp_path / "source", tmp_path / "made")
    ids = random_ids(70, seed=11)
    expected, bound = Reference(model).logits_and_bound(ids)
    with quire.Engine(made, dtype="float32", threads=1) as engine:
        assert np.abs(engine.logits(ids) - expected).max() <= bound


KEPT = ("mlp.gate.", "shared_expert_gate.", "in_proj_ba.", "conv1d.")


@pytest.mark.parametrize("weights, kind", [("q8", "Q8_0"), ("q4", "Q4_0")])
def test_a_quantised_hybrid_is_near_a_model_of_its_numbers(tmp_path, weights, kind):
    options = CASES["qwen3-next"][1] | dict(
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_experts_per_tok=6,  # all: a token that another expert gets is far away
    )
    source, plain = tmp_path / "source", tmp_path / "plain"
    random_model("Qwen3Next", options, seed=15).save_pretrained(source)
    made = quantizing.quantize_model(
        source, tmp_path / "made", weights=weights, embeddings=weights
    )
    shutil.copytree(source, plain)
    tensors = load_file(source / "model.safetensors")
    gguf_type = GGMLQuantizationType[kind]
    for name, value in tensors.items():
        if value.ndim == 2 and not any(part in name for part in KEPT):
            tensors[name] = quants.dequantize(quants.quantize(value, gguf_type), gguf_type)
    save_file(tensors, plain / "model.safetensors")
    stored = {tensor.tensor_type.name for tensor in GGUFReader(made / "model.gguf").tensors}
    assert stored == {"F32", kind}
    ids = random_ids(70, seed=12)
    packed = quire.pack_model(made, tmp_path / "packed", dtype="float32")
    logits = []
    for folder, chunk in ((made, 70), (plain, 70), (made, 24), (packed, 70)):
        with quire.Engine(folder, dtype="float32", threads=1, prefill_chunk=chunk) as engine:
            logits.append(engine.logits(ids))
    ours, expected, *same = logits
    for other in same:
        np.testing.assert_array_equal(other, ours)
    # Activations have 8 bits beside quantised weights, and these layers pass errors on.
    assert np.square(ours - expected).mean() < 0.15**2 * np.square(expected).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_weights_are_widened_exactly(tmp_path, dtype):
    model = round_parameters(random_model("Llama", CASES["llama-gqa-tied"][1], seed=5), dtype)
    copy.deepcopy(model).to(dtype).save_pretrained(tmp_path)
    ids = random_ids(40, seed=2)
    expected, bound = Reference(model).logits_and_bound(ids)
    with quire.Engine(tmp_path, dtype="float32", threads=1) as engine:
        assert np.abs(engine.logits(ids) - expected).max() <= bound


def test_sharded_checkpoint_gives_the_same_bits(tmp_path):
    model = random_model("Qwen3", CASES["qwen3"][1], seed=6)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    ids = random_ids(40, seed=3)
    logits = []
    for folder in ("one", "many"):
        with quire.Engine(tmp_path / folder, dtype="float32", threads=1) as engine:
            logits.append(engine.logits(ids))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_a_prompt_of_several_segments(tmp_path):
    """Attention is folded per 256 positions: here over two of them, in chunks that cut neither at a
    border."""
    model = random_model("Llama", CASES["llama-gqa-tied"][1], seed=7)
    model.save_pretrained(tmp_path)
    ids = random_ids(400, seed=4)
    expected, bound = Reference(model).logits_and_bound(ids)
    with quire.Engine(tmp_path, dtype="float32", threads=1, prefill_chunk=96) as engine:
        assert np.abs(engine.logits(ids) - expected).max() <= bound


@pytest.mark.parametrize("window", [1, 24, 69, 70, 200])
@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gemma3"])
def test_windows_shorter_and_longer_than_prompt_and_chunk(tmp_path, name, window):
    """Chunks of one token are decoding; 24 is one of the windows."""
    kind, options = CASES[name]
    model = random_model(kind, options | {"sliding_window": window}, seed=10)
    model.save_pretrained(tmp_path)
    ids = random_ids(70, seed=7)
    expected, bound = Reference(model).logits_and_bound(ids)
    logits = []
    for chunk in (1, 24, 70):
        with quire.Engine(
            tmp_path, dtype="float32", threads=1, prefill_chunk=chunk, page_size=16
        ) as engine:
            logits.append(engine.logits(ids))
        assert np.abs(logits[-1] - expected).max() <= bound
        np.testing.assert_array_equal(logits[-1], logits[0])


@pytest.mark.parametrize(
    "name",
    [
        "mistral-window",
        "qwen2-window-from-layer-1",
        "gemma2",
        "gemma3",
        "mamba2",
        "qwen3-next",
        "qwen3-next-some-experts",
        "deepseek-v2-groups-plain-queries-biases-tied",
        "deepseek-v3",
    ],
)
def test_decoding_behind_a_prefix_that_can_be_forked_at_its_end(tmp_path, name):
    """Turns of a conversation: each goes on where the cached one ended, windows away from its
    beginning, behind the last state of recurrent layers, or in the latent space. Every token is one of the best of transformers' logits, and the whole is what an
    engine without a prefix cache says."""
    kind, options = CASES[name]
    model = random_model(kind, options, seed=11)
    model.save_pretrained(tmp_path)
    reference = Reference(model, neighbours=1)
    settings = dict(dtype="float32", threads=1, prefill_chunk=32, page_size=16)
    with (
        quire.Engine(tmp_path, **settings, prefix_cache=True) as engine,
        quire.Engine(tmp_path, **settings, prefix_cache=False) as alone,
    ):
        ids = random_ids(50, seed=8)
        for turn in range(3):
            result = engine.generate([ids], max_tokens=20, ignore_eos=True, greedy=True)[0]
            other = alone.generate([ids], max_tokens=20, ignore_eos=True, greedy=True)[0]
            assert other.ids == result.ids
            # All but the last token of the turn before, which was never an input.
            assert turn == 0 or result.usage.cached_tokens == len(ids) - 11
            whole = ids + result.ids
            expected, bound = reference.logits_and_bound(whole)
            for position, token in enumerate(result.ids, start=len(ids) - 1):
                row = expected[position]
                assert row.max() - row[token] <= 2 * bound
            ids = whole + random_ids(10, seed=turn)


def test_bfloat16_stays_near(tmp_path):
    """The default dtype: at most four times as far from the exact logits as transformers' bfloat16
    is, on average."""
    model = round_parameters(
        random_model("Llama", CASES["llama-gqa-tied"][1], seed=8), torch.bfloat16
    )
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path)
    ids = random_ids(70, seed=5)
    expected, bound = Reference(model).logits_and_bound(ids)

    def distance(logits: np.ndarray) -> float:
        return float(np.sqrt(np.mean((logits - expected) ** 2)))

    # Loaded and not converted, which would round the rotary frequencies as well.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        limit = 4 * distance(theirs(torch.tensor([ids])).logits[0].float().numpy())
    assert limit > bound
    with quire.Engine(tmp_path, threads=1) as engine:
        assert distance(engine.logits(ids)) <= limit


# The embedded model -------------------------------------------------------------------------------

# Questions, tasks, code, other languages, digits; short and long.
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "def fibonacci(n):",
    "List three uses of a magnet, and 12345 reasons.",
    "Explain photosynthesis to a child.",
    "Translate to German: The weather is nice today.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
    "What is 17 times 23? Show every step.",
    "Tell me a story about a dragon who is afraid of mice.",
    "Why is the sky blue?",
    "Summarize: A quire is a stack of folded pages. Sixteen pages, folded once, make a quire of "
    "thirty-two leaves; bound together, quires make a book.",
    "Write a SQL query that counts users by country.",
    "Name five animals that live in the sea.",
    "Was ist der Unterschied zwischen Affe und Esel?",
    "What would you do with a million dollars?",
    "Write an email that asks for a day off.",
    "How do I sort a list in Python?",
    "Compare tea and coffee in one paragraph.",
    "Continue: Once upon a time, in a small village by the sea,",
]
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def embedded_transformers() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        embedded_model_dir(), dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def embedded_prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model_dir())
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )["input_ids"]
        for prompt in PROMPTS
    ]


def greedy_of_transformers(
    model: torch.nn.Module, prompts: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [prompts, steps] and the logits [prompts, steps, vocabulary] that they were taken
    from, as one batch, padded on the left."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    output = model.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[:, longest:].numpy(), torch.stack(output.logits, dim=1).numpy()


def test_greedy_answers_of_the_embedded_model(embedded_transformers, embedded_prompts):
    """20 prompts of 64 tokens, token for token up to the first near-tie of an answer: a step whose
    two best logits are nearer than both errors together."""
    with quire.Engine(embedded_model_dir(), dtype="float32") as engine:
        results = engine.generate(
            embedded_prompts, max_tokens=NEW_TOKENS, ignore_eos=True, greedy=True
        )
        answers = [result.ids for result in results]
        wholes = [ids + answer for ids, answer in zip(embedded_prompts, answers)]
        # The bound is that of the longest: the more a token sees, the more is summed.
        longest = max(wholes, key=len)
        reference = Reference(embedded_transformers, neighbours=1)
        exact, bound = reference.logits_and_bound(longest)
        assert np.abs(engine.logits(longest) - exact).max() <= bound
    expected, logits = greedy_of_transformers(embedded_transformers, embedded_prompts)
    compared = []
    for prompt, answer, tokens, rows in zip(PROMPTS, answers, expected, logits):
        assert len(answer) == NEW_TOKENS
        second, best = np.sort(rows, axis=-1)[:, -2:].T
        near_ties = np.flatnonzero(best - second <= 2 * bound)
        steps = int(near_ties[0]) if len(near_ties) else NEW_TOKENS
        assert answer[:steps] == tokens[:steps].tolist(), f"the answer to {prompt!r}"
        compared.append(steps)
    # A bound that calls every step a tie would compare nothing.
    assert len(compared) == 20 and sum(compared) > 0.8 * 20 * NEW_TOKENS, (compared, bound)
