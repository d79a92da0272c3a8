"""TVM's own CPU cache, and Quire's behind TVM's names: the same calls on both, from Python. Both
sides live in this process; which of them a name reaches was settled when the cache was made."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Protocol

import line_protocol

_LAYER = 0
_FILL_TOKENS = 4096  # of one forward while a cache is filled
_STEPS = 5  # decode steps of one run; the first follows another batch
_OTHER_ORDERS = 2

Samples = dict[str, list[float]]


class OneCache:
    """A cache of one layer and the functions that it answers to, on `sequences` sequences of
    `length` tokens each."""

    def __init__(
        self, ours: bool, sequences: int, length: int, rows: int, children: int, **heads: int
    ) -> None:
        import numpy as np
        import quire.tvm
        import tvm
        import tvm_calls
        import tvm_kv_cache
        from tvm import relax

        executable = tvm_kv_cache.compiled_alone(layers=1, **heads)
        if ours:
            quire.tvm.install()
        try:
            machine = relax.VirtualMachine(executable, tvm.cpu())
            self.calls: Any = tvm_calls.Calls()
            self.cache = tvm_kv_cache.new_cache(
                machine,
                sequences=sequences + children,
                # Each has a page that is not full, and new tokens.
                tokens=(sequences + children) * (rows + 4 * tvm_kv_cache.PAGE_SIZE)
                + sequences * length,
                chunk=max(_FILL_TOKENS, sequences * rows),
            )
        finally:
            if ours:
                quire.tvm.uninstall()
        if ours != self.cache_is_ours():
            raise AssertionError(f"the cache is a {type(self.cache)}")
        self.ids = list(range(sequences))
        qo_heads, kv_heads, dim = heads["qo_heads"], heads["kv_heads"], heads["head_dim"]
        self._scale = float(dim**-0.5)
        most = max(_FILL_TOKENS if ours else 1, sequences * rows)
        generator = np.random.default_rng(1)
        qkv = generator.standard_normal((most, qo_heads + 2 * kv_heads, dim)).astype("float32")
        self._arguments: dict[int, tuple[Any, Any]] = {}
        self._tensors = lambda count: (
            tvm.runtime.tensor(qkv[:count]),
            tvm.runtime.tensor(np.zeros((count, qo_heads, dim), "float32")),
        )
        for seq in self.ids:
            self.calls.add_sequence(self.cache, seq)
        self._fill(length, attends=ours)

    def cache_is_ours(self) -> bool:
        return str(type(self.cache).__tvm_ffi_type_info__.type_key).startswith("quire.")

    def _fill(self, length: int, attends: bool) -> None:
        """Quire's forward must have attended all layers before it ends; what TVM's pages hold is
        without influence on its speed, and its attention would take hours."""
        chunk = max(1, _FILL_TOKENS // len(self.ids))
        for at in range(0, length, chunk):
            count = min(chunk, length - at)
            self.calls.begin(self.cache, self.ids, [count] * len(self.ids))
            if attends:
                self.attend(count * len(self.ids))
            self.calls.end_forward(self.cache)
        self._arguments.clear()

    def attend(self, rows: int) -> float:
        """Seconds of the layer's attention."""
        if rows not in self._arguments:
            self._arguments[rows] = self._tensors(rows)
        qkv, o = self._arguments[rows]
        begin = time.perf_counter()
        self.calls.attention_with_fused_qkv(self.cache, _LAYER, self._scale, qkv, o)
        return time.perf_counter() - begin

    def begin(self, ids: list[int], rows: int = 1) -> float:
        """Seconds of BeginForward; the arguments are made before."""
        from tvm_ffi import Shape

        call, shape, lengths = self.calls.begin_forward, Shape(ids), Shape([rows] * len(ids))
        begin = time.perf_counter()
        call(self.cache, shape, lengths, None)
        return time.perf_counter() - begin

    def end(self) -> float:
        call = self.calls.end_forward
        begin = time.perf_counter()
        call(self.cache)
        return time.perf_counter() - begin

    def each(self, name: str, arguments: list[tuple[int, ...]]) -> float:
        """Seconds of one of many calls, Python's loop included."""
        call, cache = getattr(self.calls, name), self.cache
        begin = time.perf_counter()
        for one in arguments:
            call(cache, *one)
        return (time.perf_counter() - begin) / len(arguments)


