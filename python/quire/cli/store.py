"""`quire store`: looks into what --kv-dir and --kv-redis keep, checks it, tidies it up."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any

from quire import errors, redis_url
from quire.cli import arguments
from quire.cli.arguments import UsageError
from quire.cli.terminal import note
from quire.store import ChunkInfo, ChunkStore, Tier

_ABOUT = """\
Looks into KV that is kept in a folder (--kv-dir) or in Redis (--kv-redis). STORE is the folder, or
redis://[USER:PASSWORD@]HOST:PORT[,...][/?prefix=PREFIX], with TLS rediss://...?ca=FILE.

  quire store ls STORE              its chunks
  quire store get STORE KEY         one of them, verified; --output FILE writes its bytes
  quire store verify STORE          reads and checks everything, removes what is damaged
  quire store gc STORE              removes what is expired, over the quota or left over
  quire store stats STORE           counts
"""
_ACTIONS = ("ls", "get", "verify", "gc", "stats")
_EXIT_DAMAGED = 1


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire store",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("action", choices=_ACTIONS)
    command.add_argument("words", nargs="*", metavar="STORE [KEY]")
    command.add_argument("--json", action="store_true", help="print objects")
    command.add_argument("--output", metavar="FILE", help="get: where the chunk's bytes go")
    arguments.add_store_details(command.add_argument_group("store"))
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    count = 2 if options.action == "get" else 1
    if len(options.words) != count:
        words = "STORE and KEY" if count == 2 else "STORE"
        raise UsageError(f"store {options.action}: give {words}, not {len(options.words)} words")
    if options.output is not None and options.action != "get":
        raise UsageError("store: --output goes with get")
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
        if options.action == "gc":
            _print({"bytes_freed": store.gc(tier)}, options.json)
            return 0
        _print(_stats(store, tier), options.json)
        return 0


def _open(options: argparse.Namespace) -> tuple[ChunkStore, Tier]:
    """The store, which must be there, and its one tier."""
    name: str = options.words[0]
    key = b"" if options.kv_key_file is None else Path(options.kv_key_file).read_bytes()
    if redis_url.is_url(name):
        return ChunkStore(redis=name, key=key), "redis"
    if not os.path.isdir(name):
        raise errors.NotFoundError(
            f"{name}: there is no such folder; for Redis write {redis_url.SCHEME}HOST:PORT"
        )
    store = ChunkStore(
        name,
        disk_bytes=options.kv_dir_bytes or 0,
        durability=options.kv_durability or "os",
        key=key,
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
    until = "" if chunk.expires is None else f"  until {_time(chunk.expires)}"
    return (
        f"{chunk.key}  {chunk.tokens:>6} tokens from {first:>6}  {chunk.bytes:>12,} bytes  "
        f"{_time(chunk.created)}{until}"
    )


def _get(store: ChunkStore, tier: Tier, options: argparse.Namespace) -> int:
    chunk = store.get(tier, options.words[1])
    if options.output is not None:
        Path(options.output).write_bytes(chunk.data)
    facts = dataclasses.asdict(chunk)
    facts["bytes"] = len(facts.pop("data"))
    if not options.json:
        facts["created"] = _time(chunk.created)
        facts["expires"] = None if chunk.expires is None else _time(chunk.expires)
        shown = ", ".join(str(token) for token in chunk.tokens[:16])
        facts["tokens"] = f"{len(chunk.tokens)}: {shown}{', ...' if len(chunk.tokens) > 16 else ''}"
    _print(facts, options.json)
    return 0


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
        text = f"{value:,}" if type(value) is int else "never" if value is None else str(value)
        print(f"{name.replace('_', ' '):<16} {text}")


def _time(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec="seconds")
