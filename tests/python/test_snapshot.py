"""Snapshots from Python: an engine goes on from a file as if it had computed the text itself."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import quire
from quire import snapshot
from quire.cli import main
from quire.cli import snapshot as command
from quire.cli.arguments import UsageError
from tiny_model import TinyModel

PROMPT = list(range(3, 60))


def open_engine(directory: Any, **options: Any) -> quire.Engine:
    fixed = {"dtype": "float32", "threads": 1, "kv_bytes": 2 << 20}
    return quire.Engine(directory, **{**fixed, **options})


@pytest.fixture
def engine(tiny: TinyModel) -> Iterator[quire.Engine]:
    with open_engine(tiny.directory, page_size=16) as engine:
        yield engine


@pytest.fixture
def file(engine: quire.Engine, tmp_path: Path) -> Path:
    """The KV of PROMPT, in pieces of 8 tokens."""
    engine.generate(PROMPT, max_tokens=1)
    path = tmp_path / "prompt.quire"
    assert snapshot.save(engine, PROMPT, path, sampler=b"\0own\xff", block_tokens=8) == len(PROMPT)
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_another_engine_goes_on_exactly(engine: quire.Engine, file: Path, tiny: TinyModel) -> None:
    more = [70, 71, 72]
    cold = engine.generate(PROMPT + more, max_tokens=12, logprobs=3)
    for page_size in (16, 64, 5):
        with open_engine(tiny.directory, page_size=page_size) as other:
            info = snapshot.restore(other, file)
            assert info.tokens == PROMPT
            warm = other.generate(info.tokens + more, max_tokens=12, logprobs=3)
            assert warm.usage.cached_tokens == len(PROMPT)
            assert warm.ids == cold.ids
            assert warm.samples[0].logprobs == cold.samples[0].logprobs
            assert warm.samples[0].top_logprobs == cold.samples[0].top_logprobs


def test_what_is_not_there_is_not_saved(engine: quire.Engine, tmp_path: Path) -> None:
    path = tmp_path / "x.quire"
    with pytest.raises(quire.NotFoundError, match="let a request compute them"):
        snapshot.save(engine, [9, 9, 9], path)
    assert not path.exists()
    engine.generate(PROMPT, max_tokens=1)
    # Only the beginning of this one is there.
    assert snapshot.save(engine, [*PROMPT[:20], 1, 2, 3], path) == 20
    assert snapshot.info(path).tokens == PROMPT[:20]


def test_info_says_what_it_is_of(file: Path, engine: quire.Engine) -> None:
    for info in (snapshot.info(file), snapshot.verify(file)):
        assert info.tokens == PROMPT
        assert info.sampler == b"\0own\xff"
        assert info.chunk_count == 8
        assert info.file_bytes == file.stat().st_size
        assert info.passport["model"] == engine.info.architecture
        assert info.passport["dtype"] == "f32"
        assert info.passport["block"] == 8
        assert info.passport["numerics"].split("/")[1] == engine.info.kernel_path
        assert not info.long_factors
        assert info.created > 1.6e9


def test_a_damaged_file_is_refused(file: Path, tiny: TinyModel) -> None:
    size = file.stat().st_size
    with open_engine(tiny.directory) as other:
        before = other.stats()
        for at in (0, 9, 70, size // 2, size - 200):
            flip(file, at)
            with pytest.raises(quire.CorruptError):
                snapshot.verify(file)
            with pytest.raises(quire.CorruptError):
                snapshot.restore(other, file)
            flip(file, at)
        assert {**other.stats()} == {**before}
        assert snapshot.restore(other, file).tokens == PROMPT
    with pytest.raises(quire.NotFoundError):
        snapshot.info(file.with_name("none"))


def test_another_model_is_refused_by_name(
    file: Path, tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    for source in tiny.directory.iterdir():
        (other / source.name).write_bytes(source.read_bytes())
    weights = next(other.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with open_engine(other) as engine, pytest.raises(quire.IncompatibleError, match="revision: "):
        snapshot.restore(engine, file)
    with (
        open_engine(tiny.directory, dtype="bfloat16") as engine,
        pytest.raises(quire.IncompatibleError, match='dtype: "bf16" here, "f32" there'),
    ):
        snapshot.restore(engine, file)


def test_kv_that_another_type_of_products_computed_is_refused(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """Both store bfloat16."""
    path = tmp_path / "exact.quire"
    with open_engine(tiny.directory, dtype="float32", kv_dtype="bfloat16") as engine:
        engine.generate(PROMPT, max_tokens=1)
        snapshot.save(engine, PROMPT, path)
        assert snapshot.restore(engine, path).passport["numerics"].endswith("/model=float32")
    with (
        open_engine(tiny.directory, dtype="bfloat16") as engine,
        pytest.raises(quire.IncompatibleError, match="numerics: "),
    ):
        snapshot.restore(engine, path)


def test_other_kernels_only_when_asked_for(file: Path, tiny: TinyModel) -> None:
    paths = quire.kernel_paths()
    if len(paths) < 2:
        pytest.skip("this CPU runs one kernel path only")
    with open_engine(tiny.directory, kernel_path=paths[-1]) as other:
        with pytest.raises(quire.IncompatibleError, match="numerics: "):
            snapshot.restore(other, file)
        assert snapshot.restore(other, file, any_numerics=True).tokens == PROMPT


def test_it_needs_a_prefix_cache(file: Path, tiny: TinyModel) -> None:
    with open_engine(tiny.directory, prefix_cache=False) as other:
        with pytest.raises(quire.BadStateError, match="prefix_cache"):
            snapshot.restore(other, file)
        with pytest.raises(quire.BadStateError, match="prefix_cache"):
            snapshot.save(other, PROMPT, file)


def test_differences(engine: quire.Engine, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.quire"
    snapshot.save(engine, PROMPT[:30], other, block_tokens=8)
    difference = snapshot.diff(file, other)
    assert difference.common_tokens == 30
    assert difference.passport == ""
    assert difference.different_sections == 0
    assert difference.compared_sections > 0
    assert not difference.same_sampler


# ---- The command


def run(*arguments: str) -> int:
    options = command.parser().parse_intermixed_args(arguments)
    code: int = options.run(options)
    return code


def test_command_saves_and_restores(
    tiny: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "chat.quire")
    model = [str(tiny.directory), "--dtype", "float32", "--threads", "1"]
    ids = ",".join(map(str, PROMPT))
    assert run("save", file, *model, "--prompt-ids", ids, "--max-tokens", "5", "--seed", "7") == 0
    assert f"{len(PROMPT) + 4} tokens" in capsys.readouterr().err
    assert run("restore", file, *model, "--max-tokens", "6", "--json") == 0
    warm = json.loads(capsys.readouterr().out)
    with open_engine(tiny.directory) as engine:
        cold = engine.generate(PROMPT, max_tokens=11)
    assert snapshot.info(file).tokens == (PROMPT + cold.ids)[: len(PROMPT) + 4]
    assert warm["ids"] == cold.ids[4:10]
    assert warm["usage"]["cached_tokens"] == len(PROMPT) + 3  # the last one gives the logits
    sampler = json.loads(snapshot.info(file).sampler)
    assert sampler["max_tokens"] == 5 and sampler["seed"] == 7 and sampler["temperature"] == 0


def test_command_goes_on_in_the_middle_of_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What followed began with the special token of a text's beginning."""
    tiny = TinyModel(tmp_path / "model")
    begin = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tiny.tokenizer.post_processor = begin
    tiny.tokenizer.save(str(tiny.directory / "tokenizer.json"))
    file, text = str(tmp_path / "text.quire"), " and what follows"
    model = [str(tiny.directory), "--dtype", "float32", "--threads", "1"]
    assert run("save", file, *model, "--prompt", "The quick", "--raw") == 0
    kept = snapshot.info(file).tokens
    assert kept[0] == 0 and 0 not in kept[1:]
    capsys.readouterr()
    assert run("restore", file, *model, "--prompt", text, "--max-tokens", "6", "--json") == 0
    restored = json.loads(capsys.readouterr().out)
    more = tiny.tokenizer.encode(text, add_special_tokens=False).ids
    with open_engine(tiny.directory) as engine:
        whole = engine.generate(kept + more, max_tokens=6)
    assert restored["usage"]["prompt_tokens"] == len(kept) + len(more)
    assert restored["ids"] == whole.ids


