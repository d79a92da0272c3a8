"""A device that is late: what is queued for it is done when somebody waits, or some time before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LateStream"]


class _Work:
    """Something queued, and the event behind it."""

    def __init__(
        self, rng: random.Random, queue: deque[_Work], work: Callable[[], object]
    ) -> None:
        self._rng, self._queue, self._work = rng, queue, work
        self.done = False
        queue.append(self)

    def _step(self) -> None:
        first = self._queue.popleft()
        first._work()
        first.done = True

    def query(self) -> bool:
        if self._queue and self._rng.random() < 0.3:
            self._step()
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self._step()


class LateStream:
    """The streams of such a device, as quire.vllm._blocks.Stream. A copy reads and writes its bytes
    when it is done, not when it is queued."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._forward: deque[_Work] = deque()
        self._out: deque[_Work] = deque()

    def host_array(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 99, dtype=dtype)

    def run(self, work: Callable[[], object]) -> _Work:
        return _Work(self._rng, self._forward, work)

    def run_out(self, gather: Callable[[], Any], copy: Callable[[Any], object]) -> _Work:
        gathered: list[Any] = []
        before = _Work(self._rng, self._forward, lambda: gathered.append(gather()))

        def out() -> None:
            before.synchronize()
            copy(gathered.pop())

        return _Work(self._rng, self._out, out)

    def settle(self) -> None:
        """A forward comes: all that was queued before it on its stream is done."""
        while self._forward:
            self._forward[-1].synchronize()
