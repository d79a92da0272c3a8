"""KV beyond its request from Python: engines that share a store, and the program over a folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from program import run
from quire import identity, snapshot
from tiny_model import Shape, TinyModel

PROMPT = [3 + i % 90 for i in range(1100)]  # more than one chunk of so small a model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """With room for more than one chunk."""
    return TinyModel(tmp_path_factory.mktemp("roomy"), Shape(positions=2048))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digests are kept where no other test sees them."""
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def store() -> Iterator[quire.ChunkStore]:
    with quire.ChunkStore(ram_bytes=64 << 20) as store:
        yield store


def open_engine(tiny: TinyModel, **options: object) -> quire.Engine:
    fixed = {"dtype": "float32", "threads": 1, "kv_bytes": 8 << 20, "kv_load_always": True}
    fixed["kv_load_timeout"] = 60
    engine = quire.Engine(tiny.directory, **{**fixed, **options})  # type: ignore[arg-type]
    engine.wait_for_store()
    return engine


# ---- Engines


def test_folder_and_redis_have_the_time_of_the_engine(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []

    def make_store(**options: object) -> quire.ChunkStore:
        given.append(options)
        return quire.ChunkStore(**options)  # type: ignore[arg-type]

    monkeypatch.setattr("quire.engine.ChunkStore", make_store)
    for seconds, milliseconds in ((7.5, 7500), (1e-4, 1)):
        with contextlib.suppress(quire.TimeoutError):  # a disk may need more than 1 ms
            open_engine(tiny, kv_dir=tmp_path / "kv", kv_io_timeout=seconds).close()
        options = given.pop()
        assert options["disk_timeout_ms"] == options["redis_timeout_ms"] == milliseconds
    for seconds in (0, -1, float("nan"), 86401):
        with pytest.raises(quire.BadArgumentError, match="kv_io_timeout"):
            open_engine(tiny, kv_dir=tmp_path / "kv", kv_io_timeout=seconds)
    assert given == []


def test_engines_share_a_store(tiny: TinyModel, store: quire.ChunkStore) -> None:
    prompt = PROMPT[:300]
    with quire.Engine(tiny.directory, dtype="float32", threads=1) as alone:
        cold = alone.generate(prompt, max_tokens=8, logprobs=2)
        assert alone.store is None
        assert cold.usage.miss is None
    with open_engine(tiny, kv_store=store) as first:
        assert first.store is store
        assert first.generate(prompt, max_tokens=8).usage.miss == "not stored"
        assert first.stats()["stored_chunks"] > 0
    with open_engine(tiny, kv_store=store, page_size=16) as second:
        warm = second.generate(prompt, max_tokens=8, logprobs=2)
        assert warm.usage.ram_tokens == warm.usage.cached_tokens == len(prompt) - 1
        assert warm.usage.load_seconds > 0
        assert warm.usage.miss is None
        assert warm.samples == cold.samples
        again = second.generate(prompt, max_tokens=8, logprobs=2)
        assert again.usage.memory_tokens == len(prompt) - 1
        assert second.stats()["loaded_ram_tokens"] == len(prompt) - 1
    assert store.statistics()["tiers"]["ram"]["hits"] > 0  # and the caller's store is still open


def test_salts_keep_tenants_apart(tiny: TinyModel, store: quire.ChunkStore) -> None:
    prompt = PROMPT[:300]
    with open_engine(tiny, kv_store=store) as engine:
        first = engine.generate(prompt, max_tokens=4, cache_salt="ann")
        other = engine.generate(prompt, max_tokens=4, cache_salt=b"bob")
        assert other.usage.cached_tokens == 0
        assert other.ids == first.ids
        assert engine.generate(prompt, max_tokens=4, cache_salt=b"ann").usage.memory_tokens > 0
        with pytest.raises(quire.BadArgumentError, match="cache_salt size"):
            engine.generate(prompt, max_tokens=4, cache_salt="x" * 5000)
    with open_engine(tiny, kv_store=store) as engine:
        assert engine.generate(prompt, max_tokens=4).usage.cached_tokens == 0
        assert engine.generate(prompt, max_tokens=4, cache_salt="bob").usage.ram_tokens > 0


def test_what_was_computed_before_the_store_was_attached_is_kept(
    tiny: TinyModel, store: quire.ChunkStore
) -> None:
    prompt = PROMPT[:1100]
    engine = quire.Engine(tiny.directory, dtype="float32", threads=1, kv_store=store)
    engine.generate(prompt, max_tokens=2)  # at once: the digest may not be there yet
    engine.close()
    with open_engine(tiny, kv_store=store) as second:
        assert second.generate(prompt, max_tokens=2).usage.ram_tokens >= 1024


def test_one_store_only(tiny: TinyModel, store: quire.ChunkStore, tmp_path: Path) -> None:
    with pytest.raises(quire.BadArgumentError, match="two stores"):
        open_engine(tiny, kv_store=store, kv_dir=tmp_path)
    with pytest.raises(quire.BadArgumentError):
        quire.ChunkStore()
    with pytest.raises(quire.BadArgumentError, match="durability"):
        quire.ChunkStore(ram_bytes=1 << 20, durability="paper")  # type: ignore[arg-type]


def test_a_store_that_was_closed_says_so() -> None:
    store = quire.ChunkStore(ram_bytes=1 << 20)
    store.close()
    store.close()
    with pytest.raises(quire.ClosedError):
        store.statistics()


def test_lists_gets_and_verifies(tiny: TinyModel, store: quire.ChunkStore) -> None:
    with open_engine(tiny, kv_store=store) as engine:
        engine.generate(PROMPT, max_tokens=2)
    chunks = sorted(store.list("ram"), key=lambda chunk: chunk.first_token or 0)
    assert [chunk.tokens for chunk in chunks] == [1024, 76]
    assert [chunk.first_token for chunk in chunks] == [0, 1024]
    chunk = store.get("ram", chunks[1].key)
    assert chunk.tokens == PROMPT[1024:]
    assert chunk.tail
    assert chunk.context == chunks[0].key
    assert len(chunk.data) == chunks[1].bytes
    assert store.verify("ram") == 0
    assert store.tiers == ["ram"]
    assert ("stored", "ram", chunks[0].key) in store.take_events()
    with pytest.raises(quire.NotFoundError):
        store.get("ram", "0" * 64)
    with pytest.raises(quire.BadArgumentError, match="'paper' is none of 'ram', 'disk', 'redis'"):
        store.list("paper")  # type: ignore[arg-type]


# ---- What is done with chunks


@pytest.fixture
def filled(
    tiny: TinyModel, tmp_path: Path
) -> Iterator[tuple[quire.ChunkStore, quire.Passport, list[str]]]:
    """A store of RAM and a folder that has PROMPT under the salt "ann", its passport, its keys."""
    # However long the disk takes.
    with quire.ChunkStore(tmp_path / "kv", ram_bytes=64 << 20, disk_timeout_ms=60_000) as store:
        with open_engine(tiny, kv_store=store) as engine:
            engine.generate(PROMPT, max_tokens=2, cache_salt="ann")
        store.flush()
        (passport,) = store.passports(tiny.directory)
        yield store, passport, quire.chunk_keys(passport, PROMPT, cache_salt="ann")


Filled = tuple[quire.ChunkStore, quire.Passport, list[str]]


def test_a_prompt_has_the_keys_of_its_chunks(filled: Filled, tiny: TinyModel) -> None:
    store, passport, keys = filled
    listed = sorted(store.list("disk"), key=lambda chunk: chunk.first_token or 0)
    assert [chunk.key for chunk in listed] == keys
    assert passport.chunk_tokens == 1024
    assert passport.revision == identity.model_identity(tiny.directory)["revision"]
    assert quire.chunk_keys(passport, PROMPT[:1024], cache_salt="ann") == keys[:1]
    assert quire.chunk_keys(passport, PROMPT, cache_salt=b"ann") == keys
    assert not set(quire.chunk_keys(passport, PROMPT)) & set(keys)
    assert store.known_prefix(passport, PROMPT, cache_salt="ann") == 1100
    assert store.known_prefix(passport, [*PROMPT[:1024], 1, 2], cache_salt="ann") == 1024
    assert store.known_prefix(passport, PROMPT) == 0
    with pytest.raises(quire.BadArgumentError):
        quire.chunk_keys(passport, [1 << 40])
    with pytest.raises(TypeError, match="one text"):
        store.remove(keys[0])
    with pytest.raises(quire.BadArgumentError):
        store.remove(["xyz"])


def test_passports_come_from_the_folder(filled: Filled, tmp_path: Path) -> None:
    _, passport, keys = filled
    with quire.ChunkStore(tmp_path / "kv", folder_use="look", disk_timeout_ms=60_000) as other:
        assert other.passports() == [passport]
        got = other.prefetch(passport, PROMPT, cache_salt="ann")
        assert (got.tokens, got.miss) == (1100, None)
        assert other.statistics()["prefetches"] == 1
    with quire.ChunkStore(ram_bytes=64 << 20) as other:
        assert other.passports() == []
        with pytest.raises(quire.BadArgumentError, match="was not added"):
            other.prefetch(passport, PROMPT)


def test_prefetches_into_ram(filled: Filled) -> None:
    store, passport, keys = filled
    store.set_quota(passport, bytes_max=1, cache_salt="ann")
    assert store.gc("ram") > 0
    assert store.list("ram") == []
    store.set_quota(passport, cache_salt="ann")
    missing = store.prefetch(passport, [*PROMPT[:1024], 1, 2], cache_salt="ann")
    assert (missing.tokens, missing.miss) == (1024, "not stored")
    assert [chunk.key for chunk in store.list("ram")] == keys[:1]
    whole = store.prefetch(passport, PROMPT, cache_salt="ann", timeout=60)
    assert (whole.tokens, whole.miss) == (1100, None)
    assert {chunk.key for chunk in store.list("ram")} == set(keys)
    with pytest.raises(quire.BadArgumentError, match="timeout"):
        store.prefetch(passport, PROMPT, timeout=-1)


def test_a_pinned_chunk_stays(filled: Filled) -> None:
    store, passport, keys = filled
    assert store.pin(keys) == 2
    assert store.pin(keys[1:]) == 1
    assert store.pin(["0" * 64]) == 0
    store.set_quota(passport, bytes_max=1, cache_salt="ann")
    assert store.gc("ram") == store.gc("disk") == 0
    assert store.statistics()["pins"] == 3
    assert store.unpin(keys) == 2
    assert store.gc("ram") == 0  # pins are counted, and the first chunk has one hanging on it
    assert store.unpin(keys) == 1
    assert store.unpin(keys) == 0
    assert store.gc("ram") > 0 and store.gc("disk") > 0
    with pytest.raises(quire.BadArgumentError, match="bytes_guaranteed"):
        store.set_quota(passport, bytes_max=1, bytes_guaranteed=2)


def test_a_pin_ends_by_itself(tmp_path: Path, tiny: TinyModel) -> None:
    with pytest.raises(quire.BadArgumentError, match="pin_timeout"):
        quire.ChunkStore(tmp_path / "kv", pin_timeout=0)
    with quire.ChunkStore(ram_bytes=64 << 20, pin_timeout=0.001) as store:
        with open_engine(tiny, kv_store=store) as engine:
            engine.generate(PROMPT, max_tokens=2)
        keys = [chunk.key for chunk in store.list("ram")]
        assert store.pin(keys) == 2
        while store.statistics()["forced_unpins"] < 2:  # the store's own thread ends them
            store.pin([])


def test_the_folder_keeps_priorities_and_times_to_live(filled: Filled, tmp_path: Path) -> None:
    store, passport, keys = filled
    assert store.set_priority(keys, 100) == 2
    assert store.set_priority(["0" * 64], 100) == 0
    for wrong in (-1, 101, 1 << 40):
        with pytest.raises(quire.BadArgumentError, match="priority"):
            store.set_priority(keys, wrong)
    records = [os.getxattr(file, "user.quire.worth") for file in (tmp_path / "kv").rglob("*.qkv")]
    assert [int.from_bytes(record[16:20], "little") for record in records] == [100, 100]
    assert store.set_ttl(keys[1:], 3600) == 1
    with quire.ChunkStore(tmp_path / "kv") as other:
        chunks = {chunk.key: chunk for chunk in other.list("disk")}
        assert chunks[keys[0]].expires is None
        assert (chunks[keys[1]].expires or 0) > chunks[keys[1]].created + 3000
    assert store.set_ttl(keys, 0) == 2
    assert {chunk.expires for chunk in store.list("disk")} == {None}
    with pytest.raises(quire.BadArgumentError, match="ttl"):
        store.set_ttl(keys, -1)
    with quire.ChunkStore(tmp_path / "kv", folder_use="look") as looking:
        with pytest.raises(quire.IoError):
            looking.set_priority(keys, 3)


def test_the_priority_of_what_a_store_puts(tiny: TinyModel, tmp_path: Path) -> None:
    with quire.ChunkStore(tmp_path / "kv", priority=7) as store:
        with open_engine(tiny, kv_store=store) as engine:
            engine.generate(PROMPT, max_tokens=2)
    (first, _) = (tmp_path / "kv").rglob("*.qkv")
    assert int.from_bytes(os.getxattr(first, "user.quire.worth")[16:20], "little") == 7
    with pytest.raises(quire.BadArgumentError, match="priority"):
        quire.ChunkStore(tmp_path / "kv", priority=101)


def test_a_touched_chunk_is_evicted_later(tiny: TinyModel) -> None:
    first, second = PROMPT[:600], PROMPT[100:700]
    with quire.ChunkStore(ram_bytes=64 << 20, eviction="lru") as store:
        with open_engine(tiny, kv_store=store) as engine:
            engine.generate(first, max_tokens=1)
            engine.generate(second, max_tokens=1)
        (passport,) = store.passports()
        keys = [quire.chunk_keys(passport, prompt)[0] for prompt in (first, second)]
        sizes = {chunk.key: chunk.bytes for chunk in store.list("ram")}
        assert set(sizes) == set(keys)
        store.touch(keys[:1])
        store.set_quota(passport, bytes_max=max(sizes.values()))
        assert store.gc("ram") > 0
        assert [chunk.key for chunk in store.list("ram")] == keys[:1]


def test_removes_from_all_tiers(filled: Filled, tiny: TinyModel) -> None:
    store, passport, keys = filled
    assert store.remove(keys[1:]) == 1
    assert store.remove(keys[1:]) == 0
    assert [chunk.key for tier in store.tiers for chunk in store.list(tier)] == [keys[0]] * 2
    assert store.clear(passport) == 0  # of another salt
    assert store.clear(passport, cache_salt="ann") == 2  # a copy in each tier
    assert store.list("ram") == store.list("disk") == []


# ---- Digests


def test_digests_are_kept_until_a_file_changes(tiny: TinyModel, tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(tiny.directory).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert identity.kept_identity(folder) is None
    first = identity.model_identity(folder)
    assert identity.kept_identity(folder) == first
    (kept,) = (home / "identities").iterdir()
    content = kept.read_text()
    weights = next(iter(sorted(folder.glob("*.safetensors"))))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    os.utime(weights, ns=(1, 1))
    assert identity.kept_identity(folder) is None
    assert identity.model_identity(folder)["revision"] != first["revision"]
    kept.write_text(content[:-5])
    assert identity.kept_identity(folder) is None  # damaged is as good as absent


# ---- The program


def usage_line(err: str) -> str:
    (line,) = [line for line in err.splitlines() if "prompt tokens not computed" in line]
    return line


IDS = ",".join(str(id) for id in PROMPT)
ANSWER = ("--prompt-ids", IDS, "--max-tokens", "6", "--kv-load-timeout", "60")


def test_a_second_run_does_not_compute_what_the_first_did(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "kv")
    code, cold, err = run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder)
    assert code == 0
    assert "0 of 1100 prompt tokens not computed" in usage_line(err)
    assert "this once" in err
    code, warm, err = run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder)
    assert code == 0
    assert "1099 of 1100 prompt tokens not computed: 1099 disk" in usage_line(err)
    assert "this once" not in err
    assert warm == cold
    code, out, _ = run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder, "--json")
    usage = json.loads(out)["usage"]
    assert usage["disk_tokens"] == usage["cached_tokens"] == 1099


