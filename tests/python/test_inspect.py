"""`quire inspect`, `--dry-run` and quire.Engine.plan_memory: what is said of a model and its memory
is so."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import quire
import tiny_gguf
from program import run
from tiny_model import Shape, TinyModel

PLAN_FIELDS = {field.name for field in dataclasses.fields(quire.MemoryPlan)}


def defaults() -> dict[str, Any]:
    parameters = inspect.signature(quire.Engine.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


# ---- Engine.plan_memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_the_engine_takes(tiny: TinyModel, dtype: str) -> None:
    options: Any = dict(dtype=dtype, page_size=16, kv_bytes=1 << 20, threads=1)
    plan = quire.Engine.plan_memory(tiny.directory, **options)
    with quire.Engine(tiny.directory, **options) as engine:
        stats = engine.stats()
        assert plan.weight_bytes == stats["weight_bytes"] == engine.info.weight_bytes
        longest = plan.longest_context
        engine.check([5], max_tokens=longest - 1)
        with pytest.raises(quire.TooLargeError):
            engine.check([5], max_tokens=longest)
    assert plan.kv_bytes_per_token == stats["kv_bytes_per_token"]
    assert plan.page_size == stats["page_size"] == 16
    assert plan.page_count == stats["pages_total"]
    assert plan.kv_bytes == stats["kv_bytes"]
    assert plan.total_bytes == plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes


def test_kv_of_a_token_is_that_of_its_heads(tiny: TinyModel) -> None:
    shape = tiny.shape
    values = 2 * shape.layers * shape.kv_heads * shape.head_dim
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        plan = quire.Engine.plan_memory(tiny.directory, dtype=dtype, page_size=16)
        assert plan.kv_bytes_per_token == values * size
        assert plan.page_bytes == 16 * plan.kv_bytes_per_token


def test_the_longest_context_is_that_of_the_pages_or_of_the_model(tiny: TinyModel) -> None:
    whole = quire.Engine.plan_memory(tiny.directory, page_size=16)
    assert whole.longest_context == tiny.shape.positions
    few = quire.Engine.plan_memory(tiny.directory, page_size=16, kv_bytes=4 * whole.page_bytes)
    assert few.longest_context <= few.page_count * 16 < tiny.shape.positions


def test_a_larger_chunk_takes_more_scratch(tiny: TinyModel) -> None:
    small, large = (quire.Engine.plan_memory(tiny.directory, prefill_chunk=n) for n in (64, 1024))
    assert large.scratch_bytes > small.scratch_bytes and large.weight_bytes == small.weight_bytes


def test_its_defaults_are_those_of_the_engine(tiny: TinyModel) -> None:
    plain = quire.Engine.plan_memory(tiny.directory)
    assert quire.Engine.plan_memory(tiny.directory, **defaults()) == plain
    assert set(defaults()) == set(quire.EngineOptions.__annotations__)


def widened(tiny: TinyModel, folder: Path, intermediate_size: int) -> Path:
    """The tiny model with another intermediate size, its weights a hole in a file."""
    shutil.copytree(tiny.directory, folder)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = intermediate_size
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tiny.weights.items():
        shape = [intermediate_size if n == tiny.shape.intermediate else n for n in array.shape]
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + offset)
    return folder


def test_a_model_larger_than_the_machine_is_planned_and_refused(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """Both read the header alone: there is nothing else in the file."""
    machine = quire.Engine.plan_memory(tiny.directory).machine_bytes
    size = 16 * (machine // (4 * tiny.shape.hidden * 9) // 16 + 16)
    folder = widened(tiny, tmp_path / "wide", size)
    plan = quire.Engine.plan_memory(folder, dtype="float32")
    assert plan.weight_bytes > machine and not plan.fits
    with pytest.raises(quire.OutOfMemoryError, match=f"{plan.weight_bytes / 2**30:.2f} GiB of w"):
        quire.Engine(folder, dtype="float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"activations": "float16"}, "activations is float16; it must be int8, bfloat16 or"),
        ({"activations": "int4"}, "int4"),
        ({"threads": -1}, "threads"),
        ({"page_size": -1}, "page_size"),
        ({"kv_bytes": 1}, "kv_bytes"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"max_num_sequences": 0}, "max_num_sequences"),
        ({"kernel_path": "abacus"}, "abacus"),
        ({"numa": "on"}, 'numa is "on"'),
    ],
    ids=str,
)
def test_impossible_options_are_refused_by_plan_and_engine(
    tiny: TinyModel, options: Any, message: str
) -> None:
    for call in (quire.Engine.plan_memory, quire.Engine):
        with pytest.raises(quire.QuireError, match=message):
            call(tiny.directory, **options)


def test_more_than_the_machine_has_is_planned_but_not_made(tiny: TinyModel) -> None:
    machine = quire.Engine.plan_memory(tiny.directory).machine_bytes
    plan = quire.Engine.plan_memory(tiny.directory, kv_bytes=2 * machine)
    assert not plan.fits and plan.kv_bytes > machine
    with pytest.raises(quire.OutOfMemoryError, match=r"at most \d+ .* of .*kv_bytes would fit"):
        quire.Engine(tiny.directory, kv_bytes=2 * machine)


# ---- --dry-run


def test_a_dry_run_prints_the_plan(capsys: pytest.CaptureFixture[str], tiny: TinyModel) -> None:
    plan = quire.Engine.plan_memory(tiny.directory, page_size=16)
    for command in ("generate", "inspect"):
        arguments = [command, str(tiny.directory), "--dry-run", "--page-size", "16"]
        code, out, err = run(capsys, *arguments, "--json")
        found = json.loads(out)
        assert (code, err) == (0, "") and found["fits"] is True
        assert quire.MemoryPlan(**{name: found[name] for name in PLAN_FIELDS}) == plan
        code, text, _ = run(capsys, *arguments)
        assert code == 0 and f"{plan.weight_bytes:,} bytes" in text
        assert f"{plan.longest_context:,} tokens" in text
    code, text, _ = run(capsys, "chat", str(tiny.directory), "--dry-run", "--page-size", "16")
    assert code == 0 and f"{plan.kv_bytes:,} bytes" in text


def test_a_dry_run_counts_the_staging_memory(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel
) -> None:
    plain = quire.Engine.plan_memory(tiny.directory)
    assert plain.staging_bytes == 0
    peers = ["--prefill-from", "127.0.0.1:1"]
    for more, bytes_ in ([], 64 << 20), (["--staging-bytes", "1M"], 1 << 20):
        arguments = ["generate", str(tiny.directory), "--dry-run", *peers, *more]
        code, out, _ = run(capsys, *arguments, "--json")
        found = json.loads(out)
        assert code == 0 and found["staging_bytes"] == bytes_
        assert found["total_bytes"] == plain.total_bytes + bytes_
        code, text, _ = run(capsys, *arguments)
        assert code == 0 and f"staging          {bytes_:,} bytes" in text
    code, text, _ = run(capsys, "generate", str(tiny.directory), "--dry-run")
    assert code == 0 and "staging" not in text
    code, _, err = run(capsys, "generate", str(tiny.directory), "--staging-bytes", "1M", "Hi")
    assert code == 2 and "--staging-bytes has no effect without --prefill-from" in err


def test_a_dry_run_counts_what_is_sent_to_other_processes(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel
) -> None:
    plain = quire.Engine.plan_memory(tiny.directory)
    assert plain.sending_bytes == 0
    counted = quire.Engine.plan_memory(tiny.directory, sending_bytes=128 << 20)
    assert counted.total_bytes == plain.total_bytes + (128 << 20)
    line = f"{128 << 20:,} bytes (128.0 MiB)"
    for command in (["prefill"], ["serve", "--prefill-listen", "127.0.0.1:0"]):
        code, text, _ = run(capsys, command[0], str(tiny.directory), "--dry-run", *command[1:])
        assert code == 0 and re.search(rf"^sending +{re.escape(line)}$", text, re.MULTILINE)
    code, text, _ = run(capsys, "serve", str(tiny.directory), "--dry-run")
    assert code == 0 and "sending" not in text


def test_a_dry_run_says_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel
) -> None:
    too_much = 2 * quire.Engine.plan_memory(tiny.directory).machine_bytes
    arguments = ["generate", str(tiny.directory), "--dry-run", "--kv-bytes", str(too_much)]
    code, out, _ = run(capsys, *arguments)
    assert code == 1 and "DOES NOT FIT" in out
    code, out, err = run(capsys, *arguments[:2], *arguments[3:], "Hi")
    assert code == 1 and out == "" and "--kv-bytes would fit" in err and "GiB are free" in err
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 1 and json.loads(out)["fits"] is False
    arguments.remove("--dry-run")
    code, out, err = run(capsys, *arguments, "Hi")
    assert code == 1 and out == "" and err.count("\n") == 1 and "memory" in err


def test_a_dry_run_measures_the_prompt(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    length = len(engine.generate([{"role": "user", "content": "Hi"}], max_tokens=1).prompt_ids)
    arguments = ["generate", *model, "--dry-run", "--json"]
    code, out, _ = run(capsys, *arguments, "Hi")
    found = json.loads(out)
    assert code == 0 and found["prompt_tokens"] == length and found["too_long"] == 0
    code, out, _ = run(capsys, *arguments, "Hi", "--max-tokens", str(256 - length))
    assert code == 0 and json.loads(out)["too_long"] == 0
    code, out, _ = run(capsys, *arguments, "Hi", "--max-tokens", str(257 - length))
    assert code == 1 and json.loads(out)["too_long"] == 1
    code, out, _ = run(capsys, *arguments, "--prompt-ids", "5,6,7")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 3


def test_a_dry_run_measures_the_prompts_of_a_file(
    capsys: pytest.CaptureFixture[str], model: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4], "max_tokens": 256}\n'
        '{"prompt": "ab", "raw": true}\n'
    )
    code, out, _ = run(capsys, "generate", *model, "--file", str(path), "--dry-run", "--json")
    found = json.loads(out)
    assert code == 1 and found["prompts"] == 3 and found["longest_prompt"] == 3
    assert found["prompt_tokens"] == 6 and found["too_long"] == 1
    path.write_text('{"prompt": 1}\n')
    code, _, err = run(capsys, "generate", *model, "--file", str(path), "--dry-run")
    assert code == 1 and "p.jsonl:1: " in err


def test_a_file_with_guesses_has_the_room_for_them_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], model: list[str], tmp_path: Path
) -> None:
    """The number of the command line was once replaced by that of the default."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3], "speculate": "ngram"}\n')
    scratch = []
    for room in ([], ["--max-tree-nodes", "64"], ["--max-tree-nodes", "4096"]):
        arguments = ["generate", *model, "--file", str(path), "--dry-run", "--json", *room]
        code, out, err = run(capsys, *arguments)
        assert code == 0, err
        scratch.append(json.loads(out)["scratch_bytes"])
    assert scratch[0] == scratch[1] < scratch[2]


