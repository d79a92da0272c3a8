"""quire.RecurrentCache: recurrent layers that Quire computes itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from quire import _ffi
from quire._arrays import empty_beside, input_array, output_array, shape_of
from quire._recurrent_state import RecurrentState

__all__ = ["RecurrentCache", "RecurrentLayerSpec"]


@dataclasses.dataclass(frozen=True)
class RecurrentLayerSpec:
    """What one recurrent layer keeps.

    "convolution" has a state [width - 1, num_channels]; the others [num_heads, key_dim, value_dim]
    ("state_space": heads, state size, head size). ``num_heads`` is a multiple of ``num_key_heads``
    ("state_space": groups), which defaults to it.
    """

    kind: Literal["linear_attention", "gated_delta", "state_space", "convolution"]
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    num_channels: int = 0
    width: int = 0

    def _fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"num_key_heads": self.num_key_heads or self.num_heads}


class RecurrentCache(RecurrentState):
    """Recurrent layers that Quire computes itself: linear attention with decay, the gated delta
    rule, Mamba-2's state space, and the short causal convolutions before them.

    Inside a forward each layer is run by the one call of its kind. Tensors are float32, float16 or
    bfloat16, of n rows or more (n = new tokens, in the order of the batch), contiguous but for the
    first axis. The output row of a token depends, bit for bit, on its own inputs and the tokens
    before it in its sequence, and on nothing else.

    Reached by fork_sequence and pop_n: every position from the oldest recent checkpoint on (fewer
    than 64 tokens are computed for it), the thinned checkpoints, position 0. See
    :class:`quire._recurrent_state.RecurrentState` for the rest.

    Args:
        layers: what each layer keeps.
        max_num_sequences: most sequences at a time that are not retained.
        prefill_chunk_size: at most this number of new tokens per forward.
        recent_checkpoints: newest checkpoints of a sequence, one every 64 tokens; all inputs since
            the oldest of them are kept.
        thinned_checkpoints: older ones, without inputs.
        max_retained_slots: most slots that retained sequences may hold.
        max_tree_size: most nodes of one sequence's uncommitted token tree.
        max_tree_slots: most nodes of all sequences together; each has a state.
        max_slots: slots in all; 0 = so many that every forward finds room.
        threads: of the kernels; 0 = one per core.
        kernel_path: one of :func:`quire.kernel_paths`; the best one if empty.
        poison_freed_slots: fill free slots with NaN, for tests.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentLayerSpec | Mapping[str, Any]],
        *,
        max_num_sequences: int,
        prefill_chunk_size: int,
        recent_checkpoints: int = 4,
        thinned_checkpoints: int = 4,
        max_retained_slots: int = 0,
        max_tree_size: int = 256,
        max_tree_slots: int = 0,
        max_slots: int = 0,
        threads: int = 0,
        kernel_path: str = "",
        poison_freed_slots: bool = False,
    ) -> None:
        self._layers = [
            layer if isinstance(layer, RecurrentLayerSpec) else RecurrentLayerSpec(**layer)
            for layer in layers
        ]
        super().__init__(
            _ffi.new(
                _ffi.RecurrentCacheHandle,
                {
                    "layers": [layer._fields() for layer in self._layers],
                    "max_num_sequences": max_num_sequences,
                    "prefill_chunk_size": prefill_chunk_size,
                    "recent_checkpoints": recent_checkpoints,
                    "thinned_checkpoints": thinned_checkpoints,
                    "max_retained_slots": max_retained_slots,
                    "max_tree_size": max_tree_size,
                    "max_tree_slots": max_tree_slots,
                    "max_slots": max_slots,
                    "threads": threads,
                    "kernel_path": kernel_path,
                    "poison_freed_slots": poison_freed_slots,
                }
            )
        )

    def linear_attention(
        self, layer: int, q: Any, k: Any, v: Any, decay: Any, o: Any = None, sm_scale: float = 1.0
    ) -> Any:
        """S = decay S + k v^T; o = sm_scale S^T q.

        Args:
            layer: index of the layer.
            q: [m, num_key_heads, key_dim].
            k: as `q`.
            v: [m, num_heads, value_dim].
            decay: the factor itself, [m, num_heads], or [num_heads] for all tokens.
            o: as `v`, written; a new array beside `v` if None.
            sm_scale: the factor on the output.

        Returns:
            `o`.
        """
        o = self._output(v, o)
        arrays = [input_array(array) for array in (q, k, v, decay)]
        self._handle.linear_attention(layer, *arrays, o, sm_scale)
        return o

    def gated_delta(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        decay: Any,
        beta: Any,
        o: Any = None,
        sm_scale: float = 1.0,
    ) -> Any:
        """S = decay S; S += k (beta (v - S^T k))^T; o = sm_scale S^T q.

        As linear_attention; beta: [m, num_heads].
        """
        o = self._output(v, o)
        arrays = [input_array(array) for array in (q, k, v, decay, beta)]
        self._handle.gated_delta(layer, *arrays, o, sm_scale)
        return o

    def state_space(
        self, layer: int, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any = None, o: Any = None
    ) -> Any:
        """S = e^(dt a) S + b (dt x)^T; o = S^T c + d x.

        Args:
            layer: index of the layer.
            x: [m, num_heads, value_dim].
            dt: [m, num_heads], as it is used: after bias and softplus.
            a: [num_heads], negative.
            b: [m, num_key_heads, key_dim].
            c: as `b`.
            d: [num_heads], or None.
            o: as `x`, written; a new array beside `x` if None.

        Returns:
            `o`.
        """
        o = self._output(x, o)
        arrays = [input_array(array) for array in (x, dt, a, b, c)]
        d = None if d is None else input_array(d)
        self._handle.state_space(layer, *arrays, d, o)
        return o

    def convolution(
        self, layer: int, x: Any, weight: Any, bias: Any = None, silu: bool = False, o: Any = None
    ) -> Any:
        """Each channel over the last `width` tokens; with `silu`, silu of that.

        Args:
            layer: index of the layer.
            x: [m, num_channels].
            weight: [num_channels, width]; the last column is the token's own.
            bias: [num_channels], or None.
            silu: whether silu follows.
            o: as `x`, written; a new array beside `x` if None.

        Returns:
            `o`.
        """
        o = self._output(x, o)
        bias = None if bias is None else input_array(bias)
        self._handle.convolution(layer, input_array(x), input_array(weight), bias, silu, o)
        return o

    def debug_get(self, layer: int, seq_id: int) -> np.ndarray:
        """A copy of the current state, float32; in a forward that of before the forward."""
        spec = self._layers[layer] if 0 <= layer < len(self._layers) else self._layers[0]
        shape: tuple[int, ...] = (spec.num_heads, spec.key_dim, spec.value_dim)
        if spec.kind == "convolution":
            shape = (spec.width - 1, spec.num_channels)
        o = np.empty(shape, np.float32)
        self._handle.debug_get(layer, seq_id, o)
        return o

    @staticmethod
    def _output(beside: Any, o: Any) -> Any:
        return empty_beside(beside, shape_of(beside)) if o is None else output_array(o, "o")
