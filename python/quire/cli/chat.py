"""`quire chat`: a conversation in the terminal, or of lines from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire import errors
from quire._options import SAMPLING
from quire._sampling import merged
from quire.cli import answers, arguments, memory, models, text_input
from quire.cli.arguments import UsageError
from quire.cli.prompt_file import BadLine, check_field
from quire.cli.terminal import is_terminal, note, one_line, printable

if TYPE_CHECKING:
    from quire.engine import Engine

# What /set takes.
_SETTINGS = {name: o.flag for name, o in SAMPLING.items() if o.flag is not None and o.flag.in_chat}
_ABOUT_SET = (
    f'{", ".join(_SETTINGS)}, or template_arg NAME=VALUE; VALUE "default" gives it back to the '
    "model; /set alone shows what is set"
)
_COMMANDS = r'''/help                 this text
/reset                forget the conversation; the system message stays
/undo                 forget the last question and its answer
/regen                answer the last question again, with another seed
/system TEXT          another system message; without TEXT none
/read FILE            send the text of a file as a message
/save FILE            write the conversation and its options to a file
/load FILE            go on with the conversation of such a file
/set OPTION VALUE     SETTINGS
/stats                show tokens and speed below each answer, or no more
/exit                 end; so does Ctrl-D
Ctrl-C ends an answer early. A pasted text is one message, with all its lines. Lines between two
""" are one, too, and a line that ends in \ goes on in the next one. //TEXT says /TEXT.'''.replace(
    "SETTINGS", f"\n{'':22}".join(textwrap.wrap(_ABOUT_SET, 78))
)
_QUOTES = '"""'
# Before the names of options in messages of the library.
_OPTIONS_OWNER = re.compile(r"(?:Sampling|Engine)Options::")
_FORMAT = "quire-chat"
_FORMAT_VERSION = 1
# Options that a conversation does not keep: a salt is a secret, the others are of several answers.
_NOT_KEPT = ("cache_salt", "n", "logprobs")
# To check options with.
_ANYTHING = {"role": "user", "content": "x"}


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
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
    arguments.add_template(command)
    command.add_argument(
        "--stats", action="store_true", help="show tokens and speed below each answer"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="compute nothing: print the memory needed"
    )
    arguments.add_sampling(command, most_tokens="what there is room for")
    arguments.add_engine(command)
    arguments.add_store(command)
    arguments.add_peers(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    engine_arguments = arguments.given(options, arguments.ENGINE)
    if options.system is not None:
        text_input.check_argument(options.system, "--system")
    if options.dry_run:
        plan = memory.plan_memory(options.model, engine_arguments)
        return memory.print_plan(plan, {}, as_json=False)
    with models.open_engine(options.model, engine_arguments) as engine:
        if not models.is_chat_model(models.tokenizer_of(engine)):
            raise UsageError(
                f"chat: {engine.model_dir} has no chat template; it can continue a text: "
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
    read_line = _terminal_reader() if interactive else text_input.StdinLines().read
    if interactive:
        note("/help tells what can be said here; Ctrl-D ends")
    while not conversation.ended:
        try:
            text = _read_message(read_line)
            text.encode()  # raises for bytes that a terminal in the locale C has handed on
        except EOFError:
            if interactive:
                print()
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("\n(Ctrl-D or /exit ends the chat)")
            continue
        except UnicodeDecodeError as error:
            # Typed at a terminal; of a pipe it is a Failure, which ends the chat.
            note(f"quire: the line {text_input.not_utf8(error, error.object)}")
            continue
        except UnicodeEncodeError as error:
            note(f"quire: the message is not UTF-8 at character {error.start}")
            continue
        conversation.take(text)
    return 1 if conversation.failed and not interactive else 0


def _terminal_reader() -> Callable[[str], str]:
    """Lines that can be edited; a pasted text is one."""
    with contextlib.suppress(ImportError):
        import readline

        # Pasted lines come as one, with line ends in it. GNU readline alone knows how, and a
        # terminal that knows escape sequences.
        is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "")
        if "libedit" not in (readline.__doc__ or "") and not is_dumb:
            readline.parse_and_bind("set enable-bracketed-paste on")
    return input


def _read_message(read_line: Callable[[str], str]) -> str:
    """One message: a line, with those that follow on a backslash, or those between two \"\"\".
    EOFError when there is none."""
    line = read_line("> ").rstrip("\r")
    if line.startswith(_QUOTES):
        return _read_quoted(read_line, line.removeprefix(_QUOTES))
    lines: list[str] = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = read_line("... ").rstrip("\r")
        except EOFError:
            return "\n".join(lines)
    return "\n".join([*lines, line])


def _read_quoted(read_line: Callable[[str], str], line: str) -> str:
    """The lines up to the next \"\"\" at the end of one, or to the end of the input. None of it is
    a command: where it begins with a slash, a second one says so."""
    lines: list[str] = []
    with contextlib.suppress(EOFError):
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = read_line("... ").rstrip("\r")
        lines.append(line.rstrip().removesuffix(_QUOTES))
    text = "\n".join(lines).strip("\n")
    return "/" + text if text.startswith("/") else text


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
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: note(_COMMANDS),
            "exit": self._end,
            "reset": self._reset,
            "undo": lambda _: note("(forgotten)" if self._undo() else "(nothing was said yet)"),
            "regen": self._regenerate,
            "system": self._set_system,
            "read": self._read,
            "save": self._save,
            "load": self._load,
            "set": self._set,
            "stats": self._switch_stats,
        }
        for other, name in (("?", "help"), ("quit", "exit"), ("bye", "exit"), ("clear", "reset")):
            self._commands[other] = self._commands[name]

    def take(self, text: str) -> None:
        """What the user typed: a command, or something to answer."""
        if not text.strip():
            return
        name, _, argument = text[1:].strip().partition(" ")
        if text.startswith("//"):
            self._answer(text.removeprefix("/"))
        elif not text.startswith("/"):
            self._answer(text)
        elif name in self._commands:
            self._commands[name](argument.strip())
        elif "\n" in text:
            self._answer(text)  # pasted, such as a path or a comment and what follows it
        else:
            self._refuse(f"there is no command /{name}; /help names them")

    # ---- Commands

    def _end(self, _: str) -> None:
        self.ended = True

    def _reset(self, _: str) -> None:
        self._turns.clear()
        note("(forgotten)")

    def _undo(self) -> bool:
        """Forgets the last message of the user and what came after it."""
        users = [i for i, turn in enumerate(self._turns) if turn["role"] == "user"]
        if users:
            del self._turns[users[-1] :]
        return bool(users)

    def _regenerate(self, _: str) -> None:
        kept = list(self._turns)
        question = next((turn for turn in reversed(kept) if turn["role"] == "user"), None)
        if question is None:
            note("(nothing was said yet)")
            return
        self._undo()
        sampling = dict(self._sampling)
        if sampling.pop("seed", None) is not None:
            note("(with another seed than the one that is set)")
        if self._engine.resolve_sampling(**sampling)["temperature"] == 0:
            note("(greedy: the answer will be the same; /set temperature 0.8 draws another)")
        if not self._answer(question["content"], sampling):
            self._turns = kept

    def _set_system(self, text: str) -> None:
        self._system = text or None
        note("(no system message)" if self._system is None else "(system message set)")

    def _switch_stats(self, _: str) -> None:
        self._stats = not self._stats
        note(f"(tokens and speed are {'shown' if self._stats else 'not shown'})")

    def _read(self, name: str) -> None:
        try:
            text = text_input.read_file(_path(name, "/read"))
        except (OSError, UsageError, models.Failure) as error:
            self._refuse(one_line(error))
            return
        if not text.strip():
            self._refuse(f"{name}: is empty")
            return
        self._answer(text)

    def _save(self, name: str) -> None:
        sampling = {k: v for k, v in self._sampling.items() if k not in _NOT_KEPT}
        state = {
            "format": _FORMAT,
            "version": _FORMAT_VERSION,
            "messages": self._messages(),
            "options": sampling,
        }
        try:
            _write_state(_path(name, "/save"), state)
        except (OSError, UsageError, models.Failure) as error:
            self._refuse(one_line(error))
            return
        note(f"(saved {len(self._turns)} messages: {name})")

    def _load(self, name: str) -> None:
        try:
            system, turns, options = _read_state(_path(name, "/load"))
            messages = [*models.chat_messages(system), *turns]
            self._engine.check(messages or [_ANYTHING], **options)
        except errors.QuireError as error:
            self._refuse(f"{name}: {_OPTIONS_OWNER.sub('', one_line(error))}")
            return
        except (OSError, UsageError, models.Failure) as error:
            self._refuse(one_line(error))
            return
        salt = {k: v for k, v in self._sampling.items() if k == "cache_salt"}
        self._system, self._turns, self._sampling = system, turns, {**options, **salt}
        note(f"(loaded {len(turns)} messages: {name})")
        if turns and turns[-1]["role"] == "assistant":
            print(printable(turns[-1]["content"]), flush=True)

    def _set(self, text: str) -> None:
        # As one is used to write it: temperature 0.5, temperature=0.5, --top-k 5.
        found = re.match(r"-*([\w-]*)[\s=]*(.*)", text, re.DOTALL)
        name, value = (found[1].replace("-", "_"), found[2]) if found else ("", "")
        if not name:
            shown = {k: v for k, v in self._sampling.items() if k != "cache_salt"}
            own = ", ".join(f"{k} {v}" for k, v in self._engine.model_sampling.items())
            set_here = ", ".join(f"{k} {v}" for k, v in shown.items())
            note(f"(set here: {set_here or 'nothing'}; the model's own: {own or 'greedy'})")
            return
        try:
            options = _changed(self._sampling, name, value)
            # As a request would: names of the template, a window without its sinks.
            self._engine.check([_ANYTHING], **options)
        except (argparse.ArgumentTypeError, errors.QuireError) as error:
            self._refuse(f"/set {name}: {_OPTIONS_OWNER.sub('', one_line(error))}")
            return
        self._sampling = options
        note(f"({name} {value or 'default'})")

    # ---- Answers

    def _answer(self, text: str, sampling: dict[str, Any] | None = None) -> bool:
        """Whether there is an answer."""
        sampling = self._sampling if sampling is None else sampling
        self._turns.append({"role": "user", "content": text})
        try:
            answer = answers.print_answer(
                self._engine, self._messages(), sampling, interruptible=True
            )
        except errors.QuireError as error:
            self._undo()
            too_large = isinstance(error, errors.TooLargeError)
            room = "; /undo or /reset makes room" if too_large else ""
            self._refuse(arguments.in_typed_words(one_line(error)) + room)
            return False
        if answer.result is None and not answer.text:
            self._undo()
            note("(interrupted; the message is forgotten)")
            return False
        # As it was printed, also if it was interrupted: it is what the user saw.
        self._turns.append({"role": "assistant", "content": answer.text})
        answers.print_sources(self._engine, answer.result)
        answers.print_remote(self._engine, answer.result)
        answers.print_cut(self._engine, answer.result, sampling)
        if answer.result is None:
            note("(interrupted)")
        elif self._stats:
            answers.print_stats(answer)
        return True

    def _messages(self) -> list[dict[str, Any]]:
        return models.chat_messages(self._system) + self._turns

    def _refuse(self, reason: str) -> None:
        self.failed = True
        note(f"quire: {reason}")