# ---- inspect


def test_inspect_says_what_runs(capsys: pytest.CaptureFixture[str], tiny: TinyModel) -> None:
    options: Any = dict(page_size=16, kernel_path="scalar", dtype="float32")
    arguments = ["--page-size", "16", "--kernel-path", "scalar", "--dtype", "float32"]
    code, out, err = run(capsys, "inspect", str(tiny.directory), "--json", *arguments)
    found = json.loads(out)
    assert (code, err) == (0, "") and list(found) == [
        "build",
        "kernels",
        "model",
        "memory",
        "pages",
    ]
    assert found["build"]["version"] == quire.__version__ and found["build"]["numa"] == "off"
    assert found["kernels"] == {"available": quire.kernel_paths(), "chosen": "scalar"}
    types = found["model"]["weight_types"]
    assert set(types) == {"float32"} and sum(types.values()) == found["memory"]["weight_bytes"]
    assert found["model"]["layers"] == 3 and found["model"]["chat_template"] is True
    plan = quire.Engine.plan_memory(tiny.directory, **options)
    assert found["memory"].pop("fits") is True
    assert quire.MemoryPlan(**found["memory"]) == plan
    assert found["pages"]["pages_total"] == plan.page_count
    assert found["pages"]["kv_dtype"] == "float32" and found["pages"]["pages_in_use"] == 0


