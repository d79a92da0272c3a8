"""`quire pack`: a model folder whose weights are mapped when an engine starts."""

from __future__ import annotations

import argparse
import sys

from quire.cli import arguments, models
from quire.cli.terminal import written_progress


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire pack",
        description="Writes a model folder with weights in the order in which kernels read them: "
        "engines start faster from it and share the memory of the weights.",
    )
    command.add_argument("model", metavar="MODEL", help="folder of the model")
    command.add_argument(
        "directory", metavar="DIR", help="folder to create; must be absent or empty"
    )
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="the dtype of the engines that will use it"
    )
    arguments.add_threads(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    from quire.packing import pack_model

    with written_progress(sys.stderr) as tell:
        pack_model(
            models.model_folder(options.model),
            options.directory,
            **arguments.given(options, ("dtype", "threads")),
            progress=tell,
        )
    print(f'{options.directory}: written; try: quire generate {options.directory} "Hello"')
    return 0
