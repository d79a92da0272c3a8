#!/usr/bin/env python3
"""Writes the tables of options in docs: option_tables.py.

A table stands between a line "<!-- options: GROUP, ... -->" and the next line "<!-- end -->".
Groups are those of python/quire/_options.py; "own of serve" has the options that `quire serve`
alone has, "quire.ChunkStore" the keywords of that class.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(ROOT / "docs" / name for name in ("program.md", "serve.md", "store.md"))
OWN_OF_SERVE = "own of serve"
KEYWORDS_OF_STORE = "quire.ChunkStore"
sys.path.insert(0, str(ROOT / "python"))

from quire._options import ENGINE, SAMPLING, STORE, Flag  # noqa: E402
from quire.cli import arguments, serve  # noqa: E402

_TABLE = re.compile(r"(<!-- options: ([\w., ]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def row(name: str, flag: Flag) -> str:
    option = flag.name or "--" + name.replace("_", "-")
    value = flag.metavar or r"\|".join(flag.choices or ())
    meaning = ". ".join(part for part in (flag.help, flag.more) if part)
    return f"| `{option}{' ' if value else ''}{value}` | {meaning} |\n"


def own_of_serve() -> list[str]:
    """Rows of the options that `quire serve` alone has, in the order of its --help."""
    shared = arguments.Parser()
    arguments.add_engine(shared)
    arguments.add_store(shared)
    arguments.add_peers(shared)
    known = {name for action in shared._actions for name in action.option_strings}
    rows = []
    for action in serve.parser()._actions:
        names = [name for name in action.option_strings if name not in known and name[:2] == "--"]
        if names and names != ["--help"]:
            value = action.metavar or r"\|".join(action.choices or ())
            space = " " if value else ""
            help = str(action.help).replace("|", r"\|").replace("*", r"\*")
            rows.append(f"| `{names[0]}{space}{value}` | {help} |\n")
    return rows


def keywords_of_store() -> str:
    rows = [
        f"| `{name}` | `{option.default!r}` | {option.doc.replace(':func:', '').rstrip('.')} |\n"
        for name, option in STORE.items()
    ]
    return "".join(["| option | default | |\n", "| --- | --- | --- |\n", *rows])


def table(groups: list[str]) -> str:
    if groups == [KEYWORDS_OF_STORE]:
        return keywords_of_store()
    found = own_of_serve() if groups == [OWN_OF_SERVE] else [
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
