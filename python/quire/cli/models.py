"""From what the user calls a model to an engine that runs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import quire
from quire._model_folder import is_gguf_file
from quire.cli.arguments import UsageError
from quire.cli.terminal import is_terminal, note
from quire.identity import kept_identity

if TYPE_CHECKING:
    from quire.engine import Engine
    from quire.text import Tokenizer


class Failure(Exception):
    """A failure of a part that has errors of its own."""


def model_folder(model: str | None) -> str:
    """The folder of a model, which may be given as a GGUF file; None is the embedded one, which is
    made when it is not there yet."""
    if model is None:
        return _embedded_model_dir()
    path = os.path.expanduser(model)
    with naming_missing_packages() if is_gguf_file(path) else contextlib.nullcontext():
        from quire.gguf_model import model_folder as find

        return str(find(path))


def open_engine(model: str | None, arguments: dict[str, Any]) -> Engine:
    """An engine whose store is in use from the first prompt on, so that the next command finds what
    this one has computed."""
    folder = model_folder(model)
    is_read = kept_identity(folder) is None  # the engine begins to read as soon as it has a store
    asks_peers = bool(arguments.get("prefill_from"))
    if is_read and asks_peers:
        _note_reading()
    engine = quire.Engine(folder, **arguments)
    try:
        if is_read and engine.store is not None and not asks_peers:
            _note_reading()
        engine.wait_for_store()
    except BaseException:
        engine.close()
        raise
    return engine


def note_digest(folder: str | os.PathLike[str]) -> None:
    """That the model's files are about to be read for their digest, if they are."""
    if kept_identity(folder) is None:
        _note_reading()


def _note_reading() -> None:
    note("(reading the model's files, this once, to know what model the KV is of)")


def tokenizer_of(engine: Engine) -> Tokenizer | None:
    return engine.tokenizer if engine.has_tokenizer else None


def read_tokenizer(folder: str) -> Tokenizer | None:
    """The tokenizer of a model that is not loaded; None if it has none."""
    from quire.text import Tokenizer

    return Tokenizer(folder) if os.path.isfile(os.path.join(folder, "tokenizer.json")) else None


def is_model(word: str) -> bool:
    """Whether a word of a command names a model and no other file."""
    path = os.path.expanduser(word)
    return is_gguf_file(path) or os.path.isdir(path)


def is_chat_model(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and tokenizer.chat_template is not None


def text_prompt(
    tokenizer: Tokenizer | None, text: str, system: str | None = None, raw: bool = False
) -> Any:
    """A text as the engine takes it: a chat for chat models, unless raw."""
    if raw or not is_chat_model(tokenizer):
        if system is not None:
            raise UsageError("a system message needs a model with a chat template, and no --raw")
        return text
    return chat_messages(system) + [{"role": "user", "content": text}]


def count_tokens(
    tokenizer: Tokenizer | None, prompt: Any, template_args: dict[str, Any] | None = None
) -> int:
    """Tokens of a prompt as the engine takes it."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    if tokenizer is None:
        raise quire.NotFoundError("this model has no tokenizer.json; only token ids will do here")
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    return len(tokenizer.encode_chat(prompt, **(template_args or {})))


def is_chat(prompt: Any) -> bool:
    """Whether a prompt as the engine takes it is one of messages."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def chat_messages(system: str | None) -> list[dict[str, Any]]:
    """What a chat begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def _embedded_model_dir() -> str:
    with naming_missing_packages():
        from quire.embedded import EmbeddedModelError, embedded_model_dir
        from quire.importer import GgufError

    def tell() -> None:
        if is_terminal(sys.stderr):
            note("(importing the embedded model, some seconds; the next start is fast)")

    try:
        return str(embedded_model_dir(on_import=tell))
    except (EmbeddedModelError, GgufError) as error:
        raise Failure(error) from error


@contextlib.contextmanager
def naming_missing_packages(extra: str = "import") -> Iterator[None]:
    """For imports of what only an extra of the package brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Failure(
            f"the package {error.name} is missing: pip install 'quire[{extra}]'"
        ) from error