@pytest.fixture
def windowed(tiny: TinyModel, tmp_path: Path) -> Path:
    """The same weights with a window of 16 tokens."""
    folder = tmp_path / "windowed"
    shutil.copytree(tiny.directory, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=16)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_model_with_windows_goes_on_exactly(
    windowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "windowed.quire"
    with open_engine(windowed) as engine:
        cold = engine.generate(PROMPT, max_tokens=12)
    with open_engine(windowed) as engine:
        first = engine.generate(PROMPT, max_tokens=6)
        snapshot.save(engine, PROMPT + first.ids, path, block_tokens=8)
    with open_engine(windowed, page_size=5) as engine:
        info = snapshot.restore(engine, path)
        warm = engine.generate(PROMPT + first.ids, max_tokens=6)
    assert info.version == 2
    assert info.passport["window"] == 16
    assert (info.window, info.slid, info.state_bytes) == (0, 0, 0)
    assert warm.usage.cached_tokens == len(PROMPT) + 5
    assert first.ids + warm.ids == cold.ids
    assert run("show", str(path), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["window"] == 16
    assert shown["sequence_window"] == 0
    assert shown["version"] == 2
    difference = snapshot.diff(path, path)
    assert difference.same_windows
    assert difference.same_states


def test_a_folder_keeps_the_kv_of_a_model_with_windows(windowed: Path, tmp_path: Path) -> None:
    store = tmp_path / "kv"
    results = []
    for _ in range(2):
        with open_engine(windowed, kv_dir=store, kv_load_timeout=60) as engine:
            engine.wait_for_store()
            results.append(engine.generate(PROMPT, max_tokens=12))
    assert results[0].ids == results[1].ids
    assert results[0].usage.cached_tokens == 0
    assert results[1].usage.cached_tokens == len(PROMPT) - 1


def test_command_looks_into_files(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("show", "verify"):
        assert run(action, str(file), "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["tokens"] == len(PROMPT)
        assert shown["chunks"] == 8
        assert run(action, str(file)) == 0
        assert "revision" in capsys.readouterr().out
    assert run("diff", str(file), str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["common_tokens"] == len(PROMPT)


def test_command_shows_a_time_that_no_calendar_has(
    engine: quire.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.generate(PROMPT, max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: 10**24)
        snapshot.save(engine, PROMPT, tmp_path / "late")
    assert run("show", str(tmp_path / "late")) == 0
    assert "1000000000000000 s after 1970" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a\0b", "\udcff"], ids=ascii)
def test_a_name_that_no_file_can_have(
    engine: quire.Engine, file: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The part before a NUL once was the name, and other bytes a traceback."""
    path = str(file.with_name(name))
    for call in (
        lambda: snapshot.info(path),
        lambda: snapshot.verify(path),
        lambda: snapshot.diff(file, path),
        lambda: snapshot.save(engine, PROMPT, path),
        lambda: snapshot.restore(engine, path),
    ):
        with pytest.raises(quire.BadArgumentError, match="has a NUL|is not valid UTF-8"):
            call()
    assert [*file.parent.iterdir()] == [file]
    for words in (["snapshot", "show", path], ["pack", str(engine.model_dir), path]):
        code = main(words)
        captured = capsys.readouterr()
        assert (code, captured.out, captured.err.count("\n")) == (1, "", 1)
    assert [*file.parent.iterdir()] == [file]


@pytest.mark.parametrize(
    "arguments",
    [["show"], ["show", "a", "b"], ["diff", "a"], ["save", "a"], ["save", "a", "b", "c"]],
)
def test_command_refuses_wrong_words(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        run(*arguments)
