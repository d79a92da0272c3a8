"""Documents of a chat, and how they are blended: what all APIs have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire._documents import count_in
from quire.serve.fields import Fields, check_text
from quire.serve.generation import TOKENS_MAX
from quire.serve.limits import Limits
from quire.serve.problems import Problem

__all__ = ["check_documents", "read_documents"]

_METRICS = ("v_l2", "k_l2", "kv_l2", "cosine")


def read_documents(
    fields: Fields, messages: Iterable[Mapping[str, Any]], limits: Limits, follows: bool = False
) -> dict[str, Any]:
    """Texts that stand before the conversation, or "auto", and how they and the documents of the
    messages are blended; without `blend` all of their tokens are computed. follows: earlier
    messages come before these, and check_documents is called with all."""
    if fields.any("documents") == "auto":
        if not fields.has("blend"):
            fields.refuse("documents", 'a list of texts, or "auto" with blend')
        return {"documents": "auto", "blend": _read_blend(fields)}
    documents = fields.entries("documents", limits.documents) or []
    if not all(isinstance(document, str) and document.strip() for document in documents):
        fields.refuse("documents", "a list of texts that are not empty")
    for index, document in enumerate(documents):
        check_text(document, f"documents[{index}]")
    given = {"documents": documents or None, "blend": _read_blend(fields)}
    found = {name: value for name, value in given.items() if value is not None}
    if not follows:
        check_documents(found, messages, limits)
    return found


def check_documents(
    options: Mapping[str, Any], messages: Iterable[Mapping[str, Any]], limits: Limits
) -> None:
    """Problem for too many documents in all, and for a blend of none."""
    documents = options.get("documents") or ()
    if documents == "auto":
        return
    count = len(documents) + count_in(messages)
    blend = options.get("blend")
    if count == 0 and blend is not None:
        shown = "an object" if isinstance(blend, dict) else blend
        shown = f"{shown:g}" if isinstance(shown, float) else shown
        raise Problem(
            400,
            f"blend is {shown}; it must be given together with documents",
            param="blend",
            code="invalid_value",
        )
    if count > limits.documents:
        raise Problem(
            400,
            f"the request has {count} documents; it may have at most {limits.documents}",
            param="documents" if documents else "messages",
            code="invalid_value",
        )


def _read_blend(fields: Fields) -> float | str | dict[str, Any] | None:
    """The part of the documents' tokens that is computed again, or an object of options."""
    blend = fields.any("blend")
    if not isinstance(blend, dict):
        return _read_ratio(fields, "blend")
    given = Fields(blend, "blend")
    learn = "idle" if given.any("learn") == "idle" else given.boolean("learn", True)
    options = {
        "ratio": _read_ratio(given, "ratio"),
        "metric": given.choice("metric", _METRICS, _METRICS[0]),
        "link_tokens": given.integer("link_tokens", 0, TOKENS_MAX),
        "min_tokens": given.integer("min_tokens", 0, TOKENS_MAX),
        "learn": learn,
        "contextual": given.boolean("contextual"),
    }
    given.refuse_unknown()
    return {name: value for name, value in options.items() if value is not None}


def _read_ratio(fields: Fields, name: str) -> float | str | None:
    return "auto" if fields.any(name) == "auto" else fields.number(name, 0, 1)
