"""Quire as others use it from CMake: installed and found, or added as a subdirectory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import source_tree

_CONSUMER = """\
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(quire 0.1 REQUIRED)
add_executable(consumer main.cc)
target_link_libraries(consumer PRIVATE quire::quire)
"""
_PARENT = """\
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES CXX)
add_subdirectory({root} quire)
get_directory_property(options COMPILE_OPTIONS)
message(STATUS "tests=${{QUIRE_TESTS}} options=[${{options}}] flags=[${{CMAKE_CXX_FLAGS}}]")
add_executable(consumer main.cc)
target_link_libraries(consumer PRIVATE quire::quire)
"""


def command(*arguments: object, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [str(item) for item in arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{arguments}:\n{result.stdout}{result.stderr}"
    return result.stdout


def readme_program() -> str:
    blocks = re.findall(
        r"^```cpp\n(.*?)^```", source_tree.read(Path("README.md")), re.MULTILINE | re.DOTALL
    )
    programs = [block for block in blocks if "int main(" in block]
    assert programs, "README.md shows no C++ program"
    return programs[0]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """The release build, installed somewhere else."""
    folder = tmp_path_factory.mktemp("prefix")
    command("cmake", "--install", source_tree.RELEASE, "--prefix", folder)
    return folder


def test_an_installed_quire_is_found_and_runs_the_readme(tmp_path, prefix):
    (tmp_path / "CMakeLists.txt").write_text(_CONSUMER)
    (tmp_path / "main.cc").write_text(readme_program())
    command(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        tmp_path,
        "-B",
        tmp_path / "build",
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    command("cmake", "--build", tmp_path / "build")
    assert command(tmp_path / "build" / "consumer", cwd=tmp_path).strip()


def test_an_installation_does_not_point_back(prefix):
    """No path of the source or build folder in the installed CMake files."""
    for path in prefix.rglob("*.cmake"):
        assert str(source_tree.ROOT) not in path.read_text(), path


def test_the_installed_headers_are_the_public_ones(prefix):
    installed = {path.name for path in (prefix / "include").rglob("*.h")}
    assert installed == {path.name for path in source_tree.cpp_files("include")}


def test_a_subproject_changes_nothing_for_its_parent(tmp_path):
    """Configured only: no tests of ours, no flags on the parent's targets."""
    (tmp_path / "CMakeLists.txt").write_text(_PARENT.format(root=source_tree.ROOT))
    (tmp_path / "main.cc").write_text("int main() {}\n")
    output = command("cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build")
    assert "tests=OFF options=[] flags=[]" in output
    targets = command("ninja", "-C", tmp_path / "build", "-t", "targets", "all")
    assert "_test" not in targets
    consumer = command(
        "ninja", "-C", tmp_path / "build", "-t", "commands", "CMakeFiles/consumer.dir/main.cc.o"
    )
    assert "-Werror" not in consumer
    assert "-ffp-contract" not in consumer
