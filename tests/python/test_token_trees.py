"""Token trees and masks through the Python binding: bits of the plain sequence, arrays of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import quire

PARENTS = [-1, 0, 0, 2, -1, 4]
PATHS = {3: [0, 2, 3], 5: [4, 5]}


def make_cache(dtype: str = "float32", **changes: Any) -> quire.KVCache:
    layers = [
        quire.LayerSpec(num_qo_heads=4, num_kv_heads=2, qk_head_dim=16, dtype=dtype, **changes)
    ]
    return quire.KVCache(
        layers=layers,
        max_num_sequences=4,
        token_capacity=256,
        prefill_chunk_size=64,
        page_size=4,
        rope=quire.RopeOptions(mode="inline"),
        poison_freed_pages=True,
    )


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 8, 16)).astype(np.float32)


def outputs_of(cache: quire.KVCache, qkv: np.ndarray, mask: Any = None) -> list[np.ndarray]:
    """Of all calls of the open forward."""
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    count = len(qkv)
    cross, self_ = np.empty((2, count, 4, 16), np.float32)
    lses = np.empty((2, count, 4), np.float32)
    cache.cross_attention(0, q, cross, lses[0])
    cache.append(0, k, v)
    whole = cache.attend(0, q, mask=mask)
    shared = cache.attention_with_shared_kv(0, q[:, ::-1], mask=mask)
    cache.self_attention(0, q, k, v, self_, lses[1], mask=mask)
    return [whole, shared, cross, self_]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_node_has_the_bits_of_the_plain_sequence(dtype: str) -> None:
    prompt, nodes = rows(21, 1), rows(6, 2)
    cache = make_cache(dtype)
    cache.add_sequence(0)
    with cache.forward([0], [21]):
        cache.attention_with_fused_qkv(0, prompt)
    for child in PATHS:
        cache.fork_sequence(0, child)
    with cache.forward([0], [6], PARENTS):
        tree = outputs_of(cache, nodes)
    for node, path in PATHS.items():
        with cache.forward([node], [len(path)]):
            plain = outputs_of(cache, nodes[path])
        for got, expected in zip(tree, plain):
            np.testing.assert_array_equal(got[path], expected)
    cache.commit_accepted_token_tree_nodes([0], [3])
    more = rows(2, 3)
    results = []
    for seq in (0, 3):
        with cache.forward([seq], [2]):
            results.append(cache.attention_with_fused_qkv(0, more))
    np.testing.assert_array_equal(results[0], results[1])


def test_pages_of_a_tree_are_known_before() -> None:
    cache = make_cache()
    cache.add_sequence(0)
    with cache.forward([0], [5]):
        cache.attention_with_fused_qkv(0, rows(5, 1))
    needed = cache.pages_needed([0], [6], PARENTS)
    free = cache.get_num_available_pages()
    cache.begin_forward([0], [6], PARENTS)
    assert free - cache.get_num_available_pages() == needed == 2
    cache.abort_forward()
    with pytest.raises(quire.BadArgumentError, match="node 1"):
        cache.pages_needed([0], [2], [-1, 1])


def test_a_mask_hides_new_tokens_from_one_another() -> None:
    prompt, new = rows(9, 1), rows(4, 2)
    shows = np.tri(4, dtype=bool)
    shows[3, 1] = shows[2, 0] = False

    def run(mask: Any) -> list[np.ndarray]:
        cache = make_cache()
        cache.add_sequence(0)
        with cache.forward([0], [9]):
            cache.attention_with_fused_qkv(0, prompt)
        with cache.forward([0], [4]):
            return outputs_of(cache, new, mask)

    expected = run(shows.ravel())
    for mask in (
        shows.ravel().astype(np.uint8) * 7,
        torch.from_numpy(shows.ravel()),
        torch.from_numpy(shows.ravel().astype(np.uint8)),
    ):
        for got, of in zip(run(mask), expected):
            np.testing.assert_array_equal(got, of)
    plain = run(None)
    for call in (0, 1, 3):
        same = [np.array_equal(expected[call][row], plain[call][row]) for row in range(4)]
        assert same == [True, True, False, False]
    np.testing.assert_array_equal(expected[2], plain[2])  # cached tokens alone
    with pytest.raises(quire.BadArgumentError, match=r"uint8 \[16\]"):
        run(shows)
