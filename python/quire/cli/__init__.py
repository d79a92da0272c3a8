"""The program `quire`. Each command has a module of its own: `parser()` gives its arguments, with
`run` among them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

import quire
from quire.cli import answers, models
from quire.cli.arguments import UsageError
from quire.cli.terminal import one_line, prepare_streams
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
  quire inspect [MODEL]               what a model is, takes and runs on; what this build can do
  quire import FILE.gguf DIR          turns a GGUF file into a Hugging Face folder
  quire pack MODEL DIR                a copy of a model that engines start from faster
  quire snapshot save | restore ...   a conversation's state as one file, checked when it is read
  quire store ls | verify | gc ...    what --kv-dir and --kv-redis keep between commands
  quire kv-quality --text FILE        what int8 and fp8 keys and values cost a model, on a text

`quire COMMAND --help` tells all options; --dry-run tells what memory a command would take.
In Python: import quire; quire.Engine(MODEL).generate("TEXT")
"""
DEMO_PROMPT = "What is the capital of France, and what is it known for?"

# The command and its module, which is imported when it is called.
_COMMANDS = {
    "generate": "quire.cli.generate",
    "chat": "quire.cli.chat",
    "inspect": "quire.cli.inspect",
    "import": "quire.cli.import_gguf",
    "pack": "quire.cli.pack",
    "snapshot": "quire.cli.snapshot",
    "store": "quire.cli.store",
    "kv-quality": "quire.cli.kv_quality",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    if argv is None:
        # tvm-ffi imports torch where it finds it, which takes seconds; the program has no use for
        # it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    prepare_streams()
    try:
        options = _parse(sys.argv[1:] if argv is None else list(argv))
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"quire: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        return _EXIT_ERROR  # the reader has gone: `quire ... | head`
    except (QuireError, models.Failure, OSError, MemoryError, ImportError) as error:
        print(f"quire: error: {one_line(error)}", file=sys.stderr)
        return _EXIT_ERROR


def _parse(arguments: list[str]) -> argparse.Namespace:
    # Not argparse's own subcommands: within those, words and options cannot be mixed.
    if arguments and arguments[0] in _COMMANDS:
        parser: argparse.ArgumentParser = importlib.import_module(_COMMANDS[arguments[0]]).parser()
        return parser.parse_intermixed_args(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="quire",
        usage="quire [COMMAND ...]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    parser.set_defaults(run=lambda _: _demo())
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"there is no command {unknown[0]!r}; commands are {', '.join(_COMMANDS)}")
    return options


def _demo() -> int:
    print(_ABOUT)
    print(f"quire generate {json.dumps(DEMO_PROMPT)}\n", flush=True)
    with models.open_engine(None, {}) as engine:
        prompt = models.text_prompt(models.tokenizer_of(engine), DEMO_PROMPT)
        answer = answers.print_answer(engine, prompt, {})
    answers.print_stats(answer)
    return 0
