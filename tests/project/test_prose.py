"""Plain technical English in comments, docstrings, messages and pages: subject first, verb second.

The rules below find habits that a newcomer stumbles over. prose_allowed.json has, per folder, how many
of each are left from earlier; a folder that is not in it must be clean, and the numbers may only
shrink: `python tests/project/test_prose.py` writes what is there now, never more.
"""

from __future__ import annotations

import ast
import collections
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import source_tree

ALLOWED = Path("tests/project/prose_allowed.json")
PAGE_COLUMNS_MAX = 100
README_LINES_MAX = 90
# Rule -> (what it finds in a run of prose, what to write instead).
RULES = {
    "of": (
        re.compile(r"(?:^|[.!?:] )Of (?!course\b)"),
        'begin with the subject: "Scratch buffers for a commit", not "Of a commit"',
    ),
    "its": (re.compile(r"\bits(?=[.;:!?)]|$)"), 'name the thing: "that of the page", not "its."'),
    "so many": (
        re.compile(r"\b[Ss]o (?:many|much)\b(?! (?:that|as)\b)"),
        'give the number or its name: "n tokens", "that number of pages"',
    ),
    "who": (
        re.compile(r"\b[Ww]ho(?:ever|m)?\b"),
        'name the caller, thread or class: "the thread that ...", "a caller that ..."',
    ),
    "anew": (re.compile(r"\banew\b"), 'write "again", or say what is recomputed'),
    "none of": (
        re.compile(r"\bnone of (?:ours|theirs|its)\b|\b[Oo]f use to nobody\b"),
        "say what it is, not what it is not",
    ),
}
# Their sentences are also in messages; the others look at comments and pages alone.
_IN_MESSAGES = ("so many", "who", "anew", "none of")
_FOLDERS = ("src", "include", "python", "docs", "examples")


def cpp_prose(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, prose, whether it is a message) of each run of // comments and each string literal."""
    run: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        code, comment = split_cpp_line(line)
        if comment is not None and not code.strip():
            start = start or number
            run.append(comment)
            continue
        if run:
            yield from paragraphs(start, run)
            run, start = [], 0
        if comment is not None:  # behind code: a line of its own, or the first of several
            run, start = [comment], number
        for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', code):
            yield number, literal, True


def split_cpp_line(line: str) -> tuple[str, str | None]:
    """The code of a line, and the text of its // comment."""
    in_string = False
    for i, c in enumerate(line):
        if c == '"' and (i == 0 or line[i - 1] != "\\"):
            in_string = not in_string
        if not in_string and line.startswith("//", i):
            return line[:i], line[i + 2 :].strip()
    return line, None


