"""quire.blend.BlendRetriever and quire.lmcache: what is found, when it is handed out, and what is
late, damaged or cancelled. Loads are held back by events; no test sleeps."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import quire
import torch
from quire import blend, lmcache
from quire.blend import BlendRetriever, SegmentMemory
from quire.lmcache import _blending

LAYERS, HEADS, DIM = 3, 2, 4
A, B, C = [1, 2, 3], [4, 5], [6, 7, 8, 9]


def kv(tokens: list[int], token_dim: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Numbers that say which token, layer and array they are of."""
    layers = []
    for layer in range(LAYERS):
        shape = (len(tokens), 1, 1)
        base = np.array(tokens, np.float32).reshape(shape) + 100 * layer
        k = np.broadcast_to(base, (len(tokens), HEADS, DIM))
        if token_dim == 1:
            k = np.moveaxis(k, 0, 1)
        layers.append((k.copy(), k + 1000))
    return layers


def memory(*segments: list[int], **options: Any) -> SegmentMemory:
    filled = SegmentMemory(LAYERS, **options)
    for segment in segments:
        filled.store(segment, kv(segment, filled.token_dim))
    return filled


class HeldSource:
    """A source whose loads wait for the event of their segment's first token and layer, or raise
    what is put there."""

    layer_count, token_dim = LAYERS, 0

    def __init__(self, *segments: list[int]) -> None:
        self._memory = memory(*segments)
        self.gates: dict[tuple[int, int], threading.Event] = {}
        self.failures: dict[tuple[int, int], BaseException] = {}
        self.loaded: list[tuple[int, int]] = []
        self.entered = threading.Event()

    def hold(self, segment: list[int], layer: int) -> threading.Event:
        return self.gates.setdefault((segment[0], layer), threading.Event())

    def find(self, tokens: Any) -> Any:
        return _HeldSegment(self, int(tokens[0]), self._memory.find(tokens))


class _HeldSegment:
    def __init__(self, source: HeldSource, first: int, found: Any) -> None:
        self._source, self._first, self._found = source, first, found
        self.token_count, self.positions = found.token_count, found.positions

    def load(self, layer: int) -> tuple[Any, Any]:
        key = (self._first, layer)
        self._source.entered.set()
        if key in self._source.gates:
            assert self._source.gates[key].wait(30)
        if key in self._source.failures:
            raise self._source.failures[key]
        self._source.loaded.append(key)
        return self._found.load(layer)


@pytest.fixture
def open_retriever() -> Iterator[Callable[..., BlendRetriever]]:
    opened: list[tuple[Any, BlendRetriever]] = []

    def make(source: Any, **options: Any) -> BlendRetriever:
        opened.append((source, BlendRetriever(source, **options)))
        return opened[-1][1]

    yield make
    for source, retriever in opened:
        for gate in getattr(source, "gates", {}).values():
            gate.set()
        retriever.close()


def lists(result: blend.BlendRetrieverResult) -> tuple[list[int], list[int]]:
    return (
        np.asarray(result.valid_mask).tolist(),
        np.asarray(result.original_positions).tolist(),
    )


# Example 8, in both orders of axes and with torch.
@pytest.mark.parametrize("token_dim", [0, 1])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_all_hits(open_retriever: Any, token_dim: int, library: str) -> None:
    source = SegmentMemory(LAYERS, token_dim=token_dim)
    make: Callable[[Any], Any] = torch.from_numpy if library == "torch" else np.asarray
    for segment in (A, B, C):
        source.store(segment, [(make(k), make(v)) for k, v in kv(segment, token_dim)])
    task = open_retriever(source).new_request([make(np.array(A + B + C))], [[3, 5]])
    for layer in (2, 0, 1, 2):
        result = task.result(layer)
        assert lists(result) == ([1] * 9, [0, 1, 2, 0, 1, 0, 1, 2, 3])
        k, v = kv(A + B + C, token_dim)[layer]
        kind = torch.Tensor if library == "torch" else np.ndarray
        assert all(isinstance(each, kind) for each in (result.k, result.v, result.valid_mask))
        assert np.array_equal(np.asarray(result.k), k)
        assert np.array_equal(np.asarray(result.v), v)


