"""Prompts with documents: how they are composed and tokenised, blended answers of the engine, the
program and the command line. What is exact is compared with ==."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import program
import pytest
import quire
from quire import _blend_verdict, _documents
from quire._blend_verdict import BlendVerdict
from quire.cli import answers
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
    assert list(first.chains(None)) == [(anchor + text, len(anchor)) for text in texts]
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
    assert isinstance(usage, quire.BlendUsage) and usage.approximate
    assert 0 < usage.recomputed_tokens < usage.moved_tokens
    assert usage.deviation_max >= usage.deviation_mean > 0
    assert usage.learned_tokens > 0 and usage.moved_bytes > 0
    whole = usage.exact_tokens + usage.kept_tokens + usage.moved_tokens + usage.computed_tokens
    assert whole == result.usage.prompt_tokens
    stats = blender.stats()
    for name in ("exact", "kept", "moved", "recomputed", "computed"):
        assert stats[f"blend_{name}_tokens"] == getattr(usage, f"{name}_tokens")
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


class _Template:
    """Prints what the messages say."""

    def render(self, messages: Any, **_: Any) -> str:
        return "<s>" + "".join(message["content"] for message in messages)


class _Letters:
    """A token for each letter."""

    chat_template = _Template()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


def test_prompts_of_many_documents_are_composed_in_linear_time() -> None:
    """40 000 took 24 seconds of a CPU; they take 0.04."""
    chat = [{"role": "user", "content": "Which fox?"}]
    begin = time.process_time()
    composed = _documents.compose_chat(_Letters(), chat, ["fox"] * 40_000, {})  # type: ignore[arg-type]
    text = _documents.compose_text(_Letters(), "Which?", ["fox"] * 40_000)  # type: ignore[arg-type]
    assert time.process_time() - begin < 3
    for each, first in ((composed, 3), (text, 0)):
        assert each.documents is not None and len(each.documents) == 40_000
        assert each.documents[0] == (first, first + 5)
        assert each.documents[-1] == (first + 5 * 39_999, first + 5 * 40_000)
    assert bytes(composed.ids[-10:]) == b"Which fox?"


def test_chains_are_made_one_after_the_other() -> None:
    """1 000 documents behind 20 000 tokens were 160 MB of copies of these."""
    anchor = list(range(20_000))
    ranges = [(20_000 + i, 20_001 + i) for i in range(1000)]
    composed = _documents.Composed(anchor + list(range(1000)), ranges)
    tracemalloc.start()
    try:
        assert sum(len(chain) for chain, _ in composed.chains(None)) == 1000 * 20_001
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_documents_have_budgets_of_their_own(blender: quire.Engine) -> None:
    def moved(ratios: Any) -> quire.BlendUsage:
        options: Any = {"ratio": 0.0, "link_tokens": 0, "document_ratios": ratios}
        return found(blender.chat(QUESTION, documents=DOCUMENTS, blend=options, max_tokens=1))

    none, one = moved([None, None, None]), moved([None, 1, None])
    assert none.moved_tokens == one.moved_tokens > 40
    ranges = blender.document_ranges(QUESTION, documents=DOCUMENTS)
    assert none.recomputed_tokens == 1, "a forward has a row"
    assert one.recomputed_tokens == ranges[1][1] - ranges[1][0] > 10
    # What is asked of one alone is approximate with any ratio of the others.
    whole: Any = {"ratio": 1, "document_ratios": [1, 0.5, 1]}
    assert found(blender.chat(QUESTION, documents=DOCUMENTS, blend=whole)).approximate
    assert not _documents.is_exact({"ratios": [1.0], "document_ratios": [1.0, 0.5]})
    assert _documents.is_exact({"ratios": [1.0], "document_ratios": [1.0, -1.0]})


def test_token_ids_and_ranges(blender: quire.Engine) -> None:
    chat = blender.chat(QUESTION, documents=DOCUMENTS, blend=0.2, max_tokens=4)
    ranges = blender.document_ranges(QUESTION, documents=DOCUMENTS)
    ids = blender.generate(
        chat.prompt_ids, documents=ranges, blend={"ratio": 0.2}, max_tokens=4, cache_salt="other"
    )
    assert drawn(ids) == drawn(chat)
    arrays = blender.generate(
        np.array(chat.prompt_ids), documents=np.array(ranges), blend=0.2, max_tokens=4
    )
    assert drawn(arrays) == drawn(chat)


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
        ({"documents": ["a", "b"], "blend": False}, "ratio is False; it must be a number"),
        ({"documents": ["a", "b"], "blend": [0.1]}, "ratio must be a number, not list"),
        ({"documents": ["a", "b"], "blend": {"ratio": None}}, "ratio must be a number, not None"),
        ({"documents": ["a", "b"], "blend": {"ratios": 0.1}}, "ratios is a list of numbers"),
        ({"documents": ["a", "b"], "blend": {"check_layers": 1}}, "check_layers is a list"),
        ({"documents": ["a", "b"], "blend": {"thresholds": "1"}}, "thresholds is a list"),
        ({"documents": ["a", b"b"]}, r"documents\[1\] must be a text, not bytes"),
        (
            {"documents": ["a", "b"], "blend": {"document_ratios": [1]}},
            "2 documents and 1 document_ratios; give one for each",
        ),
        (
            {"documents": ["a", "b"], "blend": {"document_ratios": [1, -1]}},
            r"document_ratios\[1\] is -1.0; it must be a number from 0 to 1, or None",
        ),
        (
            {"documents": ["a", "b"], "blend": {"document_ratios": [float("nan"), 1]}},
            r"document_ratios\[0\] is nan",
        ),
        (
            {"documents": ["a", "b"], "blend": {"document_ratios": 1}},
            "is a list of numbers, not in",
        ),
        ({"documents": "auto", "blend": {"document_ratios": [1]}}, "the engine finds these"),
    ],
)
def test_what_is_refused(blender: quire.Engine, options: Any, message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=message):
        blender.chat(QUESTION, max_tokens=2, **options)
    assert blender.stats()["running"] == blender.stats()["waiting"] == 0


def test_a_message_with_the_mark_of_a_document_is_named(blender: quire.Engine) -> None:
    """The error was about the template."""
    for chat in (
        [{"role": "user", "content": 'a \ue0d0"\n0\ue0d1 b'}],
        [{"role": "system", "content": '\ue0d0"\n7\ue0d1'}, *QUESTION],
        [{"role": "user", "content": [_part("a"), _part('\ue0d0"\n0\ue0d1', "text")]}],
    ):
        with pytest.raises(quire.BadArgumentError, match="a message has the private characters"):
            blender.chat(chat, documents=DOCUMENTS)
    odd = [{"role": "user", "content": "a \ue0d0 b \ue0d1 \ue0d00\ue0d1"}]
    assert blender.chat(odd, documents=DOCUMENTS, max_tokens=1).ids


# ---- Documents that are parts of messages


def _part(text: str, type: str = "document") -> dict[str, str]:
    return {"type": type, "text": text}


def parted(first: str, second: str) -> list[dict[str, Any]]:
    """A chat with a document in the system's message and two in the user's."""
    system = [_part("Be brief. ", "text"), _part(DOCUMENTS[0])]
    user = [_part("Here: ", "text"), _part(first), _part("and ", "text"), _part(second)]
    user.append(_part("Which fox?", "text"))
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


PARTED = parted(DOCUMENTS[1], DOCUMENTS[2])


def test_documents_stand_where_their_messages_have_them(blender: quire.Engine) -> None:
    tokenizer = blender.tokenizer
    composed = _documents.compose_chat(tokenizer, PARTED, (), {})
    contents = [
        f"Be brief. {DOCUMENTS[0]}\n\n",
        f"Here: {DOCUMENTS[1]}\n\nand {DOCUMENTS[2]}\n\nWhich fox?",
    ]
    plain = [{"role": r, "content": c} for r, c in zip(("system", "user"), contents)]
    text = tokenizer.decode(composed.ids, skip_special_tokens=False)
    assert text == tokenizer.chat_template.render(plain)
    alone = _documents.compose_chat(tokenizer, QUESTION, DOCUMENTS, {})
    texts = [alone.ids[begin:end] for begin, end in alone.documents]
    assert [composed.ids[begin:end] for begin, end in composed.documents] == texts
    assert tokenizer.encode_chat(PARTED) == composed.ids
    assert blender.check(PARTED) == len(composed.ids)
    assert blender.document_ranges(PARTED) == composed.documents


def test_documents_stand_before_a_chat_and_in_it(blender: quire.Engine) -> None:
    system = {"role": "system", "content": [_part(DOCUMENTS[0])]}
    user = {"role": "user", "content": [_part("See ", "text"), _part(DOCUMENTS[2])]}
    composed = _documents.compose_chat(blender.tokenizer, [system, user], DOCUMENTS[1:2], {})
    text = blender.tokenizer.decode(composed.ids, skip_special_tokens=False)
    assert f"user\n{DOCUMENTS[1]}\n\nSee {DOCUMENTS[2]}\n\n<|im_end|>" in text
    found = [blender.tokenizer.decode(composed.ids[b:e]) for b, e in composed.documents]
    assert found == [f"{document}\n\n" for document in DOCUMENTS]


def test_parts_of_messages_without_blend_are_computed(
    long_tiny: TinyModel, blender: quire.Engine
) -> None:
    full = blender.chat(PARTED, max_tokens=6)
    assert full.usage.blend is None
    assert drawn(full) == drawn(blender.generate(full.prompt_ids, max_tokens=6))
    with make(long_tiny) as other:
        ones = other.chat(PARTED, blend=1, max_tokens=6)
    assert drawn(ones) == drawn(full)
    assert found(ones).documents == 3 and not found(ones).approximate
    assert found(ones).moved_tokens == found(ones).recomputed_tokens > 20


def test_parts_of_messages_are_blended_at_their_places(blender: quire.Engine) -> None:
    result = blender.chat(PARTED, blend=0.1, max_tokens=6)
    usage = found(result)
    assert usage.documents == 3 and usage.approximate and usage.learned_tokens > 0
    assert 0 < usage.recomputed_tokens < usage.moved_tokens
    ids = blender.generate(
        result.prompt_ids,
        documents=blender.document_ranges(PARTED),
        blend=0.1,
        max_tokens=6,
        cache_salt="other",
    )
    assert drawn(ids) == drawn(result)
    turned = blender.chat(parted(DOCUMENTS[2], DOCUMENTS[1]), blend=0.1, max_tokens=1)
    assert found(turned).learned_tokens == 0 and found(turned).moved_tokens == usage.moved_tokens


def test_parts_of_messages_are_prepared(blender: quire.Engine) -> None:
    assert len(blender.prepare([], PARTED)) == 3
    result = blender.chat(PARTED, blend=0.1, max_tokens=1)
    assert found(result).learned_tokens == 0 and found(result).moved_tokens > 20


@pytest.mark.parametrize(
    "content, message",
    [
        ([_part(" ")], "message 0, part 0 is empty"),
        ([_part("a \ue0d0")], "message 0, part 0 has one of the private characters"),
        ([_part("a"), {"type": "other"}], "message 0, part 1: beside a document stand parts of"),
        ([_part("a"), "b"], "message 0, part 1: beside a document stand parts of the type text"),
        ([{**_part("a"), "title": "b"}], "part 0: there is no field 'title'; a document has type"),
        ([_part("a"), {**_part("b", "text"), "x": 1}], "there is no field 'x'; a text has type"),
        ([{"type": "document"}], "message 0, part 0 must be a text, not NoneType"),
        ([_part("a"), {"type": "text", "text": 7}], "message 0, part 1 must be a text, not int"),
        ([_part("a\ud800")], "message 0, part 0 has a lone surrogate"),
    ],
)
def test_what_is_wrong_with_parts(blender: quire.Engine, content: Any, message: str) -> None:
    for options in ({}, {"blend": 0.1}):
        with pytest.raises(quire.BadArgumentError, match=message):
            blender.chat([{"role": "user", "content": content}], **options)
    with pytest.raises(quire.BadArgumentError, match=message):
        blender.tokenizer.encode_chat([{"role": "user", "content": content}])


def test_parts_are_named_or_found(blender: quire.Engine) -> None:
    with pytest.raises(quire.BadArgumentError, match="a message names some") as error:
        blender.chat(PARTED, documents="auto", blend=0.1)
    assert error.value.option == "documents"


@pytest.mark.parametrize(
    "render",
    [
        lambda contents: json.dumps(contents, ensure_ascii=False),
        lambda contents: "".join(contents[::-1]),
        lambda contents: "".join(contents * 2),
        lambda contents: contents[0],
        lambda contents: "".join(contents).replace("\n", " "),
    ],
    ids=["escapes", "reverses", "repeats", "drops", "joins lines"],
)
def test_templates_that_change_messages_have_no_place_for_parts(
    render: Callable[[list[str]], str],
) -> None:
    class Template:
        def render(self, messages: Any, **_: Any) -> str:
            return render([message["content"] for message in messages])

    class Tokenizer(_Letters):
        chat_template: Any = Template()

    with pytest.raises(quire.BadArgumentError, match="does not print messages once, in order and"):
        _documents.compose_chat(Tokenizer(), PARTED, (), {})  # type: ignore[arg-type]


def test_template_args_are_checked_with_documents_too(blender: quire.Engine) -> None:
    """A name that the template does not use was refused without documents alone."""
    for chat, options in ((QUESTION, {"documents": DOCUMENTS}), (PARTED, {})):
        with pytest.raises(quire.BadArgumentError, match="has no variable 'nothing'"):
            blender.chat(chat, template_args={"nothing": 1}, **options)


def test_prompt_files_have_documents_in_messages(
    capsys: pytest.CaptureFixture[str], long_tiny: TinyModel, tmp_path: Path
) -> None:
    """A line with `blend` was refused for want of --blend-piece."""
    lines = [{"messages": PARTED, "max_tokens": 4}]
    lines.append({**lines[0], "blend": 0.1, "cache_salt": "blend"})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = program.run(
        capsys,
        *("generate", str(long_tiny.directory), "--file", str(file), "--greedy"),
        *("--dtype", "float32", "--threads", "1", "--blend-unverified"),
    )
    assert code == 0, err
    full, blended = (json.loads(line) for line in out.splitlines())
    assert "blend" not in full["usage"] and blended["usage"]["blend"]["documents"] == 3
    with make(long_tiny) as engine:
        assert full["ids"] == engine.chat(PARTED, max_tokens=4).ids
        salted = engine.chat(PARTED, blend=0.1, max_tokens=4, cache_salt="blend")
        assert blended["ids"] == salted.ids


def test_a_model_with_recurrent_layers_prepares_documents(
    long_tiny: TinyModel, tmp_path: Path
) -> None:
    """It was refused for a blend that nobody had asked for."""
    import transformers

    config = transformers.Mamba2Config(
        **{"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "hidden_size": 64},
        **{"num_hidden_layers": 2, "vocab_size": long_tiny.vocab_size},
        **{"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": long_tiny.eos},
    )
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(long_tiny.directory / name, tmp_path)
    with quire.Engine(tmp_path, dtype="float32", threads=1, blend_piece=64) as engine:
        assert [usage.cached_tokens for usage in engine.prepare(DOCUMENTS)] == [0, 0, 0]
        exact = engine.chat(QUESTION, documents=DOCUMENTS[:1], max_tokens=1)
        assert exact.usage.cached_tokens > 10
        with pytest.raises(quire.BadArgumentError, match="Mamba2ForCausalLM has recurrent layers"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend=0.1)


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
    for documents in ("text", b"text", {"a": 1}, 5, 0, 1.5, True):
        name = type(documents).__name__
        with pytest.raises(TypeError, match=f'documents is a list, or "auto", not {name}'):
            blender.chat(QUESTION, documents=documents)


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
    store = ("--kv-dir", str(tmp_path / "kv"), "--kv-load-timeout", "60")
    first, note = generate(capsys, long_tiny, files, "--blend", "0.1", *store)
    assert "(APPROXIMATE: " in note and first["usage"]["blend"]["learned_tokens"] > 20
    assert "; waited " in note
    second, _ = generate(capsys, long_tiny, files[::-1], "--blend", "0.1", *store)
    assert second["usage"]["blend"]["learned_tokens"] < 10
    assert second["usage"]["blend"]["moved_tokens"] > 20


def test_a_damaged_document_is_told(long_tiny: TinyModel, tmp_path: Path) -> None:
    """The usage had the reason for the prompt's own beginning alone, and the line about the store
    did not have what it brought of the documents."""
    documents = [f"{DOCUMENTS[0]} " * count for count in (2, 52)]
    options: Any = {"kv_dir": str(tmp_path), "kv_load_always": True, "kv_load_timeout": 60}

    def ask() -> tuple[quire.Result, quire.BlendUsage, str]:
        with make(long_tiny, **options) as engine:
            engine.wait_for_store()
            result = engine.chat(QUESTION, documents=documents, blend=0.1, max_tokens=3)
            engine.flush_store()
            return result, found(result), answers.sources(result.usage)

    cold, blend, line = ask()
    assert blend.miss == "not stored" and blend.disk_tokens == 0
    assert line.endswith("; documents from the store: none; then: not stored")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    damaged, blend, line = ask()
    assert drawn(damaged) == drawn(cold)
    assert blend.miss == "corrupt" and blend.learned_tokens > 1000
    assert "; documents from the store: " in line and line.endswith("; then: corrupt")
    sound, blend, line = ask()  # what was damaged was written anew
    assert drawn(sound) == drawn(cold)
    assert blend.miss is None and blend.disk_tokens > 1000
    left = blend.moved_tokens - blend.recomputed_tokens
    tokens = sound.usage.prompt_tokens
    assert line.startswith(f"{sound.usage.cached_tokens + left} of {tokens} prompt tokens not comp")
    assert f" {left} moved" in line
    assert line.endswith(f"; documents from the store: {blend.disk_tokens} disk")


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
    patient = ("--kv-load-timeout", "60")
    result, _ = generate(capsys, long_tiny, files, "--blend", "0.1", *store[:2], *patient)
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


def test_what_was_measured_is_told_where_it_cannot_be_kept(
    capsys: pytest.CaptureFixture[str],
    long_tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hours of measuring were lost."""
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    (tmp_path / "blend").write_text("a file")
    monkeypatch.setattr(blend_command, "_measure", lambda *_: None)
    words = ("blend", "eval", str(long_tiny.directory), "--threads", "1", "--kv-bytes", "64M")
    for more, told in (((), "verdict: blends are "), (("--json",), '"passes": ')):
        code, out, err = program.run(capsys, *words, *more)
        assert code == 1 and told in out and str(tmp_path / "blend") in err


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
        lambda text: text.replace("fingerprint", "fingerpr\udcff"),
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
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
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


