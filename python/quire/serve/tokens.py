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
        self._texts: dict[int, str] = {}

    def text(self, id: int) -> str:
        """Special tokens have theirs, too; a part of a character is U+FFFD."""
        if id not in self._texts:
            self._texts[id] = self._tokenizer.decode([id], skip_special_tokens=False)
        return self._texts[id]

    def entry(self, id: int, logprob: float) -> dict[str, Any]:
        """A token in OpenAI's form. bytes: null for a part of a character."""
        text = self.text(id)
        data = None if _REPLACEMENT in text else list(text.encode("utf-8"))
        return {"token": text, "logprob": logprob, "bytes": data}

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
