from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# A shell has what it starts in the background ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

import quire.tvm  # noqa: E402
from tiny_model import TinyModel  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A llama with random weights, a tokenizer and a chat template."""
    return TinyModel(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(tiny: TinyModel) -> list[str]:
    """Arguments of the program for that model."""
    return [str(tiny.directory), "--dtype", "float32", "--threads", "1"]


@pytest.fixture(scope="session")
def engine(tiny: TinyModel) -> Iterator[quire.Engine]:
    """float32, pages of 16 tokens, short chunks, so that prompts of the tests span several of each.

    Without a prefix cache, so that no page stays in use behind a request.
    """
    with quire.Engine(
        tiny.directory,
        dtype="float32",
        threads=2,
        page_size=16,
        prefill_chunk=24,
        kv_bytes=2 << 20,
        prefix_cache=False,
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def embedded_model() -> str:
    """The folder of SmolLM2-135M-Instruct."""
    return quire.embedded_model_dir()


@pytest.fixture
def installed() -> Iterator[None]:
    """Quire stands behind TVM's names, as by default."""
    quire.tvm.install()
    yield
    quire.tvm.uninstall()


@pytest.fixture(params=[True, False], ids=["as_tvm", "exact"])
def as_tvm(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The same with the named options on, and with them off: what is wrong in TVM is right in both."""
    on = request.param
    quire.tvm.install(tvm_window_span=on, tvm_tree_commit=on, tvm_rnn_history1=on)
    yield on
    quire.tvm.uninstall()
