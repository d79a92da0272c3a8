"""`quire prefill`: a process that computes prompts for others."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire import _ranges as ranges
from quire import errors
from quire.cli import arguments, memory, models
from quire.cli.arguments import UsageError
from quire.cli.terminal import note, told_line

if TYPE_CHECKING:
    from quire.engine import Engine


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire prefill",
        description="Computes prompts for other processes, whose --prefill-from has its address: "
        "`quire generate`, `quire chat` and `quire serve` with the same model. It runs until "
        "SIGINT (Ctrl-C), SIGTERM or SIGHUP, finishes the prompts in work, and prints a line for "
        "each connection that it refuses.",
    )
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of the model (default: the embedded one)",
    )
    address = command.add_argument_group("address")
    address.add_argument(
        "--listen",
        type=ranges.address,
        metavar="ADDR",
        help="HOST:PORT to listen on, port 0 being any that is free, ucx:HOST:PORT for UCX, or "
        "unix:PATH for processes of this machine; one that other machines reach needs "
        "--peer-secret-file or TLS",
    )
    address.add_argument(
        "--peers-max",
        type=ranges.Integer(1, 4096),
        metavar="N",
        help="at most N connections at a time (default: 64)",
    )
    arguments.add_connection(address)
    command.add_argument(
        "--drain-timeout",
        type=ranges.Number(0, 86400),
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM, prompts in work have this time to end (default: 30)",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="start nothing: print the memory needed"
    )
    arguments.add_engine(command)
    arguments.add_store(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    engine_options = memory.serving_prefill(arguments.given(options, arguments.ENGINE))
    if options.dry_run:
        plan = memory.plan_memory(options.model, engine_options)
        return memory.print_plan(plan, {}, as_json=False)
    if options.listen is None:
        raise UsageError("prefill: --listen says where: 127.0.0.1:7000, or unix:PATH")
    arguments.check_reach("prefill", "--listen", options.listen, options)
    folder = models.model_folder(options.model)
    with models.open_engine(folder, engine_options) as engine, _until_signal() as ending:
        models.note_digest(folder)
        more = arguments.given(options, ("peers_max",))
        from quire._prefill import OncePerCause  # loads the library, which --help does not need

        tell = OncePerCause(_tell_refusal)
        endpoint = engine.serve_prefill(options.listen, on_refused=tell, **more)
        name = os.path.basename(os.path.realpath(folder))
        print(f"quire: {name} computes prompts at {endpoint}", flush=True)
        _wait(engine, ending)
        _drain(engine, options.drain_timeout)
        engine.flush_store()
    return 0


def _tell_refusal(why: str) -> None:
    note(f"quire: refused: {told_line(why)}")


@contextlib.contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends the process."""
    ending = threading.Event()

    def heard(number: int, _: object) -> None:
        ending.set()
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup asks for
        numbers.append(signal.SIGHUP)  # its terminal has gone
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, heard)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(engine: Engine, ending: threading.Event) -> None:
    """Until the signal; raises what the engine cannot go on for."""
    failed: list[errors.QuireError] = []

    def look() -> None:
        try:
            engine.stats()
        except errors.QuireError as error:
            failed.append(error)
            ending.set()

    engine.on_step = look
    look()  # it may have ended before
    ending.wait()
    engine.on_step = None
    if failed:
        raise failed[0]


def _drain(engine: Engine, seconds: float) -> None:
    """Until the prompts in work have arrived, for `seconds` at most."""
    done = threading.Event()

    def look() -> None:
        try:
            waiting = engine.stats()["served_waiting"]
        except errors.QuireError:  # it has ended, and its connections with it
            waiting = 0
        if waiting == 0:
            done.set()

    engine.on_step = look
    engine.end_prefill()
    look()
    if not done.wait(seconds):
        left = engine.stats(wait=False)["served_waiting"]
        note(f"quire: {left} prompts were not finished within {seconds:g} s (--drain-timeout)")
    engine.on_step = None
