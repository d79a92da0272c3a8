"""Options that several commands share, and the values they take."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from quire import _options, errors
from quire.cli.terminal import joined_lines

# Options that the command line has, in the order of quire._options.
SAMPLING = (*[name for name, option in _options.SAMPLING.items() if option.flag], "template_args")
ENGINE = tuple(name for name, option in _options.ENGINE.items() if option.flag)
_ENTRIES = (*_options.ENGINE.items(), *_options.SAMPLING.items())
_FLAGS = {name: option.flag for name, option in _ENTRIES if option.flag is not None}
_CONNECTION = tuple(name for name, option in _ENTRIES if option.part == "connection")


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
    **{name: flag.name for name, flag in _FLAGS.items() if flag.name is not None},
    "template_args": "--template-arg",
    "served_model_names": "--served-model-name",
    "limits": "--limit",
}


def check_effect(options: argparse.Namespace) -> None:
    """UsageError for options that would change nothing beside the others that were given."""

    def has(*names: str) -> bool:
        # Not `in (None, False)`, where 0 would be.
        values = [getattr(options, name, None) for name in names]
        return any(value is not None and value is not False for value in values)

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
        needs(
            ("kv_key_file", "kv_load_timeout", "kv_io_timeout"), stores, "--kv-dir or --kv-redis"
        )
        if options.kv_write is False and not stores:
            raise UsageError("--kv-read-only has no effect without --kv-dir or --kv-redis")
    if hasattr(options, "prefill_from"):
        peers = has("prefill_from")
        needs(
            (
                "prefill_remote",
                "on_peer_loss",
                "prefill_timeout",
                "prefill_streams",
                "staging_bytes",
            ),
            peers,
            "--prefill-from",
        )
        listens = hasattr(options, "prefill_listen")
        either = "--prefill-from or --prefill-listen" if listens else "--prefill-from"
        connects = peers or has("prefill_listen")
        needs(_CONNECTION, connects, either)
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
    r"(?:_size)?(?![\w/'\"-]|\.\w)|"
    r"(?<![\w./'\"-])(tls_(?:ca_file|cert_file|key_file|server_name))(?![\w/'\"-])"
)
# Names of the library for which the program has another one.
_NAMES = {"branches": "draft_branches", "prefill_chunk_size": "prefill_chunk"}
# "Struct::member (name of an engine in Python)".
_TWO_NAMES = re.compile(r"\w+::\w+ \((\w+) of an engine in Python\)")
# Names that only the library has.
_NOT_TYPED = {name for name, _ in _ENTRIES}.difference(SAMPLING, ENGINE)


def in_typed_words(message: str) -> str:
    """A message of the library with options where it names members."""
    return _renamed(message, lambda name: name if name in _NOT_TYPED else option_name(name))


def in_field_words(message: str) -> str:
    """The same with the names of a line's fields."""
    return _renamed(message, lambda name: name)


def _renamed(message: str, typed: Callable[[str], str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[2] or f"peer_{match[3]}"
        return typed(_NAMES.get(name, name))

    message = re.sub(r"^(Engine::\w+|\w+Options): ", "", message)
    return _MEMBERS.sub(replaced, _TWO_NAMES.sub(r"\1", message))


def message_and_usage(error: errors.QuireError, options: argparse.Namespace) -> tuple[str, bool]:
    """What to tell of an error of the library, and whether an option that was given is out of a
    range that the model or the machine has."""
    message = in_typed_words(joined_lines(str(error)))
    if getattr(options, "prompt_ids", None) is not None:
        message = re.sub(r"^prompt(?=\[\d+\] is token)", "--prompt-ids", message)
    names = given(options, (*SAMPLING, *ENGINE, "prompt_ids"))
    told = any(re.search(rf"{option_name(name)}(?![\w-])", message) for name in names)
    return message, told and isinstance(error, (errors.BadArgumentError, errors.TooLargeError))


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those that were given on the command line; the rest keeps the library's defaults."""
    found = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def add_flags(
    group: argparse._ActionsContainer,
    title: _options.Group,
    names: Sequence[str] = (),
    **words: str,
) -> None:
    """The options of a group, or those of the names among them. `words` fill in their help."""
    for name, flag in _FLAGS.items():
        if flag.group != title or (names and name not in names):
            continue
        settings: dict[str, Any] = {"dest": name, "default": None, "action": flag.action}
        if flag.action in ("store", "append"):
            settings |= {"type": flag.reads, "metavar": flag.metavar}
            settings |= {"choices": flag.choices} if flag.choices else {}
        help = flag.help.format(**words) if words else flag.help
        group.add_argument(option_name(name), help=help, **settings)


def add_sampling(command: argparse.ArgumentParser, most_tokens: str) -> argparse._ArgumentGroup:
    """The options that every command with answers has."""
    sampling = command.add_argument_group(
        "sampling (default: as generation_config.json of the model says; greedy without that file)"
    )
    add_flags(sampling, "sampling", most_tokens=most_tokens)
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
    add_flags(command.add_argument_group("engine"), "engine")


def add_threads(group: argparse._ActionsContainer) -> None:
    add_flags(group, "engine", ["threads"])


def add_store(command: argparse.ArgumentParser) -> None:
    """Where KV is kept beyond the end of the command."""
    store = command.add_argument_group("KV that outlives the command")
    add_flags(store, "store")
    add_store_details(store)


def add_peers(command: argparse.ArgumentParser) -> None:
    """Processes that compute prompts."""
    peers = command.add_argument_group("prompts that other processes compute")
    add_flags(peers, "prefill")
    add_connection(peers)


def check_reach(
    command: str, option: str, address: str | None, options: argparse.Namespace
) -> None:
    """UsageError for an address of other machines without a secret or TLS, and for TLS over UCX."""
    from quire.serve.addresses import is_loopback

    if address is None or address.startswith("unix:"):
        return
    is_ucx = address.startswith("ucx:")
    has_tls = options.peer_tls_cert_file is not None
    if is_ucx and has_tls:
        raise UsageError(
            f"{command}: {option} {address}: there is no TLS over UCX; give --peer-secret-file "
            f"FILE without --peer-tls-cert-file, or {option} {address.removeprefix('ucx:')}"
        )
    if options.peer_secret_file is not None or has_tls:
        return
    if not is_loopback(address.removeprefix("ucx:").rpartition(":")[0].strip("[]")):
        tls = "TLS with --peer-tls-ca-file, --peer-tls-cert-file and --peer-tls-key-file"
        raise UsageError(
            f"{command}: {option} {address} is reached from other machines: give "
            "--peer-secret-file FILE, the same content on both sides"
            + ("" if is_ucx else f", or {tls}")
        )


def add_connection(group: argparse._ActionsContainer) -> None:
    """What both sides of a connection between processes need."""
    add_flags(group, "connection")


def add_store_details(store: argparse._ArgumentGroup) -> None:
    add_flags(store, "store details")