def _path(name: str, command: str) -> str:
    if not name:
        raise UsageError(f"{command} needs the name of a file")
    if "\0" in name:
        raise UsageError(f"{command}: the name of a file cannot have a NUL")
    return os.path.expanduser(name)


def _changed(sampling: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    """The options with one of them set, or given back to the model. ArgumentTypeError for what
    cannot be set."""
    if name == "template_arg":
        key, argument = arguments.template_argument(value)
        return {**sampling, "template_args": {**sampling.get("template_args", {}), key: argument}}
    if name not in _SETTINGS:
        raise argparse.ArgumentTypeError(
            f"there is no such option; options are {', '.join(_SETTINGS)}, template_arg"
        )
    if value in ("", "default"):
        return {option: setting for option, setting in sampling.items() if option != name}
    read = _SETTINGS[name].reads
    return merged(sampling, {name: value if read is None else read(value)})


def _write_state(name: str, state: dict[str, Any]) -> None:
    """Over another conversation, but over no other file. It is there completely or not at all."""
    if os.path.exists(name):
        _read_json(name)
    text = json.dumps(state, ensure_ascii=False, indent=1) + "\n"
    part = f"{name}.part"
    with open(part, "x", encoding="utf-8") as file:  # "x": a file of that name is somebody's
        try:
            file.write(text)
            file.flush()
            os.replace(part, name)
        except BaseException:
            os.unlink(part)
            raise


def _read_json(name: str) -> dict[str, Any]:
    """The object of a file that /save wrote. Failure for any other file."""
    try:
        state = json.loads(text_input.read_file(name))
    except (ValueError, RecursionError) as error:
        raise models.Failure(f"{name}: is not JSON: {one_line(error)}") from None
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise models.Failure(f"{name}: is not a conversation that /save wrote")
    return state


def _read_state(name: str) -> tuple[str | None, list[dict[str, Any]], dict[str, Any]]:
    """System message, turns and options of a file that /save wrote. Failure for anything else."""
    state = _read_json(name)
    if state.get("version") != _FORMAT_VERSION:
        raise models.Failure(f"{name}: has version {state.get('version')}, not {_FORMAT_VERSION}")
    messages, options = state.get("messages"), state.get("options")
    if not isinstance(messages, list) or not isinstance(options, dict):
        raise models.Failure(f'{name}: needs a list "messages" and an object "options"')
    for index, message in enumerate(messages):
        is_message = isinstance(message, dict) and set(message) == {"role", "content"}
        if not is_message or not all(isinstance(value, str) for value in message.values()):
            raise models.Failure(f'{name}: message {index} needs the texts "role" and "content"')
    known = set(arguments.SAMPLING).difference(_NOT_KEPT)
    for option, value in options.items():
        if option not in known:
            raise models.Failure(f"{name}: there is no option {option!r}")
        try:
            options[option] = check_field(option, value)
        except BadLine as error:
            raise models.Failure(f"{name}: {error}") from None
    system = None
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    return system, messages, options
