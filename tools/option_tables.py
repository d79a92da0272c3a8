#!/usr/bin/env python3
"""Writes the tables of options in docs from python/quire/_options.py: option_tables.py.

A table stands between a line "<!-- options: GROUP, ... -->" and the next line "<!-- end -->".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "program.md",)
sys.path.insert(0, str(ROOT / "python"))

from quire._options import ENGINE, SAMPLING, Flag  # noqa: E402

_TABLE = re.compile(r"(<!-- options: ([\w, ]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def row(name: str, flag: Flag) -> str:
    option = flag.name or "--" + name.replace("_", "-")
    value = flag.metavar or r"\|".join(flag.choices or ())
    meaning = ". ".join(part for part in (flag.help, flag.more) if part)
    return f"| `{option}{' ' if value else ''}{value}` | {meaning} |\n"


def table(groups: list[str]) -> str:
    found = [
        row(name, option.flag)
        for options in (ENGINE, SAMPLING)
        for name, option in options.items()
        if option.flag is not None and option.flag.group in groups
    ]
    return "".join(["| option | |\n", "| --- | --- |\n", *found])


def written(text: str) -> str:
    """The page with its tables as they are now."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}{table(match[2].split(', '))}{match[3]}"

    return _TABLE.sub(replaced, text)


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
