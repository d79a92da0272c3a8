"""Options that several commands share, and the values they take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

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
)
ENGINE = (
    "dtype",
    "kv_dtype",
    "threads",
    "page_size",
    "kv_bytes",
    "prefill_chunk",
    "max_num_sequences",
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


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those that were given on the command line; the rest keeps the library's defaults."""
    found = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def add_sampling(command: argparse.ArgumentParser, most_tokens: str) -> argparse._ArgumentGroup:
    """The options that every command with answers has."""
    sampling = command.add_argument_group("sampling (greedy by default)")
    sampling.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"most new tokens (default: {most_tokens})"
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
        "--ignore-eos", action="store_true", default=None, help="go on behind the end of the answer"
    )
    sampling.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="endless text: a token sees the last N tokens, sinks among them; 0: all",
    )
    sampling.add_argument(
        "--sinks", type=int, metavar="N", help="of the window: the first N tokens of the text"
    )
    return sampling


def add_engine(command: argparse.ArgumentParser) -> None:
    """How the model is run."""
    engine = command.add_argument_group("engine")
    engine.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of products and KV (default: bfloat16)"
    )
    engine.add_argument(
        "--kv-dtype",
        metavar="TYPE",
        help="of stored keys and values: bfloat16, float32, float16, int8, fp8; two with a comma: of "
        "keys and of values (default: --dtype)",
    )
    engine.add_argument("--threads", type=int, metavar="N", help="0: one per core (default)")
    engine.add_argument(
        "--page-size", type=int, metavar="N", help="tokens per page of KV; 0: chosen for the model"
    )
    engine.add_argument(
        "--kv-bytes", type=size, metavar="SIZE", help="memory for KV: 512M, 2G, ..."
    )
    engine.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="most new tokens of one step (default: 512)"
    )
    engine.add_argument(
        "--max-num-sequences",
        type=int,
        metavar="N",
        help="most answers in work at a time (default: 64)",
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
        help="guess the next tokens, from the text so far or with a smaller model; the answer stays "
        "the same (default: model with --draft-model, else none)",
    )
    engine.add_argument("--draft-model", metavar="DIR", help="folder of the smaller model")
    engine.add_argument(
        "--draft-tokens", type=int, metavar="N", help="most guesses of a step (default: 8)"
    )
    engine.add_argument(
        "--draft-branches",
        type=int,
        metavar="N",
        help="alternatives that are followed (default: 2)",
    )
    engine.add_argument(
        "--kernel-path", metavar="NAME", help="one of `quire inspect`; default: the best"
    )


def add_store(command: argparse.ArgumentParser) -> None:
    """Where KV is kept beyond the end of the command."""
    store = command.add_argument_group("KV that outlives the command")
    store.add_argument(
        "--kv-dir", metavar="DIR", help="keep KV in DIR, and take from there what is not computed"
    )
    store.add_argument(
        "--kv-redis",
        metavar="HOST:PORT",
        help="the same in Redis; with commas: seeds of a cluster; or "
        "redis://USER:PASSWORD@HOST:PORT/?prefix=PREFIX; with TLS rediss://...?ca=FILE",
    )
    add_store_details(store)
    store.add_argument(
        "--kv-load-timeout",
        type=float,
        metavar="SECONDS",
        help="the most that a prompt waits for what was kept (default: 2)",
    )


def add_store_details(store: argparse._ArgumentGroup) -> None:
    store.add_argument(
        "--kv-quota",
        dest="kv_dir_bytes",
        type=size,
        metavar="SIZE",
        help="the most that DIR takes (default: what is free, but a tenth)",
    )
    store.add_argument(
        "--kv-durability",
        choices=("none", "async", "os", "sync"),
        help="what is written survives: nothing, nothing, the process (default), a loss of power",
    )
    store.add_argument(
        "--kv-key-file", metavar="FILE", help="sign with the content of FILE, take only what is"
    )


def token_ids(text: str) -> list[int]:
    try:
        ids = [int(word) for word in re.split(r"[\s,]+", text.strip("[] \t\n")) if word]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"token ids are numbers with commas between them: {error}"
        ) from None
    if not ids:
        raise argparse.ArgumentTypeError("there must be at least one token id")
    return ids


def size(text: str) -> int:
    """Bytes of "512M", "1.5GiB", ..."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: 1000000, 512M, 2G, ...")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))
