"""What blending costs a model: measured by `quire blend eval`, kept for each model, and asked before
an answer is blended.

A verdict is a file of JSON in the folder `blend` of :func:`quire._home.cache_dir`, under the
fingerprint of the model's files and the types of its KV. That of the embedded model comes with
Quire.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import errors
from quire._home import cache_dir, write_whole

__all__ = ["BlendVerdict", "check", "find", "fingerprint", "keep"]

_VERSION = 1
_SHIPPED = Path(__file__).parent / "blend" / "verdicts.json"
# What the blend may cost that a request gets by default, against full prefill, for each kind of texts.
DIVERGENCE_MOST = 0.3
AGREEMENT_LEAST = 0.75


@dataclasses.dataclass(frozen=True)
class BlendVerdict:
    """What the default blend (0.15 of the tokens computed again) costs a model, in the kind of texts
    that it costs most.

    date: when it was measured, as in "2026-11-24". questions: of each kind of texts.
    divergence: mean Kullback-Leibler divergence of the next token from full prefill's, in nats.
    agreement: the part of the tokens of which the likeliest one is the same.
    """

    date: str
    questions: int
    divergence: float
    agreement: float

    @property
    def passes(self) -> bool:
        """Whether such blends are allowed."""
        return self.divergence <= DIVERGENCE_MOST and self.agreement >= AGREEMENT_LEAST


def fingerprint(identity: Mapping[str, str], kv_types: str) -> str:
    """The fingerprint of a model's identity and the types of its keys and values."""
    text = json.dumps({"model": dict(identity), "kv": kv_types}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find(name: str) -> BlendVerdict | None:
    """The verdict of the fingerprint `name`: the one that was kept, else the one that comes with
    Quire. CorruptError for a file that is damaged."""
    path = _place(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = json.loads(_SHIPPED.read_text(encoding="utf-8"))
        return _read(shipped[name], name) if name in shipped else None
    try:
        return _read(json.loads(text), name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.CorruptError(
            f"{path}: the verdict about blending is damaged ({error!r}); remove the file, or run "
            "quire blend eval again"
        ) from error


def _read(fields: Any, name: str) -> BlendVerdict | None:
    """ValueError, KeyError or TypeError for what is no verdict; None for one of another version."""
    if fields["version"] != _VERSION:
        return None
    if fields["fingerprint"] != name:
        raise ValueError("it is of another model")
    verdict = BlendVerdict(
        str(fields["date"]),
        int(fields["questions"]),
        float(fields["divergence"]),
        float(fields["agreement"]),
    )
    if verdict.questions < 1 or not 0 <= verdict.agreement <= 1:
        raise ValueError("questions or agreement are out of range")
    if not (math.isfinite(verdict.divergence) and verdict.divergence >= 0):
        raise ValueError("divergence is out of range")
    return verdict


def keep(name: str, verdict: BlendVerdict) -> Path:
    """Writes the verdict of the fingerprint `name`, whole or not at all, and returns its file."""
    path = _place(name)
    fields = {"version": _VERSION, "fingerprint": name, **dataclasses.asdict(verdict)}
    write_whole(path, json.dumps(fields, indent=2) + "\n")
    return path


def check(model: Path, verdict: BlendVerdict | None) -> None:
    """BadArgumentError where nothing allows the model's blends."""
    if verdict is None:
        raise errors.BadArgumentError(
            f"blend: nobody has measured what blending costs {model.name}; run quire blend eval, or "
            "force it: blend_unverified"
        )
    if not verdict.passes:
        raise errors.BadArgumentError(
            f"blend: it costs {model.name} too much: a divergence of {verdict.divergence:.3f} nats (at "
            f"most {DIVERGENCE_MOST}), the same token in {verdict.agreement:.1%} (at least "
            f"{AGREEMENT_LEAST:.0%}), measured {verdict.date}; leave blend out, or force it: "
            "blend_unverified"
        )


def _place(name: str) -> Path:
    return cache_dir() / "blend" / f"{name}.json"