# Examples 9, 10 and 22.
def test_misses_and_repeats(open_retriever: Any) -> None:
    retriever = open_retriever(memory(A, C))
    result = retriever.new_request([A + B + C], [[3, 5]]).result(1)
    assert lists(result) == ([1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 2, 0, 0, 0, 1, 2, 3])
    assert np.array_equal(result.k[5:], kv(C)[1][0])
    nothing = retriever.new_request([B + B], [[2]]).result(0)
    assert nothing.k is None and nothing.v is None and lists(nothing) == ([0] * 4, [0] * 4)
    twice = retriever.new_request([A + A], [[3]]).result(0)
    assert lists(twice) == ([1] * 6, [0, 1, 2] * 2)
    none = retriever.new_request([], []).result(0)
    assert none.k is None and lists(none) == ([], [])


# Example 11.
def test_a_leading_part(open_retriever: Any) -> None:
    segment = list(range(10))
    result = open_retriever(memory(segment[:8], chunk_tokens=4)).new_request([segment], [[]])
    assert lists(result.result(2)) == ([1] * 8 + [0] * 2, [*range(8), 0, 0])
    assert np.array_equal(result.result(2).k[:8], kv(segment[:8])[2][0])


# Example 12.
def test_borders_of_requests_and_segments(open_retriever: Any) -> None:
    retriever = open_retriever(memory(A, B))
    assert lists(retriever.new_request([A, B], [[], []]).result(1))[0] == [1] * 5
    assert lists(retriever.new_request([A + B], [[]]).result(1))[0] == [0] * 5
    assert lists(retriever.new_request([A + B], [[0, 3, 3]]).result(1))[0] == [1] * 5
    for cuts in ([2, 1], [-1], [6]):
        with pytest.raises(quire.BadArgumentError, match=r"indices\[1\] must ascend"):
            retriever.new_request([A, A + B], [[], cuts])
    with pytest.raises(quire.BadArgumentError, match="2 prompts, but cuts of 1"):
        retriever.new_request([A, B], [[]])


@pytest.mark.parametrize("seconds", [float("nan"), -1, "1"])
def test_waits_that_are_no_seconds_are_refused(open_retriever: Any, seconds: Any) -> None:
    """NaN kept the CPU busy for as long as the layer took."""
    retriever = open_retriever(memory(A))
    task = retriever.new_request([A], [[]])
    for call in (
        lambda: task.result(0, timeout=seconds),
        lambda: retriever.new_request([A], [[]], deadline=seconds),
    ):
        with pytest.raises(quire.BadArgumentError, match="timeout|deadline"):
            call()


@pytest.mark.parametrize("seconds", [float("inf"), 1e300])
def test_waits_without_an_end(open_retriever: Any, seconds: float) -> None:
    """They were an OverflowError of Python's."""
    source = HeldSource(A)
    gate = source.hold(A, 0)
    calls = itertools.count(1)

    def clock() -> float:
        """The third time is under the lock that the load needs, so the task has to wait."""
        if next(calls) == 3:
            gate.set()
        return 0.0

    task = open_retriever(source, clock=clock).new_request([A], [[]], deadline=seconds)
    assert lists(task.result(0, timeout=seconds))[0] == [1] * 3


class _SlowPart:
    """KV whose copy waits for an event."""

    def __init__(self, array: np.ndarray, begun: threading.Event, gate: threading.Event) -> None:
        self._array, self._begun, self._gate = array, begun, gate
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self._begun.set()
        assert self._gate.wait(30)
        return self._array


def test_nothing_is_written_to_rows_that_are_handed_out(open_retriever: Any) -> None:
    """A segment could count as late while its rows were copied: an executor with `inplace` had put
    fresh rows there, which the copy then replaced."""
    begun, gate = threading.Event(), threading.Event()
    source = memory(A)

    class Slow:
        token_count, positions = 2, np.arange(2)

        def load(self, layer: int) -> tuple[Any, Any]:
            k, v = kv(B)[layer]
            return k, _SlowPart(v, begun, gate)

    find = source.find
    source.find = lambda ids: Slow() if ids[0] == B[0] else find(ids)  # type: ignore[method-assign]
    # A comes first, so that there are arrays to copy to.
    task = open_retriever(source, threads=1).new_request([A + B], [[3]])
    assert begun.wait(30)
    is_free = task._changed.acquire(blocking=False)
    if is_free:
        task._changed.release()
    gate.set()
    assert not is_free, "nobody can strike it now"
    assert lists(task.result(2))[0] == [1] * 5


