"""What quire.RNNState and quire.RecurrentCache have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from quire import _ffi, errors
from quire._arrays import int_list
from quire.snapshot import SnapshotInfo, read_info

__all__ = ["RecurrentState", "SlotCounts"]

_Self = TypeVar("_Self", bound="RecurrentState")


@dataclasses.dataclass(frozen=True)
class SlotCounts:
    """Slots, each of one state of all layers: all, free, held by retained sequences."""

    total: int
    free: int
    retained: int


class RecurrentState(_ffi.Owner):
    """A state of recurrent layers for each of many sequences.

    Such a state cannot be cut at a position as attention KV can: it exists at the positions where
    it was kept. fork_sequence and pop_n reach those, and what can be computed from them; position 0
    always. For any other they raise NeedsReplayError and have changed nothing: go to
    ``replay_start(...)`` and run the tokens from there again.

    Every call works, or raises a subclass of :class:`quire.QuireError` and has changed nothing.
    """

    # ---- Sequences

    def clear(self) -> None:
        """Drops all sequences; aborts an open forward first."""
        self._handle.clear()

    def add_sequence(self, seq_id: int) -> None:
        """Adds an empty sequence.

        SequenceExistsError, BadArgumentError (negative), TooLargeError (too many).
        """
        self._handle.add_sequence(seq_id)

    def remove_sequence(self, seq_id: int) -> None:
        """Drops a sequence. UnknownSequenceError; BadStateError in its forward."""
        self._handle.remove_sequence(seq_id)

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        """Adds a sequence that begins with the first `fork_pos` tokens of the parent (-1: all)."""
        self._handle.fork_sequence(parent_id, child_id, fork_pos)

    def pop_n(self, seq_id: int, n: int) -> None:
        """Drops the last `n` tokens."""
        self._handle.pop_n(seq_id, n)

    def set_retained(self, seq_id: int, retained: bool) -> None:
        """Whether the sequence is kept for its tokens alone.

        Such a one keeps its current state and its checkpoints only, does not count against
        ``max_num_sequences`` and cannot be in a batch.
        """
        self._handle.set_retained(seq_id, retained)

    def replay_start(self, seq_id: int, position: int) -> int:
        """The largest position up to `position` that fork_sequence and pop_n reach."""
        return int(self._handle.replay_start(seq_id, position))

    # ---- Forward

    def begin_forward(
        self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
    ) -> None:
        """Plans a forward of ``append_lengths[i]`` new tokens for ``seq_ids[i]``; reserves for it.

        With `token_tree_parents`, one per new token, these are nodes of the sequences' uncommitted
        token trees: a parent is a node's index in its sequence's whole tree, or -1.

        Raises OutOfPagesError, UnknownSequenceError, BadArgumentError, BadStateError,
        TooLargeError; nothing has changed then.
        """
        ids = int_list(seq_ids, "seq_ids")
        lengths = int_list(append_lengths, "append_lengths")
        if token_tree_parents is None:
            self._handle.begin_forward(ids, lengths)
        else:
            parents = int_list(token_tree_parents, "token_tree_parents")
            self._handle.begin_tree_forward(ids, lengths, parents)

    def commit_accepted_token_tree_nodes(
        self, seq_ids: Sequence[int], leaf_indices: Sequence[int]
    ) -> None:
        """Of each sequence the path to node ``leaf_indices[i]`` is accepted (-1: nothing) and the
        rest of its tree dropped. BadStateError for a sequence without a tree."""
        self._handle.commit_accepted_token_tree_nodes(
            int_list(seq_ids, "seq_ids"), int_list(leaf_indices, "leaf_indices")
        )

    def get_tree_size(self, seq_id: int) -> int:
        """Nodes of the sequence's uncommitted token tree."""
        return int(self._handle.get_tree_size(seq_id))

    def end_forward(self) -> None:
        """Ends the forward; its tokens count from now on.

        BadStateError, and still open, if a layer or state is missing.
        """
        self._handle.end_forward()

    def abort_forward(self) -> None:
        """Ends the forward and leaves the sequences as they were before it."""
        self._handle.abort_forward()

    @contextlib.contextmanager
    def forward(
        self: _Self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
    ) -> Iterator[_Self]:
        """begin_forward, the body, end_forward; abort_forward when the body or end_forward
        raises."""
        self.begin_forward(seq_ids, append_lengths, token_tree_parents)
        try:
            yield self
            self.end_forward()
        except BaseException:
            self.abort_forward()
            raise

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
        """The states behind `tokens`, with which the sequence begins, as a chunk
        (``docs/formats/chunk.md``): the last of the chain that has `block_tokens` in each.

        identity: what the states are of: ``model``, ``revision``, ``tokenizer``, ``adapter``. For an
        RNNState ``revision`` also says what computes them, and from which initial states.

        Raises:
            NeedsReplayError: no state is held there.
            BadArgumentError: the sequence has not so many tokens, or there are none.
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

    def save_snapshot(
        self,
        seq_id: int,
        tokens: Sequence[int],
        path: str | os.PathLike[str],
        *,
        identity: Mapping[str, str],
        sampler: bytes = b"",
        block_tokens: int = 256,
    ) -> None:
        """Writes the sequence, which consists of `tokens`, into a file
        (``docs/formats/snapshot.md``); whole or not at all. `identity`: see :meth:`export_chunk`.
        """
        contents = {
            **identity,
            "block_tokens": block_tokens,
            "tokens": np.asarray(tokens, dtype=np.int64),
            "sampler": bytes(sampler),
            "created_ms": time.time_ns() // 1_000_000,
        }
        self._handle.save_snapshot(contents, seq_id, os.fspath(path))

    def load_snapshot(
        self, seq_id: int, path: str | os.PathLike[str], *, identity: Mapping[str, str]
    ) -> SnapshotInfo:
        """Adds the sequence of a snapshot.

        Raises:
            IncompatibleError: other shapes, dtypes or model; the message names the difference.
            CorruptError: the file is damaged. Nothing of it is used.
            SequenceExistsError, OutOfPagesError.
        """
        return read_info(self._handle.load_snapshot(dict(identity), seq_id, os.fspath(path)))

    @staticmethod
    def _chain(
        tokens: Sequence[int], identity: Mapping[str, str], block_tokens: int, salt: bytes
    ) -> dict[str, object]:
        return {
            **identity,
            "block_tokens": block_tokens,
            "tokens": np.asarray(tokens, dtype=np.int64),
            "salt": bytes(salt),
        }

    # ---- Counters. Lengths include the tokens of an open forward.

    def has_sequence(self, seq_id: int) -> bool:
        """Whether the sequence is there."""
        return bool(self._handle.has_sequence(seq_id))

    def sequence_count(self) -> int:
        """Number of sequences, retained ones included."""
        return int(self._handle.sequence_count())

    def retained_sequence_count(self) -> int:
        """Number of retained sequences."""
        return int(self._handle.retained_sequence_count())

    def get_sequence_length(self, seq_id: int) -> int:
        """Tokens of one sequence. UnknownSequenceError."""
        return int(self._handle.get_sequence_length(seq_id))

    def slot_counts(self) -> SlotCounts:
        """Where the slots are."""
        counts = self._handle.slot_counts()
        return SlotCounts(int(counts["total"]), int(counts["free"]), int(counts["retained"]))

    def storage_bytes(self) -> int:
        """Bytes mapped for all states: the most that the object takes for them."""
        return int(self._handle.storage_bytes())

    # ---- Debugging

    def state_digest(self) -> int:
        """A number for all that can be observed (not the states' bytes); equal before and after a
        failed call."""
        return int(self._handle.state_digest()) & 0xFFFFFFFFFFFFFFFF

    def check_invariants(self) -> None:
        """Walks the whole state; InternalError with the first violated invariant."""
        self._handle.check_invariants()
