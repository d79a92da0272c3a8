"""What a client is told when the engine refuses its request, or ends its answer with an error.

An error of the engine says which option it is about, and names the engine's options in its message.
A client knows the fields of a request, and the operator of the server knows the options of the
program: messages are put into their words here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire import errors
from quire.serve.generation import Generation
from quire.serve.prefill_pairs import FIELD
from quire.serve.problems import Problem, from_engine

__all__ = ["is_of_grammar", "of_answer", "of_request"]


@dataclasses.dataclass(frozen=True)
class _Option:
    """The field of a request behind an option of the engine, and what its client is told, by the
    reason of the refusal: behind the field's name, with {value} and {front}, the engine's message
    without what it advises to do. For other reasons it is the engine's own message.
    """

    field: str
    remedies: Mapping[str, str]

    def problem(self, error: errors.QuireError, value: object) -> Problem:
        message = str(error).removeprefix("SamplingOptions::").removeprefix(error.option)
        if error.reason in self.remedies:
            front = message.rpartition("; ")[0]
            message = self.remedies[error.reason].format(front=front, value=value)
        return Problem(400, self.field + message, param=self.field, code="invalid_value")


_OPTIONS = {
    "predicted_tokens": _Option(
        "prediction",
        {
            "no_guess_room": ": the server has no room for guesses; begin it with --speculate "
            "ngram, or with --max-tree-nodes of at least 2",
        },
    ),
    "prefill_peer": _Option(
        f"{FIELD}.remote_engine_id",
        {
            "unknown_peer": " is {value!r}, which is none of the addresses of --prefill-from of "
            "this server",
        },
    ),
    "blend": _Option(
        "blend",
        {
            "no_blend_room": ": the server has no room for blended prompts; begin it with "
            "--blend-piece 2048",
            "keeps_no_kv": ": the server keeps no KV between requests, so no document is known; "
            "begin it without --no-prefix-cache",
            # The model has no verdict, or one against it: the front says which.
            "unverified_blend": "{front}; a ratio of 1 is exact, and --blend-unverified of the "
            "server forces it",
        },
    ),
}


def of_request(error: errors.QuireError, generation: Generation) -> Problem:
    """For a request that the engine does not take."""
    field, message = generation.grammar_field, str(error)
    if field is not None and error.option == "grammar":
        if isinstance(error, errors.UnavailableError):
            return Problem(501, f"{field}: {error}", param=field)
        if isinstance(error, errors.BadArgumentError):
            message = f"{field}: " + message.removeprefix("grammar: ")
            return Problem(400, message, param=field, code="invalid_value")
    if isinstance(error, errors.BadArgumentError) and error.option in _OPTIONS:
        return _OPTIONS[error.option].problem(error, generation.options.get(error.option))
    return from_engine(error, generation.prompt_field)


def is_of_grammar(error: errors.QuireError, generation: Generation) -> bool:
    """Whether it is by its grammar that an answer ends with this error."""
    if generation.grammar_field is None or error.option != "grammar":
        return False
    return isinstance(error, errors.BadArgumentError | errors.TooLargeError)


def of_answer(error: errors.QuireError, generation: Generation) -> Problem:
    """For an answer that ends with an error while it is computed."""
    if not is_of_grammar(error, generation):
        return from_engine(error)
    field = generation.grammar_field
    message = str(error).removeprefix("SamplingOptions::")
    return Problem(400, f"{field}: {message}", param=field, code="invalid_value")
