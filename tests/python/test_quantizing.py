"""`quantize_model`: codes of each tensor, and damaged folders, which are refused by name."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import quire
from gguf import GGMLQuantizationType, GGUFReader, quants
from program import run
from quire._q4k import quantize_rows
from quire.importer.safetensors_writer import Declaration, SafetensorsWriter
from quire.quantizing import quantize_model

HIDDEN, INNER, HEADS, VOCAB = 256, 512, 4, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def layer_shapes(layer: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of what a layer has beside its mixer and its MLP."""
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"model.layers.{layer}.{name}.weight": (hidden,) for name in names}


def tensors(hidden: int = HIDDEN) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        f"{layer}.self_attn.rotary_emb.inv_freq": (hidden // HEADS // 2,),
        **{f"{layer}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": (INNER, hidden),
        f"{layer}.mlp.up_proj.weight": (INNER, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, INNER),
        **layer_shapes(0, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
    }
    return {
        name: generator.standard_normal(shape, np.float32) / 8 for name, shape in shapes.items()
    }


def folder(path: Path, config: dict[str, object] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    values = tensors()
    declarations = [Declaration(name, "F32", value.shape) for name, value in values.items()]
    with SafetensorsWriter(str(path / "model.safetensors"), declarations) as writer:
        for value in values.values():
            writer.write(value)
    return path


def stored(made: Path) -> dict[str, object]:
    (file,) = made.glob("*.gguf")
    return {tensor.name: tensor for tensor in GGUFReader(str(file)).tensors}


def error_of(given: np.ndarray, read: np.ndarray) -> float:
    return float(np.sqrt(np.square(given - read).mean() / np.square(given).mean()))


def test_q4k_is_nearer_to_the_weights_than_q4(tmp_path):
    made = quantize_model(folder(tmp_path / "source"), tmp_path / "made", weights="q4k")
    given = tensors()["model.layers.0.mlp.down_proj.weight"]
    tensor = stored(made)["blk.0.ffn_down.weight"]
    assert tensor.tensor_type == GGMLQuantizationType.Q4_K
    ours = error_of(given, quants.dequantize(tensor.data, tensor.tensor_type))
    plain = GGMLQuantizationType.Q4_0
    theirs = error_of(given, quants.dequantize(quants.quantize(given, plain), plain))
    assert ours < 0.9 * theirs
    # Heads lie as rotary pairs: rows 0 and 32 of the first one are its first two.
    rotated = stored(made)["blk.0.attn_q.weight"]
    values = quants.dequantize(rotated.data, rotated.tensor_type)
    queries = tensors()["model.layers.0.self_attn.q_proj.weight"]
    assert error_of(queries[[0, 32, 1, 33]], values[:4]) < 0.1


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1000.0])
def test_q4k_takes_rows_of_any_sign_and_size(scale):
    generator = np.random.default_rng(1)
    values = generator.standard_normal((6, 512)).astype(np.float32)
    values[0], values[1], values[2] = 0, np.abs(values[1]), -np.abs(values[2])
    values[3], values[4] = 0.75, -0.75
    values *= np.float32(scale)
    read = quants.dequantize(quantize_rows(values), GGMLQuantizationType.Q4_K)
    assert np.isfinite(read).all()
    # Half a step of a grid over the range of the group, and what 6 bits of scale and least cost.
    widest = np.abs(values).max(initial=0)
    assert np.abs(read - values).max() <= 0.15 * widest


def test_weights_beyond_float16_scales_are_refused(tmp_path, monkeypatch):
    values = tensors()
    values["lm_head.weight"][3, 5] = 1e6
    monkeypatch.setitem(globals(), "tensors", lambda: values)
    with pytest.raises(quire.BadArgumentError, match="lm_head.weight holds 1e"):
        quantize_model(folder(tmp_path / "source"), tmp_path / "made")


def test_embedding_and_head_have_kinds_of_their_own(tmp_path):
    made = quantize_model(
        folder(tmp_path / "source"), tmp_path / "made", weights="q4", embeddings="q4k", head="q8"
    )
    kinds = {name: tensor.tensor_type.name for name, tensor in stored(made).items()}
    assert kinds == {
        "token_embd.weight": "Q4_K",
        **{f"blk.0.attn_{part}.weight": "Q4_0" for part in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{part}.weight": "Q4_0" for part in ("gate", "up", "down")},
        "blk.0.attn_norm.weight": "F32",
        "blk.0.ffn_norm.weight": "F32",
        "output_norm.weight": "F32",
        "output.weight": "Q8_0",
    }


def test_a_head_that_is_the_embedding_has_no_kind_of_its_own(tmp_path):
    source = folder(tmp_path / "source", {"tie_word_embeddings": True})
    with pytest.raises(quire.BadArgumentError, match="the head is the token embedding"):
        quantize_model(source, tmp_path / "made", embeddings="q4", head="q8")
    assert "output.weight" not in stored(quantize_model(source, tmp_path / "made", head="q8"))


@pytest.mark.parametrize(
    "config, message",
    [
        ("[1]", "no JSON object"),
        ('{"architectures": [[]]}', "a list of names"),
        ("{", "is no JSON"),
        (json.dumps(CONFIG | {"num_attention_heads": "4"}), "num_attention_heads is '4'"),
        (json.dumps(CONFIG | {"num_attention_heads": 7}), "no 7 heads of pairs"),
        (json.dumps({"architectures": ["LlamaForCausalLM"]}), "num_attention_heads is None"),
    ],
)
def test_a_damaged_configuration_is_refused(tmp_path, config, message):
    source = folder(tmp_path / "source")
    (source / "config.json").write_text(config)
    with pytest.raises(quire.CorruptError, match=message):
        quantize_model(source, tmp_path / "made")


def test_what_is_no_model_folder_is_refused_by_name(tmp_path):
    with pytest.raises(quire.NotFoundError, match="absent: there is no such folder"):
        quantize_model(tmp_path / "absent", tmp_path / "made")
    source = folder(tmp_path / "source")
    (source / "config.json").unlink()
    with pytest.raises(quire.NotFoundError, match="config.json: there is no such file"):
        quantize_model(source, tmp_path / "made")


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, dict[str, object]] = json.loads(data[8 : 8 + length])
    return header


def with_header(data: bytes, header: object) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data[:5], "fewer than a header's length"),
        (lambda data: struct.pack("<Q", 1 << 62) + data[8:], "says that its header has"),
        (lambda data: data[:-1], f"tensor {HEAD} lies at"),
        (lambda data: with_header(data, [1]), "no JSON object"),
        (lambda data: data[:8] + b"}" + data[9:], "the header is no JSON"),
        (lambda data: with_header(data, {HEAD: 1}), f"tensor {HEAD} is described by no JSON"),
        (lambda data: with_header(data, {HEAD: {"dtype": 5}}), f"tensor {HEAD} has no dtype"),
        (
            lambda data: with_header(data, {HEAD: header_of(data)[HEAD] | {"shape": [-1, 2]}}),
            f'tensor {HEAD}: "shape"',
        ),
        (
            lambda data: with_header(data, {HEAD: header_of(data)[HEAD] | {"shape": [2**40, 256]}}),
            f"tensor {HEAD} of F32 and shape",
        ),
        (
            lambda data: with_header(data, {HEAD: header_of(data)[HEAD] | {"data_offsets": [8]}}),
            f'tensor {HEAD}: "shape"',
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change, message):
    source = folder(tmp_path / "source")
    file = source / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(quire.CorruptError, match=message) as caught:
        quantize_model(source, tmp_path / "made")
    assert str(file) in str(caught.value)
    assert not (tmp_path / "made").exists()


