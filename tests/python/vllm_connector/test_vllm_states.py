"""Recurrent states under quire.vllm.QuireConnector: a block has one behind its last token, if a
step has ended there, and a prompt is taken up where every layer has its state."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import quire
from fake_kernel import KERNELS
from fake_vllm import BLOCK, FakeGroup, MambaSpec, config
from late_stream import LateStream
from quire.vllm import QuireConnector, _groups
from quire.vllm._options import Options
from vllm_pair import PROMPT, STATES, Pair, damage, fake_passport, walk

passport = pytest.fixture(autouse=True)(fake_passport)

_HYBRID = STATES[0]
_SKIPS_SAVES = {"kv_transfer_params": {"quire_skip": "save"}}


def _pair(folder: Path, **shape: Any) -> Pair:
    return Pair({"directory": str(folder)}, **{"groups": _HYBRID, **shape})


def _stored(folder: Path, prompt: list[int] = PROMPT, **shape: Any) -> None:
    pair = _pair(folder, **shape)
    pair.generate(prompt, kv_transfer_params={"quire_skip": "load"})
    assert "errors" not in pair.stats()
    pair.close()


def _found(folder: Path, prompt: list[int] = PROMPT, **shape: Any) -> int:
    pair = _pair(folder, **shape)
    found = pair.generate(prompt, **_SKIPS_SAVES).external
    assert not pair.stats().keys() & {"errors", "failed_loads"}
    pair.close()
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["one process", "two processes"])
@pytest.mark.parametrize("groups", STATES, ids=lambda groups: str(len(groups)))
def test_states_are_found_by_another_engine(
    groups: tuple[FakeGroup, ...], apart: bool, tmp_path: Path
) -> None:
    _stored(tmp_path, groups=groups, apart=apart)
    for stream in (None, LateStream(random.Random(1))):
        shape: dict[str, Any] = {"groups": groups, "apart": apart, "stream": stream}
        assert _found(tmp_path, **shape) == 12
        assert _found(tmp_path, [*PROMPT[:12], *[6] * 9], **shape) == 12
        assert _found(tmp_path, [*PROMPT[:9], 6, 6, 6], **shape) == 0, "no step has ended at 8"


def test_a_border_moves_until_it_meets_a_state(tmp_path: Path) -> None:
    """More often than a border may move that waits for timeouts."""
    long = [*PROMPT[:12], *(i % 5 for i in range(60))]
    _stored(tmp_path)
    pair = _pair(tmp_path)
    pair.engine.budget = 60
    pair.generate(long, kv_transfer_params={"quire_skip": "load"})
    pair.close()
    pair = _pair(tmp_path)
    assert pair.generate(long[:59], **_SKIPS_SAVES).external == 12
    assert pair.generate(long[:71], **_SKIPS_SAVES).external == 60, "a step had 60 tokens"
    assert pair.generate(long[:23], **_SKIPS_SAVES).external == 12
    assert pair.stats()["misses.not stored"] == 3
    pair.close()


def test_only_one_state_is_read(tmp_path: Path) -> None:
    long = [i % 5 for i in range(80)]
    _stored(tmp_path, long)
    pair = _pair(tmp_path)
    assert pair.generate(long, **_SKIPS_SAVES).external == 72
    assert pair.scheduler._store.statistics()["tiers"]["disk"]["hits"] == 19 + 1
    pair.close()


def test_a_damaged_state_is_a_miss_and_is_repaired(tmp_path: Path) -> None:
    _stored(tmp_path)
    found = []
    for file in sorted(tmp_path.rglob("*.qkv")):
        damage(file)
        pair = _pair(tmp_path)
        found.append(pair.generate(PROMPT).external)
        pair.flush()
        assert pair.generate(PROMPT).external == 12
        pair.close()
    # Three chunks and a half of attention, and the states behind tokens 12 and 16.
    assert sorted(found) == [0, 0, 0, 0, 12, 12]


def test_answers_have_states_where_they_end_with_a_block(tmp_path: Path) -> None:
    pair = _pair(tmp_path)
    answer = pair.generate(PROMPT, 10)
    assert pair.generate(answer.all_token_ids, 1).external == 24
    pair.close()


def test_stages_and_workers_have_states_of_their_own(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"ranks": 2, "stages": 2, "apart": True}
    _stored(tmp_path, **shape)
    assert _found(tmp_path, **shape) == 12
    assert _found(tmp_path, ranks=2, apart=True) == 0
    pair = _pair(tmp_path, **shape)
    side = pair.scheduler._scheduler
    (states, *_) = (i for i, part in enumerate(side._parts) if part.group.state)
    pair.scheduler._store.remove([side._space(b"", states).keys(PROMPT)[2]])
    assert pair.generate(PROMPT).external == 0, "one worker lacks its state"
    pair.close()


def test_a_chunk_of_several_blocks_has_the_state_of_its_end(tmp_path: Path) -> None:
    extra = {"directory": str(tmp_path), "chunk_tokens": 2 * BLOCK}
    prompt = [*PROMPT, 3, 3]
    for expected in (0, 16):
        pair = Pair(extra, groups=_HYBRID)
        assert pair.generate(prompt).external == expected
        pair.close()


def test_states_of_another_kind_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stored(tmp_path)
    real = FakeGroup.spec

    def spec(group: FakeGroup) -> Any:
        found = real(group)
        if group.state:
            found.dtypes = ("float32",)
        return found

    monkeypatch.setattr(FakeGroup, "spec", spec)
    assert _found(tmp_path) == 0


def test_without_another_word_a_chunk_is_a_block() -> None:
    """So that each end of a block may have a state."""
    _, states = config({}, 8, groups=_HYBRID)
    _, attention = config({}, 8)
    assert _groups.has_states(states) and not _groups.has_states(attention)
    assert Options.read({}, BLOCK, joins_blocks=False).chunk_tokens == BLOCK
    assert Options.read({}, BLOCK).chunk_tokens == 128


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mamba_cache_mode": "none"}, "mamba_cache_mode is 'none'.*--enable-prefix-caching"),
        ({"num_speculative_blocks": 1}, "no speculative decoding with such a model"),
        ({"page_size_bytes": 30, "block_size": 8}, "30 bytes, which are not whole bytes"),
    ],
)
def test_states_that_it_cannot_keep_are_named(changed: dict[str, Any], message: str) -> None:
    vllm_config, kv_cache_config = config({"ram_bytes": 1 << 20}, 8, groups=(_HYBRID[1],))
    (group,) = kv_cache_config.kv_cache_groups
    vars(group.kv_cache_spec).update(changed)
    with pytest.raises(quire.BadArgumentError, match=message):
        QuireConnector(vllm_config, "WORKER", kv_cache_config)


def test_states_that_are_registered_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a list of tensors, or without room for whole bytes of each token."""
    real = FakeGroup.registered
    for registered, message in (
        (lambda memory: memory.flatten(1)[:, :29].clone(), "not 40 blocks of 32 bytes"),
        (lambda memory: [memory, memory], "as a list, not as a tensor"),
    ):
        monkeypatch.setattr(
            FakeGroup,
            "registered",
            lambda group, memory, of_states=registered: (
                of_states(memory) if group.state else real(group, memory)
            ),
        )
        with pytest.raises(quire.BadArgumentError, match=message):
            _pair(tmp_path)


def test_what_a_state_is_is_in_its_identity() -> None:
    spec = types.SimpleNamespace(**vars(_HYBRID[1].spec()))
    group = types.SimpleNamespace(layer_names=["a"], kv_cache_spec=MambaSpec(**vars(spec)))
    found = _groups._group_of(group, BLOCK)
    assert found.identity.startswith("state/")
    assert (found.first_needed(3), found.lead(3), found.never_needed) == (2, 0, 0)
    assert found.page_bytes == 32, "29 bytes, and what is left of whole bytes for 4 tokens"


@pytest.mark.parametrize("seed", range(30))
def test_walk_over_states(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path, groups=STATES[seed % len(STATES)], ranks=None, stages=None)


@pytest.mark.parametrize("seed", range(10))
def test_walk_over_states_and_kernels(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path, groups=STATES[seed % len(STATES)], has_kernels=True)


def test_the_kernels_of_attention_do_not_matter(tmp_path: Path) -> None:
    _stored(tmp_path, kernel=KERNELS[1])
    assert _found(tmp_path, kernel=KERNELS[2]) == 12
