"""quire.pack_model and `quire pack`: a folder that is another one with packed weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import quire
from program import run
from quire import packing
from quire.identity import kept_identity, model_identity
from safetensors import safe_open
from tiny_model import TinyModel


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_packed_model_gives_the_same_answers(
    tmp_path: Path, tiny: TinyModel, dtype: str
) -> None:
    packed = quire.pack_model(tiny.directory, tmp_path / "packed", dtype=dtype, threads=1)
    assert packed == tmp_path / "packed"
    answers = []
    for folder in (tiny.directory, packed):
        with quire.Engine(folder, dtype=dtype, threads=1, kv_bytes=1 << 20) as engine:
            answer = engine.generate("A quire is", max_tokens=20, temperature=1, seed=7)
            answers.append((answer.text, engine.logits("The quick brown fox"), engine.info))
    assert answers[0][0] == answers[1][0]
    assert np.array_equal(answers[0][1], answers[1][1])
    assert answers[0][2] == answers[1][2]


def test_other_tools_can_read_the_file(tmp_path: Path, tiny: TinyModel) -> None:
    packed = quire.pack_model(tiny.directory, tmp_path / "packed", dtype="float32")
    with safe_open(packed / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "quire-packed"}
        down = file.get_tensor("model.layers.0.mlp.down_proj.packed")  # [48 outputs, 80 inputs]
    assert down.shape == (2, 80, 32)
    with safe_open(tiny.directory / "model.safetensors", "numpy") as file:
        weight = file.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert np.array_equal(down.transpose(0, 2, 1).reshape(64, 80)[:48], weight)
    assert not down[1, :, 16:].any()


def test_the_folder_has_all_but_the_other_weights(tmp_path: Path, tiny: TinyModel) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny.directory.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    packed = quire.pack_model(source, tmp_path / "packed")
    assert files(packed) == files(source) - {"pytorch_model.bin"}
    assert (packed / "additional_chat_templates" / "tool.jinja").read_text() == "{{ messages }}"


def test_it_is_there_completely_or_not_at_all(tmp_path: Path, tiny: TinyModel) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        quire.pack_model(tiny.directory, taken)
    assert files(taken) == {"mine"}
    with pytest.raises(quire.NotFoundError):
        quire.pack_model(tmp_path / "none", tmp_path / "packed")
    with pytest.raises(quire.BadArgumentError, match=r"threads.*not in \[0, 1024\]"):
        quire.pack_model(tiny.directory, tmp_path / "packed", threads=-1)
    with pytest.raises(quire.BadArgumentError, match="it must be float32 or bfloat16"):
        quire.pack_model(tiny.directory, tmp_path / "packed", dtype="float16")
    assert files(tmp_path) == {"taken"}


def test_a_link_to_an_empty_folder_is_followed(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the work was done, then the link could not be replaced and the work was deleted."""
    there = tmp_path / "disk" / "there"
    there.mkdir(parents=True)
    for name, target in {"link": there, "new": tmp_path / "disk" / "new"}.items():
        (tmp_path / name).symlink_to(target)
        asked: list[Path] = []
        usage = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(path))
        assert quire.pack_model(tiny.directory, tmp_path / name) == tmp_path / name
        monkeypatch.undo()
        assert asked == [tmp_path / "disk"]  # where the bytes go
        assert (tmp_path / name).is_symlink() and "model.safetensors" in files(target)
    assert files(tmp_path / "disk") == {"there", "new"}
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileExistsError, match="loop: exists already and is not an empty folder"):
        quire.pack_model(tiny.directory, tmp_path / "loop")


def test_where_a_disk_is_mounted_is_refused_before_any_work(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found out when all was written, and then deleted."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (tmp_path / "link").symlink_to(mounted)
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(mounted))
    monkeypatch.setattr(packing, "new_folder", None)
    for out in (mounted, tmp_path / "link"):
        with pytest.raises(FileExistsError, match=f"{out.name}: is where a disk is mounted"):
            quire.pack_model(tiny.directory, out)
    assert not files(mounted)


def test_a_disk_that_is_mounted_unseen_is_told_in_the_end(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is bound to a place on its own disk does not look like a mounted disk."""

    def rename(source: object, target: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), source, None, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(FileExistsError, match="packed: is where a disk is mounted"):
        quire.pack_model(tiny.directory, tmp_path / "packed")
    assert not files(tmp_path)


def test_the_program_packs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: TinyModel
) -> None:
    out = str(tmp_path / "packed")
    code, text, _ = run(capsys, "pack", str(tiny.directory), out, "--dtype", "float32")
    assert code == 0 and f"{out}: written" in text
    code, text, error = run(capsys, "inspect", out, "--json")
    assert code == 1 and json.loads(text or "{}") == {}
    assert "is packed as float32" in error and "pack it for bfloat16" in error
    code, text, _ = run(capsys, "inspect", out, "--json", "--dtype", "float32")
    assert code == 0 and json.loads(text)["model"]["architecture"] == "LlamaForCausalLM"
    code, _, error = run(capsys, "pack", str(tiny.directory), out)
    assert code == 1 and "is not an empty folder" in error


def test_it_has_the_identity_of_its_source(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    source = model_identity(tiny.directory)
    packed = quire.pack_model(tiny.directory, tmp_path / "packed", dtype="float32")
    assert model_identity(packed) == source
    assert kept_identity(packed) == source
    again = quire.pack_model(packed, tmp_path / "again", dtype="float32")
    assert model_identity(again) == source
    rounded = quire.pack_model(tiny.directory, tmp_path / "rounded", dtype="bfloat16")
    assert model_identity(rounded) != source

    weights = packed / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert kept_identity(packed) is None
    assert model_identity(packed) not in (source, model_identity(rounded))
    (again / "quire_source.json").write_text("{")
    with pytest.raises(quire.CorruptError, match=r"quire_source.json: is damaged"):
        model_identity(again)


def test_kv_of_the_source_serves_the_packed_model(tmp_path: Path, tiny: TinyModel) -> None:
    options = {"dtype": "float32", "threads": 1, "kv_bytes": 1 << 20, "kv_dir": tmp_path / "kv"}
    options["kv_load_timeout"] = 60
    prompt = list(range(5, 70))
    packed = quire.pack_model(tiny.directory, tmp_path / "packed", dtype="float32")
    results = []
    for folder in (tiny.directory, packed):
        with quire.Engine(folder, **options) as engine:  # type: ignore[arg-type]
            engine.wait_for_store()
            results.append(engine.generate(prompt, max_tokens=4, ignore_eos=True))
            engine.flush_store()
    assert results[0].ids == results[1].ids
    assert results[0].usage.cached_tokens == 0 and results[1].usage.cached_tokens > 0
