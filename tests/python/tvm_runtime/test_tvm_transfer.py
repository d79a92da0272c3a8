"""Disaggregation behind TVM's names: the two functions of its runtime, between caches of one
process."""

from __future__ import annotations

import numpy as np
import pytest
import quire
import quire.tvm
from tvm_calls import OneCache
from tvm_ffi import Shape


def test_b16_b18_a_prefill_of_two_layers_goes_on_in_another_cache(as_tvm: bool) -> None:
    # PE 0 computes, PE 1 receives; the third computes all by itself.
    sender, receiver = (OneCache(transfer=True, page_size=size) for size in (4, 16))
    alone = OneCache(page_size=4)
    for cache in (sender, receiver, alone):
        cache.add_sequence(3)
    rows = sender.qkv(12)
    slots = receiver.kv_cache_disagg_prepare_recv(3, 10)
    assert list(slots) == [1, 0, 10]
    assert receiver.get_sequence_length(3) == 10
    sender.forward([3], [4], rows[:, :4])  # stored before the mark, sent with the next forward
    sender.kv_cache_disagg_mark_send(3, 0, slots, 1)
    with pytest.raises(quire.BadStateError, match="not complete"):
        receiver.begin([3], [1])
    sender.forward([3], [6], rows[:, 4:10])
    sender.forward([3], [2], rows[:, 10:])  # B16: beyond the map nothing is sent
    out = receiver.forward([3], [2], rows[:, 10:])
    alone.forward([3], [10], rows[:, :10])
    assert np.array_equal(out, alone.forward([3], [2], rows[:, 10:]))
    for of_receiver, of_alone in zip(receiver.kv_of(3), alone.kv_of(3), strict=True):
        assert np.array_equal(of_receiver, of_alone)
    receiver.digest()


def test_a_refused_forward_takes_over_nothing(installed: None) -> None:
    """What had come of the sequences before the one that was refused counted."""
    sender, receiver = (OneCache(transfer=True) for _ in range(2))
    for seq in (0, 1):
        sender.add_sequence(seq)
        receiver.add_sequence(seq)
        slots = receiver.kv_cache_disagg_prepare_recv(seq, 5)
        sender.kv_cache_disagg_mark_send(seq, 0, slots, 1)
    sender.add_sequence(2)
    sender.forward([2], [3])
    receiver.prepare_import(2, sender.get_checkpoint_metadata(2))
    sender.forward([0], [5])
    before = receiver.digest()
    for batch, why in (([0, 1], "not complete"), ([0, 2], "is being imported")):
        with pytest.raises(quire.BadStateError, match=why):
            receiver.begin(batch, [1, 1])
        assert receiver.digest() == before
    sender.forward([1], [5])
    receiver.forward([0, 1], [1, 1])
    assert [receiver.get_sequence_length(seq) for seq in (0, 1)] == [6, 6]
    receiver.digest()


def test_b16_a_refused_mark_sends_nothing_and_leaves_all_as_it_was(as_tvm: bool) -> None:
    sender, receiver = (OneCache(transfer=True) for _ in range(2))
    for cache in (sender, receiver):
        cache.add_sequence(0)
    sender.forward([0], [3])
    slots = receiver.kv_cache_disagg_prepare_recv(0, 5)
    before, receiving = sender.digest(), receiver.digest()
    for begin, wrong, pe, error in [
        (0, Shape([1, 0, 4]), 1, quire.NotFoundError),  # not what was reserved
        (0, slots, 0, quire.NotFoundError),  # the sender itself has reserved nothing
        (0, slots, 7, quire.NotFoundError),
        (-1, slots, 1, quire.BadArgumentError),
    ]:
        with pytest.raises(error):
            sender.kv_cache_disagg_mark_send(0, begin, wrong, pe)
        assert sender.digest() == before
    short = receiver.add_sequence(1) or receiver.kv_cache_disagg_prepare_recv(1, 3)
    with pytest.raises(quire.BadArgumentError, match="at least one"):
        sender.kv_cache_disagg_mark_send(0, 0, short, 1)
    receiver.remove_sequence(1)
    sender.forward([0], [2])
    assert receiver.digest() == receiving
    receiver.popn(0, 5)
    assert receiver.get_sequence_length(0) == 0


def test_caches_without_transfer_say_so(installed: None) -> None:
    cache = OneCache()
    cache.add_sequence(0)
    with pytest.raises(quire.BadStateError, match="argument 7"):
        cache.kv_cache_disagg_prepare_recv(0, 1)
    with pytest.raises(quire.BadStateError, match="argument 7"):
        cache.kv_cache_disagg_mark_send(0, 0, Shape([1, 0, 1]), 0)
