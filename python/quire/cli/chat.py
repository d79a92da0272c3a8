"""`quire chat`: a conversation in the terminal, or of lines from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from quire import errors
from quire.cli import answers, arguments, memory, models
from quire.cli.arguments import UsageError
from quire.cli.terminal import is_terminal, note, one_line

if TYPE_CHECKING:
    from quire.engine import Engine

# What an answer may have if nothing is said: long enough for an essay, short enough that a model
# that repeats itself comes to an end.
_DEFAULT_MAX_TOKENS = 1024

_COMMANDS = r"""/help           this text
/reset          forget the conversation; the system message stays
/undo           forget the last question and its answer
/system TEXT    another system message; without TEXT none
/stats          show tokens and speed below each answer, or no more
/exit           end; so does Ctrl-D
Ctrl-C ends an answer early. A line that ends in \ goes on in the next one. //TEXT says /TEXT."""


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire chat",
        description="A conversation with a chat model. Each line of standard input is a message.",
        epilog=f"In the conversation:\n{_COMMANDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of the model (default: the embedded one)",
    )
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument(
        "--stats", action="store_true", help="show tokens and speed below each answer"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="compute nothing: say what memory it would take"
    )
    arguments.add_sampling(command, most_tokens=f"{_DEFAULT_MAX_TOKENS}, or what there is room for")
    arguments.add_engine(command)
    arguments.add_store(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    engine_arguments = arguments.given(options, arguments.ENGINE)
    if options.dry_run:
        plan = memory.plan_memory(options.model, engine_arguments)
        return memory.print_plan(plan, {}, as_json=False)
    with models.open_engine(options.model, engine_arguments) as engine:
        if not models.is_chat_model(models.tokenizer_of(engine)):
            raise UsageError(
                f"chat: {engine.model_dir} has no chat template; it can go on from a text: "
                f'quire generate {engine.model_dir} --raw "Once upon a time"'
            )
        conversation = Conversation(
            engine, options.system, arguments.given(options, arguments.SAMPLING), options.stats
        )
        return _converse(conversation)


def _converse(conversation: Conversation) -> int:
    """Takes messages until /exit or the end of the input. 1 if an answer failed and nobody saw it
    at the terminal."""
    interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() edits lines with it)
        note("/help tells what can be said here; Ctrl-D ends")
    while not conversation.ended:
        try:
            text = _read_message(interactive)
        except EOFError:
            if interactive:
                print()
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("\n(Ctrl-D or /exit ends the chat)")
            continue
        conversation.take(text)
    return 1 if conversation.failed and not interactive else 0


def _read_message(interactive: bool) -> str:
    """One message: a line, with those that follow on a backslash. EOFError when there is none."""
    lines: list[str] = []
    while True:
        prompt = "... " if lines else "> "
        try:
            line = input(prompt if interactive else "").rstrip("\r")
        except EOFError:
            if lines:
                return "\n".join(lines)
            raise
        except UnicodeDecodeError as error:
            raise errors.BadArgumentError(
                f"standard input is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


class Conversation:
    """The messages so far. What is said again is found in the prefix cache, not computed again."""

    def __init__(
        self, engine: Engine, system: str | None, sampling: dict[str, Any], stats: bool
    ) -> None:
        self.ended = False
        self.failed = False
        self._engine = engine
        self._system = system
        self._sampling = sampling
        self._stats = stats
        self._turns: list[dict[str, Any]] = []

    def take(self, text: str) -> None:
        """A line of the user: a command, or something to answer."""
        if not text.strip():
            return
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].strip().partition(" ")
            self._obey(name, argument.strip())
        else:
            self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _obey(self, command: str, argument: str) -> None:
        if command in ("exit", "quit", "bye"):
            self.ended = True
        elif command in ("help", "?"):
            note(_COMMANDS)
        elif command in ("reset", "clear"):
            self._turns.clear()
            note("(forgotten)")
        elif command == "undo":
            note("(forgotten)" if self._undo() else "(nothing was said yet)")
        elif command == "system":
            self._system = argument or None
            note("(no system message)" if self._system is None else "(system message set)")
        elif command == "stats":
            self._stats = not self._stats
            note(f"(tokens and speed are {'shown' if self._stats else 'not shown'})")
        else:
            self._refuse(f"there is no command /{command}; /help names them")

    def _undo(self) -> bool:
        """Forgets the last message of the user and what came after it."""
        users = [i for i, turn in enumerate(self._turns) if turn["role"] == "user"]
        if users:
            del self._turns[users[-1] :]
        return bool(users)

    def _answer(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        try:
            answer = answers.print_answer(
                self._engine, self._messages(), self._options(), interruptible=True
            )
        except errors.TooLargeError as error:
            self._undo()
            self._refuse(f"{one_line(error)}; /undo or /reset makes room")
            return
        except errors.QuireError as error:
            self._undo()
            self._refuse(one_line(error))
            return
        if answer.result is None and not answer.text:
            self._undo()
            note("(interrupted; the message is forgotten)")
            return
        # As it was printed, also if it was interrupted: it is what the user saw.
        self._turns.append({"role": "assistant", "content": answer.text})
        answers.print_sources(self._engine, answer.result)
        if answer.result is None:
            note("(interrupted)")
        elif self._stats:
            answers.print_stats(answer)

    def _messages(self) -> list[dict[str, Any]]:
        return models.chat_messages(self._system) + self._turns

    def _options(self) -> dict[str, Any]:
        if "max_tokens" in self._sampling:
            return self._sampling
        stats = self._engine.stats()
        room = min(
            self._engine.info.max_position_embeddings, stats["pages_total"] * stats["page_size"]
        ) - len(self._engine.tokenizer.encode_chat(self._messages()))
        return {**self._sampling, "max_tokens": max(1, min(_DEFAULT_MAX_TOKENS, room))}

    def _refuse(self, reason: str) -> None:
        self.failed = True
        note(f"quire: {reason}")
