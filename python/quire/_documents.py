"""Prompts with documents: where each document's tokens are.

A template is rendered with a placeholder for each document, and the pieces between and of the
documents are tokenised apart. So a document has the same tokens in every prompt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire import _numbers, errors

if TYPE_CHECKING:
    from quire.text import Message, Tokenizer

# What stands behind each document; it is a part of it.
_END = "\n\n"
# Private characters: they are in no text. A template that escapes a message, or cuts it into lines,
# would do so with a document, which the mark stands for: the quote and the line end show it.
_OPEN, _CLOSE = '\ue0d0"\n', "\ue0d1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_BLEND_FIELDS = (
    "ratio",
    "metric",
    "check_layers",
    "ratios",
    "thresholds",
    "document_ratios",
    "link_tokens",
    "min_tokens",
    "learn",
    "contextual",
)
# For the library: the document shares the ratio of the others.
_NO_RATIO = -1.0
# In the place of documents: those that the engine finds in the prompt.
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Composed:
    """A prompt's token ids, and the range of each document in them; None: the engine finds them."""

    ids: list[int]
    documents: list[tuple[int, int]] | None

    def chains(self, begin_token: int | None) -> Iterator[tuple[list[int], int]]:
        """The prompts that let each document be known: anchor and document, and how many tokens the
        anchor has. Where nothing stands before the first document it is the begin token, unless the
        document begins with it. One after the other, as each has the whole anchor."""
        ranges = self.documents or []
        anchor = self.ids[: ranges[0][0]] if ranges else []
        for begin, end in ranges:
            before = anchor
            if not anchor and begin_token is not None and self.ids[begin] != begin_token:
                before = [begin_token]
            yield before + self.ids[begin:end], len(before)


def _bad_documents(message: str) -> errors.BadArgumentError:
    return errors.bad_option("documents", message)


def _bad_blend(message: str) -> errors.BadArgumentError:
    return errors.bad_option("blend", f"blend: {message}")


def texts_of(documents: Any) -> list[str]:
    """Documents that are texts, of which none is empty."""
    return [_document(each, f"documents[{index}]") for index, each in enumerate(documents)]


def _document(text: Any, name: str) -> str:
    found = _numbers.text(text, name)
    if not found.strip():
        raise _bad_documents(f"{name} is empty")
    if _OPEN[0] in found or _CLOSE in found:
        raise _bad_documents(f"{name} has one of the private characters U+E0D0 and U+E0D1")
    return found


def count_in(messages: Iterable[Any]) -> int:
    """Documents that are parts of messages: entries {"type": "document", "text": ...} in a content
    that is a list."""
    return sum(map(_count_of, messages))


def _count_of(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return 0
    return sum(isinstance(part, Mapping) and part.get("type") == "document" for part in content)


def ranges_of(documents: Any, prompt_tokens: int) -> list[tuple[int, int]]:
    """Documents that are ranges of a prompt's token ids."""
    found = []
    for index, document in enumerate(documents):
        if isinstance(document, str) or not isinstance(document, Iterable):
            raise TypeError(
                "documents of a prompt of token ids are pairs (begin, end) of its tokens, not "
                f"{type(document).__name__}"
            )
        pair = [_numbers.int64(value, f"documents[{index}]") for value in document]
        if len(pair) != 2:
            raise _bad_documents(
                f"documents[{index}] has {len(pair)} numbers; a document is a pair (begin, end) of "
                f"the prompt's {prompt_tokens} tokens"
            )
        found.append((pair[0], pair[1]))
    return found


def compose_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    documents: Sequence[str],
    variables: Mapping[str, Any],
) -> Composed:
    """`documents` stand at the beginning of the first message of the user; those that are parts of
    messages stand at their places."""
    template = tokenizer.chat_template
    if template is None:
        raise errors.BadArgumentError(
            "this model has no chat template: give its prompt as plain text"
        )
    first = next((i for i, each in enumerate(messages) if each.get("role") == "user"), None)
    if documents and (first is None or not _takes_documents(messages[first])):
        raise _bad_documents(
            "documents stand before the first message of the user, whose content is a text; the "
            "chat has no such message"
        )
    found: list[str] = []
    marked = [
        _marked(message, f"message {index}", documents if index == first else (), found)
        for index, message in enumerate(messages)
    ]
    # Between two pieces is the number of a document.
    pieces = _MARK.split(template.render(marked, **variables))
    if pieces[1::2] != [str(index) for index in range(len(found))]:
        where = "the first message of the user" if len(found) == len(documents) else "messages"
        raise _bad_documents(
            f"the chat template does not print {where} once, in order and as given, so documents "
            "have no place in it"
        )
    return _join(tokenizer, [], pieces[:-1:2], found, pieces[-1])


def _takes_documents(message: Message) -> bool:
    return isinstance(message.get("content"), str) or _count_of(message) > 0


def _marked(
    message: Message, name: str, documents: Sequence[str], found: list[str]
) -> dict[str, Any]:
    """The message with a mark for each document: those that stand before its text, and its own
    parts. They are added to `found`."""
    content = message.get("content")
    parts: list[tuple[bool, Any]] = [(False, content)]
    if _count_of(message):
        parts = _parts(content, name)
    if any(isinstance(text, str) and _MARK.search(text) for _, text in parts):
        raise _bad_documents(
            "a message has the private characters U+E0D0 and U+E0D1 around a number, which stand "
            "for a document"
        )
    parts = [*((True, document) for document in documents), *parts]
    if not any(is_document for is_document, _ in parts):
        return dict(message)
    texts = []
    for is_document, part in parts:
        texts.append(f"{_OPEN}{len(found)}{_CLOSE}" if is_document else part)
        if is_document:
            found.append(part)
    return {**message, "content": "".join(texts)}


