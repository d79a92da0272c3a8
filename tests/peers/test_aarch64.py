"""The engine built for aarch64, under qemu, gives the tokens of the embedded model that it gives on
this machine: `./test aarch64`. The paths neon and scalar have the same bits (docs/exactness.md)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from quire.embedded import embedded_model_dir
from quire.text import Tokenizer

_BUILD = Path(__file__).parents[2] / "build"
_PROGRAM = Path("examples") / "example_generate"


def _tokens(path: str, *command: object) -> list[int]:
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | {"QUIRE_KERNELS": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [int(word) for word in done.stdout.split()]


def test_the_embedded_model_answers_as_here() -> None:
    model = embedded_model_dir()
    tokenizer = Tokenizer(model)
    question = [{"role": "user", "content": "What is a quire of paper?"}]
    prompt = tokenizer.encode_chat(question)
    here = _tokens("scalar", _BUILD / "release" / _PROGRAM, model, *prompt)
    there = _tokens("neon", "qemu-aarch64", _BUILD / "aarch64" / _PROGRAM, model, *prompt)
    assert there == here
    assert "paper" in tokenizer.decode(there)
