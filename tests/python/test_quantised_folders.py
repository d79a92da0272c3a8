"""Hugging Face folders whose matrices are quantised (GPTQ, AWQ, compressed-tensors): they are
computed with as they are, exact in the same sense as any other weights."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import quire
from program import run
from quire.identity import model_identity
from tiny_model import Shape, TinyModel, write_safetensors

SHAPE = Shape(hidden=128, intermediate=256, heads=8, kv_heads=2)
TEXT = "The quick brown fox: 1234, naïve"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass
class Codes:
    """A matrix [n, k]: weight = scale of its group * (code - zero)."""

    codes: np.ndarray  # [n, k], from 0
    zeros: np.ndarray  # [n, groups]
    scales: np.ndarray  # [n, groups] float16
    group_of: np.ndarray  # [k]

    def weights(self) -> np.ndarray:
        difference = self.codes - self.zeros[:, self.group_of]
        return self.scales.astype(np.float32)[:, self.group_of] * difference.astype(np.float32)


def quantise(w: np.ndarray, bits: int, group: int, symmetric: bool, strewn: bool = False) -> Codes:
    """By the extremes of each group."""
    n, k = w.shape
    order = np.arange(k)
    if strewn:
        order = np.random.default_rng([n, k]).permutation(k)  # that of q is not that of k
    group_of = np.empty(k, np.int32)
    group_of[order] = np.arange(k) // group
    zeros, scales = [], []
    top = 2**bits - 1
    for index in range(k // group):
        part = w[:, group_of == index]
        if symmetric:
            scale = np.abs(part).max(1) / (top // 2)
            zero = np.full(n, top // 2 + 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zero = np.clip(np.rint(-low / scale), 1, top)
        scales.append(scale.astype(np.float16))
        zeros.append(zero.astype(np.int64))
    made = Codes(np.empty(0), np.stack(zeros, 1), np.stack(scales, 1), group_of)
    divided = w / made.scales.astype(np.float32)[:, group_of]
    made.codes = np.clip(np.rint(divided) + made.zeros[:, group_of], 0, top).astype(np.int64)
    return made


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes packed along the last dimension."""
    per = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per)))
    parts = padded.reshape(len(codes), -1, per).astype(np.uint32)
    packed = np.zeros(parts.shape[:2], np.uint32)
    for place in range(per):
        packed |= parts[:, :, place] << np.uint32(place * bits)
    return packed.view(np.int32)


def gptq(name: str, c: Codes, bits: int) -> Tensors:
    return {
        name + ".qweight": words(c.codes, bits).T,
        name + ".qzeros": words(c.zeros.T - 1, bits),
        name + ".scales": c.scales.T,
        name + ".g_idx": c.group_of,
        name + ".bias": np.zeros(len(c.codes), np.float16),
    }


def awq(name: str, c: Codes, bits: int) -> Tensors:
    def ordered(codes: np.ndarray) -> np.ndarray:
        return words(codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER].reshape(codes.shape), bits)

    return {
        name + ".qweight": ordered(c.codes.T),
        name + ".qzeros": ordered(c.zeros.T),
        name + ".scales": c.scales.T,
    }


def packed(name: str, c: Codes, bits: int) -> Tensors:
    tensors = {
        name + ".weight_packed": words(c.codes, bits),
        name + ".weight_shape": np.array(c.codes.shape, np.int64),
        name + ".weight_scale": c.scales,
    }
    if np.any(c.zeros != 2 ** (bits - 1)):
        tensors[name + ".weight_zero_point"] = words(c.zeros.T, bits).T
    return tensors


def in_bytes(name: str, c: Codes, bits: int) -> Tensors:
    assert bits == 8
    return {
        name + ".weight": (c.codes - 128).astype(np.int8),
        name + ".weight_scale": c.scales,
    }


@dataclasses.dataclass(frozen=True)
class Form:
    write: Callable[[str, Codes, int], Tensors]
    method: str
    bits: int = 4
    group: int = 32  # 0: all inputs
    symmetric: bool = False
    strewn: bool = False

    def config(self) -> dict[str, object]:
        group = self.group or -1
        if self.method == "gptq":
            return {"bits": self.bits, "group_size": group, "desc_act": self.strewn}
        if self.method == "awq":
            return {"bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric}
        weights |= (
            {"strategy": "group", "group_size": group}
            if self.group
            else {"strategy": "channel"}
        )
        kind = "int-quantized" if self.write is in_bytes else "pack-quantized"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"format": kind, "config_groups": groups, "ignore": ["lm_head"]}


