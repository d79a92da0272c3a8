"""The tools of a request: what the model may call, and what it must."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.serve.fields import Fields
from quire.serve.grammars import Wanted, wanted
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.tool_parser import NAME, call_texts

__all__ = ["Tools", "read_tools"]


@dataclasses.dataclass(frozen=True)
class Tools:
    """entries: in OpenAI's form, which templates know. calls: what the answer must be, if it must
    be calls; None: it may be text."""

    entries: list[dict[str, Any]]
    calls: Wanted | None = None


def read_tools(
    fields: Fields, limits: Limits, parser: str | None, template: str = ""
) -> Tools | None:
    """`tools` and `tool_choice` of a chat; None: there are no tools, or none may be called.

    parser: the format of calls; template: of the chat, which tells its versions apart.
    """
    entries = fields.objects("tools", limits.tools) or []
    choice = _read_choice(fields)
    parallel = fields.boolean("parallel_tool_calls", True)
    tools = [_tool(entry, forced=choice not in ("auto", "none")) for entry in entries]
    if not tools and choice not in ("auto", "none"):
        fields.refuse("tool_choice", "auto or none where there are no tools")
    if not tools or choice == "none":
        return None
    if parser is None:
        fields.only("tools", why="is not supported: the model's chat template knows no tools")
    if choice == "auto":
        why = "holds with tool_choice required or a named function alone"
        fields.only("parallel_tool_calls", True, why=why)
        return Tools(tools)
    called = [i for i, tool in enumerate(tools) if choice in ("required", _name(tool))]
    if not called:
        names = ", ".join(_name(tool) for tool in tools)[:200]
        fields.refuse("tool_choice", f"the name of one of the tools, {names}")
    assert parser is not None
    tags = [_tag(entries[i], tools[i], parser, template) for i in called]
    texts = call_texts(parser, template)
    single = choice != "required" or not parallel
    listed = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": texts.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }
    around = [{"type": "const_string", "value": text} for text in (texts.begin, texts.end)]
    parts = [part for part in (around[0], listed, around[1]) if part.get("value") != ""]
    format = {"type": "sequence", "elements": parts}
    tag = {"structural_tag": {"type": "structural_tag", "format": format}}
    return Tools(tools, wanted(fields.name("tools"), tag))


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
    if not name or not NAME.fullmatch(name) or name in ("auto", "none", "required"):
        fields.refuse("tool_choice", "auto, none, required, or an object with a function's name")
    return name


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _tool(entry: Fields, forced: bool) -> dict[str, Any]:
    entry.only("type", "function")
    function = entry.object("function")
    name = None if function is None else function.text("name", 256)
    if function is None or name is None or not NAME.fullmatch(name):
        entry.refuse("function", "an object with a name of letters, digits, _, . and -")
    parameters = function.object("parameters")
    if not forced:
        why = "holds with tool_choice required or a named function alone"
        function.only("strict", False, why=why)
    function.ignore("strict")
    found: dict[str, Any] = {"name": name, "description": function.text("description") or ""}
    found["parameters"] = {} if parameters is None else function.any("parameters")
    return {"type": "function", "function": found}


def _tag(entry: Fields, tool: dict[str, Any], parser: str, template: str) -> dict[str, Any]:
    """A call of this function, as XGrammar takes it."""
    schema = {"type": "object", **tool["function"]["parameters"]}
    place = entry.name("function.parameters")
    if schema["type"] != "object":
        raise Problem(400, f"{place} must be a schema of objects", param=place)
    wanted(place, {"json_schema": schema})  # what is wrong with it has this place
    texts = call_texts(parser, template)
    head = texts.head.replace("NAME", _name(tool))
    return {
        "type": "tag",
        "begin": head,
        "content": {"type": "json_schema", "json_schema": schema},
        "end": texts.tail,
    }