# Example 13.
def test_a_request_returns_at_once_and_layers_come_one_by_one(open_retriever: Any) -> None:
    source = HeldSource(A, B)
    gates = [source.hold(A, layer) for layer in range(LAYERS)]
    task = open_retriever(source).new_request([A + B], [[3]])  # returns though all is held
    assert not task.ready(0)
    with pytest.raises(quire.TimeoutError, match="layer 0 has not come"):
        task.result(0, timeout=0)
    gates[0].set()
    assert lists(task.result(0))[0] == [1] * 5  # while layer 1 is held
    assert not task.ready(1)
    gates[1].set()
    assert lists(task.result(1))[0] == [1] * 5 and not task.ready(2)
    gates[2].set()
    assert np.array_equal(task.result(2).k, kv(A + B)[2][0])
    for layer in (-1, LAYERS):
        with pytest.raises(IndexError):
            task.result(layer)


def test_low_layers_of_all_segments_come_first(open_retriever: Any) -> None:
    source = HeldSource(A, B, C)
    source.hold(A, 0)
    task = open_retriever(source, threads=1).new_request([A + B + C], [[3, 5]])
    source.gates[(A[0], 0)].set()
    task.result(LAYERS - 1)
    assert [layer for _, layer in source.loaded[-6:]] == [1, 1, 1, 2, 2, 2]


def test_what_is_late_is_invalid_before_the_selection(open_retriever: Any) -> None:
    now = [0.0]
    source = HeldSource(A, B)
    late = source.hold(B, 1)
    retriever = open_retriever(source, clock=lambda: now[0])
    task = retriever.new_request([A + B], [[3]], deadline=5)
    assert lists(task.result(0))[0] == [1] * 5 and not task.ready(1)
    now[0] = 5.0
    assert lists(task.result(1)) == ([1, 1, 1, 0, 0], [0, 1, 2, 0, 0])
    late.set()
    for layer in range(LAYERS):  # it has come, and is not taken any more
        assert lists(task.result(layer))[0] == [1, 1, 1, 0, 0]


def test_after_the_selection_nothing_becomes_invalid(open_retriever: Any) -> None:
    now = [0.0]
    source = HeldSource(A, B)
    late = source.hold(B, 2)
    task = open_retriever(source, clock=lambda: now[0]).new_request([A + B], [[3]], deadline=5)
    assert lists(task.result(1))[0] == [1] * 5
    now[0] = 100.0
    with pytest.raises(quire.TimeoutError):
        task.result(2, timeout=0)
    late.set()
    assert lists(task.result(2))[0] == [1] * 5
    assert np.array_equal(task.result(2).v, kv(A + B)[2][1])


def test_a_failure_is_a_miss_before_the_selection_and_an_error_after(open_retriever: Any) -> None:
    source = HeldSource(A, B)
    source.failures[(B[0], 1)] = OSError("disk")
    retriever = open_retriever(source)
    task = retriever.new_request([A + B], [[3]])
    assert lists(task.result(1))[0] == [1, 1, 1, 0, 0]
    assert lists(task.result(2))[0] == [1, 1, 1, 0, 0]
    source.failures = {(B[0], 2): OSError("disk")}
    gate = source.hold(B, 2)
    task = retriever.new_request([A + B], [[3]])
    assert lists(task.result(1))[0] == [1] * 5
    gate.set()
    places = []
    for _ in range(3):
        with pytest.raises(OSError, match="disk") as caught:
            task.result(2)
        places.append(len(caught.traceback))
    assert places[0] == places[1] == places[2], "it does not grow with each time"
    assert lists(task.result(1))[0] == [1] * 5


