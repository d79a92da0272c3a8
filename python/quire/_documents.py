"""Prompts with documents: where each document's tokens are.

A template is rendered with a placeholder for each document, and the pieces between and of the
documents are tokenised apart. So a document has the same tokens in every prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire import _numbers, errors
from quire.text import Message, Tokenizer

# What stands behind each document; it is a part of it.
_END = "\n\n"
# Private characters: they are in no text.
_OPEN, _CLOSE = "\ue0d0", "\ue0d1"
_BLEND_FIELDS = (
    "ratio",
    "metric",
    "check_layers",
    "ratios",
    "thresholds",
    "link_tokens",
    "min_tokens",
    "learn",
    "contextual",
)
# In the place of documents: those that the engine finds in the prompt.
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Composed:
    """A prompt's token ids, and the range of each document in them; None: the engine finds them."""

    ids: list[int]
    documents: list[tuple[int, int]] | None

    def chains(self, begin_token: int | None) -> list[tuple[list[int], int]]:
        """The prompts that let each document be known: anchor and document, and how many tokens the
        anchor has. Where nothing stands before the first document it is the begin token, unless the
        document begins with it."""
        ranges = self.documents or []
        anchor = self.ids[: ranges[0][0]] if ranges else []
        chains = []
        for begin, end in ranges:
            before = anchor
            if not anchor and begin_token is not None and self.ids[begin] != begin_token:
                before = [begin_token]
            chains.append((before + self.ids[begin:end], len(before)))
        return chains


def _bad_documents(message: str) -> errors.BadArgumentError:
    return errors.bad_option("documents", message)


def _bad_blend(message: str) -> errors.BadArgumentError:
    return errors.bad_option("blend", f"blend: {message}")


def texts_of(documents: Any) -> list[str]:
    """Documents that are texts, of which none is empty."""
    found = [_numbers.text(document, "documents") for document in documents]
    for index, document in enumerate(found):
        if not document.strip():
            raise _bad_documents(f"documents[{index}] is empty")
        if _OPEN in document or _CLOSE in document:
            raise _bad_documents(
                f"documents[{index}] has one of the private characters U+E0D0 and U+E0D1"
            )
    return found


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
    """The documents stand at the beginning of the first message of the user."""
    marks = [f"{_OPEN}{index}{_CLOSE}" for index in range(len(documents))]
    template = tokenizer.chat_template
    if template is None:
        raise errors.BadArgumentError(
            "this model has no chat template: give its prompt as plain text"
        )
    marked = [dict(message) for message in messages]
    first = next((message for message in marked if message.get("role") == "user"), None)
    if first is None or not isinstance(first.get("content"), str):
        raise _bad_documents(
            "documents stand before the first message of the user, whose content is a text; the "
            "chat has no such message"
        )
    first["content"] = "".join(marks) + first["content"]
    text = template.render(marked, **variables)
    pieces = []
    for mark in marks:
        piece, found, text = text.partition(mark)
        if not found or mark in text:
            raise _bad_documents(
                "the chat template does not print the first message of the user once and as it "
                "is, so documents have no place in it"
            )
        pieces.append(piece)
    return _join(tokenizer, [], pieces, documents, text)


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

    ranges = []
    for piece, document in zip(pieces, documents):
        ids = ids + encode(piece)
        begin = len(ids)
        ids = ids + encode(document.rstrip() + _END)
        ranges.append((begin, len(ids)))
    return Composed(ids + encode(rest), ranges)


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
        if isinstance(ratio, str):
            if ratio != "auto":
                raise _bad_blend(f'ratio is {ratio!r}; it must be a number from 0 to 1, or "auto"')
            ratio = auto_ratio(sum(end - begin for begin, end in documents))
        fields["ratios"] = [ratio]
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
    return all(ratio >= 1 for ratio in ratios) and not any(thresholds)


def _learning(learn: Any) -> str:
    if learn == "idle":
        return "idle"
    if not isinstance(learn, bool):
        raise _bad_blend(f'learn is {learn!r}; it is True, False or "idle"')
    return "first" if learn else "never"
