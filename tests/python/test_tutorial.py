"""docs/tutorial.md as a reader follows it: its programs are written, its commands are run in one
folder in their order, and the output has the lines that it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from program import ROOT, free_port

PAGE = ROOT / "docs" / "tutorial.md"
PORT = "7379"
# (language, content) of each code block, in order.
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def pattern(shown: str) -> re.Pattern[str]:
    """Of a line of the page: `...` stands for anything."""
    return re.compile(re.escape(shown).replace(re.escape("..."), ".*"))


def missing_lines(shown: str, output: str) -> list[str]:
    """The lines of a text block that the output does not have in this order."""
    rest = iter(output.splitlines())
    return [
        line
        for line in shown.splitlines()
        if not any(pattern(line).fullmatch(each) for each in rest)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works, with the programs of the page and a `quire` of this checkout."""
    folder = tmp_path_factory.mktemp("tutorial")
    for language, text in BLOCKS:
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None, f"a program without a name:\n{text}"
            (folder / name[1]).write_text(text, encoding="utf-8")
    (folder / "bin").mkdir()
    for name, arguments in (("quire", "-m quire"), ("python", "")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    return folder


def test_the_tutorial_works(folder: Path, embedded_model: str) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    port = str(free_port())
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }

    def run(script: str) -> str:
        result = subprocess.run(
            ["bash", "-e", "-c", script.replace(PORT, port)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=600,
        )
        assert result.returncode == 0, f"{script}\n{result.stdout}"
        return result.stdout

    installs, outputs, output = 0, 0, ""
    try:
        for language, text in BLOCKS:
            if language == "sh" and "pip install" in text:
                installs += 1  # tests/python/test_wheel.py builds and installs
            elif language == "sh":
                output = run(text)
            elif language == "text":
                outputs += 1
                assert missing_lines(text, output) == [], output
    finally:
        if (folder / "redis.log").exists():
            subprocess.run(["redis-cli", "-p", port, "shutdown", "nosave"], capture_output=True, check=False)
    assert installs == 1 and outputs == 4
    found = re.fullmatch(r"tokens from Redis: (\d+)\n", output)
    assert found is not None and int(found[1]) > 256, output
    kept = list((folder / "kv").rglob("*"))
    assert kept, "no KV in the folder"


def test_a_missing_line_is_noticed() -> None:
    output = "one\ntwo 2 of 5\nthree\n"
    assert missing_lines("two ... of 5\nthree\n", output) == []
    assert missing_lines("two ... of 6\n", output) == ["two ... of 6"]
    assert missing_lines("three\none\n", output) == ["one"]  # another order
