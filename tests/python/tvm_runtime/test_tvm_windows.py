"""Windows of sequences behind TVM's names, with the option tvm_window_span and without."""

from __future__ import annotations

import numpy as np
import pytest
from tvm_calls import OneCache, plain_attention, visible_rows

import quire
import quire.tvm

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("window, sinks", [(8, 2), (8, 0), (1, 0), (20, 19), (5, 4), (100, 3)])
@pytest.mark.parametrize("lengths", [[1] * 40, [13, 3, 1, 1, 20, 1, 1], [40]])
def test_what_rows_see(
    as_tvm: bool, window: int, sinks: int, lengths: list[int]
) -> None:
    """Without rotation, so that plain attention over the visible tokens is the answer."""
    cache = OneCache(windows=True, tokens=256)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, window, sinks)
    qkv = cache.qkv(40)
    expected = [
        plain_attention(part, visible_rows(lengths, window, sinks, as_tvm), 1) for part in qkv
    ]
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        o = cache.forward([0], [length], qkv[:, rows])
        np.testing.assert_allclose(o, np.stack(expected)[:, rows], **TOLERANCE)
        begin += length


def test_one_token_at_a_time_as_in_tvm(installed: None) -> None:
    """Worked example 6.9: window 8, sink 2."""
    cache = OneCache(windows=True)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 8, 2)
    qkv = cache.qkv(17)
    positions = []
    for i in range(17):
        cache.begin([0], [1])
        positions += cache.positions()
        for layer in range(2):
            cache.attend(layer, qkv[layer, i : i + 1], 1)
        cache.end_forward()
        assert cache.get_sequence_length(0) == min(i + 1, 8) == cache.get_total_sequence_length()
    assert positions == [0, 1, 2, 3, 4, 5, 6, 7] + [8] * 9
    k, _ = cache.kv_of(0)
    np.testing.assert_array_equal(k[:, :, 0], qkv[:, [0, 1, 11, 12, 13, 14, 15, 16], 2])


def test_many_tokens_at_once_as_in_tvm(installed: None) -> None:
    """Worked example 6.10."""
    cache = OneCache(windows=True)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 8, 2)
    qkv = cache.qkv(16)
    cache.forward([0], [13], qkv[:, :13])
    assert cache.get_sequence_length(0) == 8
    cache.begin([0], [3])
    assert cache.positions() == [8, 9, 10]
    for layer in range(2):
        cache.attend(layer, qkv[layer, 13:], 1)
    cache.end_forward()
    k, _ = cache.kv_of(0)
    np.testing.assert_array_equal(k[:, :, 0], qkv[:, [0, 1, 10, 11, 12, 13, 14, 15], 2])


def test_enabling_does_not_slide_at_once(installed: None) -> None:
    cache = OneCache(windows=True)
    cache.add_sequence(0)
    cache.forward([0], [20])
    cache.enable_sliding_window_for_seq(0, 8, 2)
    assert cache.get_sequence_length(0) == 20
    cache.forward([0], [1])
    assert cache.get_sequence_length(0) == 8


def test_a_fork_has_no_window_in_tvm_and_has_it_in_quire(as_tvm: bool) -> None:
    cache = OneCache(windows=True, tokens=256)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 8, 2)
    cache.forward([0], [6])
    cache.fork_sequence(0, 1, -1)
    cache.forward([1], [20])
    if as_tvm:
        assert cache.get_sequence_length(1) == 26
        cache.enable_sliding_window_for_seq(1, 4, 0)
    else:
        assert cache.get_sequence_length(1) == 7  # what a next query sees before itself
        with pytest.raises(quire.BadStateError, match="has a window"):
            cache.enable_sliding_window_for_seq(1, 4, 0)


def test_checks_of_a_window(as_tvm: bool) -> None:
    cache = OneCache(windows=True)
    cache.add_sequence(0)
    with pytest.raises(quire.UnknownSequenceError):
        cache.enable_sliding_window_for_seq(1, 4, 0)
    for window, sinks in ((0, 0), (4, 4), (4, -1), (-1, -2)):
        with pytest.raises(quire.BadArgumentError, match="sinks"):
            cache.enable_sliding_window_for_seq(0, window, sinks)
    cache.enable_sliding_window_for_seq(0, 4, 0)
    with pytest.raises(quire.BadStateError, match="window of 4"):
        cache.enable_sliding_window_for_seq(0, 4, 0)
    plain = OneCache()
    plain.add_sequence(0)
    with pytest.raises(quire.BadStateError, match="support_sliding_window"):
        plain.enable_sliding_window_for_seq(0, 4, 0)


def test_layers_with_windows_leave_those_of_sequences_out(as_tvm: bool) -> None:
    cache = OneCache(windows=True, kinds=(0, 3), layer_window=3)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 4, 1)
    cache.forward([0], [20])
    assert cache.get_sequence_length(0) == 20
    with pytest.raises(quire.BadArgumentError, match="sinks"):
        cache.enable_sliding_window_for_seq(0, 4, 4)
