"""A thread that does tasks one after the other and tells of their ends by an event fd."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Lane"]

_log = logging.getLogger("quire.lmcache")


class Lane:
    """Tasks of one kind. A task's result is taken once."""

    def __init__(self, name: str) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], Any], Any] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}
        self._last = 0
        self.failures = 0
        self.failing = False  # the last task has failed
        self._thread = threading.Thread(target=self._run, name=f"quire-lmcache-{name}")
        self._thread.daemon = True
        self._thread.start()

    def submit(self, task: Callable[[], Any], failed: Any) -> int:
        """Does `task` later; its result is what it returns, or `failed` where it raises. A result
        that is None is not told. Returns the task's number."""
        with self._lock:
            self._last += 1
            number = self._last
        self._tasks.put((number, task, failed))
        return number

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
        """Ends after the tasks that were submitted. Twice is fine."""
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()
            os.close(self.event_fd)

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
            os.eventfd_write(self.event_fd, 1)
