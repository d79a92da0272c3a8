"""Text and token ids: the tokenizer and chat template of a model folder, incremental detokenising,
stop strings."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers

from quire import errors
from quire.template_sandbox import TEXT_MAX, LimitedEnvironment, TemplateLimitError

__all__ = ["ChatTemplate", "Detokenizer", "Message", "StopStrings", "Tokenizer"]

Message = Mapping[str, Any]
"""One message of a chat: {"role": "user", "content": "..."}; further fields go to the template as
they are."""

_REPLACEMENT = "\ufffd"
# The longest templates in use have some 20 000 characters.
_TEMPLATE_CHARACTERS_MAX = 1 << 20
# The special tokens that transformers hands to a template by name.
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


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


class Tokenizer:
    """The tokenizer of a model folder (tokenizer.json) and its chat template, if it has one.

    Raises NotFoundError without tokenizer.json, CorruptError for files that cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise errors.NotFoundError(
                f"{path}: there is no such file; only token ids will do here"
            )
        self._path = path
        with self._naming_failures():
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # Lengths are the engine's affair: it refuses what does not fit and never cuts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json_object(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(
            _read_json_object(directory / "special_tokens_map.json"), config
        )
        source = _template_source(directory, config)
        self.chat_template = ChatTemplate(source, special_tokens) if source is not None else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. BadArgumentError for text that is no Unicode (lone surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise errors.BadArgumentError(
                f"the text has a lone surrogate at index {error.start}; it is not valid Unicode"
            ) from None
        with self._naming_failures():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a chat that waits for its next answer.

        BadArgumentError for models without a template.
        """
        if self.chat_template is None:
            raise errors.BadArgumentError(
                "this model has no chat template: give its prompt as plain text"
            )
        text = self.chat_template.render(messages, **variables)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        with self._naming_failures():
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """What the tokenizers package raises is a fault of the file. It knows no classes of errors,
        and where its own code panics that is not even an Exception."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise errors.CorruptError(f"{self._path}: {error}") from error


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise errors.CorruptError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise errors.CorruptError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; later sources win.

    A token is a text or an object with "content".
    """
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKENS:
            token = source.get(name)
            if isinstance(token, Mapping):
                token = token.get("content")
            if isinstance(token, str):
                found[name] = token
    return found


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template of chat_template.jinja, else of tokenizer_config.json: one text, or a list of
    named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise errors.CorruptError(f"{path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in template
            if isinstance(entry, dict) and "name" in entry
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


class Detokenizer:
    """Text of a growing list of ids, piece by piece.

    The pieces joined are the text of the whole list. No piece ends inside a character: while the
    last bytes may still be the start of one, they wait for the next ids or for :meth:`finish`.

    Args:
        tokenizer: of the ids.
        context: ids before the first one, when the text goes on from them: some tokenizers drop the
            space at the start of a text.
    """

    # A character has at most 4 bytes and a token at least one, so the start of one spans at most 3
    # tokens.
    _MAX_START = 3
    # Endless bytes that are no text must not make the window, and so the time per token, grow
    # without end.
    _MAX_WINDOW = 64

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Ids that are decoded together: context, which begins and ends at a character, and what
        # came since.
        self._window = list(context)[-self._MAX_START :]
        self._printed = tokenizer.decode(self._window)  # of the window's text
        if self._printed.endswith(_REPLACEMENT):
            self._window, self._printed = [], ""
        self._context_length = len(self._window)
        self._waiting = 0  # ids at the window's end since all text was printed

    def put(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that is certain by now."""
        return "".join(self._put_one(id) for id in ids)

    def finish(self) -> str:
        """The rest: U+FFFD for bytes whose character never came."""
        piece = self._tokenizer.decode(self._window)[len(self._printed) :]
        self._window, self._printed, self._context_length, self._waiting = [], "", 0, 0
        return piece

    def _put_one(self, id: int) -> str:
        self._window.append(id)
        self._waiting += 1
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._print_all_but_last(text)
        piece = text[len(self._printed) :]
        self._printed = text
        self._waiting = 0
        if piece or len(self._window) >= self._MAX_WINDOW:
            # Without any context a decoder may drop the space at the start of the next id's text.
            self._window = self._window[self._context_length :]
            self._printed = self._tokenizer.decode(self._window)
            self._context_length = len(self._window)
        return piece

    def _print_all_but_last(self, text: str) -> str:
        """The last U+FFFD may stand for the start of a character; those before it stay what they
        are."""
        if self._waiting <= self._MAX_START:
            return ""
        certain = text[: -len(_REPLACEMENT)]
        piece = certain[len(self._printed) :]
        self._printed = certain
        if len(self._window) >= self._MAX_WINDOW:
            self._window = self._window[-self._MAX_START :]
            self._printed = self._tokenizer.decode(self._window).removesuffix(_REPLACEMENT)
            self._context_length = 0
        return piece


@dataclasses.dataclass
class StopStrings:
    """Finds the first stop string in a stream of text and cuts the text before it.

    The match that ends first wins, the longest of those; so the cut does not depend on how the text
    was cut into pieces.
    """

    stops: Sequence[str]
    _held: str = dataclasses.field(default="", init=False)
    stopped: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        if "" in self.stops:
            raise errors.BadArgumentError("stop: an empty text would stop every answer at once")

    def put(self, piece: str) -> str:
        """Takes the next piece; returns the text that is before any match.

        Nothing more once `stopped`.
        """
        if self.stopped:
            return ""
        text = self._held + piece
        matches = [
            (start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that waited for a match which did not come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is the start of a stop string."""
        longest = max((len(stop) for stop in self.stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
