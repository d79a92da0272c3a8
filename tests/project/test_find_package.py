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
set(module_path "${CMAKE_MODULE_PATH}")
@README@
if(NOT CMAKE_MODULE_PATH STREQUAL module_path OR DEFINED OPENSSL_USE_STATIC_LIBS OR _quire_module_path)
  message(FATAL_ERROR "find_package(quire) changes variables of its caller")
endif()
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


# 100 tokens of sequence 0 and 90 of its fork.
README_OUTPUT = "ok: 190 tokens\n"


def command(*arguments: object, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [str(item) for item in arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{arguments}:\n{result.stdout}{result.stderr}"
    return result.stdout


def readme_block(language: str, containing: str) -> str:
    """The first code block of README.md in this language with that text in it."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```", source_tree.read(Path("README.md")), re.MULTILINE | re.DOTALL
    )
    found = [block for block in blocks if containing in block]
    assert found, f"README.md has no {language} block with {containing}"
    return found[0]


def readme_program() -> str:
    return readme_block("cpp", "int main(")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """The release build, installed somewhere else."""
    folder = tmp_path_factory.mktemp("prefix")
    command("cmake", "--install", source_tree.RELEASE, "--prefix", folder)
    return folder


def test_an_installed_quire_is_found_and_runs_the_readme(tmp_path, prefix):
    lines = readme_block("cmake", "find_package(quire")
    (tmp_path / "CMakeLists.txt").write_text(_CONSUMER.replace("@README@", lines))
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
    assert command(tmp_path / "build" / "app", cwd=tmp_path) == README_OUTPUT


def test_pkg_config_builds_and_runs_the_readme(tmp_path, prefix):
    """The archive with what it needs, from an installation that was moved."""
    (tmp_path / "main.cc").write_text(readme_program())
    found = list(prefix.rglob("quire.pc"))
    assert len(found) == 1
    flags = command(
        "env", f"PKG_CONFIG_PATH={found[0].parent}", "pkg-config", "--static", "--cflags", "--libs", "quire"
    )
    command("g++", "-std=c++20", "main.cc", "-o", "consumer", *flags.split(), cwd=tmp_path)
    assert command(tmp_path / "consumer", cwd=tmp_path) == README_OUTPUT


def test_a_build_without_options_needs_no_library_of_theirs(tmp_path):
    """Configured with what the options leave out forbidden, and its smallest file compiled."""
    build = tmp_path / "build"
    options = [f"-DQUIRE_{name}=OFF" for name in ("REDIS", "TLS", "IO_URING")]
    forbidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("hiredis", "uring")]
    command("cmake", "-G", "Ninja", "-S", source_tree.ROOT, "-B", build, *options, *forbidden)
    commands = command("ninja", "-C", build, "-t", "commands")
    assert not re.search(r"hiredis|liburing|libssl|redis_tier|redis_tls|tls_session|-Werror", commands)
    files = (("redis", "redis_left_out"), ("disk", "uring_left_out"), ("disk", "file_queue"))
    objects = [
        f"src/store/{tier}/CMakeFiles/quire_store_{tier}.dir/{name}.cc.o" for tier, name in files
    ]
    command("ninja", "-C", build, *objects, "src/chunk/CMakeFiles/quire_chunk.dir/sha256.cc.o")


_ASKS_FOR_WHAT_IS_LEFT_OUT = """\
#include <cstdio>
#include "store/redis/redis_tier.h"
#include "net/tls_session.h"
int main() {
  std::puts(quire::CreateRedisTier({}, "", nullptr).status().ToString().c_str());
  std::puts(quire::TlsContext::Create({}).status().ToString().c_str());
}
"""


def test_what_is_left_out_is_refused_by_the_name_of_its_option(tmp_path):
    (tmp_path / "main.cc").write_text(_ASKS_FOR_WHAT_IS_LEFT_OUT)
    sources = ["store/redis/redis_left_out.cc", "net/tls_left_out.cc", "base/status.cc", "base/check.cc"]
    folders = [f"-I{source_tree.ROOT / name}" for name in ("include", "src")]
    paths = [source_tree.ROOT / "src" / name for name in sources]
    command("g++", "-std=c++20", *folders, "main.cc", *paths, "-o", "main", cwd=tmp_path)
    redis, tls = command(tmp_path / "main").splitlines()
    assert redis.startswith("BadArgument") and redis.endswith("-DQUIRE_REDIS=ON")
    assert tls.startswith("BadArgument") and tls.endswith("-DQUIRE_TLS=ON")


def test_the_version_header_is_the_projects() -> None:
    declared = re.search(r"VERSION (\d+)\.(\d+)\.(\d+)", source_tree.read(Path("CMakeLists.txt")))
    assert declared is not None
    header = source_tree.read(Path("include/quire/version.h"))
    numbers = re.findall(r"^#define QUIRE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.MULTILINE)
    assert tuple(numbers) == declared.groups()


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
    assert "-Werror" not in output + command("ninja", "-C", tmp_path / "build", "-t", "commands")
    assert "-ffp-contract" not in consumer
