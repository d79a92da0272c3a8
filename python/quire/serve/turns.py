"""Work that would hold the event loop: it runs in a few threads, by turns of the keys.

One text can take seconds to be tokenized. A key with many of them waits for its own: the next free
thread goes to another key that waits, and one thread at least is never a single key's.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from quire import errors

__all__ = ["ByTurns", "Turns", "call_in", "started_pool"]

T = TypeVar("T")


class ByTurns(Generic[T]):
    """What waits, by key: first in, first out, and the keys take turns."""

    def __init__(self) -> None:
        # The key whose turn is next comes first. None is empty.
        self._queues: collections.OrderedDict[str, collections.deque[T]]
        self._queues = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __getitem__(self, key: str) -> Sequence[T]:
        return self._queues.get(key, ())

    def add(self, key: str, one: T) -> None:
        self._queues.setdefault(key, collections.deque()).append(one)

    def take(self, may: Callable[[str], bool] = lambda key: True) -> tuple[str, T] | None:
        """The next one of the first key that may have a turn, which is behind the others then."""
        key = next(filter(may, self._queues), None)
        if key is None:
            return None
        queue = self._queues.pop(key)
        one = queue.popleft()
        if queue:
            self._queues[key] = queue
        return key, one

    def remove(self, key: str, one: T) -> None:
        """Nothing where it does not wait."""
        queue = self._queues.get(key, collections.deque())
        if one in queue:
            queue.remove(one)
            if not queue:
                del self._queues[key]

    def take_all(self) -> list[T]:
        found = [one for queue in self._queues.values() for one in queue]
        self._queues.clear()
        return found


@dataclasses.dataclass(eq=False)
class _Work:
    """What somebody waits for. unwanted: is given the result if nobody waits any more."""

    call: Callable[[], Any]
    unwanted: Callable[[Any], None]
    done: asyncio.Future[Any]


def started_pool(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """A pool whose threads all run already: one that the system refuses later would cost the work
    that it was for, and its place. OutOfMemoryError: the system refuses one now."""
    pool = concurrent.futures.ThreadPoolExecutor(threads, name)
    all_run = threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)  # each thread waits, so the next one needs another thread
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown()
        raise errors.OutOfMemoryError(
            f"the server cannot start {threads} threads {name}: {error}; allow this user or "
            "container more processes"
        ) from None
    return pool


class Turns:
    """For the event loop's thread.

    Args:
        threads: at least 2. OutOfMemoryError: the system refuses one.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = started_pool(threads, "quire-serve")
        self._waiting: ByTurns[_Work] = ByTurns()
        self._running: collections.Counter[str] = collections.Counter()
        self._closed = False

    async def run(
        self,
        key: str,
        function: Callable[..., T],
        *arguments: Any,
        unwanted: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Calls the function in a thread, once it is the key's turn. ClosedError after `close`.

        unwanted: is given what it returned if this was cancelled meanwhile.
        """
        if self._closed:
            raise errors.ClosedError("the server ends")
        done = asyncio.get_running_loop().create_future()
        work = _Work(functools.partial(function, *arguments), unwanted, done)
        self._waiting.add(key, work)
        self._begin_next()
        try:
            found: T = await done
            return found
        except asyncio.CancelledError:
            if done.cancelled():
                self._waiting.remove(key, work)
            else:  # it ended in the same turn of the loop
                _give_back(done, unwanted)
            raise
        finally:
            # A failure's traceback has this frame: they would stay until they are found.
            del done, work

    def close(self) -> None:
        """Nothing begins any more; what runs goes on."""
        self._closed = True
        for work in self._waiting.take_all():
            if not work.done.done():
                work.done.set_exception(errors.ClosedError("the server ends"))
        self._pool.shutdown(wait=False)

    def _begin_next(self) -> None:
        most = self._threads - 1
        while self._running.total() < self._threads:
            found = self._waiting.take(lambda key: self._running[key] < most)
            if found is None:
                return
            key, work = found
            if work.done.done():
                continue  # its client has gone
            self._running[key] += 1
            made = self._pool.submit(work.call)
            loop = asyncio.get_running_loop()
            made.add_done_callback(functools.partial(call_in, loop, self._end, key, work))

    def _end(self, key: str, work: _Work, made: concurrent.futures.Future[Any]) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        error = made.exception()
        if work.done.done():
            if error is None:
                work.unwanted(made.result())
        elif error is None:
            work.done.set_result(made.result())
        else:
            work.done.set_exception(error)
        if not self._closed:
            self._begin_next()


def _give_back(done: asyncio.Future[T], unwanted: Callable[[T], None]) -> None:
    if done.exception() is None:
        unwanted(done.result())


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Calls it on the event loop, from any thread."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        pass  # the event loop has ended, and with it all that waited
