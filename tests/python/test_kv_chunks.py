"""Chunks of a quire.KVCache in a quire.ChunkStore: put_chunks, take_chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quire

CHUNK, TOKENS = 8, list(range(40))
IDENTITY = {"model": "m", "revision": "r"}


def new_cache(page_size: int = 4, window: int = 0, **options: Any) -> quire.KVCache:
    layers = [quire.LayerSpec(2, 1, 8), quire.LayerSpec(2, 1, 8, window=window)]
    fields = {"max_num_sequences": 4, "token_capacity": 256, "max_pop": 40, "threads": 1}
    return quire.KVCache(layers, page_size=page_size, **{**fields, **options})


def run(cache: quire.KVCache, sequence: int, begin: int, end: int) -> list[np.ndarray]:
    """A forward of tokens [begin, end); the outputs of its layers."""
    outputs = []
    if not cache.has_sequence(sequence):
        cache.add_sequence(sequence)
    with cache.forward([sequence], [end - begin]):
        for layer in range(2):
            qkv = np.random.default_rng(layer).standard_normal((40, 4 * 8), np.float32)
            outputs.append(cache.attention_with_fused_qkv(layer, qkv[begin:end]))
    return outputs


def space_of(cache: quire.KVCache, store: quire.ChunkStore, **identity: str) -> quire.ChunkSpace:
    passport = cache.chunk_passport({**IDENTITY, **identity}, chunk_tokens=CHUNK)
    return store.space(passport)


@pytest.fixture
def store() -> Any:
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        yield store


@pytest.mark.parametrize("window", [0, 5, 12])
def test_a_cache_of_other_pages_goes_on_with_the_same_bits(
    store: quire.ChunkStore, window: int
) -> None:
    writer = new_cache(window=window)
    run(writer, 0, 0, 30)
    space = space_of(writer, store)
    assert writer.put_chunks(0, TOKENS[:30], space) == 3
    assert space.wanted(TOKENS[:30]) == [False] * 3
    expected = run(writer, 0, 30, 40)
    reader = new_cache(page_size=16, window=window)
    fetch = space_of(reader, store).fetch(TOKENS)
    assert fetch.wait(60.0)
    reader.take_chunks(7, fetch)
    assert reader.get_sequence_length(7) == 24
    run(reader, 7, 24, 30)
    for mine, theirs in zip(run(reader, 7, 30, 40), expected, strict=True):
        assert np.array_equal(mine, theirs)
    reader.check_invariants()


def test_chunks_are_appended_where_they_belong(store: quire.ChunkStore) -> None:
    cache = new_cache()
    run(cache, 0, 0, 32)
    space = space_of(cache, store)
    cache.put_chunks(0, TOKENS[:32], space)
    cache.fork_sequence(0, 1, 16)
    rest = space.fetch(TOKENS[:32], first_chunk=2)
    assert rest.wait(60.0)
    digest = cache.state_digest()
    for sequence, count in ((0, 2), (2, 2), (1, 3), (1, -1)):  # ends elsewhere, absent, too many
        with pytest.raises(quire.BadArgumentError, match="from position 16 on"):
            cache.take_chunks(sequence, rest, count)
    assert cache.state_digest() == digest
    cache.take_chunks(1, rest, 1)
    assert cache.get_sequence_length(1) == 24
    keys, values = cache.debug_get_kv(0, 0, 24)
    for mine, theirs in zip(cache.debug_get_kv(1), (keys, values), strict=True):
        assert np.array_equal(mine, theirs)


def test_other_passports_are_refused(store: quire.ChunkStore) -> None:
    cache, other = new_cache(), new_cache(window=9)
    run(cache, 0, 0, 16)
    with pytest.raises(quire.IncompatibleError, match="chunk_passport"):
        cache.put_chunks(0, TOKENS[:16], space_of(other, store))
    space = space_of(cache, store)
    cache.put_chunks(0, TOKENS[:16], space)
    fetch = space.fetch(TOKENS)
    assert fetch.wait(60.0)
    with pytest.raises(quire.IncompatibleError):
        other.take_chunks(0, fetch)
    assert not other.has_sequence(0)
    assert space_of(cache, store, revision="s").fetch(TOKENS).wait(60.0)
    assert space_of(cache, store, revision="s").known_prefix(TOKENS) == 0


def test_what_cannot_be_put_is_said(store: quire.ChunkStore, tmp_path: Any) -> None:
    cache = new_cache(window=5, max_pop=2)
    run(cache, 0, 0, 30)
    space = space_of(cache, store)
    with pytest.raises(quire.BadArgumentError):
        cache.put_chunks(0, TOKENS[:8], space)  # it has slid too far beyond them
    with pytest.raises(quire.BadArgumentError, match="ttl"):
        cache.put_chunks(0, [], space, ttl=-1)
    run(cache, 1, 0, 12)
    with pytest.raises(quire.BadArgumentError):
        cache.put_chunks(1, TOKENS[:16], space)  # four tokens more than it has
    with pytest.raises(quire.BadArgumentError, match="ttl"):
        cache.put_chunks(0, TOKENS[:8], space, ttl=-1)
    with quire.ChunkStore(tmp_path, queue_bytes=1) as full:
        whole = new_cache()
        run(whole, 0, 0, 16)
        assert whole.put_chunks(0, TOKENS[:16], space_of(whole, full)) == 0
        assert full.statistics()["tiers"]["disk"]["dropped_writes"] == 1
    brief = new_cache()
    run(brief, 0, 0, 16)
    with quire.ChunkStore(ram_bytes=1 << 20) as expiring:
        assert brief.put_chunks(0, TOKENS[:16], space_of(brief, expiring), ttl=1000) == 2
        assert all(chunk.expires for chunk in expiring.list("ram"))
