"""LoRA adapters under quire.vllm.QuireConnector. The fake forward depends on what the fake vLLM has
read of an adapter's file: KV of another version fails the test."""

from __future__ import annotations

import logging
import os
import shutil
import time
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import quire
from fake_vllm import BLOCK, FakeRequest, WrongBytes
from quire.vllm import _adapters, _worker
from vllm_pair import PROMPT, Pair, fake_passport, walk

passport = pytest.fixture(autouse=True)(fake_passport)

_NOW = time.time_ns
_FOUND = len(PROMPT) // BLOCK * BLOCK


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start in an hour: all files are older."""
    monkeypatch.setattr(_adapters.time, "time_ns", lambda: _NOW() + 3600 * 10**9)


def write(folder: Path, content: bytes = b"one") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def lora(folder: Path | str, name: str = "a", number: int = 1, **fields: Any) -> Any:
    """vLLM's LoRARequest."""
    return types.SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(folder), **fields
    )


@pytest.fixture(params=[False, True], ids=["one process", "two processes"])
def apart(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _ask(pair: Pair, request: Any) -> int:
    return pair.generate(PROMPT, lora_request=request).external


def _refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for each in caplog.records if "the LoRA" in (line := each.getMessage())]


def test_an_adapter_is_found_by_its_files_and_not_by_its_name(tmp_path: Path, apart: bool) -> None:
    one = write(tmp_path / "one")
    pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
    assert [_ask(pair, lora(one)), _ask(pair, lora(one)), _ask(pair, None)] == [0, _FOUND, 0]
    pair.close()
    copy = shutil.copytree(one, tmp_path / "copy")
    pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
    assert _ask(pair, lora(copy, "b", 7)) == _FOUND
    other = write(tmp_path / "other", b"two")
    assert _ask(pair, lora(other, "c", 8)) == 0
    assert _ask(pair, lora(other, "c", 8)) == _FOUND
    assert _ask(pair, None) == _FOUND
    assert "errors" not in pair.stats()
    pair.close()
    pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
    assert _ask(pair, lora(other)) == _FOUND, "the name and the number that were the other one's"
    assert _ask(pair, lora(one, "b", 2, is_3d_lora_weight=True)) == 0
    pair.close()


