"""Calls of functions in an answer's text: found piece by piece, in the formats of model families.

hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` within text (Hermes, Qwen).
llama3: an answer that is nothing but `{"name": ..., "parameters": {...}}`, several with `;`.
mistral: `[TOOL_CALLS]` behind text, and then a list of such objects, or `NAME[ARGS]{...}` for each.
deepseek: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` (V3.1), or with the word
    "function" before the name and the arguments in a block of Markdown (V3, R1).
What is no call after all is text, so that no token of an answer is lost.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

from quire.serve.bounded_json import parse_object
from quire.serve.problems import Problem

__all__ = [
    "NAME",
    "PARSERS",
    "Call",
    "CallTexts",
    "ToolParser",
    "call_id",
    "call_texts",
    "parser_of_template",
    "special_texts",
]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclasses.dataclass
class Call:
    """A call, or what a step added to one. name: None in all parts but the first."""

    index: int
    name: str | None
    arguments: str


Part = str | Call
"""What an answer consists of, in the order of its text."""


@dataclasses.dataclass(frozen=True)
class _Shape:
    """How a call is written.

    head: from behind the opening tag to before the arguments' brace; group 1 is the name.
    close: the text that ends the call, behind the arguments.
    following: what stands between a call and the next one, where that has no opening tag.
    ending: what ends a row of such calls.
    """

    head: re.Pattern[str]
    close: str
    following: str = ""
    ending: str = ""


@dataclasses.dataclass(frozen=True)
class _Format:
    """open: begins a call within text; "": the answer itself is the call. silent: tags around
    calls, which are no text of the answer. special: tokens that are tags here."""

    open: str
    shapes: tuple[_Shape, ...]
    silent: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """What is looked for in text."""
        return (self.open, *self.silent)


# A head is looked for again with each token, however long it does not end: the patterns look at no
# character twice, and at no more of a name than a name may have.
_NAMED = (
    r'"name"\s*+:\s*+"([^"\\]{0,256}+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_OBJECT = re.compile(r"\s*+\{\s*+" + _NAMED)
_DEEPSEEK = {
    name: f"<｜tool▁{name}｜>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
}
_FORMATS = {
    "deepseek": _Format(
        _DEEPSEEK["call▁begin"],
        (
            _Shape(
                re.compile(
                    rf"\s*+function{_DEEPSEEK['sep']}\s*+([^\s<`]{{1,256}}+)\s*+```json\s*+(?=\{{)"
                ),
                _DEEPSEEK["call▁end"],
            ),
            _Shape(
                re.compile(rf"\s*+([^\s<]{{1,256}}+){_DEEPSEEK['sep']}\s*+(?=\{{)"),
                _DEEPSEEK["call▁end"],
            ),
        ),
        (_DEEPSEEK["calls▁begin"], _DEEPSEEK["calls▁end"]),
        tuple(_DEEPSEEK.values()),
    ),
    "hermes": _Format("<tool_call>", (_Shape(_OBJECT, "</tool_call>"),)),
    "llama3": _Format("", (_Shape(_OBJECT, "}", ";"),)),
    "mistral": _Format(
        "[TOOL_CALLS]",
        (
            _Shape(re.compile(r"\s*+(?:\[\s*+)?+\{\s*+" + _NAMED), "}", ",", "]"),
            _Shape(
                re.compile(
                    r"\s*+([^\s\[{]{1,256}+)(?:\[CALL_ID\]\w{1,256}+)?+(?:\[ARGS\])?+\s*+(?=\{)"
                ),
                "",
            ),
        ),
        special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
}
PARSERS = tuple(_FORMATS)


def parser_of_template(template: str | None) -> str | None:
    """The format that a chat template asks the model for; None: it knows no tools."""
    if template is None or "tools" not in template:
        return None
    for name in ("hermes", "mistral", "deepseek"):
        if _FORMATS[name].open in template:
            return name
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3"
    return None


def special_texts(kind: str) -> tuple[str, ...]:
    """Special tokens that the text of an answer must have for its calls to be found."""
    return _FORMATS[kind].special


@dataclasses.dataclass(frozen=True)
class CallTexts:
    """How a model writes calls by itself. begin, end: around all of them; head, tail: around the
    arguments of one; NAME in the head stands for the function's. separator: between two.

    triggers: texts behind which a call stands, wherever they are in the answer; none: calls are the
    whole answer.
    """

    head: str
    tail: str
    separator: str = "\n"
    begin: str = ""
    end: str = ""
    triggers: tuple[str, ...] = ()


def call_texts(kind: str, template: str) -> CallTexts:
    """By the format, and the version of it that the template writes."""
    if kind == "llama3":
        return CallTexts('{"name": "NAME", "parameters": ', "}", "; ")
    opened = _FORMATS[kind].open
    if kind == "hermes":
        head = opened + '\n{"name": "NAME", "arguments": '
        return CallTexts(head, "}\n</tool_call>", triggers=(opened,))
    if kind == "mistral":
        if "[ARGS]" in template:
            return CallTexts(opened + "NAME[ARGS]", "", "", triggers=(opened,))
        head = '{"name": "NAME", "arguments": '
        return CallTexts(head, "}", ", ", opened + "[", "]", (opened,))
    begin, end = _DEEPSEEK["calls▁begin"], _DEEPSEEK["calls▁end"]
    sep, close, triggers = _DEEPSEEK["sep"], _DEEPSEEK["call▁end"], (begin, opened)
    if "```json" in template:
        head = f"{opened}function{sep}NAME\n```json\n"
        return CallTexts(head, f"\n```{close}", "\n", begin, end, triggers)
    return CallTexts(f"{opened}NAME{sep}", close, "", begin, end, triggers)


def call_id(kind: str | None, prefix: str, id: str) -> str:
    """The id of a call. Templates of Mistral's models refuse all that has not nine letters and
    digits."""
    if kind == "mistral":
        return hashlib.sha256(id.encode()).hexdigest()[:9]
    return prefix + id


class ToolParser:
    """Reads the text of one answer.

    The order of calls: `put` or `parts` for each piece of text, `finish` or `rest` once. calls:
    those that have begun.

    The held text is in one of five places: in *text*, before an opening tag; in a *head*, behind
    one; in *arguments*; in the *tail* of a call, behind them; or *between* two calls of a row.
    Where the text is cut into pieces decides only when something is certain, never what it is.
    """

    def __init__(self, kind: str) -> None:
        self._format = _FORMATS[kind]
        self._held = ""
        self._place = "text" if self._format.open else "answer"
        self._shape: _Shape | None = None  # of the call that is being read
        self._reader = _Arguments()
        self.calls = 0

    def put(self, text: str) -> tuple[str, list[Call]]:
        """The text and the parts of calls that are certain by now, where their order does not
        matter."""
        return _apart(self.parts(text))

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, as `put` gives it."""
        return _apart(self.rest())

    def parts(self, text: str, *, ended: bool = False) -> list[Part]:
        """What is certain by now; all of it if the answer has ended."""
        self._held += text
        found: list[Part] = []
        while self._step(found):
            pass
        return [part for part in found if part != ""] + (self.rest() if ended else [])

    def rest(self) -> list[Part]:
        """What waited for more. A call that did not end keeps what came of its arguments."""
        found = self.parts("")
        held, self._held = self._held, ""
        if self._place in ("arguments", "tail") or (self.calls > 0 and not held.strip()):
            return found
        # Without a tag around it an object with a name and no arguments is an answer.
        tagged = bool(self._format.open)
        calls = _whole_calls(held, tagged) if self._place == "head" else None
        if calls is not None:
            return [*found, *self._numbered(calls)]
        text = (self._format.open if self._place == "head" else "") + held
        return [*found, text] if text else found

    def _step(self, found: list[Part]) -> bool:
        """Takes a part of the held text; False when more must come first."""
        if self._place == "plain":  # no call can come any more
            found.append(self._held)
            self._held = ""
            return False
        if self._place == "text":
            return self._find_open(found)
        if self._place == "answer":
            return self._find_object()
        if self._place == "head":
            return self._read_head(found)
        if self._place == "arguments":
            return self._read_arguments(found)
        return self._read_tail() if self._place == "tail" else self._read_between()

    def _find_open(self, found: list[Part]) -> bool:
        places = [(place, tag) for tag in self._format.tags if (place := self._held.find(tag)) >= 0]
        if places:
            place, tag = min(places)
            # Blanks around calls are no text of the answer.
            found.append(self._held[:place].rstrip())
            self._held = self._held[place + len(tag) :]
            self._place = "head" if tag == self._format.open else "text"
            return True
        keep = max(_possible_start(self._held, tag) for tag in self._format.tags)
        # Blanks wait, too: a call may follow them.
        keep = max(keep, len(self._held) - len(self._held[: len(self._held) - keep].rstrip()))
        found.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _find_object(self) -> bool:
        start = self._held.lstrip(" \t\r\n")  # the blanks of JSON
        if not start:
            return False
        self._place = "head" if start.startswith("{") else "plain"
        if self._place == "head":
            self._held = start
        return True

    def _read_head(self, found: list[Part]) -> bool:
        for shape in self._format.shapes:
            head = shape.head.match(self._held)
            if head is not None and NAME.fullmatch(head[1]):
                found.append(Call(self.calls, head[1], ""))
                self.calls += 1
                self._shape, self._reader = shape, _Arguments()
                self._held = self._held[head.end() :]
                self._place = "arguments"
                return True
        close = self._format.shapes[0].close
        end = self._held.find(close) if len(close) > 1 else -1
        if end < 0:
            return False
        # Not in the usual order, or no call at all.
        whole, self._held = self._held[:end], self._held[end + len(close) :]
        self._place = "text"
        calls = _whole_calls(whole, tagged=True)
        if calls is None:
            found.append(self._format.open + whole + close)
        else:
            found += self._numbered(calls)
        return True

    def _numbered(self, calls: list[tuple[str, str]]) -> list[Call]:
        begin = self.calls
        self.calls += len(calls)
        return [Call(begin + index, *call) for index, call in enumerate(calls)]

    def _read_arguments(self, found: list[Part]) -> bool:
        taken = self._reader.take(self._held)
        if taken:
            found.append(Call(self.calls - 1, None, self._held[:taken]))
            self._held = self._held[taken:]
        if self._reader.ended:
            self._place = "tail"
        return self._reader.ended

    def _read_tail(self) -> bool:
        assert self._shape is not None
        end = self._held.find(self._shape.close)
        if end < 0:
            return False
        self._held = self._held[end + len(self._shape.close) :]
        self._place = "between" if self._shape.following else "text"
        return True

    def _read_between(self) -> bool:
        assert self._shape is not None
        start = self._held.lstrip(" \t\r\n" + self._shape.following)
        if not start:
            return False
        if start.startswith("{"):
            self._held, self._place = start, "head"
        elif self._shape.ending and start.startswith(self._shape.ending):
            self._held, self._place = start[len(self._shape.ending) :], "text"
        else:
            self._place = "text" if self._format.open else "plain"
        return True


def _apart(parts: list[Part]) -> tuple[str, list[Call]]:
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts), [part for part in parts if isinstance(part, Call)]


class _Arguments:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.ended = False

    def take(self, text: str) -> int:
        """Number of characters that belong to the object."""
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


def _whole_calls(text: str, tagged: bool) -> list[tuple[str, str]] | None:
    """Names and arguments of calls that are JSON in an unusual order: one, or a list of them; None
    if there is none. tagged: a call may have no arguments."""
    listed = text.strip()
    try:
        whole = parse_object(f'{{"calls":{listed}}}'.encode())
    except (Problem, UnicodeEncodeError):
        return None
    if len(whole) != 1:
        return None
    value = whole["calls"]
    entries = value if isinstance(value, list) and value else [value]
    calls = [_whole_call(entry, tagged) for entry in entries]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None


def _whole_call(value: object, tagged: bool) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    none: dict[str, Any] | None = {} if tagged else None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", none))
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _possible_start(text: str, word: str) -> int:
    """Length of the longest end of `text` that is the start of `word`."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0
