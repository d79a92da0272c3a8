"""`quire store`: looks into what --kv-dir and --kv-redis keep, and changes what is kept."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from quire import _options, errors, redis_url
from quire import _ranges as ranges
from quire.cli import arguments, models, text_input
from quire.cli.arguments import UsageError
from quire.cli.terminal import moment, note
from quire.store import ChunkInfo, ChunkStore, Passport, Tier, chunk_keys, read_key_file

_ABOUT = """\
Looks into KV that is kept in a folder (--kv-dir) or in Redis (--kv-redis), and changes it. STORE
is the folder, or redis://[USER:PASSWORD@]HOST:PORT[,...][/?prefix=PREFIX], with TLS
rediss://...?ca=FILE.

  quire store ls STORE                    its chunks
  quire store get STORE KEY               one of them, verified; --output FILE writes its bytes
  quire store stats STORE                 counts
  quire store verify STORE                reads and checks everything, removes what is damaged
  quire store gc STORE                    removes what is expired, over the quota or left over
  quire store rm STORE CHUNKS             removes chunks; --all: all of a model and a salt,
                                          on Redis: all of a salt, of all models
  quire store ttl STORE SECONDS CHUNKS    lets chunks expire in SECONDS; 0 = never
  quire store pin STORE CHUNKS            evicts chunks last (priority 100)
  quire store unpin STORE CHUNKS          evicts them as all others (priority 50)
  quire store quota STORE SIZE            evicts chunks of a model and a salt until those of each
                                          element type and kernel path take SIZE
  quire store prefetch STORE PROMPT       brings a prompt's chunks from Redis (--kv-redis URL) into
                                          the folder

CHUNKS are KEYs as ls prints them, or a PROMPT: --prompt, --prompt-file or --prompt-ids, with
--model and, if requests had one, --cache-salt. Redis does not know models: a prompt's token ids
count there, whichever model computed them.

