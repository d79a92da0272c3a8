"""vLLM itself with quire.vllm.QuireConnector. Runs in vLLM's environment: `./test peers`.

The promise: a hit gives the tokens that vLLM's own prefix cache gives at that border. (vLLM on CPUs
is not exact: its own hit may change tokens against a cold run.)
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

_RUN = Path(__file__).with_name("vllm_run.py")
_PATIENCE = 400.0
_COUNT = 16
_RANDOM = random.Random(3)
_VOCABULARY = 2000
PROMPT = [_RANDOM.randrange(10, _VOCABULARY) for _ in range(1000)]


@dataclasses.dataclass
class Run:
    """answers: ids. cached: tokens of each prompt that were not computed."""

    answers: list[list[int]]
    cached: list[int]
    metrics: dict[str, float]
    events: list[dict[str, Any]]
    log: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def run(
    model: str,
    prompts: list[Any],
    connector: dict[str, Any] | None,
    executor: str = "",
    *,
    events: bool = False,
) -> Run:
    load = {
        "model": model,
        "prompts": prompts,
        "count": _COUNT,
        "connector": connector,
        "executor": executor,
        "events": events,
    }
    done = subprocess.run(
        [sys.executable, str(_RUN)],
        input=json.dumps(load),
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Run(**json.loads(done.stdout.splitlines()[-1]), log=done.stdout + done.stderr)


@pytest.fixture(scope="module")
def own(model: str) -> Run:
    """Without a connector: cold, then vLLM's own hit at the border of 896 tokens."""
    found = run(model, [PROMPT, PROMPT], None)
    assert found.cached == [0, 896]
    return found


@pytest.fixture(scope="module", params=["", "mp"], ids=["one process", "worker process"])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(model: str, own: Run, executor: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process of vLLM has left."""
    kv = tmp_path_factory.mktemp("kv")
    cold = run(model, [PROMPT], {"directory": str(kv)}, executor)
    assert cold.cached == [0]
    assert cold.answers == own.answers[:1]
    assert len(list(kv.rglob("*.qkv"))) == 7
    return kv


def test_a_restart_hits_and_gives_the_tokens_of_vllms_own_hit(
    model: str, own: Run, executor: str, folder: Path
) -> None:
    again = run(model, [PROMPT], {"directory": str(folder)}, executor)
    assert again.cached == [896]
    assert again.answers == own.answers[1:]


def test_one_flipped_byte_is_computed_and_repaired(
    model: str, own: Run, executor: str, folder: Path
) -> None:
    first = {_key_of_first_chunk(folder)}
    for file in folder.rglob("*.qkv"):
        if file.name in first:
            data = bytearray(file.read_bytes())
            data[int.from_bytes(data[12:16], "little") + 100] ^= 0xFF
            file.write_bytes(data)
    damaged = run(model, [PROMPT], {"directory": str(folder)}, executor)
    assert damaged.cached == [0]
    assert damaged.answers == own.answers[:1]
    assert damaged.metrics["vllm:quire_misses"] >= 1
    repaired = run(model, [PROMPT], {"directory": str(folder)}, executor)
    assert repaired.cached == [896]
    assert repaired.answers == own.answers[1:]


def test_salts_parameters_and_resets(model: str, own: Run) -> None:
    again = {"ids": PROMPT, "reset": "own"}
    prompts = [
        PROMPT,
        again,
        again | {"salt": "ann"},
        again | {"kv": {"quire_skip": "load"}},
        again | {"reset": "both"},
        again,
    ]
    found = run(model, prompts, {"ram_bytes": 1 << 28})
    assert found.cached == [0, 896, 0, 0, 0, 896]
    cold, hit = own.answers
    assert found.answers == [cold, hit, cold, cold, cold, hit]


def test_events_name_blocks_by_vllms_hashes(model: str, tmp_path: Path) -> None:
    """The second prompt is there for one more step, which takes what was written meanwhile."""
    connector = {"directory": str(tmp_path)}
    found = run(model, [PROMPT, PROMPT[:50]], connector, executor="mp", events=True)
    own = [each for each in found.events if each["medium"] == "GPU"]
    stored = [each for each in found.events if each["medium"] == "STORAGE"]
    assert {each["name"] for each in own + stored} == {"BlockStored"}
    hashes = {each for event in own for each in event["hashes"]}
    assert len(stored) == 7
    assert {each for event in stored for each in event["hashes"]} <= hashes
    assert {event["parent"] for event in stored} - {None} <= hashes


def _key_of_first_chunk(folder: Path) -> str:
    """The name of the file of tokens 0 to 127: the header has their ids, after 40 bytes for each
    section."""
    ids = b"".join(token.to_bytes(4, "little") for token in PROMPT[:128])
    (name,) = [each.name for each in folder.rglob("*.qkv") if ids in each.read_bytes()]
    return name
