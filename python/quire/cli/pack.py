"""`quire pack`: a model folder whose weights are mapped when an engine starts."""

from __future__ import annotations

import argparse

from quire.cli import arguments, models


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire pack",
        description="Writes a model folder with weights in the order in which kernels read them: "
        "engines of it start faster and share the weights' memory.",
    )
    command.add_argument("model", metavar="MODEL", help="folder of the model")
    command.add_argument(
        "directory", metavar="DIR", help="is made; must not exist yet, or be empty"
    )
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="as engines will compute"
    )
    command.add_argument("--threads", type=int, metavar="N", help="0: one per core (default)")
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    from quire.packing import pack_model

    pack_model(
        models.model_folder(options.model),
        options.directory,
        **arguments.given(options, ("dtype", "threads")),
    )
    print(f'{options.directory}: written; try: quire generate {options.directory} "Hello"')
    return 0
