"""What blending costs a model: measured by `quire blend eval`, kept for each model, and asked
before an answer is blended.

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

from quire import _ffi, errors
from quire._home import cache_dir, write_whole

__all__ = ["BlendVerdict", "find", "fingerprint", "keep", "limits"]

_VERSION = 1
_SHIPPED = Path(__file__).parent / "blend" / "verdicts.json"


@dataclasses.dataclass(frozen=True)
class BlendVerdict:
    """What the default blend (0.15 of the tokens computed again) costs a model, in the kind of
    texts that it costs most.

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
        divergence_most, agreement_least = limits()
        return self.divergence <= divergence_most and self.agreement >= agreement_least


def limits() -> tuple[float, float]:
    """The most divergence and the least agreement that a blend may have which needs no force."""
    divergence, agreement = _ffi.function("blend_verdict_limits")()
    return float(divergence), float(agreement)


def fingerprint(identity: Mapping[str, str], kv_types: str) -> str:
    """The fingerprint of a model's identity and the types of its keys and values."""
    text = json.dumps({"model": dict(identity), "kv": kv_types}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find(name: str) -> BlendVerdict | None:
    """The verdict of the fingerprint `name`: the one that was kept by this version, else the one
    that comes with Quire. CorruptError for a file that is damaged, IoError for one that cannot be
    read."""
    try:
        path = _place(name)
        kept = _read(json.loads(path.read_bytes()), name)
    except FileNotFoundError:
        kept = None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.CorruptError(
            f"{path}: the verdict about blending is damaged ({error!r}); remove the file, or run "
            "quire blend eval again"
        ) from error
    except OSError as error:
        raise errors.IoError(
            f"{path}: the verdict about blending cannot be read: {error.strerror}"
        ) from error
    if kept is not None:
        return kept
    shipped = json.loads(_SHIPPED.read_text(encoding="utf-8"))
    return _read(shipped[name], name) if name in shipped else None


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


def _place(name: str) -> Path:
    return cache_dir() / "blend" / f"{name}.json"
