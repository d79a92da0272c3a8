"""What an answer must look like: the fields of all APIs that say so, as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire import errors
from quire.grammar import Grammar
from quire.serve.fields import Fields
from quire.serve.problems import Problem

__all__ = ["Wanted", "read_inner_format", "read_wanted", "wanted"]

# vLLM's fields, newer and older, and the grammar that each is.
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class Wanted(NamedTuple):
    """A grammar, and the field of the body that asks for it."""

    grammar: Grammar
    field: str


def wanted(field: str, grammar: Mapping[str, Any]) -> Wanted:
    """Problem (400) with the field's name for what is no grammar, or is out of bounds."""
    try:
        return Wanted(Grammar.of(grammar), field)
    except errors.BadArgumentError as error:
        raise Problem(400, f"{field}: {error}", param=field, code="invalid_value") from None


def read_wanted(fields: Fields, format: str | None = "response_format") -> Wanted | None:
    """The grammar of a request; None: its answer is free. Problem (400) for more than one.

    format: the field that says it in OpenAI's form; None: this API has none.
    """
    found = [] if format is None else [_read_format(fields, format, nests=True)]
    found += [_read_structured(fields), *(_read_guided(fields, name) for name in _GUIDED)]
    given = [entry for entry in found if entry is not None]
    fields.ignore("guided_decoding_backend")
    fields.only("guided_whitespace_pattern")
    fields.only("structural_tag")
    if len(given) > 1:
        message = f"{given[0].field} and {given[1].field} both say what the answer must look like"
        raise Problem(400, message, param=given[1].field, code="invalid_value")
    if not given:
        return None
    fields.only("ignore_eos", False, why=f"does not go with {given[0].field}")
    return given[0]


def _read_format(fields: Fields, name: str, *, nests: bool) -> Wanted | None:
    """OpenAI's form: {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema"} with the
    schema beside it or, where the API nests it, within "json_schema"; both are read everywhere."""
    format = fields.object(name)
    if format is None:
        return None
    kind = format.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind != "json_schema":
        fields.leave(format)
        return None if kind == "text" else wanted(fields.name(name), {"json_object": True})
    inner = format.object("json_schema") if format.has("json_schema") else format
    assert inner is not None
    inner.ignore("name", "description", "strict")
    schema = inner.any("schema")
    if inner is not format:
        format.leave(inner)
    fields.leave(format)
    if not inner.has("schema"):
        if nests and inner is format:
            inner.refuse("json_schema", "an object whose schema is a JSON schema")
        inner.refuse("schema", "a JSON schema")
    return wanted(inner.name("schema"), {"json_schema": schema})


def read_inner_format(fields: Fields, name: str, outer: Fields | None) -> Wanted | None:
    """As `read_wanted`, in APIs that have OpenAI's form as the `format` of another field. outer:
    that field."""
    format = None if outer is None else _read_format(outer, "format", nests=False)
    other = read_wanted(fields, None)
    if format is not None and other is not None:
        fields.refuse(name, f"without a format beside {other.field}")
    return format or other


def _read_structured(fields: Fields) -> Wanted | None:
    outputs = fields.object("structured_outputs")
    if outputs is None:
        return None
    given = [name for name in _STRUCTURED if outputs.has(name)]
    outputs.only("disable_any_whitespace", False)
    outputs.only("disable_additional_properties", False, True)
    outputs.only("disable_fallback", False, True)
    outputs.only("whitespace_pattern")
    if len(given) != 1:
        fields.refuse("structured_outputs", "an object with one of " + ", ".join(_STRUCTURED))
    (name,) = given
    value = outputs.any(name)
    fields.leave(outputs)
    return wanted(outputs.name(name), {_STRUCTURED[name]: value})


def _read_guided(fields: Fields, name: str) -> Wanted | None:
    value = fields.any(name)
    return None if value is None else wanted(fields.name(name), {_GUIDED[name]: value})
