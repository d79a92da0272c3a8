"""LMCache 0.3.7's own tests of blending, of its source package (`bench/setup lmcache`), pass with
quire.lmcache. Its file is run as it is, but for the device: KV is in memory of the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PEERS = Path(os.environ.get("QUIRE_PEERS") or Path.home() / ".cache" / "quire-peers")
_FILE = _PEERS / "lmcache-0.3.7" / "tests" / "test_blend.py"


def test_its_own_tests_pass(tmp_path: Path) -> None:
    (tmp_path / _FILE.name).write_text(_FILE.read_text().replace('"cuda"', '"cpu"'))
    paths = [str(_HERE), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lmcache_names", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert re.search(r"^6 passed", run.stdout, re.MULTILINE), run.stdout