def test_what_a_source_raises_is_told(
    open_retriever: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Source(HeldSource):
        def find(self, tokens: Any) -> Any:
            if tokens[0] == C[0]:
                raise Unprintable
            return super().find(tokens)

    source = Source(A, B)
    source.failures = {(A[0], 0): OSError("disk"), (B[0], 2): OSError("late")}
    gate = source.hold(B, 2)
    retriever = open_retriever(source)
    with caplog.at_level(logging.ERROR, "quire.blend"):
        for _ in range(3):  # which is told once for each cause
            task = retriever.new_request([A + B + C], [[3, 5]])
            assert lists(task.result(1))[0] == [0, 0, 0, 1, 1, 0, 0, 0, 0]
        gate.set()
        with pytest.raises(OSError, match="late"):  # told by this, and not by the log
            task.result(2)
        # Nobody wants to know what comes of a retrieval that was called off.
        source.failures = {(A[0], 0): OSError("gone")}
        source.entered.clear()
        gate = source.hold(A, 0)
        called_off = retriever.new_request([A], [[]])
        assert source.entered.wait(30)
        called_off.cancel()
        gate.set()
        retriever.close()
    assert sorted(each.getMessage() for each in caplog.records) == [
        "BlendRetriever: layer 0 of a segment could not be loaded, so its tokens are to be "
        "computed: OSError: disk",
        "BlendRetriever: the source could not look for a segment, so its tokens are to be "
        "computed: test_blend_retriever.test_what_a_source_raises_is_told.<locals>.Unprintable: "
        "<exception str() failed>",
    ]


@pytest.mark.parametrize("failure", [OSError("gone"), SystemExit(3), asyncio.CancelledError()])
@pytest.mark.parametrize("place", ["layer_count", "find", "load"])
def test_a_thread_outlives_what_a_source_raises(
    open_retriever: Any, place: str, failure: BaseException
) -> None:
    """It ended the thread that nobody then replaced, and `result` waited for ever."""

    class Source(HeldSource):
        is_failing = False

        def _fail_in(self, what: str) -> None:
            if what == place and self.is_failing and threading.current_thread() in threads:
                raise failure

        @property
        def layer_count(self) -> int:  # type: ignore[override]
            self._fail_in("layer_count")
            return LAYERS

        def find(self, tokens: Any) -> Any:
            self._fail_in("find")
            found = super().find(tokens)
            load = found.load
            found.load = lambda layer: self._fail_in("load") or load(layer)
            return found

    threads: list[threading.Thread] = []
    source = Source(A)
    retriever = open_retriever(source, threads=1)
    threads.extend(retriever._jobs.threads)
    source.is_failing = True
    for _ in range(2):
        task = retriever.new_request([A], [[]])
        for layer in range(LAYERS):
            assert lists(task.result(layer, timeout=30))[0] == [0] * 3
    source.is_failing = False
    task = retriever.new_request([A], [[]])
    assert lists(task.result(LAYERS - 1, timeout=30))[0] == [1] * 3


def test_what_ends_a_load_after_the_selection_is_raised(open_retriever: Any) -> None:
    source = HeldSource(A)
    source.failures[(A[0], 2)] = SystemExit(3)
    gate = source.hold(A, 2)
    task = open_retriever(source, threads=1).new_request([A], [[]])
    assert lists(task.result(1, timeout=30))[0] == [1] * 3
    gate.set()
    with pytest.raises(SystemExit):
        task.result(2, timeout=30)


class LyingSegment:
    def __init__(self, **fields: Any) -> None:
        self.token_count, self.positions = 2, [0, 1]
        self.shape: tuple[int, ...] = (2, HEADS, DIM)
        self.dtype: Any = np.float32
        self.__dict__.update(fields)

    def load(self, layer: int) -> tuple[Any, Any]:
        return np.ones(self.shape, self.dtype), np.ones(self.shape, self.dtype)


@pytest.mark.parametrize(
    "lie",
    [
        {"token_count": 3, "positions": [0, 1, 2]},
        {"token_count": -1},
        {"positions": [0]},
        {"positions": ["x", "y"]},
        {"shape": (1, HEADS, DIM)},
        {"shape": (3, HEADS, DIM)},
        {"dtype": np.float64},
    ],
)
def test_sources_that_lie_give_misses(open_retriever: Any, lie: dict[str, Any]) -> None:
    class Source:
        layer_count, token_dim = LAYERS, 0

        def find(self, tokens: Any) -> Any:
            return LyingSegment(**lie) if tokens[0] == B[0] else memory(A).find(tokens)

    gate = open_retriever(Source(), threads=1)
    assert lists(gate.new_request([A + B], [[3]]).result(1))[0] == [1, 1, 1, 0, 0]


def test_cancel_and_close_end_what_waits(open_retriever: Any) -> None:
    source = HeldSource(A)
    gate = source.hold(A, 0)
    retriever = open_retriever(source, threads=1)
    tasks = [retriever.new_request([A], [[]]) for _ in range(3)]
    ended: list[str] = []

    def wait(task: blend.BlendRetrieverTask) -> None:
        try:
            task.result(0)
        except quire.CancelledError:
            ended.append("cancelled")

    waiting = [threading.Thread(target=wait, args=(task,)) for task in tasks]
    for thread in waiting:
        thread.start()
    tasks[0].cancel()
    waiting[0].join(30)
    assert ended == ["cancelled"]
    closing = threading.Thread(target=retriever.close)
    closing.start()
    gate.set()
    for thread in (closing, *waiting):
        thread.join(30)
        assert not thread.is_alive()
    assert ended == ["cancelled"] * 3
    with pytest.raises(quire.ClosedError):
        retriever.new_request([A], [[]])
    retriever.close()


def blend_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "quire-blend"}


