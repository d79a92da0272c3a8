"""Values of the wrong kind, empty names and shared objects: an error that says what is wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
import quire.snapshot
from tiny_model import TinyModel

_PASSPORT = quire.Passport("0" * 64, "m", "r", "", "", "", chunk_tokens=16)


@pytest.fixture
def cache() -> quire.KVCache:
    """With a forward of three tokens."""
    cache = quire.KVCache(
        num_layers=1,
        num_qo_heads=4,
        num_kv_heads=2,
        qk_head_dim=16,
        max_num_sequences=2,
        token_capacity=64,
    )
    cache.add_sequence(0)
    cache.begin_forward([0], [3])
    return cache


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float64, "float64"),
        (np.complex64, "complex64"),
        (np.bool_, "bool"),
        (np.uint16, "uint16"),
    ],
)
def test_an_element_type_that_is_not_taken_is_named(
    cache: quire.KVCache, dtype: Any, name: str
) -> None:
    qkv, o = np.ones((3, 8, 16), np.float32), np.zeros((3, 4, 16), np.float32)
    for arrays in ((qkv.astype(dtype), o), (qkv, o.astype(dtype))):
        with pytest.raises(quire.BadArgumentError, match=f"type {name} is not taken; convert it"):
            cache.attention_with_fused_qkv(0, *arrays)
    cache.attention_with_fused_qkv(0, qkv, o)  # nothing has changed


@pytest.mark.parametrize("value", [None, [[1.0]], 5, "x", np.float32(1)], ids=repr)
def test_what_is_no_array_is_named(cache: quire.KVCache, value: Any) -> None:
    o = np.zeros((3, 4, 16), np.float32)
    with pytest.raises(TypeError, match="must be an array of NumPy, torch"):
        cache.attention_with_fused_qkv(0, value, o)
    if value is not None:
        qkv = np.ones((3, 8, 16), np.float32)
        with pytest.raises(TypeError, match="o must be an array of NumPy, torch"):
            cache.attention_with_fused_qkv(0, qkv, value)
        with pytest.raises(TypeError):
            cache.attention_with_fused_qkv(0, qkv, o, mask=value)
    recurrent = quire.RecurrentCache(
        [quire.RecurrentLayerSpec("convolution", num_channels=4, width=2)],
        max_num_sequences=1,
        prefill_chunk_size=8,
    )
    for call in (
        lambda: cache.attention_with_fused_qkv(0, value),
        lambda: cache.attend(0, value),
        lambda: cache.self_attention(0, value, value, value, o, o),
        lambda: recurrent.convolution(0, value, value),
    ):
        with pytest.raises(TypeError, match="a tensor must be an array of NumPy, torch"):
            call()


def test_arrays_without_rows_or_dimensions_are_refused(cache: quire.KVCache) -> None:
    lse = np.zeros((3, 4), np.float32)
    for bad in (np.ones((), np.float32), np.zeros((3, 4, 0), np.float32)):
        for call in (
            lambda: cache.attention_with_fused_qkv(0, bad),
            lambda: cache.self_attention(0, bad, bad, bad, bad, lse),
        ):
            with pytest.raises(quire.QuireError):
                call()


@pytest.mark.parametrize(
    ("value", "kind"),
    [("8", "str"), (2**64, "int beyond 64 bits"), (None, "None"), ([8], "list"), (8.0, "float")],
)
def test_an_option_of_the_wrong_type_is_named(value: Any, kind: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=f"'token_capacity' .* of type {kind}"):
        quire.KVCache(
            num_layers=1,
            num_qo_heads=1,
            num_kv_heads=1,
            qk_head_dim=8,
            max_num_sequences=1,
            token_capacity=value,
        )


@pytest.mark.parametrize("stop", [5, b"x", {"a": 1}, [5], [b"x"], [None]], ids=repr)
def test_stop_of_another_kind(engine: quire.Engine, stop: Any) -> None:
    with pytest.raises(TypeError, match="stop is a text"):
        engine.generate([5], max_tokens=1, stop=stop)


@pytest.mark.parametrize("salt", [5, None, [1], 1.5], ids=repr)
def test_a_salt_of_another_kind(tmp_path: Path, salt: Any) -> None:
    """bytes(5) is five zeros, which once was the salt."""
    state = quire.RNNState([quire.StateSpec((1,))], max_num_sequences=2)
    state.add_sequence(0)
    identity = {"model": "m", "revision": "r"}
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        for call in (
            lambda: quire.chunk_keys(_PASSPORT, [1], cache_salt=salt),
            lambda: store.prefetch(_PASSPORT, [1], cache_salt=salt),
            lambda: state.export_chunk(0, [1], identity=identity, salt=salt),
            lambda: quire.snapshot.save_sequence(
                state, 0, [], tmp_path / "s", identity=identity, sampler=salt
            ),
        ):
            with pytest.raises(TypeError, match="must be a text or bytes, not"):
                call()


@pytest.mark.parametrize("tokens", [[1.5], ["1"], np.array([0.5])], ids=repr)
def test_tokens_that_are_no_integers(tmp_path: Path, tokens: Any) -> None:
    """1.5 once was token 1."""
    state = quire.RNNState([quire.StateSpec((1,))], max_num_sequences=2)
    state.add_sequence(0)
    identity = {"model": "m", "revision": "r"}
    for call in (
        lambda: state.export_chunk(0, tokens, identity=identity),
        lambda: state.import_chunks(1, tokens, [], identity=identity),
        lambda: quire.snapshot.save_sequence(state, 0, tokens, tmp_path / "s", identity=identity),
    ):
        with pytest.raises(TypeError, match="tokens must be integers"):
            call()


@pytest.mark.parametrize("tier", [None, 1, b"ram", ["ram"]], ids=repr)
def test_a_tier_that_is_no_text_is_named(tier: Any) -> None:
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        for call in (store.list, store.verify, store.gc, lambda tier: store.get(tier, "0" * 64)):
            with pytest.raises(quire.BadArgumentError, match="tier must be a text, not "):
                call(tier)
        with pytest.raises(quire.BadArgumentError, match="key must be a text, not int"):
            store.get("ram", 1)  # type: ignore[arg-type]


def test_an_empty_name_is_not_the_current_folder(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(quire.BadArgumentError, match="directory is empty"):
        quire.ChunkStore("")
    with pytest.raises(quire.BadArgumentError, match="directory is empty"):
        quire.Engine(tiny.directory, kv_dir="")
    with pytest.raises(quire.NotFoundError, match="is empty"):
        quire.Engine("")
    with pytest.raises(quire.BadArgumentError, match="there is no draft_model"):
        quire.Engine(tiny.directory, speculate="model")
    assert os.listdir(tmp_path) == []


def test_threads_share_a_stream(engine: quire.Engine) -> None:
    """Each piece goes to one of them, and all of them come to the end."""
    expected = engine.generate([5, 6, 7], max_tokens=60, ignore_eos=True).ids
    stream = engine.stream([5, 6, 7], max_tokens=60, ignore_eos=True)
    start = threading.Barrier(4)
    found: list[list[int]] = []
    errors: list[BaseException] = []

    def take() -> None:
        start.wait()
        try:
            for piece in stream:
                found.append(piece.ids)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(id for ids in found for id in ids) == sorted(expected)
