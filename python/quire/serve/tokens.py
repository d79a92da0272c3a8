"""Texts of single tokens, as logprobs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.text import Tokenizer

__all__ = ["TokenTexts"]

_REPLACEMENT = "\ufffd"


class TokenTexts:
    """The texts of one answer's tokens: each token is decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text(self, id: int) -> str:
        """Special tokens have theirs, too; a part of a character is U+FFFD."""
        return self._token(id)[0]

    def entry(self, id: int, logprob: float) -> dict[str, Any]:
        """A token in OpenAI's form. bytes: those of all tokens joined are the answer's; null where
        they are not known."""
        text, data = self._token(id)
        return {"token": text, "logprob": logprob, "bytes": data}

    def _token(self, id: int) -> tuple[str, list[int] | None]:
        found = self._known.get(id)
        if found is None:
            data = self._tokenizer.bytes_of(id)
            if data is not None:
                found = data.decode("utf-8", "replace"), list(data)
            else:
                text = self._tokenizer.decode([id], skip_special_tokens=False)
                found = text, None if _REPLACEMENT in text else list(text.encode("utf-8"))
            self._known[id] = found
        return found

    def entries(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[Sequence[tuple[int, float]]],
    ) -> list[dict[str, Any]]:
        """One entry for each token, with its best alternatives where they were asked for."""
        found = []
        for index, (id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            best = top_logprobs[index] if top_logprobs else ()
            top = [self.entry(other, value) for other, value in best]
            found.append({**self.entry(id, logprob), "top_logprobs": top})
        return found
