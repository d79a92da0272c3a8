"""`--dry-run`: what a command would take of the memory, without loading anything."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import quire
from quire.cli.models import model_folder

if TYPE_CHECKING:
    from quire.engine import MemoryPlan


def plan_memory(model: str | None, arguments: dict[str, Any]) -> MemoryPlan:
    return quire.Engine.plan_memory(model_folder(model), **arguments)


def serving_prefill(arguments: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine that computes prompts for others: what it sends is in the plan."""
    from quire import _ffi  # loads the library, which --help does not need

    return arguments | {"sending_bytes": int(_ffi.function("default_sending_bytes")())}


def memory_lines(plan: MemoryPlan) -> dict[str, str]:
    """The plan in words, by name, without what there is none of."""
    return {
        "weights": bytes_text(plan.weight_bytes),
        "KV per token": bytes_text(plan.kv_bytes_per_token),
        "KV pages": f"{bytes_text(plan.kv_bytes)}: {plan.page_count:,} pages of "
        f"{plan.page_size} tokens, {plan.page_bytes:,} bytes each"
        + (" (fewer than usual, so that it fits)" if plan.kv_shrunk else ""),
        **({"states": bytes_text(plan.state_bytes)} if plan.state_bytes else {}),
        "scratch": bytes_text(plan.scratch_bytes),
        **({"draft model": bytes_text(plan.draft_bytes)} if plan.draft_bytes else {}),
        **({"staging": bytes_text(plan.staging_bytes)} if plan.staging_bytes else {}),
        **({"sending": bytes_text(plan.sending_bytes)} if plan.sending_bytes else {}),
        "total": bytes_text(plan.total_bytes),
        "machine": bytes_text(plan.machine_bytes),
        "free": f"{bytes_text(plan.available_bytes)}: "
        + ("it fits" if plan.fits else "IT DOES NOT FIT"),
        "longest context": f"{plan.longest_context:,} tokens",
    }


def bytes_text(count: int) -> str:
    """Exact, and in the unit one thinks in."""
    exact = f"{count:,} bytes"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{exact} ({count / 1024**power:.1f} {unit})"
    return exact


def print_table(rows: dict[str, str]) -> None:
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def print_plan(plan: MemoryPlan, facts: dict[str, Any], as_json: bool) -> int:
    """Prints a plan and what else is known about the command; returns the exit code.

    1 says that it cannot be run like this.
    """
    runs = plan.fits and facts.get("too_long", 0) == 0
    if as_json:
        print(json.dumps({**dataclasses.asdict(plan), "fits": plan.fits, **facts}))
        return 0 if runs else 1
    rows = memory_lines(plan)
    rows |= {name.replace("_", " "): f"{value:,}" for name, value in facts.items()}
    print_table(rows)
    return 0 if runs else 1
