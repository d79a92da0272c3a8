"""quire.vllm.QuireConnector with KV on a CUDA GPU, under the fake vLLM of tests/python. vLLM itself
is not needed: torch with CUDA, numpy and quire are.

usage: gpu_connector.py [--seeds N]     (or by pytest, which skips it where there is no GPU)

Saves on the GPU, loads in another process from a folder, damages files, walks at random, and copies
blocks of the shapes that attention kernels have while the GPU is busy. Every byte is compared.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "vllm_connector"))

import quire
from quire.vllm import _blocks
from vllm_pair import PROMPT, Pair, damage, fake_passports, walk

_SEEDS = 16
_PROCESS_SECONDS = 300.0


def _pair(folder: Path, **options: Any) -> Pair:
    with fake_passports():
        extra = {"directory": str(folder), **options.pop("extra", {})}
        pair = Pair(extra, device="cuda", **options)
    for each in pair.worker._worker._blocks:
        assert isinstance(each, _blocks.DeviceBlocks)
    return pair


def _found(folder: Path, **options: Any) -> int:
    """Tokens of the prompt that a new engine takes from the folder."""
    pair = _pair(folder, **options)
    external = pair.generate(PROMPT).external
    assert "errors" not in pair.stats(), pair.stats()
    pair.close()
    return external


def test_another_process_finds_what_this_one_has_saved(tmp_path: Path) -> None:
    assert _found(tmp_path) == 0
    for apart in (False, True):
        subprocess.run(
            [sys.executable, __file__, "--finds", "12", str(tmp_path), *(["--apart"] * apart)],
            check=True,
            timeout=_PROCESS_SECONDS,
        )


def test_chunks_pass_between_gpu_and_cpu_memory(tmp_path: Path) -> None:
    """Of one layout: the fake's passport says so."""
    assert _found(tmp_path / "a") == 0
    with fake_passports():
        pair = Pair({"directory": str(tmp_path / "a")})
        assert pair.generate(PROMPT).external == 12
        pair.close()
        pair = Pair({"directory": str(tmp_path / "b")})
        pair.generate(PROMPT)
        pair.close()
    assert _found(tmp_path / "b") == 12


def test_damage_is_a_miss_and_is_repaired(tmp_path: Path) -> None:
    assert _found(tmp_path) == 0
    found = set()
    for file in sorted(tmp_path.rglob("*.qkv")):
        damage(file)
        found.add(_found(tmp_path))
        assert _found(tmp_path) == 12
    assert found == {0, 4, 8, 12}, "up to the damaged one; the fourth has tokens of the answer"


def test_two_slots_of_pinned_memory_are_enough(tmp_path: Path) -> None:
    small = {"staging_bytes": 1}
    assert _found(tmp_path, extra=small) == 0
    assert _found(tmp_path, extra=small) == 12


def test_walks(tmp_path: Path, seeds: int = _SEEDS) -> None:
    with fake_passports():
        for seed in range(seeds):
            walk(seed, tmp_path / f"{seed}a", staged=False, device="cuda")
            everything: dict[str, Any] = {"groups": None, "ranks": None, "stages": None}
            walk(seed, tmp_path / f"{seed}b", staged=False, device="cuda", **everything)


# ---- Shapes of real kernels, while the GPU is busy

_BLOCKS, _TOKENS, _HEADS, _DIM = 64, 16, 8, 128
_SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "blocks first": lambda: _empty(_BLOCKS, 2, _TOKENS, _HEADS, _DIM),
    "keys, then values": lambda: _empty(2, _BLOCKS, _TOKENS, _HEADS, _DIM).transpose(0, 1),
    "heads before tokens": lambda: _empty(_BLOCKS, 2, _HEADS, _TOKENS, _DIM).transpose(2, 3),
    "odd bytes": lambda: torch.empty(_BLOCKS, 3, 5, dtype=torch.uint8, device="cuda"),
}
_PART = 8  # blocks of a chunk


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def _draw(layers: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for each in layers:
        each.copy_(torch.randint(256, each.shape, generator=generator, device="cuda").byte())
    return [each.clone() for each in layers]


def _keep_busy() -> None:
    """Work in front of what follows on the current stream."""
    matrix = torch.ones(2048, 2048, device="cuda")
    for _ in range(20):
        matrix = matrix @ matrix * 1e-4


def _check_shape(make: Callable[[], torch.Tensor], folder: Path) -> None:
    layers = [make().view(torch.uint8) for _ in range(3)]
    page_bytes = layers[0][0].numel()
    store = quire.ChunkStore(directory=str(folder), ram_bytes=1 << 28)
    space = store.space(
        {
            "model": "m", "revision": "r", "layout": "gpu", "block": _PART, "layers": [0, 3],
            "kind": "latent", "dtype": "u8", "kv_heads": 1, "head_dim": page_bytes,
        }
    )  # fmt: skip
    stream = _blocks.stream_of(layers[0].device)
    assert stream is not None
    blocks = _blocks.DeviceBlocks(layers, _PART, stream, 3 * _PART * 3 * page_bytes)
    before = _draw(layers, seed=1)
    order = torch.randperm(_BLOCKS).tolist()
    chunks = [order[i : i + _PART] for i in range(0, _BLOCKS, _PART)]
    on_device = [torch.tensor(chunk, device="cuda") for chunk in chunks]
    tokens = list(range(_BLOCKS))
    for index, chunk in enumerate(chunks):  # more chunks than slots
        _keep_busy()

        def put(memory: quire.BlockMemory, numbers: list[int], index: int = index) -> None:
            space.put(index, tokens, memory=memory, blocks=numbers)

        blocks.save(chunk, put)
        for each in layers:
            each.index_fill_(0, on_device[index], 0xDD)  # the next step has these blocks
    blocks.finish(wait=True)
    fetch = space.fetch(tokens)
    assert fetch.wait(30.0) and fetch.ready == len(chunks)
    _keep_busy()
    for each in layers:
        each.fill_(0xEE)  # what the blocks have before the load, late
    blocks.load(_blocks.FetchedChunks(fetch, 0), len(chunks), order)
    read = [each.clone() for each in layers]  # a kernel of the step
    for each in layers:
        each.fill_(0)
    for found, expected in zip(read, before, strict=True):
        assert torch.equal(found, expected)
    fetch.close()
    store.close()


def test_blocks_of_real_shapes_are_equal_in_bytes(tmp_path: Path) -> None:
    for name, make in _SHAPES.items():
        _check_shape(make, tmp_path / name.replace(" ", "-"))


# ---- As a script

if "pytest" in sys.modules:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=_SEEDS, help="random walks")
    arguments.add_argument("--finds", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if not torch.cuda.is_available():
        print("gpu_connector: there is no CUDA GPU", file=sys.stderr)
        return 2
    if given.finds is not None:
        found = _found(Path(given.folder), apart=given.apart)
        assert found == given.finds, f"{found} tokens were found, not {given.finds}"
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            with tempfile.TemporaryDirectory() as folder:
                test(Path(folder), **({"seeds": given.seeds} if test is test_walks else {}))
            print(f"{name}: passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
