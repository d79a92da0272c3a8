"""`quire quantize`: a model folder with weights of 8 or 4 bits."""

from __future__ import annotations

import argparse
import os
import sys

from quire.cli import arguments, models
from quire.cli.terminal import written_progress


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire quantize",
        description="Writes a model folder with weights of 8 or 4 bits: less memory, faster "
        "answers, a little less quality (quire quality measures it).",
    )
    command.add_argument("model", metavar="MODEL", help="folder of the model")
    command.add_argument(
        "directory", metavar="DIR", help="folder to create; must be absent or empty"
    )
    command.add_argument(
        "--weights",
        choices=("q8", "q4", "q4k"),
        default="q8",
        help="Q8_0 with 8.5 bits per weight, Q4_0 with 4.5, or Q4_K with 4.5, which is nearer to "
        "the weights and needs rows that are multiples of 256 (default: q8)",
    )
    command.add_argument(
        "--embeddings",
        choices=("q8", "q4", "q4k"),
        default="q8",
        help="the same for the token embedding (default: q8)",
    )
    command.add_argument(
        "--head",
        choices=("q8", "q4", "q4k"),
        help="the same for the matrix that makes logits (default: as --embeddings)",
    )
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    with models.naming_missing_packages():
        from quire.quantizing import quantize_model

    with models.naming_missing_packages(), written_progress(sys.stderr) as tell:
        quantize_model(
            os.path.expanduser(options.model),
            options.directory,
            weights=options.weights,
            embeddings=options.embeddings,
            head=options.head,
            progress=tell,
        )
    print(f'{options.directory}: written; try: quire generate {options.directory} "Hello"')
    return 0