def expect_ended(threads: set[threading.Thread]) -> None:
    assert threads
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_one_that_is_dropped_ends_its_threads() -> None:
    others = blend_threads()
    retriever = BlendRetriever(memory(A))
    assert lists(retriever.new_request([A], [[]]).result(LAYERS - 1))[0] == [1] * 3
    threads = blend_threads() - others
    dropped = weakref.ref(retriever)
    del retriever
    assert dropped() is None
    expect_ended(threads)
    engine = lmcache.LMCacheEngine()
    adapter = lmcache.SPTBlendRetriever(engine)
    threads = blend_threads() - others
    del adapter
    expect_ended(threads)


def test_a_retrieval_outlives_the_retriever_that_began_it() -> None:
    others = blend_threads()
    source = HeldSource(A)
    gate = source.hold(A, 1)
    task = BlendRetriever(source).new_request([A], [[]])
    threads = blend_threads() - others
    assert lists(task.result(0))[0] == [1] * 3
    gate.set()
    assert np.array_equal(task.result(LAYERS - 1).v, kv(A)[LAYERS - 1][1])
    expect_ended(threads)


def test_of_a_task_that_is_dropped_nothing_more_is_loaded() -> None:
    others = blend_threads()
    source = HeldSource(A)
    gate = source.hold(A, 0)
    retriever = BlendRetriever(source, threads=1)
    task = retriever.new_request([A], [[]])
    assert source.entered.wait(30)
    threads = blend_threads() - others
    dropped = weakref.ref(task)
    del task, retriever
    gate.set()
    expect_ended(threads)
    assert dropped() is None and source.loaded == [(A[0], 0)]


def test_a_memory_is_bounded_and_keeps_what_was_used_last(open_retriever: Any) -> None:
    token_bytes = LAYERS * 2 * HEADS * DIM * 4 + 8  # and an id
    bounded = memory(A, B, capacity_bytes=5 * token_bytes)
    assert bounded.used_bytes == 5 * token_bytes
    bounded.store(A, kv(A))
    assert bounded.used_bytes == 5 * token_bytes
    assert bounded.find(B).token_count == 2
    bounded.store([7, 7], kv([7, 7]))
    assert [bounded.find(x).token_count for x in (A, B, [7, 7])] == [0, 2, 2]
    assert bounded.used_bytes == 4 * token_bytes
    with pytest.raises(quire.TooLargeError, match="larger than capacity_bytes"):
        bounded.store(list(range(6)), kv(list(range(6))))
    assert bounded.used_bytes == 4 * token_bytes
    for arguments in ((A, kv(A)[:2]), (A, kv(B))):
        with pytest.raises(quire.BadArgumentError):
            bounded.store(*arguments)
    for options in ({"chunk_tokens": 0}, {"token_dim": 2}, {"capacity_bytes": -1}):
        with pytest.raises(quire.BadArgumentError):
            SegmentMemory(LAYERS, **options)
    for options in ({"threads": 0}, {"select_layer": LAYERS}, {"select_layer": -1}):
        with pytest.raises(quire.BadArgumentError):
            open_retriever(bounded, **options)


