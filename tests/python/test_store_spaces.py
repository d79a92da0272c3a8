"""Chunks of foreign engines in a store: put from their arrays, brought back into their blocks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
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
_ARRAY = np.zeros((BLOCK, 2, 8), np.float16)


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
    assert fetch.wait(60.0)
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
    assert fetch.wait(60.0)
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
        assert fetch.wait(60.0)
        assert fetch.ready == 0
    image = [b"", b"image a"]
    assert space.known_prefix(TOKENS, extras=image) == 1
    space.put(1, TOKENS, sections_of(1, seed=9), extras=image)
    fetch = space.fetch(TOKENS, extras=image)
    assert fetch.wait(60.0)
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
    with quire.ChunkStore(tmp_path, disk_timeout_ms=60_000) as store:
        fetch = store.space(PASSPORT).fetch(TOKENS)
        engine = Engine(planes=True)
        assert not fetch.wait_layer(0, 60.0)
        assert fetch.wait(60.0)
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
    assert fetch.wait(60.0)
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, f, m: f.scatter(0, m, [2**40] * 2), "blocks has the numbers 1099511627776 to"),
        (lambda s, f, m: f.scatter(0, m, [-1, 0]), "blocks has the numbers -1 to 0"),
        (lambda s, f, m: f.scatter(0, m, "ab"), "blocks must be integers"),
        (lambda s, f, m: f.scatter(0, None, [0, 1]), "must be a BlockMemory, not NoneType"),
        (lambda s, f, m: f.section(0, 5, 0), "kind must be a text, not int"),
        (lambda s, f, m: f.section(0, "\ud800", 0), "kind has a lone surrogate"),
        (lambda s, f, m: s.put(0, TOKENS, memory=m, blocks=[0, 2**31]), "blocks has the numbers"),
        (lambda s, f, m: s.put(0, TOKENS, memory=5, blocks=[0, 1]), "be a BlockMemory, not int"),
        (lambda s, f, m: s.put(0, TOKENS, {"key": _ARRAY}), "'key' names no section"),
        (lambda s, f, m: s.put(0, TOKENS, {("key", 0, 1): _ARRAY}), "names no section"),
        (lambda s, f, m: s.put(0, TOKENS, {(5, 0): _ARRAY}), "kind of a section must be a text"),
        (
            lambda s, f, m: s.put(0, TOKENS, {("key", 2): _ARRAY.astype(object)}),
            "the array of key of 2 cannot be read where it is: DLPack only supports",
        ),
        (
            lambda s, f, m: s.put(0, TOKENS, {("key", 2): _ARRAY.astype(">f2")}),
            "the array of key of 2 cannot be read where it is: DLPack only supports native byte",
        ),
        (
            lambda s, f, m: s.put(0, TOKENS, sections_of(0), recompute_seconds=float("nan")),
            "recompute_seconds is nan; it must be finite and at least 0",
        ),
        (
            lambda s, f, m: s.put(0, TOKENS, sections_of(0), recompute_seconds=float("inf")),
            "recompute_seconds is inf",
        ),
        (
            lambda s, f, m: s.fetch(TOKENS, compute_seconds_per_token=-1),
            "compute_seconds_per_token is -1.0; it must be finite and at least 0",
        ),
        (lambda s, f, m: s._store.space([5]), "a passport is a mapping of fields, not list"),
        (lambda s, f, m: s._store.space({**PASSPORT, "model": "\ud800"}), "a lone surrogate"),
        (lambda s, f, m: s._store.known_prefix(None, [1]), "be a quire.Passport, .* not NoneType"),
        (lambda s, f, m: s._store.clear("m"), "must be a quire.Passport, .* not str"),
        (lambda s, f, m: s._store.prefetch({}, [1]), "must be a quire.Passport, .* not dict"),
        (lambda s, f, m: s._store.set_quota(5), "must be a quire.Passport, .* not int"),
        (lambda s, f, m: quire.chunk_keys(5, [1]), "must be a quire.Passport, .* not int"),
        (lambda s, f, m: quire.ChunkStore(5), "directory must be a path, not int"),
        (lambda s, f, m: quire.ChunkStore("/tmp/a\0b"), "directory is empty or has a NUL"),
        (lambda s, f, m: quire.ChunkStore(redis=5), "redis must be a text, not int"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(
    store: quire.ChunkStore, call: Callable[..., object], message: str
) -> None:
    space, memory = store.space(PASSPORT), Engine(planes=True).memory
    put_all(space)
    fetch = space.fetch(TOKENS)
    assert fetch.wait(60.0)
    before = len(store.list("ram"))
    with pytest.raises((quire.BadArgumentError, TypeError), match=message):
        call(space, fetch, memory)
    assert len(store.list("ram")) == before


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
        assert fetch.wait(60.0)
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
                    with space.fetch(tokens, timeout=60.0) as fetch:
                        assert fetch.wait(60.0)
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


# ---- Orders within blocks

class OrderedEngine:
    """Keys and values of two tokens in one block, whose elements lie in an order of its own; the
    last element of a block is neither."""

    def __init__(self, seed: int, blocks: int = 5) -> None:
        random = np.random.default_rng(seed)
        places = random.permutation(2 * 2 * 2 * 8) * 2
        self.layers = [random.integers(0, 2**16, (blocks, 65), np.uint16) for _ in range(LAYERS)]
        self.places = {"key": places[:32], "value": places[32:]}
        orders = {kind: quire.BlockOrder(found, 2) for kind, found in self.places.items()}
        names: list[Any] = [(kind, i) for i in range(LAYERS) for kind in ("key", "value")]
        self.memory = quire.BlockMemory(
            {name: self.layers[name[1]] for name in names},
            {name: orders[name[0]] for name in names},
        )

    def rows(self, kind: str, layer: int, blocks: list[int]) -> np.ndarray:
        return self.layers[layer][blocks][:, self.places[kind] // 2].reshape(-1, 2, 8)


def test_engines_with_orders_of_their_own_share_chunks(store: quire.ChunkStore) -> None:
    space = store.space(PASSPORT)
    first, second = OrderedEngine(1), OrderedEngine(2)
    space.put(0, TOKENS, memory=first.memory, blocks=[3, 0])
    fetch = space.fetch(TOKENS)
    assert fetch.wait(60.0)
    before = [layer.copy() for layer in second.layers]
    for layer in range(LAYERS):
        fetch.scatter(layer, second.memory, [4, 1], count=1)
        for kind in ("key", "value"):
            rows = first.rows(kind, layer, [3, 0])
            assert same_bits(fetch.section(0, kind, layer), rows)
            assert same_bits(second.rows(kind, layer, [4, 1]), rows)
        assert same_bits(second.layers[layer][[0, 2, 3]], before[layer][[0, 2, 3]])
        assert np.array_equal(second.layers[layer][:, 64], before[layer][:, 64])


@pytest.mark.parametrize(
    ("offsets", "run_bytes", "message"),
    [
        ([0, 15], 2, "the run of 2 bytes at 15 is not within a block of 16"),
        ([0, 1], 2, "runs of 2 bytes overlap at 0"),
        ([-1], 2, "offset -1 of an order does not fit 32 bits"),
        ([2**32], 2, "does not fit 32 bits"),
        ([], 2, r"must be int64 \[n\], n at least 1"),
        ([[0], [2]], 2, r"must be int64 \[n\], n at least 1"),
        ([0], 0, "run_bytes is 0; it must be at least 1"),
    ],
)
def test_orders_that_are_none_are_named(offsets: list[Any], run_bytes: int, message: str) -> None:
    order = quire.BlockOrder(np.array(offsets, np.int64), run_bytes)
    with pytest.raises(quire.BadArgumentError, match=message):
        quire.BlockMemory({("key", 0): np.zeros((3, 16), np.uint8)}, {("key", 0): order})


def test_an_order_takes_a_section_and_blocks_without_gaps() -> None:
    order = quire.BlockOrder(np.arange(4), 1)
    whole = np.zeros((3, 2, 4), np.uint8)
    with pytest.raises(quire.BadArgumentError, match="no array for the order of"):
        quire.BlockMemory({("key", 0): whole}, {("value", 0): order})
    with pytest.raises(quire.BadArgumentError, match="a block of 2 rows takes no order"):
        quire.BlockMemory({("key", 0): whole[:, :, :2]}, {("key", 0): order})


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_closed_store_has_no_threads(tmp_path: Path) -> None:
    """Though a space and a fetch of it are there still."""
    before = _threads()
    store = quire.ChunkStore(tmp_path, ram_bytes=1 << 20, disk_timeout_ms=60_000)
    space = store.space(PASSPORT)
    put_all(space)
    store.flush()
    fetch = space.fetch(TOKENS)
    assert fetch.wait(60.0) and fetch.ready == 4
    section = fetch.section(0, "key", 0)
    assert _threads() > before
    store.close()
    end = time.monotonic() + 60  # the system forgets a thread some time after it is joined
    while _threads() > before:
        assert time.monotonic() < end
    assert same_bits(section, sections_of(0)["key", 0])
    with pytest.raises(quire.ClosedError):
        space.fetch(TOKENS)
    with pytest.raises(quire.ClosedError):
        space.put(0, TOKENS, sections_of(0))
    fetch.close()
    with quire.ChunkStore(tmp_path, disk_timeout_ms=60_000) as again:
        fetch = again.space(PASSPORT).fetch(TOKENS)
        assert fetch.wait(60.0) and fetch.ready == 4
