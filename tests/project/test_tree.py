"""Rules of the tree that a compiler does not check. Each failure names its remedy."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import source_tree

# The design says 2 000; recurrent states, the chunk store, buffers and transfers between processes,
# the engine's thread, blending, stores for other engines and prompts from other processes took the
# rest.
PUBLIC_HEADER_LINES_MAX = 4130
FILE_BYTES_MAX = 1 << 20
COLUMNS_MAX = 100
# Folders whose text is code: what is written there is finished.
CODE = ("src", "include", "python", "tests", "bench", "fuzz", "examples", "cmake", "tools")
_LEFT_OVER = re.compile(
    "|".join(
        [
            r"\bTO" r"DO\b",
            r"\bFIX" r"ME\b",
            r"\bXX" r"X\b",
            r"\bBOOT" r"STRAP\b",
            r"not (?:yet )?imple" r"mented",
            r"not written" r" yet",
            r"\bst" r"ub(?:s|bed)?\b",
        ]
    )
)


def tvm_ffi_include_flags() -> list[str]:
    """tvm-ffi's headers, as system headers: their warnings are not ours."""
    result = subprocess.run(
        [sys.executable, "-m", "tvm_ffi.config", "--cxxflags"],
        check=True,
        capture_output=True,
        text=True,
    )
    folders = re.findall(r"-I(\S+)", result.stdout)
    assert folders
    return [flag for folder in folders for flag in ("-isystem", folder)]


def first_includes() -> set[str]:
    """What sources include before all else: that it compiles alone is shown by a build without
    --once. Tests have precompiled headers before it."""
    sources = [
        path
        for path in source_tree.cpp_files("src", "tests")
        if path.suffix == ".cc" and not path.name.endswith("_test.cc")
    ]
    texts = (source_tree.read(path) for path in sources)
    found = (re.search(r"^#include (.*)$", text, re.MULTILINE) for text in texts)
    return {match[1].strip('"') for match in found if match and match[1].startswith('"')}


