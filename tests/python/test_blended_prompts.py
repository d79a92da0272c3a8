"""Prompts with documents: how they are composed and tokenised, blended answers of the engine, the
program and the command line. What is exact is compared with ==."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import program
import pytest
import quire
from quire import _documents
from quire.cli import blend as blend_command
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
    assert first.anchor == turned.anchor
    assert first.chains() == [first.anchor + text for text in texts]
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
    with quire.Engine(long_tiny.directory, threads=1, kv_bytes=8 << 20) as engine:
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
        *more,
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
    second, _ = generate(capsys, long_tiny, files[::-1], "--blend", "0.1", *store)
    assert second["usage"]["blend"]["learned_tokens"] < 10
    assert second["usage"]["blend"]["moved_tokens"] > 20


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


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "x", "--blend", "0.1"], "--blend has no effect without --document"),
        (["generate", "x", "--document", "f", "--prompt-ids", "1"], "--document does not go with"),
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
