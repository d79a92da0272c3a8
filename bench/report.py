"""Rows as text: lines for the terminal, and the tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from pathlib import Path

from cases import GROUPS
from measure import Row

BEGIN = "<!-- results: written by bench/bench --update-docs -->"
END = "<!-- end of results -->"
_HEADER = "| case | Quire | peers: figure, Quire times as fast (rounds) | of bound | goals | date |"
_RULE = "| --- | --- | --- | --- | --- | --- |"
_UNITS = {"tokens": "t/s", "us": "µs"}

# Machine -> group title -> case -> table line.
Tables = dict[str, dict[str, dict[str, str]]]


def number(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def label(row: Row) -> str:
    return row.case if row.metric == "call" else f"{row.case}: {row.metric}"


def _value(value: float, unit: str) -> str:
    return f"{number(value)} {_UNITS.get(unit, unit)}"


def _peers(row: Row) -> str:
    parts = []
    for peer in row.comparisons:
        spread = ""
        if peer.lowest != peer.highest:
            spread = f" ({number(peer.lowest)} to {number(peer.highest)})"
        parts.append(f"{peer.peer} {_value(peer.value, row.unit)}: {number(peer.ratio)} ×{spread}")
    return "; ".join(parts)


def _bound(row: Row) -> str:
    if row.fraction is None:
        return ""
    return f"{row.fraction:.2f} at {row.bandwidth * 1e-9:.0f} GB/s"


def _goals(row: Row) -> str:
    return "; ".join(
        f"{outcome.goal}: {'reached' if outcome.reached else '**not reached**'}"
        for outcome in row.outcomes
    )


def line(row: Row) -> str:
    """For the terminal."""
    parts = [f"{label(row)}: {_value(row.value, row.unit)}", _peers(row)]
    if row.fraction is not None:
        parts.append(f"{_bound(row)} of bound")
    parts.append(_goals(row).replace("**", ""))
    return " | ".join(part for part in parts if part)


def table_line(row: Row, date: str) -> str:
    cells = [
        label(row),
        _value(row.value, row.unit),
        _peers(row),
        _bound(row),
        _goals(row),
        date,
    ]
    return "| " + " | ".join(cells) + " |"


# ---- docs/benchmarks.md


def update(page: Path, machine: str, group_rows: dict[str, list[Row]], date: str) -> None:
    """Puts the rows into the page's tables, each in the place of the row of its case that was
    measured on the same machine before; the others stay."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    written, after = rest.split(END)
    tables = parse(written)
    groups = tables.setdefault(machine, {})
    for group, new in group_rows.items():
        lines = groups.setdefault(GROUPS[group], {})
        lines |= {label(row): table_line(row, date) for row in new}
    page.write_text(f"{before}{BEGIN}\n{render(tables)}\n{END}{after}", encoding="utf-8")


def parse(written: str) -> Tables:
    tables: Tables = {}
    machine = group = ""
    for text in written.splitlines():
        if match := re.match(r"(##|###) (.*)", text):
            if match[1] == "##":
                machine = match[2]
                tables[machine] = {}
            else:
                group = match[2]
                tables[machine][group] = {}
        elif text.startswith("| ") and text not in (_HEADER, _RULE):
            tables[machine][group][text.split(" | ")[0].removeprefix("| ")] = text
    return tables


def render(tables: Tables) -> str:
    parts = []
    for machine, groups in tables.items():
        parts.append(f"\n## {machine}\n")
        for title in GROUPS.values():
            if groups.get(title):
                parts += [f"### {title}\n", _HEADER, _RULE, *groups[title].values(), ""]
    return "\n".join(parts)