Q = "model.layers.1.self_attn.q_proj"
FORMS = {
    "gptq_4": Form(gptq, "gptq"),
    "gptq_4_order": Form(gptq, "gptq", strewn=True),
    "gptq_8_128": Form(gptq, "gptq", bits=8, group=128, symmetric=True),
    "awq": Form(awq, "awq"),
    "awq_128": Form(awq, "awq", group=128),
    "compressed_4": Form(packed, "compressed-tensors"),
    "compressed_4_symmetric": Form(packed, "compressed-tensors", group=64, symmetric=True),
    "compressed_8_channel": Form(
        in_bytes, "compressed-tensors", bits=8, group=0, symmetric=True
    ),
}


def is_quantised(name: str) -> bool:
    return "_proj." in name


def model_of(path: Path, form: Form) -> TinyModel:
    """The folder; the model's own weights are the numbers that its codes stand for."""
    model = TinyModel(path, SHAPE)
    stored: Tensors = {}
    for name, w in model.weights.items():
        if not is_quantised(name):
            stored[name] = w
            continue
        c = quantise(w, form.bits, form.group or w.shape[1], form.symmetric, form.strewn)
        model.weights[name] = c.weights()
        stored |= form.write(name.removesuffix(".weight"), c, form.bits)
    write_safetensors(path / "model.safetensors", stored)
    config_with(path, {"quant_method": form.method, **form.config()})
    return model


def config_with(path: Path, quantisation: dict[str, object]) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantisation
    (path / "config.json").write_text(json.dumps(config))


def logits(model: TinyModel, **options) -> np.ndarray:
    given = {"dtype": "float32", "kv_dtype": "float32", "threads": 1, "kv_bytes": 1 << 20}
    with quire.Engine(model.directory, **{**given, **options}) as engine:
        return engine.logits(TEXT)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_near_those_of_the_stored_weights(tmp_path, form):
    """What is quantised beside the weights are the activations, in groups of 32."""
    model = model_of(tmp_path / "model", FORMS[form])
    ours = logits(model)
    theirs = model.logits(model.tokenizer.encode(TEXT).ids)
    assert ours.shape == theirs.shape
    int8_rows = np.abs(ours - theirs).mean()
    assert 0 < int8_rows < 0.02 * theirs.std()
    bfloat16_rows = np.abs(logits(model, activations="bfloat16") - theirs).mean()
    assert bfloat16_rows < int8_rows
    np.testing.assert_allclose(
        logits(model, activations="float32"), theirs, rtol=0, atol=1e-4 * theirs.std()
    )


def mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, two in a byte, exponents of two of 32 inputs, and the numbers that they stand for."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    groups = w.reshape(len(w), -1, 32).astype(np.float32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=2, keepdims=True))) - 2
    scaled = groups * 2.0**-exponents
    codes = np.abs(np.abs(scaled)[..., None] - numbers).argmin(axis=3)
    values = np.copysign(numbers[codes], scaled) * 2.0**exponents
    signed = (codes + 8 * (scaled < 0)).astype(np.uint8).reshape(len(w), -1)
    return (
        signed[:, ::2] | signed[:, 1::2] << np.uint8(4),
        (exponents[..., 0] + 127).astype(np.uint8),
        values.reshape(w.shape).astype(np.float32),
    )


def test_mxfp4_of_compressed_tensors(tmp_path):
    model = TinyModel(tmp_path / "model", SHAPE)
    stored: Tensors = {}
    for name, w in model.weights.items():
        if not is_quantised(name):
            stored[name] = w
            continue
        codes, exponents, model.weights[name] = mxfp4(w)
        stored |= {name + "_packed": codes, name + "_scale": exponents}
    write_safetensors(tmp_path / "model" / "model.safetensors", stored)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    kind = "mxfp4-pack-quantized"
    group = {"format": kind, "targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": kind}
    config_with(tmp_path / "model", config | {"config_groups": {"group_0": group}})
    theirs = model.logits(model.tokenizer.encode(TEXT).ids)
    assert 0 < np.abs(logits(model) - theirs).mean() < 0.02 * theirs.std()
    ours = logits(model, activations="float32")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * theirs.std())
    with quire.Engine(model.directory, threads=1, kv_bytes=1 << 20) as engine:
        assert "MXFP4" in engine.info.weight_types
    packed_folder = quire.pack_model(model.directory, tmp_path / "packed", dtype="float32")
    given = {"dtype": "float32", "kv_dtype": "float32", "threads": 1, "kv_bytes": 1 << 20}
    with quire.Engine(packed_folder, activations="float32", **given) as engine:
        assert np.array_equal(engine.logits(TEXT), ours)