def test_tells_of_reading_files_that_are_read_by_then(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class EngineOfAFastDisk(quire.Engine):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            self.wait_for_store()

    monkeypatch.setattr(quire, "Engine", EngineOfAFastDisk)
    for told in (True, False):
        code, _, err = run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(tmp_path / "kv"))
        assert code == 0
        assert ("this once" in err) == told


def test_a_flipped_bit_is_a_miss(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"
    _, cold, _ = run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(folder))
    largest = max(
        (file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    code, out, err = run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(folder))
    assert code == 0
    assert out == cold
    assert re.search(r"0 of 1100 prompt tokens not computed .*; the store: corrupt", usage_line(err))
    code, out, err = run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(folder))
    assert out == cold
    assert "1099 disk" in usage_line(err)  # what was damaged was written anew


def test_looks_into_a_folder(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "kv")
    run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder)
    code, out, err = run(capsys, "store", "ls", folder, "--json")
    chunks = [json.loads(line) for line in out.splitlines()]
    assert [chunk["tokens"] for chunk in chunks] == [1024, 76]
    assert "2 chunks" in err
    copy = tmp_path / "chunk"
    code, out, _ = run(
        capsys, "store", "get", folder, chunks[0]["key"], "--output", str(copy), "--json"
    )
    assert code == 0
    assert json.loads(out)["tokens"] == PROMPT[:1024]
    assert copy.stat().st_size == json.loads(out)["bytes"]
    code, out, _ = run(capsys, "store", "stats", folder, "--json")
    stats = json.loads(out)
    assert (stats["chunks"], stats["tokens"], stats["models"]) == (2, 1100, 1)
    assert run(capsys, "store", "verify", folder)[0] == 0
    assert run(capsys, "store", "gc", folder)[0] == 0
    assert "2 chunks" in run(capsys, "store", "ls", folder)[2]


