"""What all states of sequences have in common: KV caches, recurrent states, composite ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from quire import _ffi
from quire._arrays import int_list

__all__ = ["KVState"]

_Self = TypeVar("_Self", bound="KVState")


class KVState(_ffi.Owner):
    """A state for each of many sequences, which forwards make longer.

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
        """Drops a sequence and frees what no other one shares.

        UnknownSequenceError; BadStateError in its forward.
        """
        self._handle.remove_sequence(seq_id)

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        """Adds a sequence that begins with the first `fork_pos` tokens of the parent (-1: all).

        Copies nothing.
        """
        self._handle.fork_sequence(parent_id, child_id, fork_pos)

    def pop_n(self, seq_id: int, n: int) -> None:
        """Drops the last `n` tokens. Sequences that share them keep them."""
        self._handle.pop_n(seq_id, n)

    def set_retained(self, seq_id: int, retained: bool) -> None:
        """Whether the sequence is kept for its tokens alone.

        Such a one does not count against ``max_num_sequences`` and cannot be in a batch; of a
        recurrent state it keeps the current one and its checkpoints.
        """
        self._handle.set_retained(seq_id, retained)

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
        self._has_begun(len(ids))

    def _has_begun(self, batch: int) -> None:
        """A forward of ``batch`` sequences is open."""

    def commit_accepted_token_tree_nodes(
        self, seq_ids: Sequence[int], leaf_indices: Sequence[int]
    ) -> None:
        """Accepts, in the i-th sequence, the path to node ``leaf_indices[i]`` (-1: nothing) and
        drops the rest of the tree. BadStateError for a sequence without a tree."""
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

    # ---- Counters. Lengths include the tokens of an open forward.

    def has_sequence(self, seq_id: int) -> bool:
        """Whether the sequence is there."""
        return bool(self._handle.has_sequence(seq_id))

    def sequence_count(self) -> int:
        """Number of sequences, retained ones included."""
        return int(self._handle.sequence_count())

    def get_sequence_length(self, seq_id: int) -> int:
        """Tokens of one sequence. UnknownSequenceError."""
        return int(self._handle.get_sequence_length(seq_id))

    # ---- Debugging

    def state_digest(self) -> int:
        """A number for all that can be observed (not what layers store); equal before and after a
        failed call."""
        return int(self._handle.state_digest()) & 0xFFFFFFFFFFFFFFFF

    def check_invariants(self) -> None:
        """Walks the whole state; InternalError with the first violated invariant."""
        self._handle.check_invariants()
