"""GGUF files as models: weights stay as they lie in the file, and logits are exact in the same
sense as those of any other model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import quire
import tiny_gguf
from gguf import GGMLQuantizationType, GGUFReader, RopeScalingType, quants
from program import run
from quire import importer
from quire.gguf_model import model_folder
from quire.identity import model_identity
from quire.quantizing import quantize_model
from safetensors.numpy import load_file, save_file

QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"]
BLOCKS_OF_256 = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]
OF_EXPERTS = ["mixtral", "qwen2moe", "qwen3moe", "deepseek2", "deepseek3"]
OTHERS = ["phi3", *OF_EXPERTS]
TEXT = "the thing in there 12"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "cache"))


def checkpoint(arch: str = "llama", tied: bool = True) -> dict[str, np.ndarray]:
    weights = tiny_gguf.random_weights(5, tiny_gguf.vocab_size(), arch, tied)
    return {
        name: value / 8 if value.ndim == 2 else 1 + value / 16 for name, value in weights.items()
    }


def write(path: Path, kind: str, arch: str = "llama", tied: bool = True, **options) -> Path:
    """A small model, its values such that hidden states stay near 1."""
    scaled = checkpoint(arch, tied)
    kind = GGMLQuantizationType[kind]
    tiny_gguf.write_model(path, scaled, arch=arch, matrix_type=kind, **options)
    return path


def logits(model: Path, **options) -> np.ndarray:
    given = {"dtype": "float32", "kv_dtype": "float32", "threads": 1, "kv_bytes": 1 << 20}
    with quire.Engine(model, **{**given, **options}) as engine:
        return engine.logits(TEXT)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES + OTHERS)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_weights_give_the_bits_of_an_import(tmp_path, arch, tied, kind):
    file = write(tmp_path / "model.gguf", kind, arch, tied)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    assert np.array_equal(logits(file), logits(folder))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_near_the_import(tmp_path, arch, tied, kind):
    """The weights are the same numbers; activations are quantised in groups of 32."""
    file = write(tmp_path / "model.gguf", kind, arch, tied)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    ours, theirs = logits(file), logits(folder)
    assert np.abs(ours - theirs).mean() < 0.02 * theirs.std()
    assert not np.array_equal(ours, theirs)
    assert np.array_equal(logits(file, activations="float32"), theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES + OTHERS)
def test_bfloat16_rows_give_the_bits_of_bfloat16_weights(tmp_path, arch, tied):
    """The numbers of this format are bfloat16 numbers, also those of the embedding."""
    file = write(tmp_path / "model.gguf", "MXFP4", arch, tied)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    types = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    theirs = logits(folder, **types)
    assert np.array_equal(logits(file, activations="bfloat16", **types), theirs)
    assert np.array_equal(logits(file, activations="bf16", threads=2, **types), theirs)
    assert not np.array_equal(logits(file, **types), theirs)


def of_all_experts(writer) -> None:
    """Every token goes to all, so that none is on the border between two of them."""
    for name, value in (("expert_used_count", tiny_gguf.EXPERTS), ("expert_group_used_count", 2)):
        if f"{writer.arch}.{name}" in writer.kv_data[0]:
            writer.kv_data[0][f"{writer.arch}.{name}"].value = value


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "MXFP4"])
def test_fused_matrices_and_experts_stay_quantised(tmp_path, arch, kind):
    file = write(tmp_path / "model.gguf", kind, arch, tied=False, change=of_all_experts)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    ours, theirs = logits(file), logits(folder)
    assert np.abs(ours - theirs).mean() < 0.02 * theirs.std()
    assert not np.array_equal(ours, theirs)
    assert np.array_equal(logits(file, activations="float32"), theirs)
    plan = quire.Engine.plan_memory(file, dtype="float32", threads=1)
    # What is not quantised: norms, routers, and matrices of latents, which are widened.
    widened = 4 * sum(value.size for name, value in checkpoint(arch).items() if "kv_b" in name)
    assert plan.weight_bytes < file.stat().st_size + widened + (64 << 10)


@pytest.mark.parametrize("arch", OF_EXPERTS)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_fused_experts_give_the_bits_of_separate_ones(tmp_path, arch, kind):
    separate = write(tmp_path / "separate.gguf", kind, arch)
    fused = write(tmp_path / "fused.gguf", kind, arch, fused=True)
    expected = logits(separate)
    assert np.array_equal(expected, logits(fused))
    packed = quire.pack_model(model_folder(fused), tmp_path / "packed", dtype="float32")
    assert np.array_equal(expected, logits(packed))


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_give_a_row_the_same_bits_in_any_batch(tmp_path, arch, kind):
    """Rows that chose an expert are computed together."""
    file = write(tmp_path / "model.gguf", kind, arch)
    expected = logits(file)
    assert np.array_equal(expected, logits(file, threads=2))
    assert np.array_equal(expected, logits(file, prefill_chunk=3, page_size=4))
    for path in quire.kernel_paths():
        assert np.array_equal(expected, logits(file, kernel_path=path)), path
    packed = quire.pack_model(model_folder(file), tmp_path / "packed", dtype="float32")
    assert np.array_equal(expected, logits(packed))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", [*OTHERS, "mamba2"])
def test_an_import_is_what_transformers_computes(tmp_path, arch, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    file = write(tmp_path / "model.gguf", "F32", arch, tied)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    assert type(theirs).__name__ == json.loads((folder / "config.json").read_text())[
        "architectures"
    ][0]
    with quire.Engine(file, dtype="float32", kv_dtype="float32", kv_bytes=1 << 20) as engine:
        ids = engine.tokenizer.encode(TEXT)
        ours = engine.logits(ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_mamba2_is_a_model(tmp_path, kind):
    """Rates of decay are taken as they lie; an import has their logarithms, rounded once."""
    file = write(tmp_path / "model.gguf", kind, "mamba2", tied=kind == "F32")
    expected = logits(file)
    assert np.array_equal(expected, logits(file, threads=2))
    assert np.array_equal(expected, logits(file, prefill_chunk=3))
    packed = quire.pack_model(model_folder(file), tmp_path / "packed", dtype="float32")
    assert np.array_equal(expected, logits(packed))
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    theirs = logits(folder)
    if kind == "F32":
        np.testing.assert_allclose(expected, theirs, atol=1e-4, rtol=1e-4)
    else:
        assert np.abs(expected - theirs).mean() < 0.02 * theirs.std()


def test_a_state_that_grows_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    weights = checkpoint("mamba2")
    weights["backbone.layers.1.mixer.A_log"][3] = np.nan
    tiny_gguf.write_model(file, weights, "mamba2")
    with pytest.raises(quire.CorruptError, match="mixer.A has the rate"):
        logits(file)
    with pytest.raises(importer.GgufError, match='"blk.1.ssm_a": holds a rate that is not below'):
        importer.import_gguf(file, tmp_path / "imported", dtype="float32")


def test_yarn_of_deepseek_is_that_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def change(writer):
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_yarn_log_mul(0.0707)

    file = write(tmp_path / "m.gguf", "F32", "deepseek2", change=change)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (0.707, 0.707)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with quire.Engine(file, dtype="float32", kv_dtype="float32", kv_bytes=1 << 20) as engine:
        ids = engine.tokenizer.encode(TEXT)
        ours = engine.logits(ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("original", [8, 64])
def test_long_rope_of_phi3_is_that_of_transformers(tmp_path, original):
    """The text has more tokens than the one, fewer than the other; a part of a head is turned."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pairs = 4  # of 16 dimensions

    def change(writer):
        writer.add_rope_dimension_count(2 * pairs)
        writer.add_sliding_window(9)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(1.25)

    factors = [
        ("rope_factors_long.weight", np.linspace(1.5, 9, pairs, dtype=np.float32)),
        ("rope_factors_short.weight", np.linspace(1, 1.3, pairs, dtype=np.float32)),
    ]
    file = write(tmp_path / "m.gguf", "F32", "phi3", change=change, extra_tensors=factors)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with quire.Engine(file, dtype="float32", kv_dtype="float32", kv_bytes=1 << 20) as engine:
        ids = engine.tokenizer.encode(TEXT)
        ours = engine.logits(ids)
    assert 9 < len(ids) < 64  # the window too
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all matrices have 256 inputs."""
    for name, size in {"HIDDEN": 256, "INNER": 256, "HEADS": 16}.items():
        monkeypatch.setattr(tiny_gguf, name, size)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_experts_in_blocks_of_256_are_near_the_import(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tiny_gguf, "EXPERT_INNER", 256)
    file = write(tmp_path / "model.gguf", kind, "qwen3moe", change=of_all_experts)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    ours, theirs = logits(file), logits(folder)
    assert np.abs(ours - theirs).mean() < 0.02 * theirs.std()
    assert not np.array_equal(ours, theirs)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("kind", BLOCKS_OF_256)
def test_quantised_weights_in_blocks_of_256_are_near_the_import(tmp_path, kind):
    """The gguf package's own reader widens the weights of the import."""
    file = write(tmp_path / "model.gguf", kind)
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    ours, theirs = logits(file), logits(folder)
    assert np.abs(ours - theirs).mean() < 0.02 * theirs.std()
    assert not np.array_equal(ours, theirs)
    assert np.array_equal(logits(file, activations="float32"), theirs)


