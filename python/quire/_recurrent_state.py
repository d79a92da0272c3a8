"""What quire.RNNState and quire.RecurrentCache have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from quire import errors
from quire._arrays import int_list
from quire._kv_state import KVState
from quire._numbers import int64, octets

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

    # ---- States, bit for bit, into another object or process

    def export_chunk(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        identity: Mapping[str, str],
        block_tokens: int = 256,
        salt: bytes = b"",
    ) -> bytes:
        """The states after `tokens`, with which the sequence begins, as a chunk
        (``docs/formats/chunk.md``): the last of the chain that has `block_tokens` in each.

        identity: what the states are of: ``model``, ``revision``, ``tokenizer``, ``adapter``. For
        an RNNState ``revision`` also says what computes them, and from which initial states.

        Raises:
            NeedsReplayError: no state is held there.
            BadArgumentError: the sequence has fewer tokens, or none are given.
        """
        fields = self._chain(tokens, identity, block_tokens, salt)
        return bytes(self._handle.export_chunk(fields, seq_id))

    def import_chunks(
        self,
        seq_id: int,
        tokens: Sequence[int],
        chunks: Sequence[bytes],
        *,
        identity: Mapping[str, str],
        block_tokens: int = 256,
        salt: bytes = b"",
    ) -> None:
        """Adds a sequence of `tokens` with the states of the chain's last chunk, unless a chunk is
        not the very one that was exported for these tokens, shapes and dtypes.

        Raises:
            IncompatibleError: a sound chunk of something else.
            CorruptError: a damaged one.
            SequenceExistsError, OutOfPagesError; nothing has changed, whatever was raised.
        """
        if self.has_sequence(seq_id):
            raise errors.SequenceExistsError(f"import_chunks: sequence {seq_id} exists already")
        fields = self._chain(tokens, identity, block_tokens, salt)
        self._handle.import_chunks(fields, seq_id, list(chunks))

    @staticmethod
    def _chain(
        tokens: Sequence[int], identity: Mapping[str, str], block_tokens: int, salt: bytes
    ) -> dict[str, object]:
        return {
            **identity,
            "block_tokens": int64(block_tokens, "block_tokens"),
            "tokens": np.asarray(int_list(tokens, "tokens"), dtype=np.int64),
            "salt": octets(salt, "salt"),
        }

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