def with_others(source: Path) -> None:
    """Weights that engines do not read: of other numbers, and of other names."""
    name = "model.norm.weight"
    for file, tensor in (("old.safetensors", name), ("consolidated.safetensors", "norm.weights")):
        with SafetensorsWriter(
            str(source / file), [Declaration(tensor, "F32", (HIDDEN,))]
        ) as writer:
            writer.write(np.full(HIDDEN, 7, np.float32))


@pytest.mark.parametrize("index", [False, True])
def test_files_that_engines_do_not_read_are_left_alone(tmp_path, index):
    """Of a tensor in two files the last one was once taken, whichever engines read."""
    source = folder(tmp_path / "source")
    if index:
        (source / "model.safetensors").rename(source / "1.safetensors")
        names = dict.fromkeys(tensors(), "1.safetensors")
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with_others(source)
    made = quantize_model(source, tmp_path / "made")
    norm = stored(made)["output_norm.weight"]
    assert np.array_equal(norm.data, tensors()["model.norm.weight"])


@pytest.mark.parametrize(
    "index",
    [b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}',
     b'{"weight_map": {"a": "../1.safetensors"}}', b'{"weight_map": {"a": "model.bin"}}'],
)
def test_a_damaged_index_is_refused_by_name(tmp_path, index):
    source = folder(tmp_path / "source")
    (source / "model.safetensors").rename(source / "1.safetensors")
    file = source / "model.safetensors.index.json"
    file.write_bytes(index)
    with pytest.raises(quire.CorruptError, match="weight_map names no") as caught:
        quantize_model(source, tmp_path / "made")
    assert str(file) in str(caught.value)