@pytest.mark.parametrize("what", ["content", "new file", "folder", "link"])
def test_an_adapter_that_changes_is_neither_found_nor_saved(
    what: str, tmp_path: Path, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has the first version, another process has the second one."""
    one, two = write(tmp_path / "one"), write(tmp_path / "two", b"two")
    link = tmp_path / "link"
    link.symlink_to(one)
    asked = lora(link)
    pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
    assert [_ask(pair, asked), _ask(pair, asked)] == [0, _FOUND]
    if what == "content":
        facts = (one / "adapter_model.safetensors").stat()
        (one / "adapter_model.safetensors").write_bytes(b"two")
        os.utime(one / "adapter_model.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    elif what == "new file":
        (one / "new_embeddings.bin").write_bytes(b"new")
    elif what == "folder":
        one.rename(tmp_path / "before")
        two.rename(one)
    else:
        link.unlink()
        link.symlink_to(two)
    with caplog.at_level(logging.WARNING, "quire.vllm"):
        longer = [*PROMPT, 9, 9, 9, 9]
        assert [_ask(pair, asked), pair.generate(longer, lora_request=asked).external] == [0, 0]
        write(tmp_path / "again")
        assert _ask(pair, lora(tmp_path / "again")) == 0, "under the same name"
    (line,) = _refusals(caplog)
    assert "nothing is stored or found for the LoRA a until vLLM is started again" in line
    assert pair.generate(PROMPT).external == 0 and _ask(pair, None) == _FOUND
    pair.close()
    pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
    found = pair.generate(longer, lora_request=lora(tmp_path / "again"))
    assert found.external == _FOUND, "of the first version, what was saved before"
    pair.close()


def test_a_change_during_the_forward_is_not_saved(tmp_path: Path, apart: bool) -> None:
    """vLLM reads the file when the request is computed, later than its digest was taken."""
    one = write(tmp_path / "one")
    pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
    request = FakeRequest("late", PROMPT, 3, lora_request=lora(one))
    pair.engine.add(request)
    assert pair.scheduler._scheduler._requests["late"].adapter.wait(60.0)
    write(one, b"two")
    pair.run()
    assert pair.stats()["dropped_saves"] > 0
    pair.close()
    write(tmp_path / "first")
    for folder in (tmp_path / "first", one):
        pair = Pair({"directory": str(tmp_path / "kv")}, apart=apart)
        assert _ask(pair, lora(folder)) == 0
        pair.close()


def test_without_the_look_after_the_forward_it_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker, "is_unchanged", lambda *_: True)
    one = write(tmp_path / "one")
    pair = Pair({"directory": str(tmp_path / "kv")})
    request = FakeRequest("late", PROMPT, 3, lora_request=lora(one))
    pair.engine.add(request)
    assert pair.scheduler._scheduler._requests["late"].adapter.wait(60.0)
    write(one, b"two")
    pair.run()
    pair.close()
    pair = Pair({"directory": str(tmp_path / "kv")})
    with pytest.raises(WrongBytes):
        _ask(pair, lora(write(tmp_path / "first")))
    pair.close()


def test_a_name_or_number_that_comes_with_another_path_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own prefix cache knows adapters by their names, its workers by their numbers."""
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    pair = Pair({"directory": str(tmp_path / "kv")})
    assert [_ask(pair, lora(one)), _ask(pair, lora(one))] == [0, _FOUND]
    assert _ask(pair, lora(one, "a", 2)) == _FOUND, "loaded again under another number"
    with caplog.at_level(logging.WARNING, "quire.vllm"):
        assert _ask(pair, lora(two, "a", 3)) == 0
        assert _ask(pair, lora(two, "b", 3)) == 0
        assert _ask(pair, lora(one, "c", 2)) == 0
        assert _ask(pair, lora(one, "d", 4)) == _FOUND
    assert len(_refusals(caplog)) == 1
    pair.close()


def test_names_and_numbers_that_are_kept_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that loads an adapter again and again gives it a new number each time."""
    monkeypatch.setattr(_adapters, "_NAMES_MAX", 2)
    monkeypatch.setattr(_adapters, "_NUMBERS_MAX", 3)
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    adapters = _adapters.Adapters()
    with caplog.at_level(logging.WARNING, "quire.vllm"):
        first = adapters.of(lora(one, "a", 0))
        assert first is not None
        found = [adapters.of(lora(one, "a", number)) for number in range(6)]
        assert found == [first] * 3 + [None] * 3
        named = [adapters.of(lora(one, name, 0)) for name in "abcd"]
        assert named == [first, first, None, None]
        assert adapters.of(lora(two, "e", 9)) is None
        (line,) = _refusals(caplog)
        assert "the LoRA a with the number 3" in line and "start vLLM again" in line
        # What is kept still tells of another path, and what has no place changes nothing.
        assert first.wait(60) and first.digest is not None
        assert adapters.of(lora(two, "c", 2)) is None
        assert first.is_refused
    adapters.close()


def test_files_that_are_newer_than_the_engine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have read what was there before."""
    monkeypatch.setattr(_adapters.time, "time_ns", _NOW)
    pair = Pair({"directory": str(tmp_path / "kv")})
    one = write(tmp_path / "one")
    with caplog.at_level(logging.WARNING, "quire.vllm"):
        assert [_ask(pair, lora(one)), _ask(pair, lora(one))] == [0, 0]
    (line,) = _refusals(caplog)
    assert "has changed after the engine started" in line
    pair.close()


def test_a_folder_above_that_was_exchanged_is_seen(tmp_path: Path) -> None:
    """Only its own time of change says so; one in which others write has another time, too."""
    above = tmp_path / "above"
    above.mkdir()
    one = str(write(above / "one"))
    facts = _adapters.facts_of(one)
    (above / "other").mkdir()
    assert _adapters.is_unchanged(one, facts)
    _adapters._check_age({str(above): above.stat()}, {str(above)}, 0)
    os.utime(above, ns=(1, 1))
    with pytest.raises(quire.BadStateError, match="above has changed after the engine"):
        _adapters._check_age({str(above): above.stat()}, {str(above)}, 0)
    above.rename(tmp_path / "before")
    write(shutil.copytree(tmp_path / "before", above) / "one")
    assert not _adapters.is_unchanged(one, facts)


@pytest.mark.parametrize("path", ["org/name-on-a-hub", "file"])
def test_an_adapter_without_a_folder_uses_no_store(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    pair = Pair({"directory": str(tmp_path / "kv")})
    monkeypatch.setattr(pair.engine, "load_adapter", lambda _: 5)
    assert [_ask(pair, lora(path)), _ask(pair, lora(path))] == [0, 0]
    assert not pair.stats().keys() & {"errors", "saved_tokens", "lookups"}
    pair.close()


@pytest.mark.parametrize("seed", range(24))
def test_walk_over_changes(seed: int, tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    walk(seed, tmp_path / "kv", groups=None, ranks=None, stages=None, changes=tmp_path / "loras")
