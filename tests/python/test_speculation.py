"""Guesses and windows through the package and the program: answers are those of plain decoding, and
what was saved is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
import quire
from program import run
from tiny_model import TinyModel

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


def test_guesses_change_no_bit_of_an_answer(tiny: TinyModel) -> None:
    sampled = {"temperature": 1.2, "seed": 3, "n": 2}
    options: list[dict[str, Any]] = [{}, sampled, {"repetition_penalty": 1.2}]
    with quire.Engine(tiny.directory, threads=1) as plain:
        want = [plain.generate(PROMPT, max_tokens=40, **kind).samples for kind in options]
    by_model = {"draft_model": tiny.directory, "draft_branches": 1}
    makings: list[dict[str, Any]] = [{"speculate": "ngram"}, by_model]
    for making in makings:
        with quire.Engine(tiny.directory, threads=1, page_size=16, **making) as engine:
            results = [engine.generate(PROMPT, max_tokens=40, **kind) for kind in options]
            stats = engine.stats()
            alone = engine.generate(PROMPT, max_tokens=40, speculate="none")
        assert [result.samples for result in results] == want
        assert alone.samples == want[0] and alone.usage.drafted_tokens == 0
        assert stats["drafted_tokens"] == sum(result.usage.drafted_tokens for result in results)
        assert stats["accepted_tokens"] == sum(result.usage.accepted_tokens for result in results)
        if "draft_model" in making:
            usage = results[0].usage
            assert usage.accepted_tokens == usage.drafted_tokens > 0
            assert usage.tokens_per_forward > 3


def test_what_an_engine_has_no_room_for_is_refused(tiny: TinyModel) -> None:
    with quire.Engine(tiny.directory, threads=1) as engine:
        with pytest.raises(quire.BadArgumentError, match="max_tree_nodes"):
            engine.generate(PROMPT, speculate="ngram")
        with pytest.raises(quire.BadArgumentError, match="go with speculate"):
            engine.generate(PROMPT, draft_tokens=4)
        with pytest.raises(quire.BadArgumentError, match="sinks is 9"):
            engine.generate(PROMPT, window=8, sinks=9)
    with quire.Engine(tiny.directory, threads=1, max_tree_nodes=16) as engine:
        assert engine.generate(PROMPT, speculate="ngram", max_tokens=9).ids
        with pytest.raises(quire.BadArgumentError, match="draft_model_directory"):
            engine.generate(PROMPT, speculate="model")
    with pytest.raises(quire.BadArgumentError, match="draft_model"):
        quire.Engine(tiny.directory, threads=1, speculate="model")


def test_a_window_goes_on_behind_the_models_positions(tiny: TinyModel) -> None:
    length = tiny.shape.positions + 40
    with quire.Engine(tiny.directory, threads=1, page_size=16, prefix_cache=False) as engine:
        with pytest.raises(quire.TooLargeError):
            engine.generate(PROMPT, max_tokens=length)
        result = engine.generate(PROMPT, max_tokens=length, window=48, sinks=4, ignore_eos=True)
        assert len(result.ids) == length
        inside = engine.generate(PROMPT, max_tokens=30, window=48, sinks=4, ignore_eos=True)
        assert inside.ids == engine.generate(PROMPT, max_tokens=30, ignore_eos=True).ids
        assert inside.ids == result.ids[:30]


def test_the_plan_counts_the_draft_model(tiny: TinyModel) -> None:
    plain = quire.Engine.plan_memory(tiny.directory)
    plan = quire.Engine.plan_memory(tiny.directory, draft_model=tiny.directory)
    assert plain.draft_bytes == 0
    assert plan.draft_bytes > plain.weight_bytes
    assert plan.total_bytes == (
        plan.weight_bytes + plan.kv_bytes + plan.state_bytes + plan.scratch_bytes + plan.draft_bytes
    )


def test_the_program_speculates_and_says_what_it_saved(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel
) -> None:
    folder = str(tiny.directory)
    asked = ["--max-tokens", "30", "--ignore-eos", "--prompt-ids", ",".join(map(str, PROMPT))]
    code, plain, _ = run(capsys, "generate", folder, *asked)
    assert code == 0
    draft = ["--draft-model", folder, "--draft-tokens", "4", "--draft-branches", "1"]
    code, out, log = run(capsys, "generate", folder, *asked, *draft, "--stats", "--page-size", "16")
    assert code == 0 and out == plain
    assert "guesses were right" in log and "tokens per forward" in log
    code, out, _ = run(capsys, "generate", folder, *asked, "--speculate", "ngram", "--json")
    assert code == 0 and json.loads(out)["ids"]
    code, out, _ = run(capsys, "generate", folder, *asked, *draft, "--dry-run")
    assert code == 0 and "draft model" in out
    many = ["--max-tokens", str(tiny.shape.positions + 9), "--window", "40", "--sinks", "2"]
    ids = ["--prompt-ids", "5,6,7", "--ignore-eos", "--json"]
    code, out, _ = run(capsys, "generate", folder, *ids, *many)
    assert code == 0 and len(json.loads(out)["ids"]) == tiny.shape.positions + 9
