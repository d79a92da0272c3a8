"""KV of the segments of prompts, fetched in the background, layer by layer."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import operator
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from quire import _ffi, _numbers, errors
from quire._arrays import empty_beside
from quire._prefill import OncePerCause
from quire.blend.rows import as_numpy

_log = logging.getLogger("quire.blend")


class FoundSegment(Protocol):
    """The leading part of a segment that a source has."""

    @property
    def token_count(self) -> int:
        """How many tokens, from the segment's first one on."""

    @property
    def positions(self) -> Any:
        """Where their keys were computed: integers [token_count]."""

    def load(self, layer: int) -> tuple[Any, Any]:
        """k and v of these tokens. May block; any exception makes them invalid."""


class SegmentSource(Protocol):
    """Where KV comes from: :class:`SegmentMemory`, or one of yours. Calls come from any thread.

    What it raises makes a segment's tokens invalid, and the log "quire.blend" tells of it.
    """

    @property
    def layer_count(self) -> int:
        """Layers of the model."""

    @property
    def token_dim(self) -> int:
        """The axis of tokens of what is loaded, 0 or 1."""

    def find(self, tokens: Any) -> FoundSegment:
        """What is there of a segment, int64 [n]. May block."""


@dataclasses.dataclass
class BlendRetrieverResult:
    """One layer of a batch of N tokens.

    ``k``, ``v``: N rows along the axis of tokens, None if no token was found; rows that are not
    valid are undefined. ``valid_mask``: 0 or 1 [N]. ``original_positions``: int64 [N], where keys
    were computed; 0 where invalid.
    """

    k: Any | None
    v: Any | None
    valid_mask: Any
    original_positions: Any


@dataclasses.dataclass
class _Segment:
    first_row: int
    tokens: np.ndarray
    found: FoundSegment | None = None  # None: still looked for, or of no use
    positions: np.ndarray | None = None
    is_over: bool = False  # a miss, late, or failed before a selection: its rows are invalid
    layers: set[int] = dataclasses.field(default_factory=set)  # that are there
    # Layers that failed when the segment's rows could no longer become invalid: why, and where.
    failures: dict[int, tuple[BaseException, TracebackType | None]] = dataclasses.field(
        default_factory=dict
    )

    def has(self, layer: int) -> bool:
        return self.is_over or layer in self.layers or layer in self.failures