def test_inspect_is_readable(capsys: pytest.CaptureFixture[str], tiny: TinyModel) -> None:
    code, out, _ = run(capsys, "inspect", str(tiny.directory))
    weights = quire.Engine.plan_memory(tiny.directory).weight_bytes
    assert code == 0 and "LlamaForCausalLM" in out and f"{weights:,} bytes" in out
    assert quire.kernel_paths()[0] in out


def test_inspect_of_a_model_without_attention_says_nothing_of_heads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was a traceback."""
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    weights = tiny_gguf.random_weights(1, tiny_gguf.vocab_size(), "mamba2")
    tiny_gguf.write_model(file, weights, "mamba2")
    code, out, err = run(capsys, "inspect", str(file), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["model"]["architecture"] == "Mamba2ForCausalLM"
    assert not {"query_heads", "kv_heads", "head_dim", "rope"} & set(found["model"])
    assert "kv_dtype" not in found["pages"] and found["pages"]["pages_total"] == 0
    code, out, err = run(capsys, "inspect", str(file))
    assert (code, err) == (0, "") and "Mamba2ForCausalLM" in out


def test_inspect_without_a_model_takes_the_embedded_one(
    capsys: pytest.CaptureFixture[str], embedded_model: str
) -> None:
    code, out, _ = run(capsys, "inspect", "--json")
    assert code == 0 and json.loads(out)["model"]["folder"] == embedded_model


def test_inspect_of_the_build_alone_where_no_model_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.embedded.PACKAGE", "no-such-package-of-a-model")
    code, out, err = run(capsys, "inspect", "--json")
    assert code == 0 and list(json.loads(out)) == ["build", "kernels"]
    assert "no-such-package-of-a-model" in err and err.count("\n") == 1


# ---- Damaged models


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("model.safetensors", None, "safetensors"),
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer_config.json", b"nonsense", "tokenizer_config.json"),
    ],
    ids=str,
)
def test_a_damaged_model_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str,
    damage: bytes | None,
    message: str,
) -> None:
    model = TinyModel(tmp_path / "m", Shape(layers=1))
    path = model.directory / file
    path.unlink() if damage is None else path.write_bytes(damage)
    for command in (["generate", "--prompt", "Hi"], ["inspect"], ["chat"]):
        code, out, err = run(capsys, command[0], str(model.directory), *command[1:])
        assert code == 1 and out == "" and err.count("\n") == 1
        assert message in err and err.startswith("quire: error: ")
