"""Whether the tests notice changes of one line: tools/mutants [--list | --check | NAME...].

tools/mutants.toml lists the changes and the tests that are expected to notice them. They are made
one by one in a copy of the working tree, build/mutants/tree, whose scalar build takes unchanged
objects from ccache. Mutants of Python files have tests of pytest, which run with the library of the
working tree's release build. A mutant is killed if one of its tests fails, ends by a signal or
takes too long; it survives if all pass. Results are kept in build/mutants/results.json: an
interrupted run goes on where it was (--again forgets them). The table in docs/testing.md is written
with --write.

Exit code 0: all chosen mutants were killed. 1: one survived, or could not be made, built or run.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
PAGE = ROOT / "docs" / "testing.md"
FOLDER = ROOT / "build" / "mutants"
BEGIN = "<!-- mutants: written by tools/mutants --write -->"
END = "<!-- end of mutants -->"
HEAD = "| mutant | file | killed by |"
NOT_RUN = "not run yet"
AREAS = ("kv", "kernels", "chunk", "store", "transfer", "engine", "blend")
PYTHON_AREAS = ("serve",)
SECONDS_MAX = 300  # of one test program
LIBRARY = ROOT / "build" / "release" / "src" / "ffi" / "libquire_ffi.so"
PYTEST_FAILED = 1  # exit code: tests have run, and one has failed

_KEYS = {"name", "area", "file", "old", "new", "tests", "occurrence"}
# A result holds until one of these changes.
_BUILT = ("CMakeLists.txt", "CMakePresets.json", "cmake/", "include/", "src/")
_PYTHON = (*_BUILT, "python/", "tests/python/")


class MutantError(Exception):
    """A mutant that cannot be made, built or run, or a wrong list."""


@dataclass(frozen=True)
class Mutant:
    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    occurrence: int  # 0: `old` stands there once

    def applied_to(self, text: str) -> str:
        count = text.count(self.old)
        if self.occurrence == 0 and count != 1:
            raise MutantError(f"{self.name}: `old` stands in {self.file} {count} times, not once")
        if self.occurrence > count:
            raise MutantError(
                f"{self.name}: `old` stands in {self.file} {count} times; there is no "
                f"occurrence {self.occurrence}"
            )
        at = -1
        for _ in range(max(self.occurrence, 1)):
            at = text.index(self.old, at + 1)
        return text[:at] + self.new + text[at + len(self.old) :]

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py")

    def programs(self) -> list[tuple[str, str]]:
        """Test programs, each with a filter of gtest; files of pytest, each with a test's name."""
        if self.is_python:
            return [(file, case) for file, _, case in (t.partition("::") for t in self.tests)]
        pairs = [test.partition(":") for test in self.tests]
        return [(program, cases or "*") for program, _, cases in pairs]


@dataclass(frozen=True)
class Outcome:
    killed_by: str  # "program: case"; empty: it survived
    seconds: float
    tree: str  # digest without the mutant of what is built, or of the Python files


def read_mutants(path: Path = LIST) -> list[Mutant]:
    mutants = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        name = entry.get("name", "?")
        unknown = entry.keys() - _KEYS
        missing = _KEYS - {"occurrence"} - entry.keys()
        if unknown or missing:
            raise MutantError(f"{name}: unknown keys {sorted(unknown)}, missing {sorted(missing)}")
        if entry["area"] not in (every := AREAS + PYTHON_AREAS):
            raise MutantError(f"{name}: the area {entry['area']} is none of {', '.join(every)}")
        if not entry["old"] or entry["old"] == entry["new"] or not entry["tests"]:
            raise MutantError(f"{name}: it changes nothing, or names no test")
        tests = tuple(entry["tests"])
        occurrence = entry.get("occurrence", 0)
        mutants.append(Mutant(**{**entry, "tests": tests, "occurrence": occurrence}))
    names = [mutant.name for mutant in mutants]
    for name in names:
        if names.count(name) > 1:
            raise MutantError(f"{name}: two mutants have this name")
    return mutants


