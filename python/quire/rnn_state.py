"""quire.RNNState: states of recurrent layers whose update the caller computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire import _ffi
from quire._arrays import dtype_name, input_array, int_list, output_array
from quire._recurrent_state import RecurrentState

__all__ = ["RNNState", "StateSpec"]


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One state of each layer: its shape, its dtype, and the array that it is before the first
    token (zeros if None)."""

    shape: Sequence[int]
    dtype: Any = "float32"
    initial: Any = None

    def _fields(self) -> dict[str, Any]:
        import tvm_ffi

        fields: dict[str, Any] = {
            "shape": tvm_ffi.Shape(tuple(int_list(self.shape, "shape"))),
            "dtype": dtype_name(self.dtype),
        }
        if self.initial is not None:
            fields["initial"] = tvm_ffi.from_dlpack(input_array(self.initial))
        return fields


class RNNState(RecurrentState):
    """States of recurrent layers whose update the caller computes.

    One forward::

        with state.forward(ids, lengths):
            for layer in range(layers):
                before = state.get(layer, 0)
                state.set(layer, 0, after)

    Reached by fork_sequence and pop_n: the last ``max_history`` ends of forwards, the checkpoints,
    position 0. See :class:`quire._recurrent_state.RecurrentState` for the rest.

    Args:
        states: what each layer keeps.
        num_layers: number of layers.
        max_num_sequences: most sequences at a time that are not retained.
        max_history: newest states, one per forward, that pop_n can return to, the current one
            included.
        max_checkpoints: states inside forwards (set_at) that each sequence keeps.
        max_retained_slots: most slots that retained sequences may hold.
        max_tree_size: most nodes of one sequence's uncommitted token tree.
        max_tree_slots: most nodes of all sequences together; each has a state.
        poison_freed_slots: fill free slots with NaN, for tests.
        tvm_rnn_history1: as in TVM (``docs/tvm.md``): with ``max_history`` 1, ``get`` gives what
            was set before it in the same forward.
    """

    def __init__(
        self,
        states: Sequence[StateSpec | Mapping[str, Any]],
        *,
        num_layers: int = 1,
        max_num_sequences: int,
        max_history: int = 1,
        max_checkpoints: int = 0,
        max_retained_slots: int = 0,
        max_tree_size: int = 256,
        max_tree_slots: int = 0,
        poison_freed_slots: bool = False,
        tvm_rnn_history1: bool = False,
    ) -> None:
        specs = [state if isinstance(state, StateSpec) else StateSpec(**state) for state in states]
        self._shapes = [tuple(int_list(spec.shape, "shape")) for spec in specs]
        self._dtypes = [dtype_name(spec.dtype) for spec in specs]
        self._batch = 0
        super().__init__(
            _ffi.new(
                _ffi.RNNStateHandle,
                {
                    "states": [spec._fields() for spec in specs],
                    "num_layers": num_layers,
                    "max_num_sequences": max_num_sequences,
                    "max_history": max_history,
                    "max_checkpoints": max_checkpoints,
                    "max_retained_slots": max_retained_slots,
                    "max_tree_size": max_tree_size,
                    "max_tree_slots": max_tree_slots,
                    "poison_freed_slots": poison_freed_slots,
                    "tvm_rnn_history1": tvm_rnn_history1,
                }
            )
        )

    def _has_begun(self, batch: int) -> None:
        self._batch = batch

    def get(self, layer: int, state: int, o: Any = None) -> Any:
        """The states of the batch's sequences before this forward, [B, *shape], in its order;
        a new NumPy array if `o` is None. In a tree forward: those of the committed tokens
        (:meth:`get_before` gives the state before each row)."""
        o = self._output(state, (self._batch,), o)
        self._handle.get(layer, state, o)
        return o

    def set(self, layer: int, state: int, data: Any) -> None:
        """The states [B, *shape] after this forward; a second call replaces the first."""
        self._handle.set(layer, state, input_array(data))

    def get_before(self, layer: int, state: int, rows: Sequence[int], o: Any = None) -> Any:
        """The states [len(rows), *shape] before the new tokens ``rows[i]``, counted from the
        batch's first; of a node of a token tree that is the state after its parent."""
        rows = int_list(rows, "rows")
        o = self._output(state, (len(rows),), o)
        self._handle.get_before(layer, state, rows, o)
        return o

    def get_at(self, layer: int, state: int, rows: Sequence[int], o: Any = None) -> Any:
        """States that set_at has set in this forward, [len(rows), *shape]."""
        rows = int_list(rows, "rows")
        o = self._output(state, (len(rows),), o)
        self._handle.get_at(layer, state, rows, o)
        return o

    def set_at(self, layer: int, state: int, rows: Sequence[int], data: Any) -> None:
        """The states [len(rows), *shape] after the new tokens ``rows[i]``, counted from the
        batch's first: checkpoints, or, at a sequence's last row, what set gives it."""
        self._handle.set_at(layer, state, int_list(rows, "rows"), input_array(data))

    def debug_get(self, layer: int, state: int, seq_id: int, o: Any = None) -> Any:
        """A copy of the current state; in a forward that of before the forward."""
        o = self._output(state, (), o)
        self._handle.debug_get(layer, state, seq_id, o)
        return o

    # A state that is out of range gets a stand-in here, and its BadArgumentError from the library.
    def _output(self, state: int, before: tuple[int, ...], o: Any) -> Any:
        if o is not None:
            return output_array(o, "o")
        if not 0 <= state < len(self._shapes):
            return np.empty((1,), np.float32)
        if self._dtypes[state] == "bfloat16":
            raise TypeError("NumPy has no bfloat16: give `o`, an array of the caller's library")
        return np.empty((*before, *self._shapes[state]), self._dtypes[state])