ls, get and stats change nothing in a folder. A folder that is not a store's is an error. The folder
keeps what pin says; processes that have it open learn of it when they open it again. quota is not
kept: it is what goes now.
"""
# The least and the most words behind the action; None: any number.
_WORDS: dict[str, tuple[int, int | None, str]] = {
    "ls": (1, 1, "STORE"),
    "get": (2, 2, "STORE and KEY"),
    "stats": (1, 1, "STORE"),
    "verify": (1, 1, "STORE"),
    "gc": (1, 1, "STORE"),
    "rm": (1, None, "STORE, and KEYs or a prompt"),
    "ttl": (2, None, "STORE and SECONDS, and KEYs or a prompt"),
    "pin": (1, None, "STORE, and KEYs or a prompt"),
    "unpin": (1, None, "STORE, and KEYs or a prompt"),
    "quota": (2, 2, "STORE and SIZE"),
    "prefetch": (1, 1, "STORE, and a prompt by --prompt, --prompt-file or --prompt-ids"),
}
_LOOKING = ("ls", "get", "stats")
_FOLDER_ONLY = ("pin", "unpin", "quota", "prefetch")
_TAKES_PROMPT = ("rm", "ttl", "pin", "unpin", "prefetch")
_PROMPT = ("prompt", "prompt_file", "prompt_ids", "raw")
_EXIT_DAMAGED = 1
_PINNED, _NOT_PINNED = 100, 50  # kPriorityMax and kDefaultPriority in include/quire/chunk_store.h


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire store",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("action", choices=tuple(_WORDS))
    command.add_argument("words", nargs="*", metavar="STORE [SECONDS | SIZE] [KEY ...]")
    command.add_argument("--json", action="store_true", help="print objects")
    command.add_argument(
        "--output", type=ranges.place, metavar="FILE", help="get: where the chunk's bytes go"
    )
    command.add_argument(
        "--all",
        action="store_true",
        help="rm: all of the model and the salt; on Redis of all models",
    )
    chunks = command.add_argument_group("chunks")
    chunks.add_argument(
        "--model",
        type=ranges.place,
        metavar="DIR",
        help="the model that computed them (default: the embedded one)",
    )
    chunks.add_argument("--prompt", metavar="TEXT", help="the prompt that they are of")
    chunks.add_argument(
        "--prompt-file", type=ranges.place, metavar="FILE", help="the prompt, a file of UTF-8"
    )
    chunks.add_argument(
        "--prompt-ids", type=ranges.token_ids, metavar="IDS", help='as token ids: "1,2,3"'
    )
    chunks.add_argument("--raw", action="store_true", help="the prompt had no chat template")
    chunks.add_argument(
        "--cache-salt",
        type=ranges.cache_salt,
        metavar="TEXT",
        help="the salt of the requests that computed them",
    )
    chunks.add_argument(
        "--kv-redis", type=ranges.place, metavar="URL", help="prefetch: where chunks come from"
    )
    arguments.add_store_details(command.add_argument_group("store"))
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    _check_words(options)
    _check_effect(options)
    options.amount = _amount(options)
    store, tier = _open(options)
    with store:
        if options.action == "ls":
            return _list(store, tier, options.json)
        if options.action == "get":
            return _get(store, tier, options)
        if options.action == "verify":
            damaged = store.verify(tier)
            _print({"damaged": damaged}, options.json)
            return _EXIT_DAMAGED if damaged else 0
        _print(_facts(store, tier, options), options.json)
        return 0


def _facts(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> dict[str, Any]:
    """What the other actions print, when they have done it."""
    if options.action == "gc":
        return {"bytes_freed": store.gc(tier)}
    if options.action == "stats":
        return _stats(store, tier)
    if options.action == "rm" and options.all:
        return {"removed": _clear(store, tier, options)}
    if options.action == "rm":
        return {"removed": _found(store.remove(_keys(store, tier, options)), options)}
    if options.action == "ttl":
        return _expire(store, tier, options)
    if options.action == "quota":
        return _trim(store, tier, options)
    if options.action == "prefetch":
        return _prefetch(store, options)
    priority = _PINNED if options.action == "pin" else _NOT_PINNED
    keys = _keys(store, tier, options)
    return {f"{options.action}ned": _found(store.set_priority(keys, priority), options)}


def _check_words(options: argparse.Namespace) -> None:
    least, most, words = _WORDS[options.action]
    count = len(options.words)
    if count < least or (most is not None and count > most):
        raise UsageError(f"store {options.action}: give {words}, not {count} words")


def _check_effect(options: argparse.Namespace) -> None:
    """UsageError for options and words that the action has no use for."""
    action = options.action

    def given(*names: str) -> list[str]:
        return [name for name in names if getattr(options, name) not in (None, False)]

    def refuse(names: list[str], why: str) -> None:
        if names:
            raise UsageError(f"store {action}: {arguments.option_name(names[0])} {why}")

    refuse(given("output") if action != "get" else [], "goes with get")
    refuse(given("all") if action != "rm" else [], "goes with rm")
    refuse(given("kv_redis") if action != "prefetch" else [], "goes with prefetch")
    if action not in _TAKES_PROMPT:
        refuse(given(*_PROMPT), "has no effect")
    if action not in _TAKES_PROMPT and action != "quota":
        refuse(given("model", "cache_salt"), "has no effect")
    sources = given("prompt", "prompt_file", "prompt_ids")
    if len(sources) > 1:
        refuse(sources[1:], "is a second source of a prompt")
    if options.raw and not given("prompt", "prompt_file"):
        refuse(["raw"], "has no effect without --prompt or --prompt-file")
    if action not in _TAKES_PROMPT:
        return
    named = _named_keys(options)
    if named:
        refuse(given("all", "model", "cache_salt", *_PROMPT), "has no effect beside keys")
    if options.all:
        refuse(sources, "has no effect beside --all")
    if options.all and redis_url.is_url(options.words[0]):
        refuse(
            given("model"),
            "has no effect on Redis, which does not know models: there --all removes the chunks of "
            "all models",
        )
    if not (named or sources or options.all):
        keys = "" if action == "prefetch" else "their keys, or by "
        raise UsageError(f"store {action}: name chunks by {keys}a prompt")


def _amount(options: argparse.Namespace) -> Any:
    """The number among the words: the seconds of ttl, the bytes of quota, else None."""
    if options.action not in ("ttl", "quota"):
        return None
    word = options.words[1]
    try:
        if options.action == "ttl":
            return ranges.Number(0)(word)
        size = ranges.size(word)
    except argparse.ArgumentTypeError as error:
        name = "SECONDS" if options.action == "ttl" else "SIZE"
        raise UsageError(f"store {options.action}: {name}: {error}") from None
    if size == 0:
        raise UsageError("store quota: SIZE is 0; to remove everything use rm --all")
    return size


def _named_keys(options: argparse.Namespace) -> list[str]:
    """Those among the words."""
    least = _WORDS[options.action][0]
    return list(options.words[least:])


def _open(options: argparse.Namespace) -> tuple[ChunkStore, Tier]:
    """The store, which must be there, and its one tier. To look changes nothing in a folder."""
    name: str = options.words[0]
    key = b"" if options.kv_key_file is None else read_key_file(options.kv_key_file)
    if redis_url.is_url(name):
        if options.action in _FOLDER_ONLY:
            raise UsageError(
                f"store {options.action}: it has no effect on Redis, whose server decides what it "
                "keeps; STORE is a folder"
            )
        for detail in ("kv_dir_bytes", "kv_durability"):
            if getattr(options, detail) is not None:
                option = arguments.option_name(detail)
                raise UsageError(f"store: {option} has no effect on Redis; it is of a folder")
        return ChunkStore(redis=name, key=key), "redis"
    if not os.path.isdir(name):
        raise errors.NotFoundError(
            f"{name}: there is no such folder; for Redis write {redis_url.SCHEME}HOST:PORT"
        )
    if options.action == "prefetch" and options.kv_redis is None:
        raise UsageError("store prefetch: give the Redis that has the chunks, --kv-redis URL")
    given = arguments.given(options, ("kv_redis", "kv_dir_bytes", "kv_durability"))
    store = ChunkStore(
        name,
        folder_use="look" if options.action in _LOOKING else "existing",
        key=key,
        **_options.of_part("store", given),
    )
    return store, "disk"


def _list(store: ChunkStore, tier: Tier, as_json: bool) -> int:
    chunks = store.list(tier)
    # Chains together, from their beginning on.
    chunks.sort(key=lambda chunk: (chunk.fingerprint, chunk.first_token or 0, chunk.key))
    for chunk in chunks:
        print(json.dumps(dataclasses.asdict(chunk)) if as_json else _line(chunk))
    total = sum(chunk.bytes for chunk in chunks)
    note(f"({len(chunks):,} chunks, {total:,} bytes)")
    return 0


def _line(chunk: ChunkInfo) -> str:
    first = "?" if chunk.first_token is None else str(chunk.first_token)
    until = "" if chunk.expires is None else f"  until {moment(chunk.expires)}"
    return (
        f"{chunk.key}  {chunk.tokens:>6} tokens from {first:>6}  {chunk.bytes:>12,} bytes  "
        f"{moment(chunk.created)}{until}"
    )


def _get(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> int:
    chunk = store.get(tier, options.words[1])
    if options.output is not None:
        Path(options.output).write_bytes(chunk.data)
    facts = dataclasses.asdict(chunk)
    facts["bytes"] = len(facts.pop("data"))
    if not options.json:
        facts["created"] = moment(chunk.created)
        facts["expires"] = None if chunk.expires is None else moment(chunk.expires)
        shown = ", ".join(str(token) for token in chunk.tokens[:16])
        facts["tokens"] = f"{len(chunk.tokens)}: {shown}{', ...' if len(chunk.tokens) > 16 else ''}"
    _print(facts, options.json)
    return 0


def _prompt_ids(options: argparse.Namespace) -> list[int]:
    """Token ids of the prompt, as `quire generate` makes them."""
    if options.prompt_ids is not None:
        return list(options.prompt_ids)
    if options.prompt is not None:
        text = text_input.check_argument(options.prompt, "--prompt")
    else:
        text = text_input.read_file(options.prompt_file)
    tokenizer = models.read_tokenizer(models.model_folder(options.model))
    if tokenizer is None:
        raise errors.NotFoundError(
            "this model has no tokenizer.json; give the prompt with --prompt-ids"
        )
    prompt = models.text_prompt(tokenizer, text, raw=options.raw)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)


def _prompts(ids: list[int]) -> list[list[int]]:
    """The prompt, and without its last token: so far the chunks of recurrent models reach."""
    return [ids, ids[:-1]] if len(ids) > 1 else [ids]


def _passports(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> list[Passport]:
    """Those that chunks of the model may have. Redis does not keep them: there all that its chunks
    may have, whatever the model, each length of a chunk taken for that of a whole one."""
    if tier == "redis":
        found = {(chunk.fingerprint, chunk.tokens) for chunk in store.list(tier)}
        return [Passport(name, "", "", "", "", "", tokens) for name, tokens in sorted(found)]
    passports = store.passports(models.model_folder(options.model))
    if not passports:
        raise errors.NotFoundError(
            f"{options.words[0]}: has no KV of this model; `quire store ls` lists what it has"
        )
    return passports


def _keys(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> list[str]:
    """The chunks that are named, by their keys; of a prompt those that are there."""
    named = _named_keys(options)
    if named:
        return named
    ids = _prompt_ids(options)
    there = {chunk.key for chunk in store.list(tier)}
    keys = {
        key: None  # in order, each once
        for passport in _passports(store, tier, options)
        for prompt in _prompts(ids)
        for key in chunk_keys(passport, prompt, cache_salt=options.cache_salt or b"")
        if key in there
    }
    if not keys:
        raise errors.NotFoundError(
            f"{options.words[0]}: has no chunk of these {len(ids):,} tokens; was it another model, "
            "text or --cache-salt?"
        )
    return list(keys)


def _found(count: int, options: argparse.Namespace) -> int:
    """How many chunks were there; NotFoundError if none was."""
    if count == 0:
        raise errors.NotFoundError(
            f"{options.words[0]}: has none of these chunks; `quire store ls` lists what it has"
        )
    return count


def _clear(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> int:
    fingerprints = {each.fingerprint: each for each in _passports(store, tier, options)}
    salt = options.cache_salt or b""
    return sum(store.clear(passport, cache_salt=salt) for passport in fingerprints.values())


def _expire(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> dict[str, Any]:
    seconds: float = options.amount
    count = _found(store.set_ttl(_keys(store, tier, options), seconds), options)
    expires = time.time() + seconds if seconds > 0 else None
    if expires is None or options.json:
        return {"chunks": count, "expires": expires}
    return {"chunks": count, "expires": moment(expires)}


def _trim(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> dict[str, Any]:
    """A quota holds as long as a store is open: what it means here is what goes now."""
    passports = _passports(store, tier, options)
    store.list(tier)  # waits until the tier knows all that it has
    for passport in passports:
        store.set_quota(passport, bytes_max=options.amount, cache_salt=options.cache_salt or b"")
    return {"bytes_freed": store.gc(tier)}


def _prefetch(store: ChunkStore, options: argparse.Namespace) -> dict[str, Any]:
    ids = _prompt_ids(options)
    salt = options.cache_salt or b""
    best = max(
        (
            store.prefetch(passport, prompt, cache_salt=salt)
            for passport in _passports(store, "disk", options)
            for prompt in _prompts(ids)
        ),
        key=lambda prefetched: prefetched.tokens,
    )
    store.flush()
    return {"tokens": best.tokens, "prompt_tokens": len(ids), "miss": best.miss}


def _stats(store: ChunkStore, tier: Tier) -> dict[str, Any]:
    chunks = store.list(tier)  # waits until the tier knows all that it has
    statistics = store.statistics()["tiers"][tier]
    return {
        "tier": tier,
        "chunks": len(chunks),
        "tokens": sum(chunk.tokens for chunk in chunks),
        "bytes": sum(chunk.bytes for chunk in chunks),
        "bytes_max": statistics["bytes_max"],
        "models": len({chunk.fingerprint for chunk in chunks}),
        "available": statistics["available"],
    }


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    for name, value in facts.items():
        absent = "never" if name == "expires" else "none"
        text = f"{value:,}" if type(value) is int else absent if value is None else str(value)
        print(f"{name.replace('_', ' '):<16} {text}")
