"""quire.LocalChannel: tokens that one cache computes go on in another one."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from typing import Any

import numpy as np
import pytest
import quire
from program import run_source
from quire import KVCache, LayerSpec, LocalChannel, ReceiveMap, _ffi

LAYERS = [LayerSpec(4, 2, 16, dtype="float32"), LayerSpec(4, 2, 16, dtype="int8")]
SEED = int(os.environ.get("QUIRE_SOAK_ROUND", "0"))


def make_cache(page_size: int, layers: list[LayerSpec] = LAYERS) -> KVCache:
    cache = KVCache(
        layers,
        max_num_sequences=4,
        token_capacity=256,
        page_size=page_size,
        rope="normal",
        threads=1,
        poison_freed_pages=True,
    )
    cache.add_sequence(0)
    return cache


def inputs(spec: LayerSpec, layer: int, start: int, count: int) -> np.ndarray:
    """Queries, keys and values of tokens: a function of layer, position and tools/soak's round."""
    width = (spec.num_qo_heads + 2 * spec.num_kv_heads) * spec.qk_head_dim
    return np.stack(
        [
            np.random.default_rng((layer, p, SEED)).standard_normal(width, dtype=np.float32)
            for p in range(start, start + count)
        ]
    )


def extend(cache: KVCache, start: int, count: int) -> list[np.ndarray]:
    """A forward of tokens with their inputs; the output of each layer."""
    outputs = []
    with cache.forward([0], [count]):
        for layer, spec in enumerate(cache.layers):
            out = np.zeros((count, spec.num_qo_heads, spec.qk_head_dim), np.float32)
            cache.attention_with_fused_qkv(layer, inputs(spec, layer, start, count), out)
            outputs.append(out)
    return outputs


def pair(page_sizes: tuple[int, int] = (16, 32)) -> tuple[KVCache, KVCache, LocalChannel]:
    sender, receiver, channel = make_cache(page_sizes[0]), make_cache(page_sizes[1]), LocalChannel()
    receiver.connect_channel(channel, peer=2)
    sender.send_through(channel)
    return sender, receiver, channel


def test_a_prefill_goes_on_in_another_cache_bit_for_bit() -> None:
    for page_sizes in [(16, 32), (5, 16)]:
        sender, receiver, _ = pair(page_sizes)
        alone = make_cache(16)
        receive = receiver.disagg_prepare_recv(0, 40)
        # The map is numbers: it can go over any wire.
        wire = json.dumps(dataclasses.asdict(receive))
        sender.disagg_mark_send(0, 0, ReceiveMap(**json.loads(wire)), peer=2)
        extend(sender, 0, 25)
        assert receiver.receive_progress(receive.epoch).layer_rows == (25, 25)
        extend(sender, 25, 15)
        receiver.wait_received(receive.epoch, 40, timeout=0)
        assert not sender.send_progress(0).active and sender.send_progress(0).sent == 40
        receiver.disagg_commit_recv(receive.epoch, 40)
        extend(alone, 0, 40)
        for a, b in zip(extend(receiver, 40, 3), extend(alone, 40, 3), strict=True):
            assert np.array_equal(a, b)
        receiver.check_invariants()


def test_what_arrives_holds_no_more_than_the_staging_limit() -> None:
    sender, receiver, _ = pair()
    assert receiver.staging() == {"limit": 64 << 20, "held": 0, "largest": 0}
    # What the memory plan of an engine counts.
    assert _ffi.function("default_staging_bytes")() == receiver.staging()["limit"]
    with pytest.raises(quire.BadArgumentError, match="staging_bytes is 5"):
        receiver.set_staging_limit(5)
    receiver.set_staging_limit(600)  # two rows of the float32 layer
    receive = receiver.disagg_prepare_recv(0, 40)
    sender.disagg_mark_send(0, 0, receive, peer=2)
    extend(sender, 0, 40)
    receiver.disagg_commit_recv(receive.epoch, 40)
    staging = receiver.staging()
    assert staging["held"] == 0 and 0 < staging["largest"] <= 600
    alone = make_cache(16)
    extend(alone, 0, 40)
    for a, b in zip(extend(receiver, 40, 3), extend(alone, 40, 3)):
        assert np.array_equal(a, b)


def test_the_map_is_in_the_encoding_of_tvm() -> None:
    cache = make_cache(4, [LayerSpec(2, 2, 8)])
    receive = cache.disagg_prepare_recv(0, 6)
    assert receive.slots == (1, 0, 6)
    assert receive.kv_heads == (2,) and receive.first_position == 0 and receive.count == 6


