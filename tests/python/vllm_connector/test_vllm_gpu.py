"""tests/peers/gpu_connector.py, where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

_SCRIPT = Path(__file__).parents[2] / "peers" / "gpu_connector.py"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_kv_on_a_gpu() -> None:
    subprocess.run([sys.executable, str(_SCRIPT)], check=True, timeout=600)


def test_the_script_says_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU")
    done = subprocess.run(
        [sys.executable, str(_SCRIPT)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2, done.stderr
    assert "there is no CUDA GPU" in done.stderr
