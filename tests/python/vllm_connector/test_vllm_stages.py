"""Pipeline parallel workers of quire.vllm.QuireConnector: each stage has other layers, which the
scheduler hears of when the workers have registered their KV."""

from __future__ import annotations

import logging
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fake_kernel import KERNELS, FakeKernel
from fake_vllm import ONE_GROUP, FakeGroup
from quire.vllm import QuireConnector, _identity
from quire.vllm._groups import KvGroup, KvRows
from vllm_pair import PROMPT, Pair, fake_passport, walk

passport = pytest.fixture(autouse=True)(fake_passport)

_HYBRID = (FakeGroup(), FakeGroup(window=6, layers=3))


def _stored(folder: Path, **shape: Any) -> None:
    pair = Pair({"directory": str(folder)}, **shape)
    assert pair.generate(PROMPT).external == 0
    assert "errors" not in pair.stats()
    pair.close()


_STAGES: dict[str, Any] = {"stages": 2, "apart": True}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [ONE_GROUP, _HYBRID, (FakeGroup(), FakeGroup(layers=1)), (FakeGroup(layers=1), FakeGroup())],
    ids=["one group", "a window", "a stage lacks the last group", "a stage lacks the first group"],
)
def test_stages_are_found_by_another_engine(
    groups: tuple[FakeGroup, ...], ranks: int, tmp_path: Path
) -> None:
    """A group of one layer is in the second stage alone."""
    shape: dict[str, Any] = {**_STAGES, "groups": groups, "ranks": ranks}
    _stored(tmp_path, **shape)
    pair = Pair({"directory": str(tmp_path)}, **shape)
    parts = pair.scheduler._scheduler._parts
    assert len(parts) == ranks * sum(min(2, group.layers) for group in groups)
    assert pair.generate(PROMPT).external == 12
    assert pair.generate([*PROMPT[:9], 6, 6, 6]).external == 8
    assert "errors" not in pair.stats()
    pair.close()
    for others in ({"stages": 1}, {"ranks": 3 - ranks}):
        pair = Pair({"directory": str(tmp_path)}, **{**shape, **others})
        assert pair.generate(PROMPT, kv_transfer_params={"quire_skip": "save"}).external == 0
        pair.close()


def test_stages_with_other_layers_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many in each stage, which have been cut elsewhere: the passport names them."""
    groups = (FakeGroup(layers=5),)
    found = []
    for cut in ([0, 1, 3, 5], [0, 2, 4, 5], [0, 1, 3, 5]):
        with monkeypatch.context() as patch:
            patch.setattr(
                FakeGroup, "of_stage", lambda _, stage, __, cut=cut: range(*cut[stage : stage + 2])
            )
            pair = Pair({"directory": str(tmp_path)}, groups=groups, stages=3, apart=True)
            found.append(pair.generate(PROMPT).external)
            pair.close()
    assert found == [0, 0, 12]


def test_a_chunk_that_one_stage_lacks_is_not_promised(tmp_path: Path) -> None:
    _stored(tmp_path, **_STAGES)
    pair = Pair({"directory": str(tmp_path)}, **_STAGES)
    keys = pair.scheduler._scheduler._space(b"", 1).keys(PROMPT)
    pair.scheduler._store.remove([keys[1]])
    assert pair.generate(PROMPT).external == 4
    pair.flush()
    assert pair.generate(PROMPT).external == 12, "the second stage has put it there again"
    pair.close()


def test_stages_have_shared_memory_of_their_own_and_give_it_back(tmp_path: Path) -> None:
    """Three layers: one in the first stage, two in the second. Each has as many slots."""
    shape: dict[str, Any] = {**_STAGES, "groups": (FakeGroup(layers=3),)}
    _stored(tmp_path, **shape)
    chunk_bytes = 3 * 32
    pair = Pair({"directory": str(tmp_path), "shared_bytes": 2 * chunk_bytes}, **shape)
    arenas = pair.scheduler._scheduler._arenas
    assert [(each.layer_count, each.slot_count) for each in arenas] == [(1, 2), (2, 2)]
    assert pair.generate(PROMPT).external == 8, "two slots"
    assert [each.free_count for each in arenas] == [2, 2]
    pair.close()


def test_one_stage_that_fails_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stored(tmp_path, **_STAGES)
    pair = Pair({"directory": str(tmp_path)}, **_STAGES)
    monkeypatch.setattr(pair.workers[1]._worker, "_load", lambda *_: 1 / 0)
    assert pair.generate(PROMPT).done
    assert pair.engine.refused_loads == 1
    for arena in pair.scheduler._scheduler._arenas:
        assert arena.free_count == arena.slot_count
    pair.close()


@pytest.mark.parametrize("kernel", [None, KERNELS[2]], ids=["opaque", "canonical"])
def test_stages_that_are_not_heard_are_not_served_and_the_log_says_so(
    kernel: FakeKernel | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _stored(tmp_path, kernel=kernel, **_STAGES)
    real = QuireConnector.set_xfer_handshake_metadata_pp_aware

    def only_the_first(side: Any, told: dict[tuple[int, int], Any]) -> None:
        real(side, {place: each for place, each in told.items() if place == (0, 0)})

    for heard, message in (
        (lambda *_: None, "no worker has told"),
        (only_the_first, r"the workers \[1\] have not told"),
    ):
        monkeypatch.setattr(QuireConnector, "set_xfer_handshake_metadata_pp_aware", heard)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "quire.vllm"):
            pair = Pair({"directory": str(tmp_path)}, kernel=kernel, **_STAGES)
            for _ in range(2):
                assert pair.generate(PROMPT).external == 0
        lines = [each.getMessage() for each in caplog.records]
        (line,) = [each for each in lines if "the order within blocks" not in each]
        assert re.search(f"nothing is stored or found: .*{message}", line)
        assert "errors" not in pair.stats()
        pair.close()


@pytest.mark.parametrize("seed", range(24))
def test_walk_over_stages(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path, groups=None, ranks=None, stages=None, has_kernels=seed % 2 == 1)


def test_the_passport_names_the_stage_and_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(_identity, "weights_identity", lambda _: {"model": "M", "revision": "r"})
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(dtype="torch.bfloat16", quantization=None),
        cache_config=types.SimpleNamespace(cache_dtype="auto"),
    )

    def passports(shard: _identity.Shard, *names: str) -> list[Any]:
        group = KvGroup(names, 16, 8192, KvRows(2, 64, 64, "bf16", 2), None, 128)
        place = (config, group, shard, True)
        return [_identity.passport_of(*place), _identity.canonical_passport_of(*place)]

    shards = _identity.Shard.all_of(2, 3)
    assert [each.name for each in shards] == [
        f"tp{rank}of2.pp{stage}of3" for stage in range(3) for rank in range(2)
    ]
    assert _identity.Shard().name == "canonical"
    for one, other, alone in zip(
        passports(shards[2], "a.1", "a.2"),
        passports(shards[2], "a.2", "a.3"),
        passports(_identity.Shard.all_of(2, 1)[1], "a.1", "a.2"),
        strict=True,
    ):
        assert one["shard"] == "tp0of2.pp1of3" and alone["shard"] == "tp1of2.pp0of1"
        assert one["layout"] != other["layout"] != alone["layout"]
        assert one["layout"].startswith(f"{alone['layout']}/all/")
        assert _identity.is_canonical(one) == _identity.is_canonical(alone)
