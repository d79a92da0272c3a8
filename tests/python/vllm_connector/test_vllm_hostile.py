"""Careless users of quire.vllm.QuireConnector: wrong options and parameters, other versions of
vLLM, forks, several engines in one process. All are told in one line; serving goes on."""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import quire
from fake_vllm import BLOCK, ONE_GROUP, FakeGroup
from program import run_source
from quire.vllm import _options, connector
from vllm_pair import PROMPT, Pair, fake_passport

passport = pytest.fixture(autouse=True)(fake_passport)

_WHERE = "QuireConnector: kv_connector_extra_config"


def _failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.levelno == logging.ERROR]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["directory"], " is a list, not an object"),
        ({"chunk_tokens": "128"}, ": chunk_tokens must be an integer, not str"),
        ({"chunk_tokens": 0}, ": chunk_tokens is 0; it must be at least 1"),
        ({"chunk_tokens": BLOCK * 1.5}, ": chunk_tokens must be an integer, not float"),
        ({"shared_bytes": -1}, ": shared_bytes is -1; it must be at least 1"),
        ({"staging_bytes": None}, ": staging_bytes must be an integer, not NoneType"),
        ({"load_timeout": "2"}, ": load_timeout must be a number, not str"),
        ({"load_timeout": float("nan")}, ": load_timeout is nan; it must be above 0"),
        ({"lease_timeout": 0}, ": lease_timeout is 0.0; it must be above 0"),
        ({"prompts_only": "false"}, ": prompts_only is 'false'; it must be true or false"),
        ({"layout": 1}, ": layout is '1'; it must be one of"),
        ({"key_file": 1}, ": key_file must be a text, not int"),
        ({"redis": 6379}, ": redis must be a text, not int"),
        ({"directory": ["/kv"]}, ": directory must be a text, not list"),
        ({"key": "secret"}, ": key is given by its file, as key_file"),
        ({"directry": "/kv", "blocks": 1}, " has the unknown names .'blocks', 'directry'."),
    ],
)
def test_wrong_options_are_named(extra: Any, message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=f"{_WHERE}{message}") as told:
        _options.Options.read(extra, BLOCK)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ram_bytes": "1GB"}, "ram_bytes"),
        ({"ram_bytes": -1}, "ram.bytes_max is -1"),
        ({"durability": "soon"}, "durability"),
        ({"redis": "no port"}, "no port"),
        ({"directory": "/dev/null/kv"}, "/dev/null/kv"),
        ({"redis_replicas": -1}, "redis.replicas is -1"),
        ({"write_policy": "selective"}, "two processes, .* leave write_policy out"),
        ({"key_file": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_what_the_store_refuses_is_named_at_the_start(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    before = set(_options._stores)
    with pytest.raises((quire.QuireError, OSError), match=message) as told:
        Pair({"directory": str(tmp_path), **options}, apart=True)
    assert "\n" not in str(told.value)
    assert set(_options._stores) == before, "nothing is left open"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"quire_skip": "all"}, "quire_skip is 'all'"),
        ({"quire_skip": 1}, "quire_skip is 1"),
        ({"quire_ttl": "1h"}, "quire_ttl must be a number, not str"),
        ({"quire_ttl": -1}, "quire_ttl is -1.0; it must be at least 0"),
        ({"quire_pin": "yes"}, "quire_pin is 'yes'; it must be true or false"),
    ],
)
def test_a_request_with_wrong_parameters_is_computed(
    parameters: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT)
    with caplog.at_level(logging.WARNING, "quire.vllm"):
        for last in range(2):
            wrong = pair.generate([*PROMPT, last], kv_transfer_params=parameters)
            assert wrong.done and wrong.external == 0
    (line,) = _failures(caplog)
    assert message in line.getMessage() and line.exc_info is None
    assert pair.stats()["errors"] == 2
    assert pair.generate([*PROMPT, 0, 1, 2]).external == 12, "the fourth chunk was not saved"
    pair.close()


def test_what_fails_without_a_name_has_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair({"directory": str(tmp_path)})
    monkeypatch.setattr(quire.ChunkSpace, "fetch", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.WARNING, "quire.vllm"):
        assert pair.generate(PROMPT).done
    (line,) = _failures(caplog)
    assert "ZeroDivisionError: division by zero" in line.getMessage() and line.exc_info
    pair.close()


