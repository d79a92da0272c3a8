"""`quire snapshot`: keeps the KV of a text in a file, looks into such files, goes on from them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from quire import snapshot
from quire._sampling import merged
from quire import _ranges as ranges
from quire.cli import answers, arguments, memory, models, text_input
from quire.cli.arguments import UsageError
from quire.cli.terminal import moment, note

_ABOUT = """\
Saves the KV of a text in a file, shows such files, and continues from them.

  quire snapshot save FILE [MODEL] --prompt TEXT       saves the KV of a text and its answer
  quire snapshot restore FILE [MODEL] [--prompt TEXT]  continues it, with more text or without
  quire snapshot show FILE                             prints the model, the tokens and sizes
  quire snapshot verify FILE                           reads and checks all of it
  quire snapshot diff FILE FILE                        compares two files
"""
# The action and how many files it takes; those that run a model take its folder as well.
_FILES = {"save": 1, "restore": 1, "show": 1, "verify": 1, "diff": 2}
_RUN_A_MODEL = ("save", "restore")


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire snapshot",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("action", choices=tuple(_FILES))
    command.add_argument(
        "words", nargs="*", metavar="FILE | MODEL", help="the file, and the folder of the model"
    )
    command.add_argument(
        "--prompt", metavar="TEXT", help="the text; with restore: the text that follows"
    )
    command.add_argument(
        "--prompt-ids", metavar="IDS", type=ranges.token_ids, help='as token ids: "1,2,3"'
    )
    command.add_argument("--raw", action="store_true", help="save: no chat template")
    command.add_argument("--json", action="store_true", help="print one object")
    command.add_argument(
        "--any-numerics",
        action="store_true",
        help="restore: also take KV computed by other kernels, which is not bit-equal",
    )
    arguments.add_sampling(command, most_tokens="what there is room for; with save: 1")
    arguments.add_engine(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    files, model = _files_and_model(options)
    if options.action == "save":
        return _save(options, files[0], model)
    if options.action == "restore":
        return _restore(options, files[0], model)
    if options.action == "diff":
        return _print(dataclasses.asdict(snapshot.diff(files[0], files[1])), options.json)
    read = snapshot.verify if options.action == "verify" else snapshot.info
    return _print(_facts(read(files[0])), options.json)


def _files_and_model(options: argparse.Namespace) -> tuple[list[str], str | None]:
    count = _FILES[options.action]
    words: list[str] = list(options.words)
    most = count + (options.action in _RUN_A_MODEL)
    if not count <= len(words) <= most:
        raise UsageError(
            f"snapshot {options.action}: {count} FILE{'S' if count > 1 else ''} and "
            f"{most - count} MODEL at most, not {len(words)} words"
        )
    _check_effect(options)
    if options.prompt is not None:
        text_input.check_argument(options.prompt, "--prompt")
    if options.prompt is not None and options.prompt_ids is not None:
        raise UsageError("snapshot: --prompt and --prompt-ids are two sources of a prompt")
    return words[:count], words[count] if len(words) > count else None


def _check_effect(options: argparse.Namespace) -> None:
    """UsageError for options that the action has no use for."""
    names = [*arguments.given(options, (*arguments.SAMPLING, *arguments.ENGINE))]
    names += [name for name in ("prompt", "prompt_ids") if getattr(options, name) is not None]
    if options.action not in _RUN_A_MODEL and names:
        raise UsageError(
            f"snapshot {options.action}: {arguments.option_name(names[0])} has no effect"
        )
    if options.raw and options.action != "save":
        raise UsageError("snapshot: --raw has an effect with save only")
    if options.raw and options.prompt_ids is not None:
        raise UsageError("snapshot: --raw has no effect on --prompt-ids")
    if options.any_numerics and options.action != "restore":
        raise UsageError("snapshot: --any-numerics has an effect with restore only")


def _save(options: argparse.Namespace, file: str, model: str | None) -> int:
    if options.prompt is None and options.prompt_ids is None:
        raise UsageError("snapshot save: give the text with --prompt or --prompt-ids")
    given = {"max_tokens": 1, **arguments.given(options, arguments.SAMPLING)}
    with models.open_engine(model, arguments.given(options, arguments.ENGINE)) as engine:
        prompt = options.prompt_ids or models.text_prompt(
            models.tokenizer_of(engine), options.prompt, raw=options.raw
        )
        sampling = engine.resolve_sampling(**given)
        result = engine.generate(prompt, **sampling)
        # The options that draw the next token, so that a restore continues with the same numbers.
        salt = sampling.pop("cache_salt", b"")  # a secret, which the file must not have
        sampler = json.dumps(sampling, sort_keys=True).encode()
        tokens = result.prompt_ids + result.ids
        count = snapshot.save(engine, tokens, file, sampler=sampler, cache_salt=salt)
    note(f"(saved the KV of {count} tokens: {file})")
    return 0


def _restore(options: argparse.Namespace, file: str, model: str | None) -> int:
    with models.open_engine(model, arguments.given(options, arguments.ENGINE)) as engine:
        start = time.monotonic()
        info = snapshot.restore(
            engine, file, any_numerics=options.any_numerics, cache_salt=options.cache_salt or b""
        )
        seconds = time.monotonic() - start
        more = options.prompt_ids or []
        if options.prompt is not None:
            # The kept text has the special tokens of a beginning.
            more = engine.tokenizer.encode(options.prompt, add_special_tokens=False)
        sampling = merged(_sampling_of(info), arguments.given(options, arguments.SAMPLING))
        if options.json:
            result = engine.generate(info.tokens + more, **sampling)
            print(json.dumps(answers.result_object(result), ensure_ascii=False))
            return 0
        note(f"(restored the KV of {len(info.tokens)} tokens in {seconds:.2f} s)")
        answer = answers.print_answer(engine, info.tokens + more, sampling)
        answers.print_cut(engine, answer.result, sampling)
    return 0


def _sampling_of(info: snapshot.SnapshotInfo) -> dict[str, Any]:
    """The options that `save` drew with, but for the length of its answer."""
    if not info.sampler:
        return {}
    try:
        sampling = json.loads(info.sampler)
    except ValueError:
        return {}  # saved by another program, with a sampler of another format
    known = arguments.SAMPLING if isinstance(sampling, dict) else ()
    return {name: sampling[name] for name in known if name in sampling and name != "max_tokens"}


def _facts(info: snapshot.SnapshotInfo) -> dict[str, Any]:
    return {
        **info.passport,
        "tokens": len(info.tokens),
        "first_tokens": info.tokens[:16],
        "chunks": info.chunk_count,
        **_windows(info),
        "state_bytes": info.state_bytes,
        "sampler_bytes": len(info.sampler),
        "created": moment(info.created),
        "file_bytes": info.file_bytes,
    }


def _windows(info: snapshot.SnapshotInfo) -> dict[str, Any]:
    """Under a name of their own: passports have a `window` of layers."""
    return {
        "sequence_window": info.window,
        "sinks": info.sinks,
        "slid_tokens": info.slid,
        "lost_tokens": info.lost,
        "version": info.version,
    }


def _print(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        memory.print_table({name: _text(value) for name, value in facts.items()})
    return 0


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value) or "none"
