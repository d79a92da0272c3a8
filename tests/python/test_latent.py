"""Latent layers (MLA) of quire.KVCache against NumPy: absorbed attention is attention in which the
latent is key and value."""

import numpy as np
import pytest

import quire

RANK, ROPE, HEADS = 12, 4, 3
DIM = RANK + ROPE


def make_cache(**layer):
    spec = quire.LayerSpec(
        HEADS, qk_head_dim=DIM, v_head_dim=RANK, latent=True, **{"dtype": "float32", **layer}
    )
    return quire.KVCache(
        [spec], max_num_sequences=4, token_capacity=64, prefill_chunk_size=32, page_size=16
    )


def expected(q, kv, first, scale):
    rows = []
    for i, row in enumerate(q):
        keys = kv[: first + i + 1]
        scores = row @ keys.T * scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        rows.append(weights / weights.sum(axis=-1, keepdims=True) @ keys[:, :RANK])
    return np.stack(rows)


def run(cache, ids, lengths, q, kv):
    cache.begin_forward(ids, lengths)
    o = cache.attention_with_mla(0, q, kv)
    cache.end_forward()
    return o


def inputs(count, seed):
    random = np.random.default_rng(seed)
    q = random.standard_normal((count, HEADS, DIM), dtype=np.float32)
    return q, random.standard_normal((count, DIM), dtype=np.float32)


def test_absorbed_attention_is_numpys_and_does_not_see_how_the_prompt_was_cut():
    q, kv = inputs(21, 1)
    cache = make_cache()
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
    whole = run(cache, [0], [21], q, kv)
    np.testing.assert_allclose(whole, expected(q, kv, 0, DIM**-0.5), rtol=1e-4, atol=1e-5)
    first = run(cache, [1], [5], q[:5].copy(), kv[:5].copy())
    rest = run(cache, [1], [16], q[5:].copy(), kv[5:].copy())
    assert np.array_equal(np.concatenate([first, rest]), whole)
    assert np.array_equal(cache.debug_get_kv_mla(1)[0], kv)


def test_halves_forks_and_debug_calls():
    q, kv = inputs(9, 2)
    cache = make_cache()
    cache.add_sequence(0)
    run(cache, [0], [8], q[:8].copy(), kv[:8].copy())
    cache.fork_sequence(0, 1, 8)
    other = inputs(1, 3)[1]
    cache.debug_set_kv_mla(1, 2, other[None])
    assert np.array_equal(cache.debug_get_kv_mla(0)[0], kv[:8])
    changed = np.concatenate([kv[:2], other, kv[3:]])
    cache.begin_forward([1], [1])
    cache.append_mla_kv(0, kv[8:].copy())
    o = cache.attend(0, q[8:].copy())
    cache.end_forward()
    np.testing.assert_allclose(o, expected(q[8:], changed, 8, DIM**-0.5), rtol=1e-4, atol=1e-5)
    with pytest.raises(quire.BadArgumentError, match="debug_get_kv|MLA"):
        cache.debug_get_kv(0)


def test_calls_of_the_other_kind_name_the_right_one():
    q, kv = inputs(1, 4)
    cache = make_cache()
    cache.add_sequence(0)
    cache.begin_forward([0], [1])
    with pytest.raises(quire.BadArgumentError, match="AppendMLAKV"):
        cache.append(0, kv[:, None], kv[:, None, :RANK])
    cache.abort_forward()


def test_a_quantised_latent_has_one_scale():
    q, kv = inputs(6, 5)
    cache = make_cache(dtype="int8")
    cache.add_sequence(0)
    o = run(cache, [0], [6], q, kv)
    stored = cache.debug_get_kv_mla(0)[0]
    step = np.abs(kv).max(axis=1, keepdims=True) / 127
    assert (np.abs(stored - kv) <= step * 0.51).all()
    np.testing.assert_allclose(o, expected(q, stored, 0, DIM**-0.5), rtol=0.05, atol=0.05)


def test_options_that_a_latent_layer_cannot_have_are_refused():
    with pytest.raises(quire.BadArgumentError, match="v_dtype"):
        make_cache(v_dtype="bfloat16")
    with pytest.raises(quire.BadArgumentError, match="num_kv_heads"):
        make_cache(num_kv_heads=3)
