"""`quire serve`: the HTTP server over one model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import _options
from quire import _ranges as ranges
from quire import errors
from quire._model_folder import is_gguf_file
from quire.cli import arguments, memory, models, serve_config
from quire.cli.arguments import UsageError

if TYPE_CHECKING:
    from quire.serve.limits import Limits
    from quire.serve.server import ServerOptions

_SERVER = (
    "config",
    "host",
    "port",
    "served_model_names",
    "api_keys",
    "insecure_no_auth",
    "strict",
    "tool_parser",
    "drain_timeout",
    "tls_cert",
    "tls_key",
    "prefill_listen",
    "cors",
    "log_format",
    "limits",
)
_PASSWORD = re.compile(r"(//[^/@]*:)[^/]*@")
_MODEL_VARIABLE = "QUIRE_MODEL"


def parser() -> argparse.ArgumentParser:
    command = _ServeParser(
        prog="quire serve",
        description="An HTTP server for clients of OpenAI's and Anthropic's APIs. It runs until "
        "SIGINT (Ctrl-C), SIGTERM or SIGHUP. Options are also read from environment variables "
        "(QUIRE_PORT is --port, QUIRE_KV_DIR is --kv-dir) and from the file of --config. The "
        "command line wins over the environment, and the environment over the file.",
    )
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of the model (default: the embedded one)",
    )
    _add_address(command)
    _add_clients(command)
    _add_life(command)
    _add_prefill(command)
    arguments.add_engine(command)
    arguments.add_store(command)
    arguments.add_peers(command)
    command.set_defaults(run=_run)
    return command


def _add_address(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("address")
    group.add_argument(
        "--host",
        type=ranges.place,
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen on (default: 127.0.0.1); one that other machines reach needs "
        "--api-keys",
    )
    group.add_argument(
        "--port",
        type=ranges.Integer(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes one that is free (default: 8000)",
    )
    group.add_argument(
        "--tls-cert",
        type=ranges.place,
        metavar="FILE",
        help="certificates of the server, in PEM: the server then speaks HTTPS",
    )
    group.add_argument(
        "--tls-key",
        type=ranges.place,
        metavar="FILE",
        help="private key of the certificates, in PEM",
    )
    group.add_argument(
        "--cors",
        action="append",
        type=ranges.place,
        metavar="ORIGIN",
        help="web pages of ORIGIN may send requests; * allows all web pages; may be repeated",
    )


def _add_prefill(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("prompts for other processes")
    group.add_argument(
        "--prefill-listen",
        type=ranges.address,
        metavar="ADDR",
        help="also compute prompts for --prefill-from of other processes, at HOST:PORT, "
        "ucx:HOST:PORT or unix:PATH",
    )


def _add_clients(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("clients")
    group.add_argument(
        "--api-keys",
        type=ranges.place,
        metavar="FILE",
        help='API keys, a line "NAME KEY" or "NAME KEY SHARE" for each client; requests without '
        "one of these keys are refused",
    )
    group.add_argument(
        "--insecure-no-auth",
        action="store_true",
        help="allow a --host that other machines reach, without keys: every machine that reaches "
        "the port can use the server",
    )
    group.add_argument(
        "--served-model-name",
        dest="served_model_names",
        action="append",
        type=ranges.place,
        metavar="NAME",
        help="name of the model for clients (default: the name of its folder); may be repeated",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="refuse requests with unknown fields; by default they are ignored, and named in the "
        "header x-quire-ignored of the answer",
    )
    group.add_argument(
        "--tool-parser",
        choices=("deepseek", "hermes", "llama3", "mistral"),
        help="format in which the model writes function calls (default: the one of the chat "
        "template)",
    )
    group.add_argument(
        "--limit",
        dest="limits",
        action=arguments.Collect,
        type=_limit,
        metavar="NAME=VALUE",
        help="another value for one of the limits in docs/serve.md, such as body_bytes=1000000; "
        "may be repeated",
    )


def _add_life(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("start, log and end")
    group.add_argument(
        "--config",
        type=ranges.place,
        metavar="FILE",
        help='options in YAML, such as "port: 8001"; the model is "model: DIR"',
    )
    group.add_argument(
        "--drain-timeout",
        type=ranges.Number(0, 86400),
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM, running answers have this time to end (default: 30)",
    )
    arguments.add_flags(group, "serve")
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of the log on standard error (default: text)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: print the options in effect and the memory that it would take",
    )


class _ServeParser(arguments.Parser):
    """Takes what the command line lacks from the environment, and what that lacks from the file."""

    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = list(args or ())
        taken = _names(words)
        words = [*serve_config.environment_words(self, os.environ, taken), *words]
        found = super().parse_intermixed_args(words, namespace)
        values = {} if found.config is None else serve_config.read(self, found.config)
        model = values.pop("model", None)
        if values:
            taken = _names(words) | serve_config.environment_names(self, os.environ)
            words = [*serve_config.file_words(self, found.config, values, taken), *words]
            found = super().parse_intermixed_args(words, namespace)
        found.model = found.model or os.environ.get(_MODEL_VARIABLE) or model
        return found


def _names(words: Sequence[str]) -> set[str]:
    """The options among words of the command line."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def _limit(text: str) -> tuple[str, float]:
    from quire.serve.limits import Limits

    name, _, value = text.partition("=")
    fields = {field.name: field for field in dataclasses.fields(Limits)}
    if name not in fields:
        raise argparse.ArgumentTypeError(
            f"there is no limit {name!r}{arguments.meant(name, fields)}; limits are "
            + ", ".join(fields)
        )
    if isinstance(fields[name].default, float):
        return name, ranges.Number(0.001, 1e6)(value)
    if name.endswith("_bytes"):
        return name, ranges.size(value)
    return name, ranges.Integer(1, 2**31)(value)


