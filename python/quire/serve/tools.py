"""Calls of functions in an answer's text: found piece by piece, in the formats of model families.

hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` within text (Hermes, Qwen).
llama3: an answer that is nothing but `{"name": ..., "parameters": {...}}`, several with `;`.
What is no call after all is text, so that no token of an answer is lost.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from quire.serve.bounded_json import parse_object
from quire.serve.fields import Fields
from quire.serve.limits import Limits
from quire.serve.problems import Problem

__all__ = ["PARSERS", "Call", "ToolParser", "parser_of_template", "read_tools"]

PARSERS = ("hermes", "llama3")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# The start of a call whose arguments can be passed on as they come.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclasses.dataclass
class Call:
    """A call, or what a step added to one. name: None in all parts but the first."""

    index: int
    name: str | None
    arguments: str


def parser_of_template(template: str | None) -> str | None:
    """The format that a chat template asks the model for; None: it knows no tools."""
    if template is None or "tools" not in template:
        return None
    if _OPEN in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3"
    return None


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
    if function is None or name is None or not _NAME.fullmatch(name):
        entry.refuse("function", "an object with a name of letters, digits, _, . and -")
    parameters = function.object("parameters")
    function.only("strict", False, why="needs structured output")
    found: dict[str, Any] = {"name": name, "description": function.text("description") or ""}
    found["parameters"] = {} if parameters is None else function.any("parameters")
    return {"type": "function", "function": found}


class ToolParser:
    """Reads the text of one answer.

    The order of calls: `put` for each piece of text, `finish` once. calls: those that have begun.
    """

    def __init__(self, kind: str) -> None:
        self._hermes = kind == "hermes"
        self._held = ""  # text that may be part of a call
        self._inside = False  # the held text is after the start of a call
        self._reader: _Arguments | None = None  # the arguments that are being read
        self._plain = False  # no call can come any more
        self.calls = 0

    def put(self, text: str) -> tuple[str, list[Call]]:
        """The text and the parts of calls that are certain by now."""
        self._held += text
        texts: list[str] = []
        found: list[Call] = []
        while self._step(texts, found):
            pass
        return "".join(texts), found

    def finish(self) -> tuple[str, list[Call]]:
        """The rest. A call that did not end keeps what came of its arguments."""
        text, found = self.put("")
        held, self._held = self._held, ""
        if self._reader is not None or (self.calls > 0 and not held.strip()):
            self.calls += self._reader is not None
            return text, found
        call = _whole_call(held) if self._inside else None
        if call is not None:
            found.append(Call(self.calls, *call))
            self.calls += 1
            return text, found
        return text + (_OPEN if self._inside and self._hermes else "") + held, found

    def _step(self, texts: list[str], found: list[Call]) -> bool:
        """Takes a part of the held text; False when more must come first."""
        if self._plain:
            texts.append(self._held)
            self._held = ""
            return False
        if self._reader is not None:
            return self._read_arguments(found)
        if self._inside:
            return self._read_head(texts, found)
        return self._find_open(texts) if self._hermes else self._find_object()

    def _find_open(self, texts: list[str]) -> bool:
        before, tag, after = self._held.partition(_OPEN)
        if tag:
            # Blanks around calls are no text of the answer.
            texts.append(before.rstrip())
            self._held, self._inside = after, True
            return True
        keep = _possible_start(self._held, _OPEN)
        # Blanks wait, too: a call may follow them.
        keep = max(keep, len(self._held) - len(self._held[: len(self._held) - keep].rstrip()))
        texts.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _find_object(self) -> bool:
        start = self._held.lstrip(" \n\t;" if self.calls else " \n\t")
        if not start:
            return False
        self._inside = start.startswith("{")
        self._plain = not self._inside
        if self._inside:
            self._held = start
        return True

    def _read_head(self, texts: list[str], found: list[Call]) -> bool:
        head = _HEAD.match(self._held)
        if head is not None and _NAME.fullmatch(head[1]):
            found.append(Call(self.calls, head[1], ""))
            self._reader = _Arguments()
            self._held = self._held[head.end() :]
            return True
        end = self._held.find(_CLOSE) if self._hermes else -1
        if end < 0:
            return False
        # Not in the usual order, or no call at all.
        whole, self._held = self._held[:end], self._held[end + len(_CLOSE) :]
        self._inside = False
        call = _whole_call(whole)
        if call is None:
            texts.append(_OPEN + whole + _CLOSE)
        else:
            found.append(Call(self.calls, *call))
            self.calls += 1
        return True

    def _read_arguments(self, found: list[Call]) -> bool:
        assert self._reader is not None
        taken = self._reader.take(self._held)
        if taken:
            found.append(Call(self.calls, None, self._held[:taken]))
            self._held = self._held[taken:]
        if not self._reader.ended:
            return False
        end = self._held.find(_CLOSE if self._hermes else "}")
        if end < 0:
            return False
        self._held = self._held[end + (len(_CLOSE) if self._hermes else 1) :]
        self._reader, self._inside = None, False
        self.calls += 1
        return True


class _Arguments:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.ended = False

    def take(self, text: str) -> int:
        """Number of characters that belong to the object."""
        if self.ended:
            return 0
        for index, c in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or c != '"'
                self._escaped = c == "\\" and not self._escaped
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return index + 1
        return len(text)


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's JSON; None if it is none."""
    try:
        value = parse_object(text.encode())
    except Problem:
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _possible_start(text: str, word: str) -> int:
    """Length of the longest end of `text` that is the start of `word`."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0
