"""A thread that does tasks one after the other and tells of their ends by an event fd."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from quire._ffi import closed_error

__all__ = ["Lane"]

_log = logging.getLogger("quire.lmcache")


class Lane:
    """Tasks of one kind. A task's result is taken once, also after the lane is closed."""

    def __init__(self, name: str) -> None:
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], Any], Any] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._process = os.getpid()  # the child of a fork has no thread of it
        self._is_closed = False  # nothing is put into the queue any more
        self._results: dict[int, Any] = {}
        self._last = 0
        self.failures = 0
        self.failing = False  # the last task has failed
        self._thread = threading.Thread(target=self._run, name=f"quire-lmcache-{name}")
        self._thread.daemon = True
        self._thread.start()

    def check_open(self) -> None:
        """ClosedError: no task is done any more, or none in this process."""
        if self._is_closed or os.getpid() != self._process:
            raise closed_error("QuireL2Adapter")

    @property
    def event_fd(self) -> int:
        """ClosedError: the number may be that of another file by now."""
        self.check_open()
        return self._event_fd

    def submit(self, task: Callable[[], Any], failed: Any) -> int:
        """Does `task` later; its result is what it returns, or `failed` where it raises. A result
        that is None is not told. Returns the task's number. ClosedError: it would never be done."""
        self.check_open()
        with self._lock:
            self.check_open()
            self._last += 1
            self._tasks.put((self._last, task, failed))
            return self._last

    def take(self, number: int) -> Any:
        """The result of a task, once; None before its end."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """Results of all tasks that have ended since the last call."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Ends after the tasks that were submitted. Twice is fine, and so is the child of a fork,
        which leaves the parent's as they are."""
        if os.getpid() != self._process:
            return
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self._tasks.put(None)
        self._thread.join()
        if not was_closed:
            os.close(self._event_fd)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            number, task, failed = item
            try:
                result = task()
                self.failing = False
            except Exception as error:
                self.failures += 1
                self.failing = True
                _log.error("QuireL2Adapter: a task (%s) failed: %s", self._name, error)
                result = failed
            if result is None:
                continue
            with self._lock:
                self._results[number] = result
            os.eventfd_write(self._event_fd, 1)
