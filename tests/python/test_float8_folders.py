"""Hugging Face folders whose matrices are float8 codes with scales: they are computed with as if
their numbers were stored, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import quire
import torch
from gguf import GGUFReader
from quire import quantizing
from quire.identity import model_identity
from quire.quantizing import quantize_model
from safetensors.torch import load_file, save_file
from tiny_model import Shape, TinyModel, write_safetensors

SHAPE = Shape(hidden=128, intermediate=192, heads=8, kv_heads=2)
TEXT = "The quick brown fox: 1234, naïve"


@dataclasses.dataclass(frozen=True)
class Form:
    """block: outputs and inputs with one scale; 0: all of them."""

    block: tuple[int, int]
    config: dict[str, object]
    scale: str = ".weight_scale"
    type: torch.dtype = torch.float32


def fp8(block: list[int] | None) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
    }


def compressed(**weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMS = {
    "blocks": Form((128, 128), fp8([128, 128]), ".weight_scale_inv"),
    "small_blocks": Form((48, 32), fp8([48, 32]), ".weight_scale_inv", torch.bfloat16),
    "one_scale": Form((0, 0), fp8(None)),
    "channel": Form((1, 0), compressed(strategy="channel"), type=torch.bfloat16),
    "tensor": Form((0, 0), compressed(strategy="tensor"), type=torch.bfloat16),
    "compressed_blocks": Form((64, 32), compressed(strategy="block", block_structure=[64, 32])),
}


def quantise(w: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales [rows of blocks, columns of blocks], and the numbers they stand for."""
    n, k = w.shape
    rows, columns = form.block[0] or n, form.block[1] or k
    outputs, inputs = torch.arange(n) // rows, torch.arange(k) // columns
    scales = torch.zeros(-(-n // rows), -(-k // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = w[outputs == i][:, inputs == j].abs().max() / 448
    scales = scales.to(form.type)
    spread = scales.float()[outputs][:, inputs]
    codes = (w / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def model_of(path: Path, form: Form) -> tuple[TinyModel, TinyModel]:
    """The folder, and one with the numbers that its codes stand for."""
    model, plain = TinyModel(path / "float8", SHAPE), TinyModel(path / "plain", SHAPE)
    stored: dict[str, torch.Tensor] = {}
    for name, w in model.weights.items():
        if "_proj." not in name:
            stored[name] = torch.from_numpy(w)
            continue
        codes, scales, numbers = quantise(torch.from_numpy(w), form)
        plain.weights[name] = numbers.numpy()
        stored[name] = codes
        one = form.block == (0, 0)
        stored[name.removesuffix(".weight") + form.scale] = scales[0, 0] if one else scales
    save_file(stored, str(path / "float8" / "model.safetensors"))
    write_safetensors(path / "plain" / "model.safetensors", plain.weights)
    file = path / "float8" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": form.config})
    )
    return model, plain


def logits(folder: Path, **options: object) -> np.ndarray:
    given = {"dtype": "float32", "kv_dtype": "float32", "threads": 1, "kv_bytes": 1 << 20}
    with quire.Engine(folder, **{**given, **options}) as engine:  # type: ignore[arg-type]
        return engine.logits(TEXT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_same_numbers_stored(tmp_path, form, dtype):
    model, plain = model_of(tmp_path, FORMS[form])
    ours = logits(model.directory, dtype=dtype)
    assert np.array_equal(ours, logits(plain.directory, dtype=dtype))
    assert np.array_equal(ours, logits(model.directory, dtype=dtype, threads=2, prefill_chunk=3))
    if dtype == "float32":
        theirs = plain.logits(plain.tokenizer.encode(TEXT).ids)
        assert np.abs(ours - theirs).max() < 1e-3


def packed_bytes(model: TinyModel, form: Form) -> int:
    """Codes, outputs in blocks of 32, and float32 scales, of one output or of a block of outputs;
    each rounded up to a cache line."""
    matrices: dict[str, list[tuple[int, int]]] = {}
    for name, w in model.weights.items():
        if "_proj." in name:
            fused = re.sub(r"[qkv]_proj", "qkv", re.sub("(gate|up)_proj", "gate_up", name))
            matrices.setdefault(fused, []).append(w.shape)
    total = 0
    for parts in matrices.values():
        rows, k = [n for n, _ in parts], parts[0][1]
        blocks = -(-sum(rows) // 32)
        ends_whole = all(n % 32 == 0 for n in rows[:-1])
        shares = ends_whole and all(form.block[0] % 32 == 0 or form.block[0] >= n for n in rows)
        segments = -(-k // (form.block[1] or k))
        sizes = (blocks * 32 * k, blocks * segments * (4 if shares else 128))
        total += sum(-(-size // 64) * 64 for size in sizes)
    return total


@pytest.mark.parametrize("form", FORMS)
def test_codes_stay_codes_in_memory(tmp_path, form):
    """A byte a weight and the scales, whatever the model computes in."""
    model, plain = model_of(tmp_path, FORMS[form])
    expected = packed_bytes(model, FORMS[form])
    for dtype in ("float32", "bfloat16"):
        plan = quire.Engine.plan_memory(model.directory, dtype=dtype)
        with quire.Engine(model.directory, dtype=dtype, kv_bytes=1 << 20) as engine:
            assert engine.info.weight_bytes == plan.weight_bytes
            types = engine.info.weight_types
            assert types["float8_e4m3fn"] == expected
            assert types[dtype] > 0  # the head
    assert plan.weight_bytes < quire.Engine.plan_memory(plain.directory).weight_bytes


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_model_gives_the_same_bits(tmp_path, form):
    """Codes are packed as codes, for each type that it may compute in."""
    model, _ = model_of(tmp_path, FORMS[form])
    packed = quire.pack_model(model.directory, tmp_path / "packed", dtype="float32", threads=1)
    assert np.array_equal(logits(model.directory), logits(packed))
    again = quire.pack_model(packed, tmp_path / "again", dtype="float32", threads=1)
    file = "model.safetensors"
    assert (packed / file).read_bytes() == (again / file).read_bytes()
    narrow = quire.pack_model(model.directory, tmp_path / "narrow", dtype="bfloat16", threads=1)
    given = {"dtype": "bfloat16"}
    assert np.array_equal(logits(model.directory, **given), logits(narrow, **given))


def test_a_packed_model_is_the_same_model(tmp_path):
    """Packing for bfloat16 rounds no codes: stores know the folder as what it was made of."""
    model, _ = model_of(tmp_path, FORMS["blocks"])
    file = model.directory / "model.safetensors"
    tensors = load_file(file)
    narrow = {
        name: t if "_proj." in name else t.to(torch.bfloat16) for name, t in tensors.items()
    }
    save_file(narrow, str(file))
    packed = quire.pack_model(model.directory, tmp_path / "packed", threads=1)
    assert model_identity(packed) == model_identity(model.directory)


def test_a_damaged_packed_model_is_refused(tmp_path):
    model, _ = model_of(tmp_path, FORMS["blocks"])
    packed = quire.pack_model(model.directory, tmp_path / "packed", dtype="float32", threads=1)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".F8_E4M3.scales"))
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, str(file))
    with pytest.raises(quire.CorruptError, match=r"number 0 is nan; a scale is at most 2\^119"):
        logits(packed)
    save_file(tensors | {name: tensors[name][:, :, :0]}, str(file))
    with pytest.raises(quire.CorruptError, match=r"scales\" is F32 .*, config.json asks for"):
        logits(packed)
    save_file({key: t for key, t in tensors.items() if key != name}, str(file))
    with pytest.raises(quire.NotFoundError, match=r"F8_E4M3\.scales"):
        logits(packed)


@pytest.mark.parametrize("form", FORMS)
def test_quantising_takes_the_numbers(tmp_path, monkeypatch, form):
    """The same bytes as of a folder with the numbers in float32, read in parts of other sizes than
    the blocks, and a folder that runs."""
    monkeypatch.setattr(quantizing, "_VALUES_PER_PART", 5000)
    made = []
    for model in model_of(tmp_path, FORMS[form]):
        made.append(tmp_path / f"{model.directory.name}.q8")
        quantize_model(model.directory, made[-1])
    files = [GGUFReader(str(folder / "model.gguf")) for folder in made]
    tensors = [{t.name: (t.tensor_type, t.data.tobytes()) for t in file.tensors} for file in files]
    assert tensors[0] == tensors[1]
    assert np.array_equal(logits(made[0]), logits(made[1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_one_matrix_may_be_plain(tmp_path, dtype):
    """As folders are that leave out matrices by name ("ignore"); they were refused."""
    model, plain = model_of(tmp_path, FORMS["small_blocks"])
    file = model.directory / "model.safetensors"
    stored = load_file(file)
    for name in list(stored):
        if "k_proj" in name or "gate_proj" in name:
            stored.pop(name)
    for name, numbers in plain.weights.items():
        if "k_proj" in name or "gate_proj" in name:
            stored[name] = torch.from_numpy(numbers)
    save_file(stored, str(file))
    ours = logits(model.directory, dtype=dtype)
    assert np.array_equal(ours, logits(plain.directory, dtype=dtype))
    packed = quire.pack_model(model.directory, tmp_path / "packed", dtype=dtype, threads=1)
    assert np.array_equal(ours, logits(packed, dtype=dtype))


def test_quantising_leaves_out_the_scales_of_keys_and_values(tmp_path):
    """Folders that were made for FP8 caches have them; they were refused."""
    model, _ = model_of(tmp_path, FORMS["channel"])
    file = model.directory / "model.safetensors"
    expected = logits(quantize_model(model.directory, tmp_path / "before"))
    layer = "model.layers.0.self_attn"
    names = (f"{layer}.k_scale", f"{layer}.v_proj.v_scale", f"{layer}.k_proj.output_scale")
    save_file(load_file(file) | {name: torch.ones(1) for name in names}, str(file))
    assert np.array_equal(expected, logits(quantize_model(model.directory, tmp_path / "after")))


def test_a_packed_folder_is_not_quantised(tmp_path):
    model, _ = model_of(tmp_path, FORMS["blocks"])
    packed = quire.pack_model(model.directory, tmp_path / "packed", threads=1)
    with pytest.raises(quire.BadArgumentError, match="quantise the folder that it was made of"):
        quantize_model(packed, tmp_path / "made")


def test_what_cannot_be_quantised_is_named(tmp_path):
    model, _ = model_of(tmp_path, FORMS["blocks"])
    file = model.directory / "config.json"
    whole = json.loads(file.read_text())
    for block, message in (
        ([64, 64], "expected are scales of blocks of 64 outputs and 64 inputs"),
        ([128], r"blocks of \[128\]; two sizes are expected"),
    ):
        config = {**whole, "quantization_config": fp8(block)}
        file.write_text(json.dumps(config))
        with pytest.raises(quire.CorruptError, match=message):
            quantize_model(model.directory, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    file.write_text(json.dumps(whole))
    tensors = load_file(model.directory / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if "up_proj.weight_scale" not in name},
        str(model.directory / "model.safetensors"),
    )
    with pytest.raises(quire.NotFoundError, match="up_proj.weight has codes of 8 bits and no"):
        quantize_model(model.directory, tmp_path / "made")


def test_the_scales_are_part_of_what_model_it_is(tmp_path):
    first, _ = model_of(tmp_path / "a", FORMS["channel"])
    second, _ = model_of(tmp_path / "b", FORMS["compressed_blocks"])
    revisions = {model_identity(model.directory)["revision"] for model in (first, second)}
    assert len(revisions) == 2


def test_what_does_not_fit_is_named(tmp_path):
    model, _ = model_of(tmp_path, FORMS["blocks"])
    file = model.directory / "config.json"
    whole = json.loads(file.read_text())
    for change, message in (
        ({"fmt": "e5m2"}, r'fmt: "e5m2" is not read; read are e4m3'),
        ({"weight_block_size": [64, 64]}, "blocks of 64 outputs and 64 inputs"),
        ({"weight_block_size": None}, "expected are one scale, or one of each output"),
    ):
        config = {**whole, "quantization_config": {**fp8([128, 128]), **change}}
        file.write_text(json.dumps(config))
        with pytest.raises(quire.QuireError, match=message):
            quire.Engine(model.directory, kv_bytes=1 << 20)
    del whole["quantization_config"]
    file.write_text(json.dumps(whole))
    with pytest.raises(quire.BadArgumentError, match="is stored as F8_E4M3"):
        quire.Engine(model.directory, kv_bytes=1 << 20)


def test_random_damage_gives_answers_or_errors(tmp_path):
    """Flipped bytes of the header, and of codes and scales."""
    model, _ = model_of(tmp_path, FORMS["small_blocks"])
    path = model.directory / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(7)
    refused = 0
    for index in range(60):
        damaged = bytearray(whole)
        begin, end = (8, header_end) if index % 2 else (header_end, len(whole))
        for _ in range(3):
            damaged[generator.randrange(begin, end)] = generator.randrange(32, 127)
        path.write_bytes(damaged)
        try:
            logits(model.directory)
        except quire.QuireError:
            refused += 1
    assert refused > 20
