"""quire.KVCache: attention against plain NumPy, tensors of NumPy and torch without copies,
errors."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import quire
import torch
import tvm_ffi
from quire import KVCache, LayerSpec
from tiny_model import attention, rotate

# Of results of float32 arithmetic with values of order 1, against float64.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def make_cache(**changes: Any) -> KVCache:
    options: dict[str, Any] = dict(
        num_layers=2,
        num_qo_heads=4,
        num_kv_heads=2,
        qk_head_dim=16,
        dtype="float32",
        page_size=16,
        threads=1,
    )
    options |= dict(max_num_sequences=8, token_capacity=512, prefill_chunk_size=128)
    return KVCache(**(options | changes))


class Oracle:
    """Keys and values of every sequence as given, and attention over them in float64."""

    def __init__(self, cache: KVCache, rope: str, seed: int = 0) -> None:
        self.cache = cache
        self.rope = rope
        self.rng = np.random.default_rng(seed)
        self.kv: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def add(self, seq: int) -> None:
        self.cache.add_sequence(seq)
        empty = [
            (
                np.zeros((0, spec.num_kv_heads, spec.qk_head_dim)),
                np.zeros((0, spec.num_kv_heads, spec.v_head_dim)),
            )
            for spec in self.cache.layers
        ]
        self.kv[seq] = empty

    def fork(self, parent: int, child: int, position: int) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.kv[child] = [(k[:position], v[:position]) for k, v in self.kv[parent]]

    def pop(self, seq: int, n: int) -> None:
        self.cache.pop_n(seq, n)
        self.kv[seq] = [(k[: len(k) - n], v[: len(v) - n]) for k, v in self.kv[seq]]

    def forward(self, ids: list[int], lengths: list[int], fused: bool) -> float:
        """Runs one forward of random tokens; the largest error of its outputs."""
        total, worst = sum(lengths), 0.0
        with self.cache.forward(ids, lengths):
            for layer, spec in enumerate(self.cache.layers):
                q = self._random(total, spec.num_qo_heads, spec.qk_head_dim)
                k = self._random(total, spec.num_kv_heads, spec.qk_head_dim)
                v = self._random(total, spec.num_kv_heads, spec.v_head_dim)
                o = self._attend(layer, q, k, v, fused)
                worst = max(
                    worst, float(np.abs(o - self._expected(layer, ids, lengths, q, k, v)).max())
                )
        return worst

    def _random(self, *shape: int) -> np.ndarray:
        # Values that every dtype of a cache holds exactly, so that only arithmetic differs.
        return np.round(self.rng.standard_normal(shape) * 16).astype(np.float32) / 16

    def _attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, fused: bool
    ) -> np.ndarray:
        if fused:
            qkv = np.concatenate([x.reshape(len(q), -1) for x in (q, k, v)], axis=1)
            o = np.full((len(q), q.shape[1], v.shape[2]), np.nan, np.float32)
            assert self.cache.attention_with_fused_qkv(layer, qkv, o) is o
            return o
        self.cache.append(layer, k, v)
        return self.cache.attend(layer, q)

    def _expected(
        self,
        layer: int,
        ids: list[int],
        lengths: list[int],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
    ) -> np.ndarray:
        parts, begin = [], 0
        for seq, length in zip(ids, lengths):
            old_k, old_v = self.kv[seq][layer]
            all_k = np.concatenate([old_k, k[begin : begin + length]])
            all_v = np.concatenate([old_v, v[begin : begin + length]])
            self.kv[seq][layer] = (all_k, all_v)
            new_q, positions = q[begin : begin + length], np.arange(len(all_k))
            if self.rope != "none":
                new_q = rotate(new_q, positions[len(old_k) :], 10000.0)
                all_k = rotate(all_k, positions, 10000.0)
            parts.append(attention(new_q, all_k, all_v))
            begin += length
        return np.concatenate(parts)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "halves"])
@pytest.mark.parametrize("rope", ["none", "normal", "inline"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_is_that_of_numpy(dtype: str, page_size: int, rope: str, fused: bool) -> None:
    layers = [LayerSpec(4, 2, 16, 16, dtype), LayerSpec(6, 1, 24, 8, dtype)]
    cache = make_cache(
        layers=layers,
        num_layers=0,
        num_qo_heads=0,
        num_kv_heads=0,
        qk_head_dim=0,
        dtype="float32",
        page_size=page_size,
        rope=rope,
    )
    oracle = Oracle(cache, rope)
    oracle.add(3)
    oracle.add(7)
    errors = [oracle.forward([7, 3], [21, 18], fused), oracle.forward([3], [1], fused)]
    oracle.fork(3, 4, 11)
    oracle.pop(7, 6)
    errors += [oracle.forward([4, 3, 7], [9, 1, 2], fused), oracle.forward([7, 4], [1, 1], fused)]
    cache.check_invariants()
    assert max(errors) < TOLERANCE[dtype]


def test_a_wrong_answer_would_be_noticed() -> None:
    oracle = Oracle(make_cache(), "normal")  # the cache does not rotate, the oracle does
    oracle.add(0)
    assert oracle.forward([0], [9], True) > 0.1


def test_sm_scale_and_lse() -> None:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    lse = np.empty((5, 4), np.float32)
    with cache.forward([0], [5]):
        cache.append(0, k, v)
        o = cache.attend(0, q, lse=lse, sm_scale=0.5)
    assert np.abs(o - attention(q, k, v, 0.5)).max() < 1e-5
    scores = np.einsum("nhd,thd->nht", q.astype(np.float64), np.repeat(k, 2, axis=1)) * 0.5
    scores = np.where(np.arange(5)[None, None, :] <= np.arange(5)[:, None, None], scores, -np.inf)
    assert np.abs(lse - np.log2(np.exp(scores).sum(-1))).max() < 1e-5


def test_kv_comes_out_as_it_went_in_and_can_be_set() -> None:
    cache = make_cache()
    cache.add_sequence(0)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 20, 2, 16)).astype(np.float32) for _ in range(2))
    with cache.forward([0], [20]):
        for layer in range(2):
            cache.append(layer, k[layer], v[layer])
            cache.attend(layer, np.zeros((20, 4, 16), np.float32))
    got_k, got_v = cache.debug_get_kv(0)
    assert np.array_equal(got_k, k) and np.array_equal(got_v, v)
    cache.fork_sequence(0, 1, 18)
    cache.debug_set_kv(1, 3, -k[:, 3:10], -v[:, 3:10])
    assert np.array_equal(cache.debug_get_kv(0, 2, 12)[0], k[:, 2:12])
    expected = np.concatenate([k[:, 2:3], -k[:, 3:10], k[:, 10:12]], axis=1)
    assert np.array_equal(cache.debug_get_kv(1, 2, 12)[0], expected)


def test_counters() -> None:
    cache = make_cache(num_layers=1)
    pages = cache.pages_allocated()
    assert cache.empty() and pages == 512 // 16 + 1 and cache.get_num_available_pages() == pages
    cache.add_sequence(5)
    assert cache.pages_needed([5], [33]) == 3
    with cache.forward([5], [33]):
        assert cache.get_sequence_length(5) == 33
        cache.attention_with_fused_qkv(0, np.zeros((33, 8, 16), np.float32))
    cache.fork_sequence(5, 6, 32)
    assert cache.sequence_count() == 2 and cache.has_sequence(6) and not cache.has_sequence(7)
    assert cache.get_total_sequence_length() == 65 and cache.get_distinct_token_count() == 33
    assert cache.pages_in_use() == 3 and cache.get_num_available_pages() == pages - 3
    cache.remove_sequence(5)
    assert cache.pages_in_use() == 2 and cache.get_sequence_length(6) == 32
    cache.clear()
    assert cache.empty() and cache.pages_in_use() == 0


def test_query_positions_are_a_copy() -> None:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    cache.add_sequence(1)
    qkv = np.zeros((5, 8, 16), np.float32)
    with cache.forward([0, 1], [3, 2]):
        cache.attention_with_fused_qkv(0, qkv)
        first = cache.get_query_positions()
    with cache.forward([1, 0], [1, 1]):
        cache.attention_with_fused_qkv(0, qkv[:2])
        assert cache.get_query_positions().tolist() == [2, 3]
    assert first.dtype == np.int32 and first.tolist() == [0, 1, 2, 0, 1]


def test_an_exception_in_a_forward_aborts_it() -> None:
    cache = make_cache()
    cache.add_sequence(0)
    before = cache.state_digest()
    with pytest.raises(ZeroDivisionError), cache.forward([0], [7]):
        cache.attention_with_fused_qkv(0, np.zeros((7, 8, 16), np.float32))
        assert cache.get_sequence_length(0) == 7
        1 / 0
    assert cache.get_sequence_length(0) == 0 and cache.state_digest() == before


def test_a_plan_can_be_printed() -> None:
    cache = make_cache()
    cache.add_sequence(0)
    cache.begin_forward([0], [7])
    assert cache.debug_plan()
    cache.abort_forward()


def test_self_and_cross_attention_merge_to_the_whole() -> None:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    k, v = draw(40, 2, 16), draw(40, 2, 16)
    empty = np.full((40, 4, 16), np.nan, np.float32)
    lse = np.full((40, 4), np.nan, np.float32)
    with cache.forward([0], [40]):
        cache.append(0, k, v)
        cache.cross_attention(0, draw(40, 4, 16), empty, lse)
    assert (empty == 0).all() and np.isneginf(lse).all()
    q, new_k, new_v = draw(3, 4, 16), draw(3, 2, 16), draw(3, 2, 16)
    outputs = [(np.empty_like(q), np.empty((3, 4), np.float32)) for _ in range(3)]
    with cache.forward([0], [3]):
        cache.append(0, new_k, new_v)
        whole = cache.attend(0, q, outputs[0][0], lse=outputs[0][1])
        own = cache.self_attention(0, q, new_k, new_v, *outputs[1])
        cached = cache.cross_attention(0, q, *outputs[2])
    assert cache.merge_attn_output_inplace(*own, *cached)[0] is own[0]
    assert np.abs(own[0] - whole).max() < 1e-5
    assert np.abs(own[1] - outputs[0][1]).max() < 1e-5
    with pytest.raises(quire.BadArgumentError, match="lse1 is float32"):
        cache.merge_attn_output_inplace(own[0], empty[0, 0], *cached)


# ---- Tensors of others


def run_once(qkv: Any, o: Any = None) -> Any:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    with cache.forward([0], [6]):
        return cache.attention_with_fused_qkv(0, qkv, o)


@pytest.fixture(scope="module")
def qkv() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((6, 8, 16)).astype(np.float32)


def test_numpy_and_torch_give_the_same_bits(qkv: np.ndarray) -> None:
    from_numpy = run_once(qkv)
    from_torch = run_once(torch.from_numpy(qkv.copy()))
    assert isinstance(from_numpy, np.ndarray) and isinstance(from_torch, torch.Tensor)
    assert from_numpy.dtype == np.float32 and from_torch.dtype == torch.float32
    assert np.array_equal(from_numpy, from_torch.numpy())


def test_the_output_is_written_in_place(qkv: np.ndarray) -> None:
    whole = np.full((8, 4, 16), np.nan, np.float32)
    o = whole[1:7]
    assert run_once(qkv, o) is o
    assert np.array_equal(o, run_once(qkv)) and np.isnan(whole[[0, 7]]).all()
    whole_torch = torch.full((8, 4, 16), torch.nan)
    run_once(torch.from_numpy(qkv), whole_torch[1:7])
    assert np.array_equal(whole_torch[1:7].numpy(), o) and whole_torch[0].isnan().all()


def test_a_strided_view_is_read_where_it_lies(qkv: np.ndarray) -> None:
    wide = np.full((6, 2, 8, 16), np.nan, np.float32)
    wide[:, 1] = qkv
    assert np.array_equal(run_once(wide[:, 1]), run_once(qkv))


def test_rows_behind_the_batch_are_left_alone(qkv: np.ndarray) -> None:
    padded = np.concatenate([qkv, np.full((3, 8, 16), np.nan, np.float32)])
    o = np.full((9, 4, 16), 7, np.float32)
    run_once(padded, o)
    assert np.array_equal(o[:6], run_once(qkv)) and (o[6:] == 7).all()


def test_no_copy_is_made_of_what_comes_in_or_goes_out() -> None:
    cache = make_cache()
    cache.add_sequence(0)
    k = torch.zeros(2, 4, 2, 16)
    with cache.forward([0], [4]):
        for layer in range(2):
            cache.append(layer, torch.ones(4, 2, 16), torch.ones(4, 2, 16))
            cache.attend(layer, torch.ones(4, 4, 16))
    address = k.data_ptr()
    got, _ = cache.debug_get_kv(0, k=k)
    assert got is k and k.data_ptr() == address and bool((k == 1).all())
    shared = np.from_dlpack(k)  # the same memory under another name
    cache.debug_set_kv(
        0, 0, np.full((2, 4, 2, 16), 3, np.float32), np.zeros((2, 4, 2, 16), np.float32)
    )
    cache.debug_get_kv(0, k=k)
    assert (shared == 3).all()


def test_arrays_of_quire_go_to_torch_and_back_without_a_copy() -> None:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    with cache.forward([0], [4]):
        cache.attention_with_fused_qkv(0, np.zeros((4, 8, 16), np.float32))
        positions = cache.get_query_positions()
    as_torch = torch.from_dlpack(positions)
    assert as_torch.data_ptr() == positions.ctypes.data and positions.ctypes.data % 64 == 0
    as_torch[2] = 77
    assert positions.tolist() == [0, 1, 77, 3]
    del positions, cache
    gc.collect()
    assert as_torch.tolist() == [0, 1, 77, 3]


def test_anything_with_dlpack_gets_an_output(qkv: np.ndarray) -> None:
    """Its element type was looked for where NumPy has it, and such a tensor has none there."""
    out = run_once(tvm_ffi.from_dlpack(qkv.copy()))
    assert out.dtype == np.float32 and np.array_equal(out, run_once(qkv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_the_layers_dtype(dtype: torch.dtype) -> None:
    cache = make_cache(num_layers=1, dtype=dtype)
    cache.add_sequence(0)
    qkv = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with cache.forward([0], [6]):
        o = cache.attention_with_fused_qkv(0, qkv)
    assert o.dtype == dtype and cache.layers[0].dtype == str(dtype).removeprefix("torch.")
    q, k, v = (x.float().numpy() for x in qkv.split([4, 2, 2], dim=1))
    assert np.abs(o.float().numpy() - attention(q, k, v)).max() < TOLERANCE[cache.layers[0].dtype]


def test_a_read_only_array_can_be_read_but_not_written(qkv: np.ndarray) -> None:
    frozen = qkv.copy()
    frozen.flags.writeable = False
    assert np.array_equal(run_once(frozen), run_once(qkv))
    o = np.zeros((6, 4, 16), np.float32)
    o.flags.writeable = False
    with pytest.raises(quire.BadArgumentError, match="read-only"):
        run_once(qkv, o)


# ---- Errors


def test_errors_of_sequences() -> None:
    cache = make_cache()
    cache.add_sequence(1)
    before = cache.state_digest()
    with pytest.raises(quire.SequenceExistsError, match="1"):
        cache.add_sequence(1)
    with pytest.raises(quire.BadArgumentError, match="-3"):
        cache.add_sequence(-3)
    with pytest.raises(quire.UnknownSequenceError, match="9"):
        cache.remove_sequence(9)
    with pytest.raises(KeyError):
        cache.get_sequence_length(9)
    with pytest.raises(quire.UnknownSequenceError):
        cache.fork_sequence(9, 2)
    with pytest.raises(quire.SequenceExistsError):
        cache.fork_sequence(1, 1)
    with pytest.raises(quire.BadArgumentError):
        cache.fork_sequence(1, 2, 5)
    with pytest.raises(quire.BadArgumentError):
        cache.pop_n(1, 1)
    assert cache.state_digest() == before


def test_errors_of_forwards() -> None:
    cache = make_cache()
    cache.add_sequence(1)
    before = cache.state_digest()
    for ids, lengths, error in [
        ([1], [1, 2], quire.BadArgumentError),
        ([], [], quire.BadArgumentError),
        ([1, 1], [1, 1], quire.BadArgumentError),
        ([1], [0], quire.BadArgumentError),
        ([2], [1], quire.UnknownSequenceError),
        ([1], [129], quire.QuireError),  # over prefill_chunk_size
    ]:
        with pytest.raises(error):
            cache.begin_forward(ids, lengths)
        assert cache.state_digest() == before
    with pytest.raises(quire.BadStateError):
        cache.end_forward()
    with pytest.raises(quire.BadStateError):
        cache.attention_with_fused_qkv(0, np.zeros((1, 8, 16), np.float32))
    cache.begin_forward([1], [2])
    with pytest.raises(quire.BadStateError):
        cache.begin_forward([1], [2])
    with pytest.raises(quire.BadStateError):
        cache.end_forward()
    with pytest.raises(quire.BadStateError):
        cache.remove_sequence(1)
    cache.abort_forward()
    assert cache.state_digest() == before


def test_no_page_left_changes_nothing_and_can_be_helped() -> None:
    cache = make_cache(token_capacity=32, prefill_chunk_size=64, num_layers=1)
    qkv = np.zeros((48, 8, 16), np.float32)
    cache.add_sequence(0)
    cache.add_sequence(1)
    with cache.forward([0], [33]):
        cache.attention_with_fused_qkv(0, qkv[:33])
    before = cache.state_digest()
    with pytest.raises(quire.OutOfPagesError):
        cache.begin_forward([1], [1])
    assert cache.state_digest() == before
    cache.pop_n(0, 1)
    with cache.forward([1], [1]):
        cache.attention_with_fused_qkv(0, qkv[:1])


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((1, 8, 15), np.float32),
        np.zeros((1, 9, 16), np.float32),
        np.zeros((8, 16), np.float32),
        np.zeros((1, 8, 16), np.int32),
        np.zeros((1, 8, 16), np.float64),
        np.zeros((1, 8, 32), np.float32)[:, :, ::2],
        np.zeros((1, 1, 1, 1, 1, 8, 16), np.float32),
    ],
    ids=lambda array: f"{array.dtype}-{'x'.join(map(str, array.shape))}",
)
def test_tensors_that_do_not_fit_are_refused(bad: np.ndarray) -> None:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    cache.begin_forward([0], [1])
    with pytest.raises(quire.BadArgumentError):
        cache.attention_with_fused_qkv(0, bad, np.zeros((1, 4, 16), np.float32))
    cache.abort_forward()


def test_what_is_no_tensor_is_a_type_error() -> None:
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    cache.begin_forward([0], [1])
    with pytest.raises(TypeError):
        cache.attention_with_fused_qkv(0, [[1.0]], np.zeros((1, 4, 16), np.float32))
    with pytest.raises(TypeError):
        cache.add_sequence("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        cache.begin_forward([0.5], [1])  # type: ignore[list-item]


@pytest.mark.parametrize("layer", [-1, 2, 1 << 40])
def test_a_layer_that_is_not_there(layer: int) -> None:
    cache = make_cache()
    cache.add_sequence(0)
    cache.begin_forward([0], [1])
    with pytest.raises(quire.BadArgumentError):
        cache.attention_with_fused_qkv(layer, np.zeros((1, 8, 16), np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 3},
        {"qk_head_dim": -1},
        {"num_layers": 0},
        {"max_num_sequences": 0},
        {"token_capacity": -5},
        {"page_size": -1},
        {"threads": -1},
        {"dtype": "int32"},
        {"dtype": "float31"},
        {"kernel_path": "abacus"},
        {"rope": {"mode": "sideways"}},
        {"rope": {"mode": "normal", "thetta": 1.0}},
        {"rope": {"mode": "normal", "theta": "big"}},
        {"rope": {"mode": "normal", "rotary_dim": 7}},
        {"token_capacity": 1 << 70},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(quire.BadArgumentError):
        make_cache(**changes)


def test_layers_and_their_short_form_exclude_each_other() -> None:
    with pytest.raises(TypeError):
        make_cache(layers=[LayerSpec(2, 2, 16)])
    given = KVCache(
        [{"num_qo_heads": 2, "qk_head_dim": 16}], max_num_sequences=1, token_capacity=16, threads=1
    )
    assert given.layers == (LayerSpec(2, 2, 16, 16, "float32"),)


def test_a_closed_cache_says_so() -> None:
    with make_cache() as cache:
        cache.add_sequence(0)
    cache.close()
    with pytest.raises(quire.ClosedError):
        cache.add_sequence(1)


def test_calls_of_two_threads_at_once_never_corrupt() -> None:
    """The interpreter lock is free during a call: a second control call either waits its turn or
    gets BadState."""
    cache = make_cache(num_layers=1, max_num_sequences=1000)
    refused: list[BaseException] = []

    def work(base: int) -> None:
        for i in range(300):
            try:
                cache.add_sequence(base + i)
                cache.remove_sequence(base + i)
            except quire.BadStateError:
                pass
            except BaseException as error:
                refused.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not refused
    cache.check_invariants()


# ---- RoPE


def test_rope_frequencies() -> None:
    frequencies, amplitude = quire.rope_frequencies({"mode": "normal", "theta": 500.0}, 32)
    assert amplitude == 1.0 and frequencies.dtype == np.float64
    assert np.allclose(frequencies, 500.0 ** (-np.arange(16) / 16), rtol=1e-14)
    linear, _ = quire.rope_frequencies({"mode": "normal", "scaling": "linear", "factor": 4.0}, 32)
    assert np.allclose(linear * 4, 10000.0 ** (-np.arange(16) / 16), rtol=1e-14)


def test_the_default_page_size_is_a_power_of_two() -> None:
    size = quire.default_page_size(LayerSpec(32, 8, 128, 128, "bfloat16"))
    assert size == 16
    assert quire.default_page_size(LayerSpec(4, 1, 32, 32, "bfloat16")) == 256


def attention_of_row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: list[int], cap: float, sinks: list[float]
) -> np.ndarray:
    """One row of q [Hq, D] over the seen positions of k, v [n, 1, D], in double."""
    out = np.zeros_like(q, dtype=np.float64)
    for head in range(q.shape[0]):
        scores = (k[seen, 0] @ q[head]) / np.sqrt(q.shape[1])
        if cap:
            scores = cap * np.tanh(scores / cap)
        logits = np.append(scores, sinks[head]) if sinks else scores
        weights = np.exp(logits - logits.max())
        out[head] = (weights[: len(seen)] @ v[seen, 0]) / weights.sum()
    return out


def test_pops_behind_a_window_that_slid() -> None:
    for max_pop in (0, 5):
        cache = KVCache(
            layers=[LayerSpec(1, 1, 8)],
            max_num_sequences=2,
            token_capacity=64,
            page_size=1,
            max_pop=max_pop,
        )
        rows = np.ones((1, 1, 8), np.float32)
        cache.add_sequence(0)
        cache.enable_sliding_window_for_seq(0, 8, 2)
        for _ in range(40):
            cache.begin_forward([0], [1])
            cache.append(0, rows, rows)
            cache.attend(0, rows)
            cache.end_forward()
        with pytest.raises(quire.BadStateError, match="no longer held"):
            cache.pop_n(0, max_pop + 1)
        cache.pop_n(0, max_pop)
        assert cache.get_sequence_length(0) == 40 - max_pop
        cache.check_invariants()
    with pytest.raises(quire.BadArgumentError, match="max_pop"):
        KVCache(
            layers=[LayerSpec(1, 1, 8)], max_num_sequences=1, token_capacity=16, max_pop=-1
        )


def test_windows_soft_caps_and_learned_sinks() -> None:
    sinks = [0.5, -1.0]
    layers = [LayerSpec(2, 1, 8), LayerSpec(2, 1, 8, window=6, soft_cap=2.0, head_sinks=sinks)]
    cache = KVCache(
        layers=layers,
        max_num_sequences=4,
        token_capacity=256,
        prefill_chunk_size=64,
        page_size=16,
        max_pop=0,
    )
    assert cache.layers[1].window == 6 and tuple(cache.layers[1].head_sinks) == tuple(sinks)
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((64, heads, 8), np.float32) for heads in (2, 1, 1))
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 20, 3)
    length = 0
    for count in (1, 40, 1, 22):
        rows = slice(length, length + count)
        cache.begin_forward([0], [count])
        for layer, spec in enumerate(layers):
            cache.append(layer, k[rows], v[rows])
            o = cache.attend(layer, q[rows])
            again = cache.attention_with_shared_kv(layer, q[rows])
            np.testing.assert_array_equal(o, again)
            for i, p in enumerate(range(length, length + count)):
                seen = [s for s in range(p + 1) if s < 3 or s > p - 17]
                if spec.window:
                    seen = [s for s in seen if s > p - spec.window]
                expected = attention_of_row(
                    q[p], k, v, seen, spec.soft_cap, list(spec.head_sinks)
                )
                np.testing.assert_allclose(o[i], expected, rtol=2e-5, atol=2e-6)
        cache.end_forward()
        length += count
    # A next query sees [48, 64) of layer 0 beside the sinks, [59, 64) of layer 1.
    assert cache.held_tokens(0) == 16
    assert cache.get_sequence_length(0) == 64
    with pytest.raises(quire.BadStateError, match="cannot end at 40"):
        cache.fork_sequence(0, 1, 40)
    with pytest.raises(quire.BadStateError, match="cannot end at 40"):
        cache.pop_n(0, 24)
    cache.disable_sliding_window_for_seq(0)
    with pytest.raises(quire.BadStateError):
        cache.disable_sliding_window_for_seq(0)
    cache.check_invariants()
