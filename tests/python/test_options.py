"""Options are written once: what is made from the entries of quire._options says the same."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import quire
from program import ROOT, run
from quire import _options
from tiny_model import TinyModel

sys.path.insert(0, str(ROOT / "tools"))
import option_tables


def test_the_signature_has_all_options_of_an_engine() -> None:
    parameters = inspect.signature(quire.Engine).parameters
    assert {name: parameters[name].default for name in _options.ENGINE} == {
        name: option.default for name, option in _options.ENGINE.items()
    }
    assert parameters["threads"].annotation is int


@pytest.mark.parametrize(
    "documented,options",
    [
        (quire.Engine, _options.ENGINE),
        (quire.EngineOptions, _options.ENGINE),
        (quire.SamplingOptions, _options.SAMPLING),
    ],
)
def test_docstrings_have_all_options(
    documented: type, options: dict[str, _options.Option]
) -> None:
    text = documented.__doc__ or ""
    assert "OPTIONS" not in text
    assert [name for name in options if f" {name}: " not in text] == []


def test_help_has_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(capsys, "generate", "--help")
    flags = {
        name: option.flag
        for options in (_options.ENGINE, _options.SAMPLING)
        for name, option in options.items()
        if option.flag is not None and option.flag.group != "serve"
    }
    assert len(flags) > 30
    missing = [
        name
        for name, flag in flags.items()
        if (flag.name or f"--{name.replace('_', '-')}") not in text
    ]
    assert missing == []


@pytest.mark.parametrize("page", option_tables.PAGES, ids=lambda page: page.name)
def test_tables_of_the_docs_are_current(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- options: ") == text.count("<!-- end -->") > 0
    assert option_tables.written(text) == text, "run tools/option_tables.py"


def test_the_library_knows_the_options_of_an_engine(tiny: TinyModel) -> None:
    plan = quire.Engine.plan_memory(tiny.directory, **_options.whole_engine({}))
    assert plan == quire.Engine.plan_memory(tiny.directory)
    with pytest.raises(TypeError, match="there is no option 'pages'; options are dtype, .*, kv_"):
        quire.Engine.plan_memory(tiny.directory, pages=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="there is no option 'pages'"):
        quire.Engine(tiny.directory, pages=3)  # type: ignore[call-arg]


def test_a_store_that_is_only_read_gets_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    prompt = [1 + i % 50 for i in range(100)]

    def engine(write: bool) -> quire.Engine:
        return quire.Engine(tiny.directory, kv_dir=tmp_path / "kv", kv_write=write, threads=1)

    def ask(write: bool) -> quire.Result:
        with engine(write) as made:
            made.wait_for_store()
            result = made.generate(prompt, max_tokens=2)
            made.flush_store()
            return result

    answer = ask(write=False)
    assert answer.usage.cached_tokens == 0 and ask(write=True).usage.cached_tokens == 0
    found = ask(write=False)
    assert found.usage.disk_tokens > 0 and found.ids == answer.ids


def test_reading_only_needs_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "--kv-read-only", "Hello")
    assert code == 2 and "--kv-read-only has no effect without --kv-dir or --kv-redis" in err
