"""The tools of a request: what the model may call."""

from __future__ import annotations

from typing import Any

from quire.serve.fields import Fields
from quire.serve.limits import Limits
from quire.serve.tool_parser import NAME

__all__ = ["read_tools"]


def read_tools(fields: Fields, limits: Limits, parser: str | None) -> list[dict[str, Any]] | None:
    """`tools` and `tool_choice` of a chat; None: there are no tools, or none may be called."""
    entries = fields.objects("tools", limits.tools)
    why = "needs structured output, which this server does not have yet"
    fields.only("tool_choice", "auto", "none", why=why)
    fields.only("parallel_tool_calls", True, why=why)
    tools = [_tool(entry) for entry in entries or []]
    if not tools or fields.any("tool_choice") == "none":
        return None
    if parser is None:
        fields.only("tools", why="is not supported: the model's chat template knows no tools")
    return tools


def _tool(entry: Fields) -> dict[str, Any]:
    entry.only("type", "function")
    function = entry.object("function")
    name = None if function is None else function.text("name", 256)
    if function is None or name is None or not NAME.fullmatch(name):
        entry.refuse("function", "an object with a name of letters, digits, _, . and -")
    parameters = function.object("parameters")
    function.only("strict", False, why="needs structured output")
    found: dict[str, Any] = {"name": name, "description": function.text("description") or ""}
    found["parameters"] = {} if parameters is None else function.any("parameters")
    return {"type": "function", "function": found}
