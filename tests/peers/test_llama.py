"""Logits of llama.cpp's server on the same GGUF files: `./test peers`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import quire
from gguf import GGMLQuantizationType, GGUFReader
from quire.embedded import _find_gguf, embedded_model_dir

sys.path.append(str(Path(__file__).parents[1] / "python"))
import tiny_gguf  # noqa: E402

_PEERS = Path(os.environ.get("QUIRE_PEERS", "~/.cache/quire-peers")).expanduser()
_LLAMA = _PEERS / "llama" / "bin"
_TEXT = Path(__file__).parents[2] / "docs" / "tutorial.md"
_TOKENS = 32  # of the text, each with all probabilities of the next one


class LlamaServer:
    """One process with one model, computing as Quire does: keys and values in float32."""

    def __init__(self, file: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/completion"
        command = [_LLAMA / "llama-server", "-m", file, "--port", port, "-c", 512, "-np", 1]
        command += ["-ctk", "f32", "-ctv", "f32", "-t", 2, "--no-warmup"]
        self.process = subprocess.Popen(
            [str(word) for word in command], stderr=subprocess.STDOUT, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self._log: list[bytes] = []
        self._listens = False
        is_known = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout, is_known))
        self._reader.start()
        is_known.wait()
        assert self._listens, b"".join(self._log[-20:]).decode(errors="replace")

    def _read(self, output: IO[bytes], is_known: threading.Event) -> None:
        for line in output:
            self._log.append(line)
            if b"listening on http" in line:
                self._listens = True
                is_known.set()
        is_known.set()  # it has ended, and says why

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._reader.join()

    def log_probabilities(self, ids: list[int], vocab_size: int, drawn: int) -> np.ndarray:
        """[tokens, vocab_size]: of the token behind each. `drawn`: the token that answers have, a
        whole character; what an answer of another one would say is left out of it."""
        found = np.empty((len(ids), vocab_size))
        options = {
            "n_predict": 1,
            "n_probs": vocab_size,
            "cache_prompt": True,
            "temperature": 0,
            "logit_bias": [[drawn, 1e6]],
        }
        for count in range(1, len(ids) + 1):
            body = json.dumps({"prompt": ids[:count], **options}).encode()
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                (token,) = json.load(answer)["completion_probabilities"]
            assert len(token["top_logprobs"]) == vocab_size
            for entry in token["top_logprobs"]:
                found[count - 1, entry["id"]] = entry["logprob"]
        return found


@contextlib.contextmanager
def llama_server(file: Path) -> Iterator[LlamaServer]:
    server = LlamaServer(file)
    try:
        yield server
    finally:
        server.stop()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def ours(model: Path, ids: list[int]) -> np.ndarray:
    options = {"dtype": "float32", "kv_dtype": "float32", "kv_bytes": 64 << 20, "threads": 2}
    with quire.Engine(model, **options) as engine:  # type: ignore[arg-type]
        return log_softmax(engine.logits(ids))


def divergence(of: np.ndarray, against: np.ndarray) -> float:
    """The mean Kullback-Leibler divergence of the next token, in nats."""
    return float((np.exp(against) * (against - of)).sum(axis=1).mean())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "cache"))


# Of latent attention the later of two kinds of files; gate and up of experts as one tensor are read
# by this version of llama.cpp for that kind alone.
CASES = [
    *((arch, False) for arch in ("llama", "qwen3", "gemma3", "mixtral", "qwen2moe", "qwen3moe")),
    *(("deepseek3", fused) for fused in (False, True)),
]


@pytest.mark.parametrize("arch,fused", CASES)
def test_random_models_have_the_logits_of_llama(tmp_path: Path, arch: str, fused: bool) -> None:
    """In float32: what is left are roundings, and llama.cpp's tables of activations in float16."""
    weights = tiny_gguf.random_weights(5, tiny_gguf.vocab_size(), arch, tied=False)
    scaled = {
        name: value / 8 if value.ndim == 2 else 1 + value / 16 for name, value in weights.items()
    }
    file = tmp_path / "model.gguf"
    tiny_gguf.write_model(file, scaled, arch, fused=fused)
    ids = [5 + 7 * i % 200 for i in range(24)]
    with llama_server(file) as server:
        theirs = server.log_probabilities(
            ids, tiny_gguf.vocab_size(), len(tiny_gguf.SPECIAL_TOKENS)
        )
    difference = np.abs(ours(file, ids) - theirs)
    assert (difference.mean() < 2e-3, difference.max() < 3e-2) == (True, True)


def quantised(source: Path, made: Path, kind: str, *options: str) -> Path:
    """By llama.cpp's quantizer."""
    subprocess.run(
        [_LLAMA / "llama-quantize", "--allow-requantize", *options, source, made, kind],
        check=True,
        capture_output=True,
    )
    return made


def test_the_embedded_model_is_as_near_as_llama(tmp_path: Path) -> None:
    """With the same quantised file no farther from the model before than llama.cpp, and a tenth.

    Both round activations to 8 bits, by rules of their own, so the two lie about as far apart.
    """
    plain = quantised(_find_gguf()[0], tmp_path / "plain.gguf", "BF16")
    files = {kind: quantised(plain, tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_K_M")}
    with quire.Engine(embedded_model_dir()) as engine:
        ids = engine.tokenizer.encode(_TEXT.read_text())[:_TOKENS]
        vocab_size = engine.info.vocab_size
        (plain_token,) = engine.tokenizer.encode("a")
    theirs = {}
    for kind, file in {"BF16": plain, **files}.items():
        with llama_server(file) as server:
            theirs[kind] = server.log_probabilities(ids, vocab_size, plain_token)
    found = {kind: ours(file, ids) for kind, file in {"BF16": plain, **files}.items()}
    assert divergence(found["BF16"], theirs["BF16"]) < 1e-3
    for kind in files:
        own = divergence(found[kind], found["BF16"])
        of_llama = divergence(theirs[kind], theirs["BF16"])
        assert own <= 1.1 * of_llama, kind
        assert divergence(found[kind], theirs[kind]) <= own + of_llama, kind
    kinds = {tensor.tensor_type for tensor in GGUFReader(files["Q4_K_M"]).tensors}
    assert GGMLQuantizationType.Q4_K in kinds