class Bench(Protocol):
    def once(self, samples: Samples) -> None: ...


class Plan:
    """What plan_bench.cc measures, as far as TVM's names have the calls: there is no abort, so
    that a forward is ended and its tokens are popped. Leaves the cache as it found it."""

    def __init__(self, ours: bool, sequences: int, length: int) -> None:
        heads = {"qo_heads": 1, "kv_heads": 1, "head_dim": 16}
        self._cache = OneCache(ours, sequences, length, 1, sequences, **heads)
        self._length = length
        self._random = random.Random(11)

    def once(self, samples: Samples) -> None:
        self._steps(samples)
        for _ in range(_OTHER_ORDERS):
            order = list(self._cache.ids)
            self._random.shuffle(order)
            samples["begin_other_order"].append(self._forward(order, None))
            self._pop(None)
        self._forks(samples, -1, "fork_end", "begin_forked_end")
        self._forks(samples, self._length // 2 + 3, "fork_middle", "begin_forked_middle")

    def _forward(self, ids: list[int], samples: Samples | None) -> float:
        begin = self._cache.begin(ids)
        self._cache.attend(len(ids))
        end = self._cache.end()
        if samples is not None:
            samples["end"].append(end)
        return begin

    def _pop(self, samples: Samples | None) -> None:
        seconds = self._cache.each("popn", [(seq, 1) for seq in self._cache.ids])
        if samples is not None:
            samples["pop"].append(seconds)

    def _steps(self, samples: Samples) -> None:
        for step in range(_STEPS):
            begin = self._forward(self._cache.ids, samples)
            if step > 0:
                samples["begin_step"].append(begin)
        for _ in range(_STEPS):
            self._pop(samples)

    def _forks(self, samples: Samples, position: int, fork: str, begin: str) -> None:
        ids = self._cache.ids
        children = [seq + len(ids) for seq in ids]
        forks = [(seq, child, position) for seq, child in zip(ids, children, strict=True)]
        samples[fork].append(self._cache.each("fork_sequence", forks))
        samples[begin].append(self._forward(children, None))
        samples["remove"].append(
            self._cache.each("remove_sequence", [(child,) for child in children])
        )


class Attention:
    """One layer's fused attention: rotation, storing and attending of `rows` new tokens of each
    sequence behind own - rows cached ones."""

    def __init__(
        self,
        ours: bool,
        sequences: int,
        own: int,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        self._rows = rows
        shape = {"qo_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        self._cache = OneCache(ours, sequences, own - rows, rows, 0, **shape)

    def once(self, samples: Samples) -> None:
        ids = self._cache.ids
        self._cache.begin(ids, self._rows)
        samples["call"].append(self._cache.attend(len(ids) * self._rows))
        self._cache.end()
        self._cache.each("popn", [(seq, self._rows) for seq in ids])


_cases: dict[str, Bench] = {}


def info(threads: int) -> dict[str, Any]:
    os.environ["TVM_NUM_THREADS"] = str(threads)
    # tvm-ffi imports torch where it finds it, for seconds.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "python" / "tvm_runtime"))
    import tvm

    return {"version": f"TVM {tvm.__version__}"}


def prepare(key: str, kind: str, ours: bool, **shape: int) -> dict[str, Any]:
    _cases[key] = {"plan": Plan, "attention": Attention}[kind](ours, **shape)
    run(key, 0.0, 1)
    return {}


def run(key: str, seconds: float, min_calls: int) -> dict[str, Any]:
    samples: Samples = defaultdict(list)
    begin = time.perf_counter()
    calls = 0
    while calls < min_calls or time.perf_counter() - begin < seconds:
        _cases[key].once(samples)
        calls += 1
    return {"samples": samples}


def drop(key: str) -> dict[str, Any]:
    _cases.pop(key, None)
    return {}


if __name__ == "__main__":
    line_protocol.serve({"info": info, "prepare": prepare, "run": run, "drop": drop})
