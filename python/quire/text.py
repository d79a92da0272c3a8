"""Text and token ids: the tokenizer of a model folder, incremental detokenising, stop strings.

What only some calls need is imported by them: an engine for token ids starts without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import _documents, _numbers, errors
from quire._model_folder import check_not_lfs_pointer

if TYPE_CHECKING:
    from quire.chat_template import ChatTemplate

__all__ = ["Detokenizer", "Message", "StopStrings", "Tokenizer", "check_messages"]

Message = Mapping[str, Any]
"""One message of a chat: {"role": "user", "content": "..."}; further fields go to the template as
they are. A content may be a list of parts. If one of them is {"type": "document", "text": "..."},
all others are of this form or {"type": "text", "text": "..."}, and the template gets one text."""

# Types of parts that a model of texts cannot see. Templates of models that can would write a mark
# in their place, and the answer would be one to something else.
_UNSEEN = ("image", "image_url", "input_image", "audio", "input_audio", "video")
_REPLACEMENT = "\ufffd"
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


def check_messages(messages: Any) -> list[Message]:
    """The messages of a chat as a list. BadArgumentError for what is no message. One is a mapping
    with a text as "role"; its "content", if it has one, is a text, a list of parts none of which is
    an image or the like, or None."""
    found = list(messages)
    for index, message in enumerate(found):
        if not isinstance(message, Mapping):
            raise errors.BadArgumentError(
                f"message {index} must be a mapping such as "
                f'{{"role": "user", "content": "..."}}, not {type(message).__name__}'
            )
        if not isinstance(message.get("role"), str):
            raise errors.BadArgumentError(
                f'message {index} needs a "role" that is a text, such as "user"'
            )
        if not isinstance(message.get("content"), (str, list, type(None))):
            kind = type(message["content"]).__name__
            raise errors.BadArgumentError(
                f'message {index}: "content" must be a text, not {kind}'
            )
        _check_can_be_read(message.get("content"), index)
    return found


def _check_can_be_read(content: str | list[Any] | None, message: int) -> None:
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _UNSEEN:
            raise errors.BadArgumentError(
                f'message {message}, part {index} has the type "{kind}"; models read text alone: '
                "no images, audio or video"
            )


class Tokenizer:
    """The tokenizer of a model folder (tokenizer.json) and its chat template, if it has one.

    Raises NotFoundError without tokenizer.json, CorruptError for files that cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        import tokenizers

        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise errors.NotFoundError(f"{path}: there is no such file; {_instead(directory)}")
        check_not_lfs_pointer(path)
        self._path = path
        with self._naming_failures():
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        _return_freed_memory()
        # Lengths are the engine's affair: it refuses what does not fit and never cuts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json_object(directory / "tokenizer_config.json")
        self._special_tokens = _special_tokens(
            _read_json_object(directory / "special_tokens_map.json"), config
        )
        self._template_source = _template_source(directory, config)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """None: the folder has no template. CorruptError when it has and that is none."""
        if self._template_source is None:
            return None
        from quire.chat_template import ChatTemplate

        return ChatTemplate(self._template_source, self._special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """Those that a text is decoded without, by their id."""
        return {id: token.content for id, token in self._added.items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. BadArgumentError for text that is no Unicode (lone surrogates)."""
        _numbers.text(text, "the text")
        with self._naming_failures():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a chat that waits for its next answer. Documents in it are tokenised apart.

        BadArgumentError for models without a template.
        """
        if _documents.count_in(messages):
            return _documents.compose_chat(self, messages, (), variables).ids
        if self.chat_template is None:
            raise errors.BadArgumentError(
                "this model has no chat template: give its prompt as plain text"
            )
        text = self.chat_template.render(messages, **variables)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. BadArgumentError for what is no
        id."""
        try:
            with self._naming_failures():
                return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise errors.BadArgumentError(
                f"a token id is an integer from 0 to 2^32 - 1: {error}"
            ) from None

    def token_bytes(self, special_texts: Sequence[str] = ()) -> list[bytes]:
        """The bytes that each id adds to a text; none for ids that stand for nothing and for
        special tokens, but for those of `special_texts`. BadArgumentError for a kind of vocabulary
        whose bytes are not known here."""
        kind = self._kind
        if kind is None:
            raise errors.BadArgumentError(
                f"{self._path}: grammars need the bytes of each token, and Quire does not know "
                "those of this kind of tokenizer (byte-level and byte-fallback BPE are known)"
            )
        added = self._added
        found = [b""] * self.vocab_size
        for token, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if id in added:
                content = added[id].content
                is_text = not added[id].special or content in special_texts
                found[id] = content.encode() if is_text else b""
            elif id < len(found):
                found[id] = _token_bytes(token, kind)
        return found

    def bytes_of(self, id: int) -> bytes | None:
        """The bytes of one id, of a special token those of its name; None where they are not known:
        for ids that stand for nothing, and for kinds as of :meth:`token_bytes`."""
        if id in self._added:
            content: str = self._added[id].content
            return content.encode()
        token = self._tokenizer.id_to_token(id)
        return None if token is None or self._kind is None else _token_bytes(token, self._kind)

    @functools.cached_property
    def _kind(self) -> str | None:
        """As of `_kind_of_decoder`."""
        decoder = self._tokenizer.decoder
        return None if decoder is None else _kind_of_decoder(json.loads(decoder.__getstate__()))

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        """The added tokens by their id."""
        found: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return found

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """What the tokenizers package raises is a fault of the file. It knows no classes of errors,
        and where its own code panics that is not even an Exception."""
        try:
            yield
        except (TypeError, OverflowError):  # an argument's fault
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise errors.CorruptError(f"{self._path}: {error}") from error


def _kind_of_decoder(decoder: Any) -> str | None:
    """By the decoder of a tokenizer.json: "bytes" if a character of a token stands for a byte,
    "words" if it stands for itself, U+2581 for a blank and <0x0A> for a byte; None: another
    one."""
    if not isinstance(decoder, dict):
        return None
    if decoder.get("type") == "Sequence":
        kinds = {_kind_of_decoder(entry) for entry in decoder.get("decoders", [])} - {"", None}
        return kinds.pop() if len(kinds) == 1 else None
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return "bytes"
    if kind in ("Metaspace", "ByteFallback"):
        return "words"
    return "" if kind in ("Replace", "Fuse", "Strip") else None


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The characters by which byte-level vocabularies write the 256 bytes: visible ones are
    themselves, the others follow from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _token_bytes(token: str, kind: str) -> bytes:
    if kind == "bytes":
        table = _byte_of_character()
        if all(c in table for c in token):
            return bytes(table[c] for c in token)
        return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        with contextlib.suppress(ValueError):
            return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _instead(directory: Path) -> str:
    """What to do in a folder without tokenizer.json."""
    if not (directory / "tokenizer.model").is_file():
        return "only token ids will do here"
    return (
        "there is a tokenizer.model (SentencePiece), which Quire does not read; convert it with "
        f"transformers: AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained("
        f"{str(directory)!r}); or give token ids"
    )


def _return_freed_memory() -> None:
    """What reading a tokenizer took for a while is as much as the tokenizer; the C library would
    keep it. Where it is not glibc nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
        special_texts: special tokens that the text has; all others are left out of it.
    """

    # A character has at most 4 bytes and a token at least one, so the start of one spans at most 3
    # tokens.
    _MAX_START = 3
    # Endless bytes that are no text must not make the window, and so the time per token, grow
    # without end.
    _MAX_WINDOW = 64

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        special_texts: Sequence[str] = (),
    ) -> None:
        special = tokenizer.special_tokens if special_texts else {}
        self._left_out = {id for id, text in special.items() if text not in special_texts}
        self._decode = functools.partial(
            tokenizer.decode, skip_special_tokens=not special_texts
        )
        # Ids that are decoded together: context, which begins and ends at a character, and what
        # came since.
        self._window = [id for id in context if id not in self._left_out][-self._MAX_START :]
        self._printed = self._decode(self._window)  # of the window's text
        if self._printed.endswith(_REPLACEMENT):
            self._window, self._printed = [], ""
        self._context_length = len(self._window)
        self._waiting = 0  # ids at the window's end since all text was printed

    def put(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that is certain by now."""
        return "".join(self._put_one(id) for id in ids if id not in self._left_out)

    def finish(self) -> str:
        """The rest: U+FFFD for bytes whose character never came."""
        piece = self._decode(self._window)[len(self._printed) :]
        self._window, self._printed, self._context_length, self._waiting = [], "", 0, 0
        return piece

    def _put_one(self, id: int) -> str:
        self._window.append(id)
        self._waiting += 1
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._print_all_but_last(text)
        piece = text[len(self._printed) :]
        self._printed = text
        self._waiting = 0
        if piece or len(self._window) >= self._MAX_WINDOW:
            # Without any context a decoder may drop the space at the start of the next id's text.
            self._window = self._window[self._context_length :]
            self._printed = self._decode(self._window)
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
            self._printed = self._decode(self._window).removesuffix(_REPLACEMENT)
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
