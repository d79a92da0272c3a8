"""Options that several commands share, and the values they take."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from quire import errors
from quire.cli.ranges import Integer, Number, kernel_path, key_file, kv_dtype, place, size

SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "logprobs",
    "ignore_eos",
    "window",
    "sinks",
    "cache_salt",
    "greedy",
    "template_args",
)
ENGINE = (
    "dtype",
    "kv_dtype",
    "threads",
    "page_size",
    "kv_bytes",
    "prefill_chunk",
    "max_num_sequences",
    "max_step_ms",
    "prefix_cache",
    "kernel_path",
    "speculate",
    "draft_model",
    "draft_tokens",
    "draft_branches",
    "kv_dir",
    "kv_dir_bytes",
    "kv_redis",
    "kv_durability",
    "kv_key_file",
    "kv_load_timeout",
)


class UsageError(Exception):
    """Arguments that argparse cannot judge alone."""


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, and how to see all options; not all of them each time.

    Options are written out: an abbreviation would change its meaning with the next option.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message += meant(unknown[1], self._option_string_actions)
        print(f"{self.prog}: {message} (`{self.prog} --help` lists all options)", file=sys.stderr)
        sys.exit(2)


def meant(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is most like another one; "" if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def option_name(name: str) -> str:
    """An option as it is typed, by its name in `given`."""
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


# Those whose name on the command line is not that of the library's option.
_OPTIONS = {
    "kv_dir_bytes": "--kv-quota",
    "prefix_cache": "--no-prefix-cache",
    "template_args": "--template-arg",
    "served_model_names": "--served-model-name",
    "limits": "--limit",
}


def check_effect(options: argparse.Namespace) -> None:
    """UsageError for options that would change nothing beside the others that were given."""

    def has(*names: str) -> bool:
        return any(getattr(options, name, None) not in (None, False) for name in names)

    def needs(names: Sequence[str], fulfilled: bool, what: str) -> None:
        for name in names:
            if has(name) and not fulfilled:
                raise UsageError(f"{option_name(name)} has no effect without {what}")

    # Lines of a .jsonl file may have what the command line lacks.
    by_line = has("file")
    needs(("sinks",), has("window") or by_line, "--window")
    speculate = getattr(options, "speculate", None)
    drafts = speculate in ("ngram", "model") or (speculate is None and has("draft_model"))
    needs(("draft_tokens", "draft_branches"), drafts or by_line, "--speculate or --draft-model")
    if speculate == "model" and not has("draft_model"):
        raise UsageError("--speculate model needs --draft-model DIR, the smaller model")
    if speculate in ("none", "ngram") and has("draft_model") and not by_line:
        raise UsageError(f"--draft-model has no effect with --speculate {speculate}")
    if hasattr(options, "kv_dir"):  # `store` has the details alone
        needs(("kv_dir_bytes", "kv_durability"), has("kv_dir"), "--kv-dir")
        stores = has("kv_dir", "kv_redis")
        needs(("kv_key_file", "kv_load_timeout"), stores, "--kv-dir or --kv-redis")
    _check_greedy(options, by_line)


def _check_greedy(options: argparse.Namespace, by_line: bool) -> None:
    drawing = ("temperature", "top_k", "top_p", "min_p")
    named = [name for name in drawing if getattr(options, name, None) is not None]
    if getattr(options, "greedy", None) and named and not by_line:
        raise UsageError(f"{option_name(named[0])} has no effect with --greedy")
    if getattr(options, "temperature", None) == 0 and not by_line:
        for name in named[1:]:
            raise UsageError(f"{option_name(name)} has no effect with --temperature 0")


# Members of the library's options in its messages: with their struct, or so written that they are
# nothing else. Not within a path.
_MEMBERS = re.compile(
    r"(?:EngineOptions|SamplingOptions)::(?:speculation\.)?(\w+)|"
    rf"(?<![\w./'\"-])({'|'.join(name for name in (*SAMPLING, *ENGINE) if '_' in name)})"
    r"(?:_size)?(?![\w/'\"-]|\.\w)"
)
# Names of the library for which the program has another one.
_NAMES = {"branches": "draft_branches", "prefill_chunk_size": "prefill_chunk"}
# Names that only the library has.
_NOT_TYPED = ("state_bytes", "max_tree_nodes", "max_waiting", "logit_bias")


def in_typed_words(message: str) -> str:
    """A message of the library with options where it names members."""
    return _renamed(message, lambda name: name if name in _NOT_TYPED else option_name(name))


def in_field_words(message: str) -> str:
    """The same with the names of a line's fields."""
    return _renamed(message, lambda name: name)


