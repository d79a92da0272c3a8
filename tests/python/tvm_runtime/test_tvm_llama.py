"""The proof: a Llama that TVM compiled gives the same logits with TVM's cache and with ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_llama
from tvm_calls import Calls

import quire.tvm

# Two float32 softmaxes of two layers, in different order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class Generation:
    """One machine, its cache and the functions of its time."""

    def __init__(self, ours: bool) -> None:
        if ours:
            quire.tvm.install()
        self.machine = tvm_llama.new_machine()
        self.calls = Calls()
        self.cache = tvm_llama.new_cache(self.machine)
        if ours:
            quire.tvm.uninstall()

    def forward(self, ids: list[int], lengths: list[int], tokens: list[int]) -> np.ndarray:
        self.calls.begin(self.cache, ids, lengths)
        logits = tvm_llama.logits(self.machine, self.cache, tokens)
        self.calls.end_forward(self.cache)
        return logits


def key_of(thing: Any) -> str:
    return str(type(thing).__tvm_ffi_type_info__.type_key)


def run(generation: Generation) -> list[np.ndarray]:
    """Prefill in two cuts, greedy decode, two sequences, a fork and a pop."""
    calls, cache = generation.calls, generation.cache
    random = np.random.default_rng(3)
    prompt = [int(t) for t in random.integers(0, tvm_llama.VOCABULARY, 45)]
    calls.add_sequence(cache, 0)
    results = [generation.forward([0], [20], prompt[:20])]
    results.append(generation.forward([0], [25], prompt[20:]))
    for _ in range(6):
        token = int(results[-1][-1].argmax())
        results.append(generation.forward([0], [1], [token]))
    calls.fork_sequence(cache, 0, 1, 33)
    calls.add_sequence(cache, 2)
    results.append(generation.forward([1, 2], [3, 18], prompt[:21]))
    calls.popn(cache, 0, 4)
    results.append(generation.forward([2, 0, 1], [1, 1, 1], [5, 6, 7]))
    return results


def test_logits_are_those_of_tvms_cache() -> None:
    theirs, ours = Generation(ours=False), Generation(ours=True)
    assert key_of(ours.cache) == "quire.tvm.KVCache"
    assert key_of(theirs.cache) != "quire.tvm.KVCache"
    for expected, actual in zip(run(theirs), run(ours), strict=True):
        np.testing.assert_allclose(actual, expected, **TOLERANCE)


def test_the_cut_of_a_prompt_does_not_show_in_ours() -> None:
    """Bit for bit, TVM's own matrix products aside: they see the same rows."""
    ours = Generation(ours=True)
    ours.calls.add_sequence(ours.cache, 0)
    ours.calls.add_sequence(ours.cache, 1)
    together = ours.forward([0, 1], [7, 7], [1, 2, 3, 4, 5, 6, 7] * 2)
    np.testing.assert_array_equal(together[:7], together[7:])


def test_a_machine_keeps_the_functions_of_its_time() -> None:
    """Made before install: TVM's cache. Made while it is installed: ours, also afterwards."""
    before = tvm_llama.new_machine()
    calls_before = Calls()
    quire.tvm.install()
    during = tvm_llama.new_machine()
    calls_during = Calls()
    cache_before = tvm_llama.new_cache(before)
    assert key_of(cache_before) != "quire.tvm.KVCache"
    quire.tvm.uninstall()
    cache_during = tvm_llama.new_cache(during)
    assert key_of(cache_during) == "quire.tvm.KVCache"
    results = []
    for machine, cache, calls in (
        (before, cache_before, calls_before),
        (during, cache_during, calls_during),
    ):
        calls.add_sequence(cache, 0)
        calls.begin(cache, [0], [4])
        results.append(tvm_llama.logits(machine, cache, [9, 8, 7, 6]))
        calls.end_forward(cache)
    np.testing.assert_allclose(results[1], results[0], **TOLERANCE)


def test_functions_of_the_installation_serve_tvms_caches_too() -> None:
    machine = tvm_llama.new_machine()
    cache = tvm_llama.new_cache(machine)
    quire.tvm.install()
    try:
        calls = Calls()
        calls.add_sequence(cache, 0)
        calls.begin(cache, [0], [4])
        assert calls.positions(cache) == [0, 1, 2, 3]
        tvm_llama.logits(machine, cache, [9, 8, 7, 6])
        calls.end_forward(cache)
        assert calls.get_total_sequence_length(cache) == 4
    finally:
        quire.tvm.uninstall()
