"""The chat template of a model folder: messages in, the text of a prompt out."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from quire import errors
from quire.template_sandbox import TEXT_MAX, LimitedEnvironment, TemplateLimitError

if TYPE_CHECKING:
    from quire.text import Message

__all__ = ["ChatTemplate"]

# What no caller sets: the conversation, and names of jinja2's own.
_OWN_VARIABLES = frozenset(("messages", "self", "caller", "loop", "super", "varargs", "kwargs"))
# The longest templates in use have some 20 000 characters.
_TEMPLATE_CHARACTERS_MAX = 1 << 20


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part for training; here it
    prints its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML characters, which no model was trained with.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A chat template, rendered as by transformers: sandboxed, with its filters and globals.

    Raises CorruptError when the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > _TEMPLATE_CHARACTERS_MAX:
            raise errors.CorruptError(
                f"chat template: has {len(source)} characters; the limit is "
                f"{_TEMPLATE_CHARACTERS_MAX}"
            )
        environment = LimitedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise errors.CorruptError(f"chat template: {error}") from error
        except Exception as error:  # what Python's own compiler says of what jinja2 made of it
            raise errors.CorruptError(
                f"chat template: cannot be compiled: {type(error).__name__}: {error}"
            ) from error
        self._environment = environment

    def check_variables(self, names: Iterable[str]) -> None:
        """BadArgumentError for a name that the caller cannot give a value: the template does not
        use it, or it stands for something else."""
        for name in names:
            if name not in self._variables:
                raise errors.BadArgumentError(
                    f"template_args: the chat template has no variable {name!r}; it has "
                    f"{', '.join(self._variables) or 'none'}"
                )

    @functools.cached_property
    def _variables(self) -> list[str]:
        """Names that a caller may give a value. To find them takes milliseconds."""
        free = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return sorted(free - _OWN_VARIABLES - self._environment.globals.keys())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of the prompt. BadArgumentError when the template refuses the messages."""
        try:
            with self._environment.rendering():
                return self._join(
                    self._template.generate(
                        messages=[dict(message) for message in messages],
                        tools=tools,
                        documents=documents,
                        add_generation_prompt=add_generation_prompt,
                        **{**self._special_tokens, **variables},
                    )
                )
        except jinja2.TemplateError as error:
            raise errors.BadArgumentError(f"chat template: {error}") from error
        except Exception as error:  # a template is a program and may fail in any way
            raise errors.BadArgumentError(
                f"chat template: {type(error).__name__}: {error}; are the messages of the form "
                '{"role": "user", "content": "..."}?'
            ) from error

    def _join(self, pieces: Iterable[str]) -> str:
        parts: list[str] = []
        size = 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > TEXT_MAX:
                raise TemplateLimitError(f"the template prints more than {TEXT_MAX} characters")
        return "".join(parts)
