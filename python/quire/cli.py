"""The program `quire`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.engine import Engine, Result

_EXIT_ERROR = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_ABOUT = """\
Quire keeps what a language model knows between two tokens (its KV state) in pages, and answers
prompts with it.

  quire                               this text, and an answer of the embedded model
  quire generate "TEXT"               an answer of the embedded model
  quire generate MODEL "TEXT"         an answer of a model in a Hugging Face folder
  quire generate MODEL "TEXT" --json  the same with token ids, log-probabilities and usage
  quire import FILE.gguf DIR          turns a GGUF file into a Hugging Face folder
  quire inspect [MODEL]               what this build can do; what a model is

`quire COMMAND --help` tells all options.
In Python: import quire; quire.Engine(MODEL).generate("TEXT")
"""
_DEMO_PROMPT = "What is the capital of France, and what is it known for?"

# Terminal control characters in an answer are shown, not obeyed: a model may have learnt any of
# them.
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= {code: 0xFFFD for code in range(0x80, 0xA0)}


class _UsageError(Exception):
    """Arguments that argparse cannot judge alone."""


class _Failure(Exception):
    """A failure of a part that has errors of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    if argv is None:
        # tvm-ffi imports torch where it finds it, which takes seconds; the program has no use for
        # it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    _prepare_streams()
    try:
        options = _parse(sys.argv[1:] if argv is None else list(argv))
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except _UsageError as error:
        print(f"quire: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        return _EXIT_ERROR  # the reader has gone: `quire ... | head`
    except (QuireError, _Failure, OSError, MemoryError, ImportError) as error:
        print(f"quire: error: {_one_line(error)}", file=sys.stderr)
        return _EXIT_ERROR


def _prepare_streams() -> None:
    if sys.stdout is None:  # closed by who started us
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal without UTF-8 gets "?", not a traceback


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s*\n\s*", " ", str(error)) or type(error).__name__


# ---- Arguments


def _parse(arguments: list[str]) -> argparse.Namespace:
    # Not argparse's own subcommands: within those, words and options cannot be mixed.
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]]().parse_intermixed_args(arguments[1:])
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


def _generate_parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire generate",
        description="Answers a prompt and prints the answer as it comes.",
    )
    command.add_argument(
        "words",
        nargs="*",
        metavar="MODEL | TEXT",
        help="folder of the model (default: the embedded one), and the prompt (default: stdin)",
    )
    command.add_argument("--model", metavar="DIR", help="folder of the model")
    command.add_argument("--prompt", metavar="TEXT", help="the prompt")
    command.add_argument(
        "--prompt-ids", metavar="IDS", type=_ids, help='the prompt as token ids: "1,2,3"'
    )
    command.add_argument("--system", metavar="TEXT", help="system message of the chat")
    command.add_argument(
        "--raw", action="store_true", help="no chat template: go on from the prompt as it stands"
    )
    command.add_argument(
        "--json", action="store_true", help="print one object: ids, text, logprobs, usage"
    )
    command.add_argument(
        "--stats", action="store_true", help="print counts and speed to standard error"
    )

    sampling = command.add_argument_group("sampling (greedy by default)")
    sampling.add_argument(
        "--max-tokens", type=int, metavar="N", help="most new tokens (default: 128)"
    )
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the most likely token"
    )
    sampling.add_argument(
        "--top-k", type=int, metavar="K", help="only the K most likely tokens; 0: all"
    )
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="only the most likely tokens that sum up to P"
    )
    sampling.add_argument(
        "--min-p", type=float, metavar="P", help="only tokens of at least P times the best one"
    )
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="over prompt and answer; 1: off"
    )
    sampling.add_argument(
        "--presence-penalty", type=float, metavar="X", help="over the answer; 0: off"
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="over the answer; 0: off"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="0 to 2^64 - 1")
    sampling.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="ends the answer before TEXT; may be repeated",
    )
    sampling.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: also those of the K best tokens"
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on behind the end of the answer"
    )

    _add_engine_options(command)
    command.set_defaults(run=_generate)
    return command


def _add_engine_options(command: argparse.ArgumentParser) -> None:
    engine = command.add_argument_group("engine")
    engine.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of products and KV (default: bfloat16)"
    )
    engine.add_argument("--threads", type=int, metavar="N", help="0: one per core (default)")
    engine.add_argument(
        "--page-size", type=int, metavar="N", help="tokens per page of KV; 0: chosen for the model"
    )
    engine.add_argument(
        "--kv-bytes", type=_bytes, metavar="SIZE", help="memory for KV: 512M, 2G, ..."
    )
    engine.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="most new tokens of one step (default: 512)"
    )
    engine.add_argument(
        "--kernel-path", metavar="NAME", help="one of `quire inspect`; default: the best"
    )