def paragraphs(start: int, lines: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Runs of lines without an empty one between them, each as one line of prose."""
    part: list[str] = []
    for offset, line in enumerate([*lines, ""]):
        if line.strip():
            part.append(line.strip())
        elif part:
            yield start + offset - len(part), " ".join(part), False
            part = []


def python_prose(text: str) -> Iterator[tuple[int, str, bool]]:
    run: list[str] = []
    last = 0
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    for token in tokens:
        if token.type == tokenize.COMMENT:
            if run and token.start[0] != last + 1:
                yield from paragraphs(last - len(run) + 1, run)
                run = []
            run.append(token.string.lstrip("#").strip())
            last = token.start[0]
    if run:
        yield from paragraphs(last - len(run) + 1, run)
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield from paragraphs(node.lineno, node.value.splitlines())
            else:
                yield node.lineno, node.value, True


def page_prose(text: str) -> Iterator[tuple[int, str, bool]]:
    run: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        fenced ^= is_fence
        is_item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if fenced or is_fence or line.startswith(("    ", "|", "#")) or not line.strip() or is_item:
            yield from paragraphs(start, run)
            run, start = [], number + 1
        if is_item:
            run, start = [line[is_item.end() :]], number
        elif line.startswith("|"):
            for cell in line.strip("|").split("|"):
                yield number, cell.strip(), False
        elif not (fenced or is_fence or line.startswith(("    ", "#"))) and line.strip():
            run.append(line)


def prose(path: Path, text: str) -> Iterator[tuple[int, str, bool]]:
    if path.suffix in (".h", ".cc"):
        return cpp_prose(text)
    return python_prose(text) if path.suffix == ".py" else page_prose(text)


def findings(path: Path, text: str) -> list[tuple[str, str]]:
    """(rule, a line that says where) of all that the rules find in a file."""
    found = []
    for number, words, is_message in prose(path, text):
        plain = re.sub(r"`[^`]*`", "x", words)
        for rule, (pattern, remedy) in RULES.items():
            if is_message and rule not in _IN_MESSAGES:
                continue
            for match in pattern.finditer(plain):
                near = plain[max(0, match.start() - 30) : match.end() + 30]
                found.append((rule, f"{path}:{number}: ...{near}...: {remedy}"))
    if path.suffix == ".md":
        found += [
            ("columns", f"{path}:{number}: {len(line)} columns, at most {PAGE_COLUMNS_MAX}")
            for number, line in enumerate(without_code(text).splitlines(), 1)
            if len(line) > PAGE_COLUMNS_MAX and not line.startswith("|")
        ]
    return found


def without_code(text: str) -> str:
    """The page with the lines of its code blocks empty."""
    text = re.sub(
        r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def checked_files() -> list[Path]:
    return [
        path
        for path in source_tree.files()
        if (path.suffix in (".h", ".cc", ".py") and path.parts[0] in _FOLDERS)
        or (path.suffix == ".md" and path.parts[0] != "tests")
    ]


def folder_of(path: Path) -> str:
    """Files may move within a layer, so layers are counted: src/kv, python/quire, docs."""
    return "/".join(path.parts[:-1][:2]) or "."


def all_findings() -> dict[str, dict[str, list[str]]]:
    """Folder -> rule -> findings."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in checked_files():
        for rule, where in findings(path, source_tree.read(path)):
            found.setdefault(folder_of(path), {}).setdefault(rule, []).append(where)
    return found


def test_prose_is_plain():
    allowed = json.loads(source_tree.read(ALLOWED))
    too_many = []
    for folder, rules in all_findings().items():
        for rule, where in rules.items():
            limit = allowed.get(folder, {}).get(rule, 0)
            if len(where) > limit:
                head = f"{folder}: {len(where)} of the rule '{rule}', at most {limit}; all of them:"
                too_many += [head, *where]
    assert not too_many, "\n".join(too_many)


def test_the_readme_is_for_a_newcomer():
    lines = source_tree.read(Path("README.md")).count("\n")
    assert lines <= README_LINES_MAX, f"README.md has {lines} lines: what is more goes to docs/"


def test_the_rules_themselves():
    bad = {
        "of": ["// Of a commit.", "// The rest. Of the\n// kernels, as wanted."],
        "its": ["// Adds the file; `file` is its.", "// (the lengths are its)"],
        "so many": ["// It loads so many tokens.", 'Fail("so much memory");'],
        "who": ["// Whoever reads it waits.", "// who has it"],
        "anew": ["// It counts anew.", 'Fail("planned anew");'],
        "none of": ["// A fault that is none of ours."],
    }
    for rule, texts in bad.items():
        for text in texts:
            assert [found for found, _ in findings(Path("x.cc"), text)] == [rule], text
    good = "// Of course its end. so many that it fails\nint x;  // one\n// its\n// own\nf(\"Of\");\n"
    assert findings(Path("x.cc"), good) == []
    assert [r for r, _ in findings(Path("x.py"), 'def f():\n    """Of a page."""\n')] == ["of"]
    assert [r for r, _ in findings(Path("x.py"), "x = 1  # Whoever\nf('anew')\n")] == ["who", "anew"]
    page = "Text.\n\n    code who\n\n```\nwho\n```\n\n- Of an item\n\n| Of a cell | b |\n" + "x" * 101
    assert [r for r, _ in findings(Path("x.md"), page)] == ["of", "of", "columns"]


def write_allowed() -> None:
    """Lowers the numbers to what is there now. A folder or rule that is not listed stays out."""
    old = json.loads(source_tree.read(ALLOWED))
    now = all_findings()
    new: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for folder, rules in sorted(old.items()):
        for rule, limit in sorted(rules.items()):
            count = min(limit, len(now.get(folder, {}).get(rule, [])))
            if count:
                new[folder][rule] = count
    (source_tree.ROOT / ALLOWED).write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_allowed()
