from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import DEADLINE, Server, running  # noqa: E402
from tiny_model import TinyModel  # noqa: E402

KEYS = """\
# name  key                   share
ann     ann-key-0123456789
bob     bob-key-0123456789    3
"""


@pytest.fixture(scope="session")
def server(tiny: TinyModel) -> Iterator[Server]:
    """Without keys, of the same model and arithmetic as the fixture `engine`. Without a prefix
    cache no page stays in use."""
    with running(tiny.directory, "--no-prefix-cache", "--page-size", "16") as server:
        yield server


@pytest.fixture(scope="session")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="session")
def keyed(tiny: TinyModel, keys_file: Path) -> Iterator[Server]:
    """With the keys of ann and bob, and a prefix cache."""
    # Tests send it more wrong keys than one address should.
    options = ("--api-keys", str(keys_file), "--page-size", "16", "--limit", "wrong_keys=10000")
    with running(tiny.directory, *options, key="ann-key-0123456789") as server:
        yield server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    path = tmp_path_factory.mktemp("redis") / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
    with open(path.with_suffix(".log"), "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            while server.poll() is None:
                try:
                    peer.connect(str(path))
                    break
                except OSError:
                    continue  # it has not bound yet
        yield f"unix:{path}"
    finally:
        server.terminate()
        server.wait(DEADLINE)