def _renamed(message: str, typed: Callable[[str], str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return typed(_NAMES.get(name, name))

    return _MEMBERS.sub(replaced, re.sub(r"^(Engine::\w+|\w+Options): ", "", message))


def message_and_usage(error: errors.QuireError, options: argparse.Namespace) -> tuple[str, bool]:
    """What to tell of an error of the library, and whether an option that was given is out of a
    range that the model or the machine has."""
    message = in_typed_words(re.sub(r"\s*\n\s*", " ", str(error)))
    if getattr(options, "prompt_ids", None) is not None:
        message = re.sub(r"^prompt(?=\[\d+\] is token)", "--prompt-ids", message)
    names = given(options, (*SAMPLING, *ENGINE, "prompt_ids"))
    told = any(re.search(rf"{option_name(name)}(?![\w-])", message) for name in names)
    return message, told and isinstance(error, (errors.BadArgumentError, errors.TooLargeError))


def cache_salt(text: str) -> bytes:
    salt = os.fsencode(text)
    if not 1 <= len(salt) <= 4096:
        raise argparse.ArgumentTypeError(f"{len(salt)} bytes are out of range: 1 to 4096 bytes")
    return salt


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those that were given on the command line; the rest keeps the library's defaults."""
    found = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def add_sampling(command: argparse.ArgumentParser, most_tokens: str) -> argparse._ArgumentGroup:
    """The options that every command with answers has."""
    sampling = command.add_argument_group(
        "sampling (default: as generation_config.json of the model says; greedy without that file)"
    )
    sampling.add_argument(
        "--max-tokens",
        type=Integer(1),
        metavar="N",
        help=f"at most N new tokens (default: {most_tokens})",
    )
    sampling.add_argument(
        "--greedy",
        action="store_true",
        default=None,
        help="always take the most likely token; ignore the model's own sampling options",
    )
    sampling.add_argument(
        "--temperature",
        type=Number(0),
        metavar="T",
        help="sampling temperature; 0: the most likely token",
    )
    sampling.add_argument(
        "--top-k", type=Integer(0), metavar="K", help="only the K most likely tokens; 0: all"
    )
    sampling.add_argument(
        "--top-p",
        type=Number(0, 1, above=True),
        metavar="P",
        help="only the most likely tokens, up to a total probability of P",
    )
    sampling.add_argument(
        "--min-p",
        type=Number(0, 1),
        metavar="P",
        help="only tokens with at least P times the probability of the best",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=Number(0, above=True),
        metavar="X",
        help="penalty on tokens of prompt and answer; 1: off",
    )
    sampling.add_argument(
        "--presence-penalty",
        type=Number(),
        metavar="X",
        help="penalty on tokens of the answer; 0: off",
    )
    sampling.add_argument(
        "--frequency-penalty",
        type=Number(),
        metavar="X",
        help="the same, once per occurrence; 0: off",
    )
    sampling.add_argument(
        "--seed",
        type=Integer(0, 2**64 - 1),
        metavar="N",
        help="0 to 2^64 - 1 (default: random; --json prints it)",
    )
    sampling.add_argument(
        "--stop",
        action="append",
        type=place,
        metavar="TEXT",
        help="end the answer before TEXT; may be repeated",
    )
    sampling.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="continue after the end-of-answer token",
    )
    sampling.add_argument(
        "--window",
        type=Integer(0),
        metavar="N",
        help="endless text: a token sees N tokens, the sinks and the last ones; 0: all tokens",
    )
    sampling.add_argument(
        "--sinks",
        type=Integer(0),
        metavar="N",
        help="with --window: the first N tokens of the text always stay visible",
    )
    sampling.add_argument(
        "--cache-salt",
        type=cache_salt,
        metavar="TEXT",
        help="share KV only with requests of the same salt, in memory and in the store",
    )
    return sampling


def add_template(command: argparse.ArgumentParser) -> None:
    """What the chat template knows by name."""
    command.add_argument(
        "--template-arg",
        dest="template_args",
        action=Collect,
        type=template_argument,
        metavar="NAME=VALUE",
        help="a variable of the chat template, with a JSON value, such as enable_thinking=false; "
        "may be repeated",
    )


class Collect(argparse.Action):
    """Gathers pairs in a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, value = values
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), name: value})


def switch(text: str) -> bool:
    """True of "true", False of "false"."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text == "true"


def template_argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"{name}: {value!r} is not JSON: true, false, a number, or a text in quotes: "
            f"'{name}=\"text\"'"
        ) from None


