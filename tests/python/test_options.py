"""Options are written once: what is made from the entries of quire._options says the same."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quire
from program import ROOT, run
from quire import _options
from tiny_model import TinyModel

sys.path.insert(0, str(ROOT / "tools"))
import option_tables


@pytest.mark.parametrize(
    "call,options", [(quire.Engine, _options.ENGINE), (quire.ChunkStore, _options.STORE)]
)
def test_signatures_have_all_options(call: type, options: dict[str, _options.Option]) -> None:
    parameters = inspect.signature(call).parameters
    assert {name: parameters[name].default for name in options} == {
        name: option.default for name, option in options.items()
    }
    number = next(name for name in ("threads", "ram_bytes") if name in options)
    assert parameters[number].annotation is int


@pytest.mark.parametrize(
    "documented,options",
    [
        (quire.Engine, _options.ENGINE),
        (quire.EngineOptions, _options.ENGINE),
        (quire.SamplingOptions, _options.SAMPLING),
        (quire.ChunkStore, _options.STORE),
    ],
)
def test_docstrings_have_all_options(
    documented: type, options: dict[str, _options.Option]
) -> None:
    text = documented.__doc__ or ""
    assert "OPTIONS" not in text
    assert [name for name in options if f" {name}: " not in text] == []


def defaults_of_header(text: str) -> dict[str, int]:
    """The first default of each member that has a number, in the order of the header."""
    found: dict[str, int] = {}
    value = r"true|false|[\d']+|int64_t\{\d+\} << \d+|kDefaultPriority"
    for name, word in re.findall(rf"\b(\w+) = ({value})[;,]", text):
        low, _, shift = word.replace("int64_t", "").strip("{}").replace("'", "").partition("} << ")
        named = {"true": 1, "false": 0, "kDefaultPriority": found.get("kDefaultPriority", 0)}
        found.setdefault(name, (named[low] if low in named else int(low)) << int(shift or 0))
    return found


def test_defaults_of_a_store_are_those_of_the_library() -> None:
    members = {
        "disk_timeout_ms": "io_timeout_ms",
        "disk_bytes": "bytes_max",
        "ram_bytes": "bytes_max",
        "redis_timeout_ms": "io_timeout_ms",
        "queue_bytes": "queue_bytes_max",
        "fetch_bytes": "fetch_bytes_max",
    }
    known = defaults_of_header((ROOT / "include/quire/chunk_store.h").read_text())
    fields = _options.store_fields(_options.whole_store({}))
    numbers = {name: value for name, value in fields.items() if isinstance(value, int)}
    assert len(numbers) >= 17
    assert numbers == {
        name: known[members.get(name, name.removeprefix("redis_"))] for name in numbers
    }


_ADDED = """
    added: Annotated[
        int, Option(7, "a number that was added.", Flag("the number added", "N", Integer(0, 9)))
    ]
"""
_LOOKS_AT_ADDED = """
import inspect, sys
import quire
from quire.cli import arguments, serve, serve_config
sys.path.insert(0, sys.argv[1])
import option_tables

for call in (quire.Engine, quire.ChunkStore):
    assert inspect.signature(call).parameters["added"].default == 7, call
    assert " added: a number that was added" in call.__doc__, call
help = arguments.Parser()
arguments.add_engine(help)
assert "--added N" in help.format_help() and "the number added" in help.format_help()
assert serve_config.environment_words(serve.parser(), {"QUIRE_ADDED": "3"}, set()) == ["--added=3"]
assert arguments.given(serve.parser().parse_args(["m", "--added=3"]), ["added"]) == {"added": 3}
assert "| `--added N` | the number added |" in option_tables.table(["engine"])
assert "| `added` | `7` | a number that was added |" in option_tables.keywords_of_store()
for call in (lambda: quire.Engine.plan_memory(sys.argv[2]), lambda: quire.ChunkStore(ram_bytes=1)):
    try:
        call()
    except quire.BadArgumentError as error:  # it crossed; the C++ member is what lacks
        assert "there is no option 'added'" in str(error), error
    else:
        raise AssertionError(call)
"""


def test_an_option_is_one_entry_in_python(tiny: TinyModel, tmp_path: Path) -> None:
    """A copy of the package with one more option of the engine and of the store."""
    package = tmp_path / "quire"
    shutil.copytree(ROOT / "python/quire", package, symlinks=True)
    page = package / "_options.py"
    text = page.read_text()
    for options in ("EngineOptions", "ChunkStoreOptions"):
        head = text.index("OPTIONS\n", text.index(f"class {options}("))
        behind = text.index('"""\n', head) + len('"""\n')
        text = text[:behind] + _ADDED + text[behind:]
    page.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", _LOOKS_AT_ADDED, ROOT / "tools", tiny.directory],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
        store: Any = {"kv_dir": tmp_path / "kv", "kv_write": write, "kv_load_timeout": 60}
        return quire.Engine(tiny.directory, threads=1, **store)

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
