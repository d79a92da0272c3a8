#!/usr/bin/env python3
"""Writes docs/feature-pairs.md from the random walks of the release build: feature_pairs.py.

Runs all shards of build/release/src/kv/cache/kv_walk_test (about two minutes of CPU) with
QUIRE_WALK_PAIRS, adds their counts, and fails where a pair is too rare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "feature-pairs.md"
PROGRAM = ROOT / "build" / "release" / "src" / "kv" / "cache" / "kv_walk_test"
FOLDER = PROGRAM.parent / "walk_pairs"
SHARDS = 54
# The fewest times that a pair must be met.
OCCURRENCES_MIN = 1000

_INTRODUCTION = """# Pairs of features

Made by `tools/feature_pairs.py` from the random walks of `src/kv/cache/kv_walk_test.cc`; not to be
edited.

Each walk does the same with the cache and with the naive model `src/kv/testing/kv_model.h` and
compares all that can be observed. A cell counts how often two features held at once: for one
sequence, in one call on one layer whose outputs were compared. `12k` are at least 12 000, `2M` at
least 2 000 000. No cell may be below {least}; the diagonal is the feature alone. A letter says why
two features never meet. `src/kv/testing/feature_pairs.cc` has the list,
`tests/project/test_feature_pairs.py` checks this page.
"""


@dataclass
class Table:
    meanings: dict[str, str] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, text: str) -> None:
        for line in text.splitlines():
            kind, *rest = line.split("\t")
            if kind == "feature":
                self.meanings[rest[0]] = rest[1]
            elif kind == "pair":
                pair = (rest[0], rest[1])
                self.counts[pair] = self.counts.get(pair, 0) + int(rest[2])
            elif kind == "never":
                self.reasons[rest[0], rest[1]] = rest[2]
            else:
                raise ValueError(f"a line of a shard that is none: {line!r}")

    def faults(self) -> list[str]:
        faults = [
            f"{a} with {b}: {count} times; at least {OCCURRENCES_MIN} are wanted"
            for (a, b), count in self.counts.items()
            if count < OCCURRENCES_MIN and (a, b) not in self.reasons
        ]
        both = self.counts.keys() & self.reasons.keys()
        return faults + [f"{a} with {b} occurs, and is said never to" for a, b in sorted(both)]


def read_table(folder: Path = FOLDER) -> Table:
    """What the shards of the last run have counted."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(files) != SHARDS:
        raise SystemExit(
            f"{folder} has {len(files)} files of {SHARDS} shards; run all walks: ./test release"
        )
    table = Table()
    for file in files:
        table.add(file.read_text(encoding="utf-8"))
    return table


def run_walks() -> None:
    workers = os.cpu_count() or 1
    running = [
        subprocess.Popen(
            [PROGRAM, "--gtest_filter=Seeds/KVWalk.*", "--gtest_brief=1"],
            env={
                **os.environ,
                "QUIRE_WALK_PAIRS": str(FOLDER),
                "GTEST_TOTAL_SHARDS": str(workers),
                "GTEST_SHARD_INDEX": str(i),
            },
        )
        for i in range(workers)
    ]
    if any([process.wait() for process in running]):
        raise SystemExit("a walk failed; see above")


def short(count: int) -> str:
    if count >= 1_000_000:
        return f"{count // 1_000_000}M"
    return f"{count // 1000}k" if count >= 1000 else str(count)


def page_of(table: Table) -> str:
    names = list(table.meanings)
    letters: dict[str, str] = {}
    for reason in table.reasons.values():
        letters.setdefault(reason, chr(ord("a") + len(letters)))
    lines = [_INTRODUCTION.format(least=f"{OCCURRENCES_MIN:,}".replace(",", " "))]
    lines += ["| | feature | |", "| ---: | --- | --- |"]
    lines += [f"| {i + 1} | {name} | {table.meanings[name]} |" for i, name in enumerate(names)]
    lines += ["", "| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |"]
    lines += ["| --- |" + " ---: |" * len(names)]
    for i, a in enumerate(names):
        cells = []
        for b in names[: i + 1]:
            reason = table.reasons.get((a, b))
            cells.append(short(table.counts[a, b]) if reason is None else letters[reason])
        cells += [""] * (len(names) - len(cells))
        lines.append(f"| {i + 1} {a} | " + " | ".join(cells) + " |")
    lines += ["", "| | never together, because |", "| --- | --- |"]
    lines += [f"| {letter} | {reason} |" for reason, letter in letters.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    run_walks()
    table = read_table()
    PAGE.write_text(page_of(table), encoding="utf-8")
    faults = table.faults()
    print("\n".join(faults) if faults else f"{PAGE.relative_to(ROOT)} is written")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
