"""quire.KVCache: paged keys and values of many sequences, and attention over them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from quire import _ffi
from quire._arrays import (
    dtype_name,
    empty_beside,
    input_array,
    int_list,
    output_array,
    shape_of,
)
from quire._kv_state import KVState
from quire._numbers import int64, milliseconds
from quire.chunk_space import TTL_MAX, token_ids
from quire.transfer import TransferCalls

if TYPE_CHECKING:
    from quire.chunk_space import ChunkFetch, ChunkSpace

__all__ = ["KVCache", "LayerSpec", "RopeOptions", "default_page_size", "rope_frequencies"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one attention layer keeps. ``num_qo_heads`` is a multiple of ``num_kv_heads``.

    ``dtype`` is that of the stored keys and values: "float32", "float16" or "bfloat16" (a NumPy or
    torch dtype will do), or "int8" or "float8_e4m3fn": codes with a scale per token and head.
    ``v_dtype`` is that of values where it is another. ``v_head_dim`` defaults to ``qk_head_dim``,
    ``num_kv_heads`` to ``num_qo_heads``. ``window``: a query at position p sees (p - window, p]; 0
    for all. ``soft_cap``: scores become soft_cap * tanh(score / soft_cap); 0 for none.
    ``head_sinks``: one learned logit per query head that takes part in the softmax without a value;
    () for none. ``rope``: in place of the cache's, of its mode and pairing; None for the cache's.
    ``latent``: multi-head latent attention, absorbed: one vector [kv_lora_rank + rope part] per
    token, whose first ``v_head_dim`` (= kv_lora_rank) elements are the value; ``num_kv_heads`` is
    1, and the caller rotates, by ``rope`` of any mode and pairing (which sinks of windows are
    turned back by).
    """

    num_qo_heads: int
    num_kv_heads: int = 0
    qk_head_dim: int = 0
    v_head_dim: int = 0
    dtype: Any = "float32"
    window: int = 0
    soft_cap: float = 0.0
    head_sinks: Sequence[float] = ()
    rope: RopeOptions | Mapping[str, Any] | None = None
    v_dtype: Any = None
    latent: bool = False

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads or (1 if self.latent else self.num_qo_heads),
            "qk_head_dim": self.qk_head_dim,
            "v_head_dim": self.v_head_dim or self.qk_head_dim,
            "dtype": dtype_name(self.dtype),
            "window": self.window,
            "soft_cap": float(self.soft_cap),
            "head_sinks": tuple(float(logit) for logit in self.head_sinks),
        }
        if self.latent:
            fields["latent"] = True
        if self.rope is not None:
            fields["rope"] = dict(self.rope)
        v_dtype = dtype_name(self.v_dtype or self.dtype)
        return fields if v_dtype == fields["dtype"] else {**fields, "v_dtype": v_dtype}


class RopeOptions(TypedDict, total=False):
    """Rotary position embedding; what is absent has the default of ``include/quire/rope.h``.

    ``mode``: "none" rotates nothing; "normal" stores rotated keys; "inline" stores keys as given
    and rotates them when attention reads them.

    With ``scaling`` "longrope" and "dynamic" each sequence has the short or the long set of
    frequencies: ``use_long_factors`` says which one a new sequence begins with,
    :meth:`KVCache.select_long_rope` changes it. The short set of "dynamic" is theta as it is, the
    long one that of ``original_max_position_embeddings * factor`` tokens.
    """

    mode: Literal["none", "normal", "inline"]
    pairing: Literal["half_split", "interleaved"]
    scaling: Literal["none", "linear", "dynamic", "llama3", "llama4", "longrope", "yarn"]
    theta: float
    position_scale: float
    rotary_dim: int
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool
    attention_factor: float
    original_max_position_embeddings: int
    short_factors: list[float]
    long_factors: list[float]
    use_long_factors: bool


def _rope_fields(rope: RopeOptions | Mapping[str, Any] | str | None) -> dict[str, Any]:
    if rope is None:
        return {}
    if isinstance(rope, str):
        return {"mode": rope}
    return dict(rope)


