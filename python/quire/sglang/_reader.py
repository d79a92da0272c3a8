"""Brings pages out of the store, several at a time."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Generator, Sequence

import quire
from quire._chunk_objects import ObjectSpace, arrived

__all__ = ["PageReader"]

# A call that reads, a second one beside it, and what is kept: together less than fetch_bytes.
_SHARES = 4
_AHEAD_MAX = 64


class PageReader:
    """Pages of one space. All calls from any thread.

    A page that SGLang has asked about is kept in memory for the call that loads it, which so
    copies what is verified. There are limits for both: the pages that are on their way, and those
    that are kept, have a quarter of `fetch_bytes` each.
    """

    def __init__(self, space: ObjectSpace, fetch_bytes: int, timeout: float) -> None:
        share = fetch_bytes // _SHARES // space.chunk_bytes_max
        self._space = space
        self._timeout = timeout
        self._ahead = min(max(1, share), _AHEAD_MAX)
        self._kept_max = share
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[bytes, quire.ChunkFetch] = collections.OrderedDict()

    def read(self, names: Sequence[bytes]) -> Generator[quire.ChunkFetch | None, None, None]:
        """For each page, in order, its fetch, if it is in memory and verified; else None. The
        caller closes each fetch, or keeps it, and closes the generator. Waits for at most the
        timeout for all pages together."""
        until = time.monotonic() + self._timeout
        coming: collections.deque[quire.ChunkFetch] = collections.deque()
        begun = 0
        try:
            for _ in names:
                while begun < len(names) and len(coming) < self._ahead:
                    coming.append(self._begin(names[begun], until))
                    begun += 1
                fetch = coming.popleft()
                yield fetch if arrived(fetch, max(0.0, until - time.monotonic())) else None
        finally:
            for fetch in coming:
                fetch.close()

    def _begin(self, name: bytes, until: float) -> quire.ChunkFetch:
        with self._lock:
            kept = self._kept.pop(name, None)
        return kept or self._space.fetch(name, max(0.001, until - time.monotonic()))

    def keep(self, name: bytes, fetch: quire.ChunkFetch) -> None:
        """Keeps a page until it is read; the oldest one goes where there are too many."""
        with self._lock:
            gone = self._kept.pop(name, None)
            self._kept[name] = fetch
            over = [] if gone is None else [gone]
            while len(self._kept) > self._kept_max:
                over.append(self._kept.popitem(last=False)[1])
        for each in over:
            each.close()

    @property
    def kept(self) -> int:
        """How many pages are kept."""
        with self._lock:
            return len(self._kept)

    def forget(self) -> None:
        """Keeps none of the pages any more."""
        with self._lock:
            kept, self._kept = self._kept, collections.OrderedDict()
        for fetch in kept.values():
            fetch.close()
