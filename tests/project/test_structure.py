"""The tree in the large: how many files a folder has, how long a function is, what each folder of
src says of itself. It prints how many lines are product and how many are tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import source_tree

FILES_OF_A_FOLDER_MAX = 60
FUNCTION_LINES_MAX = 70
README_LINES_MAX = 15
# Longer ones that stay as they are; the numbers only go down. Weigh: one loop whose order of sums is
# that of docs/exactness.md, and whose registers a call would spill.
LONG_FUNCTIONS = {"src/kernels/cpu/chain-inl.h": 73}

_CLASS = re.compile(r"^(?:template <.*> )?(?:class|struct|union)\b")
_OTHER = re.compile(
    r"^(?:namespace|enum|using|typedef|extern|static_assert|public:|private:|protected:|#|//|\}|\)|\])"
)


def is_test(path: Path) -> bool:
    return (
        path.parts[0] in ("tests", "fuzz")
        or "testing" in path.parts
        or "testdata" in path.parts
        or bool(re.search(r"_(?:test|bench)$", path.stem))
    )


def functions_of_cpp(text: str) -> list[tuple[int, int]]:
    """(first line, number of lines) of each function with a body of several lines. clang-format
    puts the brace that closes it under the line that begins its declaration."""
    return sorted(_functions_within(text.split("\n"), 0, 0, len(text.split("\n"))))


def _functions_within(lines: list[str], indent: int, begin: int, end: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    spaces = " " * indent
    at = begin
    while at < end:
        line = lines[at]
        own = line[indent:]
        starts = line.startswith(spaces) and own[:1] not in ("", " ")
        if not starts or _OTHER.match(own):
            at += 1
            continue
        first = at
        while at < end and not lines[at].rstrip().endswith((";", "{", "}", "\\")):
            at += 1
        if at >= end or not lines[at].endswith("{"):
            at += 1
            continue
        closing = next(
            (i for i in range(at + 1, end) if re.match(rf"{spaces}\}}(?!\w)", lines[i])), end
        )
        declaration = " ".join(line.strip() for line in lines[first : at + 1])
        if _CLASS.match(declaration):
            found += _functions_within(lines, indent + 2, at + 1, closing)
        elif "(" in declaration and not re.search(r"[^=!<>]=\s*(?:\{|\[)", declaration):
            found.append((first + 1, closing - first + 1))
        at = closing + 1
    return found


def functions_of_python(text: str) -> list[tuple[int, int]]:
    return [
        (node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_no_folder_has_too_many_files():
    counts = Counter(path.parent for path in source_tree.files())
    large = [
        f"{folder} has {count} files, at most {FILES_OF_A_FOLDER_MAX}: give a subject a folder"
        for folder, count in counts.items()
        if count > FILES_OF_A_FOLDER_MAX
    ]
    assert len(counts) > 50
    assert not large, "\n".join(large)


def test_no_function_is_too_long():
    found = 0
    long = []
    for path in source_tree.files():
        if path.suffix in (".cc", ".h"):
            functions = functions_of_cpp(source_tree.read(path))
        elif path.suffix == ".py":
            functions = functions_of_python(source_tree.read(path))
        else:
            continue
        found += len(functions)
        if is_test(path):
            continue
        long += [
            f"{path}:{line}: {count} lines, at most {FUNCTION_LINES_MAX}: give a part a name"
            for line, count in functions
            if count > LONG_FUNCTIONS.get(str(path), FUNCTION_LINES_MAX)
        ]
    assert found > 5000, "the reader of functions has lost most of them"
    assert not long, "\n".join(long)


def test_every_folder_of_src_says_what_it_is():
    folders = {
        path.parent
        for path in source_tree.cpp_files("src")
        if path.suffix in (".cc", ".h") and "testdata" not in path.parts
    }
    wrong = []
    for folder in sorted(folders):
        readme = source_tree.ROOT / folder / "README.md"
        if not readme.is_file():
            wrong.append(f"{folder} has no README.md: subject, what it uses, where to start")
        elif (lines := len(readme.read_text().splitlines())) > README_LINES_MAX:
            wrong.append(f"{folder}/README.md has {lines} lines, at most {README_LINES_MAX}")
    assert len(folders) > 40
    assert not wrong, "\n".join(wrong)


def test_lines_of_product_and_tests_are_printed(record_property):
    lines: Counter[str] = Counter()
    for path in source_tree.files():
        if path.suffix in (".cc", ".h", ".py"):
            kind = "test" if is_test(path) else "product"
            lines[kind] += source_tree.read(path).count("\n")
    for kind, count in lines.items():
        print(f"{kind} lines of C++ and Python: {count}")
        record_property(f"{kind}_lines", count)
    assert lines["product"] > 50_000 and lines["test"] > 50_000


def test_the_reader_of_functions_knows_what_it_reads():
    text = """
namespace quire {

// A comment (with a brace {).
Status Cache::Run(int a,
                  int b) {
  if (a) {
    b();
  }
}

struct Part {
  int Get() const { return 1; }
  int Count() const noexcept {
    return 2;
  }
};

Cache::Cache(int a)
    : a_(a),
      b_(a) {
  for (;;) {
  }
}

}  // namespace quire
"""
    assert functions_of_cpp(text) == [(5, 6), (14, 3), (19, 6)]
    assert functions_of_python("def f():\n    x = 1\n    return x\n") == [(1, 3)]
