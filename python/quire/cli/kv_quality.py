"""`quire kv-quality`: what narrow keys and values cost a model, measured on a text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from quire import _ranges as ranges
from quire.cli import arguments, models, text_input
from quire.cli.arguments import UsageError

if TYPE_CHECKING:
    import numpy as np

    from quire.engine import Engine

_ENGINE = ("dtype", "threads", "kernel_path")
# Rows whose logits are compared at once: in float64, those of a large vocabulary take 100 MB.
_ROWS = 64


@dataclasses.dataclass
class Quality:
    """One engine against the reference, over all tokens that have a next one.

    perplexity: exp of the mean negative log-probability of the text's own tokens.
    logit_difference: mean of |logit - the reference's|.
    divergence: mean Kullback-Leibler divergence of the reference's distribution, in nats.
    agreement: the part of the tokens whose most likely next token is the reference's.
    """

    kv_dtype: str
    kv_bytes_per_token: int
    perplexity: float
    logit_difference: float
    divergence: float
    agreement: float


class _Sums:
    """Sums over tokens, from which a Quality is made."""

    def __init__(self) -> None:
        self.tokens = 0
        self.loss = self.difference = self.divergence = 0.0
        self.agreements = 0

    def add(self, logits: np.ndarray, reference: np.ndarray, targets: np.ndarray) -> None:
        """Row i of both predicts targets[i]."""
        for first in range(0, len(targets), _ROWS):
            rows = slice(first, first + _ROWS)
            self._add_rows(logits[rows].astype("f8"), reference[rows].astype("f8"), targets[rows])

    def _add_rows(self, ours: np.ndarray, theirs: np.ndarray, targets: np.ndarray) -> None:
        import numpy as np

        self.tokens += len(targets)
        self.difference += float(np.abs(ours - theirs).mean(axis=1).sum())
        self.agreements += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        log_ours, log_theirs = _log_softmax(ours), _log_softmax(theirs)
        self.loss -= float(log_ours[np.arange(len(targets)), targets].sum())
        self.divergence += float((np.exp(log_theirs) * (log_theirs - log_ours)).sum())

    def quality(self, kv_dtype: str, kv_bytes_per_token: int) -> Quality:
        return Quality(
            kv_dtype=kv_dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            perplexity=math.exp(self.loss / self.tokens),
            logit_difference=self.difference / self.tokens,
            divergence=self.divergence / self.tokens,
            agreement=self.agreements / self.tokens,
        )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    import numpy as np

    shifted: np.ndarray = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def pieces_of(ids: list[int], context: int) -> list[list[int]]:
    # The last token of a piece predicts the first one of the next, which it may.
    return [ids[first : first + context] for first in range(0, len(ids) - 1, context)]


def measure(
    folder: str,
    ids: list[int],
    kv_dtypes: list[str],
    *,
    against: str = "bfloat16",
    context: int = 256,
    **options: Any,
) -> list[Quality]:
    """The qualities of `against` itself and of each of `kv_dtypes`, on consecutive pieces of
    `context` tokens that know nothing of each other.

    Two engines are open at a time: that of a type and that of the reference.
    """
    import quire

    pieces = pieces_of(ids, context)
    found = []
    with quire.Engine(folder, kv_dtype=against, **options) as reference:
        for kv_dtype in [against, *kv_dtypes]:
            if kv_dtype == against:
                found.append(compare(reference, reference, against, ids, pieces, context))
                continue
            with quire.Engine(folder, kv_dtype=kv_dtype, **options) as engine:
                found.append(compare(engine, reference, kv_dtype, ids, pieces, context))
    return found


def compare(
    engine: Engine,
    reference: Engine,
    kv_dtype: str,
    ids: list[int],
    pieces: list[list[int]],
    context: int,
) -> Quality:
    """`engine` against `reference`; `pieces` are those of `ids`."""
    import numpy as np

    sums = _Sums()
    for index, piece in enumerate(pieces):
        theirs = reference.logits(piece)
        ours = theirs if engine is reference else engine.logits(piece)
        first = index * context + 1
        targets = np.asarray(ids[first : first + len(piece)])
        sums.add(ours[: len(targets)], theirs[: len(targets)], targets)
    return sums.quality(kv_dtype, int(engine.stats()["kv_bytes_per_token"]))


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire kv-quality",
        description="Compares types of keys and values on a text: perplexity, logits, and how "
        "often the most likely token is the same.",
    )
    command.add_argument("model", nargs="?", metavar="MODEL", help="default: the embedded one")
    command.add_argument(
        "--text", type=ranges.place, metavar="FILE", help="the text (default: stdin)"
    )
    command.add_argument(
        "--types",
        type=ranges.kv_dtype,
        nargs="+",
        metavar="TYPE",
        default=["float32", "int8", "bfloat16,int8", "fp8"],
        help="types as for --kv-dtype (default: float32 int8 bfloat16,int8 fp8)",
    )
    command.add_argument(
        "--against",
        type=ranges.kv_dtype,
        metavar="TYPE",
        default="bfloat16",
        help="reference type (default: bfloat16)",
    )
    add_text_sizes(command)
    command.add_argument("--json", action="store_true", help="print one object")
    engine = command.add_argument_group("engine")
    arguments.add_flags(engine, "engine", _ENGINE)
    command.set_defaults(run=_run)
    return command


def add_text_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--context",
        type=ranges.Integer(2),
        metavar="N",
        default=256,
        help="tokens per piece of the text (default: 256)",
    )
    command.add_argument(
        "--tokens",
        type=ranges.Integer(2),
        metavar="N",
        default=4096,
        help="at most N tokens of the text (default: 4096)",
    )


def read_text(text_file: str | None) -> str:
    """That of a file, or of stdin."""
    return text_input.read_stdin() if text_file is None else text_input.read_file(text_file)


def ids_of(folder: str, text: str, limit: int) -> list[int]:
    """The first tokens of a text, at most `limit`."""
    tokenizer = models.read_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{folder}: has no tokenizer.json, so a text cannot be turned into tokens")
    ids = tokenizer.encode(text)[:limit]
    if len(ids) < 2:
        raise UsageError("the text has fewer than two tokens; there is nothing to predict")
    return ids


def _run(options: argparse.Namespace) -> int:
    folder = models.model_folder(options.model)
    ids = ids_of(folder, read_text(options.text), options.tokens)
    qualities = measure(
        folder,
        ids,
        options.types,
        against=options.against,
        context=options.context,
        **arguments.given(options, _ENGINE),
    )
    if options.json:
        found = [dataclasses.asdict(quality) for quality in qualities]
        print(json.dumps({"tokens": len(ids), "against": options.against, "types": found}))
        return 0
    print(f"{len(ids)} tokens in pieces of {options.context}, against {options.against}")
    print(f"{'KV':<16}{'bytes/token':>12}{'perplexity':>12}{'|d logit|':>11}{'KL':>11}{'same':>8}")
    for q in qualities:
        print(
            f"{q.kv_dtype:<16}{q.kv_bytes_per_token:>12}{q.perplexity:>12.4f}"
            f"{q.logit_difference:>11.5f}{q.divergence:>11.6f}{q.agreement:>8.2%}"
        )
    return 0
