"""Checkpoints behind TVM's names: any sequence, every kind of layer, others untouched."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_llama
from tvm_calls import Calls, OneCache
from tvm_mla import DIM, MlaCache

import quire
import quire.tvm

pytestmark = pytest.mark.usefixtures("installed")


def export(cache: OneCache, seq: int) -> tuple[str, list[Any]]:
    metadata = str(cache.get_checkpoint_metadata(seq))
    groups = []
    for entry in json.loads(metadata)["groups"]:
        tensor = tvm.runtime.tensor(np.full(entry["shape"], np.nan, entry["dtype"]))
        assert tensor.numpy().nbytes == entry["nbytes"]
        cache.export_page_group(seq, entry["group_index"], tensor)
        groups.append(tensor)
    return metadata, groups


def load(cache: OneCache, seq: int, metadata: str, groups: list[Any]) -> None:
    cache.prepare_import(seq, metadata)
    for group, tensor in reversed(list(enumerate(groups))):
        cache.import_page_group(seq, group, tensor)
    cache.finish_import(seq)


KINDS: list[dict[str, Any]] = [
    {},
    {"rope_mode": 1, "dtype": "float16"},
    {"rope_mode": 2},
    {"windows": True, "rope_mode": 1},
    {"kinds": (0, 3), "layer_window": 6},
    {"kinds": (3, 3), "layer_window": 6},
    {"page_size": 3},
]


@pytest.mark.parametrize("options", KINDS)
def test_a_sequence_goes_on_elsewhere_as_it_would_here(options: dict[str, Any]) -> None:
    source = OneCache(tokens=256, **options)
    dtype = options.get("dtype", "float32")
    source.add_sequence(3)
    if options.get("windows"):
        source.enable_sliding_window_for_seq(3, 9, 3)
    qkv = source.qkv(40).astype(dtype)
    source.forward([3], [15], qkv[:, :15])
    source.forward([3], [6], qkv[:, 15:21])
    metadata, groups = export(source, 3)

    target = OneCache(tokens=128, sequences=3, **options)
    target.add_sequence(0)
    target.forward([0], [10], qkv[:, 30:])
    other = target.kv_of(0) if "kinds" not in options else None
    load(target, 7, metadata, groups)
    target.cache.check_invariants()
    assert target.get_sequence_length(7) == source.get_sequence_length(3)
    for end in (22, 29, 30):
        begin = {22: 21, 29: 22, 30: 29}[end]
        expected = source.forward([3], [end - begin], qkv[:, begin:end])
        actual = target.forward([7], [end - begin], qkv[:, begin:end])
        if options.get("windows"):  # kept tokens stand at other positions there
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(actual, expected)
    assert target.get_sequence_length(0) == 10
    if other is not None:
        for before, after in zip(other, target.kv_of(0)):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("windows", [False, True])
def test_latent_layers_go_on_elsewhere(windows: bool) -> None:
    """TVM refuses them; a group is as a page of theirs, [1, pages, P, D]."""
    source = MlaCache(tokens=256, page_size=4, windows=windows)
    rows = source.rows(30)
    source.add_sequence(3)
    if windows:
        source.enable_sliding_window_for_seq(3, 9, 3)
    source.mla_forward([3], [14], rows[:, :14])
    source.mla_forward([3], [4], rows[:, 14:18])
    metadata, groups = export(source, 3)
    fields = json.loads(metadata)
    assert fields["attn_kinds"] == ["mla", "mla"]
    kept = source.latents(3)
    for group, latents in zip(groups, kept):
        pages = group.numpy()
        assert pages.shape == (1, -(-len(latents) // 4), 4, DIM)
        flat = pages.reshape(-1, DIM)
        np.testing.assert_array_equal(flat[: len(latents)], latents)
        assert (flat[len(latents) :] == 0).all()
    target = MlaCache(tokens=128, page_size=4, windows=windows)
    load(target, 7, metadata, groups)
    target.digest()
    np.testing.assert_array_equal(target.latents(7), kept)
    if not windows:  # else kept tokens stand at other positions there
        expected = source.mla_forward([3], [12], rows[:, 18:])
        np.testing.assert_array_equal(target.mla_forward([7], [12], rows[:, 18:]), expected)
    other = MlaCache(kinds=(1, 0), page_size=4, windows=windows)
    with pytest.raises(quire.IncompatibleError, match="attn_kinds"):
        other.prepare_import(0, metadata)
    assert str(other.get_layout_hash()) != str(source.get_layout_hash())


def test_latent_layers_beside_others_go_on_elsewhere() -> None:
    caches = [MlaCache(kinds=(1, 0), heads=(2, 2), page_size=4) for _ in range(2)]
    rows, qkv = caches[0].rows(12), caches[0].qkv(12)
    for cache, seq, begin, end in ((caches[0], 0, 0, 9), (caches[0], 0, 9, 12), (caches[1], 1, 9, 12)):
        if begin == 0:
            cache.add_sequence(seq)
        elif cache is caches[1]:
            load(cache, seq, metadata, groups)
        cache.begin([seq], [end - begin])
        latent = cache.run(0, rows[0, begin:end], ("self", "cross"))
        plain = cache.attend(1, qkv[1, begin:end].copy(), 2)
        cache.end_forward()
        if begin == 0:
            metadata, groups = export(cache, seq)
            assert [len(group.shape) for group in groups] == [4, 6]
            fields = json.loads(metadata)
            assert (fields["num_kv_heads"], fields["qk_head_dim"], fields["v_head_dim"]) == (2, 12, 8)
        elif cache is caches[0]:
            expected = latent, plain
    np.testing.assert_array_equal(latent, expected[0])
    np.testing.assert_array_equal(plain, expected[1])


def test_a_forked_sequence_is_exported_and_unused_slots_are_zero() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    cache.forward([0], [10])
    cache.fork_sequence(0, 1, 6)
    metadata, groups = export(cache, 1)
    fields = json.loads(metadata)
    assert (fields["seq_id"], fields["seq_length"]) == (1, 6)
    assert [page["length"] for page in fields["logical_pages"]] == [4, 2]
    k, v = cache.kv_of(1)
    for layer, group in enumerate(groups):
        pages = group.numpy()
        assert pages.shape == (1, 2, 2, 1, 4, 8)
        tokens = pages[0].transpose(1, 2, 0, 3, 4).reshape(2, 1, 8, 8)
        np.testing.assert_array_equal(tokens[0, 0, :6], k[layer, :, 0])
        np.testing.assert_array_equal(tokens[1, 0, :6], v[layer, :, 0])
        assert (tokens[:, :, 6:] == 0).all()


def test_an_import_replaces_its_own_sequence_only() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    cache.add_sequence(1)
    cache.forward([0, 1], [8, 3])
    metadata, groups = export(cache, 1)
    before = cache.kv_of(0)
    expected = cache.kv_of(1)
    cache.forward([1], [5])
    load(cache, 1, metadata, groups)
    assert (cache.get_sequence_length(0), cache.get_sequence_length(1)) == (8, 3)
    for old, new in zip((*before, *expected), (*cache.kv_of(0), *cache.kv_of(1))):
        np.testing.assert_array_equal(old, new)


def test_an_import_in_progress() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    cache.add_sequence(1)
    cache.forward([0, 1], [6, 3])
    metadata, groups = export(cache, 0)
    cache.prepare_import(5, metadata)
    for call in (
        lambda: cache.begin([5], [1]),
        lambda: cache.finish_import(5),
        lambda: cache.popn(5, 0),
        lambda: cache.fork_sequence(5, 6, -1),
        lambda: cache.prepare_import(5, metadata),
        lambda: cache.get_checkpoint_metadata(5),
        lambda: cache.import_page_group(4, 0, groups[0]),
    ):
        with pytest.raises(quire.BadStateError, match="import"):
            call()
    cache.forward([1], [1])  # others go on
    cache.import_page_group(5, 0, groups[0])
    with pytest.raises(quire.BadStateError, match="has page group 0 already"):
        cache.import_page_group(5, 0, groups[0])
    with pytest.raises(quire.BadStateError, match="lacks page group 1"):
        cache.finish_import(5)
    cache.remove_sequence(5)  # cancels it
    with pytest.raises(quire.BadStateError, match="not being imported"):
        cache.finish_import(5)
    cache.prepare_import(5, metadata)
    cache.clear()
    with pytest.raises(quire.BadStateError, match="not being imported"):
        cache.finish_import(5)
    assert cache.attention_kv_cache_empty()


def test_lacking_pages_leave_the_import_open() -> None:
    cache = OneCache(tokens=16)  # 5 pages
    cache.add_sequence(0)
    cache.forward([0], [12])
    metadata, groups = export(cache, 0)
    cache.prepare_import(1, metadata)
    for group, tensor in enumerate(groups):
        cache.import_page_group(1, group, tensor)
    with pytest.raises(quire.OutOfPagesError):
        cache.finish_import(1)
    expected = cache.kv_of(0)
    cache.remove_sequence(0)
    cache.finish_import(1)
    for old, new in zip(expected, cache.kv_of(1)):
        np.testing.assert_array_equal(old, new)


def test_what_does_not_fit_is_named() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    cache.forward([0], [6])
    metadata, groups = export(cache, 0)
    fields = json.loads(metadata)
    digest = cache.digest()
    for key, value in (
        ("page_size", 8),
        ("num_kv_heads", 3),
        ("dtype", "float16"),
        ("rope_mode", "inline"),
        ("attn_kinds", ["mha", "mla"]),
        ("layer_windows", [0, 5]),
        ("cache_type", "other"),
        ("format_version", 2),
        ("window", [4, 1]),
    ):
        with pytest.raises(quire.IncompatibleError, match=key):
            cache.prepare_import(1, json.dumps({**fields, key: value}))
    for text in ("{", "[]", "{}", json.dumps({**fields, "seq_length": -1})):
        with pytest.raises(quire.QuireError):
            cache.prepare_import(1, text)
    with pytest.raises(quire.BadArgumentError, match="page group 2"):
        cache.export_page_group(0, 2, groups[0])
    wrong = tvm.runtime.tensor(np.zeros((1, 1, 2, 1, 4, 8), "float32"))
    with pytest.raises(quire.BadArgumentError, match=r"\[1, 2, 2, 1, 4, 8\]"):
        cache.export_page_group(0, 0, wrong)
    assert cache.digest() == digest


def test_the_hash_is_of_the_layout_alone() -> None:
    one = str(OneCache().get_layout_hash())
    assert one == str(OneCache(tokens=1000, sequences=3, chunk=5).get_layout_hash())
    others = [
        OneCache(page_size=8),
        OneCache(heads=(2, 2)),
        OneCache(dim=16),
        OneCache(dtype="float16"),
        OneCache(kinds=(0, 3)),
        OneCache(rope_mode=1),
        OneCache(rope_mode=1, theta=500.0),
    ]
    assert len({one, *(str(other.get_layout_hash()) for other in others)}) == 1 + len(others)


def test_a_checkpoint_of_tvms_own_cache_is_taken() -> None:
    quire.tvm.uninstall()
    theirs, their_machine = Calls(), tvm_llama.new_machine()
    their_cache = tvm_llama.new_cache(their_machine)
    quire.tvm.install()
    machine = tvm_llama.new_machine()
    ours = OneCache()
    ours.cache = tvm_llama.new_cache(machine)
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, tvm_llama.VOCABULARY, 21)]
    theirs.add_sequence(their_cache, 0)
    theirs.begin(their_cache, [0], [20])
    tvm_llama.logits(their_machine, their_cache, tokens[:20])
    theirs.end_forward(their_cache)
    metadata = theirs.get_checkpoint_metadata(their_cache, 0)
    ours.prepare_import(4, metadata)
    for entry in json.loads(metadata)["groups"]:
        tensor = tvm.runtime.tensor(np.zeros(entry["shape"], entry["dtype"]))
        theirs.export_page_group(their_cache, 0, entry["group_index"], tensor)
        ours.import_page_group(4, entry["group_index"], tensor)
    ours.finish_import(4)
    results = []
    for calls, cache, used, seq in (
        (theirs, their_cache, their_machine, 0),
        (ours.calls, ours.cache, machine, 4),
    ):
        calls.begin(cache, [seq], [1])
        results.append(tvm_llama.logits(used, cache, tokens[20:]))
        calls.end_forward(cache)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)