@pytest.mark.parametrize("chunk_tokens", [2, 256])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_is_loaded_is_the_callers(chunk_tokens: int, library: str) -> None:
    """A segment of one chunk was the memory itself, into which a blend in place then wrote."""
    filled = SegmentMemory(LAYERS, chunk_tokens=chunk_tokens)
    layers: list[tuple[Any, Any]] = [*kv(A)]
    if library == "torch":
        layers = [(torch.from_numpy(k), torch.from_numpy(v)) for k, v in layers]
    filled.store(A, layers)
    for array in filled.find(A).load(1):
        array[:] = 0
    for array, expected in zip(filled.find(A).load(1), kv(A)[1], strict=True):
        assert np.array_equal(np.asarray(array), expected)


def test_the_end_of_a_segment_leaves_a_memory_before_its_beginning() -> None:
    """A chunk is found behind those before it alone; each counts its own ids, once."""
    token_bytes = LAYERS * 2 * HEADS * DIM * 4 + 8
    long = list(range(64))
    small = SegmentMemory(LAYERS, chunk_tokens=2, capacity_bytes=64 * token_bytes)
    small.store(long, kv(long))
    assert small.used_bytes == 64 * token_bytes and small.find(long).token_count == 64
    small.store([7, 7], kv([7, 7]))
    assert small.find(long).token_count == 62
    small.store(long[:4], kv(long[:4]), first_position=5)  # those behind it are found as before
    assert small.find(long).positions.tolist() == [5, 6, 7, 8, *range(4, 62)]
    assert small.find(long[2:]).token_count == 0


def test_positions_begin_where_the_segment_was_computed() -> None:
    placed = SegmentMemory(LAYERS, chunk_tokens=2)
    keys = kv(A)
    placed.store(A, keys, first_position=10)
    keys[0][0][:] = -1  # a copy was stored
    found = placed.find(A)
    assert found.positions.tolist() == [10, 11, 12]
    assert np.array_equal(found.load(0)[0], kv(A)[0][0])


# ---- quire.lmcache, as code for LMCache uses it.


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_store_retrieve_and_blend(fmt: str) -> None:
    token_dim = {"vllm": 0, "huggingface": 1}[fmt]
    engine = lmcache.LMCacheEngine(chunk_size=2, fmt=fmt)
    with pytest.raises(quire.BadStateError, match="store something first"):
        _ = engine.memory
    for segment in (A, C):
        layers = [(torch.from_numpy(k), torch.from_numpy(v)) for k, v in kv(segment, token_dim)]
        engine.store(torch.tensor(segment), layers)
    prompts = [torch.tensor(A + B), torch.tensor(C)]
    with lmcache.SPTBlendRetriever(engine, metadata=None) as retriever:
        task = retriever.new_request(prompts, [[3], []])
        blender = lmcache.CacheBlendImpl(0.5)
        for layer in range(LAYERS):
            found = task.result(layer)
            assert found.valid_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
            count = 9 if layer < 2 else 5
            shape = (count, HEADS, DIM) if token_dim == 0 else (HEADS, count, DIM)
            fresh = torch.zeros(shape)
            positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
            if layer >= 2:
                positions = positions[out.local_indices]
            out = blender.blend(
                layer, found.k, found.v, found.valid_mask, found.original_positions, fresh, fresh,
                fresh, positions, torch.tensor([0, 5, 9], dtype=torch.int32), token_dim,
            )  # fmt: skip
    # Higher tokens have larger numbers, so they deviate most from zeros.
    assert out.local_indices.tolist() == [2, 3, 4, 7, 8]
    assert out.k.select(token_dim, 8).eq(0).all() and out.k.select(token_dim, 0).ne(0).all()
    engine.close()
    with pytest.raises(quire.BadStateError):
        _ = engine.memory
    with pytest.raises(quire.BadArgumentError, match="fmt"):
        lmcache.LMCacheEngine(fmt="other")