def test_a_verdict_that_cannot_be_read_is_told(
    long_tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with make(long_tiny, blend_unverified=False) as engine:
        path = engine.keep_blend_verdict(GOOD)
    path.unlink()
    path.mkdir()
    with make(long_tiny, blend_unverified=False) as engine:
        with pytest.raises(quire.IoError, match=f"{path}: the verdict about blending cannot be re"):
            engine.chat(QUESTION, documents=DOCUMENTS, blend=0.1)


def test_a_kept_verdict_of_another_version_does_not_hide_the_one_that_comes_with_quire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _blend_verdict.fingerprint(model_identity(embedded_model_dir()), "bfloat16")
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    shipped = _blend_verdict.find(name)
    path = _blend_verdict.keep(name, GOOD)
    assert _blend_verdict.find(name) == GOOD != shipped
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    assert _blend_verdict.find(name) == shipped != None  # noqa: E711


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
        monkeypatch.setattr(engine, "stats", lambda **_: {**stats, "compute_ns_per_token": 0})
        assert engine._auto_ratio(100) == 0.15, "no speed is known"
        each = stats["load_ns"] / stats["loaded_disk_tokens"]
        # With each request the speeds are other ones; a conversation is to keep its blend.
        steps = ((2.01 * each, 0.5), (2.2 * each, 0.5), (1.9 * each, 0.55), (1.01 * each, 1.0))
        for compute, ratio in ((2 * each, 0.5), (100 * each, 0.15), (each / 2, 1.0), *steps):
            monkeypatch.setattr(
                engine,
                "stats",
                lambda **_: {**stats, "compute_ns_per_token": compute},  # noqa: B023
            )
            assert engine._auto_ratio(100) == ratio


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
        (["blend", "add", "f", "--kv-dir", "d", "--text", "t"], "add: --text has no effect"),
        (["blend", "add", "f", "--kv-dir", "d", "--seed", "1"], "add: --seed has no effect"),
        (["blend", "add", "f", "--kv-dir", "d", "--questions", "20"], "--questions has no effect"),
        (["blend", "eval", "m", "--model", "n"], "eval takes one MODEL"),
    ],
)
def test_the_program_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, _, err = program.run(capsys, *words)
    assert code == 2 and message in err


def test_the_program_says_by_which_option_a_blend_is_forced(
    capsys: pytest.CaptureFixture[str],
    long_tiny: TinyModel,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It named a member of C++, and an engine in Python."""
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    words = [word for name in files for word in ("--document", name)]
    code, _, err = program.run(
        capsys, "generate", str(long_tiny.directory), "x", *words, *("--blend", "0.1")
    )
    assert code == 1
    assert err.endswith("; a ratio of 1 is exact, and --blend-unverified forces it\n")


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
