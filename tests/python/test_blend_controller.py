"""The controller of blending: pure decisions over times, and means of what was measured."""

from __future__ import annotations

import math

import pytest
import quire
from quire.blend import LoadingController, is_worth_loading, recompute_ratio


@pytest.mark.parametrize(
    ("prefill_ms", "load_ms", "ratio"),
    [(20, 16, 0.8), (20, 1, 0.15), (20, 40, 1.0), (20, 20, 1.0), (20, 0, 0.15), (0, 0, 0.15)],
)
def test_as_much_is_computed_as_loading_leaves_time_for(
    prefill_ms: float, load_ms: float, ratio: float
) -> None:
    assert recompute_ratio(prefill_ms, load_ms) == ratio
    assert recompute_ratio(prefill_ms / 1000, load_ms / 1000) == pytest.approx(ratio, rel=1e-12)


def test_the_floor_is_the_callers() -> None:
    assert recompute_ratio(20, 1, 0.5) == 0.5
    assert recompute_ratio(20, 1, 0) == 0.05
    assert recompute_ratio(20, 16, 1) == 1


def test_what_is_slower_to_load_is_computed() -> None:
    assert is_worth_loading(1, 2)
    assert not is_worth_loading(2, 1)
    assert not is_worth_loading(1, 1)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_times_that_are_none(bad: float) -> None:
    for arguments in ((bad, 1.0), (1.0, bad)):
        with pytest.raises(quire.BadArgumentError, match="seconds is .*; it must be finite"):
            recompute_ratio(*arguments)
        with pytest.raises(quire.BadArgumentError, match="seconds is"):
            is_worth_loading(*arguments)
    with pytest.raises(quire.BadArgumentError, match="floor is"):
        recompute_ratio(1, 1, bad)
    with pytest.raises(quire.BadArgumentError, match="floor is"):
        LoadingController(bad)


def test_measured_with_the_callers_clock() -> None:
    now = [0.0]
    controller = LoadingController(clock=lambda: now[0])
    assert controller.ratio("disk", 1000, 100) == 0.15
    assert controller.is_worth_loading("disk", 1000, 100), "nothing is known: it is tried"
    with controller.computing(100):
        now[0] += 2.0
    assert controller.prefill_seconds(50) == 1.0
    assert controller.ratio("disk", 1000, 100) == 0.15
    with controller.loading("disk", 1000):
        now[0] += 1.0
    assert controller.ratio("disk", 1000, 100) == 0.5
    assert controller.is_worth_loading("disk", 1999, 100)
    assert not controller.is_worth_loading("disk", 2001, 100)
    assert controller.is_worth_loading("ram", 10**9, 1), "of another tier nothing is known"
    with pytest.raises(ZeroDivisionError), controller.loading("disk", 1):
        now[0] += 1000
        raise ZeroDivisionError
    assert controller.load_seconds("disk", 1000) == 1.0


def test_what_measures_nothing_is_refused_before_it_is_done() -> None:
    """It was refused behind it, so that what had been loaded was lost."""
    controller = LoadingController()
    done: list[str] = []
    with pytest.raises(quire.BadArgumentError, match="byte_count is 0"):
        with controller.loading("disk", 0):
            done.append("load")
    with pytest.raises(quire.BadArgumentError, match="tokens is 0"):
        with controller.computing(0):
            done.append("prefill")
    assert not done


def test_the_last_measurements_count_most() -> None:
    controller = LoadingController()
    controller.note_load("disk", 100, 1.0)
    for _ in range(20):
        controller.note_load("disk", 100, 3.0)
    assert controller.load_seconds("disk", 100) == pytest.approx(3.0, rel=0.01)
    controller.note_load("disk", 100, 1.0)
    assert 2.4 < controller.load_seconds("disk", 100) < 2.6
    for call in (controller.note_prefill, lambda n, s: controller.note_load("disk", n, s)):
        with pytest.raises(quire.BadArgumentError, match="is 0; it must be at least 1"):
            call(0, 1.0)
