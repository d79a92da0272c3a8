"""The checkout as the project's tests see it."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "build" / "release"


@functools.cache
def files() -> list[Path]:
    """Files that are or would be committed, relative to the root."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted({Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()})


def cpp_files(*folders: str) -> list[Path]:
    return [path for path in files() if path.parts[0] in folders and path.suffix in (".h", ".cc")]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def object_files() -> list[Path]:
    """What the library and the binding are linked from, as the release build has it."""
    found = sorted(RELEASE.glob("src/**/CMakeFiles/quire_*.dir/**/*.o"))
    assert found, f"{RELEASE} is not built: ./test release"
    return [path for path in found if not re.search(r"_(?:test|test_support|test_ffi|bench|fuzz)\.dir", str(path))]


def warning_flags() -> list[str]:
    """The -W flags of cmake/QuireTargets.cmake."""
    flags = re.findall(r"-W[a-z-]+", read(Path("cmake/QuireTargets.cmake")))
    assert "-Werror" in flags
    return list(dict.fromkeys(flags))
