"""Writes rope.json: frequencies and rotated vectors of every RoPE family as Hugging Face transformers computes them.

Run with transformers 5.x and torch installed: python make_rope_goldens.py > rope.json
Field names of "options" are those of RopeOptions in include/quire/rope.h.
"""

import json

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half_split

POSITIONS = [1, 40]

# Fields of RopeOptions that rope_parameters of transformers know by another name or not at all.
RENAMED = {"short_factors": "short_factor", "long_factors": "long_factor", "theta": "rope_theta"}
OURS_ONLY = {"rotary_dim"}


def ramp(pairs, low, high):
    return [low + (high - low) * i / max(pairs - 1, 1) for i in range(pairs)]


def longrope(head_dim, **more):
    pairs = more.get("rotary_dim", head_dim) // 2
    return {"short_factors": ramp(pairs, 1.0, 1.5), "long_factors": ramp(pairs, 1.0, 40.0), **more}


def cases():
    yield "default", 64, "kNone", {}
    yield "default theta 1e6", 128, "kNone", {"theta": 1e6}
    yield "default partial", 64, "kNone", {"rotary_dim": 16}
    yield "linear", 128, "kLinear", {"factor": 4.0}
    yield "linear partial", 80, "kLinear", {"factor": 2.5, "rotary_dim": 32}
    yield "dynamic", 128, "kDynamic", {"factor": 2.0, "original_max_position_embeddings": 4096}
    yield "dynamic partial", 64, "kDynamic", {
        "factor": 8.0, "original_max_position_embeddings": 2048, "rotary_dim": 24}
    yield "llama3.1", 128, "kLlama3", {
        "theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
    yield "llama3.2", 64, "kLlama3", {
        "theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
    yield "longrope", 96, "kLongRope", longrope(96, factor=32.0, original_max_position_embeddings=4096)
    yield "longrope partial", 128, "kLongRope", longrope(
        128, factor=32.0, original_max_position_embeddings=4096, rotary_dim=96)
    yield "longrope factor 1", 64, "kLongRope", longrope(64, factor=1.0, original_max_position_embeddings=4096)
    yield "longrope attention_factor", 64, "kLongRope", longrope(
        64, factor=8.0, original_max_position_embeddings=4096, attention_factor=1.25)
    yield "yarn", 128, "kYarn", {"factor": 4.0, "original_max_position_embeddings": 32768, "theta": 1e6}
    yield "yarn partial", 64, "kYarn", {
        "factor": 16.0, "original_max_position_embeddings": 4096, "rotary_dim": 32}
    yield "yarn attention_factor", 64, "kYarn", {
        "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.9}
    yield "yarn mscale", 64, "kYarn", {
        "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7}
    yield "yarn mscale alone", 64, "kYarn", {
        "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7}
    yield "yarn not truncated", 64, "kYarn", {
        "theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    yield "yarn betas", 128, "kYarn", {
        "factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": 16.0, "beta_slow": 2.0}
    yield "yarn short original length", 32, "kYarn", {
        "factor": 2.0, "original_max_position_embeddings": 4}
    yield "yarn factor 1", 32, "kYarn", {"factor": 1.0, "original_max_position_embeddings": 512}


def config_of(head_dim, family, options):
    rotary_dim = options.get("rotary_dim", head_dim)
    parameters = {"rope_type": family, "rope_theta": 10000.0, "partial_rotary_factor": rotary_dim / head_dim}
    parameters.update({RENAMED.get(k, k): v for k, v in options.items() if k not in OURS_ONLY})
    return LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, num_hidden_layers=1,
        max_position_embeddings=options.get("original_max_position_embeddings", 4096), rope_parameters=parameters)


def frequencies(head_dim, scaling, options, long_factors):
    if scaling == "kNone":  # transformers has the default family in the models, without a partial form
        whole = {k: v for k, v in options.items() if k != "rotary_dim"}
        config = config_of(options.get("rotary_dim", head_dim), "default", whole)
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    config = config_of(head_dim, scaling[1:].lower(), options)
    original = options.get("original_max_position_embeddings")
    seq_len = None
    if scaling == "kDynamic":
        seq_len = int(original * options["factor"])
    if scaling == "kLongRope":
        seq_len = original + 1 if long_factors else original
    return ROPE_INIT_FUNCTIONS[scaling[1:].lower()](config, "cpu", seq_len=seq_len)


def rotated(x, inv_freq, amplitude, interleaved):
    """Rows of x [positions, head_dim] turned to POSITIONS by the rotation of GPT-J or of Llama."""
    angles = torch.tensor(POSITIONS, dtype=torch.float64)[:, None] * inv_freq.double()[None, :]
    cos, sin = (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()
    turned, rest = x[:, : 2 * inv_freq.numel()], x[:, 2 * inv_freq.numel():]
    if interleaved:
        y = rotate_interleaved(turned[None, :, None, :], sin[None], cos[None])[0, :, 0]
    else:
        q = turned[None, None]
        y = rotate_half_split(q, q, torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None])[0][0, 0]
    return torch.cat([y, rest], -1)


def numbers(tensor):
    return [float(f"{value:.8g}") for value in tensor.flatten().tolist()]


def golden(index, name, head_dim, scaling, options, long_factors):
    inv_freq, amplitude = frequencies(head_dim, scaling, options, long_factors)
    row = {
        "name": name, "head_dim": head_dim, "scaling": scaling, "options": options, "long_factors": long_factors,
        "inv_freq": numbers(inv_freq), "amplitude": amplitude,
    }
    if head_dim <= 64:  # keeps the file small
        generator = torch.Generator().manual_seed(index)
        x = (torch.randn([len(POSITIONS), head_dim], generator=generator) * 64).round() / 64
        row["x"] = numbers(x)
        row["half_split"] = numbers(rotated(x, inv_freq, amplitude, False))
        row["interleaved"] = numbers(rotated(x, inv_freq, amplitude, True))
    return row


def main():
    rows = []
    for index, (name, head_dim, scaling, options) in enumerate(cases()):
        for long_factors in [False, True] if scaling == "kLongRope" else [False]:
            rows.append(golden(index, name, head_dim, scaling, options, long_factors))
    print('{"positions": ' + json.dumps(POSITIONS) + ', "cases": [')
    print(",\n".join(json.dumps(row) for row in rows))
    print("]}")


if __name__ == "__main__":
    main()
