"""`quire quality`: what narrow weights, activations and KV cost a model, on a text, against another
one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from quire import _ranges as ranges
from quire.cli import arguments, kv_quality, models
from quire.cli.arguments import UsageError

if TYPE_CHECKING:
    import quire
    from quire.cli.kv_quality import Quality


@dataclasses.dataclass
class ModelQuality:
    """A model, with keys and values of `quality.kv_dtype`, beside `against`: the reference, or the
    model itself without `--kv-dtype`."""

    model: str
    against: str
    weight_bytes: int
    quality: Quality


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire quality",
        description="Compares a model with another of the same tokenizer on a text, such as "
        "quantised weights with those that they were made of: perplexity, logits, and how often "
        "the most likely token is the same. With --kv-dtype, what narrow KV costs is shown apart.",
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
        "--kv-dtype",
        type=ranges.kv_dtype,
        metavar="TYPE",
        help="type of keys and values of MODEL (the reference: as --dtype)",
    )
    engine.add_argument(
        "--activations",
        type=ranges.activations,
        metavar="TYPE",
        help="as of the engine, of MODEL (the reference: int8)",
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
    print(f"{len(ids)} tokens in pieces of {options.context}; reference: {options.against}")
    _print_table(found, options.against)
    return 0


def _print_table(found: list[ModelQuality], reference: str) -> None:
    width = max(len(item.model) for item in found)
    print(
        f"{'model':<{width}}  {'KV':<17}{'against':<24}{'MB':>8}{'perplexity':>12}"
        f"{'|d logit|':>11}{'KL':>11}{'same':>8}"
    )
    for item in found:
        q = item.quality
        against = "reference" if item.against == reference else item.against
        print(
            f"{item.model:<{width}}  {q.kv_dtype:<17}{against:<24}"
            f"{item.weight_bytes / 1e6:>8.0f}{q.perplexity:>12.4f}"
            f"{q.logit_difference:>11.5f}{q.divergence:>11.6f}{q.agreement:>8.2%}"
        )


def _check_logits(
    model: quire.Engine, reference: quire.Engine, options: argparse.Namespace
) -> None:
    """Two sizes of one family may have the same tokenizer, and embeddings padded to other sizes."""
    sizes = model.info.vocab_size, reference.info.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{options.model} has {sizes[0]} logits and {options.against} has {sizes[1]} logits: "
            "their predictions cannot be compared"
        )


def _measure(
    folders: list[str], ids: list[int], options: argparse.Namespace
) -> list[ModelQuality]:
    """Two engines are open at a time."""
    import quire

    plain = options.dtype or "bfloat16"
    of_reference = arguments.given(options, ("dtype", "threads"))
    of_model = arguments.given(options, ("dtype", "threads", "activations"))
    pieces = kv_quality.pieces_of(ids, options.context)
    found: list[ModelQuality] = []

    def compare(model: quire.Engine, reference: quire.Engine, kv_dtype: str, against: str) -> None:
        is_reference = model is reference
        quality = kv_quality.compare(model, reference, kv_dtype, ids, pieces, options.context)
        name = options.against if is_reference else options.model
        found.append(ModelQuality(name, against, model.info.weight_bytes, quality))

    with quire.Engine(folders[0], **of_reference) as reference:
        with quire.Engine(folders[1], **of_model) as model:
            _check_logits(model, reference, options)
            compare(reference, reference, plain, options.against)
            compare(model, reference, plain, options.against)
        if options.kv_dtype is None:
            return found
        with quire.Engine(folders[1], kv_dtype=options.kv_dtype, **of_model) as narrow:
            compare(narrow, reference, options.kv_dtype, options.against)
    with (
        quire.Engine(folders[1], **of_model) as model,
        quire.Engine(folders[1], kv_dtype=options.kv_dtype, **of_model) as narrow,
    ):
        compare(narrow, model, options.kv_dtype, f"itself with {plain} KV")
    return found
