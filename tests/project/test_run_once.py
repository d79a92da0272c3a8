"""./test --once: what it leaves out of the release build runs under the sanitizers, and the other way
round."""

from __future__ import annotations

import re
from pathlib import Path

import source_tree

TEST = source_tree.read(Path("test"))
TEST_CASE = re.compile(r"^TEST(?:_P|_F)?\((\w+),", re.MULTILINE)


def array_of(name: str) -> list[str]:
    (items,) = re.findall(rf"^{name}=\((.*?)\)", TEST, re.MULTILINE | re.DOTALL)
    return items.split()


def programs() -> dict[str, set[str]]:
    """The suites of each file with tests."""
    paths = [path for path in source_tree.cpp_files("src") if path.name.endswith("_test.cc")]
    return {str(path): set(TEST_CASE.findall(source_tree.read(path))) for path in paths}


def missing(release: list[str], sanitized: list[str], files: dict[str, set[str]]) -> list[str]:
    """Files with tests that are in no folder of either build, and those of which the sanitized build
    leaves suites to a release build that has not got them."""
    only_release = re.compile(r"^(KVExactness|ModelExactness|TokenTreeExactness|KV(Wide)?Walk.*)$")
    found = []
    for path, suites in files.items():
        folder = "/".join(path.split("/")[:2])
        in_release = f"{folder}/all" in release or Path(path).stem in release
        left_out = any(map(only_release.match, suites))
        if not in_release and (left_out or folder not in sanitized):
            found.append(path)
    return found


def test_each_test_runs_in_one_of_the_two_builds():
    files = programs()
    release, sanitized = array_of("RELEASE_TARGETS"), array_of("SANITIZED_FOLDERS")
    assert len(files) > 150
    assert not missing(release, sanitized, files)
    for suite in ("KVExactness", "ModelExactness", "TokenTreeExactness", "KVWalk"):
        assert any(suite in suites for suites in files.values()), suite
        assert suite in TEST or suite.removeprefix("KV") in TEST, f"{suite} of NOT_SANITIZED"


def test_a_missing_one_is_found():
    files = {
        "src/new/a_test.cc": {"A"},
        "src/kv/b_test.cc": {"B"},
        "src/kv/c_test.cc": {"KVWalkKept"},
    }
    found = missing(["c_test"], ["src/kv"], files)
    assert found == ["src/new/a_test.cc"]
    assert missing(["src/new/all"], ["src/kv"], files) == ["src/kv/c_test.cc"]