def default_page_size(layer: LayerSpec) -> int:
    """The page size in tokens that a cache takes for such layers when none is given."""
    return int(_ffi.function("default_page_size")(layer._fields()))


def rope_frequencies(
    rope: RopeOptions | Mapping[str, Any], head_dim: int, *, long_factors: bool = False
) -> tuple[np.ndarray, float]:
    """Frequencies float64 [rotary_dim / 2] and the factor on cos and sin, as a cache with these
    options uses them."""
    result = _ffi.function("rope_frequencies")(_rope_fields(rope), head_dim, long_factors)
    return np.from_dlpack(result["inv_freq"]), float(result["amplitude"])


def _mask_array(mask: Any) -> Any:
    """Booleans as bytes, which they are."""
    if mask is None:
        return None
    if not hasattr(mask, "dtype"):
        raise TypeError(f"mask must be an array, not {type(mask).__name__}")
    if isinstance(mask, np.ndarray):
        mask = mask.view(np.uint8) if mask.dtype == np.bool_ else mask
    elif dtype_name(mask.dtype) == "bool":  # torch
        mask = mask.byte()
    return input_array(mask)


class KVCache(TransferCalls, KVState):
    """Paged keys and values of many sequences, and attention over them.

    One forward::

        cache.begin_forward(ids, lengths)
        for layer in range(layers):
            cache.attention_with_fused_qkv(layer, qkv, o)
        cache.end_forward()

    or, with an abort when something raises::

        with cache.forward(ids, lengths): ...

    Tensors are NumPy arrays, torch CPU tensors or anything else with DLPack; they are borrowed for
    the call and never copied. They are float32 or of the layer's dtype (bfloat16 where that is
    quantised), and contiguous in their last dimension. The output row of a token depends, bit for
    bit, on the tokens that it may see and not on batch, page size, forks, pops or threads.

    Every call works, or raises a subclass of :class:`quire.QuireError` and has changed nothing.

    Args:
        layers: what each layer keeps; or give ``num_layers`` equal ones by the arguments of
            :class:`LayerSpec`.
        max_num_sequences: most sequences at a time.
        token_capacity: tokens that fit in the pages of one layer group.
        prefill_chunk_size: at most this number of new tokens per forward; ``token_capacity`` if 0.
        page_size: tokens; 0 = chosen per layer group (:func:`default_page_size`).
        max_tree_size: most nodes of one sequence's uncommitted token tree.
        max_pop: tokens that :meth:`pop_n` can take back under windows: what slides out of sight is
            freed that many tokens later.
        rope: rotary position embedding, or just its mode; none by default.
        threads: of the attention; 0 = one per core.
        kernel_path: one of :func:`quire.kernel_paths`; the best one if empty.
        poison_freed_pages: fill freed pages with NaN, for tests.
        tvm_window_span: windows of sequences as in TVM (``docs/tvm.md``): what is kept when a
            forward ends; its rows see that and all new tokens up to their own.
        allow_skipped_layers: ``end_forward`` stores zeros for the new tokens in every layer that
            has stored none, so a forward may run some layers only; attention in later forwards
            sees these zeros. Else ``end_forward`` is ``BadStateError`` until all layers have run.
            The recurrent states of a composite state must all be set, whatever this says.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec | Mapping[str, Any]] | None = None,
        *,
        num_layers: int = 0,
        num_qo_heads: int = 0,
        num_kv_heads: int = 0,
        qk_head_dim: int = 0,
        v_head_dim: int = 0,
        dtype: Any = "float32",
        max_num_sequences: int,
        token_capacity: int,
        prefill_chunk_size: int = 0,
        page_size: int = 0,
        max_tree_size: int = 256,
        max_pop: int = 16,
        rope: RopeOptions | Mapping[str, Any] | str | None = None,
        threads: int = 0,
        kernel_path: str = "",
        poison_freed_pages: bool = False,
        tvm_window_span: bool = False,
        allow_skipped_layers: bool = False,
    ) -> None:
        equal = LayerSpec(num_qo_heads, num_kv_heads, qk_head_dim, v_head_dim, dtype)
        if layers is None:
            specs = [equal] * num_layers
        elif num_layers or equal != LayerSpec(0):
            raise TypeError(
                "KVCache: give either layers or num_layers and its companions, not both"
            )
        else:
            specs = [
                layer if isinstance(layer, LayerSpec) else LayerSpec(**layer) for layer in layers
            ]
        self._layers = tuple(LayerSpec(**spec._fields()) for spec in specs)
        super().__init__(
            _ffi.new(
                _ffi.KVCacheHandle,
                {
                    "layers": [spec._fields() for spec in self._layers],
                    "max_num_sequences": max_num_sequences,
                    "token_capacity": token_capacity,
                    "prefill_chunk_size": prefill_chunk_size or token_capacity,
                    "page_size": page_size,
                    "max_tree_size": max_tree_size,
                    "max_pop": max_pop,
                    "rope": _rope_fields(rope),
                    "threads": threads,
                    "kernel_path": kernel_path,
                    "poison_freed_pages": poison_freed_pages,
                    "tvm_window_span": tvm_window_span,
                    "allow_skipped_layers": allow_skipped_layers,
                }
            )
        )

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps, with all defaults filled in."""
        return self._layers

    # ---- Windows of sequences

    def enable_sliding_window_for_seq(self, seq_id: int, window: int, sinks: int = 0) -> None:
        """From the next forward on, each query of the sequence sees the first `sinks` tokens and
        the last `window` - `sinks`; positions stay absolute.

        What has slid out of sight is freed. fork_sequence and pop_n then raise BadStateError where
        a query at the new end would see what is no longer held.
        """
        self._handle.enable_sliding_window_for_seq(seq_id, window, sinks)

    def disable_sliding_window_for_seq(self, seq_id: int) -> None:
        """What had slid out of sight stays so, the rest stays in sight."""
        self._handle.disable_sliding_window_for_seq(seq_id)

    def held_tokens(self, seq_id: int) -> int:
        """Tokens of the sequence that are held in every layer; its length if nothing has slid."""
        return int(self._handle.held_tokens(seq_id))

    def slid_range(self, seq_id: int) -> tuple[int, int]:
        """What the sequence's window hides from a next query: positions from the first to before
        the second. Empty at 0 if nothing has slid."""
        begin, end = self._handle.slid_range(seq_id)
        return int(begin), int(end)

    # ---- Counters. Lengths include the tokens of an open forward.

    def empty(self) -> bool:
        """Whether there are no sequences."""
        return bool(self._handle.empty())

    def get_num_available_pages(self) -> int:
        """Free pages: the minimum over layer groups."""
        return int(self._handle.get_num_available_pages())

    def get_total_sequence_length(self) -> int:
        """Tokens of all sequences; a shared prefix counts once per sequence."""
        return int(self._handle.get_total_sequence_length())

    def get_distinct_token_count(self) -> int:
        """Tokens of all sequences; a shared prefix counts once."""
        return int(self._handle.get_distinct_token_count())

    def pages_in_use(self) -> int:
        """Pages that hold tokens, over all layer groups."""
        return int(self._handle.pages_in_use())

    def pages_allocated(self) -> int:
        """Pages in use and free, over all layer groups."""
        return int(self._handle.pages_allocated())

    def pages_needed(
        self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
    ) -> int:
        """Free pages that begin_forward with these arguments would take: the maximum over layer
        groups."""
        ids = int_list(seq_ids, "seq_ids")
        lengths = int_list(append_lengths, "append_lengths")
        if token_tree_parents is None:
            return int(self._handle.pages_needed(ids, lengths))
        parents = int_list(token_tree_parents, "token_tree_parents")
        return int(self._handle.pages_needed_for_tree(ids, lengths, parents))

    def select_long_rope(self, seq_id: int, use_long_factors: bool) -> None:
        """With "longrope" and "dynamic" scaling: whether an empty sequence uses the long set, for
        texts beyond the original length. Forks inherit it."""
        self._handle.select_long_rope(seq_id, use_long_factors)

    # ---- Attention. m >= n, the new tokens of the forward in the order of the batch; rows after n
    # are left alone. A `mask` hides new tokens from one another: bool or uint8 [sum of n_i^2], for
    # each sequence of the batch a row per new token, with an element for each new token of the
    # sequence; 0 hides it. What was there before the forward stays in sight.

    def attention_with_fused_qkv(
        self,
        layer: int,
        qkv: Any,
        o: Any = None,
        sm_scale: float | None = None,
        mask: Any = None,
    ) -> Any:
        """Splits qkv, rotates, stores keys and values, and attends.

        Each row sees all tokens up to and including its own.

        Args:
            layer: index of the layer.
            qkv: [m, Hq + 2 Hkv, D] if D == Dv, or [m, Hq D + Hkv D + Hkv Dv].
            o: [m, Hq, Dv] or [m, Hq Dv], written; a new array beside `qkv` if None.
            sm_scale: the whole factor on q.k; 1 / sqrt(D) if None.
            mask: bool or uint8 [sum of n_i^2], or None: which new tokens see which.

        Returns:
            `o`.
        """
        o = self._output(layer, qkv, o)
        self._handle.attention_with_fused_qkv(
            layer, input_array(qkv), o, self._scale(layer, sm_scale), _mask_array(mask)
        )
        return o

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Rotates and stores the new keys [m, Hkv, D] and values [m, Hkv, Dv]: the first half of
        the fused call."""
        self._handle.append(layer, input_array(k), input_array(v))

    def attend(
        self,
        layer: int,
        q: Any,
        o: Any = None,
        lse: Any = None,
        sm_scale: float | None = None,
        mask: Any = None,
    ) -> Any:
        """Rotates q and attends: the second half of the fused call.

        BadStateError before the layer's append.

        Args:
            layer: index of the layer.
            q: [m, Hq, D].
            o: [m, Hq, Dv], written; a new array beside `q` if None.
            lse: float32 [m, Hq], written if given: log2 of the sum of 2^(score log2 e).
            sm_scale: the whole factor on q.k; 1 / sqrt(D) if None.
            mask: as for the fused call.

        Returns:
            `o`.
        """
        o = self._output(layer, q, o)
        lse = None if lse is None else output_array(lse, "lse")
        self._handle.attend(
            layer, input_array(q), o, lse, self._scale(layer, sm_scale), _mask_array(mask)
        )
        return o

    def append_mla_kv(self, layer: int, kv: Any) -> None:
        """Stores kv [m, D] of a latent layer as given; attend and cross_attention then take
        absorbed queries and give outputs in latent space."""
        self._handle.append_mla_kv(layer, input_array(kv))

    def attention_with_mla(
        self,
        layer: int,
        q_absorbed: Any,
        kv: Any,
        o: Any = None,
        sm_scale: float | None = None,
        mask: Any = None,
    ) -> Any:
        """append_mla_kv and attend of a latent layer: new and cached tokens alike are attended to
        as stored.

        Args:
            layer: index of the layer.
            q_absorbed: [m, Hq, D], the rope part last and rotated, as that of `kv`.
            kv: [m, D].
            o: [m, Hq, Dv], written; a new array beside `q_absorbed` if None.
            sm_scale: the whole factor on q.k; 1 / sqrt(D) if None.
            mask: as for the fused call.

        Returns:
            `o`.
        """
        o = self._output(layer, q_absorbed, o)
        self._handle.attention_with_mla(
            layer,
            input_array(q_absorbed),
            input_array(kv),
            o,
            self._scale(layer, sm_scale),
            _mask_array(mask),
        )
        return o

    def attention_with_shared_kv(
        self,
        source_layer: int,
        q: Any,
        o: Any = None,
        lse: Any = None,
        sm_scale: float | None = None,
        mask: Any = None,
    ) -> Any:
        """Attends once more to the keys and values of `source_layer`, which has been appended to in
        this forward, for a layer that shares them. As attend, but with rope mode "normal" q comes
        rotated.

        BadStateError before the source's append.
        """
        o = self._output(source_layer, q, o)
        lse = None if lse is None else output_array(lse, "lse")
        self._handle.attention_with_shared_kv(
            source_layer,
            input_array(q),
            o,
            lse,
            self._scale(source_layer, sm_scale),
            _mask_array(mask),
        )
        return o

    def self_attention(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        sm_scale: float | None = None,
        mask: Any = None,
    ) -> tuple[Any, Any]:
        """Causal attention of the new tokens among themselves, on k and v as given.

        In a tree, of a new node to the new nodes on its path. Stores nothing. Heads and dimensions
        may be other than the layer's. With rope "normal" q and k are given rotated, with "inline"
        unrotated. Windows and the soft cap hold; head sinks take part in cross_attention alone.

        Args:
            layer: index of the layer.
            q: [m, Hq', D'].
            k: [m, H', D'].
            v: [m, H', Dv'].
            o: [m, Hq', Dv'], written.
            lse: float32 [m, Hq'], written: log2 of the sum of 2^(score log2 e).
            sm_scale: the whole factor on q.k; 1 / sqrt(D') if None.
            mask: as for the fused call.

        Returns:
            `o` and `lse`.
        """
        # Without a dimension, or one of 0, the cache says what is wrong.
        dim = max([1, *shape_of(q)[-1:]])
        scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
        o, lse = output_array(o, "o"), output_array(lse, "lse")
        self._handle.self_attention(
            layer, input_array(q), input_array(k), input_array(v), o, lse, scale, _mask_array(mask)
        )
        return o, lse

    def cross_attention(
        self, layer: int, q: Any, o: Any, lse: Any, sm_scale: float | None = None
    ) -> tuple[Any, Any]:
        """The new tokens' q [m, Hq, D] against what their sequences held before this forward, in a
        tree the ancestors from earlier forwards among it.

        Where a row sees nothing of that, o [m, Hq, Dv] is 0 and lse, float32 [m, Hq], -inf, or the
        head's learned sink times log2(e) if it has one. With rope "normal" q is given rotated, with
        "inline" unrotated. Returns `o` and `lse`.
        """
        o, lse = output_array(o, "o"), output_array(lse, "lse")
        self._handle.cross_attention(layer, input_array(q), o, lse, self._scale(layer, sm_scale))
        return o, lse

    def merge_attn_output_inplace(self, o1: Any, lse1: Any, o2: Any, lse2: Any) -> tuple[Any, Any]:
        """Makes of attention over two disjoint sets of keys that over both, in o1 and lse1.

        o: [n, H, D], lse: float32 [n, H]; lse -inf: an empty set, whose o is not read. Returns `o1`
        and `lse1`.
        """
        o1, lse1 = output_array(o1, "o1"), output_array(lse1, "lse1")
        self._handle.merge_attn_output_inplace(o1, lse1, input_array(o2), input_array(lse2))
        return o1, lse1
    def get_query_positions(self) -> np.ndarray:
        """Position of each new token of the forward, int32 [n]; a copy.

        BadStateError outside a forward.
        """
        return np.from_dlpack(self._handle.get_query_positions())

    # ---- Chunks of a store

    def chunk_passport(
        self, identity: Mapping[str, str], *, chunk_tokens: int = 64
    ) -> dict[str, Any]:
        """The passport of this cache's chunks, for :meth:`quire.ChunkStore.space`.

        identity: what computes the keys and values, "model" and where they matter "revision",
        "tokenizer" and "adapter"; layers, types, RoPE and kernels are the cache's. chunk_tokens: of
        a chunk.

        Raises:
            BadArgumentError: a field that is unknown or out of range.
        """
        fields = {**identity, "block_tokens": int64(chunk_tokens, "chunk_tokens")}
        passport: dict[str, Any] = json.loads(str(self._handle.chunk_passport(fields)))
        return passport

    def put_chunks(
        self, seq_id: int, tokens: Sequence[int], space: ChunkSpace, *, ttl: float = 0
    ) -> int:
        """Puts the whole chunks of `tokens` that the store lacks, bit for bit. Does not wait for a
        disk or Redis.

        tokens: ids, those that the sequence begins with. ttl: seconds until the chunks expire; 0 =
        never. A chunk has of each layer what goes on after its last token, so a layer with a window
        must still hold that: within ``max_pop`` tokens of the sequence's end.

        Returns how many leading chunks the store has or takes; fewer than all where a queue is
        full.

        Raises:
            IncompatibleError: the passport of `space` is not that of :meth:`chunk_passport`.
            UnknownSequenceError.
            BadArgumentError: the sequence is shorter, or has slid too far; chunks before that were
                put.
        """
        ids = token_ids(tokens)
        ttl_ms = milliseconds(ttl, "ttl", most=TTL_MAX)
        return int(self._handle.put_chunks(seq_id, ids, space._handle, ttl_ms))

    def take_chunks(self, seq_id: int, fetch: ChunkFetch, count: int | None = None) -> None:
        """Appends chunks of a fetch to a sequence, which is added if it is absent: the bits that
        were put. What is needed of them is verified once more.

        The fetch is of a space with :meth:`chunk_passport`, and begins where the sequence ends.
        count: leading chunks of the fetch; None = all that are ready.

        Raises:
            IncompatibleError: chunks of another passport.
            BadArgumentError: `count` is not ready, or the sequence ends elsewhere.
            CorruptError, OutOfPagesError, BadStateError; nothing has changed then.
        """
        count = fetch.ready if count is None else int64(count, "count")
        self._handle.take_chunks(seq_id, fetch._handle, count)

    # ---- Debugging

    def debug_get_kv(
        self, seq_id: int, start: int = 0, end: int | None = None, *, k: Any = None, v: Any = None
    ) -> tuple[Any, Any]:
        """Stored keys [layers, end - start, Hkv, D] and values [..., Dv].

        New float32 arrays unless given. Keys come out as stored: rotated in mode "normal". Latent
        layers are left out; the others must have equal heads and dims.
        """
        end = self.get_sequence_length(seq_id) if end is None else end
        layers = [spec for spec in self._layers if not spec.latent]
        layer = (layers or self._layers)[0]
        shape = (len(layers), max(end - start, 0), layer.num_kv_heads)
        k = np.empty((*shape, layer.qk_head_dim), np.float32) if k is None else output_array(k, "k")
        v = np.empty((*shape, layer.v_head_dim), np.float32) if v is None else output_array(v, "v")
        self._handle.debug_get_kv(seq_id, start, end, k, v)
        return k, v

    def debug_set_kv(self, seq_id: int, start: int, k: Any, v: Any) -> None:
        """Overwrites stored keys and values from `start` on; shapes as debug_get_kv.

        Shared pages are copied first.
        """
        self._handle.debug_set_kv(seq_id, start, input_array(k), input_array(v))

    def debug_get_kv_mla(
        self, seq_id: int, start: int = 0, end: int | None = None, *, kv: Any = None
    ) -> Any:
        """What latent layers store, [latent layers, end - start, D]; a new float32 array unless
        given. They must be of equal dims."""
        end = self.get_sequence_length(seq_id) if end is None else end
        layers = [spec for spec in self._layers if spec.latent]
        shape = (len(layers), max(end - start, 0), (layers or self._layers)[0].qk_head_dim)
        kv = np.empty(shape, np.float32) if kv is None else output_array(kv, "kv")
        self._handle.debug_get_kv_mla(seq_id, start, end, kv)
        return kv

    def debug_set_kv_mla(self, seq_id: int, start: int, kv: Any) -> None:
        """Overwrites what latent layers store from `start` on; shape as debug_get_kv_mla."""
        self._handle.debug_set_kv_mla(seq_id, start, input_array(kv))

    def debug_plan(self) -> str:
        """The plan of the open forward, for people. BadStateError outside a forward."""
        return str(self._handle.debug_plan())

    # A layer that is out of range gets stand-ins here, and its BadArgumentError from the cache.

    def _output(self, layer: int, beside: Any, o: Any) -> Any:
        if o is not None:
            return output_array(o, "o")
        spec = self._layers[layer] if 0 <= layer < len(self._layers) else LayerSpec(0)
        return empty_beside(
            beside, (*shape_of(beside)[:1], spec.num_qo_heads, spec.v_head_dim)
        )

    def _scale(self, layer: int, sm_scale: float | None) -> float:
        if sm_scale is not None:
            return sm_scale
        return (
            1.0 / math.sqrt(self._layers[layer].qk_head_dim)
            if 0 <= layer < len(self._layers)
            else 1.0
        )