def _import_parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire import",
        description="Turns a GGUF file of the llama family into a Hugging Face folder.",
    )
    command.add_argument("file", metavar="FILE.gguf")
    command.add_argument(
        "directory", metavar="DIR", help="is made; must not exist yet, or be empty"
    )
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float16"), help="of the weights written"
    )
    command.set_defaults(run=_import)
    return command


def _inspect_parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire inspect",
        description="Without MODEL: the build. With it: the model, and how it would be run.",
    )
    command.add_argument("model", nargs="?", metavar="MODEL", help="folder of a model")
    command.add_argument("--json", action="store_true", help="print one object")
    _add_engine_options(command)
    command.set_defaults(run=_inspect)
    return command


_COMMANDS = {"generate": _generate_parser, "import": _import_parser, "inspect": _inspect_parser}


def _ids(text: str) -> list[int]:
    try:
        ids = [int(word) for word in re.split(r"[\s,]+", text.strip("[] \t\n")) if word]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"token ids are numbers with commas between them: {error}"
        ) from None
    if not ids:
        raise argparse.ArgumentTypeError("there must be at least one token id")
    return ids


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: 1000000, 512M, 2G, ...")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


# ---- Commands


def _demo() -> int:
    print(_ABOUT)
    print(f"quire generate {json.dumps(_DEMO_PROMPT)}\n", flush=True)
    with _open_engine(None, {}) as engine:
        return _print_stream(engine, [{"role": "user", "content": _DEMO_PROMPT}], {}, stats=True)


def _generate(options: argparse.Namespace) -> int:
    model, text = _model_and_text(options)
    sampling = _given(
        options,
        (
            "max_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
        )
        + ("frequency_penalty", "seed", "stop", "logprobs", "ignore_eos"),
    )
    with _open_engine(model, _engine_arguments(options)) as engine:
        prompt = options.prompt_ids or _text_prompt(
            engine, options, sys.stdin.read() if text is None else text
        )
        if options.json:
            result = engine.generate(prompt, **sampling)
            print(json.dumps(_result_object(result), ensure_ascii=False))
            return 0
        sampling.setdefault("logprobs", None)  # nobody would see them
        return _print_stream(engine, prompt, sampling, options.stats)


def _import(options: argparse.Namespace) -> int:
    with _naming_missing_packages():
        from quire.importer import GgufError, import_gguf
    try:
        import_gguf(Path(options.file), Path(options.directory), **_given(options, ("dtype",)))
    except GgufError as error:
        raise _Failure(error) from error
    print(f'{options.directory}: written; try: quire generate {options.directory} "Hello"')
    return 0


def _inspect(options: argparse.Namespace) -> int:
    facts = _build_facts() if options.model is None else _model_facts(options)
    if options.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {_fact_text(value)}")
    return 0


# ---- Parts of them


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those that were given on the command line; the rest keeps the library's defaults."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    return _given(
        options, ("dtype", "threads", "page_size", "kv_bytes", "prefill_chunk", "kernel_path")
    )


