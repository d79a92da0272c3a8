"""Prompts with documents: how they are composed and tokenised, blended answers of the engine, the
program and the command line. What is exact is compared with ==."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import program
import pytest
import quire
from quire import _blend_verdict, _documents
from quire._blend_verdict import BlendVerdict
from quire.cli import blend as blend_command
from quire.embedded import embedded_model_dir
from quire.identity import model_identity
from tiny_model import Shape, TinyModel

QUESTION = [{"role": "user", "content": "Which fox?"}]
DOCUMENTS = [
    "The quick brown fox is red and jumps.",
    "A quire has sixteen pages, folded once.",
    "The lazy dog sleeps over naïve café.",
]


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("long_tiny")
    return TinyModel(folder, Shape(layers=4, positions=4096))


def make(tiny: TinyModel, **options: Any) -> quire.Engine:
    options = {"blend_unverified": True, **options}
    return quire.Engine(
        tiny.directory, dtype="float32", threads=1, kv_bytes=32 << 20, blend_piece=256, **options
    )


@pytest.fixture
def blender(long_tiny: TinyModel) -> Iterator[quire.Engine]:
    with make(long_tiny) as engine:
        yield engine


def drawn(result: quire.Result) -> list[tuple[int, float]]:
    return list(zip(result.ids, result.logprobs or []))


def test_a_document_has_the_same_tokens_in_every_prompt(blender: quire.Engine) -> None:
    tokenizer = blender.tokenizer
    first = _documents.compose_chat(tokenizer, QUESTION, DOCUMENTS, {})
    turned = _documents.compose_chat(tokenizer, QUESTION, DOCUMENTS[::-1], {})
    texts = [first.ids[begin:end] for begin, end in first.documents]
    assert [turned.ids[begin:end] for begin, end in turned.documents] == texts[::-1]
    anchor = first.ids[: first.documents[0][0]]
    assert turned.ids[: turned.documents[0][0]] == anchor != []
    assert first.chains(None) == [(anchor + text, len(anchor)) for text in texts]
    text = tokenizer.decode(first.ids, skip_special_tokens=False)
    content = "".join(f"{document}\n\n" for document in DOCUMENTS) + QUESTION[0]["content"]
    assert text == tokenizer.chat_template.render([{"role": "user", "content": content}])


def test_documents_stand_at_the_beginning_of_the_conversation(blender: quire.Engine) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "Red."}, *QUESTION]
    composed = _documents.compose_chat(blender.tokenizer, turns, DOCUMENTS, {})
    alone = _documents.compose_chat(blender.tokenizer, QUESTION, DOCUMENTS, {})
    assert composed.documents == alone.documents
    assert composed.ids[: alone.documents[-1][1]] == alone.ids[: alone.documents[-1][1]]


def test_without_blend_the_prompt_is_computed(blender: quire.Engine) -> None:
    result = blender.chat(QUESTION, documents=DOCUMENTS, max_tokens=6)
    assert result.usage.blend is None
    assert drawn(result) == drawn(blender.generate(result.prompt_ids, max_tokens=6))


def test_ratio_one_is_full_prefill(long_tiny: TinyModel, blender: quire.Engine) -> None:
    with make(long_tiny) as other:
        full = drawn(other.chat(QUESTION, documents=DOCUMENTS, max_tokens=6))
    result = blender.chat(QUESTION, documents=DOCUMENTS, blend=1.0, max_tokens=6)
    usage = result.usage.blend
    assert usage is not None and not usage.approximate
    assert 0 < usage.moved_tokens == usage.recomputed_tokens
    assert drawn(result) == full


def test_a_blended_answer_says_what_it_is(blender: quire.Engine) -> None:
    result = blender.chat(QUESTION, documents=DOCUMENTS, blend=0.1, max_tokens=6)
    usage = result.usage.blend
    assert usage is not None and usage.approximate
    assert 0 < usage.recomputed_tokens < usage.moved_tokens
    assert usage.deviation_max >= usage.deviation_mean > 0
    assert usage.learned_tokens > 0 and usage.moved_bytes > 0
    whole = usage.exact_tokens + usage.kept_tokens + usage.moved_tokens + usage.computed_tokens
    assert whole == result.usage.prompt_tokens
    stats = blender.stats()
    assert stats["blend_moved_tokens"] == usage.moved_tokens
    # Another order: nothing is learnt but what was the beginning of a prompt only.
    again = blender.chat(QUESTION, documents=DOCUMENTS[::-1], blend=0.1, max_tokens=6)
    assert again.usage.blend is not None and again.usage.blend.learned_tokens == 0
    # Others see nothing of it.
    exact = blender.chat(QUESTION, documents=DOCUMENTS, max_tokens=6)
    ones = blender.chat(QUESTION, documents=DOCUMENTS, blend=1, max_tokens=6)
    assert drawn(exact) == drawn(ones)


def test_prepared_documents_are_known(blender: quire.Engine) -> None:
    usages = blender.prepare(DOCUMENTS)
    assert [usage.completion_tokens for usage in usages] == [0, 0, 0]
    result = blender.chat(QUESTION, documents=DOCUMENTS, blend=0.1, max_tokens=2)
    assert result.usage.blend is not None and result.usage.blend.learned_tokens == 0
    assert all(usage.cached_tokens > 0 for usage in blender.prepare(DOCUMENTS))


def test_prepared_documents_of_bare_texts_are_known(blender: quire.Engine) -> None:
    """Nothing stands before them but the begin token, which the tokenizer does not add."""
    blender.prepare(DOCUMENTS, "")
    result = blender.generate("Which fox?", documents=DOCUMENTS, blend=0.1, max_tokens=2)
    assert result.usage.blend is not None and result.usage.blend.learned_tokens == 0
    assert result.usage.blend.moved_tokens > 30


def test_a_document_that_does_not_fit_is_refused_before_any_is_computed(
    blender: quire.Engine,
) -> None:
    long = "The quick brown fox jumps. " * 2000
    with pytest.raises(quire.TooLargeError, match="do not fit the model's 4096 positions"):
        blender.prepare([DOCUMENTS[0], long])
    with pytest.raises(quire.TooLargeError, match="do not fit the model's 4096 positions"):
        blender.chat(QUESTION, documents=[DOCUMENTS[0], long], blend=0.1)
    assert blender.stats()["steps"] == 0


# ---- Documents that the engine finds

SURROUNDED = f"Some words. {DOCUMENTS[1]} More.\n\n{DOCUMENTS[0]} {DOCUMENTS[1]} Which fox?"


def found(result: quire.Result) -> quire.BlendUsage:
    assert result.usage.blend is not None
    return result.usage.blend


def test_known_documents_are_found_in_prompts(long_tiny: TinyModel, blender: quire.Engine) -> None:
    chat = [{"role": "user", "content": SURROUNDED}]
    options: Any = {"documents": "auto", "blend": 0.1, "max_tokens": 3}
    with make(long_tiny) as other:
        full = drawn(other.chat(chat, max_tokens=3))
    nothing = blender.chat(chat, **options)
    assert found(nothing).documents == 0 and not found(nothing).approximate
    assert drawn(nothing) == full
    blender.prepare(DOCUMENTS)
    salted = blender.chat(chat, cache_salt="other", **options)
    assert found(salted).documents == 0, "those of other tenants are not found"
    elsewhere = [{"role": "system", "content": "Be brief."}, *chat]
    assert found(blender.chat(elsewhere, **options)).documents == 0
    contextual = {**options, "blend": {"ratio": 0.1, "contextual": True}}
    assert found(blender.chat(elsewhere, **contextual)).documents == 3
    elsewhere[0]["content"] = "Be kind."
    ones = blender.chat(elsewhere, **{**options, "blend": {"ratio": 1, "contextual": True}})
    assert not found(ones).approximate and found(ones).moved_tokens > 40
    with make(long_tiny) as other:
        assert drawn(ones) == drawn(other.chat(elsewhere, max_tokens=3))


def test_documents_of_earlier_requests_are_found(blender: quire.Engine) -> None:
    blender.chat(QUESTION, documents=DOCUMENTS, blend=0.1, max_tokens=1)
    chat = [{"role": "user", "content": SURROUNDED}]
    result = blender.chat(chat, documents="auto", blend=0.1, max_tokens=3)
    usage = found(result)
    assert usage.documents == 3 and usage.approximate and usage.moved_tokens > 40
    again = blender.chat(chat, documents="auto", blend=0.1, max_tokens=3)
    assert drawn(again) == drawn(result) and found(again).kept_tokens > 0
    ids = blender.generate(result.prompt_ids, documents="auto", blend=0.1, max_tokens=3)
    assert drawn(ids) == drawn(result)


def test_what_is_wrong_with_a_search(blender: quire.Engine) -> None:
    with pytest.raises(quire.BadArgumentError, match='documents: "auto" looks .* give blend'):
        blender.chat(QUESTION, documents="auto")
    with pytest.raises(quire.BadArgumentError, match="contextual is about documents that the eng"):
        blender.chat(QUESTION, documents=DOCUMENTS, blend={"contextual": True})
    with pytest.raises(quire.BadArgumentError, match="contextual is 1; it is True or False"):
        blender.chat(QUESTION, documents="auto", blend={"contextual": 1})
    with pytest.raises(quire.BadArgumentError, match="usage.blend.documents says how many"):
        blender.document_ranges(QUESTION, documents="auto", blend=0.1)


def test_token_ids_and_ranges(blender: quire.Engine) -> None:
    chat = blender.chat(QUESTION, documents=DOCUMENTS, blend=0.2, max_tokens=4)
    ranges = blender.document_ranges(QUESTION, documents=DOCUMENTS)
    ids = blender.generate(
        chat.prompt_ids, documents=ranges, blend={"ratio": 0.2}, max_tokens=4, cache_salt="other"
    )
    assert drawn(ids) == drawn(chat)


def test_streams_and_texts(blender: quire.Engine) -> None:
    pieces = list(blender.stream("x", documents=DOCUMENTS, blend=0.1, max_tokens=3))
    result = pieces[-1].result
    assert result is not None and result.usage.blend is not None
    assert result.usage.blend.moved_tokens > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"blend": 0.1}, "there are no documents"),
        ({"documents": [" "]}, r"documents\[0\] is empty"),
        ({"documents": ["a \ue0d0"]}, "private characters"),
        ({"documents": ["a", "b"], "blend": 1.5}, "blend"),
        ({"documents": ["a", "b"], "blend": "much"}, "ratio is 'much'; it must be a number from 0"),
        ({"documents": ["a", "b"], "blend": {"learn": 1}}, 'learn is 1; it is True, False or "idle"'),
        ({"documents": ["a", "b"], "blend": {"layers": [1]}}, "no option 'layers'"),
        ({"documents": ["a", "b"], "blend": {"metric": "x"}}, "metric"),
        ({"documents": ["a", "b"], "blend": {"check_layers": [9], "ratio": 0.1}}, "9"),
        ({"documents": ["a", "b"], "blend": {"ratios": [0.1], "ratio": 0.1}}, "give one"),
        ({"documents": ["a", "b"], "blend": 0.1, "window": 20}, "window is 20"),
    ],
)
def test_what_is_refused(blender: quire.Engine, options: Any, message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=message):
        blender.chat(QUESTION, max_tokens=2, **options)
    assert blender.stats()["running"] == blender.stats()["waiting"] == 0


def test_an_exact_engine_refuses_what_may_be_approximate(long_tiny: TinyModel) -> None:
    with make(long_tiny, exact=True) as engine:
        for blend in (0.5, "auto", {"ratios": [1.0, 0.9], "check_layers": [1, 2]}, {}):
            with pytest.raises(quire.BadArgumentError, match=r"gives exact answers only \(exact\)"):
                engine.chat(QUESTION, documents=DOCUMENTS, blend=blend)
        with pytest.raises(quire.BadArgumentError, match="gives exact answers only"):
            engine.chat(QUESTION, documents="auto", blend={"ratio": 1, "thresholds": [0.1]})
        assert engine.stats()["steps"] == 0
        ones = engine.chat(QUESTION, documents=DOCUMENTS, blend=1, max_tokens=3)
        assert ones.ids == engine.chat(QUESTION, documents=DOCUMENTS, max_tokens=3).ids


def test_ranges_that_overlap_are_refused(blender: quire.Engine) -> None:
    ids = list(range(5, 60))
    for documents in ([(2, 20), (10, 30)], [(20, 30), (2, 10)], [(2, 2)], [(2, 200)]):
        with pytest.raises(quire.BadArgumentError, match="documents"):
            blender.generate(ids, documents=documents, blend=0.1, max_tokens=1)
    with pytest.raises(TypeError, match="pairs"):
        blender.generate(ids, documents=["text"], blend=0.1)
    with pytest.raises(TypeError, match="is a list"):
        blender.chat(QUESTION, documents="text")


def test_an_engine_without_pieces_says_so(long_tiny: TinyModel) -> None:
    options: Any = {"threads": 1, "kv_bytes": 8 << 20, "blend_unverified": True}
    with quire.Engine(long_tiny.directory, **options) as engine:
        with pytest.raises(quire.BadArgumentError, match="blend_piece"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend=0.1)


# ---- The program


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = []
    for index, document in enumerate(DOCUMENTS):
        path = tmp_path / f"{index}.txt"
        path.write_text(document, encoding="utf-8")
        names.append(str(path))
    return names


def generate(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, files: list[str], *more: str
) -> tuple[dict[str, Any], str]:
    words = [word for name in files for word in ("--document", name)]
    code, out, err = program.run(
        capsys,
        "generate",
        str(tiny.directory),
        "Which fox?",
        *words,
        *("--json", "--max-tokens", "5", "--greedy", "--dtype", "float32", "--threads", "1"),
        *("--blend-unverified", *more),
    )
    assert code == 0, err
    return json.loads(out), err


def test_generate_with_documents(
    capsys: pytest.CaptureFixture[str], long_tiny: TinyModel, files: list[str], tmp_path: Path
) -> None:
    full, note = generate(capsys, long_tiny, files)
    assert "blend" not in full["usage"] and "APPROXIMATE" not in note
    ones, note = generate(capsys, long_tiny, files, "--blend", "1")
    assert ones["ids"] == full["ids"] and "(exact: " in note
    assert ones["usage"]["blend"]["moved_tokens"] > 0
    # One process learns, the next one finds.
    store = ("--kv-dir", str(tmp_path / "kv"))
    first, note = generate(capsys, long_tiny, files, "--blend", "0.1", *store)
    assert "(APPROXIMATE: " in note and first["usage"]["blend"]["learned_tokens"] > 20
    assert "; waited " in note
    second, _ = generate(capsys, long_tiny, files[::-1], "--blend", "0.1", *store)
    assert second["usage"]["blend"]["learned_tokens"] < 10
    assert second["usage"]["blend"]["moved_tokens"] > 20


@pytest.mark.parametrize("teacher", ["prepare", "chat"])
def test_the_next_process_finds_the_last_tokens_of_documents(
    long_tiny: TinyModel, tmp_path: Path, teacher: str
) -> None:
    """Whichever document comes first: chunks of this model have 1 024 tokens."""
    documents = [f"{DOCUMENTS[0]} " * count for count in (2, 28, 52)]
    options: Any = {"kv_dir": str(tmp_path), "kv_load_always": True, "kv_load_timeout": 60}
    with make(long_tiny, **options) as engine:
        engine.wait_for_store()
        ranges = engine.document_ranges(QUESTION, documents=documents)
        sizes = [end - begin for begin, end in ranges]
        assert sizes[0] < 60 and 500 < sizes[1] < 1000 and 1100 < sizes[2] < 1400, sizes
        if teacher == "prepare":
            engine.prepare(documents, QUESTION)
        else:
            engine.chat(QUESTION, documents=documents, blend=0.15, max_tokens=1)
        engine.flush_store()
    for first in range(3):
        turned = documents[first:][:1] + documents[:first][::-1] + documents[first + 1 :][::-1]
        with make(long_tiny, **options) as engine:
            engine.wait_for_store()
            ranges = engine.document_ranges(QUESTION, documents=turned)
            result = engine.chat(QUESTION, documents=turned, blend=0.15, max_tokens=3)
            usage = result.usage.blend
            assert usage is not None and usage.approximate
            assert usage.exact_tokens == ranges[0][1]
            assert usage.moved_tokens == ranges[-1][1] - ranges[1][0]
            assert usage.recomputed_tokens < usage.moved_tokens
            assert usage.computed_tokens == len(result.prompt_ids) - ranges[-1][1]
            assert usage.learned_tokens <= 3, "the last token of each, for the logits behind it"
            ones = engine.chat(QUESTION, documents=turned, blend=1, max_tokens=3)
            full = engine.chat(QUESTION, documents=turned, max_tokens=3, cache_salt="cold")
            assert drawn(ones) == drawn(full)


def test_generate_refuses_what_may_be_approximate(
    capsys: pytest.CaptureFixture[str], long_tiny: TinyModel, files: list[str]
) -> None:
    words = ("generate", str(long_tiny.directory), "x", "--document", files[0], "--exact")
    code, _, err = program.run(capsys, *words, "--blend", "0.1", "--threads", "1")
    assert code == 1 and "this engine gives exact answers only" in err
    code, _, err = program.run(capsys, *words, "--blend", "1", "--threads", "1", "--max-tokens", "1")
    assert code == 0 and "(exact: " in err


def test_generate_finds_documents(
    capsys: pytest.CaptureFixture[str], long_tiny: TinyModel, files: list[str]
) -> None:
    words = [word for name in files for word in ("--document", name)]
    options = ("--dtype", "float32", "--threads", "1", "--blend-unverified", "--max-tokens", "3")
    code, out, err = program.run(
        capsys, "generate", str(long_tiny.directory), SURROUNDED, *words, "--find-documents",
        "--blend", "0.1", "--json", *options,
    )  # fmt: skip
    assert code == 0 and "(APPROXIMATE: 3 documents; of " in err, err
    result = json.loads(out)
    assert result["usage"]["blend"]["documents"] == 3
    assert result["usage"]["blend"]["learned_tokens"] == 0
    with make(long_tiny) as engine:
        chat = [{"role": "user", "content": SURROUNDED}]
        assert result["usage"]["prompt_tokens"] == len(engine.chat(chat, max_tokens=1).prompt_ids)


def test_blend_add_makes_documents_known(
    capsys: pytest.CaptureFixture[str], long_tiny: TinyModel, files: list[str], tmp_path: Path
) -> None:
    store = ("--kv-dir", str(tmp_path / "kv"), "--dtype", "float32", "--threads", "1")
    code, out, err = program.run(
        capsys, "blend", "add", str(long_tiny.directory), *files, "--json", *store
    )
    assert code == 0, err
    assert [entry["file"] for entry in json.loads(out)["documents"]] == files
    result, _ = generate(capsys, long_tiny, files, "--blend", "0.1", *store[:2])
    assert result["usage"]["blend"]["learned_tokens"] < 10


def test_blend_eval_compares_with_full_prefill(
    capsys: pytest.CaptureFixture[str], long_tiny: TinyModel
) -> None:
    code, out, err = program.run(
        capsys,
        *("blend", "eval", str(long_tiny.directory), "--questions", "1", "--json"),
        *("--threads", "1", "--kv-bytes", "64M"),
    )
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["kind"] for row in rows} == {"notes", "cut facts"}
    ones = [row for row in rows if row["blend"] == {"ratio": 1.0}]
    assert [row["divergence"] for row in ones] == [0, 0]
    assert [row["agreement"] for row in ones] == [1, 1]
    assert all(row["left"] == 0 for row in ones)
    assert all(row["divergence"] > 0 for row in rows if row["blend"].get("ratio") == 0.0)
    metrics = {row["blend"].get("metric", "v_l2") for row in rows}
    assert metrics == {"v_l2", "k_l2", "kv_l2", "cosine", "random"}
    by_lot = [row["left"] for row in rows if row["blend"].get("metric") == "random"]
    assert len(by_lot) == 4 and all(0 < left < 1 for left in by_lot)
    assert len([row for row in rows if row["blend"].get("anchor") == "none"]) == 2


def test_blend_eval_of_a_text_keeps_its_verdict(
    capsys: pytest.CaptureFixture[str],
    long_tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over sixteen folded pages of a quire. " * 20)
    words = ("blend", "eval", str(long_tiny.directory), "--text", str(text), "--questions", "20")
    code, out, err = program.run(capsys, *words, "--threads", "1", "--kv-bytes", "64M")
    assert code == 0, err
    assert "text       ratio 0.15 " in out and "verdict: blends are " in out
    with quire.Engine(long_tiny.directory, threads=1, kv_bytes=8 << 20, blend_piece=256) as engine:
        verdict = engine.blend_verdict()
        assert verdict is not None and verdict.questions == 20
        assert f"KL {verdict.divergence:.3f} " in out
    # KV of other types is another matter.
    with quire.Engine(long_tiny.directory, threads=1, kv_bytes=8 << 20, kv_dtype="int8") as engine:
        assert engine.blend_verdict() is None
    text.write_text("too short")
    code, _, err = program.run(capsys, *words)
    assert code == 2 and "--text: the texts have fewer than 22 words" in err


# ---- Verdicts


GOOD = BlendVerdict("2026-11-24", 20, 0.1, 0.9)


def test_a_model_without_a_verdict_is_refused(
    long_tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with make(long_tiny, blend_unverified=False) as engine:
        with pytest.raises(quire.BadArgumentError, match="nobody has measured .* run quire blend"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend=0.1)
        assert engine.blend_verdict() is None and engine.stats()["steps"] == 0
        # What is exact needs none.
        ones = engine.chat(QUESTION, documents=DOCUMENTS, blend=1.0, max_tokens=3)
        assert ones.ids == engine.chat(QUESTION, documents=DOCUMENTS, max_tokens=3).ids
        # Rows below a threshold stay as they were moved.
        with pytest.raises(quire.BadArgumentError, match="nobody has measured"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend={"ratio": 1, "thresholds": [0.5]})
        path = engine.keep_blend_verdict(GOOD)
        assert path.parent == tmp_path / "blend"
        assert engine.chat(QUESTION, documents=DOCUMENTS, blend=0.1, max_tokens=1).ids
    with make(long_tiny, blend_unverified=False) as engine:
        assert engine.blend_verdict() == GOOD
        bad = dataclasses.replace(GOOD, divergence=0.31)
        engine.keep_blend_verdict(bad)
        with pytest.raises(quire.BadArgumentError, match=r"too much: a divergence of 0\.310 nats"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend={"ratio": 0.5})


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: text.replace("0.9", "1.9"),
        lambda text: text.replace("0.1", "NaN"),
        lambda text: text.replace('"questions": 20', '"questions": 0'),
        lambda text: re.sub('"fingerprint": "..', '"fingerprint": "zz', text),
        lambda text: "[]",
    ],
)
def test_a_damaged_verdict_is_told(
    long_tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[str], str],
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with make(long_tiny, blend_unverified=False) as engine:
        path = engine.keep_blend_verdict(GOOD)
    path.write_text(change(path.read_text()))
    with make(long_tiny, blend_unverified=False) as engine:
        with pytest.raises(quire.CorruptError, match=f"{path}: the verdict about blending is dam"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend=0.1)


def test_a_verdict_of_another_version_is_none(
    long_tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with make(long_tiny) as engine:
        path = engine.keep_blend_verdict(GOOD)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with make(long_tiny) as engine:
        assert engine.blend_verdict() is None


def test_the_embedded_model_comes_with_a_verdict() -> None:
    folder = embedded_model_dir()
    name = _blend_verdict.fingerprint(model_identity(folder), "bfloat16")
    shipped = json.loads((Path(quire.__file__).parent / "blend" / "verdicts.json").read_text())
    assert list(shipped) == [name]
    verdict = _blend_verdict.find(name)
    assert verdict is not None and verdict.passes and verdict.questions >= 50


# ---- When, and how much


def test_auto_is_what_loading_leaves_time_for(
    long_tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"kv_dir": str(tmp_path), "kv_load_always": True, "kv_load_timeout": 60}
    with make(long_tiny, **options) as engine:
        engine.wait_for_store()
        first = engine.chat(QUESTION, documents=DOCUMENTS, blend="auto", max_tokens=1)
        floor = engine.chat(
            QUESTION, documents=DOCUMENTS, blend=0.15, max_tokens=1, cache_salt="other"
        )
        assert first.usage.blend is not None and floor.usage.blend is not None
        assert first.usage.blend.recomputed_tokens == floor.usage.blend.recomputed_tokens
        assert engine._auto_ratio(100) == 0.15, "nothing was loaded"
        engine.chat(QUESTION, documents=DOCUMENTS, max_tokens=1)
        engine.flush_store()
    with make(long_tiny, **options) as engine:
        engine.wait_for_store()
        engine.chat(QUESTION, documents=DOCUMENTS, max_tokens=1)
        stats = engine.stats()
        assert stats["loaded_disk_tokens"] > 0 and stats["load_ns"] > 0
        monkeypatch.setattr(engine, "stats", lambda: {**stats, "compute_ns_per_token": 0})
        assert engine._auto_ratio(100) == 0.15, "no speed is known"
        each = stats["load_ns"] / stats["loaded_disk_tokens"]
        for compute, ratio in ((2 * each, 0.5), (100 * each, 0.15), (each / 2, 1.0)):
            monkeypatch.setattr(
                engine, "stats", lambda: {**stats, "compute_ns_per_token": compute}  # noqa: B023
            )
            assert engine._auto_ratio(100) == pytest.approx(ratio)


def test_idle_learning_makes_nobody_wait(blender: quire.Engine) -> None:
    idle = {"ratio": 0.1, "learn": "idle"}
    first = blender.chat(QUESTION, documents=DOCUMENTS, blend=idle, max_tokens=3)
    assert first.usage.blend is not None
    assert first.usage.blend.moved_tokens == first.usage.blend.learned_tokens == 0
    assert not first.usage.blend.approximate
    while blender.stats()["waiting"] or blender.stats()["running"]:
        pass  # the engine's own thread learns the documents
    turned = [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[1]]
    again = blender.chat(QUESTION, documents=turned, blend=idle, max_tokens=3)
    assert again.usage.blend is not None and again.usage.blend.moved_tokens > 10


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "x", "--blend", "0.1"], "--blend has no effect without --document"),
        (["generate", "x", "--document", "f", "--prompt-ids", "1"], "--document does not go with"),
        (["generate", "x", "--find-documents"], "--find-documents has no effect without --document"),
        (["generate", "x", "--find-documents", "--document", "f"], "--find-documents needs --blend"),
        (["blend", "list"], "there is no action 'list'"),
        (["blend", "add"], "which documents"),
        (["blend", "add", "f"], "--kv-dir"),
    ],
)
def test_the_program_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, _, err = program.run(capsys, *words)
    assert code == 2 and message in err


def test_divergence_of_equal_distributions_is_zero() -> None:
    assert blend_command.divergence({1: -0.5, 2: -1.5}, {1: -0.5, 2: -1.5}) == 0
    assert blend_command.divergence({1: -0.5, 2: -1.5}, {1: -1.5, 2: -0.5}) > 0.2


def test_questions_have_their_answer_in_the_documents() -> None:
    import random

    source = random.Random(3)
    for _ in range(20):
        for question in (blend_command.notes(source), blend_command.cut_facts(source)):
            assert question.answer in " ".join(question.documents)
    cut = blend_command.cut_facts(source)
    thing = cut.text.removeprefix("Where is the ").removesuffix(" kept?")
    assert not any(thing in text and cut.answer in text for text in cut.documents)