@pytest.mark.parametrize("groups", [ONE_GROUP, (FakeGroup(), FakeGroup(window=6))])
@pytest.mark.parametrize("others", ["directory", "redis"])
def test_a_store_that_is_gone_while_serving_is_a_miss(
    others: str, groups: tuple[FakeGroup, ...], tmp_path: Path
) -> None:
    """The folder is removed, or was never a Redis."""
    extra: dict[str, Any] = {"directory": str(tmp_path / "kv"), "ram_bytes": 0}
    if others == "redis":
        extra = {"redis": "127.0.0.1:1", "redis_connect_timeout_ms": 20, "ram_bytes": 0}
    pair = Pair(extra, groups=groups)
    pair.generate(PROMPT)
    pair.flush()
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    for _ in range(3):
        assert pair.generate(PROMPT).done
    assert pair.engine.refused_blocks == pair.engine.refused_loads == 0
    pair.close()


def test_two_engines_of_one_process_over_one_folder(tmp_path: Path) -> None:
    """One has its worker here, the other one in what stands for another process. Each knows its
    own."""
    extra = {"directory": str(tmp_path)}
    before = set(_options._stores)
    pairs = [Pair(extra), Pair(extra, apart=True), Pair(extra)]
    assert [each.scheduler._scheduler._arenas is None for each in pairs] == [True, False, True]
    rng = random.Random(3)
    for _ in range(20):
        prompt = PROMPT[: rng.randrange(8, 16)] + [rng.randrange(2)]
        for pair in rng.sample(pairs, 3):
            pair.generate(prompt)
    for pair in pairs:
        assert pair.generate(PROMPT).external == 12
        assert not pair.stats().keys() & {"errors", "failed_loads"}
        pair.close()
    assert set(_options._stores) == before


_FORKED = """
import os, sys
from quire.vllm import _options
from vllm_pair import PROMPT, Pair, fake_passports

def finds(pair):
    pair.generate(PROMPT)
    return pair.generate(PROMPT).external == 12

with fake_passports():
    pair = Pair({"directory": sys.argv[1]})
    assert finds(pair)
    with _options._stores_lock:  # as another thread of the parent may hold it
        child = os.fork()
        if child == 0:
            found = finds(Pair({"directory": sys.argv[1]}))
            os._exit(7 if found and len(_options._stores) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert finds(pair)
    pair.close()
"""


def test_the_child_of_a_fork_has_no_store_of_its_parent(tmp_path: Path) -> None:
    """vLLM forks workers. A store of the parent counts as closed in them."""
    run_source(_FORKED, str(tmp_path))


# ---- Other versions of vLLM

def _vllm(monkeypatch: pytest.MonkeyPatch, version: str, *fields: str) -> None:
    output = dataclasses.make_dataclass("SchedulerOutput", fields)
    modules = {
        "vllm": types.SimpleNamespace(__version__=version),
        "vllm.v1.core.sched.output": types.SimpleNamespace(SchedulerOutput=output),
    }
    for name in ("vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        modules[name] = types.SimpleNamespace()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(connector, "HAS_VLLM", True)


def test_another_minor_version_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version, lines in (("0.32.4", 0), ("0.32.1.dev3+g123", 0), ("0.33.0", 1), ("unknown", 1)):
        _vllm(monkeypatch, version, *connector._OUTPUT_FIELDS)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "quire.vllm"):
            connector._check_version()
        assert len(caplog.records) == lines, version


def test_what_a_version_of_vllm_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(monkeypatch, "0.32.0", *connector._OUTPUT_FIELDS[:-1])
    with pytest.raises(quire.IncompatibleError, match="does not tell .* kv_connector_block_state"):
        connector._check_version()
    _vllm(monkeypatch, "0.32.0", *connector._OUTPUT_FIELDS)
    asks = type("Base", (), {"__abstractmethods__": {"wait_for_love"}, "wait_for_love": None})
    monkeypatch.setattr(connector, "ConnectorBase", asks)
    monkeypatch.setattr(connector.QuireConnector, "wait_for_love", None, raising=False)
    with pytest.raises(quire.IncompatibleError, match="methods that it lacks: wait_for_love"):
        connector._check_version()
