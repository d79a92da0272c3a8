"""`quire quality`: what narrow weights cost a model, measured on a text against another one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from quire import _ranges as ranges
from quire.cli import arguments, kv_quality, models
from quire.cli.arguments import UsageError

if TYPE_CHECKING:
    from quire.cli.kv_quality import Quality


@dataclasses.dataclass
class ModelQuality:
    """A model beside the reference: `quality.kv_dtype` is that of both."""

    model: str
    weight_bytes: int
    quality: Quality


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire quality",
        description="Compares a model with another of the same tokenizer on a text, such as "
        "quantised weights with those that they were made of: perplexity, logits, and how often "
        "the most likely token is the same.",
    )
    command.add_argument("model", metavar="MODEL", help="folder of the model, or a GGUF file")
    command.add_argument(
        "--against", metavar="MODEL", required=True, help="the reference: a folder or GGUF file"
    )
    command.add_argument(
        "--text", type=ranges.place, metavar="FILE", help="the text (default: stdin)"
    )
    kv_quality.add_text_sizes(command)
    command.add_argument("--json", action="store_true", help="print one object")
    engine = command.add_argument_group("engine")
    engine.add_argument(
        "--kv-dtype", type=ranges.kv_dtype, metavar="TYPE", help="type of keys and values"
    )
    engine.add_argument("--dtype", choices=("bfloat16", "float32"), help="type of products")
    arguments.add_threads(engine)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    folders = [models.model_folder(name) for name in (options.against, options.model)]
    text = kv_quality.read_text(options.text)
    ids = kv_quality.ids_of(folders[0], text, options.tokens)
    if kv_quality.ids_of(folders[1], text, options.tokens) != ids:
        raise UsageError(
            f"{options.model} and {options.against} cut the text into different tokens: "
            "their predictions cannot be compared"
        )
    found = _measure(folders, ids, options)
    if options.json:
        objects = [dataclasses.asdict(item) for item in found]
        print(json.dumps({"tokens": len(ids), "against": options.against, "models": objects}))
        return 0
    print(f"{len(ids)} tokens in pieces of {options.context}, against {options.against}")
    width = max(len(item.model) for item in found)
    print(
        f"{'model':<{width}}{'MB':>8}{'perplexity':>12}{'|d logit|':>11}{'KL':>11}{'same':>8}"
    )
    for item in found:
        q = item.quality
        print(
            f"{item.model:<{width}}{item.weight_bytes / 1e6:>8.0f}{q.perplexity:>12.4f}"
            f"{q.logit_difference:>11.5f}{q.divergence:>11.6f}{q.agreement:>8.2%}"
        )
    return 0


def _measure(
    folders: list[str], ids: list[int], options: argparse.Namespace
) -> list[ModelQuality]:
    import quire

    names = (options.against, options.model)
    given = arguments.given(options, ("dtype", "threads", "kv_dtype"))
    pieces = kv_quality.pieces_of(ids, options.context)
    found = []
    with quire.Engine(folders[0], **given) as reference, quire.Engine(folders[1], **given) as other:
        for name, folder, engine in zip(names, folders, (reference, other), strict=True):
            quality = kv_quality.compare(
                engine, reference, options.kv_dtype or "", ids, pieces, options.context
            )
            plan = quire.Engine.plan_memory(folder, **given)
            found.append(ModelQuality(name, plan.weight_bytes, quality))
    return found
