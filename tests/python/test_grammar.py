"""Answers under a grammar: what they are holds whatever the logits, the batch and the guesses."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quire
from quire import errors, grammar
from quire.grammar import Grammar
from quire.text import Tokenizer
from program import run
from tiny_model import TinyModel

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", 'c"', "ü"]}, "maxItems": 2},
        "spouse": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
}


def is_person(text: str) -> bool:
    found = json.loads(text)
    name, age = found["name"], found["age"]
    return (
        list(found)[:3] == ["name", "age", "tags"]
        and isinstance(name, str)
        and len(name) <= 6
        and isinstance(age, int)
        and 0 <= age <= 150
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"a", "b\n", 'c"', "ü"}
        and found.get("spouse") in (None, True, False)
        and found.keys() <= PERSON["properties"].keys()
    )


def is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict)


CHOICES = ["yes", "no", 'a "quoted"\n\\ one', "日本", "\t\x07"]
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"
CASES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json_schema": PERSON}, is_person),
    ({"json_schema": json.dumps(PERSON)}, is_person),
    ({"json_object": True}, is_json),
    ({"regex": DATE}, lambda text: re.fullmatch(DATE, text) is not None),
    ({"regex": "[^a]{1,9}"}, lambda text: re.fullmatch("[^a]{1,9}", text) is not None),
    ({"choice": CHOICES}, lambda text: text in CHOICES),
    (
        {"grammar": 'root ::= "(" root ")" | [a-c]+'},
        lambda text: re.fullmatch(r"\(*[abc]+\)*", text) is not None
        and text.count("(") == text.count(")"),
    ),
    (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "const_string", "value": "hello"},
            }
        },
        lambda text: text == "hello",
    ),
]
OPTIONS: list[dict[str, Any]] = [{"kv_bytes": 1 << 24, "page_size": 16}]
OPTIONS.append({**OPTIONS[0], "speculate": "ngram", "prefill_chunk": 5, "max_tree_nodes": 24})


@pytest.fixture(scope="module", params=["plain", "guesses"])
def masked(request: pytest.FixtureRequest, tiny: TinyModel) -> quire.Engine:
    return quire.Engine(tiny.directory, **OPTIONS[request.param == "guesses"])


@pytest.mark.parametrize(("wanted", "holds"), CASES, ids=lambda value: str(value)[:20])
def test_every_answer_holds(
    masked: quire.Engine, wanted: dict[str, Any], holds: Callable[[str], bool]
) -> None:
    ended = 0
    for seed in range(8):
        result = masked.generate(
            "Once upon", grammar=wanted, temperature=2, n=3, seed=seed, max_tokens=200
        )
        for sample in result.samples:
            if sample.finish_reason == "stop":
                assert sample.text is not None and holds(sample.text), (seed, sample.text)
                ended += 1
    assert ended >= 5


def test_answers_are_the_same_with_guesses_and_in_any_batch(tiny: TinyModel) -> None:
    requests: list[tuple[str, Any]] = [
        (
            f"Once {index} upon a time, a quire upon a time",
            {"grammar": wanted, "temperature": 1.5, "seed": index, "n": 2, "max_tokens": 60},
        )
        for index, (wanted, _) in enumerate(CASES)
    ]
    requests.append(("Once upon", {"max_tokens": 40, "temperature": 1, "seed": 1}))
    alone: list[Any] = []
    for options in OPTIONS:
        with quire.Engine(tiny.directory, **options) as engine:
            if not alone:
                alone = [engine.generate(prompt, **asked) for prompt, asked in requests]
            together = dict(engine.generate_each(requests))
            for index, expected in enumerate(alone):
                found = together[index]
                assert isinstance(found, quire.Result)
                for sample, other in zip(expected.samples, found.samples, strict=True):
                    assert (sample.ids, sample.logprobs) == (other.ids, other.logprobs), index
    assert len({tuple(result.samples[0].ids) for result in alone}) > 5


def test_logprobs_are_those_of_the_allowed_tokens(masked: quire.Engine) -> None:
    found = masked.generate("Once", grammar={"choice": ["a", "b"]}, logprobs=5)
    assert found.top_logprobs is not None and found.text in ("a", "b")
    best = found.top_logprobs[0]
    assert len(best) == 2
    total = sum(2.718281828459045**logprob for _, logprob in best)
    assert total == pytest.approx(1, abs=1e-5)
    assert found.ids == [best[0][0]] and found.finish_reason == "stop"


def test_bias_cannot_bring_back_what_is_masked(masked: quire.Engine) -> None:
    (wrong,) = masked.tokenizer.encode("z", add_special_tokens=False)
    found = masked.generate("Once", grammar={"regex": "[ab]{5}"}, logit_bias={wrong: 1000.0})
    assert re.fullmatch("[ab]{5}", found.text or "")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, "one of the entries"),
        ({"regex": "a", "choice": ["a"]}, "one of the entries"),
        ({"pattern": "a"}, "one of the entries"),
        ({"regex": "a("}, "parenthesis is not closed"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": "a" * 65537}, "at most 65536 bytes"),
        ({"regex": "a\0"}, r"U\+0000"),
        ({"regex": "(" * 2000 + "a" + ")" * 2000}, "Nest layer"),
        ({"grammar": "root ::= nothing"}, '"nothing" is not defined'),
        ({"grammar": "root ::= root"}, "no text of this model's tokens fits"),
        ({"choice": "yes"}, "a list of texts"),
        ({"choice": []}, "1 to 1024 texts"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"json_object": False}, "json_object must be true"),
        ({"structural_tag": {"type": "structural_tag"}}, "grammar: "),
        ({"json_schema": 5}, "json_schema must be an object"),
        ({"json_schema": {"type": "object", "allOf": None}}, "allOf must be a list"),
        ({"json_schema": {"type": "object", "required": [[]]}}, "required has"),
        ({"json_schema": '{"a":'}, "json_schema is no JSON"),
        ({"json_schema": "[" * 60000}, "json_schema is no JSON"),
        ({"json_schema": False}, "cannot accept any value"),
        ({"json_schema": {"type": "text"}}, "text"),
        ({"json_schema": {"enum": []}}, "must not be empty"),
        ({"json_schema": {"$ref": "#"}}, "no text of this model's tokens fits"),
        ({"json_schema": {"enum": ["x" * 70000]}}, "at most 65536 bytes"),
        ({"json_schema": {"type": "number", "maximum": float("nan")}}, "is no JSON"),
        ({"json_schema": {"type": "string", "format": object()}}, "is no JSON"),
    ],
)
def test_what_is_no_grammar_is_refused(
    masked: quire.Engine, wanted: dict[str, Any], words: str
) -> None:
    with pytest.raises(errors.BadArgumentError, match=words):
        masked.generate("Once", grammar=wanted, max_tokens=2)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"type": "string"}}, ".not"),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"properties": {"a": {"if": {}}}}, ".properties.a.if"),
        ({"$defs": {"a": {"contains": {}}}}, r".\$defs.a.contains"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, ".allOf"),
        ({"type": "object", "anyOf": [{"required": ["b"]}]}, ".anyOf"),
        ({"$ref": "#/$defs/a", "maxLength": 3}, r".\$ref"),
        ({"$ref": "https://example.com/schema"}, r".\$ref"),
        ({"items": {"minimum": 4}}, ".items.minimum"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, ".pattern"),
        ({"type": "string", "pattern": 'a"'}, ".pattern"),
        ({"type": "string", "pattern": r"\n"}, ".pattern"),
        ({"type": "object", "properties": {}, "required": ["a"]}, ".required"),
        ({"anyOf": {}}, ".anyOf"),
        ({"properties": []}, ".properties"),
        ({"properties": {"a": 5}}, ".properties.a"),
    ],
)
def test_words_that_would_not_hold_are_named(schema: Any, place: str) -> None:
    with pytest.raises(errors.BadArgumentError, match="json_schema" + place.replace(".", r"\.")):
        Grammar.of({"json_schema": schema})


def test_schemas_have_64_levels_at_most() -> None:
    def of(levels: int) -> Any:
        value: Any = {}
        for _ in range(levels - 1):
            value = {"items": value}
        return {"json_schema": value}

    assert Grammar.of(of(64)).text.count("items") == 63
    with pytest.raises(errors.BadArgumentError, match="more than 64 levels"):
        Grammar.of(of(65))


# Each takes XGrammar exponential or cubic time or memory, or would, if it were not bounded.
HOSTILE: list[dict[str, Any]] = [
    {"regex": "((a{1,1000}){1,1000}){200,1000}"},
    {"regex": "(a*)*(a*)*(a*)*b"},
    {"regex": "a{1000000000}"},
    {"grammar": 'root ::= root root | "a" | ""'},
    {"grammar": "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))])
     + '\nr40 ::= "a"'},
    {"json_schema": {"type": "string", "minLength": 10**9}},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    {"json_schema": {"type": "number", "minimum": -1e308, "maximum": 1e308}},
    {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}},
    {"json_schema": {"enum": [f"x{i}" for i in range(5000)]}},
]  # fmt: skip


def test_hostile_grammars_hurt_nobody(masked: quire.Engine) -> None:
    want = masked.generate("Once upon", max_tokens=30)
    streams = []
    for wanted in HOSTILE:
        streams.append(masked.stream("O", grammar=wanted, max_tokens=100, greedy=True))
    assert masked.generate("Once upon", max_tokens=30).ids == want.ids
    failed = 0
    for stream in streams:
        try:
            list(stream)
        except (errors.BadArgumentError, errors.TooLargeError):
            failed += 1
    assert failed < len(HOSTILE)
    assert masked.stats()["running"] == 0


def test_a_check_of_xgrammar_is_told_in_other_words(masked: quire.Engine) -> None:
    wanted = {"json_schema": {"type": "string", "pattern": "^[a-z]{250}$"}}
    with pytest.raises(errors.BadArgumentError, match="repetitions of at most 100 in patterns"):
        masked.compile_grammar(wanted)
    masked.compile_grammar({"json_schema": {"type": "string", "pattern": "^[a-z]{100}[a-z]{100}$"}})


def test_what_is_compiled_is_kept_within_its_bound(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_CACHE_BYTES", 4_000_000)
    with quire.Engine(tiny.directory, kv_bytes=1 << 22) as engine:
        sizes = []
        for length in range(1, 60):
            engine.compile_grammar({"json_schema": {"type": "string", "maxLength": 50 * length}})
            sizes.append(engine._compilers[()].cache_bytes)
        assert 2_000_000 < max(sizes) <= 4_000_000
        assert any(later < earlier for earlier, later in itertools.pairwise(sizes))


def test_neither_torch_nor_the_package_is_imported(tiny: TinyModel) -> None:
    code = (
        "import sys, quire\n"
        f"engine = quire.Engine({str(tiny.directory)!r}, kv_bytes=1 << 22)\n"
        "print(engine.generate('a', grammar={'regex': 'b{3}'}).text)\n"
        "print([name for name in ('torch', 'xgrammar') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["bbb", "[]"]


def test_without_xgrammar_the_package_is_named(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with quire.Engine(tiny.directory, kv_bytes=1 << 22) as engine:
        with pytest.raises(errors.UnavailableError, match=r"quire\[grammar\].*pip install --no-deps xgrammar==0.2.8"):
            engine.generate("a", grammar={"regex": "b"})
        assert engine.generate("a", max_tokens=2).ids


def test_ignore_eos_does_not_go_with_a_grammar(masked: quire.Engine) -> None:
    with pytest.raises(errors.BadArgumentError, match="ignore_eos"):
        masked.generate("a", grammar={"regex": "b"}, ignore_eos=True)


@pytest.mark.parametrize("text", ["a b", " x\n\ty", "日本語 é 🎉", "<|im_start|>a", '{"a": 1}'])
def test_bytes_of_tokens_are_those_of_their_text(masked: quire.Engine, text: str) -> None:
    tokens = masked.tokenizer.token_bytes()
    ids = masked.tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokens[id] for id in ids).decode() == masked.tokenizer.decode(ids)



def test_bytes_of_a_vocabulary_with_byte_fallback(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0xE6>": 2, "\u2581a": 3, "b": 4, "</s>": 5}
    decoders = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    file = {
        "added_tokens": [{"id": 5, "content": "</s>", "special": True, **special}],
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    tokens = Tokenizer(tmp_path).token_bytes()
    assert tokens == [b"<unk>", b"\n", b"\xe6", b" a", b"b", b""]
    assert Tokenizer(tmp_path).token_bytes(["</s>"])[5] == b"</s>"
    (tmp_path / "tokenizer.json").write_text(json.dumps({**file, "decoder": None}))
    with pytest.raises(errors.BadArgumentError, match="grammars need the bytes"):
        Tokenizer(tmp_path).token_bytes()


# ---- The program


def test_the_program_has_an_option_for_each(
    capsys: pytest.CaptureFixture[str], model: list[str], tmp_path: Path
) -> None:
    schema, ebnf = tmp_path / "schema.json", tmp_path / "grammar.ebnf"
    properties = {"a": {"type": "boolean"}}
    schema.write_text(
        json.dumps({"type": "object", "properties": properties, "required": ["a"]})
    )
    ebnf.write_text('root ::= "x" [yz]')
    ask = ("generate", *model, "--prompt", "Hi", "--temperature", "2", "--seed", "3")
    for options, pattern in (
        (("--json-schema", str(schema)), r'\{\s*"a"\s*:\s*(true|false)\s*\}\n'),
        (("--regex", "[ab]{3}"), "[ab]{3}\n"),
        (("--choice", "yes", "--choice", "no"), "(yes|no)\n"),
        (("--grammar", str(ebnf)), "x[yz]\n"),
    ):
        code, out, err = run(capsys, *ask, *options)
        assert code == 0 and re.fullmatch(pattern, out), (options, out, err)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    code, out, _ = run(capsys, "generate", *model, "--file", str(prompts), "--regex", "[ab]{3}")
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    assert code == 0 and all(re.fullmatch("[ab]{3}", text) for text in texts) and len(texts) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice are two grammars"),
        (("--regex", "a", "--ignore-eos"), "--ignore-eos does not go with --regex"),
        (("--regex", "a("), "parenthesis is not closed"),
        (("--json-schema", "nowhere"), "nowhere: No such file"),
    ],
)
def test_what_the_program_refuses(
    capsys: pytest.CaptureFixture[str], model: list[str], options: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, "generate", *model, "--prompt", "Hi", *options)
    assert code != 0 and out == "" and words in err
