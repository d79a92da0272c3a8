"""Rows as text, the files of bench/results, and the tables of docs/benchmarks.md.

bench/results has a JSON file per machine: {"machine": its title, "rows": [row, ...]}, oldest first.
A row is a measure.Row with its group, the date of the run and the commit (None where unknown).
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from cases import GROUPS
from measure import Comparison, Outcome, Row

BEGIN = "<!-- results: written by bench/bench --update-docs -->"
END = "<!-- end of results -->"
_HEADER = "| case | Quire | peers: figure, Quire times as fast (rounds) | of bound | goals | date |"
_RULE = "| --- | --- | --- | --- | --- | --- |"
_UNITS = {"tokens": "t/s", "us": "µs", "times": "×"}
_EIGHT_BILLION = "model/8b-q4_k_m/generate/1x0"
# The rows that the page shows: few, as every machine has them.
HEADLINES = (
    "decode/bf16/gqa4/8x4096",
    "prefill/bf16/gqa4/512+4096",
    "model/110m/prefill/512",
    "model/110m/first_token/1024+16",
    "model/1b/prefill/512",
    "model/1b/generate/1x0",
    "model/1b/generate/16x0",
    "model/1b-q4_k_m/prefill/512",
    "model/1b-q4_k_m/generate/1x0",
    "serve/embedded/chats/8x6: first token, later",
)


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


# ---- bench/results


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A row of an earlier run."""

    row: Row
    group: str  # a key of GROUPS
    date: str  # YYYY-MM-DD
    commit: str | None

    def as_json(self) -> dict[str, Any]:
        return {"group": self.group, "date": self.date, "commit": self.commit} | dataclasses.asdict(
            self.row
        )

    @staticmethod
    def of(entry: dict[str, Any]) -> Recorded:
        fields = {field.name: entry[field.name] for field in dataclasses.fields(Row)}
        fields["comparisons"] = [Comparison(**each) for each in entry["comparisons"]]
        fields["outcomes"] = [Outcome(**each) for each in entry["outcomes"]]
        return Recorded(Row(**fields), entry["group"], entry["date"], entry["commit"])


def results_file(folder: Path, machine: str) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-") + ".json")


def record(folder: Path, machine: str, new: list[Recorded]) -> None:
    """Appends the rows to the machine's file, a line each."""
    path = results_file(folder, machine)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows += [recorded.as_json() for recorded in new]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    text = f'{{"machine": {json.dumps(machine)}, "rows": [\n{lines}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def newest(folder: Path) -> dict[str, dict[str, Recorded]]:
    """Machine -> label -> the last row recorded for it; machines with the newest rows first."""
    machines: dict[str, dict[str, Recorded]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Recorded.of(entry) for entry in content["rows"]]
        machines[content["machine"]] = {label(each.row): each for each in rows}
    return dict(
        sorted(
            machines.items(),
            key=lambda item: max(each.date for each in item[1].values()),
            reverse=True,
        )
    )


def all_lines(folder: Path) -> list[str]:
    """Every case's newest row as text, by machine and group: what bench/bench --results prints."""
    text = []
    for machine, rows in newest(folder).items():
        text.append(f"# {machine}")
        for group, title in GROUPS.items():
            lines = [f"{line(r.row)} | {r.date}" for r in rows.values() if r.group == group]
            text += [f"## {title}", *lines] if lines else []
    return text


# ---- docs/benchmarks.md


def update(page: Path, folder: Path) -> None:
    """Writes the newest headline rows of every machine into the page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{render(newest(folder))}\n{END}{after}", encoding="utf-8")


def _answer_speed(rows: dict[str, Recorded]) -> list[str]:
    """What a user gets of an 8B, where that was measured."""
    if _EIGHT_BILLION not in rows:
        return []
    row = rows[_EIGHT_BILLION].row
    peers = ", ".join(f"{peer.peer} {number(peer.value)}" for peer in row.comparisons)
    return [f"An 8B model in 4 bits: {number(row.value)} tokens/s; {peers}.\n"]


def render(machines: dict[str, dict[str, Recorded]]) -> str:
    parts = []
    for machine, rows in machines.items():
        shown = [rows[name] for name in HEADLINES if name in rows]
        if not shown:
            continue
        lines = [table_line(each.row, each.date) for each in shown]
        title = machine.replace("(R)", "")
        head = [f"\n### {title}\n", *_answer_speed(rows), _HEADER, _RULE]
        parts.append("\n".join([*head, *lines]))
    return "\n".join(parts) + "\n"
