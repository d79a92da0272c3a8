"""The types of the package: they are complete, and a user's checker sees them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Kept between runs: reading NumPy's types takes a minute.
CACHE = ROOT / "build" / "mypy"

USE = """\
from __future__ import annotations

import numpy as np
import quire

engine = quire.Engine("MODEL", dtype="bfloat16", threads=2)
one: quire.Result = engine.generate("Hello", max_tokens=3, stop=["x", [1, 2]])
ids: quire.Result = engine.generate([1, 2, 3], logit_bias={1: 2.0})
chat: quire.Result = engine.generate([{"role": "user", "content": "Hi"}])
many: list[quire.Result] = engine.generate(["One.", "Two."])
each: list[quire.Result] = engine.generate([[1, 2], [3]])
text: str | None = one.text
plan: quire.MemoryPlan = quire.Engine.plan_memory("MODEL", kv_bytes=1 << 30)
longest: int = plan.longest_context
logits: np.ndarray = engine.logits([1, 2])
for piece in engine.stream("Hello"):
    print(piece.text, piece.ids)
for index, outcome in engine.generate_each([("a", {"max_tokens": 3}), ([1], {})]):
    if isinstance(outcome, quire.QuireError):
        print(index, outcome.code)
    else:
        print(outcome.ids)

engine.generate("Hello", temprature=1.0)  # wrong
engine.generate("Hello", max_tokens="many")  # wrong
quire.Engine.plan_memory("MODEL", pages=3)  # wrong
wrong: int = one.text  # wrong
"""


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"MYPYPATH": str(ROOT / "python")},
    )


def test_the_package_is_strictly_typed() -> None:
    """Strict by the settings in pyproject.toml, which name the package as well."""
    assert re.search(r"^strict = true$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    result = mypy()
    assert result.returncode == 0, result.stdout + result.stderr
    modules = len(list((ROOT / "python" / "quire").rglob("*.py")))
    assert f"in {modules} source files" in result.stdout


def test_a_checker_sees_the_types(tmp_path: Path) -> None:
    path = tmp_path / "use.py"
    path.write_text(USE)
    result = mypy("--strict", "--config-file=", str(path))
    found = {int(line) for line in re.findall(r"use\.py:(\d+): error", result.stdout)}
    expected = {n for n, line in enumerate(USE.splitlines(), 1) if line.endswith("# wrong")}
    assert len(expected) == 4 and found == expected, result.stdout + result.stderr


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "python" / "quire" / "py.typed").is_file()