def test_programs(root: Path = ROOT) -> dict[str, str]:
    """The folder below the build folder of each test program."""
    found = {}
    for file in sorted(root.glob("src/**/CMakeLists.txt")):
        for name in re.findall(r"quire_test\((\w+)", file.read_text(encoding="utf-8")):
            found[name] = str(file.parent.relative_to(root))
    return found


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What cannot be made in this tree."""
    programs = test_programs(root)
    found = []
    for mutant in mutants:
        file = root / mutant.file
        try:
            if not file.is_file():
                raise MutantError(f"{mutant.name}: there is no {mutant.file}")
            mutant.applied_to(file.read_text(encoding="utf-8"))
            for program, case in mutant.programs():
                if mutant.is_python:
                    test = root / program
                    if not test.is_file() or f"def {case}(" not in test.read_text(encoding="utf-8"):
                        raise MutantError(f"{mutant.name}: there is no test {program}::{case}")
                elif program not in programs:
                    raise MutantError(f"{mutant.name}: there is no test program {program}")
        except MutantError as error:
            found.append(str(error))
    return found


# ---------------------------------------------------------------------- the copy


class Copy:
    """A copy of the working tree that is built and tested."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.tree = folder / "tree"
        self.build = self.tree / "build" / "scalar"
        self.log = folder / "log.txt"
        self.programs = test_programs()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # one run at a time: the tree is changed
        self._digests = self._synchronise()

    def digest(self, mutant: Mutant) -> str:
        """Of what the mutant's tests depend on."""
        return self._digests[mutant.is_python]

    def _synchronise(self) -> tuple[str, str]:
        """Takes over the files of the working tree; those that are equal keep their time."""
        listed = subprocess.run(
            ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        built, python = hashlib.sha256(), hashlib.sha256()
        wanted = set()
        for name in sorted(set(listed)):
            source = ROOT / name
            if not source.is_file():
                continue
            content = source.read_bytes()
            target = self.tree / name
            wanted.add(target)
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            for digest, begins in ((built, _BUILT), (python, _PYTHON)):
                if name.startswith(begins):
                    digest.update(f"{name}\0{len(content)}\0".encode())
                    digest.update(content)
        for folder in ("src", "include", "cmake", "tests", "docs", "python"):
            for old in (self.tree / folder).rglob("*"):
                if old.is_file() and old not in wanted:
                    old.unlink()
        return built.hexdigest()[:16], python.hexdigest()[:16]

    def _run(self, what: str, command: Sequence[str | Path]) -> None:
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.tree), "CCACHE_NOHASHDIR": "1"}
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            log.flush()
            done = subprocess.run(
                command, cwd=self.tree, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        if done.returncode != 0:
            raise MutantError(f"{what} failed; {self.log} ends with why")

    def _configure(self) -> None:
        if (self.build / "build.ninja").is_file():
            return
        command = ["cmake", "--preset", "scalar"]
        if shutil.which("ccache"):
            command.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        if shutil.which("mold"):
            command.append("-DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=mold")
        self._run("cmake", command)

    def compile(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Builds the test programs among these."""
        programs = [program for program, _ in pairs if program in self.programs]
        if not programs:
            return
        self._configure()
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        self._run("the build", ["ninja", "-C", self.build, "-j", jobs, *dict.fromkeys(programs)])

    def failure(self, program: str, cases: str) -> str:
        """What fails in a program: a test case, a signal or the time. Empty: nothing."""
        if program not in self.programs:
            return self._pytest_failure(program, cases)
        path = self.build / self.programs[program] / program
        try:
            done = subprocess.run(
                [path, f"--gtest_filter={cases}", "--gtest_fail_fast", "--gtest_color=no"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS_MAX,
                cwd=path.parent,
            )
        except subprocess.TimeoutExpired:
            return f"{program}: more than {SECONDS_MAX} s"
        if "[==========] Running 0 tests" in done.stdout:
            raise MutantError(f"{program} has no test {cases}")
        if done.returncode == 0:
            return ""
        failed = re.search(r"\[  FAILED  \] (\S+)", done.stdout)
        if failed:
            return f"{program}: {failed[1].rstrip(',')}"
        started = re.findall(r"\[ RUN      \] (\S+)", done.stdout)
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        return f"{program}: {started[-1] if started else 'start'} ({how})"

    def _pytest_failure(self, file: str, case: str) -> str:
        if not LIBRARY.is_file():
            raise MutantError(f"{LIBRARY} is not there; ninja -C build/release quire_ffi makes it")
        environment = {**os.environ, "PYTHONPATH": str(self.tree / "python")}
        environment |= {"QUIRE_FFI_LIBRARY": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.setdefault("QUIRE_HOME", str(ROOT / ".quire"))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, f"{file}::{case}"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS_MAX,
                cwd=self.tree,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return f"{file}: more than {SECONDS_MAX} s"
        ran = re.search(r"\d (passed|failed)", done.stdout)
        if done.returncode not in (0, PYTEST_FAILED) or not ran:
            output = done.stdout[-1000:] + done.stderr[-500:]
            raise MutantError(f"{file}::{case} does not run: {output}")
        return f"{Path(file).name}: {case}" if done.returncode else ""

    def write(self, file: str, text: str) -> None:
        (self.tree / file).write_text(text, encoding="utf-8")


def run_mutant(copy: Copy, mutant: Mutant) -> Outcome:
    begin = time.monotonic()
    original = (ROOT / mutant.file).read_text(encoding="utf-8")
    copy.write(mutant.file, mutant.applied_to(original))
    killed_by = ""
    try:
        copy.compile(mutant.programs())
        for program, cases in mutant.programs():
            killed_by = copy.failure(program, cases)
            if killed_by:
                break
    except MutantError as error:
        raise MutantError(f"{mutant.name}: {error}") from error
    finally:
        copy.write(mutant.file, original)
    return Outcome(killed_by, round(time.monotonic() - begin, 1), copy.digest(mutant))


def broken_tests(copy: Copy, mutants: Sequence[Mutant]) -> dict[tuple[str, str], str]:
    """What fails without a mutant, by program and filter: there a mutant cannot be tried."""
    pairs = dict.fromkeys(pair for mutant in mutants for pair in mutant.programs())
    copy.compile(list(pairs))
    found = {pair: copy.failure(*pair) for pair in pairs}
    return {pair: failed for pair, failed in found.items() if failed}


# ---------------------------------------------------------------------- results


def read_results(path: Path) -> dict[str, Outcome]:
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return {name: Outcome(**entry) for name, entry in entries.items()}


def write_results(path: Path, results: dict[str, Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    survivors = sorted(name for name, outcome in results.items() if not outcome.killed_by)
    text = json.dumps(
        {
            "killed": len(results) - len(survivors),
            "survivors": survivors,
            "mutants": {name: asdict(outcome) for name, outcome in sorted(results.items())},
        },
        indent=2,
    )
    path.write_text(text + "\n", encoding="utf-8")


def read_rows(page: str) -> dict[str, str]:
    """What the page says by whom each mutant is killed."""
    table = page.split(BEGIN, 1)[1].split(END, 1)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip().strip("`"): row[2].strip() for row in rows}


def with_rows(page: str, mutants: Sequence[Mutant], results: dict[str, Outcome]) -> str:
    """The page with a row for each mutant; one without a result keeps its row."""
    kept = read_rows(page)
    lines = [BEGIN, "", HEAD, "| --- | --- | --- |"]
    for mutant in mutants:
        outcome = results.get(mutant.name)
        killed_by = kept.get(mutant.name, NOT_RUN) if outcome is None else outcome.killed_by
        lines.append(f"| `{mutant.name}` | {mutant.file} | {killed_by or '**survives**'} |")
    before, rest = page.split(BEGIN, 1)
    return before + "\n".join([*lines, "", END]) + rest.split(END, 1)[1]


# ---------------------------------------------------------------------- command line


def arguments_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants (default: all)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="the same")
    areas = AREAS + PYTHON_AREAS
    parser.add_argument("--area", action="append", choices=areas, help="those of an area")
    parser.add_argument("--list", action="store_true", help="show them, with their results")
    parser.add_argument("--check", action="store_true", help="only whether all can be made")
    parser.add_argument("--again", action="store_true", help="also those with a result")
    parser.add_argument("--write", action="store_true", help="write the table of docs/testing.md")
    parser.add_argument("--results", type=Path, help="a copy of the results goes to this file")
    return parser.parse_args(arguments)


def chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    names = [*options.names, *options.only]
    unknown = [name for name in names if name not in {mutant.name for mutant in mutants}]
    if unknown:
        raise MutantError(f"there is no mutant {', '.join(unknown)}; --list shows them")
    return [
        mutant
        for mutant in mutants
        if (not names or mutant.name in names) and (not options.area or mutant.area in options.area)
    ]


def run_all(mutants: Sequence[Mutant], results: dict[str, Outcome], path: Path, again: bool) -> int:
    """Runs those without a result of this tree. Returns how many could not be run."""
    copy = Copy()
    left = [
        mutant
        for mutant in mutants
        if again or mutant.name not in results or results[mutant.name].tree != copy.digest(mutant)
    ]
    broken = broken_tests(copy, left) if left else {}
    failed = 0
    for number, mutant in enumerate(left, 1):
        try:
            for pair in mutant.programs():
                if pair in broken:
                    raise MutantError(f"{mutant.name}: without it fails {broken[pair]}")
            outcome = run_mutant(copy, mutant)
        except MutantError as error:
            print(f"{number}/{len(left)} FAILED {error}", flush=True)
            failed += 1
            continue
        results[mutant.name] = outcome
        write_results(path, results)
        end = f"killed by {outcome.killed_by}" if outcome.killed_by else "SURVIVES"
        print(f"{number}/{len(left)} {mutant.name}: {end} ({outcome.seconds} s)", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    options = arguments_of(sys.argv[1:] if arguments is None else arguments)
    path = FOLDER / "results.json"
    try:
        every = read_mutants()
        mutants = chosen(every, options)
        results = {
            name: outcome
            for name, outcome in read_results(path).items()
            if name in {mutant.name for mutant in every}
        }
        stale = faults(mutants)
        if stale:
            raise MutantError("\n".join(stale))
        if options.list:
            for mutant in mutants:
                known = results.get(mutant.name)
                end = NOT_RUN if known is None else known.killed_by or "SURVIVES"
                print(f"{mutant.area:9} {mutant.name:32} {end}")
            return 0
        if options.check:
            print(f"{len(mutants)} mutants can be made in this tree")
            return 0
        failed = run_all(mutants, results, path, options.again)
    except MutantError as error:
        print(f"tools/mutants: {error}", file=sys.stderr)
        return 1
    if options.results:
        write_results(options.results, results)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_rows(page, every, results), encoding="utf-8")
    mine = [results[mutant.name] for mutant in mutants if mutant.name in results]
    survivors = [m.name for m in mutants if m.name in results and not results[m.name].killed_by]
    killed = len(mine) - len(survivors)
    print(f"{killed} of {len(mutants)} killed; survivors: {survivors or 'none'}")
    return 1 if failed or survivors else 0


if __name__ == "__main__":
    sys.exit(main())
