"""A prompt that is looked for: in every part, that is for every group of layers, and every worker.

The parts that attend to everything say how far it goes. Windows are then asked for the chunks that
they need behind that border, recurrent states for the one before it. Where one lacks, the border
moves to the chunk before which all parts have what they need. States are stored where a step ended,
so the border moves until it meets one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import quire
from quire.vllm._groups import KvGroup

__all__ = ["Lookup"]

# A border that has moved so often finds nothing: each time may take a timeout.
_ROUNDS_MAX = 6


@dataclasses.dataclass
class _Part:
    """first: the chunk that the fetch begins with."""

    group: KvGroup
    fetch: quire.ChunkFetch | None = None
    first: int = 0


class Lookup:
    """groups: of each part. start(part, first, border): a fetch of the part's chunks [first,
    border). first, chunk_count: those that are of use.

    first is kept; border: chunks before it are promised once it is settled. missing: the first
    chunk that was not found, in one part at least; miss: why.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        start: Callable[[int, int, int], quire.ChunkFetch],
        first: int,
        chunk_count: int,
    ) -> None:
        self.first, self.border = first, chunk_count
        self.missing: int | None = None
        self.miss: str | None = None
        self._start = start
        self._parts = [_Part(group) for group in groups]
        self._rounds = 0
        leads = [i for i, part in enumerate(self._parts) if part.group.window is None]
        # Without such a part nothing says how far it goes, so all chunks of windows are read.
        windows = [i for i, part in enumerate(self._parts) if not part.group.state]
        for i in leads or windows:
            self._ask(i, first)

    def _ask(self, number: int, first: int) -> None:
        part = self._parts[number]
        if part.fetch is not None:
            part.fetch.close()
        part.fetch, part.first = self._start(number, first, self.border), first

    def poll(self, seconds: float) -> bool:
        """Whether the border is settled: every part has what it needs, verified in memory. Waits so
        long at most."""
        while all(each.fetch is None or each.fetch.wait(seconds) for each in self._parts):
            if self._narrow():
                return True
        return False

    def _narrow(self) -> bool:
        """Moves the border to what has come, and asks for what it needs. Whether that is here."""
        is_slow = False
        for part in self._parts:
            if part.fetch is not None and part.first + part.fetch.ready < self.border:
                self.border = self.missing = part.first + part.fetch.ready
                self.miss = part.fetch.miss
                # To be told that there is no state at a border takes no timeout.
                is_slow |= not part.group.state or self.miss != "not stored"
        if self.border <= self.first or self._rounds > _ROUNDS_MAX:
            self.border = self.first
            return True
        lacking = [
            i
            for i, part in enumerate(self._parts)
            if part.fetch is None or part.first > self.begin(i)
        ]
        for i in lacking:
            self._ask(i, self.begin(i))
        self._rounds += is_slow and bool(lacking)
        return not lacking

    def limit(self, border: int) -> None:
        """No more than the chunks before this border can be used; poll says when that is
        settled."""
        self.border = min(self.border, border)

    def begin(self, number: int, first: int | None = None) -> int:
        """The first chunk of a part that has to be loaded, where vLLM has those before `first`."""
        first = self.first if first is None else first
        return max(first, self._parts[number].group.first_needed(self.border))

    def fetch(self, number: int) -> tuple[quire.ChunkFetch, int]:
        """A part's chunks, and the first of them. REQUIRES: the border is settled, behind first."""
        part = self._parts[number]
        assert part.fetch is not None
        return part.fetch, part.first

    def take(self) -> list[quire.ChunkFetch]:
        """The fetches, by part, which the caller closes."""
        found = [self.fetch(i)[0] for i in range(len(self._parts))]
        self._parts.clear()
        return found

    def close(self) -> None:
        for part in self._parts:
            if part.fetch is not None:
                part.fetch.close()
        self._parts.clear()