def _model_and_text(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """The folder (None: embedded) and the text (None: --prompt-ids or standard input) of `quire
    generate`."""
    words: list[str] = list(options.words)
    model = options.model
    has_prompt = options.prompt is not None or options.prompt_ids is not None
    if model is None and words and (len(words) > 1 or has_prompt or _means_folder(words[0])):
        model = words.pop(0)
    if options.prompt is not None and options.prompt_ids is not None:
        raise _UsageError("give --prompt or --prompt-ids, not both")
    if has_prompt and words or len(words) > 1:
        raise _UsageError(
            f"generate: more than one prompt: {words[-1]!r}; quote a text of several words"
        )
    if options.prompt_ids is not None:
        return model, None
    if options.prompt is not None:
        return model, options.prompt
    if words:
        return model, words[0]
    if sys.stdin is None or sys.stdin.isatty():
        raise _UsageError(
            'generate: no prompt; for example: quire generate "What is a quire of paper?"'
        )
    return model, None


def _means_folder(word: str) -> bool:
    """Whether a single word is the model and not the prompt: it is a folder or is written like a
    path."""
    return os.path.isdir(word) or re.fullmatch(r"~\S*|\S*/\S*", word) is not None


def _open_engine(model: str | None, arguments: dict[str, Any]) -> Engine:
    if model is None:
        model = _embedded_model_dir()
    path = os.path.expanduser(model)
    if not os.path.isdir(path):
        hint = (
            "turn a GGUF file into one with: quire import FILE.gguf DIR"
            if os.path.isfile(path)
            else ("if it is meant as the prompt, give it with --prompt")
        )
        raise quire.NotFoundError(f"{model}: there is no such folder with a model; {hint}")
    return quire.Engine(path, **arguments)


def _embedded_model_dir() -> str:
    with _naming_missing_packages():
        from quire.embedded import EmbeddedModelError
        from quire.importer import GgufError
    start = time.monotonic()
    try:
        directory = quire.embedded_model_dir()
    except (EmbeddedModelError, GgufError) as error:
        raise _Failure(error) from error
    seconds = time.monotonic() - start
    if seconds > 1 and sys.stderr.isatty():
        print(
            f"(the embedded model was imported in {seconds:.0f} s; the next start is fast)",
            file=sys.stderr,
        )
    return directory


@contextlib.contextmanager
def _naming_missing_packages() -> Iterator[None]:
    """For imports of what only the extra [import] brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _Failure(
            f"the package {error.name} is missing: pip install 'quire[import]'"
        ) from error


def _text_prompt(engine: Engine, options: argparse.Namespace, text: str) -> Any:
    """The prompt as the engine takes it: a chat for chat models, unless --raw."""
    chat = engine.has_tokenizer and engine.tokenizer.chat_template is not None and not options.raw
    if not chat:
        if options.system is not None:
            raise _UsageError("generate: --system needs a chat model, and no --raw")
        return text
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def _print_stream(engine: Engine, prompt: Any, sampling: dict[str, Any], stats: bool) -> int:
    start = time.monotonic()
    first: float | None = None
    result: Result | None = None
    for piece in engine.stream(prompt, **sampling):
        first = time.monotonic() if first is None else first
        text = piece.text if engine.has_tokenizer else "".join(f"{id} " for id in piece.ids)
        print(text.translate(_CONTROL) if sys.stdout.isatty() else text, end="", flush=True)
        result = piece.result
    print()
    if stats and result is not None and first is not None:
        _print_stats(result, first - start, time.monotonic() - first)
    return 0


def _print_stats(result: Result, prefill_seconds: float, decode_seconds: float) -> None:
    usage = result.usage
    decoded = usage.completion_tokens - 1  # the first one comes with the prompt
    speed = (
        f", {decoded / decode_seconds:.1f} tokens/s" if decoded > 0 and decode_seconds > 0 else ""
    )
    sys.stdout.flush()
    print(
        f"({usage.prompt_tokens} prompt tokens in {prefill_seconds:.2f} s, "
        f"{usage.completion_tokens} new tokens{speed}, ended by {result.finish_reason})",
        file=sys.stderr,
    )


def _result_object(result: Result) -> dict[str, Any]:
    usage = result.usage
    found: dict[str, Any] = {
        "ids": result.ids,
        "text": result.text,
        "logprobs": result.logprobs,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        },
    }
    if result.top_logprobs is not None:
        found["top_logprobs"] = [
            [{"id": id, "logprob": logprob} for id, logprob in best] for best in result.top_logprobs
        ]
    return found


def _build_facts() -> dict[str, Any]:
    from quire import _ffi

    return {
        "version": quire.__version__,
        "library": str(_ffi.LIBRARY_PATH),
        "kernel_paths": quire.kernel_paths(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _model_facts(options: argparse.Namespace) -> dict[str, Any]:
    with _open_engine(options.model, _engine_arguments(options)) as engine:
        info = engine.info
        stats = engine.stats()
        template = engine.has_tokenizer and engine.tokenizer.chat_template is not None
        layer = info.layers[0]
        return {
            "architecture": info.architecture,
            "parameters": info.parameter_count,
            "weight_bytes": info.weight_bytes,
            "layers": len(info.layers),
            "heads": f"{layer.num_qo_heads} query, {layer.num_kv_heads} key and value",
            "head_dims": f"{layer.qk_head_dim} query and key, {layer.v_head_dim} value",
            "hidden_size": info.hidden_size,
            "vocab_size": info.vocab_size,
            "max_position_embeddings": info.max_position_embeddings,
            "eos_token_ids": list(info.eos_token_ids),
            "bos_token_id": info.bos_token_id,
            "rope": f"theta {info.rope['theta']:g}, scaling {info.rope['scaling']}",
            "chat_template": template,
            "kernel_path": info.kernel_path,
            "kv_dtype": layer.dtype,
            "page_size": stats["page_size"],
            "pages": stats["pages_total"],
            "kv_bytes": stats["kv_bytes"],
            "kv_bytes_per_token": stats["kv_bytes_per_token"],
        }


def _fact_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10000 else str(value)
