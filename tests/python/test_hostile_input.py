"""What nobody should type or pipe into the program: an exit code and one line, no traceback."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import run
from quire import cli
from tiny_model import TinyModel

# Besides texts: not UTF-8, no number, negative, beyond 64 bits, nothing.
VALUES = ["\udcff", "nan", "-1", "9" * 30, ""]
BYTES = {
    "not UTF-8": b"one\xff two",
    "cut off": "\u20ac".encode()[:2],
    "UTF-16": "one".encode("utf-16"),
    "surrogate": b"\xed\xa0\x80",
}
# What each command is given beside the option; MODEL stands for the folder.
COMMANDS = {
    "generate": ["MODEL", "Hi", "--max-tokens", "1"],
    "chat": ["MODEL"],
    "blend": ["add", "no-file", "--kv-dir", "kv"],
    "prefill": ["MODEL", "--listen", "127.0.0.1:0", "--dry-run"],
    "inspect": ["MODEL", "--dry-run"],
    "kv-quality": ["MODEL", "--tokens", "8", "--types", "int8"],
    "quality": ["MODEL", "--against", "MODEL", "--tokens", "8"],
    "import": ["no.gguf", "out"],
    "pack": ["MODEL", "packed"],
    "quantize": ["MODEL", "quantised"],
    "snapshot": ["show", "no.snapshot"],
    "store": ["ls", "no-store"],
}


class Stdin:
    """Standard input of these bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)
        self.encoding, self.errors = "utf-8", "strict"

    def isatty(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that options name are made in a folder of the test."""
    monkeypatch.chdir(tmp_path)


def options_with_values() -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        parser: argparse.ArgumentParser = importlib.import_module(cli._COMMANDS[command]).parser()
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                yield command, action.option_strings[-1]


@pytest.mark.parametrize(("command", "option"), options_with_values())
def test_every_option_of_every_command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyModel,
    command: str,
    option: str,
) -> None:
    words = [str(tiny.directory) if word == "MODEL" else word for word in COMMANDS[command]]
    for value in VALUES:
        monkeypatch.setattr(sys, "stdin", Stdin(b"some text, and a bit more of it\n/exit\n"))
        code, _, err = run(capsys, command, *words, f"{option}={value}")
        assert code in (0, 1, 2), (value, err)
        if code != 0:
            assert err.count("\n") == 1, (value, err)
        assert "Traceback" not in err


@pytest.mark.parametrize("data", BYTES.values(), ids=list(BYTES))
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "MODEL"],
        ["generate", "MODEL", "--raw", "--json"],
        ["generate", "MODEL", "--file", "-"],
        ["generate", "MODEL", "--file", "-", "--format", "jsonl"],
        ["chat", "MODEL"],
        ["kv-quality", "MODEL"],
        ["kv-quality", "MODEL", "--text", "text.txt"],
        ["generate", "MODEL", "--file", "text.txt"],
        ["generate", "MODEL", "--file", "text.txt", "--format", "jsonl"],
    ],
    ids=" ".join,
)
def test_bytes_that_are_no_text(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyModel,
    words: list[str],
    data: bytes,
) -> None:
    Path("text.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    code, out, err = run(
        capsys, *[str(tiny.directory) if word == "MODEL" else word for word in words]
    )
    assert code == 1 and out == "" and err.count("\n") == 1
    source = "text.txt" if "text.txt" in words else "standard input"
    assert source in err and "not UTF-8" in err and " at byte " in err
    assert ("UTF-16" in err) == (data[:2] == b"\xff\xfe")


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "MODEL", "bad \udcff text"],
        ["generate", "MODEL", "--prompt", "bad \udcff text"],
        ["generate", "MODEL", "Hi", "--system", "\udcff"],
        ["generate", "MODEL", "Hi", "--template-arg", "x=\udcff"],
        ["generate", "MODEL", "Hi", "--template-arg", "x"],
        ["generate", "MODEL", "Hi", "--template-arg", "x=False"],
        ["generate", "MODEL", "Hi", "--template-arg", "enable_thinking=false"],
        ["generate", "MODEL", "Hi", "--template-arg", "x=" + "[" * 100_000],
        ["generate", "MODEL", ""],
        ["generate", "MODEL", " "],
        ["generate", "MODEL", "--prompt", ""],
        ["generate", "MODEL"],
        ["generate", "MODEL", "Hi", "--greedy", "--temperature", "1"],
        ["generate", "MODEL", "--raw", "Hi", "--template-arg", "x=1"],
        ["snapshot", "save", "f", "MODEL", "--prompt", "\udcff"],
    ],
    ids=lambda words: " ".join(words[2:])[:40].encode("ascii", "replace").decode(),
)
def test_usage_that_says_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyModel,
    words: list[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    code, out, err = run(
        capsys, *[str(tiny.directory) if word == "MODEL" else word for word in words]
    )
    assert (code, out, err.count("\n")) == (2, "", 1), err


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "\\ud800"}',
        '{"prompt": ""}',
        '{"prompt": "x", "stop": "\\ud800"}',
        '{"prompt": "x", "system": "\\ud800"}',
        '{"prompt": "x", "cache_salt": "\\ud800"}',
        '{"prompt_ids": [9223372036854775808]}',
        '{"prompt_ids": [' + "9" * 5000 + "]}",
        '{"prompt_ids": [1.5]}',
        '{"prompt": "x", "seed": 18446744073709551616}',
        '{"prompt": "x", "top_k": 99999999999999999999}',
        '{"prompt": "x", "temperature": 1e400}',
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "x", "temperature": ' + "9" * 400 + "}",
        '{"prompt": "x", "logit_bias": {"99999999999999999999": 1}}',
        '{"prompt": "x", "logit_bias": {"one": 1}}',
        '{"prompt": "x", "template_args": 1}',
        '{"prompt": "x", "template_args": {"x": 1}}',
        '{"prompt_ids": [1], "template_args": {"x": 1}}',
        '{"prompt": "x", "greedy": true, "temperature": 1}',
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"messages": ' + "[" * 50_000 + "}",
    ],
    ids=lambda line: line[:50],
)
def test_lines_that_cannot_be_answered(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, line: str
) -> None:
    Path("p.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    code, out, err = run(capsys, "generate", str(tiny.directory), "--file", "p.jsonl")
    assert (code, out, err.count("\n")) == (1, "", 1) and "p.jsonl:2: " in err


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[]", b"\x00" * 9, b"[" * 100_000, b""])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "model.safetensors",
    ],
)
def test_model_files_of_other_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes
) -> None:
    model = TinyModel(tmp_path / "model")
    (model.directory / name).write_bytes(content)
    code, out, err = run(capsys, "generate", str(model.directory), "Hi", "--max-tokens", "1")
    assert (code, out, err.count("\n")) == (1, "", 1) and name in err, err


def test_a_template_of_other_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = TinyModel(tmp_path / "model")
    for content in (b"\xff\xfe", b"{% if", b"{{ messages.x() }}", b"{{ '\\ud800' }}"):
        (model.directory / "chat_template.jinja").write_bytes(content)
        code, out, err = run(capsys, "generate", str(model.directory), "Hi")
        assert (code, out, err.count("\n")) == (1, "", 1), err
