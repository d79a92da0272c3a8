"""Chunks of foreign engines in a store: put from their arrays, brought back into their blocks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire

LAYERS, BLOCK = 3, 4  # tokens of a chunk
PASSPORT = {
    "model": "m",
    "revision": "r",
    "block": BLOCK,
    "layers": [0, LAYERS],
    "dtype": "f16",
    "kv_heads": 2,
    "head_dim": 8,
    "numerics": "n",
}
TOKENS = list(range(100, 100 + 4 * BLOCK + 3))  # four chunks and a rest


@pytest.fixture
def store() -> Iterator[quire.ChunkStore]:
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        yield store


def sections_of(index: int, seed: int = 0) -> dict[Any, np.ndarray]:
    random = np.random.default_rng([seed, index])
    return {
        (kind, layer): random.integers(0, 2**16, (BLOCK, 2, 8), np.uint16).view(np.float16)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }


def put_all(space: quire.ChunkSpace, seed: int = 0) -> None:
    for index in range(4):
        space.put(index, TOKENS, sections_of(index, seed))


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)))


class Engine:
    """Blocks of two tokens, keys and values of a layer in one array [2, blocks, ...] as some
    engines have them, or [blocks, 2, ...] as others do."""

    def __init__(self, planes: bool, blocks: int = 12) -> None:
        shape = (2, blocks, 2, 2, 8) if planes else (blocks, 2, 2, 2, 8)
        self.layers = [np.zeros(shape, np.float16) for _ in range(LAYERS)]
        self.planes = planes
        self.memory = quire.BlockMemory(
            {
                (kind, layer): self.part(layer, at)
                for layer in range(LAYERS)
                for at, kind in enumerate(("key", "value"))
            }
        )

    def part(self, layer: int, at: int) -> np.ndarray:
        return self.layers[layer][at] if self.planes else self.layers[layer][:, at]

    def rows(self, kind: str, layer: int, blocks: list[int]) -> np.ndarray:
        return self.part(layer, ("key", "value").index(kind))[blocks].reshape(-1, 2, 8)


@pytest.mark.parametrize("planes", [True, False])
def test_what_was_put_comes_back_bit_for_bit(store: quire.ChunkStore, planes: bool) -> None:
    space = store.space(PASSPORT, salt="ann")
    assert space.chunk_tokens == BLOCK
    assert space.wanted(TOKENS) == [True] * 4
    put_all(space)
    assert space.wanted(TOKENS) == [False] * 4
    assert space.known_prefix(TOKENS) == 4
    fetch = space.fetch(TOKENS)
    assert fetch.wait(10.0)
    assert fetch.located
    assert fetch.done
    assert (fetch.chunk_count, fetch.found, fetch.ready, fetch.miss) == (4, 4, 4, None)
    assert [fetch.tier(i) for i in range(4)] == ["ram"] * 4
    engine = Engine(planes)
    blocks = [7, 2, 11, 0, 5, 4, 1, 9]
    for layer in range(LAYERS):
        fetch.scatter(layer, engine.memory, blocks)
    for i in range(4):
        for (kind, layer), array in sections_of(i).items():
            section = fetch.section(i, kind, layer)
            assert section.dtype == np.float16
            assert same_bits(section, array)
            assert same_bits(engine.rows(kind, layer, blocks[2 * i : 2 * i + 2]), array)
    untouched = [b for b in range(12) if b not in blocks]
    assert not any(engine.part(layer, at)[untouched].any() for layer in range(3) for at in (0, 1))


def test_blocks_of_an_engine_are_put(store: quire.ChunkStore) -> None:
    space = store.space(PASSPORT)
    engine = Engine(planes=False)
    for layer in range(LAYERS):
        engine.layers[layer][:] = np.random.default_rng(layer).random(engine.layers[layer].shape)
    space.put(0, TOKENS, memory=engine.memory, blocks=[3, 8])
    fetch = space.fetch(TOKENS)
    assert fetch.wait(10.0)
    assert fetch.ready == 1
    assert fetch.miss == "not stored"
    for layer in range(LAYERS):
        for kind in ("key", "value"):
            assert same_bits(fetch.section(0, kind, layer), engine.rows(kind, layer, [3, 8]))


def test_salts_extras_layouts_and_shards_are_apart(store: quire.ChunkStore) -> None:
    space = store.space(PASSPORT)
    put_all(space)
    for other in (
        store.space(PASSPORT, salt="bob"),
        store.space({**PASSPORT, "layout": "engine/amx/4"}),
        store.space({**PASSPORT, "shard": "tp1of2.pp0of1"}),
    ):
        assert other.fingerprint != space.fingerprint or other.keys(TOKENS) != space.keys(TOKENS)
        assert other.known_prefix(TOKENS) == 0
        fetch = other.fetch(TOKENS)
        assert fetch.wait(10.0)
        assert fetch.ready == 0
    image = [b"", b"image a"]
    assert space.known_prefix(TOKENS, extras=image) == 1
    space.put(1, TOKENS, sections_of(1, seed=9), extras=image)
    fetch = space.fetch(TOKENS, extras=image)
    assert fetch.wait(10.0)
    assert fetch.ready == 2
    assert same_bits(fetch.section(1, "key", 0), sections_of(1, seed=9)["key", 0])
    assert same_bits(space.fetch(TOKENS).section(1, "key", 0), sections_of(1)["key", 0])


def test_a_chain_that_grows_forks_and_returns_has_the_keys_of_its_tokens(
    store: quire.ChunkStore,
) -> None:
    """The kept chains against chains of a new space, which has kept none."""
    random = np.random.default_rng(5)
    space = store.space(PASSPORT)
    prompts: list[list[int]] = [[]]
    for _ in range(300):
        base = prompts[random.integers(len(prompts))]
        kept = base[: random.integers(len(base) + 1)]
        prompt = kept + random.integers(0, 3, random.integers(0, 12)).tolist()
        prompts.append(prompt)
        chunks = len(prompt) // BLOCK
        extras = [b"x" * int(n) for n in random.integers(0, 2, random.integers(0, chunks + 1))]
        assert space.keys(prompt, extras=extras) == store.space(PASSPORT).keys(
            prompt, extras=extras
        )


def test_a_view_outlives_its_fetch_and_its_store() -> None:
    store = quire.ChunkStore(ram_bytes=1 << 20)
    space = store.space(PASSPORT)
    put_all(space)
    fetch = space.fetch(TOKENS)
    view = fetch.section(2, "value", 1)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    fetch.close()
    space.close()
    store.close()
    del fetch, space, store
    gc.collect()
    assert same_bits(view, sections_of(2)["value", 1])


def test_a_flipped_bit_is_never_scattered(tmp_path: Path) -> None:
    with quire.ChunkStore(tmp_path) as store:
        put_all(store.space(PASSPORT))
    files = sorted(tmp_path.rglob("*.qkv"))
    assert len(files) == 4
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1 - 4096 // 2] ^= 1  # in the padding or the last section
        data[int.from_bytes(data[12:16], "little") + 5] ^= 4  # in the first section's bytes
        file.write_bytes(data)
    with quire.ChunkStore(tmp_path) as store:
        fetch = store.space(PASSPORT).fetch(TOKENS)
        engine = Engine(planes=True)
        assert not fetch.wait_layer(0, 10.0)
        assert fetch.wait(10.0)
        assert (fetch.ready, fetch.miss) == (0, "corrupt")
        for layer in range(LAYERS):
            with pytest.raises((quire.BadStateError, quire.BadArgumentError)):
                fetch.scatter(layer, engine.memory, list(range(8)), count=4)
            assert not engine.layers[layer].any()


def test_what_is_not_verified_is_refused_and_nothing_is_written(store: quire.ChunkStore) -> None:
    space = store.space(PASSPORT)
    put_all(space)
    engine = Engine(planes=True)
    fetch = space.fetch(TOKENS, first_chunk=1)
    assert fetch.wait(10.0)
    assert fetch.ready == 3
    assert same_bits(fetch.section(0, "key", 0), sections_of(1)["key", 0])
    refused: list[dict[str, Any]] = [
        {"blocks": [0, 1, 2, 3, 4, 12]},
        {"blocks": [0, 1, 2, 3, 4, -1]},
        {"blocks": [0, 1, 2, 3, 4, 4]},
        {"blocks": [0, 1, 2, 3]},
        {"blocks": []},
        {"blocks": [0, 1, 2, 3, 4, 5], "first": 1},
        {"blocks": [0, 1, 2, 3, 4, 5, 6, 7], "count": 4},
        {"blocks": [0, 1], "count": 0},
        {"blocks": [0, 1, 2, 3, 4, 5], "layer": 3},
        {"blocks": [0, 1, 2, 3, 4, 5], "layer": -1},
    ]
    for each in refused:
        with pytest.raises(quire.BadArgumentError):
            fetch.scatter(each.pop("layer", 0), engine.memory, **each)
    assert not any(layer.any() for layer in engine.layers)
    only_keys = quire.BlockMemory({("key", 0): engine.part(0, 0)})
    with pytest.raises(quire.BadArgumentError, match="no array for section 'value' of layer 0"):
        fetch.scatter(0, only_keys, [0, 1, 2, 3, 4, 5])
    assert not engine.layers[0].any()
    for arguments in ((3, "key", 0), (-1, "key", 0), (0, "keys", 0)):
        with pytest.raises(quire.BadArgumentError):
            fetch.section(*arguments)
    with pytest.raises(quire.NotFoundError, match="no section 'latent' of layer 0"):
        fetch.section(0, "latent", 0)


def test_wrong_puts_change_nothing(store: quire.ChunkStore) -> None:
    space = store.space(PASSPORT)
    sections = sections_of(0)
    engine = Engine(planes=True)
    without = {name: array for name, array in sections.items() if name != ("value", 2)}
    short = {**sections, ("key", 1): sections["key", 1][:-1]}
    wrong: list[tuple[type[Exception], tuple[Any, ...], dict[str, Any]]] = [
        (quire.BadArgumentError, (4, TOKENS, sections), {}),
        (quire.BadArgumentError, (-1, TOKENS, sections), {}),
        (quire.BadArgumentError, (0, TOKENS, without), {}),
        (quire.BadArgumentError, (0, TOKENS, short), {}),
        (quire.BadArgumentError, (0, TOKENS, sections), {"priority": 101}),
        (quire.BadArgumentError, (0, TOKENS, sections), {"priority": -1}),
        (quire.BadArgumentError, (0, TOKENS, sections), {"ttl": -1}),
        (quire.BadArgumentError, (0, [2**40] * 4, sections), {}),
        (quire.BadArgumentError, (0, TOKENS), {"memory": engine.memory, "blocks": [0]}),
        (quire.BadArgumentError, (0, TOKENS), {"memory": engine.memory, "blocks": [0, 12]}),
        (TypeError, (0, TOKENS), {}),
        (TypeError, (0, TOKENS), {"memory": engine.memory}),
        (TypeError, (0, TOKENS, sections), {"memory": engine.memory, "blocks": [0, 1]}),
        (TypeError, (0, TOKENS, sections), {"extras": ["x"]}),
        (TypeError, (0, TOKENS, sections), {"extras": b"x"}),
        (TypeError, (0, "text", sections), {}),
        (TypeError, (0, [1.5] * 4, sections), {}),
    ]
    for error, arguments, options in wrong:
        with pytest.raises(error):
            space.put(*arguments, **options)
    assert not store.list("ram")


def test_wrong_passports_and_arrays_are_named(store: quire.ChunkStore) -> None:
    for passport in (
        {},
        {**PASSPORT, "block": 0},
        {**PASSPORT, "dtype": "f7"},
        {**PASSPORT, "kv_heads": 1.5},
        {**PASSPORT, "unknown": 1},
        {"model": object()},
    ):
        with pytest.raises((quire.BadArgumentError, quire.CorruptError)):
            store.space(passport)
    array = np.zeros((4, 6, 5, 8), np.float16)
    read_only = array.copy()
    read_only.flags.writeable = False
    for wrong in (
        array[:, ::2, ::2, ::2],
        array[:0],
        np.broadcast_to(array[:1], array.shape),
        read_only,
        np.float16(1),
        array[::-1],
    ):
        with pytest.raises((quire.BadArgumentError, BufferError, TypeError)):
            quire.BlockMemory({("key", 0): wrong})
    with pytest.raises(quire.BadArgumentError, match="'keys' is none of 'key', 'value', 'latent'"):
        quire.BlockMemory({("keys", 0): array})  # type: ignore[dict-item]


def test_a_chunk_expires_and_a_full_queue_drops(tmp_path: Path) -> None:
    with quire.ChunkStore(tmp_path, queue_bytes=1) as store:
        with pytest.raises(quire.FullError):
            store.space(PASSPORT).put(0, TOKENS, sections_of(0))
        assert store.statistics()["tiers"]["disk"]["dropped_writes"] == 1
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        space = store.space(PASSPORT)
        space.put(0, TOKENS, sections_of(0), ttl=1e6)
        (chunk,) = store.list("ram")
        assert chunk.expires is not None
        assert chunk.expires - chunk.created == 1e6


def test_memory_stays_bounded_and_signed_chunks_need_their_key(tmp_path: Path) -> None:
    with quire.ChunkStore(tmp_path, key=b"k" * 16, ram_bytes=100_000) as store:
        space = store.space(PASSPORT)
        for seed in range(50):
            space.put(0, [seed] * BLOCK, sections_of(0, seed))
            assert store.statistics()["tiers"]["ram"]["bytes"] <= 100_000
        store.flush()
        assert store.statistics()["tiers"]["ram"]["evicted"] > 0
    with quire.ChunkStore(tmp_path, key=b"x" * 16) as store:
        fetch = store.space(PASSPORT).fetch([0] * BLOCK)
        assert fetch.wait(10.0)
        assert fetch.ready == 0


def test_threads_put_and_scatter_at_once(tmp_path: Path) -> None:
    with quire.ChunkStore(tmp_path, ram_bytes=200_000) as store:
        space = store.space(PASSPORT)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                engine = Engine(planes=bool(number % 2))
                for round_number in range(30):
                    seed = (number + round_number) % 5
                    tokens = [seed] * BLOCK
                    space.put(0, tokens, sections_of(0, seed))
                    with space.fetch(tokens, timeout=10.0) as fetch:
                        assert fetch.wait(10.0)
                        if fetch.ready == 0:
                            continue  # on its way to the folder
                        for layer in range(LAYERS):
                            fetch.scatter(layer, engine.memory, [4, 1])
                    for (kind, layer), array in sections_of(0, seed).items():
                        assert same_bits(engine.rows(kind, layer, [4, 1]), array)
            except BaseException as error:  # noqa: BLE001 (shown by the test)
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_torch_arrays_are_taken(store: quire.ChunkStore) -> None:
    torch = pytest.importorskip("torch")
    space = store.space(
        {**PASSPORT, "dtype": "bf16", "kind": "latent", "head_dim": 16, "kv_heads": 1}
    )
    arrays = [torch.randn(6, BLOCK, 16).to(torch.bfloat16) for _ in range(LAYERS)]
    memory = quire.BlockMemory({("latent", layer): array for layer, array in enumerate(arrays)})
    space.put(0, TOKENS, memory=memory, blocks=[4])
    fetch = space.fetch(TOKENS)
    section = fetch.section(0, "latent", 2)
    assert section.dtype == np.uint16
    assert same_bits(section, arrays[2][4].view(torch.uint16).numpy())
    fetch.scatter(2, memory, [1], count=1)
    assert torch.equal(arrays[2][1].view(torch.int16), arrays[2][4].view(torch.int16))


def test_closed_objects_say_so(store: quire.ChunkStore) -> None:
    space = store.space(PASSPORT)
    put_all(space)
    fetch = space.fetch(TOKENS)
    fetch.close()
    with pytest.raises(quire.ClosedError):
        fetch.section(0, "key", 0)
    late = space.fetch(TOKENS)
    store.close()
    assert same_bits(late.section(0, "key", 0), sections_of(0)["key", 0])  # it is here
    with pytest.raises(quire.ClosedError):
        space.fetch(TOKENS)
    with pytest.raises(quire.ClosedError):
        space.put(0, TOKENS, sections_of(0))
    assert space.wanted(TOKENS) == [False] * 4
