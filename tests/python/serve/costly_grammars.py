"""A search for small grammars that take long to compile: parts of a seed, put together and repeated
until they pass a bound. Nothing here knows which parts are costly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from quire import errors
from quire.grammar import Grammar
from quire.serve.grammar_probe import GrammarProbe, TooCostlyError

BYTES_MAX = 32 << 10  # of a grammar that is tried
_REPEATS = (300, 2000, 10_000)


def _pattern(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(["a", "[a-z]", "[^a]", "ab", "é"])
    inner = _pattern(chance, depth - 1)
    shapes = (f"({inner})?", f"({inner})*", f"({inner})+", f"({inner}){{0,7}}", f"({inner}){{5}}")
    return chance.choice([*shapes, f"({inner}|{_pattern(chance, depth - 1)})", inner + inner])


def _regex(chance: random.Random) -> Callable[[int], Grammar]:
    part = _pattern(chance, chance.randint(1, 3))
    return lambda count: Grammar("regex", part * count)


def _ebnf(chance: random.Random) -> Callable[[int], Grammar]:
    words = ["root", '"a"', "[a-z]", '"ab"', '("a" | "b")', '"a"?', "[a-z]*", "(root | [b])?"]
    part = " ".join(chance.choices(words, k=chance.randint(1, 3)))
    join = chance.choice([" ", " | "])
    return lambda count: Grammar("grammar", 'root ::= "x" | "y" ' + join.join([part] * count))


def _schema(chance: random.Random) -> Callable[[int], Grammar]:
    leaf: Any = chance.choice(
        [{}, {"type": "string"}, {"enum": ["a", 1]}, {"type": "array", "items": {"type": "null"}}]
    )
    shape = chance.choice(["properties", "prefixItems", "anyOf", "maxLength", "pattern"])
    pattern = _pattern(chance, 2)

    def make(count: int) -> Grammar:
        schema: Any = {
            "properties": {"type": "object", "properties": {f"p{i}": leaf for i in range(count)}},
            "prefixItems": {"type": "array", "prefixItems": [leaf] * count},
            "anyOf": {"anyOf": [leaf] * count},
            "maxLength": {"type": "string", "maxLength": count},
            "pattern": {"type": "string", "pattern": pattern * count},
        }[shape]
        return Grammar("json_schema", json.dumps(schema))

    return make


def search(probe: GrammarProbe, seed: str, tries: int) -> Iterator[Grammar]:
    """Grammars that the probe gives up."""
    chance = random.Random(seed)
    for number in range(tries):
        make = (_regex, _ebnf, _schema)[number % 3](chance)
        for count in _REPEATS:
            grammar = make(count)
            if len(grammar.text.encode()) > BYTES_MAX:
                break
            try:
                probe.check(grammar, ())
            except TooCostlyError:
                yield grammar
                break
            except errors.BadArgumentError:
                break
