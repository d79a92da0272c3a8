"""vLLM itself with quire.vllm.QuireConnector. Runs in vLLM's environment: `./test peers`.

The promise: a hit gives the tokens that vLLM's own prefix cache gives at that border. (vLLM on CPUs
is not exact: its own hit may change tokens against a cold run.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from vllm_process import Run, random_prompt, run, save_llama, save_lora, save_model

PROMPT = random_prompt(1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("model"))


_FOUR_LAYERS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers with recurrent states, and one that attends to everything."""
    return save_model(
        tmp_path_factory.mktemp("hybrid"),
        transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig,
        **_FOUR_LAYERS,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Gemma 3: three layers with a window of 256 tokens, and one that attends to everything."""
    return save_model(
        tmp_path_factory.mktemp("windowed"),
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        **_FOUR_LAYERS,
        sliding_window=256,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )


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


@pytest.mark.parametrize("block_size", [32, 64])
def test_blocks_of_another_size_are_filled(
    model: str, executor: str, folder: Path, block_size: int
) -> None:
    """As vLLM's own hit at that border does."""
    branch = [*PROMPT[:896], *PROMPT[:20]]
    own = run(model, [branch, PROMPT], None, block_size=block_size)
    assert own.cached == [0, 896]
    found = run(model, [PROMPT], {"directory": str(folder)}, executor, block_size=block_size)
    assert found.cached == [896]
    assert found.answers == own.answers[1:]
    opaque = {"directory": str(folder), "layout": "opaque"}
    assert run(model, [PROMPT], opaque, executor, block_size=block_size).cached == [0]


def test_one_flipped_byte_is_computed_and_repaired(
    model: str, own: Run, executor: str, folder: Path
) -> None:
    (first,) = _first_chunks(folder)
    _damage(first)
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
        again | {"reset": "sleep"},
    ]
    found = run(model, prompts, {"ram_bytes": 1 << 28})
    assert found.cached == [0, 896, 0, 0, 0, 896, 0]
    cold, hit = own.answers
    assert found.answers == [cold, hit, cold, cold, cold, hit, cold]


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


def expect_hits_after_a_restart(model: str, own: Run, kv: Path) -> None:
    """As vLLM's own. own: of the prompt twice, without a connector."""
    connector = {"directory": str(kv)}
    cold = run(model, [PROMPT], connector)
    assert (cold.cached, cold.answers) == ([0], own.answers[:1])
    again = run(model, [PROMPT], connector, executor="mp")
    assert (again.cached, again.answers) == (own.cached[1:], own.answers[1:])


def test_recurrent_states_survive_a_restart(hybrid: str, tmp_path: Path) -> None:
    """Found at the last end of a block where a step ended, as by vLLM itself."""
    own = run(hybrid, [PROMPT, PROMPT], None)
    assert 500 < own.cached[1] < 1000
    expect_hits_after_a_restart(hybrid, own, tmp_path)


def test_windows_survive_a_restart(windowed: str, tmp_path: Path) -> None:
    """With vLLM's hybrid manager, as by default; of the windows less is stored than of the rest."""
    own = run(windowed, [PROMPT, PROMPT], None)
    assert 800 < own.cached[1] < 1000
    expect_hits_after_a_restart(windowed, own, tmp_path)


def test_pipeline_stages_survive_a_restart(model: str, tmp_path: Path) -> None:
    """Two layers in one worker, one in the other."""
    stages: dict[str, Any] = {"executor": "mp", "pipeline_parallel_size": 2}
    own = run(model, [PROMPT, PROMPT], None, **stages)
    assert own.cached == [0, 896]
    connector = {"directory": str(tmp_path)}
    cold = run(model, [PROMPT], connector, **stages)
    assert (cold.cached, cold.answers) == ([0], own.answers[:1])
    again = run(model, [PROMPT], connector, **stages)
    assert (again.cached, again.answers) == (own.cached[1:], own.answers[1:])


def test_workers_that_share_the_heads_survive_a_restart(model: str, tmp_path: Path) -> None:
    """One head of keys and values in each. What one of them lacks is promised by neither."""
    shared: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2}
    own = run(model, [PROMPT, PROMPT], None, **shared)
    assert own.cached == [0, 896]
    connector = {"directory": str(tmp_path)}
    cold = run(model, [PROMPT], connector, **shared)
    assert (cold.cached, cold.answers) == ([0], own.answers[:1])
    assert len(list(tmp_path.rglob("*.qkv"))) == 2 * 7
    again = run(model, [PROMPT], connector, **shared)
    assert (again.cached, again.answers) == (own.cached[1:], own.answers[1:])
    assert again.metrics["vllm:quire_loaded_tokens"] == 2 * 896
    first, _ = _first_chunks(tmp_path)
    _damage(first)
    damaged = run(model, [PROMPT], connector, **shared)
    assert (damaged.cached, damaged.answers) == ([0], own.answers[:1])
    assert damaged.metrics["vllm:quire_misses"] >= 1


def test_loras_survive_a_restart(model: str, tmp_path: Path) -> None:
    """Under another name, and not as another adapter of the same name."""
    one, two = save_lora(tmp_path / "one", 1), save_lora(tmp_path / "two", 2)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    first = {"ids": PROMPT, "lora": ["first", 1, one]}
    own = run(model, [first, first, PROMPT], None, **options)
    assert own.cached == [0, 896, 0]
    assert own.answers[0] != own.answers[2]
    connector = {"directory": str(tmp_path / "kv")}
    cold = run(model, [first], connector, **options)
    assert (cold.cached, cold.answers) == ([0], own.answers[:1])
    asked = [
        {"ids": PROMPT, "lora": ["renamed", 5, one]},
        {"ids": PROMPT, "lora": ["first", 1, two]},
        PROMPT,
    ]
    again = run(model, asked, connector, executor="mp", **options)
    assert again.cached == [896, 0, 0]
    assert (again.answers[0], again.answers[2]) == (own.answers[1], own.answers[2])


def _first_chunks(folder: Path) -> list[Path]:
    """The files of tokens 0 to 127, one for each worker: the header has their ids, after 40 bytes
    for each section."""
    ids = b"".join(token.to_bytes(4, "little") for token in PROMPT[:128])
    return [each for each in folder.rglob("*.qkv") if ids in each.read_bytes()]


def _damage(file: Path) -> None:
    """Flips a byte of keys or values."""
    data = bytearray(file.read_bytes())
    data[int.from_bytes(data[12:16], "little") + 100] ^= 0xFF
    file.write_bytes(data)