@pytest.mark.parametrize("form", FORMS)
def test_logits_do_not_depend_on_cuts_threads_or_the_path(tmp_path, form):
    model = model_of(tmp_path / "model", FORMS[form])
    expected = logits(model)
    assert np.array_equal(expected, logits(model, threads=2))
    assert np.array_equal(expected, logits(model, prefill_chunk=3, page_size=4))
    for path in quire.kernel_paths():
        assert np.array_equal(expected, logits(model, kernel_path=path)), path


@pytest.mark.parametrize("rows", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_stay_numbers_do_not_depend_on_cuts_or_threads(tmp_path, form, rows):
    model = model_of(tmp_path / "model", FORMS[form])
    for path in quire.kernel_paths():
        expected = logits(model, activations=rows, kernel_path=path)
        cut = logits(
            model, activations=rows, kernel_path=path, threads=2, prefill_chunk=3, page_size=4
        )
        assert np.array_equal(expected, cut), path


@pytest.mark.parametrize("form", FORMS)
def test_requests_side_by_side_answer_as_alone(tmp_path, form):
    model = model_of(tmp_path / "model", FORMS[form])
    prompts = ["The", "fox 12 12 quick", "dog dog", "a stack of folded pages"]
    with quire.Engine(model.directory, threads=1, kv_bytes=1 << 20) as engine:
        together = engine.generate(prompts, max_tokens=12)
        alone = [engine.generate(prompt, max_tokens=12) for prompt in prompts]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


def test_the_same_numbers_in_three_forms_give_the_same_bits(tmp_path):
    found = [
        logits(model_of(tmp_path / name, FORMS[name])) for name in ("gptq_4", "awq", "compressed_4")
    ]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_memory_is_known_before_and_below_that_of_plain_weights(tmp_path):
    plain = TinyModel(tmp_path / "plain", SHAPE)
    sizes = {"plain": quire.Engine.plan_memory(plain.directory, dtype="float32").weight_bytes}
    types_of = {
        "gptq_8_128": {"I8ZWide", "int32", "float32"},
        "gptq_4_order": {"I4Z", "int32", "float32"},
        "compressed_4_symmetric": {"I4G", "float32"},
    }
    for name, expected in types_of.items():
        model = model_of(tmp_path / name, FORMS[name])
        sizes[name] = quire.Engine.plan_memory(model.directory, dtype="float32").weight_bytes
        with quire.Engine(model.directory, dtype="float32", kv_bytes=1 << 20) as engine:
            assert engine.stats()["weight_bytes"] == sizes[name]
            types = engine.info.weight_types
        assert set(types) == expected and sum(types.values()) == sizes[name]
    tables = sum(w.nbytes for name, w in plain.weights.items() if not is_quantised(name))
    matrices = sum(w.size for name, w in plain.weights.items() if is_quantised(name))
    assert sizes["gptq_8_128"] - tables < matrices * 9 / 8
    assert sizes["compressed_4_symmetric"] - tables < matrices * 5 / 8 * 1.1
    assert sizes["gptq_8_128"] < sizes["plain"] / 2


def test_another_quantisation_is_another_model(tmp_path):
    revisions = {
        str(model_identity(model_of(tmp_path / name, form).directory)["revision"])
        for name, form in FORMS.items()
    }
    assert len(revisions) == len(FORMS)


def test_the_program_takes_the_folder(capsys, tmp_path):
    folder = str(model_of(tmp_path / "model", FORMS["awq"]).directory)
    code, text, _ = run(capsys, "generate", folder, "The quick", "--dry-run")
    assert code == 0 and "weights" in text
    code, _, error = run(capsys, "generate", folder, "The quick", "--max-tokens", "4")
    assert code == 0, error
    code, text, _ = run(capsys, "inspect", folder, "--json")
    assert code == 0 and json.loads(text)["model"]["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_folder_is_the_same_model(tmp_path, form):
    model = model_of(tmp_path / "model", FORMS[form])
    packed = quire.pack_model(model.directory, tmp_path / "packed", dtype="float32", threads=1)
    expected = logits(model)
    model.directory = packed
    assert np.array_equal(expected, logits(model))
    assert model_identity(packed) == model_identity(tmp_path / "model")


def test_a_packed_order_that_is_none_is_refused(tmp_path):
    model = model_of(tmp_path / "model", FORMS["gptq_4_order"])
    packed = quire.pack_model(model.directory, tmp_path / "packed", dtype="float32", threads=1)
    file = packed / "model.safetensors"
    model.directory = packed
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + header_bytes])
    begin = header[Q + ".packed.order"]["data_offsets"][0] + 8 + header_bytes
    for hostile in (-1, 128, int.from_bytes(file.read_bytes()[begin + 4 : begin + 8], "little")):
        damaged = bytearray(file.read_bytes())
        damaged[begin : begin + 4] = hostile.to_bytes(4, "little", signed=True)
        file.write_bytes(damaged)
        with pytest.raises(quire.CorruptError, match=r"q_proj\.packed\.order.*twice or outside"):
            logits(model)


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "hqq"}, r'quantization_config\.quant_method: "hqq" is not read'),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, r"bits: 3 is not read"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
            r'version: "gemv" is not read; read are gemm',
        ),
    ],
)
def test_what_is_not_taken_is_refused_by_field(tmp_path, quantisation, message):
    model = model_of(tmp_path / "model", FORMS["awq"])
    config_with(model.directory, quantisation)
    with pytest.raises(quire.BadArgumentError, match=message):
        logits(model)


