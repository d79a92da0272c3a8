#!/usr/bin/env python3
"""The reference of the interfaces as HTML: docs.py [FOLDER]. tools/docs installs what it needs.

FOLDER/cpp is made by Doxygen of the public headers, whose plain // comments are turned into
Doxygen's form on the way (docs.py --filter HEADER prints one); FOLDER/python by pdoc of the
package's docstrings. Every link within FOLDER must lead to a file that exists. (Places within a
page are the generators': pdoc links to inherited methods that it shows without a place of their
own.)
"""

from __future__ import annotations

import argparse
import html.parser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

ROOT = Path(__file__).resolve().parents[1]
_DOXYGEN = """\
PROJECT_NAME = Quire
PROJECT_BRIEF = "KV-state engine for LLM serving: the C++ interface"
OUTPUT_DIRECTORY = "{out}"
HTML_OUTPUT = .
INPUT = "{root}/include/quire"
STRIP_FROM_PATH = "{root}/include"
STRIP_FROM_INC_PATH = "{root}/include"
INPUT_FILTER = "\\"{python}\\" \\"{script}\\" --filter"
EXTRACT_ALL = YES
GENERATE_LATEX = NO
HAVE_DOT = NO
MARKDOWN_SUPPORT = NO
MACRO_EXPANSION = YES
WARN_IF_DOC_ERROR = NO
WARN_IF_UNDOCUMENTED = NO
QUIET = YES
"""
_INDEX = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Quire: reference</title></head>
<body><h1>Quire: reference</h1>
<p><a href="cpp/index.html">C++: the public headers</a></p>
<p><a href="python/quire.html">Python: the package quire</a></p></body></html>
"""


def doxygen_comments(text: str) -> str:
    """A header with its // comments as /// (of what follows) and ///< (of what stands before).

    The comment at the head becomes that of the file. A comment line that is aligned with a comment
    behind code goes on with that one.
    """
    lines = []
    in_head, behind = True, -1
    for line in text.splitlines():
        code, comment = _split(line)
        if comment is None:
            in_head = in_head and not line.strip()
            behind = -1
            lines.append(line)
            continue
        column = len(code)
        if code.strip():
            in_head, behind = False, column
        mark = "///<" if behind == column else "///"
        if in_head:
            lines += ["/// \\file"] if not any(each.startswith("///") for each in lines) else []
        elif not code.strip() and behind != column:
            behind = -1
        # What Doxygen would take for markup of its own.
        escaped = re.sub(r"([\\@<>&#%])", r"\\\1", comment)
        lines.append(f"{code}{mark}{escaped}")
    return "\n".join(lines) + "\n"


def _split(line: str) -> tuple[str, str | None]:
    """The code of a line and the text of its // comment."""
    match = re.match(r'((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?!/))*)//(.*)$', line)
    return (match[1], match[2]) if match else (line, None)


class _Page(html.parser.HTMLParser):
    """The links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def broken_links(folder: Path) -> list[str]:
    """"page: link" of each link to a file of the folder that is not there."""
    broken = []
    for path in sorted(folder.rglob("*.html")):
        for link in _Page(path.read_text(encoding="utf-8", errors="replace")).links:
            name = unquote(urldefrag(link)[0])
            if name and not urlparse(link).scheme and not (path.parent / name).exists():
                broken.append(f"{path.relative_to(folder)}: {link}")
    return broken


def build_cpp(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).resolve()
    config = _DOXYGEN.format(out=out, root=ROOT, python=sys.executable, script=script)
    subprocess.run(["doxygen", "-"], input=config, text=True, check=True)


def build_python(out: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-m", "pdoc", "--docformat", "google", "-o", str(out), "quire"]
    subprocess.run(command, env=environment, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--filter", type=Path, metavar="HEADER", help="print what Doxygen reads")
    options = parser.parse_args()
    if options.filter is not None:
        sys.stdout.write(doxygen_comments(options.filter.read_text(encoding="utf-8")))
        return 0
    folder: Path = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    build_cpp(folder / "cpp")
    build_python(folder / "python")
    (folder / "index.html").write_text(_INDEX, encoding="utf-8")
    broken = broken_links(folder)
    for line in broken:
        print(f"leads nowhere: {line}", file=sys.stderr)
    print(f"{folder}/index.html")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
