"""The tools of a request: what the model may call, and what it must."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from quire._json_schema import embedded_schema
from quire.serve.fields import Fields
from quire.serve.grammars import Wanted, wanted
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.tool_parser import NAME, CallTexts, call_texts

__all__ = ["Tools", "read_tools"]

_BLANKS_MAX = 64  # between two elements of JSON, as in schemas that are a grammar of their own
# An answer that is no object of JSON, and so no call where calls have no opening tag.
_NO_OBJECT = r"[ \t\r\n]*([^ \t\r\n{][\s\S]*)?"


@dataclasses.dataclass(frozen=True)
class Tools:
    """entries: in OpenAI's form, which templates know. answer: what the answer must look like;
    None: it may be any text, and calls in it are what the model writes."""

    entries: list[dict[str, Any]]
    answer: Wanted | None = None


def read_tools(
    fields: Fields, limits: Limits, parser: str | None, template: str, format: Wanted | None
) -> Tools | None:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat; None: there are no tools, or none
    may be called.

    parser: the format of calls. template: of the chat, which tells versions of the format apart.
    format: what the request says of an answer that is no call.
    """
    entries = fields.objects("tools", limits.tools) or []
    choice = _read_choice(fields)
    single = not fields.boolean("parallel_tool_calls", True)
    tools = [_tool(entry) for entry in entries]
    for entry in entries:
        fields.leave(entry)
    if not tools and choice not in ("auto", "none"):
        fields.refuse("tool_choice", "auto or none where there are no tools")
    if not tools or choice == "none":
        return None
    if parser is None:
        fields.only("tools", why="is not supported: the model's chat template knows no tools")
    assert parser is not None
    if choice != "auto" and format is not None:
        fields.refuse("tool_choice", f"auto or none beside {format.field}")
    called = [tool for tool in tools if choice in ("auto", "required", tool.name)]
    if not called:
        names = ", ".join(tool.name for tool in tools)[:200]
        fields.refuse("tool_choice", f"the name of one of the tools, {names}")
    listed = [tool.entry for tool in tools]
    if choice == "auto" and format is None and not single and not any(t.strict for t in tools):
        return Tools(listed)
    texts = call_texts(parser, template)
    held = [_tag(tool, texts, tool.strict or choice != "auto") for tool in called]
    calls = _Calls(texts, held, single or choice not in ("auto", "required"))
    field = fields.name("tools") if format is None else format.field
    if choice != "auto":
        shape = calls.alone()
    elif format is None:
        shape = calls.within_text()
    else:
        shape = {"type": "or", "elements": [calls.alone(), _as_element(format)]}
    tag = {"structural_tag": {"type": "structural_tag", "format": shape}}
    return Tools(listed, wanted(field, tag))


@dataclasses.dataclass(frozen=True)
class _Tool:
    """entry: in OpenAI's form. place: of its parameters in the body."""

    entry: dict[str, Any]
    place: str
    strict: bool

    @property
    def name(self) -> str:
        return str(self.entry["function"]["name"])


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Answers that call functions, as XGrammar takes them. tags: a call of each function. single:
    there is one call at most."""

    texts: CallTexts
    tags: list[dict[str, Any]]
    single: bool

    def alone(self) -> dict[str, Any]:
        """Calls and nothing else."""
        parts = [_text(self.texts.begin), self._row(), _text(self.texts.end)]
        elements = [part for part in parts if part.get("value") != ""]
        return {"type": "sequence", "elements": elements}

    def within_text(self) -> dict[str, Any]:
        """Any text, in which what begins a call goes on as one."""
        if not self.texts.triggers:
            plain = {"type": "regex", "pattern": _NO_OBJECT}
            return {"type": "or", "elements": [self.alone(), plain]}
        begin, end = self.texts.begin, self.texts.end
        whole = [{"type": "tag", "begin": begin, "content": self._row(), "end": end}]
        begun = tuple(self.texts.triggers)
        alone = [tag for tag in self.tags if tag["begin"].startswith(begun)]
        return {
            "type": "triggered_tags",
            "triggers": list(begun),
            "tags": [*(whole if begin else []), *alone],
            "at_least_one": False,
            "stop_after_first": self.single,
        }

    def _row(self) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": self.tags,
            "separator": self.texts.separator,
            "at_least_one": True,
            "stop_after_first": self.single,
        }


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _json_element(schema: Any) -> dict[str, Any]:
    blanks = {"max_whitespace_cnt": _BLANKS_MAX}
    return {"type": "json_schema", "json_schema": embedded_schema(schema), **blanks}


def _as_element(wanted: Wanted) -> dict[str, Any]:
    """A grammar as a part of another one. Problem (400) with its field where it cannot be one."""
    grammar = wanted.grammar
    if grammar.kind == "json_schema":
        return _json_element(json.loads(grammar.text))
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "grammar":
        return {"type": "grammar", "grammar": grammar.text}
    shape = json.loads(grammar.text).get("format")
    if not isinstance(shape, dict):
        message = f"{wanted.field}.format must be an object beside tools"
        raise Problem(400, message, param=wanted.field, code="invalid_value")
    return shape


def _read_choice(fields: Fields) -> str:
    """ "auto", "none", "required", or the name of a function."""
    choice = fields.any("tool_choice")
    if not isinstance(choice, dict):
        return fields.choice("tool_choice", ("auto", "none", "required"), "auto")
    named = fields.object("tool_choice")
    assert named is not None
    named.only("type", "function")
    inner = named.object("function") if named.has("function") else named
    name = None if inner is None else inner.text("name", 256)
    if inner is not None and inner is not named:
        named.leave(inner)
    fields.leave(named)
    if not name or not NAME.fullmatch(name) or name in ("auto", "none", "required"):
        fields.refuse("tool_choice", "auto, none, required, or an object with a function's name")
    return name


def _tool(entry: Fields) -> _Tool:
    entry.only("type", "function")
    function = entry.object("function")
    name = None if function is None else function.text("name", 256)
    if function is None or name is None or not NAME.fullmatch(name):
        entry.refuse("function", "an object with a name of letters, digits, _, . and -")
    parameters = function.object("parameters")
    found: dict[str, Any] = {"name": name, "description": function.text("description") or ""}
    found["parameters"] = {} if parameters is None else function.any("parameters")
    listed = {"type": "function", "function": found}
    strict = function.boolean("strict")
    entry.leave(function)
    entry.ignore("cache_control")
    return _Tool(listed, function.name("parameters"), strict)


def _tag(tool: _Tool, texts: CallTexts, held: bool) -> dict[str, Any]:
    """A call of this function, as XGrammar takes it. held: its arguments follow the schema; else
    they are any object."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": True}
    if held:
        schema = {"type": "object", **tool.entry["function"]["parameters"]}
        if schema["type"] != "object":
            raise Problem(400, f"{tool.place} must be a schema of objects", param=tool.place)
        wanted(tool.place, {"json_schema": schema})  # what is wrong with it has this place
    return {
        "type": "tag",
        "begin": texts.head.replace("NAME", tool.name),
        "content": _json_element(schema),
        "end": texts.tail,
    }
