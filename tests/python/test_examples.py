"""The programs of examples/ do what their heads say. The C++ ones but generate run in ctest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from program import ROOT
from tiny_model import Shape, TinyModel

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """With room for more than one chunk."""
    return TinyModel(tmp_path_factory.mktemp("examples"), Shape(positions=2048))


def output(*command: object, home: Path | None = None) -> list[str]:
    """The lines that a program prints; it must end well and say nothing on standard error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    if home is not None:
        environment["QUIRE_HOME"] = str(home)
    result = subprocess.run(
        [str(word) for word in command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout.splitlines()


def run(name: str, *arguments: object, home: Path | None = None) -> list[str]:
    return output(sys.executable, EXAMPLES / name, *arguments, home=home)


def test_every_program_in_python_is_run_here() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(names) >= 5
    assert [name for name in names if f'run("{name}"' not in tested] == []


def test_a_conversation_takes_the_kv_of_its_first_turn(tiny: TinyModel) -> None:
    cached, _, prompt = run("chat.py", tiny.directory)[-1].split()[:3]
    assert 0 < int(cached) < int(prompt)


def test_a_batch_gives_the_tokens_of_the_prompt_alone(tiny: TinyModel) -> None:
    lines = run("batch.py", tiny.directory)
    assert sum(line.endswith(("(length)", "(stop)")) for line in lines) == 6
    assert lines[-1] == "alone and in the batch: the same tokens"


def test_a_fork_takes_no_page() -> None:
    assert run("kv_cache.py") == [
        "pages of the fork: 0",
        "lengths: 101 91 output: 2 8 64",
        "after the rollback: 51",
    ]


def test_a_second_process_finds_the_kv_of_the_first(tiny: TinyModel, tmp_path: Path) -> None:
    arguments = (tmp_path / "kv", tiny.directory)
    first, second = (run("store.py", *arguments, home=tmp_path / "home")[0] for _ in range(2))
    tokens = int(first.split()[2])
    assert first == f"0 of {tokens} prompt tokens came from disk"
    assert second == f"{tokens - 1} of {tokens} prompt tokens came from disk"


def test_prefill_in_one_cache_and_decode_in_another() -> None:
    assert run("transfer.py") == [
        "tokens received: 40",
        "the next token's output: the same bits",
    ]


def test_generate_in_cpp_draws_the_tokens_of_python(tiny: TinyModel) -> None:
    prompt = [3, 14, 15, 92, 65]
    program = ROOT / "build" / "release" / "examples" / "example_generate"
    assert program.exists(), "not built: ./test release"
    (line,) = output(program, tiny.directory, *prompt)
    with quire.Engine(tiny.directory) as engine:
        expected = engine.generate(prompt, max_tokens=32, greedy=True).ids
    assert [int(word) for word in line.split()] == expected
