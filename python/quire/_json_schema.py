"""Which JSON schemas are held by construction: bounds, and the words that XGrammar follows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from quire import errors

__all__ = ["check_schema", "embedded_schema"]

_BYTES_MAX = 64 << 10
_LEVELS_MAX = 64

# Words that constrain and that XGrammar passes over.
_NOT_FOLLOWED = frozenset(
    "not if then else contains minContains maxContains uniqueItems dependentRequired dependencies "
    "dependentSchemas unevaluatedItems $anchor $dynamicRef $dynamicAnchor $recursiveRef".split()
)
# Words that it follows only beside a "type".
_OF_A_TYPE = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern "
    "format minItems maxItems minProperties maxProperties".split()
)
# Beside each of these it passes over all other words, but for those that constrain nothing.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_NO_CONSTRAINTS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema $id "
    "$defs definitions discriminator nullable".split()
)
# Characters of a pattern that XGrammar would put into the answer as they are.
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\[\\"nrtfv0xuc]')
_ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(schema: Any) -> Any:
    """The schema, read if it is a text. BadArgumentError for what is none, is too large, or has
    words that would not hold, with their place."""
    if isinstance(schema, str):
        if len(schema.encode("utf-8", "replace")) > _BYTES_MAX:
            _refuse("", f"is more than {_BYTES_MAX} bytes")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            _refuse("", f"is no JSON: {error}")
    if not isinstance(schema, (Mapping, bool)):
        _refuse("", f"must be an object, not {type(schema).__name__}")
    _check_levels(schema)
    waiting = [("", schema)]
    while waiting:
        place, found = waiting.pop()
        if isinstance(found, Mapping):
            _check_words(place, found)
            waiting += _schemas_in(place, found)
        elif not isinstance(found, bool):
            _refuse(place, "must be an object")
    return dict(schema) if isinstance(schema, Mapping) else schema


def embedded_schema(schema: Any) -> Any:
    """A schema for a part of a structural tag, where control characters are not kept out of the
    answer: XGrammar takes them in texts of a bounded length, and in no others. So lengths become
    patterns of the same texts."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for word in _ONE:
        if word in found:
            found[word] = embedded_schema(found[word])
    for word in _LISTS:
        if word in found:
            found[word] = [embedded_schema(entry) for entry in found[word]]
    for word in _MAPS:
        if word in found:
            found[word] = {name: embedded_schema(entry) for name, entry in found[word].items()}
    least, most = found.pop("minLength", None), found.pop("maxLength", None)
    if (least, most) != (None, None) and "format" not in found:
        count = f"{{{least or 0},{'' if most is None else most}}}"
        found["pattern"] = r'^[^"\\\x00-\x1f]' + count + "$"
    return found


def _refuse(place: str, what: str) -> NoReturn:
    raise errors.BadArgumentError(f"json_schema{place} {what}")


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(_LEVELS_MAX):
        if not level:
            return
        level = [
            inner
            for outer in level
            if isinstance(outer, (Mapping, list, tuple))
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    if any(isinstance(value, (Mapping, list, tuple)) for value in level):
        _refuse("", f"is nested in more than {_LEVELS_MAX} levels")


def _schemas_in(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for word in _ONE:
        if word in schema:
            yield f"{place}.{word}", schema[word]
    for word in _LISTS:
        entries = schema.get(word, [])
        if not isinstance(entries, (list, tuple)):
            _refuse(f"{place}.{word}", "must be a list")
        yield from ((f"{place}.{word}[{i}]", entry) for i, entry in enumerate(entries))
    for word in _MAPS:
        entries = schema.get(word, {})
        if not isinstance(entries, Mapping):
            _refuse(f"{place}.{word}", "must be an object")
        yield from ((f"{place}.{word}.{str(name)[:40]}", entry) for name, entry in entries.items())


def _check_words(place: str, schema: Mapping[str, Any]) -> None:
    for word in schema:
        if word in _NOT_FOLLOWED and schema[word] is not False:
            _refuse(f"{place}.{word}", "cannot be held: XGrammar does not follow this word")
    for word in ("anyOf", "oneOf", "allOf"):
        if not isinstance(schema.get(word, []), (list, tuple)):
            _refuse(f"{place}.{word}", "must be a list")
    for word in _ALONE:
        others = [w for w in schema if w != word and w not in _NO_CONSTRAINTS]
        if word in schema and others:
            what = f"cannot be held beside {others[0]!r}: leave one of them out"
            _refuse(f"{place}.{word}", what)
    if len(schema.get("allOf", ())) > 1:
        _refuse(f"{place}.allOf", "cannot be held with more than one entry: join them")
    reference = schema.get("$ref")
    if reference is not None and not _is_local(reference):
        _refuse(f"{place}.$ref", 'must be "#" or begin with "#/": nothing is fetched')
    if "type" not in schema and "enum" not in schema and "const" not in schema:
        alone = [word for word in schema if word in _OF_A_TYPE]
        if alone:
            _refuse(f"{place}.{alone[0]}", 'cannot be held without a "type" beside it')
    for word in ("pattern", "propertyNames"):
        pattern = schema.get(word)
        pattern = pattern.get("pattern") if isinstance(pattern, Mapping) else pattern
        if isinstance(pattern, str) and _ESCAPED_IN_JSON.search(pattern):
            _refuse(f"{place}.{word}", "has a character that JSON writes with a backslash")
    if "pattern" in schema and not schema.keys().isdisjoint(("minLength", "maxLength")):
        _refuse(f"{place}.pattern", "cannot be held beside minLength and maxLength: join them")
    _check_required(place, schema)


def _is_local(reference: Any) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _check_required(place: str, schema: Mapping[str, Any]) -> None:
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(properties, Mapping):
        _refuse(f"{place}.properties", "must be an object")
    if not isinstance(required, (list, tuple)):
        _refuse(f"{place}.required", "must be a list")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            _refuse(f"{place}.required", f"has {str(name)[:40]!r}, which properties does not have")
