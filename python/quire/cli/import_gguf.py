"""`quire import`: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli import arguments, models
from quire.cli.terminal import written_progress


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire import",
        description="Turns a GGUF file into a Hugging Face folder. Its architecture must be one of "
        "llama, qwen2, qwen3, gemma2, gemma3, phi3, qwen2moe, qwen3moe, deepseek2 and mamba2.",
    )
    command.add_argument("file", metavar="FILE.gguf")
    command.add_argument(
        "directory", metavar="DIR", help="folder to create; must be absent or empty"
    )
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float16"), help="type of the written weights"
    )
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    with models.naming_missing_packages():
        from quire.importer import GgufError, import_gguf
    try:
        with written_progress(sys.stderr) as tell:
            import_gguf(
                Path(options.file),
                Path(options.directory),
                **arguments.given(options, ("dtype",)),
                progress=tell,
            )
    except GgufError as error:
        raise models.Failure(error) from error
    print(f'{options.directory}: written; try: quire generate {options.directory} "Hello"')
    return 0