def _parts(content: Any, name: str) -> list[tuple[bool, str]]:
    """The parts of a message with documents: whether each is one, and its text."""
    found = []
    for index, part in enumerate(content):
        place = f"{name}, part {index}"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "document"):
            raise _bad_documents(
                f"{place}: beside a document stand parts of the type text or document alone"
            )
        for field in part:
            if field not in ("type", "text"):
                raise _bad_documents(
                    f"{place}: there is no field {field!r}; a {kind} has type and text"
                )
        text = part.get("text")
        is_document = kind == "document"
        found.append(
            (is_document, _document(text, place) if is_document else _numbers.text(text, place))
        )
    return found


def compose_text(tokenizer: Tokenizer, text: str, documents: Sequence[str]) -> Composed:
    """The documents stand before the text, behind what every prompt of the model begins with."""
    return _join(tokenizer, tokenizer.encode(""), [""] * len(documents), documents, text)


def _join(
    tokenizer: Tokenizer,
    ids: list[int],
    pieces: Sequence[str],
    documents: Sequence[str],
    rest: str,
) -> Composed:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False) if text else []

    ids = [*ids]
    ranges = []
    for piece, document in zip(pieces, documents):
        ids += encode(piece)
        begin = len(ids)
        ids += encode(document.rstrip() + _END)
        ranges.append((begin, len(ids)))
    ids += encode(rest)
    return Composed(ids, ranges)


def blend_fields(
    blend: Any,
    composed: Composed,
    auto_ratio: Callable[[int], float],
) -> dict[str, Any]:
    """The option `blend` as the library takes it: a ratio, or a mapping of options. auto_ratio:
    that of "auto", for a number of tokens of documents."""
    documents = [(0, len(composed.ids))] if composed.documents is None else composed.documents
    fields = dict(blend) if isinstance(blend, Mapping) else {"ratio": blend}
    for name in fields:
        if name not in _BLEND_FIELDS:
            raise _bad_blend(f"there is no option {name!r}; options are {', '.join(_BLEND_FIELDS)}")
    if "ratio" in fields:
        if "ratios" in fields:
            raise _bad_blend("ratio and ratios are two; give one")
        ratio = fields.pop("ratio")
        if isinstance(ratio, bool):  # False would be the ratio 0, the farthest from no blend
            raise _bad_blend(f"ratio is {ratio}; it must be a number from 0 to 1; None blends not")
        if isinstance(ratio, str):
            if ratio != "auto":
                raise _bad_blend(f'ratio is {ratio!r}; it must be a number from 0 to 1, or "auto"')
            ratio = auto_ratio(sum(end - begin for begin, end in documents))
        fields["ratios"] = [_numbers.real(ratio, "blend: ratio")]
    for name in ("ratios", "thresholds", "check_layers"):
        if isinstance(fields.get(name, ()), str) or not isinstance(fields.get(name, ()), Iterable):
            raise _bad_blend(f"{name} is a list of numbers, not {type(fields[name]).__name__}")
    for name in ("ratios", "thresholds"):
        if name in fields:
            fields[name] = [_numbers.real(value, f"blend: {name}") for value in fields[name]]
    if "check_layers" in fields:
        fields["check_layers"] = [
            _numbers.int64(layer, "blend: check_layers") for layer in fields["check_layers"]
        ]
    for name in ("link_tokens", "min_tokens"):
        if name in fields:
            fields[name] = _numbers.int64(fields[name], f"blend: {name}")
    if "learn" in fields:
        fields["learn"] = _learning(fields["learn"])
    if "document_ratios" in fields:
        fields["document_ratios"] = _own_ratios(fields["document_ratios"], composed.documents)
    contextual = fields.pop("contextual", False)
    if not isinstance(contextual, bool):
        raise _bad_blend(f"contextual is {contextual!r}; it is True or False")
    if composed.documents is None:
        return {**fields, "search": "anywhere" if contextual else "anchored"}
    if contextual:
        raise _bad_blend(
            'contextual is about documents that the engine finds; give documents="auto"'
        )
    return {**fields, "documents": [list(document) for document in documents]}


def is_exact(fields: Mapping[str, Any]) -> bool:
    """Whether such a blend computes again all that it moves."""
    ratios, thresholds = fields.get("ratios", (0,)), fields.get("thresholds", ())
    own = [ratio for ratio in fields.get("document_ratios", ()) if ratio != _NO_RATIO]
    return all(ratio >= 1 for ratio in (*ratios, *own)) and not any(thresholds)


def _own_ratios(ratios: Any, documents: Sequence[object] | None) -> list[float]:
    """Budgets of documents, as the library takes them."""
    if documents is None:
        raise _bad_blend(
            "document_ratios are those of documents that are named, and the engine finds these; "
            "leave them out"
        )
    if isinstance(ratios, (str, bytes, Mapping)) or not isinstance(ratios, Iterable):
        raise _bad_blend(f"document_ratios is a list of numbers, not {type(ratios).__name__}")
    found = []
    for index, ratio in enumerate(ratios):
        name = f"document_ratios[{index}]"
        own = _NO_RATIO if ratio is None else _numbers.real(ratio, f"blend: {name}")
        if ratio is not None and not 0 <= own <= 1:
            raise _bad_blend(f"{name} is {own}; it must be a number from 0 to 1, or None")
        found.append(own)
    if len(found) != len(documents):
        raise _bad_blend(
            f"there are {len(documents)} documents and {len(found)} document_ratios; give one for "
            "each document, None where it shares the ratio of the others"
        )
    return found


def _learning(learn: Any) -> str:
    if learn == "idle":
        return "idle"
    if not isinstance(learn, bool):
        raise _bad_blend(f'learn is {learn!r}; it is True, False or "idle"')
    return "first" if learn else "never"
