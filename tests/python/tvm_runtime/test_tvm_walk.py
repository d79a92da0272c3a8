"""Random calls on TVM's cache and on ours through the same global functions: equal as long as the
calls keep away from TVM's defects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm_llama
from tvm_calls import Calls

import quire.tvm

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
SHAPE = (tvm_llama.LAYERS, tvm_llama.KV_HEADS, tvm_llama.HEAD_DIM)
HEADS = tvm_llama.QO_HEADS + 2 * tvm_llama.KV_HEADS
MAX_SEQUENCES = 6
CHUNK = 64
STEPS = 60


class Pair:
    def __init__(self, seed: int, windows: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.windows = windows
        self.calls = [Calls()]
        self.caches = [self._create()]
        quire.tvm.install()
        try:
            self.calls.append(Calls())
            self.caches.append(self._create())
        finally:
            quire.tvm.uninstall()
        self.live: list[int] = []
        self.windowed: dict[int, tuple[int, int]] = {}
        self.forked: set[int] = set()
        self.next_id = 0
        self.done: dict[str, int] = {}

    def _create(self) -> Any:
        return tvm_llama.new_cache(
            tvm_llama.new_machine(),
            sequences=MAX_SEQUENCES,
            tokens=2048,
            chunk=CHUNK,
            windows=self.windows,
        )

    def below(self, n: int) -> int:
        return int(self.random.integers(0, n))

    def both(self, name: str, *arguments: Any) -> Any:
        """The call on both; what they give must be equal."""
        results = [
            getattr(calls, name)(cache, *arguments)
            for calls, cache in zip(self.calls, self.caches)
        ]
        if results[0] is not None:
            assert results[0] == results[1], name
        return results[0]

    def pick(self, condition: Any = lambda seq: True) -> int | None:
        fitting = [seq for seq in self.live if condition(seq)]
        return fitting[self.below(len(fitting))] if fitting else None

    # ---- Operations; each says whether it did something.

    def add(self) -> bool:
        if len(self.live) == MAX_SEQUENCES:
            return False
        self.both("add_sequence", self.next_id)
        self.live.append(self.next_id)
        self.next_id += 1
        return True

    def remove(self) -> bool:
        seq = self.pick()
        if seq is None or len(self.live) < 3:
            return False
        self.both("remove_sequence", seq)
        self.live.remove(seq)
        self.windowed.pop(seq, None)
        return True

    def fork(self) -> bool:
        # B2: not of a sequence that may have slid.
        seq = self.pick(lambda s: s not in self.windowed and self.length(s) > 0)
        if seq is None or len(self.live) == MAX_SEQUENCES:
            return False
        position = self.below(self.length(seq) + 1) if self.below(3) else -1
        self.both("fork_sequence", seq, self.next_id, position)
        self.live.append(self.next_id)
        self.forked |= {seq, self.next_id}
        self.next_id += 1
        return True

    def pop(self) -> bool:
        seq = self.pick(lambda s: s not in self.windowed)  # B4, B5
        if seq is None:
            return False
        self.both("popn", seq, self.below(min(self.length(seq), 20) + 1))
        return True

    def window(self) -> bool:
        # B3: in a sequence of several blocks TVM applies sinks to the wrong one.
        seq = self.pick(lambda s: s not in self.windowed and s not in self.forked)
        if not self.windows or seq is None:
            return False
        sinks = self.below(8)
        size = sinks + 1 + self.below(40)
        self.both("enable_sliding_window_for_seq", seq, size, sinks)
        self.windowed[seq] = (size, sinks)
        return True

    def forward(self) -> bool:
        batch = [seq for seq in self.live if self.below(2)]
        if not batch:
            return False
        self.random.shuffle(batch)
        most = CHUNK // len(batch)
        lengths = [1 if self.below(2) else 1 + self.below(most) for _ in batch]
        shape = (tvm_llama.LAYERS, sum(lengths), HEADS, tvm_llama.HEAD_DIM)
        qkv = self.random.standard_normal(shape).astype("float32")
        self.both("begin", batch, lengths)
        self.both("positions")
        for layer in range(tvm_llama.LAYERS):
            theirs, ours = (
                calls.attend(cache, layer, qkv[layer], tvm_llama.KV_HEADS)
                for calls, cache in zip(self.calls, self.caches)
            )
            np.testing.assert_allclose(ours, theirs, **TOLERANCE, err_msg=f"{batch} {lengths}")
        self.both("end_forward")
        return True

    def read(self) -> bool:
        seq = self.pick(lambda s: self.length(s) > 0)
        if seq is None:
            return False
        start = self.below(self.length(seq))
        end = start + 1 + self.below(self.length(seq) - start)
        theirs, ours = (
            calls.kv(cache, seq, start, end, SHAPE)
            for calls, cache in zip(self.calls, self.caches)
        )
        np.testing.assert_allclose(ours[0], theirs[0], **TOLERANCE)
        np.testing.assert_array_equal(ours[1], theirs[1])
        return True

    def length(self, seq: int) -> int:
        return int(self.calls[1].get_sequence_length(self.caches[1], seq))

    def step(self) -> None:
        kinds = [self.add, self.remove, self.fork, self.pop, self.window, self.read]
        kind = kinds[self.below(len(kinds))] if self.below(2) else self.forward
        if kind():
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
        self.both("get_total_sequence_length")
        self.both("attention_kv_cache_empty")
        self.caches[1].check_invariants()


@pytest.mark.parametrize("windows", [False, True])
def test_random_calls_give_the_same_on_both(windows: bool) -> None:
    done: dict[str, int] = {}
    for seed in range(3):
        pair = Pair(seed, windows)
        for _ in range(STEPS):
            pair.step()
        for kind, count in pair.done.items():
            done[kind] = done.get(kind, 0) + count
        for seq in list(pair.live):
            pair.both("remove_sequence", seq)
        assert pair.both("attention_kv_cache_empty")
    expected = {"add", "remove", "fork", "pop", "forward", "read"}
    assert set(done) == (expected | {"window"} if windows else expected)
    assert done["forward"] > STEPS