def in_shards(source: Path, shards: dict[str, dict[str, np.ndarray]]) -> None:
    """The tensors of each shard; the index names the first shard that has a tensor."""
    (source / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for name, values in shards.items():
        index = dict.fromkeys(values, name) | index
        declarations = [Declaration(key, "F32", value.shape) for key, value in values.items()]
        with SafetensorsWriter(str(source / name), declarations) as writer:
            for value in values.values():
                writer.write(value)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """The numbers of the last one were taken; engines refuse the folder."""
    source = folder(tmp_path / "source")
    values = tensors()
    last = {"lm_head.weight": values.pop("lm_head.weight")}
    again = {"model.norm.weight": 2 * values["model.norm.weight"]}
    in_shards(source, {"1.safetensors": values, "2.safetensors": last | again})
    with pytest.raises(quire.CorruptError):
        quire.Engine.plan_memory(source)
    with pytest.raises(quire.CorruptError, match=r"2.safetensors: .*model.norm.weight.* 1.safet"):
        quantize_model(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_folder_that_engines_do_not_read_is_quantised_if_it_is_sound(tmp_path):
    """Its files have other names, and no index."""
    source = folder(tmp_path / "source")
    expected = quantize_model(source, tmp_path / "expected") / "model.gguf"
    (source / "model.safetensors").rename(source / "weights.safetensors")
    with pytest.raises(quire.NotFoundError):
        quire.Engine.plan_memory(source)
    made = quantize_model(source, tmp_path / "made") / "model.gguf"
    assert made.read_bytes() == expected.read_bytes()
    with_others(source)
    with pytest.raises(quire.CorruptError, match="tensor model.norm.weight stands in old.safeten"):
        quantize_model(source, tmp_path / "other")


def test_a_shard_that_is_missing_is_named(tmp_path):
    """The error was Python's own."""
    source = folder(tmp_path / "source")
    values = list(tensors().items())
    in_shards(source, {"1.safetensors": dict(values[:4]), "2.safetensors": dict(values[4:])})
    quantize_model(source, tmp_path / "whole")
    (source / "2.safetensors").unlink()
    with pytest.raises(quire.NotFoundError, match="2.safetensors: .* model.safetensors.index.json"):
        quantize_model(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "model.layers.0.self_attn.v_proj", "lm_head", "model.norm"]
)
def test_what_engines_miss_is_refused(tmp_path, monkeypatch, name):
    """A folder was made that no engine takes."""
    values = tensors()
    del values[f"{name}.weight"]
    monkeypatch.setitem(globals(), "tensors", lambda: values)
    with pytest.raises(quire.NotFoundError, match=f"{name}.weight"):
        quantize_model(folder(tmp_path / "source"), tmp_path / "made")
    assert not (tmp_path / "made").exists()


@contextlib.contextmanager
def file_size_limit(byte_count: int):
    """The system writes no more than this into a file, as a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte_count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_disk_does_not_take_is_named(tmp_path, capsys):
    """The message was "File too large", of no file."""
    source = folder(tmp_path / "source")
    out = tmp_path / "made"
    for limit, name in ((0, "model.gguf"), (1000, "model.gguf"), (100_000, "model.gguf")):
        with file_size_limit(limit), pytest.raises(quire.IoError) as caught:
            quantize_model(source, out)
        assert str(caught.value) == f"{out / name}: cannot be written: File too large"
    (source / "large.json").write_bytes(bytes(3 << 20))
    with file_size_limit(2 << 20):
        code, text, err = run(capsys, "quantize", str(source), str(out))
    assert (code, text) == (1, "")
    assert f"quire: error: {out / 'large.json'}: cannot be written: File too large\n" in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def quantize_whole_or_not_at_all(source, made):
    try:
        quantize_model(source, made)
    except quire.QuireError:
        assert not made.exists()
    else:
        assert made.is_dir()


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_an_error_of_ours_or_none(tmp_path, seed):
    source = folder(tmp_path / "source")
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    generator = random.Random(seed)
    (length,) = struct.unpack("<Q", data[:8])
    for _ in range(generator.randint(1, 4)):
        data[generator.randrange(8 + length)] = generator.randrange(256)
    file.write_bytes(data)
    quantize_whole_or_not_at_all(source, tmp_path / "made")


def test_rows_of_no_whole_blocks_are_refused(tmp_path, monkeypatch):
    values = tensors(96)
    monkeypatch.setitem(globals(), "tensors", lambda: values)
    source = folder(tmp_path / "source", {"hidden_size": 96})
    with pytest.raises(quire.BadArgumentError, match="no whole blocks of 256; q8 and q4"):
        quantize_model(source, tmp_path / "made", embeddings="q4k")
    quantize_model(source, tmp_path / "made", embeddings="q4")


EXPERTS = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}


def of_experts(layers: int = 2) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(4)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, 64),
        "model.norm.weight": (64,),
    }
    for layer in range(layers):
        mlp, attention = f"model.layers.{layer}.mlp", f"model.layers.{layer}.self_attn"
        shapes |= layer_shapes(layer, 64)
        shapes |= {f"{attention}.{part}_proj.weight": (64, 64) for part in "qkvo"}
        shapes |= {f"{attention}.{part}_norm.weight": (16,) for part in "qk"}
        shapes[f"{mlp}.gate.weight"] = (3, 64)
        for expert in range(3):
            for part, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
                shapes[f"{mlp}.experts.{expert}.{part}_proj.weight"] = shape
    return {
        name: generator.standard_normal(shape, np.float32) / 8 for name, shape in shapes.items()
    }


def write_folder(path: Path, values: dict[str, np.ndarray], config: dict[str, object]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    declarations = [Declaration(name, "F32", value.shape) for name, value in values.items()]
    with SafetensorsWriter(str(path / "model.safetensors"), declarations) as writer:
        for value in values.values():
            writer.write(value)
    return path


def test_experts_lie_one_after_the_other_whatever_the_order_of_the_source(tmp_path):
    values = of_experts()
    shuffled = list(values)
    random.Random(1).shuffle(shuffled)
    source = write_folder(tmp_path / "source", {name: values[name] for name in shuffled}, EXPERTS)
    found = stored(quantize_model(source, tmp_path / "made"))
    assert {name for name in found if ".ffn_" in name} == {
        f"blk.{layer}.ffn_{part}.weight"
        for layer in range(2)
        for part in ("gate_inp", "gate_exps", "up_exps", "down_exps", "norm")
    }
    downs = found["blk.1.ffn_down_exps.weight"]
    assert downs.tensor_type == GGMLQuantizationType.Q8_0
    given = np.stack(
        [values[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"] for expert in range(3)]
    )
    read = quants.dequantize(downs.data, downs.tensor_type)
    assert read.shape == given.shape
    assert np.array_equal(
        read, quants.dequantize(quants.quantize(given, downs.tensor_type), downs.tensor_type)
    )
    router = found["blk.0.ffn_gate_inp.weight"]
    assert np.array_equal(router.data, values["model.layers.0.mlp.gate.weight"])


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
    """DeepSeek-V3 has one behind the last layer, with tensors that no decoder has."""
    values = of_experts(layers=3) | {"model.layers.2.eh_proj.weight": np.ones((3, 5), np.float32)}
    made = quantize_model(write_folder(tmp_path / "source", values, EXPERTS), tmp_path / "made")
    assert not [name for name in stored(made) if name.startswith("blk.2")]


HYBRID = {
    **CONFIG,
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "mlp_only_layers": [0],
    "tie_word_embeddings": True,
}
LINEAR = "model.layers.0.linear_attn"


def of_recurrence() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, 64),
        "model.norm.weight": (64,),
        f"{LINEAR}.A_log": (4,),
        f"{LINEAR}.dt_bias": (4,),
        f"{LINEAR}.conv1d.weight": (96, 1, 4),
        f"{LINEAR}.norm.weight": (8,),
        f"{LINEAR}.in_proj_qkvz.weight": (128, 64),
        f"{LINEAR}.in_proj_ba.weight": (8, 64),
        f"{LINEAR}.out_proj.weight": (64, 32),
        "model.layers.0.mlp.gate_proj.weight": (32, 64),
        "model.layers.0.mlp.up_proj.weight": (32, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 32),
        **layer_shapes(0, 64),
    }
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def test_recurrent_layers_keep_their_small_tensors(tmp_path):
    """Layers that predict several tokens have a name of their own, and are left out."""
    values = of_recurrence()
    whole = values | {"mtp.fc.weight": np.ones((3, 5), np.float32)}
    source = write_folder(tmp_path / "source", whole, HYBRID)
    found = stored(quantize_model(source, tmp_path / "made", weights="q4"))
    types = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert types == {
        "token_embd.weight": "Q8_0",
        "output_norm.weight": "F32",
        "blk.0.ssm_a": "F32",
        "blk.0.ssm_dt.bias": "F32",
        "blk.0.ssm_conv1d.weight": "F32",
        "blk.0.ssm_norm.weight": "F32",
        "blk.0.ssm_in.weight": "Q4_0",
        "blk.0.ssm_ba.weight": "F32",
        "blk.0.ssm_out.weight": "Q4_0",
        **{f"blk.0.ffn_{part}.weight": "Q4_0" for part in ("gate", "up", "down")},
        "blk.0.attn_norm.weight": "F32",
        "blk.0.post_attention_norm.weight": "F32",
    }
    expected = {
        "output_norm.weight": 1 + values["model.norm.weight"],
        "blk.0.ssm_a": -np.exp(values[f"{LINEAR}.A_log"].astype(float)).astype(np.float32),
        "blk.0.ssm_norm.weight": values[f"{LINEAR}.norm.weight"],
        "blk.0.ssm_conv1d.weight": values[f"{LINEAR}.conv1d.weight"][:, 0],
        "blk.0.ssm_ba.weight": values[f"{LINEAR}.in_proj_ba.weight"],
    }
    for name, value in expected.items():
        assert np.array_equal(found[name].data, value), name


@pytest.mark.parametrize("shape", [(96, 2, 4), (96, 4), (96,)])
def test_a_convolution_of_another_shape_is_refused(tmp_path, shape):
    values = of_recurrence() | {f"{LINEAR}.conv1d.weight": np.ones(shape, np.float32)}
    source = write_folder(tmp_path / "source", values, HYBRID)
    with pytest.raises(quire.CorruptError, match=r"conv1d.weight has the shape .* not \[channels"):
        quantize_model(source, tmp_path / "made")


MLP = "model.layers.1.mlp"
ONE = f"{MLP}.experts.1.up_proj.weight"


def without(*names: str):
    return lambda values: {name: value for name, value in values.items() if name not in names}


def instead(name: str, other: str):
    return lambda values: {other if old == name else old: value for old, value in values.items()}


@pytest.mark.parametrize(
    "change, config, error, message",
    [
        (without(ONE), {}, quire.CorruptError, "experts.2.up_proj.weight, and none of expert 1"),
        (
            without(ONE.replace(".1.up", ".2.up")),
            {},
            quire.CorruptError,
            "experts.1.up_proj.weight is the last of 2 experts; .*config.json says 3",
        ),
        (
            without(ONE.replace(".1.up", ".2.up")),
            {"num_experts": None},
            quire.CorruptError,
            "experts.1.up_proj.weight is the last of 2 experts; .*weight says 3",
        ),
        (lambda values: values, {"num_experts": 4}, quire.CorruptError, "last of 3.* says 4"),
        (lambda values: values, {"num_experts": "3"}, quire.CorruptError, "last of 3.* says '3'"),
        (
            lambda values: values | {ONE: np.ones((32, 32), np.float32)},
            {},
            quire.CorruptError,
            r"experts.1.up_proj.weight has the shape \[32, 32\], .*\[32, 64\]; experts must be",
        ),
        (
            instead(ONE, ONE.replace("experts.1", "experts.01")),
            {},
            quire.BadArgumentError,
            "experts.01.up_proj.weight of F32 cannot be quantised",
        ),
        (
            instead(ONE, ONE.replace("experts.1", "experts." + "9" * 5000)),
            {},
            quire.BadArgumentError,
            "cannot be quantised",
        ),
        (
            lambda values: values | {ONE.replace("weight", "bias"): np.ones(32, np.float32)},
            {},
            quire.BadArgumentError,
            "experts.1.up_proj.bias of F32 cannot be quantised",
        ),
        (
            lambda values: values | {f"{MLP}.experts.gate_up_proj": np.ones((3, 64), np.float32)},
            {},
            quire.BadArgumentError,
            "experts.gate_up_proj of F32 cannot be quantised",
        ),
        (
            lambda values: values
            | {"x.norm.weight": np.ones(64, np.float32)},
            {},
            quire.CorruptError,
            "model.norm.weight and x.norm.weight stand for the same tensor",
        ),
    ],
)
def test_wrong_experts_are_refused_by_name(tmp_path, change, config, error, message):
    source = write_folder(tmp_path / "source", change(of_experts()), EXPERTS | config)
    with pytest.raises(error, match=message):
        quantize_model(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_of_experts_is_an_error_of_ours_or_none(tmp_path, seed):
    source = write_folder(tmp_path / "source", of_experts(), EXPERTS)
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    generator = random.Random(seed)
    (length,) = struct.unpack("<Q", data[:8])
    for _ in range(generator.randint(1, 4)):
        data[8 + generator.randrange(length)] = generator.choice(b'0123456789."[],{}ax')
    file.write_bytes(data)
    quantize_whole_or_not_at_all(source, tmp_path / "made")
