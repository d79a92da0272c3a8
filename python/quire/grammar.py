"""What an answer must look like: a JSON schema, a regular expression, a choice or a grammar.

The masks are made by XGrammar, of whose package only the library is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from quire import _ffi, _numbers, errors
from quire._json_schema import check_schema

if TYPE_CHECKING:
    from quire.text import Tokenizer

__all__ = ["CompiledGrammar", "Grammar", "GrammarCompiler", "compiler_options"]

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]

_BYTES_MAX = 64 << 10
_CACHE_BYTES = 64 << 20
_CHOICES_MAX = 1024
_LIBRARY = "libxgrammar_bindings.so"


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A grammar as XGrammar takes it. Made by :meth:`of`.

    kind: "json_schema", "regex", "grammar" (EBNF) or "structural_tag" (XGrammar's, as JSON).
    """

    kind: str
    text: str

    @staticmethod
    def of(value: Grammar | Mapping[str, Any]) -> Grammar:
        """A grammar from a mapping with one entry:

        {"json_schema": SCHEMA}, as a mapping or JSON text; {"json_object": True}: any object;
        {"regex": TEXT}: all of the answer matches it; {"choice": [TEXT, ...]}: one of them;
        {"grammar": TEXT}: EBNF whose first rule is root; {"structural_tag": MAPPING}: XGrammar's.

        BadArgumentError, by the entry's name, for more than 64 KiB, a JSON schema of more than 64
        levels, or one with words that XGrammar does not follow.
        """
        if isinstance(value, Grammar):
            return value
        kinds = get_args(Kind)
        if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in kinds:
            raise errors.bad_option(
                "grammar", "grammar must be a mapping with one of the entries " + ", ".join(kinds)
            )
        ((kind, content),) = value.items()
        if kind == "json_schema":
            return Grammar("json_schema", _json_text(kind, check_schema(content)))
        if kind == "json_object":
            if content is not True:
                _refuse(kind, "true, or the entry left out")
            return Grammar("json_schema", '{"type":"object"}')
        if kind == "structural_tag":
            if not isinstance(content, Mapping):
                _refuse(kind, "a mapping")
            return Grammar(kind, _json_text(kind, dict(content)))
        if kind == "choice":
            return Grammar("grammar", _bounded(kind, _one_of(content)))
        if not isinstance(content, str) or not content:
            _refuse(kind, "a text that is not empty")
        return Grammar(kind, _bounded(kind, content))


def _refuse(kind: str, must: str) -> NoReturn:
    raise errors.bad_option("grammar", f"grammar: {kind} must be {must}")


def _bounded(kind: str, text: str) -> str:
    size = len(_numbers.text(text, kind).encode())
    if size > _BYTES_MAX:
        _refuse(kind, f"of at most {_BYTES_MAX} bytes, and has {size}")
    if "\0" in text:
        _refuse(kind, "a text without the character U+0000")
    return text


def _json_text(kind: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.bad_option("grammar", f"grammar: {kind} is no JSON: {error}") from None
    return _bounded(kind, text)


def _one_of(choices: Any) -> str:
    """EBNF of one of the texts."""
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        _refuse("choice", "a list of texts")
    if not 1 <= len(choices) <= _CHOICES_MAX:
        _refuse("choice", f"a list of 1 to {_CHOICES_MAX} texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        _refuse("choice", "a list of texts that are not empty")
    return "root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    """As it stands in a literal of EBNF."""
    plain = {"\\": "\\\\", '"': '\\"'}
    return "".join(plain.get(c) or (c if c >= " " else f"\\u{ord(c):04x}") for c in text)


@dataclasses.dataclass(frozen=True)
class CompiledGrammar:
    """A grammar that is ready for the answers of one model: of :meth:`Engine.compile_grammar`.

    special_texts: of the answers that it is for.
    """

    handle: Any = dataclasses.field(repr=False)
    special_texts: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes, about."""
        return int(self.handle.bytes())


def compiler_options(
    tokenizer: Tokenizer,
    vocab_size: int,
    end_ids: Sequence[int],
    special_texts: Sequence[str] = (),
) -> dict[str, Any]:
    """What a :class:`GrammarCompiler` is made of: plain values, which another process can have.

    special_texts: special tokens that texts have.
    """
    tokens = tokenizer.token_bytes(special_texts)[:vocab_size]
    for id in end_ids:
        if id < len(tokens):
            tokens[id] = b""
    return {
        "tokens": tokens,
        "vocab_size": vocab_size,
        "end_ids": list(end_ids),
        "cache_bytes": _CACHE_BYTES // 2,  # it has two of them
        "threads": max(1, min(4, (os.cpu_count() or 1) // 2)),
    }


# What a grammar is refused with: the second, where it takes too long.
_OF_GRAMMARS = (errors.BadArgumentError, errors.TooLargeError)


def _named(error: errors.QuireError) -> errors.QuireError:
    """An error of `_OF_GRAMMARS` that says that it is about the grammar, in words of ours."""
    message = str(error)
    if message.startswith("Check failed"):
        message = (
            "XGrammar fails on it: say the same in another way, such as with integers of less than "
            "60 bits and counted repetitions of at most 100 in patterns "
            f"({message.rstrip(': ')})"
        )
    return errors.about(type(error)(f"grammar: {message}"), "grammar")


class GrammarCompiler:
    """Grammars for the tokens of one model. Threads may share it.

    What is compiled is kept within 64 MiB, the last used. options: of :func:`compiler_options`.

    Raises UnavailableError where XGrammar is not installed, BadArgumentError for a model without a
    token that ends an answer.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if "xgrammar" not in sys.modules:  # else somebody has loaded it: that can be done once
            _ffi.load_library(_library_path())
        self._handle = _ffi.function("GrammarCompiler.create")(dict(options))
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Any:
        """What the engine takes. BadArgumentError, with XGrammar's words, for what it does not
        take; the same for a grammar that no text fits. TooLargeError as try_tokens."""
        with self._lock:  # one at a time: each takes several threads
            try:
                return self._handle.compile(grammar.kind, grammar.text)
            except _OF_GRAMMARS as error:
                raise _named(error) from None

    def try_tokens(self, compiled: Any, count: int) -> None:
        """Draws `count` tokens of a compiled grammar at random, beginning again at each end.
        TooLargeError if one takes too long, as it would in an answer."""
        try:
            self._handle.try_tokens(compiled, count)
        except _OF_GRAMMARS as error:
            raise _named(error) from None

    @property
    def cache_bytes(self) -> int:
        """Memory of what is kept."""
        return int(self._handle.cache_bytes())


def _library_path() -> Path:
    """The file in XGrammar's package, which is not imported: it needs torch."""
    spec = importlib.util.find_spec("xgrammar")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / _LIBRARY
        if path.is_file():
            return path
    raise errors.about(
        errors.UnavailableError(
            "grammars need XGrammar, and there is no package xgrammar here: pip install "
            "'quire[grammar]', or, without the torch that it asks for, pip install --no-deps "
            "xgrammar==0.2.8"
        ),
        "grammar",
    )
