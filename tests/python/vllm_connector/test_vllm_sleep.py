"""vLLM's sleep mode under quire.vllm.QuireConnector, and KV that is registered again. The weights
may be others afterwards, in the same process: a forward that reads KV of those before fails."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fake_kernel import KERNELS, FakeKernel
from fake_vllm import ONE_GROUP, FakeGroup, FakeRequest, WrongBytes
from late_stream import LateStream
from quire.vllm import _plan, _scheduler
from vllm_pair import PROMPT, Pair, fake_passport

passport = pytest.fixture(autouse=True)(fake_passport)

_SHAPES: list[dict[str, Any]] = [
    {},
    {"apart": True},
    {"apart": True, "ranks": 2, "groups": (FakeGroup(), FakeGroup(window=6, layers=3))},
    {"apart": True, "stages": 2},
]


@pytest.mark.parametrize("registers", [False, True], ids=["", "registered again"])
@pytest.mark.parametrize("kernel", [None, KERNELS[1]], ids=["opaque", "canonical"])
@pytest.mark.parametrize("shape", _SHAPES, ids=["one process", "two", "ranks", "stages"])
@pytest.mark.parametrize("level", [1, 2])
def test_nothing_from_before_a_sleep_is_found(
    level: int, shape: dict[str, Any], kernel: FakeKernel | None, registers: bool, tmp_path: Path
) -> None:
    """The connector is not told the level, so it is the same with both. What another process of the
    first weights has found stays."""
    pair = Pair({"directory": str(tmp_path)}, kernel=kernel, **shape)
    pair.generate(PROMPT)
    pair.flush()
    assert pair.generate(PROMPT).external == 12
    running = FakeRequest("runs", [*PROMPT, 9, 9], 9)
    pair.engine.add(running)
    pair.engine.step()
    pair.engine.sleep(weights=level - 1, registers=registers)
    assert pair.generate(PROMPT).external == 0
    pair.flush()
    assert pair.generate(PROMPT).external == 12
    pair.engine.sleep(weights=level - 1, registers=registers)
    assert pair.generate(PROMPT).external == 0
    assert not pair.stats().keys() & {"errors", "failed_loads"}
    pair.close()
    again = Pair({"directory": str(tmp_path)}, kernel=kernel, **shape)
    assert again.generate(PROMPT).external == 12
    again.close()


def test_without_its_reset_the_connector_would_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_scheduler.SchedulerSide, "reset", lambda _: True)
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT)
    pair.engine.sleep(weights=1)
    with pytest.raises(WrongBytes):
        pair.generate(PROMPT)
    pair.close()


def test_what_a_device_has_not_copied_yet_is_of_the_weights_before(tmp_path: Path) -> None:
    """It lies in pinned memory during the sleep, and goes to the store after it."""
    pair = Pair({"directory": str(tmp_path)}, stream=LateStream(random.Random(1)))
    pair.generate(PROMPT)
    pair.engine.sleep(weights=1)
    assert pair.generate(PROMPT).external == 0
    pair.flush()
    assert pair.generate(PROMPT).external == 12
    pair.close()
    again = Pair({"directory": str(tmp_path)})
    assert again.generate(PROMPT).external == 12
    again.close()


def test_saves_of_memory_that_is_registered_again_are_kept(tmp_path: Path) -> None:
    stream = LateStream(random.Random(1))
    pair = Pair({"directory": str(tmp_path)}, stream=stream)
    pair.generate(PROMPT[:4], 1)
    assert stream._out, "it is on its way"
    pair.engine.register()
    assert not stream._out
    pair.flush()
    pair.close()
    again = Pair({"directory": str(tmp_path)})
    assert again.generate(PROMPT).external == 4
    again.close()


# ---- What a worker tells again

@pytest.mark.parametrize("groups", [ONE_GROUP, _SHAPES[2]["groups"]], ids=["one group", "a window"])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_told_again_is_no_error(
    stages: int, groups: tuple[FakeGroup, ...], tmp_path: Path
) -> None:
    pair = Pair(
        {"directory": str(tmp_path)}, kernel=KERNELS[2], groups=groups, stages=stages, apart=True
    )
    pair.generate(PROMPT)
    pair.engine.register()
    pair.flush()
    assert pair.generate(PROMPT).external == 12
    assert "errors" not in pair.stats()
    pair.close()


@pytest.mark.parametrize("what", ["order", "layers"])
def test_what_is_told_otherwise_stops_the_store(what: str, tmp_path: Path) -> None:
    """Shared memory has chunks in the order that was told first."""
    pair = Pair({"directory": str(tmp_path)}, kernel=KERNELS[2], apart=True)
    pair.generate(PROMPT)
    pair.flush()
    told = pair.worker.get_handshake_metadata()
    names, orders = told.layer_names, told.orders
    if what == "order":
        (order,) = orders
        orders = [type(order)(order.key._replace(offsets=order.key.offsets + 1), order.value)]
    else:
        names = [names[0][:-1]]
    waits = FakeRequest("waits", PROMPT, 1)
    pair.engine.add(waits)
    pair.scheduler.set_xfer_handshake_metadata({0: _plan.Handshake(0, names, orders)})
    pair.run()
    assert waits.external == 0
    assert pair.generate(PROMPT).external == 0
    assert pair.stats()["errors"] == 1
    pair.close()


def test_an_order_that_is_not_learnt_again_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair({"directory": str(tmp_path)}, kernel=KERNELS[2], apart=True)
    pair.generate(PROMPT)
    pair.flush()
    monkeypatch.setattr(type(pair.worker._worker), "_learn", lambda *_: None)
    pair.engine.register()
    assert pair.generate(PROMPT).done
    assert pair.stats()["failed_loads"] == 1
    pair.close()