def rewrite(path: Path, form: Form, change: Callable[[Tensors], None]) -> TinyModel:
    """The folder with a change in the tensors of its first quantised matrix and others."""
    model = TinyModel(path, SHAPE)
    stored: Tensors = {}
    for name, w in model.weights.items():
        if is_quantised(name):
            c = quantise(w, form.bits, form.group, form.symmetric)
            stored |= form.write(name.removesuffix(".weight"), c, form.bits)
        else:
            stored[name] = w
    change(stored)
    write_safetensors(path / "model.safetensors", stored)
    config_with(path, {"quant_method": form.method, **form.config()})
    return model



@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(Q + ".scales"), quire.NotFoundError, "q_proj.scales"),
        (lambda t: t.pop(Q + ".qzeros"), quire.NotFoundError, "q_proj.qzeros"),
        (
            lambda t: t.update({Q + ".scales": t[Q + ".scales"][:2]}),
            quire.CorruptError,
            r"q_proj\.scales.*F16 \[2, 128\], config.json asks for F16 \[4, 128\]",
        ),
        (
            lambda t: t[Q + ".g_idx"].__setitem__(3, 4),
            quire.CorruptError,
            "q_proj.g_idx.*input 3 is in group 4; there are 4 groups",
        ),
        (
            lambda t: t[Q + ".bias"].__setitem__(0, 1),
            quire.BadArgumentError,
            "q_proj.bias.*is not zero, and config.json has no bias",
        ),
        (lambda t: t.pop(Q + ".qweight"), quire.NotFoundError, "q_proj.weight"),
    ],
)
def test_damaged_folders_are_refused_by_name(tmp_path, change, error, message):
    model = rewrite(tmp_path / "model", FORMS["gptq_4"], change)
    with pytest.raises(error, match=message):
        logits(model)


@pytest.mark.parametrize("form", ["gptq_4_order", "awq", "compressed_4"])
def test_random_damage_gives_answers_or_errors(tmp_path, form):
    """Flipped bytes of the header, and of what tells groups and offsets."""
    model = model_of(tmp_path / "model", FORMS[form])
    path = model.directory / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(7)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[generator.randrange(8, header_end)] = generator.randrange(32, 127)
        path.write_bytes(damaged)
        try:
            logits(model)
        except quire.QuireError:
            refused += 1
    assert refused > 30