def add_engine(command: argparse.ArgumentParser) -> None:
    """How the model is run."""
    engine = command.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="type of products and KV (default: bfloat16)",
    )
    engine.add_argument(
        "--kv-dtype",
        type=kv_dtype,
        metavar="TYPE",
        help="type of stored keys and values: bfloat16, float32, float16, int8 or fp8; two with a "
        "comma for keys and values (default: as --dtype)",
    )
    add_threads(engine)
    engine.add_argument(
        "--page-size",
        type=Integer(0, 2**20),
        metavar="N",
        help="tokens per page of KV; 0: by the model",
    )
    engine.add_argument(
        "--kv-bytes", type=size, metavar="SIZE", help="memory for KV: 512M, 2G, ..."
    )
    engine.add_argument(
        "--prefill-chunk",
        type=Integer(1, 2**20),
        metavar="N",
        help="at most N new tokens per step (default: 512)",
    )
    engine.add_argument(
        "--max-num-sequences",
        type=Integer(1, 2**20),
        metavar="N",
        help="at most N answers computed at a time (default: 64)",
    )
    engine.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        default=None,
        help="do not keep the KV of earlier prompts and answers",
    )
    engine.add_argument(
        "--speculate",
        choices=("none", "ngram", "model"),
        help="guess the next tokens from the text so far or with a smaller model; answers do not "
        "change (default: model with --draft-model, else none)",
    )
    engine.add_argument(
        "--draft-model", type=place, metavar="DIR", help="folder of the smaller model"
    )
    engine.add_argument(
        "--draft-tokens",
        type=Integer(1, 255),
        metavar="N",
        help="at most N guesses per step (default: 8)",
    )
    engine.add_argument(
        "--draft-branches",
        type=Integer(1, 16),
        metavar="N",
        help="alternatives to follow (default: 2)",
    )
    engine.add_argument(
        "--kernel-path",
        type=kernel_path,
        metavar="NAME",
        help="a kernel path that `quire inspect` lists (default: the fastest)",
    )


def add_threads(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--threads",
        type=Integer(0, 1024),
        metavar="N",
        help="number of threads; 0: one per core, within the CPU quota (default)",
    )


def add_store(command: argparse.ArgumentParser) -> None:
    """Where KV is kept beyond the end of the command."""
    store = command.add_argument_group("KV that outlives the command")
    store.add_argument(
        "--kv-dir",
        type=place,
        metavar="DIR",
        help="keep KV in DIR and reuse what is there",
    )
    store.add_argument(
        "--kv-redis",
        type=place,
        metavar="HOST:PORT",
        help="keep KV in Redis; several addresses with commas are a cluster; or a URL: "
        "redis://USER:PASSWORD@HOST:PORT/?prefix=PREFIX, with TLS rediss://...?ca=FILE",
    )
    add_store_details(store)
    store.add_argument(
        "--kv-load-timeout",
        type=Number(0, 86400),
        metavar="SECONDS",
        help="a prompt waits for stored KV at most this long (default: 2)",
    )


def add_store_details(store: argparse._ArgumentGroup) -> None:
    store.add_argument(
        "--kv-quota",
        dest="kv_dir_bytes",
        type=size,
        metavar="SIZE",
        help="size limit of DIR (default: the free space, less a tenth)",
    )
    store.add_argument(
        "--kv-durability",
        choices=("none", "async", "os", "sync"),
        help="durability of stored KV: none, async (neither survives a crash), os (survives the "
        "process, default), sync (survives power loss)",
    )
    store.add_argument(
        "--kv-key-file",
        type=key_file,
        metavar="FILE",
        help="sign stored KV with the key in FILE (at least 16 bytes); ignore unsigned or wrongly "
        "signed KV",
    )
