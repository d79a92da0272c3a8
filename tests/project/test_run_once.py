"""./test --once: what it leaves out of the release build runs under the sanitizers, and what these leave
out, or do in part, runs in the release build."""

from __future__ import annotations

import re
from pathlib import Path

import source_tree

TEST = source_tree.read(Path("test"))
SUITE = re.compile(r"^TEST(?:_P|_F)?\((\w+),", re.MULTILINE)
PARTLY = re.compile(r"\bRoundsOf\(")


def array_of(name: str) -> list[str]:
    (items,) = re.findall(rf"^{name}=\((.*?)\)", TEST, re.MULTILINE | re.DOTALL)
    return items.split()


def left_out_suites() -> re.Pattern[str]:
    """What NOT_SANITIZED says of suites: its alternatives up to the dot before the case."""
    whole = "".join(re.findall(r"^NOT_SANITIZED\+?='(.*)'$", TEST, re.MULTILINE))
    heads = [part.split(r"\.")[0] for part in re.split(r"\|(?![^(]*\))", whole)]
    return re.compile("|".join(heads))


def missing(
    release: list[str], sanitized: list[str], left_out: re.Pattern[str], files: dict[str, str]
) -> list[str]:
    """Files with tests that no build has, or that the sanitized build alone has, and not in full."""
    found = []
    for path, text in files.items():
        folder = "/".join(path.split("/")[:2])
        if f"{folder}/all" in release or Path(path).stem in release:
            continue
        in_part = PARTLY.search(text) or any(map(left_out.search, SUITE.findall(text)))
        if in_part or folder not in sanitized:
            found.append(path)
    return found


def test_each_test_runs_in_full_in_one_of_the_two_builds():
    paths = [path for path in source_tree.cpp_files("src") if path.name.endswith("_test.cc")]
    files = {str(path): source_tree.read(path) for path in paths}
    assert len(files) > 150
    left_out = left_out_suites()
    for suite in ("KVExactness", "ModelExactness", "TokenTreeExactness", "KVWalk", "KVWideWalk"):
        assert left_out.search(suite), suite
    assert not left_out.search("BlockTree")
    found = missing(array_of("RELEASE_TARGETS"), array_of("SANITIZED_FOLDERS"), left_out, files)
    assert not found, f"neither build of ./test --once has all tests of {found}"


def test_a_missing_one_is_found():
    files = {
        "src/new/a_test.cc": "TEST(A, B) {",
        "src/kv/b_test.cc": "TEST_P(B, C) {",
        "src/kv/c_test.cc": "TEST_F(KVWalkKept, D) {",
        "src/kv/d_test.cc": "TEST(D, E) {\n  for (int64_t i = RoundsOf(8); i > 0; --i) {",
    }
    left_out = left_out_suites()
    assert missing([], ["src/kv"], left_out, files) == [*list(files)[:1], *list(files)[2:]]
    assert missing(["src/new/all", "c_test", "d_test"], ["src/kv"], left_out, files) == []
