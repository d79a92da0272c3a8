"""The program `quire`. Each command has a module of its own: `parser()` gives its arguments, with
`run` among them."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence

import quire
from quire.cli import answers, arguments, models
from quire.cli.arguments import UsageError
from quire.cli.terminal import leave_stdout, one_line, prepare_streams
from quire.errors import QuireError

_EXIT_ERROR = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_ABOUT = """\
Quire keeps what a language model knows between two tokens (its KV state) in pages, and answers
prompts with it.

  quire                               this text, and an answer of the embedded model
  quire generate "TEXT"               an answer of the embedded model
  quire generate MODEL "TEXT"         an answer of a model in a Hugging Face folder
  quire generate --file PROMPTS       answers to many prompts, computed together
  quire chat [MODEL]                  a conversation in the terminal
  quire serve [MODEL]                 the model over HTTP, for clients of OpenAI's API
  quire prefill [MODEL] --listen ADDR computes prompts for --prefill-from of other processes
  quire inspect [MODEL]               a model, its memory and kernels; what this build can do
  quire import FILE.gguf DIR          turns a GGUF file into a Hugging Face folder
  quire pack MODEL DIR                a copy of a model that starts faster
  quire quantize MODEL DIR            a copy of a model with weights of 8 or 4 bits
  quire snapshot save | restore ...   a conversation's state as one checked file
  quire store ls | verify | gc ...    what --kv-dir and --kv-redis keep between commands
  quire kv-quality --text FILE        what int8 and fp8 keys and values cost in quality
  quire quality MODEL --against MODEL what narrow weights cost in quality
  quire blend add | eval ...          documents for --document --blend, and what blending costs

`quire COMMAND --help` lists all options; --dry-run prints the memory that a command would take.
In Python: import quire; quire.Engine(MODEL).generate("TEXT")
"""
DEMO_PROMPT = "What is the capital of France, and what is it known for?"

# The command and its module, which is imported when it is called.
_COMMANDS = {
    "generate": "quire.cli.generate",
    "chat": "quire.cli.chat",
    "serve": "quire.cli.serve",
    "prefill": "quire.cli.prefill",
    "inspect": "quire.cli.inspect",
    "import": "quire.cli.import_gguf",
    "pack": "quire.cli.pack",
    "quantize": "quire.cli.quantize",
    "snapshot": "quire.cli.snapshot",
    "store": "quire.cli.store",
    "kv-quality": "quire.cli.kv_quality",
    "quality": "quire.cli.quality",
    "blend": "quire.cli.blend",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    prepare_streams()
    if argv is None:
        _end_cleanly_on(signal.SIGTERM, signal.SIGHUP)
    options = argparse.Namespace()
    try:
        try:
            options = _parse(sys.argv[1:] if argv is None else list(argv))
        except SystemExit:  # behind the text of --help, whose reader may have gone
            sys.stdout.flush()
            raise
        arguments.check_effect(options)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"quire: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends what is left at once
        print(file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        leave_stdout()
        return _EXIT_ERROR  # the reader has gone: `quire ... | head`
    except QuireError as error:
        message, usage = arguments.message_and_usage(error, options)
        print(f"quire: error: {message}", file=sys.stderr)
        return _EXIT_USAGE if usage else _EXIT_ERROR
    except (models.Failure, OSError, MemoryError, ImportError) as error:
        print(f"quire: error: {one_line(error)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk; Python would try again, and end with 120
            leave_stdout()
        return _EXIT_ERROR


def _end_cleanly_on(*signals: signal.Signals) -> None:
    """Half-written folders go and stores are closed before the program ends, with the exit code
    that shells report for a signal."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in signals:
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, end)


def _parse(words: list[str]) -> argparse.Namespace:
    # Not argparse's own subcommands: within those, words and options cannot be mixed.
    if words and words[0] in _COMMANDS:
        command: argparse.ArgumentParser = importlib.import_module(_COMMANDS[words[0]]).parser()
        return command.parse_intermixed_args(words[1:])
    parser = arguments.Parser(
        prog="quire",
        usage="quire [COMMAND ...]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    parser.set_defaults(run=lambda _: _demo())
    options, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(
            f"there is no command {unknown[0]!r}{arguments.meant(unknown[0], _COMMANDS)}; "
            f"commands are {', '.join(_COMMANDS)}"
        )
    return options


def _demo() -> int:
    print(_ABOUT)
    print(f"quire generate {json.dumps(DEMO_PROMPT)}\n", flush=True)
    with models.open_engine(None, {}) as engine:
        prompt = models.text_prompt(models.tokenizer_of(engine), DEMO_PROMPT)
        answer = answers.print_answer(engine, prompt, {"greedy": True, "max_tokens": 128})
    answers.print_stats(answer)
    return 0
