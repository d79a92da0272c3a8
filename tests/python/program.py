"""Calls of the program `quire`, in this process and as one of its own, certificates for TLS, UCX,
and ports for the programs of others."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from quire import _ffi, cli

ROOT = Path(__file__).parents[2]


def use_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections over UCX take tcp, here and in processes that are started."""
    if not _ffi.LIBRARY_PATH.with_name("libquire_ucx.so").exists():
        pytest.skip("no libquire_ucx.so: UCX's headers (libucx-dev) were not found")
    monkeypatch.setenv("UCX_TLS", "tcp")


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


def same_imports() -> dict[str, str]:
    """The environment of a process that finds what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_source(source: str, *arguments: str, timeout: float = 300) -> None:
    """Runs Python's source in a process of its own, such as one that forks: it must end well."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=same_imports(),
    )
    assert ended.returncode == 0, ended.stderr


def free_port() -> int:
    """For a program that is told its port: below those that the system gives to connections and to
    whoever asks for any, so that nobody takes it before the program does."""
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            except OSError:
                continue
            return int(listener.getsockname()[1])


class Certificates:
    """Of an authority, for a server at 127.0.0.1 and for a client, with their keys. All PEM, made by
    the program openssl."""

    def __init__(self, folder: Path) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("openssl is not installed; tools/setup.sh does it")
        self._openssl, self._folder = openssl, folder
        self.ca = folder / "ca.pem"
        self._make("ca")
        signed_by = ["-CA", str(self.ca), "-CAkey", str(folder / "ca.key")]
        self.server = self._make("server", *signed_by, "-addext", "subjectAltName=IP:127.0.0.1")
        self.client = self._make("client", *signed_by)

    def key_of(self, certificate: Path) -> Path:
        return certificate.with_suffix(".key")

    def _make(self, who: str, *more: str) -> Path:
        path = self._folder / who
        subprocess.run(
            [self._openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt"]
            + ["ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={who}"]
            + ["-keyout", f"{path}.key", "-out", f"{path}.pem", *more],
            check=True,
            capture_output=True,
        )
        return path.with_suffix(".pem")