def test_verify_finds_what_is_damaged(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"
    run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(folder))
    largest = max(
        (file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    code, out, _ = run(capsys, "store", "verify", str(folder), "--json")
    assert (code, json.loads(out)) == (1, {"damaged": 1})
    assert run(capsys, "store", "verify", str(folder))[0] == 0


def test_keys_keep_strangers_chunks_out(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "kv")
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    _, cold, _ = run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder)
    signed = ("--kv-dir", folder, "--kv-key-file", str(key))
    _, out, err = run(capsys, "generate", *model, *ANSWER, *signed)
    assert out == cold
    assert "0 of 1100" in usage_line(err)
    _, out, err = run(capsys, "generate", *model, *ANSWER, *signed)
    assert out == cold
    assert "1099 disk" in usage_line(err)


def test_a_file_of_prompts_tells_the_sum(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": PROMPT, "max_tokens": 2}) + "\n")
    arguments = ("--file", str(prompts), "--kv-dir", str(tmp_path / "kv"))
    arguments += ("--kv-load-timeout", "60")
    code, cold, err = run(capsys, "generate", *model, *arguments)
    assert code == 0
    assert "from the store: none" in usage_line(err)
    code, _, err = run(capsys, "generate", *model, *arguments)
    assert "from the store: 1099 disk" in usage_line(err)


def keys_of(capsys: pytest.CaptureFixture[str], folder: str) -> list[str]:
    lines = run(capsys, "store", "ls", folder, "--json")[1].splitlines()
    return [json.loads(line)["key"] for line in lines]


def test_chunks_by_a_prompt_or_by_their_keys(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "kv")
    of = ("--model", model[0], "--prompt-ids", IDS)

    def store(*words: str, code: int = 0) -> dict[str, object]:
        got, out, err = run(capsys, "store", *words, "--json")
        assert got == code, err
        return json.loads(out) if out else {"err": err}

    run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder)
    first = keys_of(capsys, folder)[0]
    run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder, "--cache-salt", "ann")
    keys = keys_of(capsys, folder)
    assert len(keys) == 4
    assert store("pin", folder, *of) == {"pinned": 2}
    worths = [os.getxattr(file, "user.quire.worth")[16] for file in Path(folder).rglob("*.qkv")]
    assert sorted(worths) == [50, 50, 100, 100]
    assert store("unpin", folder, *keys) == {"unpinned": 4}
    expiring = store("ttl", folder, "3600", *of, "--cache-salt", "ann")
    assert expiring["chunks"] == 2 and expiring["expires"] is not None
    assert store("ttl", folder, "0", *keys) == {"chunks": 4, "expires": None}
    assert store("rm", folder, first) == {"removed": 1}
    assert "none of these chunks" in str(store("rm", folder, first, code=1)["err"])
    assert len(keys_of(capsys, folder)) == 3
    freed = store("quota", folder, "1", "--model", model[0], "--cache-salt", "ann")
    assert int(str(freed["bytes_freed"])) > 0
    assert len(keys_of(capsys, folder)) == 1
    assert "tokens; was it" in str(store("rm", folder, *of, "--cache-salt", "bob", code=1)["err"])
    assert store("rm", folder, "--all", "--model", model[0]) == {"removed": 1}
    assert keys_of(capsys, folder) == []