class _SourceFailures:
    """Tells of what a source raised where the caller gets invalid rows in place of the error, which
    look like those of a segment that was not found. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tell = OncePerCause(_log.error)

    def tell(self, what: str, failure: BaseException) -> None:
        # Also of one whose own text cannot be made.
        why = "".join(traceback.format_exception_only(failure)).strip()
        with self._lock:
            self._tell(f"BlendRetriever: {what}, so its tokens are to be computed: {why}")


class BlendRetrieverTask:
    """The retrieval of one batch. Calls may come from any thread.

    Which rows are valid is settled when the first layer is handed out from which a selection may
    be made (the retriever's ``select_layer``). A segment of which a layer up to that one is
    late or damaged is invalid in all layers; until then ``valid_mask`` of earlier layers may have
    rows that turn out invalid. After it nothing becomes invalid any more: a layer that cannot be
    loaded is an error, and the prompt has to be computed.
    """

    def __init__(
        self,
        segments: list[_Segment],
        row_count: int,
        source: SegmentSource,
        select_layer: int,
        deadline: float | None,
        clock: Callable[[], float],
        like: Any,
        failures: _SourceFailures,
    ) -> None:
        self._segments = segments
        self._row_count = row_count
        self._source = source
        self._select_layer = select_layer
        self._deadline = deadline
        self._clock = clock
        self._like = like
        self._failures = failures
        self._changed = threading.Condition()
        self._settled = False
        self._cancelled = False
        self._arrays: dict[int, tuple[Any, Any]] = {}

    def ready(self, layer_id: int) -> bool:
        """Whether ``result`` of that layer would return at once."""
        layer = self._checked(layer_id)
        with self._changed:
            self._strike_late()
            return self._is_ready(layer)

    def result(self, layer_id: int, timeout: float | None = None) -> BlendRetrieverResult:
        """The KV of one layer; waits for it, and not for later ones.

        Layers may be asked for in any order and again. IndexError outside of the model's layers;
        TimeoutError after ``timeout`` seconds, after which it may be called again; CancelledError;
        after the selection also what kept the layer from being loaded; BadArgumentError for a
        timeout that is negative or no number.
        """
        layer = self._checked(layer_id)
        give_up = None
        if timeout is not None:
            give_up = self._clock() + _numbers.seconds_of(timeout, "timeout")
        with self._changed:
            while True:
                self._strike_late()
                if self._cancelled:
                    raise errors.CancelledError("blend: the retrieval was cancelled")
                if self._is_ready(layer):
                    return self._hand_out(layer)
                now = self._clock()
                if give_up is not None and now >= give_up:
                    raise errors.TimeoutError(
                        f"blend: layer {layer} has not come within {timeout} s"
                    )
                self._changed.wait(self._next_wait(now, give_up))

    def cancel(self) -> None:
        """Ends the retrieval: nothing more is loaded, and waiting calls raise CancelledError."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _checked(self, layer_id: int) -> int:
        layer = operator.index(layer_id)
        if not 0 <= layer < self._source.layer_count:
            raise IndexError(f"blend: layer {layer} of {self._source.layer_count}")
        return layer

    def _is_ready(self, layer: int) -> bool:
        needed = [layer]
        if not self._settled and layer >= self._select_layer:
            needed.extend(range(self._select_layer + 1))
        return all(segment.has(each) for segment in self._segments for each in needed)

    def _next_wait(self, now: float, give_up: float | None) -> float | None:
        moments = [] if give_up is None else [give_up]
        if self._deadline is not None and not self._settled:
            moments.append(self._deadline)
        return None if not moments else min(max(0.0, min(moments) - now), threading.TIMEOUT_MAX)

    def _strike_late(self) -> None:
        if self._settled or self._deadline is None or self._clock() < self._deadline:
            return
        for segment in self._segments:
            if not all(segment.has(layer) for layer in range(self._select_layer + 1)):
                segment.is_over = True
        self._deadline = None
        self._changed.notify_all()

    def _hand_out(self, layer: int) -> BlendRetrieverResult:
        if layer >= self._select_layer:
            self._settled = True
        for segment in self._segments:
            if layer in segment.failures and not segment.is_over:
                failure, place = segment.failures[layer]
                raise failure.with_traceback(place)  # else it would grow with each time
        valid = np.zeros(self._row_count, np.uint8)
        positions = np.zeros(self._row_count, np.int64)
        for segment in self._segments:
            if not segment.is_over and segment.positions is not None:
                rows = slice(segment.first_row, segment.first_row + len(segment.positions))
                valid[rows] = 1
                positions[rows] = segment.positions
        k, v = self._arrays.get(layer, (None, None)) if valid.any() else (None, None)
        return BlendRetrieverResult(k, v, self._given(valid), self._given(positions))

    def _given(self, values: np.ndarray) -> Any:
        if isinstance(self._like, np.ndarray) or not hasattr(self._like, "new_tensor"):
            return values
        return sys.modules["torch"].from_numpy(values)

    # ---- On the retriever's threads, which outlive whatever a source raises: SystemExit, too.

    def _find(self, segment: _Segment) -> range:
        """The layers that are to be loaded."""
        nothing = range(0)
        if self._is_over(segment):
            return nothing
        try:
            found = self._source.find(segment.tokens)
            count = operator.index(found.token_count)
            positions = as_numpy(found.positions, np.int64, "positions")
            if not 0 <= count <= len(segment.tokens) or len(positions) != count:
                raise errors.CorruptError(
                    f"blend: {count} tokens were found, and {len(positions)} positions"
                )
            layers = range(self._source.layer_count)
        except BaseException as failure:
            count = 0
            if not self._is_over(segment):
                self._failures.tell("the source could not look for a segment", failure)
        with self._changed:
            if count == 0:
                segment.is_over = True
            elif not segment.is_over:
                segment.found, segment.positions = found, positions
            self._changed.notify_all()
            return nothing if segment.is_over else layers

    def _load(self, segment: _Segment, layer: int) -> None:
        if self._is_over(segment) or segment.found is None:
            return
        try:
            k, v = segment.found.load(layer)
            # Rows of a segment that counts as late are the caller's: nobody writes to them.
            with self._changed:
                if not segment.is_over:
                    self._put(segment, layer, k, v)
                    self._changed.notify_all()
        except BaseException as failure:
            self._failed(segment, layer, failure)

    def _put(self, segment: _Segment, layer: int, k: Any, v: Any) -> None:
        count = 0 if segment.positions is None else len(segment.positions)
        for array, part in zip(self._arrays_of(layer, k, v), (k, v), strict=True):
            rows = array[self._rows(segment.first_row, count)]
            if rows.shape != part.shape or rows.dtype != part.dtype:
                raise errors.CorruptError(
                    f"blend: layer {layer} has {part.dtype} {list(part.shape)}, not "
                    f"{rows.dtype} {list(rows.shape)}"
                )
            rows[:] = part
        segment.layers.add(layer)

    def _is_over(self, segment: _Segment) -> bool:
        with self._changed:
            return self._cancelled or segment.is_over

    def _failed(self, segment: _Segment, layer: int, failure: BaseException) -> None:
        with self._changed:
            is_raised = self._settled and not segment.is_over
            if is_raised:
                segment.failures[layer] = failure, failure.__traceback__
            else:
                segment.is_over = True
            is_told = is_raised or self._cancelled
            self._changed.notify_all()
        if not is_told:
            self._failures.tell(f"layer {layer} of a segment could not be loaded", failure)

    def _arrays_of(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        if layer not in self._arrays:
            axis = self._source.token_dim
            shapes = [list(array.shape) for array in (k, v)]
            for shape in shapes:
                shape[axis] = self._row_count
            self._arrays[layer] = (empty_beside(k, shapes[0]), empty_beside(v, shapes[1]))
        return self._arrays[layer]

    def _rows(self, first: int, count: int) -> tuple[slice, ...]:
        return (slice(None),) * self._source.token_dim + (slice(first, first + count),)


@dataclasses.dataclass(frozen=True, order=True)
class _Job:
    """Low layers first, of all segments; -1: to look for the segment."""

    layer: int
    number: int
    task: weakref.ref[BlendRetrieverTask] = dataclasses.field(compare=False)
    segment: _Segment = dataclasses.field(compare=False)
    owner: BlendRetriever = dataclasses.field(compare=False)  # lives until the job has ended


class _Jobs:
    """What the threads of a retriever work on. They hold this alone: one that is dropped ends them
    behind its last job."""

    def __init__(self, threads: int) -> None:
        self._lock = threading.Lock()
        self._heap: list[_Job] = []
        self._closed = False
        # One for each job, and one for each thread at the end. Finalizers may put into it, whatever
        # their thread holds.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=_work, args=(self,), name="quire-blend", daemon=True)
            for _ in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def add(self, jobs: Sequence[_Job]) -> bool:
        """All of them, or none if it is closed."""
        with self._lock:
            if self._closed:
                return False
            for job in jobs:
                heapq.heappush(self._heap, job)
        for _ in jobs:
            self._wakes.put(None)
        return True

    def take(self) -> _Job | None:
        """Waits for the next one; None: there will be none."""
        self._wakes.get()
        with self._lock:
            return None if self._closed else heapq.heappop(self._heap)

    def end(self) -> None:
        """Ends the threads. Takes no lock: a finalizer may run where one is held."""
        self._closed = True
        for _ in self.threads:
            self._wakes.put(None)

    def close(self) -> list[_Job]:
        """Ends the threads; returns the jobs that are left."""
        with self._lock:
            left, self._heap = self._heap, []
            self.end()
        return left


def _work(jobs: _Jobs) -> None:
    while _do_next(jobs):
        pass


def _do_next(jobs: _Jobs) -> bool:
    """A function of its own: a thread that waits holds nothing of the last job."""
    job = jobs.take()
    if job is None:
        return False
    task = job.task()
    if task is None:  # nobody asks for its layers any more
        return True
    if job.layer >= 0:
        task._load(job.segment, job.layer)
    else:
        layers = task._find(job.segment)
        jobs.add([job.owner._job(layer, task, job.segment) for layer in layers])
    if jobs.closed:
        task.cancel()
    return True


class BlendRetriever:
    """Fetches KV of segments from ``source`` on ``threads`` threads of its own.

    ``select_layer``: the layer at which the executor selects for the first time. ``clock``:
    seconds, for deadlines. ``close`` ends the threads and all retrievals. One that is dropped ends
    them, too, once the retrievals have ended whose tasks somebody holds.
    """

    def __init__(
        self,
        source: SegmentSource,
        *,
        select_layer: int = 1,
        threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if threads < 1 or not 0 <= select_layer < source.layer_count:
            raise errors.BadArgumentError(
                f"BlendRetriever: threads={threads}, at least 1; select_layer={select_layer}, "
                f"below {source.layer_count}"
            )
        self._source = source
        self._select_layer = select_layer
        self._clock = clock
        self._numbers = itertools.count()
        self._failures = _SourceFailures()
        self._tasks: weakref.WeakSet[BlendRetrieverTask] = weakref.WeakSet()
        self._jobs = _Jobs(threads)
        self._dropped = weakref.finalize(self, self._jobs.end)
        self._dropped.atexit = False
        _ffi.close_at_exit(self)

    def new_request(
        self,
        full_prompts: Sequence[Any],
        indices: Sequence[Sequence[int]],
        *,
        deadline: float | None = None,
    ) -> BlendRetrieverTask:
        """Begins a retrieval and returns at once.

        ``full_prompts``: the token ids of each request, all of them. ``indices``: for each prompt
        the points that cut it into segments, ascending. ``deadline``: seconds from now, after
        which the segments whose layers up to the selection are not there count as not found.
        BadArgumentError for cuts or a deadline that are not as described, ClosedError.
        """
        if deadline is not None:
            deadline = self._clock() + _numbers.seconds_of(deadline, "deadline")
        if len(full_prompts) != len(indices):
            raise errors.BadArgumentError(
                f"blend: {len(full_prompts)} prompts, but cuts of {len(indices)}"
            )
        segments, row_count = _cut(full_prompts, indices)
        task = BlendRetrieverTask(
            segments,
            row_count,
            self._source,
            self._select_layer,
            deadline,
            self._clock,
            full_prompts[0] if len(full_prompts) > 0 else np.empty(0),
            self._failures,
        )
        self._tasks.add(task)
        if not self._jobs.add([self._job(-1, task, segment) for segment in segments]):
            raise _ffi.closed_error("BlendRetriever")
        return task

    def close(self) -> None:
        """Cancels all retrievals and ends the threads; closing twice is allowed."""
        for job in self._jobs.close():
            task = job.task()
            if task is not None:
                task.cancel()
        for thread in self._jobs.threads:
            if thread is not threading.current_thread():
                thread.join()

    def _abandon_after_fork(self) -> None:
        """In the child of a fork, which has none of the threads: counts as closed, and what was to
        be retrieved as cancelled. One of them may have held a lock."""
        self._dropped.detach()
        self._jobs = _Jobs(0)
        self._jobs.end()
        for task in self._tasks:
            task._changed, task._cancelled = threading.Condition(), True

    def __enter__(self) -> BlendRetriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, layer: int, task: BlendRetrieverTask, segment: _Segment) -> _Job:
        return _Job(layer, next(self._numbers), weakref.ref(task), segment, self)


def _cut(
    full_prompts: Sequence[Any], indices: Sequence[Sequence[int]]
) -> tuple[list[_Segment], int]:
    segments = []
    first_row = 0
    for number, (prompt, cuts) in enumerate(zip(full_prompts, indices, strict=True)):
        tokens = as_numpy(prompt, np.int64, f"full_prompts[{number}]")
        borders = [0, *(operator.index(cut) for cut in cuts), len(tokens)]
        for begin, end in itertools.pairwise(borders):
            if not 0 <= begin <= end <= len(tokens):
                raise errors.BadArgumentError(
                    f"blend: indices[{number}] must ascend within [0, {len(tokens)}], not "
                    f"{list(cuts)}"
                )
            if begin < end:
                segments.append(_Segment(first_row + begin, tokens[begin:end]))
        first_row += len(tokens)
    return segments, first_row
