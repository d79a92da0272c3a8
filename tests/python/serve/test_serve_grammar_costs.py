"""No grammar holds others: what is too costly is given up, and other keys' grammars go on."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quire
from costly_grammars import search
from quire import errors
from quire.grammar import Grammar
from quire.serve.grammar_probe import GrammarProbe, TooCostlyError
from server_process import Server, running
from tiny_model import TinyModel

ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"
SECONDS = 0.3  # the bound of the server; what the search finds takes at least twice as long
KNOWN = [Grammar("regex", "[a-z]?" * 1000), Grammar("regex", "a?" * 5000)]
FIELDS = {"regex": "guided_regex", "grammar": "guided_grammar", "json_schema": "guided_json"}


@pytest.fixture
def probe(engine: quire.Engine) -> Iterator[GrammarProbe]:
    probe = GrammarProbe(engine, 0.3, 1 << 30, 60.0)
    yield probe
    probe.close()


def test_the_probe_takes_what_compiles_and_names_what_is_wrong(probe: GrammarProbe) -> None:
    probe.check(Grammar("regex", "[ab]{4}"), ())
    probe.check(Grammar("regex", "<a>"), ("<|im_end|>",))
    with pytest.raises(errors.BadArgumentError, match="parenthesis is not closed"):
        probe.check(Grammar("regex", "a("), ())
    probe.check(Grammar("json_schema", '{"type":"object"}'), ())
    assert probe.starts == 1  # one process for all of them


def test_the_probe_ends_at_its_bound_of_computing(probe: GrammarProbe) -> None:
    for number, grammar in enumerate(KNOWN):
        with pytest.raises(TooCostlyError, match="more than 0.3 s of computing"):
            probe.check(grammar, ())
        probe.check(Grammar("regex", "[ab]{4}"), ())
        assert probe.starts == number + 2


def test_the_probe_draws_tokens_and_finds_those_that_take_long(engine: quire.Engine) -> None:
    """A grammar that is compiled at once, and of which each token would hold the engine."""
    grammar = Grammar("regex", "x" + "([a-z]{0,9})" * 3000)
    engine.compile_grammar(grammar)
    probe = GrammarProbe(engine, 1.0, 1 << 30, 60.0)
    with pytest.raises(TooCostlyError, match="it is too costly: to compile and to try it"):
        probe.check(grammar, ())
    for text in ("x", "x?", "[a-z]{3}( [a-z]{2})*", "(x|yy)+"):
        probe.check(Grammar("regex", text), ())
    probe.check(Grammar("json_schema", '{"type":"array","items":{"type":"null"}}'), ())
    assert probe.starts == 2
    probe.close()


def test_the_probe_ends_at_its_bound_of_memory(engine: quire.Engine) -> None:
    probe = GrammarProbe(engine, 30.0, 24 << 20, 60.0)
    probe.check(Grammar("regex", "[ab]{4}"), ())
    with pytest.raises(TooCostlyError, match="more than 24 MiB"):
        probe.check(Grammar("regex", "a" * 60_000), ())
    probe.check(Grammar("regex", "[ab]{4}"), ())
    assert probe.starts == 2
    probe.close()
    with pytest.raises(errors.ClosedError):
        probe.check(Grammar("regex", "[ab]{4}"), ())


def test_the_probe_does_not_wait_for_ever(engine: quire.Engine) -> None:
    probe = GrammarProbe(engine, 60.0, 1 << 30, 0.05)
    with pytest.raises(TooCostlyError, match="more than 0.05 s;"):
        probe.check(KNOWN[0], ())
    probe.close()


def test_a_probe_that_is_ended_by_others_is_begun_again(probe: GrammarProbe) -> None:
    probe.check(Grammar("regex", "a"), ())
    assert probe._child is not None
    probe._child.kill()
    probe._child.wait()
    probe.check(Grammar("regex", "a"), ())
    assert probe.starts == 2


@pytest.fixture(scope="module")
def costly(tiny: TinyModel) -> list[Grammar]:
    """What a search finds, and what is known."""
    with quire.Engine(tiny.directory, kv_bytes=1 << 22) as engine:
        probe = GrammarProbe(engine, 2 * SECONDS, 1 << 30, 60.0)
        found = list(search(probe, "costly", 30))
        probe.close()
    return found + KNOWN


def test_the_search_finds_costly_grammars_of_every_kind(costly: list[Grammar]) -> None:
    found = costly[: -len(KNOWN)]
    assert len(found) >= 4
    assert {grammar.kind for grammar in found} == set(FIELDS)


def _ask(server: Server, key: str, grammar: Grammar) -> tuple[int, Any]:
    body = {"prompt": "x", "max_tokens": 2, FIELDS[grammar.kind]: grammar.text}
    status, _, found = server.request(
        "POST", "/v1/completions", body, authorization=f"Bearer {key}"
    )
    return status, found


def test_costly_grammars_of_a_key_hold_no_other(
    tiny: TinyModel, keys_file: Path, costly: list[Grammar]
) -> None:
    hostile = (costly * 16)[:16]
    options = ("--api-keys", str(keys_file), "--limit", f"grammar_seconds={SECONDS}")
    with running(tiny.directory, *options, key=BOB) as server:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(_ask, server, ANN, grammar) for grammar in hostile]
            server.wait_metrics(
                lambda found: found.get('quire:http_limit_total{limit="grammar_seconds"}', 0) >= 1
            )
            for number in range(3):  # each waits for one turn of ann's at most
                status, found = _ask(server, BOB, Grammar("regex", f"[ab]{{{number + 1}}}"))
                assert status == 200, found
            assert not all(future.done() for future in asked), "they waited behind all of ann's"
            for grammar, future in zip(hostile, asked, strict=True):
                status, found = future.result()
                field = FIELDS[grammar.kind]
                assert (status, found["error"]["param"]) == (400, field), found
                assert "too costly" in found["error"]["message"]
        metrics = server.metrics()
        assert metrics['quire:http_limit_total{limit="grammar_seconds"}'] == 16
        assert server.stop() == 0
