"""quire.CompositeState: the state of a model whose layers keep theirs in several caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire import _ffi
from quire._kv_state import KVState
from quire.transfer import TransferCalls

if TYPE_CHECKING:
    from quire.kv_cache import KVCache
    from quire.recurrent_cache import RecurrentCache
    from quire.rnn_state import RNNState

__all__ = ["CompositeState"]


class CompositeState(TransferCalls, KVState):
    """The state of a model whose layers keep theirs in several caches, as attention and recurrent
    layers do: its parts change together or not at all.

    Each call is made on all parts, or, if one of them refuses it, on none, and the error is that
    part's. What layers do is called on the parts::

        state = CompositeState(attention=cache, recurrent=[recurrent])
        state.add_sequence(0)
        with state.forward([0], [n]):
            cache.attention_with_fused_qkv(0, qkv)
            recurrent.linear_attention(0, q, k, v, decay)

    As long as it is open, calls that change which sequences its parts have, or their tokens, raise
    BadStateError on the parts. fork_sequence and pop_n reach the positions that all parts reach,
    and raise NeedsReplayError for others. :mod:`quire.snapshot` keeps its sequences as files if the
    one recurrent part is a RecurrentCache.

    Args:
        recurrent: the recurrent parts, none of them twice and without sequences.
        attention: the attention part, without sequences, or None; or several, for layers whose
            options one cache cannot have. The tokens of several are neither transferred nor saved
            as snapshots.

    There must be at least one part.
    """

    def __init__(
        self,
        *,
        recurrent: Sequence[RNNState | RecurrentCache] = (),
        attention: KVCache | Sequence[KVCache] | None = None,
    ) -> None:
        if attention is None:
            caches: tuple[KVCache, ...] = ()
        else:
            caches = tuple(attention) if isinstance(attention, Sequence) else (attention,)
        self._attention = caches
        self._recurrent = tuple(recurrent)
        fields: dict[str, Any] = {"recurrent": [_object_of(part) for part in self._recurrent]}
        if caches:
            fields["attention"] = _object_of(caches[0])
            fields["more_attention"] = [_object_of(cache) for cache in caches[1:]]
        super().__init__(_ffi.new(_ffi.CompositeStateHandle, fields))

    @property
    def attention(self) -> KVCache | None:
        """The attention part, the first of several."""
        return self._attention[0] if self._attention else None

    @property
    def attention_caches(self) -> tuple[KVCache, ...]:
        """All attention parts."""
        return self._attention

    @property
    def recurrent(self) -> tuple[RNNState | RecurrentCache, ...]:
        """The recurrent parts."""
        return self._recurrent

    def _has_begun(self, batch: int) -> None:
        for part in self._recurrent:
            part._has_begun(batch)

    def replay_start(self, seq_id: int, position: int) -> int:
        """The largest position up to `position` that fork_sequence and pop_n reach in all parts."""
        return int(self._handle.replay_start(seq_id, position))


def _object_of(part: Any) -> Any:
    if not isinstance(part, KVState):
        raise TypeError(
            f"CompositeState: a {type(part).__name__} is no part; give a KVCache as attention, and "
            "RNNState and RecurrentCache objects as recurrent"
        )
    return part.__tvm_ffi_object__()
