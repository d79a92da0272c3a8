"""What quire.RNNState and quire.RecurrentCache have in common."""

from __future__ import annotations

import dataclasses

from quire._kv_state import KVState

__all__ = ["RecurrentState", "SlotCounts"]


@dataclasses.dataclass(frozen=True)
class SlotCounts:
    """Slots, each of one state of all layers: all, free, held by retained sequences."""

    total: int
    free: int
    retained: int


class RecurrentState(KVState):
    """A state of recurrent layers for each of many sequences.

    Such a state cannot be cut at a position as attention KV can: it exists at the positions where
    it was kept. fork_sequence and pop_n reach those, and what can be computed from them; position 0
    always. For any other they raise NeedsReplayError and have changed nothing: go to
    ``replay_start(...)`` and run the tokens from there again.

    Every call works, or raises a subclass of :class:`quire.QuireError` and has changed nothing.
    """

    def replay_start(self, seq_id: int, position: int) -> int:
        """The largest position up to `position` that fork_sequence and pop_n reach."""
        return int(self._handle.replay_start(seq_id, position))

    def retained_sequence_count(self) -> int:
        """Number of retained sequences."""
        return int(self._handle.retained_sequence_count())

    def slot_counts(self) -> SlotCounts:
        """Where the slots are."""
        counts = self._handle.slot_counts()
        return SlotCounts(int(counts["total"]), int(counts["free"]), int(counts["retained"]))

    def storage_bytes(self) -> int:
        """Bytes mapped for all states: the most that the object takes for them."""
        return int(self._handle.storage_bytes())
