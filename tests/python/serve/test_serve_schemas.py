"""Seeded schemas, patterns and grammars of strangers: each is answered or refused by its field's name,
within a time, and what is answered holds. Depth, size, references in circles, long lists, patterns."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from quire import Grammar, errors
from server_process import Server, running
from tiny_model import TinyModel

SECONDS = 20.0  # of one schema: a hundred times what the slowest takes on a machine that is busy
MESSAGES = [{"role": "user", "content": "Who are you?"}]
# What stands where a word of a schema has its value: of another type, or of no use.
ODD: list[Any] = [None, True, -1, 2**70, 0.5, "", "\x01", [], {}, [[]], [{}], [None], {"": 0}, ["a", "a"]]
WORDS = "type enum const $ref items prefixItems properties required additionalProperties anyOf oneOf".split()
WORDS += "allOf pattern minLength maxLength minimum maximum multipleOf format minItems maxItems".split()
WORDS += "$defs not patternProperties propertyNames minProperties title nullable discriminator".split()
PATTERNS = ["^a+$", "(a|b)*", "[^b]{3,5}", "(((a?)?)?)?", "a{1000}", "(a{50}){50}", "(?=a)b", "(?:x)+"]
PATTERNS += ["\\d{4}-\\d{2}", "[z-a]", "(", "a**", "\\p{L}+", "\\1", "^$", "[\\ud800]", "(a*)*$", ".*.*.*b"]


@pytest.fixture(scope="module")
def server(tiny: TinyModel) -> Iterator[Server]:
    options = ("--no-prefix-cache", "--page-size", "16", "--limit", "grammar_seconds=2")
    with running(tiny.directory, *options) as server:
        yield server


class Schemas:
    """Schemas of a seed."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def any(self, depth: int = 4) -> Any:
        """A schema that is right more often than not."""
        kinds = [self._leaf, self._enum, self._pattern, self._reference]
        if depth > 0:
            kinds += [self._object, self._array, self._choice] * 2
        return self._chance.choice(kinds)(depth)

    def broken(self) -> Any:
        """A schema of which one to three words have a value that is odd."""
        schema = {"$defs": {"a": self.any(2)}, **self._object(3)}
        for _ in range(self._chance.randint(1, 3)):
            place = self._chance.choice(list(_objects(schema)))
            place[self._chance.choice(WORDS)] = self._chance.choice(ODD)
        return schema

    def _leaf(self, depth: int) -> Any:
        kind = self._chance.choice(["string", "integer", "number", "boolean", "null"])
        bounds: dict[str, Any] = {}
        if kind == "string" and self._chance.random() < 0.5:
            bounds = {"minLength": self._chance.choice([0, 3]), "maxLength": self._chance.choice([2, 9])}
        if kind == "integer" and self._chance.random() < 0.5:
            bounds = {"minimum": self._chance.choice([-(2**63), -5]), "maximum": self._chance.choice([-9, 99])}
        return {"type": kind, **bounds}

    def _enum(self, depth: int) -> Any:
        return {"enum": [self._chance.choice(["x", "\u2028", 'a"b', 1, None, 2.5]) for _ in range(3)]}

    def _pattern(self, depth: int) -> Any:
        return {"type": "string", "pattern": self._chance.choice(PATTERNS)}

    def _reference(self, depth: int) -> Any:
        return {"$ref": self._chance.choice(["#", "#/$defs/a", "#/$defs/b", "#/none", "a.json", "#/a~1"])}

    def _object(self, depth: int) -> Any:
        names = self._chance.sample(["a", "b", "c", "", "\n", '"', "\u2028"], self._chance.randint(0, 3))
        found = {"type": "object", "properties": {name: self.any(depth - 1) for name in names}}
        return {**found, "required": names[: self._chance.randint(0, len(names))]}

    def _array(self, depth: int) -> Any:
        return {"type": "array", "items": self.any(depth - 1), "maxItems": self._chance.choice([0, 2, 50])}

    def _choice(self, depth: int) -> Any:
        return {self._chance.choice(["anyOf", "oneOf"]): [self.any(depth - 1) for _ in range(2)]}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


def ask(server: Server, schema: Any, **more: Any) -> tuple[int, Any]:
    """Status and content for one that must look like the schema; 500 and long waits are failures."""
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 1, "seed": 1, **more}
    body |= {} if more else {"guided_json": schema}
    begin = time.monotonic()
    status, _, content = server.request("POST", "/v1/chat/completions", body)
    assert status in (200, 400), (status, content, str(schema)[:2000])
    assert time.monotonic() - begin < SECONDS, str(schema)[:2000]
    if status == 400:
        assert content["error"]["param"] is not None, (content, str(schema)[:2000])
        assert "defect" not in str(content) and len(str(content)) < 1000
    return status, content


