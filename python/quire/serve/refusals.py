"""What a client is told when the engine refuses its request, or ends its answer with an error.

An error of the engine names the engine's options. A client knows the fields of a request, and the
operator of the server knows the options of the program: messages are put into their words here.
"""

from __future__ import annotations

import dataclasses
import re

from quire import errors
from quire.serve.generation import Generation
from quire.serve.prefill_pairs import FIELD
from quire.serve.problems import Problem, from_engine

__all__ = ["is_of_grammar", "of_answer", "of_request"]


@dataclasses.dataclass(frozen=True)
class _Remedy:
    """For messages that contain `sign`: the text from there on, or from the field on, is `text`."""

    sign: str
    text: str
    keeps_front: bool = False


@dataclasses.dataclass(frozen=True)
class _Option:
    """An option of a request to the engine, which its messages begin with, the field for it, and
    the remedies."""

    name: str
    field: str
    remedies: tuple[_Remedy, ...]

    def problem(self, message: str) -> Problem | None:
        """None where the message is about something else."""
        message = message.removeprefix("SamplingOptions::")
        if not re.match(rf"{self.name}\b", message):
            return None
        message = self.field + message.removeprefix(self.name)
        for remedy in self.remedies:
            front, sign, _ = message.partition(remedy.sign)
            if sign:
                message = (front if remedy.keeps_front else f"{self.field}: ") + remedy.text
                break
        return Problem(400, message, param=self.field, code="invalid_value")


_OPTIONS = (
    _Option(
        "predicted_tokens",
        "prediction",
        (
            _Remedy(
                "no room for guesses",
                "the server has no room for guesses; begin it with --speculate ngram, or with "
                "--max-tree-nodes of at least 2",
            ),
        ),
    ),
    _Option(
        "prefill_peer",
        f"{FIELD}.remote_engine_id",
        (
            _Remedy(
                ",",
                ", which is none of the addresses of --prefill-from of this server",
                keeps_front=True,
            ),
        ),
    ),
    _Option(
        "blend",
        "blend",
        (
            _Remedy(
                "blend_piece is 0",
                "the server has no room for blended prompts; begin it with --blend-piece 2048",
            ),
            _Remedy(
                "keeps no KV",
                "the server keeps no KV between requests, so no document is known; begin it "
                "without --no-prefix-cache",
            ),
            _Remedy(  # the model has no verdict, or one against it
                "; a ratio of 1 is exact",
                "; a ratio of 1 is exact, and --blend-unverified of the server forces it",
                keeps_front=True,
            ),
        ),
    ),
)


def of_request(error: errors.QuireError, generation: Generation) -> Problem:
    """For a request that the engine does not take."""
    field, message = generation.grammar_field, str(error)
    if field is not None and isinstance(error, errors.UnavailableError):
        return Problem(501, f"{field}: {error}", param=field)
    if field is not None and message.startswith("grammar: "):
        message = f"{field}: " + message.removeprefix("grammar: ")
        return Problem(400, message, param=field, code="invalid_value")
    for option in _OPTIONS:
        if found := option.problem(message):
            return found
    return from_engine(error, generation.prompt_field)


def is_of_grammar(error: errors.QuireError, generation: Generation) -> bool:
    """Whether it is by its grammar that an answer ends with this error."""
    if generation.grammar_field is None or "grammar" not in str(error):
        return False
    return isinstance(error, errors.BadArgumentError | errors.TooLargeError)


def of_answer(error: errors.QuireError, generation: Generation) -> Problem:
    """For an answer that ends with an error while it is computed."""
    if not is_of_grammar(error, generation):
        return from_engine(error)
    field = generation.grammar_field
    message = str(error).removeprefix("SamplingOptions::")
    return Problem(400, f"{field}: {message}", param=field, code="invalid_value")