def _run(options: argparse.Namespace) -> int:
    _check_pairs(options)
    engine_options = arguments.given(options, arguments.ENGINE)
    if options.prefill_listen is not None:
        engine_options = memory.serving_prefill(engine_options)
    if options.dry_run:
        return _dry_run(options, engine_options)
    with models.naming_missing_packages("serve"):
        from quire.serve.server import bind, serve
    folder = models.model_folder(options.model)
    blends = bool(engine_options.get("blend_piece")) and not engine_options.get("blend_unverified")
    server = dataclasses.replace(_server_options(options, folder), reads_verdict=blends)
    with contextlib.ExitStack() as stack:
        # A port that is taken shows before the model loads.
        sockets = bind(options.host, options.port)
        for listener in sockets:
            stack.callback(listener.close)
        engine = stack.enter_context(models.open_engine(folder, engine_options))
        if not engine.has_tokenizer:
            raise errors.NotFoundError(
                f"{folder}: has no tokenizer.json; a server needs one, for prompts are texts"
            )

        def ready(url: str) -> None:
            print(f"quire: {server.names[0]} is ready on {url}", flush=True)

        return serve(engine, server, sockets, ready)


def _check_pairs(options: argparse.Namespace) -> None:
    from quire.serve.addresses import is_loopback

    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("serve: --tls-cert and --tls-key go together")
    if options.insecure_no_auth and options.api_keys is not None:
        raise UsageError("serve: --insecure-no-auth has no effect with --api-keys")
    arguments.check_reach("serve", "--prefill-listen", options.prefill_listen, options)
    if not (is_loopback(options.host) or options.api_keys or options.insecure_no_auth):
        raise UsageError(
            f"serve: --host {options.host} is reached from other machines: give --api-keys FILE, "
            "or --insecure-no-auth to answer all that reach the port"
        )


def _limits(options: argparse.Namespace) -> Limits:
    from quire.serve.limits import Limits

    return Limits(**(options.limits or {}))


def _server_options(options: argparse.Namespace, folder: str) -> ServerOptions:
    from quire.serve.server import ServerOptions
    from quire.serve.tenants import Tenants, read_api_keys

    keys = options.api_keys
    return ServerOptions(
        host=options.host,
        names=_model_names(options, folder),
        tenants=Tenants() if keys is None else read_api_keys(Path(keys)),
        limits=_limits(options),
        strict=options.strict,
        tool_parser=options.tool_parser,
        drain_seconds=options.drain_timeout,
        prefill_listen=options.prefill_listen,
        tls_cert=None if options.tls_cert is None else Path(options.tls_cert),
        tls_key=None if options.tls_key is None else Path(options.tls_key),
        origins=tuple(options.cors or ()),
        json_log=options.log_format == "json",
        in_effect=_in_effect(options, folder),
    )


def _model_names(options: argparse.Namespace, folder: str) -> tuple[str, ...]:
    if options.served_model_names:
        return tuple(options.served_model_names)
    if options.model is None:
        return ("smollm2-135m-instruct",)
    if is_gguf_file(os.path.expanduser(options.model)):  # the folder's name is one of the cache
        return (Path(options.model).stem,)
    return (os.path.basename(os.path.realpath(folder)),)


def _in_effect(options: argparse.Namespace, folder: str) -> dict[str, str]:
    """All options by their names, as they are shown: without the password of a URL."""
    rows = {"model": folder}
    for name in (*_SERVER, *arguments.ENGINE):
        rows[arguments.option_name(name).lstrip("-")] = _shown(name, getattr(options, name))
    rows["served-model-name"] = ", ".join(_model_names(options, folder))
    limits = dataclasses.asdict(_limits(options))
    rows["limit"] = " ".join(
        f"{name}={value if isinstance(value, int) else f'{value:g}'}"
        for name, value in limits.items()
    )
    return rows


def _shown(name: str, value: Any) -> str:
    """"default" where the model or the machine decides."""
    option = _options.ENGINE.get(name)
    if option is not None and option.flag is not None:
        if value is None and (option.default or isinstance(option.default, bool)):
            value = option.default
        if option.flag.action == "store_false":
            value = not value
    if value is None:
        return "default"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return _PASSWORD.sub(r"\1***@", text)


def _dry_run(options: argparse.Namespace, engine_options: dict[str, Any]) -> int:
    folder = models.model_folder(options.model)
    rows = _in_effect(options, folder)
    plan = memory.plan_memory(folder, engine_options)
    memory.print_table(rows | memory.memory_lines(plan))
    return 0 if plan.fits else 1