def test_schemas_of_a_seed_are_answered_or_refused(server: Server) -> None:
    schemas = Schemas(random.Random("schemas"))
    statuses = []
    for _ in range(60):
        root = {"$defs": {"a": schemas.any(2), "b": {"$ref": "#/$defs/a"}}, **schemas._object(4)}
        statuses.append(ask(server, root)[0])
    assert statuses.count(200) > 10 and statuses.count(400) > 10
    assert server.request("GET", "/health")[0] == 200


def test_broken_schemas_of_a_seed_are_answered_or_refused(server: Server) -> None:
    schemas = Schemas(random.Random("broken"))
    statuses = [ask(server, schemas.broken())[0] for _ in range(150)]
    assert statuses.count(400) > 75
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("word", WORDS)
def test_no_value_of_a_word_is_a_defect(word: str) -> None:
    """Each word with each odd value, where a schema stands: it is taken or refused by its place."""
    for odd in ODD:
        for schema in ({"type": "object", word: odd}, {word: odd}, {"properties": {"a": {word: odd}}}):
            try:
                Grammar.of({"json_schema": schema})
            except errors.BadArgumentError as error:
                assert str(error).startswith(("json_schema", "grammar: json_schema")), (schema, error)


def chain(links: int, last: Any) -> Any:
    """Definitions of which each refers to the next."""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    return {"$defs": {**defs, f"d{links}": last}, "$ref": "#/$defs/d0"}


def bomb(levels: int, width: int) -> Any:
    """Definitions of which each has the next several times: small as it is written."""
    defs: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * width}
        for i in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}, "other": {"$ref": "#/$defs/n"}}}
LARGE: dict[str, Callable[[], Any]] = {
    "depth of the limit": lambda: nested(63),
    "depth above it": lambda: nested(65),
    "an enum of the limit": lambda: {"enum": [f"word {i}" for i in range(4000)]},
    "an enum above it": lambda: {"enum": [f"word {i}" for i in range(9000)]},
    "many properties": lambda: {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
    "a list of a node": lambda: {**NODE, "$defs": {"n": {"$ref": "#"}}},
    "a circle of one": lambda: {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "itself alone": lambda: {"$ref": "#"},
    "a circle of three": lambda: chain(3, {"$ref": "#/$defs/d1"}),
    "a circle of choices": lambda: chain(2, {"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]}),
    "a circle that must be": lambda: {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "a long chain": lambda: chain(500, {"type": "null"}),
    "a bomb of references": lambda: bomb(30, 4),
    "long texts": lambda: {"type": "string", "minLength": 10_000, "maxLength": 1_000_000},
    "long lists": lambda: {"type": "array", "items": {"type": "null"}, "minItems": 9999, "maxItems": 10**9},
    "negative lengths": lambda: {"type": "string", "minLength": -5, "maxLength": -6},
    "numbers without end": lambda: {"type": "integer", "minimum": -(10**38), "maximum": 10**38},
    "an empty range": lambda: {"type": "integer", "minimum": 5, "maximum": 4},
    "choices of choices": lambda: {"anyOf": [{"anyOf": [{"enum": [i]}] * 20} for i in range(20)]},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_and_circles(server: Server, name: str) -> None:
    ask(server, LARGE[name]())
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["choices"]


@pytest.mark.parametrize("pattern", PATTERNS + ["(" * 1000 + ")" * 1000, "a?" * 5000, "[a-z]{60000}"])
def test_patterns(server: Server, pattern: str) -> None:
    """As a schema's and as one of their own."""
    ask(server, {"type": "string", "pattern": pattern})
    ask(server, pattern, guided_regex=pattern)


def test_grammars_of_a_seed(server: Server) -> None:
    chance = random.Random("grammars")
    parts = ['"a"', "root", "other", "|", "(", ")", "*", "+", "?", "[a-z]", "::=", "\n", "{2,9}", '"', "\\"]
    parts += ["{99999}", "[^", "]", "#", "other ::= root", "(root | other)*", "\u2028", '""']
    statuses = set()
    for _ in range(80):
        text = "root ::= " + " ".join(chance.choices(parts, k=chance.randint(1, 12)))
        statuses.add(ask(server, text, guided_grammar=text)[0])
    assert statuses == {200, 400}


def test_what_is_answered_holds(server: Server) -> None:
    """Answers to schemas of a seed that are short are JSON of the schema's type."""
    schemas = Schemas(random.Random("holds"))
    ended = 0
    for seed in range(40):
        schema = schemas._array(0) | {"maxItems": 3}
        body = {"messages": MESSAGES, "max_tokens": 120, "temperature": 2, "seed": seed}
        status, _, found = server.request("POST", "/v1/chat/completions", {**body, "guided_json": schema})
        if status == 200 and found["choices"][0]["finish_reason"] == "stop":
            value = json.loads(found["choices"][0]["message"]["content"])
            assert isinstance(value, list) and len(value) <= 3, (schema, value)
            ended += 1
    assert ended > 10