def test_pending_tokens_are_in_no_forward_and_can_be_cancelled() -> None:
    _, receiver, _ = pair()
    extend(receiver, 0, 3)
    before = receiver.state_digest()
    receive = receiver.disagg_prepare_recv(0, 5)
    assert receiver.get_sequence_length(0) == 8
    with pytest.raises(quire.BadStateError, match="pending"):
        receiver.begin_forward([0], [1])
    with pytest.raises(quire.BadStateError, match="layer 0"):
        receiver.disagg_commit_recv(receive.epoch, 1)
    with pytest.raises(quire.TimeoutError):
        receiver.wait_received(receive.epoch, 5, timeout=0)
    receiver.disagg_cancel_recv(receive.epoch)
    assert receiver.state_digest() == before
    with pytest.raises(quire.NotFoundError):
        receiver.receive_progress(receive.epoch)
    with pytest.raises(quire.CancelledError):
        receiver.wait_received(receive.epoch, 5, timeout=0)


def test_waiting_in_a_thread_learns_of_the_last_token_and_of_a_sender_that_stops() -> None:
    outcomes: list[Any] = []

    def wait(cache: KVCache, epoch: int) -> None:
        try:
            cache.wait_received(epoch, 10, timeout=600)
            outcomes.append("complete")
        except quire.QuireError as error:
            outcomes.append(type(error))

    for stop in (False, True):
        sender, receiver, _ = pair()
        receive = receiver.disagg_prepare_recv(0, 10)
        sender.disagg_mark_send(0, 0, receive, peer=2)
        waiting = threading.Thread(target=wait, args=(receiver, receive.epoch))
        waiting.start()
        extend(sender, 0, 6)
        if stop:
            sender.disagg_unmark_send(0)
        else:
            extend(sender, 6, 4)
        waiting.join()
        assert receiver.receive_progress(receive.epoch).layer_rows == ((6, 6) if stop else (10, 10))
        assert ("stopped" in receiver.receive_progress(receive.epoch).failure) == stop
    assert outcomes == ["complete", quire.CancelledError]


def test_the_fence_sends_what_is_stored() -> None:
    sender, receiver, _ = pair()
    extend(sender, 0, 7)
    receive = receiver.disagg_prepare_recv(0, 8)
    sender.disagg_mark_send(0, 0, receive, peer=2)
    sender.disagg_flush_send(0)
    assert sender.send_progress(0).sent == 7
    receiver.disagg_commit_recv(receive.epoch, 7)
    assert receiver.get_sequence_length(0) == 7


def test_marks_and_channels_are_checked() -> None:
    sender, receiver, channel = pair()
    receive = receiver.disagg_prepare_recv(0, 4)
    with pytest.raises(quire.UnknownSequenceError):
        sender.disagg_mark_send(9, 0, receive, peer=2)
    with pytest.raises(quire.IncompatibleError, match="rotated"):
        sender.disagg_mark_send(0, 1, receive, peer=2)
    with pytest.raises(quire.BadArgumentError):
        sender.disagg_mark_send(0, 0, dataclasses.replace(receive, slots=(2, 0, 4)), peer=2)
    other = make_cache(16, [LayerSpec(4, 2, 16)])
    other.send_through(channel)
    with pytest.raises(quire.IncompatibleError):
        other.disagg_mark_send(0, 0, receive, peer=2)
    sender.send_through(None)
    with pytest.raises(quire.BadStateError, match="sink"):
        sender.disagg_mark_send(0, 0, receive, peer=2)
    with pytest.raises(quire.BadArgumentError, match="peer 2"):
        other.connect_channel(channel, peer=2)
    with pytest.raises(quire.NotFoundError):
        sender.disconnect_channel(channel, peer=2)
    # A receiver that is closed gives its place back; what is sent to it fails the mark alone.
    sender.send_through(channel)
    sender.disagg_mark_send(0, 0, receive, peer=2)
    receiver.close()
    del receiver
    extend(sender, 0, 2)
    assert "Unavailable" in sender.send_progress(0).failure
    other.connect_channel(channel, peer=2)
    other.disconnect_channel(channel, peer=2)


_CONNECTING = """
import threading

import quire

cache = quire.KVCache([quire.LayerSpec(2, 1, 16)], max_num_sequences=1, token_capacity=64)
channel, failures = quire.LocalChannel(), []
begin = threading.Barrier(8)
for peer in range(100, 400):  # which are looked through, while others come and go behind them
    cache.connect_channel(channel, peer)


def connect(peer):
    try:
        begin.wait()
        for _ in range(20000):
            cache.connect_channel(channel, peer)
            cache.disconnect_channel(channel, peer)
    except Exception as failure:
        failures.append(failure)


threads = [threading.Thread(target=connect, args=(peer,)) for peer in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
for peer in range(8):
    cache.connect_channel(channel, peer)
"""


def test_threads_connect_one_state_beside_each_other() -> None:
    """Each has a peer of its own; calls of the library run without Python's lock."""
    run_source(_CONNECTING)