def test_a_time_that_no_calendar_has(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended each command that shows the chunk."""
    folder = str(tmp_path / "kv")
    run(capsys, "generate", *model, *ANSWER, "--kv-dir", folder)
    first = keys_of(capsys, folder)[0]
    for words in (("ttl", folder, "1e12", first), ("ls", folder), ("get", folder, first)):
        code, out, err = run(capsys, "store", *words)
        assert code == 0 and " s after 1970" in out, err


def test_chunks_of_a_text(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "kv")
    file = tmp_path / "prompt.txt"
    text = "a b c d e f g h " * 20
    file.write_text(text)
    few = ("--max-tokens", "1")
    assert run(capsys, "generate", *model, text, "--kv-dir", folder, *few)[0] == 0
    assert run(capsys, "generate", *model, text, "--raw", "--kv-dir", folder, *few)[0] == 0
    kept = keys_of(capsys, folder)
    code, out, _ = run(capsys, "store", "rm", folder, "--model", model[0], "--prompt", text)
    assert code == 0 and "1" in out
    raw = ("--model", model[0], "--prompt-file", str(file), "--raw")
    assert run(capsys, "store", "rm", folder, *raw)[0] == 0
    assert len(keys_of(capsys, folder)) == len(kept) - 2
    assert run(capsys, "store", "rm", folder, *raw)[0] == 1


WRONG_WORDS = {
    "rm DIR": "name chunks",
    "rm DIR KEY --prompt x": "beside keys",
    "rm DIR KEY --all": "beside keys",
    "rm DIR --all --prompt x": "beside --all",
    "rm DIR --prompt x --prompt-ids 1": "second source",
    "rm DIR --raw --prompt-ids 1": "--raw has no effect",
    "ls DIR --all": "goes with rm",
    "ls DIR --model x": "no effect",
    "gc DIR --prompt x": "no effect",
    "quota DIR": "STORE and SIZE",
    "quota DIR much": "not a size",
    "quota DIR 0": "rm --all",
    "quota DIR 1 --prompt x": "no effect",
    "ttl DIR soon KEY": "SECONDS",
    "ttl DIR -1 KEY": "SECONDS",
    "rm DIR KEY --kv-redis redis://h:1": "goes with prefetch",
    "prefetch DIR --prompt-ids 1": "--kv-redis",
    "pin redis://h:1 KEY": "no effect on Redis",
    "quota redis://h:1 1": "no effect on Redis",
    "rm redis://h:1 --all --model DIR": "--all removes the chunks of all models",
    "prefetch DIR KEY --kv-redis redis://h:1": "give STORE, and a prompt",
    "prefetch DIR --kv-redis redis://h:1": "name chunks by a prompt",
}


@pytest.mark.parametrize("words", WRONG_WORDS)
def test_words_that_do_not_go_together(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"
    quire.ChunkStore(folder).close()
    before = contents(folder)
    given = [{"DIR": str(folder), "KEY": "0" * 64}.get(word, word) for word in words.split()]
    code, out, err = run(capsys, "store", *given)
    assert (code, out) == (2, ""), err
    assert WRONG_WORDS[words] in err and err.count("\n") == 1
    assert contents(folder) == before


def test_help_names_what_an_action_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It offered keys to prefetch, and had --all and quota do what they do not."""
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run(capsys, "store", "--help")
    help = " ".join(out.split())
    assert code == 0
    assert "prefetch STORE PROMPT " in help and "prefetch STORE CHUNKS" not in help
    assert "on Redis: all of a salt, of all models" in help
    assert "rm: all of the model and the salt; on Redis of all models" in help
    assert "until those of each element type and kernel path take SIZE" in help


def test_a_quota_is_that_of_each_element_type(
    tiny: TinyModel, model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"
    for dtype in ("float32", "bfloat16"):
        with open_engine(tiny, dtype=dtype, kv_dir=folder) as engine:
            engine.generate(PROMPT, max_tokens=1)
            engine.flush_store()

    def bytes_of_each() -> dict[str, int]:
        each: dict[str, int] = {}
        for line in run(capsys, "store", "ls", str(folder), "--json")[1].splitlines():
            chunk = json.loads(line)
            each[chunk["fingerprint"]] = each.get(chunk["fingerprint"], 0) + chunk["bytes"]
        return each

    before = bytes_of_each()
    assert len(before) == 2
    small, large = sorted(before, key=lambda fingerprint: before[fingerprint])
    size = before[large] - 1
    assert run(capsys, "store", "quota", str(folder), str(size), "--model", model[0])[0] == 0
    after = bytes_of_each()
    assert after[small] == before[small] and after[large] <= size


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files and folders below, with what is in the files."""
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("action", ["ls", "stats", "verify", "gc", "get", "rm", "pin", "unpin"])
def test_a_folder_that_is_no_store_is_an_error_and_stays_as_it_is(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "lock").write_text("of another program")
    before = contents(tmp_path)
    words = [str(folder)] if action in ("ls", "stats", "verify", "gc") else [str(folder), "0" * 64]
    code, out, err = run(capsys, "store", action, *words)
    assert (code, out) == (1, "") and str(folder) in err and "--kv-dir" in err
    assert contents(tmp_path) == before


def test_looking_changes_nothing(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"
    run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(folder))
    before = contents(folder)
    assert run(capsys, "store", "ls", str(folder))[0] == 0
    assert run(capsys, "store", "stats", str(folder))[0] == 0
    assert contents(folder) == before
    with quire.ChunkStore(folder, folder_use="look") as store:
        assert store.verify("disk") == 0 and store.list("disk")
    assert contents(folder) == before
    for use in ("look", "existing"):
        with pytest.raises(quire.NotFoundError, match="absent"):
            quire.ChunkStore(tmp_path / "absent", folder_use=use)  # type: ignore[arg-type]
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 15])
def test_a_key_that_signs_nothing_or_can_be_guessed_is_refused(
    key: bytes, model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_bytes(key)
    folder = tmp_path / "kv"
    signed = ("--kv-key-file", str(file))
    code, out, err = run(capsys, "generate", *model, *ANSWER, "--kv-dir", str(folder), *signed)
    assert (code, out) == (2, "") and "--kv-key-file" in err and "at least 16" in err
    assert not folder.exists()
    quire.ChunkStore(folder).close()
    code, out, err = run(capsys, "store", "ls", str(folder), *signed)
    assert (code, out) == (2, "") and "--kv-key-file" in err and "at least 16" in err
    with pytest.raises(quire.BadArgumentError, match="at least 16"):
        quire.Engine(model[0], kv_dir=folder, kv_key_file=file)
    if key:
        with pytest.raises(quire.BadArgumentError, match="at least 16"):
            quire.ChunkStore(folder, key=key)


@pytest.mark.parametrize("key", [16, "x" * 16, None])
def test_a_key_is_bytes(key: object) -> None:
    with pytest.raises(TypeError, match="key must be bytes"):
        quire.ChunkStore(ram_bytes=1 << 20, key=key)  # type: ignore[arg-type]


def test_a_salt_of_the_command_line(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*arguments: str) -> str:
        code, _, err = run(
            capsys, "generate", *model, *ANSWER, "--kv-dir", str(tmp_path / "kv"), *arguments
        )
        assert code == 0
        return usage_line(err)

    assert "0 of 1100" in found("--cache-salt", "ann")
    assert "0 of 1100" in found()
    assert "0 of 1100" in found("--cache-salt", "bob")
    assert "1099 disk" in found("--cache-salt", "ann")


def test_a_snapshot_with_a_salt(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "chat.quire")
    salt = ("--cache-salt", "the secret of ann")
    assert run(capsys, "snapshot", "save", file, *model, "--prompt-ids", "5,6,7,8", *salt)[0] == 0
    assert b"secret" not in Path(file).read_bytes()
    with quire.Engine(model[0], dtype="float32", threads=1) as engine:
        info = snapshot.restore(engine, file, cache_salt="the secret of ann")
        more = [*info.tokens, 9, 10]
        assert engine.generate(more, max_tokens=1).usage.cached_tokens == 0
        salted = engine.generate(more, max_tokens=1, cache_salt="the secret of ann")
        assert salted.usage.cached_tokens == len(info.tokens)
        with pytest.raises(quire.NotFoundError):
            snapshot.save(engine, info.tokens, file, cache_salt="bob")
    code, out, _ = run(
        capsys, "snapshot", "restore", file, *model, "--json", "--max-tokens", "2", *salt
    )
    assert code == 0 and json.loads(out)["usage"]["cached_tokens"] > 0


def test_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "store", "ls", str(tmp_path / "absent"))
    assert code == 1
    assert "there is no such folder" in err
    assert run(capsys, "store", "ls")[0] == 2
    assert run(capsys, "store", "get", str(tmp_path))[0] == 2
    assert run(capsys, "store", "ls", str(tmp_path), "--output", "x")[0] == 2