def test_an_engine_may_be_empty() -> None:
    def found(layer: int) -> list[int]:
        result = retriever.new_request([torch.tensor(A + C)], [[len(A)]]).result(layer)
        assert (result.k is None) == (result.v is None) == (not result.valid_mask.any())
        return list(result.valid_mask.tolist())

    engine = lmcache.LMCacheEngine(chunk_size=2)
    with lmcache.SPTBlendRetriever(engine) as retriever:
        assert found(0) == found(31) == [0] * 7
        engine.store(C, kv(C))
        assert found(0) == found(LAYERS - 1) == [0, 0, 0, 1, 1, 1, 1]
        with pytest.raises(IndexError):
            found(LAYERS)
        engine.close()
        assert found(0) == [0] * 7


def test_a_first_store_that_is_refused_says_nothing_about_the_layers() -> None:
    """It settled how many there are: the right ones were refused for ever."""
    engine = lmcache.LMCacheEngine()
    k, v = kv(A)[0]
    with pytest.raises(quire.BadArgumentError, match="2 tokens, but KV of shape"):
        engine.store(B, [(k, v)])
    with pytest.raises(quire.BadStateError, match="store something first"):
        _ = engine.memory
    engine.store(A, kv(A))
    assert engine.memory.layer_count == LAYERS


def test_what_is_found_has_a_known_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment it had none, and a retrieval would have begun to load sys.maxsize layers."""
    engine = lmcache.LMCacheEngine()
    stored = _blending._Stored(engine)
    seen: list[int] = []

    class Watched(lmcache.LMCacheEngine):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if stored.find(A).token_count:
                seen.append(stored.layer_count)

    monkeypatch.setattr(engine, "__class__", Watched)
    engine.store(A, kv(A))
    assert seen == [LAYERS]


def test_one_encoder_alone_is_refused() -> None:
    """Keys were not moved at all."""
    k = torch.ones(4, 2)
    ones, starts = torch.ones(4, dtype=torch.int64), torch.tensor([0, 4], dtype=torch.int32)
    none = torch.empty(0, 2)
    for set_encoder, lacking in (
        ("set_positional_encoder", "set_reverse_positional_encoder"),
        ("set_reverse_positional_encoder", "set_positional_encoder"),
    ):
        blender = lmcache.CacheBlendImpl(0.0)
        getattr(blender, set_encoder)(lambda positions, q, k: (q, k))
        places = torch.arange(4)
        blender.blend(1, k, k, ones, places, k, k, k, places + 7, starts, 0)
        with pytest.raises(quire.BadStateError, match=f"call {lacking}, too"):
            blender.blend(2, k, k, ones, places, none, none, none, places[:0], starts, 0)


def test_encoders_that_are_set_rotate_keys() -> None:
    angle = 0.5

    def turned(sign: float) -> lmcache.PositionalEncoder:
        def encode(positions: Any, q: Any, k: Any) -> tuple[Any, Any]:
            cos = torch.cos(sign * angle * positions)[:, None]
            sin = torch.sin(sign * angle * positions)[:, None]
            k[:] = torch.stack([k[:, 0] * cos[:, 0] - k[:, 1] * sin[:, 0],
                                k[:, 1] * cos[:, 0] + k[:, 0] * sin[:, 0]], 1)  # fmt: skip
            return q, k

        return encode

    blender = lmcache.CacheBlendImpl(0.0)
    blender.set_positional_encoder(turned(1.0))
    blender.set_reverse_positional_encoder(turned(-1.0))
    k = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))
    before = k.clone()
    old, positions = torch.tensor([0, 1, 2, 3]), torch.tensor([7, 8, 9, 10])
    starts = torch.tensor([0, 4], dtype=torch.int32)
    ones = torch.ones(4, dtype=torch.int64)
    out = blender.blend(1, k, k, ones, old, k, k, k, positions, starts, 0)
    assert out.local_indices.tolist() == []
    none = torch.empty(0, 2)
    out = blender.blend(2, k, k, ones, old, none, none, none, positions[:0], starts, 0)
    expected = blend.shift_keys(k, old, positions, blend.KeyRotation([angle]))
    torch.testing.assert_close(out.k, expected, rtol=0, atol=1e-6)
    assert torch.equal(k, before)