@pytest.mark.parametrize("plain", ["q_proj", "k_proj", "v_proj", "up_proj"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # with biases
def test_parts_of_one_matrix_may_be_plain(tmp_path, arch, plain):
    """Some quantisers leave a few matrices as they are; such files were refused."""
    scaled = checkpoint(arch)
    for name, kind in (("mixed", "BF16"), ("all", "Q8_0")):
        tiny_gguf.write_model(
            tmp_path / f"{name}.gguf",
            scaled,
            arch=arch,
            matrix_type=GGMLQuantizationType.Q8_0,
            other_types={plain: GGMLQuantizationType[kind]},
        )
    file = tmp_path / "mixed.gguf"
    folder = importer.import_gguf(file, tmp_path / "imported", dtype="float32")
    ours, theirs = logits(file), logits(folder)
    assert np.abs(ours - theirs).mean() < 0.02 * theirs.std()
    assert not np.array_equal(ours, logits(tmp_path / "all.gguf"))
    assert np.array_equal(logits(file, activations="float32"), theirs)
    assert np.array_equal(ours, logits(file, threads=2, prefill_chunk=3, page_size=4))
    packed = quire.pack_model(model_folder(file), tmp_path / "packed", dtype="float32")
    assert np.array_equal(ours, logits(packed))
    plans = [quire.Engine.plan_memory(model, dtype="float32") for model in (file, packed)]
    assert plans[0].weight_bytes == plans[1].weight_bytes
    again = quire.pack_model(packed, tmp_path / "again", dtype="float32")
    assert all(
        (packed / name).read_bytes() == (again / name).read_bytes()
        for name in ("model.safetensors", "config.json")
    )


@pytest.mark.parametrize("kind", QUANTISED)
def test_logits_do_not_depend_on_cuts_threads_or_the_path(tmp_path, kind):
    file = write(tmp_path / "model.gguf", kind)
    expected = logits(file)
    assert np.array_equal(expected, logits(file, threads=2))
    assert np.array_equal(expected, logits(file, prefill_chunk=3, page_size=4))
    for path in quire.kernel_paths():
        assert np.array_equal(expected, logits(file, kernel_path=path)), path


@pytest.mark.parametrize("kind", QUANTISED)
def test_requests_side_by_side_answer_as_alone(tmp_path, kind):
    file = write(tmp_path / "model.gguf", kind)
    prompts = ["the", "in there 12 12", "abc abc abc", "her"]
    with quire.Engine(file, threads=1, kv_bytes=1 << 20) as engine:
        together = engine.generate(prompts, max_tokens=12)
        alone = [engine.generate(prompt, max_tokens=12) for prompt in prompts]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


def test_the_folder_holds_a_link_and_is_made_once(tmp_path):
    file = write(tmp_path / "model.gguf", "Q8_0")
    folder = model_folder(file)
    assert (folder / "model.gguf").resolve() == file.resolve()
    made = (folder / "config.json").stat().st_mtime_ns
    assert model_folder(file) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert model_folder(folder) == folder
    write(file, "Q4_0")
    assert model_folder(file) != folder


def test_what_engines_do_not_read_is_not_the_model(tmp_path):
    """A safetensors file beside the GGUF file once stood for it: KV of other weights would have
    been taken."""
    folders = []
    for kind in ("Q8_0", "Q4_0"):
        folder = tmp_path / kind
        shutil.copytree(model_folder(write(tmp_path / f"{kind}.gguf", kind)), folder, symlinks=True)
        (folder / "adapter.safetensors").write_bytes(b"of something else")
        folders.append(folder)
    first, second = (model_identity(folder)["revision"] for folder in folders)
    assert first != second


def test_another_quantisation_is_another_model(tmp_path):
    folders = [model_folder(write(tmp_path / f"{kind}.gguf", kind)) for kind in QUANTISED]
    revisions = {model_identity(folder)["revision"] for folder in folders}
    assert len(revisions) == len(QUANTISED)
    sizes = [quire.Engine.plan_memory(folder, threads=1).weight_bytes for folder in folders]
    assert sizes[1] < sizes[2] < sizes[3] < sizes[4] < sizes[0]


@pytest.mark.usefixtures("wide")
def test_what_is_not_taken_is_refused_by_name(tmp_path):
    file = write(tmp_path / "model.gguf", "TQ2_0")
    with pytest.raises(
        quire.BadArgumentError, match="embed_tokens.*stored as TQ2_0; .*Q4_K.*quire import"
    ):
        logits(file)


def test_names_that_cannot_stand_around_a_text_are_damage(tmp_path, capsys):
    """The engine raised what the package of tokenizers does, the program showed a traceback."""

    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[1] = "a:b"
        writer.add_add_bos_token(True)

    file = tmp_path / "model.gguf"
    tiny_gguf.write_model(file, checkpoint(), change=change)
    with pytest.raises(quire.CorruptError, match="the token 'a:b' cannot stand around a text"):
        quire.Engine(file)
    code, out, error = run(capsys, "import", str(file), str(tmp_path / "made"))
    assert (code, out) == (1, "") and error.count("\n") == 1 and str(file) in error


def test_a_damaged_file_is_refused(tmp_path):
    file = write(tmp_path / "model.gguf", "Q8_0")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(quire.CorruptError, match=r"model\.gguf"):
        logits(file)
    file.write_bytes(whole)
    folder = model_folder(file)
    file.write_bytes(whole[:-4096])  # after the folder was made: the library looks again
    with pytest.raises(quire.CorruptError, match="the file has"):
        logits(folder)


@pytest.mark.parametrize("arch", tiny_gguf.GEMMA)
def test_gemma_is_what_transformers_computes_with_the_checkpoint(tmp_path, arch):
    """The file is made from a checkpoint, whose norms are one smaller than the file's."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    file = write(tmp_path / "model.gguf", "F32", arch)
    config = json.loads((model_folder(file) / "config.json").read_text())
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (6, 16)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model_folder(file)), attn_implementation="eager"
    ).float()
    state = {name: torch.from_numpy(value) for name, value in checkpoint(arch).items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    with quire.Engine(file, dtype="float32", kv_dtype="float32", kv_bytes=1 << 20) as engine:
        ids = engine.tokenizer.encode(TEXT)
        ours = engine.logits(ids)
    assert len(ids) > 6  # the window
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", tiny_gguf.GEMMA)
def test_a_packed_gemma_is_the_same_model(tmp_path, arch):
    folder = model_folder(write(tmp_path / "model.gguf", "Q8_0", arch))
    packed = quire.pack_model(folder, tmp_path / "packed", dtype="float32")
    assert np.array_equal(logits(folder), logits(packed))


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_is_the_same_model(tmp_path, tied):
    for kind in QUANTISED:
        folder = model_folder(write(tmp_path / f"{kind}.gguf", kind, tied=tied))
        packed = quire.pack_model(folder, tmp_path / f"packed_{kind}", dtype="float32")
        assert not list(packed.glob("*.gguf"))
        assert np.array_equal(logits(folder), logits(packed)), kind
        assert model_identity(folder) == model_identity(packed)
        again = quire.pack_model(packed, tmp_path / f"again_{kind}", dtype="float32")
        file = "model.safetensors"
        assert (packed / file).read_bytes() == (again / file).read_bytes()


def test_damage_of_a_packed_model_is_named(tmp_path):
    packed = quire.pack_model(
        model_folder(write(tmp_path / "model.gguf", "Q8_0")), tmp_path / "packed", dtype="float32"
    )
    file = packed / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"q_proj.packed.Q8_0", b"q_proj.packed.Q4_0", 1))
    with pytest.raises(quire.CorruptError, match=r"q_proj\.packed\.Q4_0.*is U8"):
        logits(packed)
    file.write_bytes(whole.replace(b"k_proj.packed.Q8_0", b"k_proj.packed.Q9_9", 1))
    with pytest.raises(quire.NotFoundError, match=r"k_proj\.packed.*is in no format there"):
        logits(packed)



def test_a_server_calls_a_file_by_its_name(tmp_path):
    """Not by that of the folder in the cache, which a touch of the file changes."""
    from quire.cli import serve

    file = write(tmp_path / "Some-Model-Q8_0.gguf", "Q8_0")
    options = serve.parser().parse_args([str(file)])
    assert serve._model_names(options, str(model_folder(file))) == ("Some-Model-Q8_0",)


def test_a_file_is_no_folder_to_be_quantised(tmp_path, capsys):
    """The message named a folder of the cache."""
    file = write(tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(quire.BadArgumentError, match="is a GGUF file, and folders are quantised"):
        quantize_model(file, tmp_path / "out")
    code, _, error = run(capsys, "quantize", str(file), str(tmp_path / "out"))
    assert code == 1
    assert f"quire import {file} DIR" in error
    with pytest.raises(quire.NotFoundError, match="to quantise, but a GGUF file"):
        quantize_model(model_folder(file), tmp_path / "out")


def test_the_program_takes_a_file(tmp_path, capsys):
    file = write(tmp_path / "model.gguf", "Q8_0")
    arguments = [str(file), "the", "--threads", "1", "--kv-bytes", "1M"]
    code, out, error = run(capsys, "generate", *arguments, "--max-tokens", "4", "--raw")
    assert code == 0, error
    assert out
    assert run(capsys, "inspect", str(file))[0] == 0


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_quantising_a_folder_gives_the_codes_of_the_format(tmp_path, arch, weights):
    """The same file as the gguf package's quantiser and writer make of the same values."""
    kind = {"q8": "Q8_0", "q4": "Q4_0"}[weights]
    tied = arch in tiny_gguf.GEMMA
    source = importer.import_gguf(
        write(tmp_path / "source.gguf", "F32", arch, tied), tmp_path / "s", dtype="float32"
    )
    ours = quantize_model(source, tmp_path / "ours", weights=weights, embeddings=weights)
    theirs = write(tmp_path / "theirs.gguf", kind, arch, tied)
    assert np.array_equal(logits(ours), logits(theirs))


def source_of(tmp_path: Path, arch: str, dtype: str = "float32") -> Path:
    file = write(tmp_path / "source.gguf", "F32", arch, tied=False)
    return importer.import_gguf(file, tmp_path / "source", dtype=dtype)


@pytest.mark.parametrize("arch", OF_EXPERTS)
@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_quantised_experts_have_the_codes_of_the_format(tmp_path, arch, weights):
    """Routers, and matrices that are widened when they are loaded, stay as they are."""
    kind = {"q8": "Q8_0", "q4": "Q4_0"}[weights]
    source = source_of(tmp_path, arch)
    ours = quantize_model(source, tmp_path / "ours", weights=weights, embeddings=weights)
    kept = dict.fromkeys(("kv_b_proj", "k_b_proj", "v_b_proj"), GGMLQuantizationType.F32)
    theirs = write(tmp_path / "theirs.gguf", kind, arch, tied=False, other_types=kept)
    expected = logits(theirs)
    assert np.array_equal(logits(ours), expected)
    assert not np.array_equal(logits(source), expected)
    types = {
        tensor.name: tensor.tensor_type.name for tensor in GGUFReader(ours / "model.gguf").tensors
    }
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        assert types[f"blk.1.{name}.weight"] == kind
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"


@pytest.mark.parametrize("arch", OF_EXPERTS)
def test_quantised_experts_are_a_model_like_any_other(tmp_path, capsys, arch):
    source = source_of(tmp_path, arch, "bfloat16")
    folders = {
        kind: quantize_model(source, tmp_path / kind, weights=kind) for kind in ("q8", "q4")
    }
    assert len({model_identity(folder)["revision"] for folder in [source, *folders.values()]}) == 3
    weights = [quire.Engine.plan_memory(folder).weight_bytes for folder in folders.values()]
    assert weights[1] < weights[0] < quire.Engine.plan_memory(source).weight_bytes
    # bfloat16 stays bfloat16 where nothing is quantised.
    tensors = {tensor.name: tensor for tensor in GGUFReader(folders["q8"] / "model.gguf").tensors}
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type.name == "BF16"
    code, out, error = run(capsys, "inspect", str(folders["q4"]), "--json")
    assert code == 0, error
    assert {"Q4_0", "Q8_0"} <= set(json.loads(out)["model"]["weight_types"])
    code, _, error = run(capsys, "generate", str(folders["q4"]), "--dry-run")
    assert code == 0, error
    for kind, folder in folders.items():
        packed = quire.pack_model(folder, tmp_path / f"packed_{kind}", dtype="float32")
        assert np.array_equal(logits(folder), logits(packed))
        assert model_identity(folder) == model_identity(packed)


@pytest.mark.usefixtures("wide")
def test_experts_in_blocks_of_256_are_quantised(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_gguf, "EXPERT_INNER", 256)
    file = write(tmp_path / "source.gguf", "F32", "qwen3moe", change=of_all_experts)
    source = importer.import_gguf(file, tmp_path / "source", dtype="float32")
    made = quantize_model(source, tmp_path / "made", weights="q4k")
    tensors = {tensor.name: tensor for tensor in GGUFReader(made / "model.gguf").tensors}
    given = checkpoint("qwen3moe")
    for part in ("gate", "up", "down"):
        tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
        assert tensor.tensor_type == GGMLQuantizationType.Q4_K
        read = quants.dequantize(tensor.data, tensor.tensor_type)
        for expert, matrix in enumerate(read):
            one = given[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]
            assert np.square(matrix - one).mean() < 0.1**2 * np.square(one).mean()
    packed = quire.pack_model(made, tmp_path / "packed", dtype="float32")
    assert np.array_equal(logits(made), logits(packed))


def beside_images(source: Path, path: Path) -> Path:
    """The folder of a text model as the text part of one that knows images, as those are published:
    the object of the text model leaves out much."""
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    tensors = {f"language_model.{name}": value for name, value in stored.items()}
    image = "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"
    tensors[image] = np.ones((3, 5), np.float32)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(7, np.float32)
    shutil.copytree(source, path)
    save_file(tensors, path / "model.safetensors")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    for field in ("num_attention_heads", "num_key_value_heads", "bos_token_id"):
        del config[field]
    whole["eos_token_id"] = config.pop("eos_token_id")
    whole["tie_word_embeddings"] = config.pop("tie_word_embeddings")
    whole |= {"text_config": config, "vision_config": {"hidden_size": 5}}
    (path / "config.json").write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_of_a_model_that_knows_images_is_quantised(tmp_path, monkeypatch, tied):
    for name, size in {"HEADS": 8, "KV_HEADS": 4}.items():  # what absent fields stand for
        monkeypatch.setattr(tiny_gguf, name, size)
    file = write(tmp_path / "source.gguf", "F32", "gemma3", tied)
    plain = importer.import_gguf(file, tmp_path / "plain", dtype="float32")
    whole = beside_images(plain, tmp_path / "whole")
    assert np.array_equal(logits(plain), logits(whole))
    made = quantize_model(whole, tmp_path / "made", weights="q4")
    expected = quantize_model(plain, tmp_path / "expected", weights="q4")
    codes = [
        {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(folder / "model.gguf").tensors}
        for folder in (made, expected)
    ]
    assert codes[0] == codes[1]
    assert np.array_equal(logits(made), logits(expected))
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    source_config = json.loads((whole / "config.json").read_text())
    assert config["eos_token_id"] == source_config["eos_token_id"]
    assert config["bos_token_id"] == 2
    with quire.Engine(whole) as engine, quire.Engine(made) as other:
        assert engine.info.eos_token_ids == other.info.eos_token_ids


def test_a_text_part_that_is_none_is_refused(tmp_path):
    file = write(tmp_path / "source.gguf", "F32", "gemma3")
    whole = beside_images(importer.import_gguf(file, tmp_path / "plain"), tmp_path / "whole")
    config = json.loads((whole / "config.json").read_text())
    for text in (None, 3, []):
        (whole / "config.json").write_text(json.dumps(config | {"text_config": text}))
        with pytest.raises(quire.CorruptError, match='"text_config" is no JSON object'):
            quantize_model(whole, tmp_path / "made")


def test_quantising_says_how_far_it_is(tmp_path):
    source = importer.import_gguf(write(tmp_path / "source.gguf", "F32"), tmp_path / "s")
    calls: list[tuple[int, int]] = []
    quantize_model(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1]


def test_what_cannot_be_quantised_is_refused_and_nothing_is_left(tmp_path, tiny, capsys):
    out = tmp_path / "out"
    with pytest.raises(quire.BadArgumentError, match="rows of 48, which are no whole blocks"):
        quantize_model(tiny.directory, out)
    with pytest.raises(quire.BadArgumentError, match='"q3" cannot be written'):
        quantize_model(tiny.directory, out, weights="q3")
    code, _, error = run(capsys, "quantize", str(tiny.directory), str(out))
    assert code == 1
    assert "no whole blocks" in error
    assert not out.exists()


def test_quality_compares_two_models(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text(TEXT * 8)
    eight, four = (write(tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0"))
    arguments = ["--against", str(eight), "--text", str(text), "--threads", "1"]
    code, out, error = run(capsys, "quality", str(four), *arguments, "--json")
    assert code == 0, error
    reference, measured = json.loads(out)["models"]
    assert reference["quality"]["divergence"] == 0
    assert reference["quality"]["agreement"] == 1
    assert measured["quality"]["divergence"] > 0
    assert measured["weight_bytes"] < reference["weight_bytes"]
    _, out, _ = run(capsys, "quality", str(four), *arguments)
    assert "perplexity" in out
    assert str(four) in out


def test_quality_of_two_sizes_of_one_family_is_refused(tmp_path, capsys, monkeypatch):
    """Embeddings of one vocabulary are padded to other sizes; it was a traceback after a while."""
    text = tmp_path / "text"
    text.write_text(TEXT * 8)
    size = tiny_gguf.vocab_size()
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for file, rows in zip(files, (size, size + 32)):
        tiny_gguf.write_model(file, tiny_gguf.random_weights(5, rows))
    monkeypatch.setattr(quire.Engine, "logits", None)  # nothing is computed before
    for model, reference in (files, files[::-1]):
        arguments = ["--against", str(reference), "--text", str(text), "--threads", "1"]
        code, out, error = run(capsys, "quality", str(model), *arguments)
        assert (code, out) == (2, "") and error.count("\n") == 1
        for file, rows in zip(files, (size, size + 32)):
            assert f"{file} has {rows} logits" in error


def test_kv_of_other_activations_is_not_taken(tmp_path):
    file = write(tmp_path / "model.gguf", "Q8_0")
    plain = write(tmp_path / "plain.gguf", "BF16")
    prompt = list(range(3, 43))

    def cached(model: Path, activations: str) -> int:
        given = {"kv_bytes": 1 << 20, "kv_load_always": True, "kv_load_timeout": 60, "threads": 1}
        store = tmp_path / f"{model.stem}-kv"
        with quire.Engine(model, kv_dir=store, activations=activations, **given) as engine:
            engine.wait_for_store()
            answer = engine.generate(prompt, max_tokens=1, ignore_eos=True)
            engine.flush_store()
        return answer.usage.cached_tokens

    taken = 39
    assert [cached(file, name) for name in ("int8", "int8", "bf16", "float32")] == [0, taken, 0, 0]
    assert [cached(file, name) for name in ("int8", "bf16", "float32")] == [taken, taken, taken]
    # Weights that are not quantised have no use for them.
    assert [cached(plain, name) for name in ("int8", "bf16")] == [0, taken]


def test_quality_shows_what_narrow_kv_costs_apart(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text(TEXT * 8)
    eight, four = (str(write(tmp_path / f"{kind}.gguf", kind)) for kind in ("Q8_0", "Q4_0"))
    arguments = [four, "--against", eight, "--text", str(text), "--threads", "1"]
    narrow = ["--kv-dtype", "int8", "--activations", "float32"]
    code, out, error = run(capsys, "quality", *arguments, *narrow, "--json")
    assert code == 0, error
    found = json.loads(out)["models"]
    assert [(item["model"], item["quality"]["kv_dtype"], item["against"]) for item in found] == [
        (eight, "bfloat16", eight),
        (four, "bfloat16", eight),
        (four, "int8", eight),
        (four, "int8", "itself with bfloat16 KV"),
    ]
    _, weights, _, kv = (item["quality"]["divergence"] for item in found)
    assert 0 < kv < weights
    _, out, _ = run(capsys, "quality", *arguments, "--json")
    int8_rows = json.loads(out)["models"][1]["quality"]
    assert int8_rows["divergence"] != weights, "--activations is the model's"
    _, out, _ = run(capsys, "quality", *arguments, *narrow)
    assert "itself with bfloat16 KV" in out
