"""KV beyond its request from Python: engines that share a store, and the program over a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from program import run
from quire import identity
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
    engine = quire.Engine(tiny.directory, **{**fixed, **options})  # type: ignore[arg-type]
    engine.wait_for_store()
    return engine


# ---- Engines


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
ANSWER = ("--prompt-ids", IDS, "--max-tokens", "6")


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
    code, cold, err = run(capsys, "generate", *model, *arguments)
    assert code == 0
    assert "from the store: none" in usage_line(err)
    code, _, err = run(capsys, "generate", *model, *arguments)
    assert "from the store: 1099 disk" in usage_line(err)


def test_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "store", "ls", str(tmp_path / "absent"))
    assert code == 1
    assert "there is no such folder" in err
    assert run(capsys, "store", "ls")[0] == 2
    assert run(capsys, "store", "get", str(tmp_path))[0] == 2
    assert run(capsys, "store", "ls", str(tmp_path), "--output", "x")[0] == 2