def test_every_header_compiles_alone():
    # *-inl.h are parts of a source: they are included several times, once per instruction set.
    shown = first_includes()
    headers = [
        path
        for path in source_tree.cpp_files("include", "src")
        if path.suffix == ".h" and not path.name.endswith("-inl.h")
        if str(path).split("/", 1)[1] not in shown
    ]
    assert shown
    flags = [
        "-std=c++20",
        *source_tree.warning_flags(),
        "-DQUIRE_SIMD=1",
        f"-I{source_tree.ROOT}/include",
        f"-I{source_tree.ROOT}/src",
        *tvm_ffi_include_flags(),
    ]

    def errors_of(header: Path) -> str:
        unit = f'#include "{source_tree.ROOT / header}"\n'
        result = subprocess.run(
            ["g++", *flags, "-fsyntax-only", "-x", "c++", "-"],
            input=unit,
            capture_output=True,
            text=True,
            check=False,
        )
        return (
            f"{header} does not compile alone; include what it uses:\n{result.stderr}"
            if result.returncode
            else ""
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = list(filter(None, pool.map(errors_of, headers)))
    assert len(headers) > 20
    assert not errors, "\n".join(errors)


def test_no_line_is_wide():
    """C++ everywhere, and Python but for tests. A remark for a tool may stand behind."""
    wide = []
    lines = 0
    for path in source_tree.files():
        is_python = path.suffix == ".py" and path.parts[0] != "tests"
        if not is_python and path.suffix not in (".h", ".cc"):
            continue
        for number, line in enumerate(source_tree.read(path).splitlines(), 1):
            lines += 1
            if len(re.sub(r" +# (?:type: ignore|noqa).*$", "", line)) > COLUMNS_MAX:
                wide.append(f"{path}:{number}: {len(line)} columns, at most {COLUMNS_MAX}")
    assert lines > 100_000
    assert not wide, "\n".join(wide)


def test_header_guards_are_named_after_their_path():
    wrong = []
    for path in source_tree.cpp_files("include", "src"):
        if path.suffix != ".h" or path.name.endswith("-inl.h"):
            continue
        below = "/".join(path.parts[2:] if path.parts[0] == "include" else path.parts[1:])
        guard = "QUIRE_" + re.sub(r"[^A-Z0-9]", "_", below.upper()) + "_"
        if f"#ifndef {guard}\n#define {guard}\n" not in source_tree.read(path):
            wrong.append(f"{path}: begin it with #ifndef {guard}")
    assert not wrong, "\n".join(wrong)


def test_public_headers_stay_short():
    lines = sum(source_tree.read(path).count("\n") for path in source_tree.cpp_files("include"))
    assert lines <= PUBLIC_HEADER_LINES_MAX, (
        f"include/quire has {lines} lines, at most {PUBLIC_HEADER_LINES_MAX}: move what embedders need not see into src"
    )


def test_nothing_is_left_to_be_written():
    found = []
    for path in source_tree.files():
        if path.parts[0] not in CODE and path.name not in ("CMakeLists.txt", "run", "test"):
            continue
        raw = (source_tree.ROOT / path).read_bytes()
        if b"\0" in raw:
            continue
        for number, line in enumerate(raw.decode().splitlines(), 1):
            if _LEFT_OVER.search(line):
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found, "finish these, or say in plain words what holds:\n" + "\n".join(found)


def test_no_file_is_large():
    large = [
        f"{path} ({size} bytes)"
        for path in source_tree.files()
        if (size := (source_tree.ROOT / path).stat().st_size) > FILE_BYTES_MAX
    ]
    assert not large, f"weights, builds and results are not committed; ignore or remove: {large}"


def test_no_built_file_is_listed():
    built = [
        str(path)
        for path in source_tree.files()
        if path.suffix in (".so", ".o", ".a", ".pyc", ".gguf", ".safetensors", ".whl")
        or any(part.endswith(("_cache", "__pycache__", ".egg-info")) for part in path.parts)
    ]
    assert not built, f"made by tools; name them in .gitignore: {built}"


def test_every_source_is_built():
    """A file that no CMakeLists.txt names is dead."""
    dead = []
    all_lists = "\n".join(
        source_tree.read(path)
        for path in source_tree.files()
        if path.name == "CMakeLists.txt" or path.suffix == ".cmake"
    )
    for path in source_tree.cpp_files("src", "tests", "fuzz", "bench", "examples"):
        lists = [
            parent / "CMakeLists.txt"
            for parent in path.parents
            if (source_tree.ROOT / parent / "CMakeLists.txt").is_file()
        ]
        # Examples are listed without their suffix.
        name = re.compile(rf"(?<![\w-]){re.escape(path.stem)}(?:\.cc)?(?![\w.-])")
        is_named = any(name.search(source_tree.read(listing)) for listing in lists[:2])
        is_named |= f"/{path.parent.name}/{path.name}" in all_lists
        if path.suffix == ".cc" and not is_named:
            dead.append(f"{path}: name it in {lists[0]} or remove it")
    assert not dead, "\n".join(dead)


def test_every_header_is_included():
    text = "\n".join(source_tree.read(path) for path in source_tree.cpp_files(*CODE))
    unused = []
    for path in source_tree.cpp_files("src"):
        if path.suffix == ".h" and f'#include "{"/".join(path.parts[1:])}"' not in text:
            unused.append(f"{path}: nothing includes it; remove it")
    assert not unused, "\n".join(unused)


_FOLDERS = "|".join([*CODE, "docs", "requirements"])
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./*{{}},-]*)`|\]\((?!https?:|#)([^)#\s]+)[^)]*\)")


def missing_names(page: Path, text: str) -> list[str]:
    """Paths that a page names in backquotes (from the root) or links to (from its folder), and that
    are not there. Programs in it are none of this: a C++ lambda looks like a link."""
    missing = []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for from_root, link in _PATH.findall(prose):
        base = source_tree.ROOT if from_root else (source_tree.ROOT / page).parent
        for name in expand_braces(from_root or link):
            if not glob.glob(str(base / name)):
                missing.append(f"{page}: names {name}, which is not there")
    return missing


def expand_braces(name: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", name)
    if not match:
        return [name]
    return [
        whole
        for part in match[1].split(",")
        for whole in expand_braces(name[: match.start()] + part.strip() + name[match.end() :])
    ]


def test_pages_name_only_what_is_there():
    pages = [path for path in source_tree.files() if path.suffix == ".md"]
    assert Path("README.md") in pages
    missing = [line for page in pages for line in missing_names(page, source_tree.read(page))]
    assert not missing, "correct the page or the name:\n" + "\n".join(missing)


def test_a_missing_name_is_noticed():
    page = Path("docs/architecture.md")
    assert not missing_names(
        page, "`src/kv/` `src/{base,kv/pages}/*.cc` [a](../README.md#x) [b](https://example.org/x)"
    )
    assert len(missing_names(page, "`src/nowhere.cc` `src/{base,nowhere}/` [a](nowhere.md)")) == 3
