"""Calls of the program `quire`, in this process and as one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from quire import cli

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(list(arguments))
    except SystemExit as exit:  # argparse ends usage errors and --help this way
        code = int(exit.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def process(
    *arguments: str, environment: Sequence[str] = (), **options: object
) -> subprocess.Popen[bytes]:
    """environment: further variables, as "NAME=VALUE"."""
    more = dict(entry.split("=", 1) for entry in environment)
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **more}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "quire", *arguments],
        env=variables,
        **(streams | options),  # type: ignore[call-overload]
    )
