"""tools/mutants: every mutant can be made in this tree, the page has its row, and results are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import source_tree

sys.path.insert(0, str(source_tree.ROOT / "tools"))
import mutants

EVERY = mutants.read_mutants()


def mutant(**fields: object) -> mutants.Mutant:
    whole: dict[str, object] = {
        "name": "m",
        "area": "kv",
        "file": "src/a.cc",
        "old": "a < b",
        "new": "a <= b",
        "tests": ("a_test",),
        "occurrence": 0,
    }
    return mutants.Mutant(**{**whole, **fields})  # type: ignore[arg-type]


def test_every_mutant_can_be_made() -> None:
    found = mutants.faults(EVERY)
    assert not found, "change these lines of tools/mutants.toml:\n" + "\n".join(found)


def test_there_are_mutants_of_every_area() -> None:
    assert len(EVERY) >= 60
    for area in mutants.AREAS:
        assert sum(mutant.area == area for mutant in EVERY) >= 10, area


def test_the_page_has_a_row_for_each_mutant() -> None:
    page = mutants.PAGE.read_text(encoding="utf-8")
    assert mutants.with_rows(page, EVERY, {}) == page, "tools/mutants --write NAME of a new one"


def test_an_old_text_stands_where_it_is_said_to() -> None:
    assert mutant().applied_to("if (a < b) c;") == "if (a <= b) c;"
    assert mutant(occurrence=2).applied_to("a < b, a < b") == "a < b, a <= b"
    for text, occurrence in [("a > b", 0), ("a < b, a < b", 0), ("a < b", 2)]:
        with pytest.raises(mutants.MutantError, match="m: `old` stands"):
            mutant(occurrence=occurrence).applied_to(text)


def test_stale_mutants_are_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cc").write_text("a < b")
    (tmp_path / "src" / "CMakeLists.txt").write_text("quire_test(a_test SOURCES a_test.cc)\n")
    assert not mutants.faults([mutant()], tmp_path)
    for fields, why in [
        ({"file": "src/b.cc"}, "no src/b.cc"),
        ({"old": "gone"}, "0 times"),
        ({"tests": ("b_test:Case.*",)}, "no test program b_test"),
    ]:
        (found,) = mutants.faults([mutant(**fields)], tmp_path)
        assert found.startswith("m: ") and why in found


def test_mutants_of_python_files_have_tests_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "a.py").write_text("a < b")
    (tmp_path / "test_a.py").write_text("def test_less() -> None: ...\n")
    one = mutant(file="python/a.py", area="serve", tests=("test_a.py::test_less",))
    assert one.is_python and one.programs() == [("test_a.py", "test_less")]
    assert not mutants.faults([one], tmp_path)
    for tests in (("test_a.py::test_les",), ("test_b.py::test_less",), ("a_test",)):
        (found,) = mutants.faults([mutant(file="python/a.py", tests=tests)], tmp_path)
        assert found.startswith("m: there is no test ")


def test_what_a_test_of_pytest_says_is_told(tmp_path: Path) -> None:
    copy = object.__new__(mutants.Copy)
    copy.tree, copy.programs = tmp_path, {}
    (tmp_path / "library").touch()
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_holds(): pass\n"
        "def test_fails(): assert 1 > 2\n"
        "def test_is_left_out(): pytest.skip()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "LIBRARY", tmp_path / "library")
        assert copy.failure("test_a.py", "test_holds") == ""
        assert copy.failure("test_a.py", "test_fails") == "test_a.py: test_fails"
        for case in ("test_is_left_out", "test_of_nothing"):
            with pytest.raises(mutants.MutantError, match=f"test_a.py::{case} does not run"):
                copy.failure("test_a.py", case)
        patch.setattr(mutants, "LIBRARY", tmp_path / "none")
        with pytest.raises(mutants.MutantError, match="ninja -C build/release quire_ffi makes it"):
            copy.failure("test_a.py", "test_holds")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('area = "kv"', 'area = "kb"', "none of"),
        ('new = "a <= b"', 'new = "a < b"', "changes nothing"),
        ('tests = ["a_test"]', "tests = []", "names no test"),
        ('tests = ["a_test"]', 'test = ["a_test"]', "unknown keys"),
        ('new = "a <= b"\n', "", "missing"),
    ],
)
def test_a_wrong_list_is_refused(old: str, new: str, why: str, tmp_path: Path) -> None:
    text = (
        '[[mutant]]\nname = "m"\narea = "kv"\nfile = "src/a.cc"\nold = "a < b"\nnew = "a <= b"\n'
        'tests = ["a_test"]\n'
    )
    file = tmp_path / "mutants.toml"
    file.write_text(text)
    assert mutants.read_mutants(file) == [mutant()]
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(mutants.MutantError, match=why):
        mutants.read_mutants(file)
    file.write_text(2 * text)
    with pytest.raises(mutants.MutantError, match="two mutants"):
        mutants.read_mutants(file)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert mutants.read_results(file) == {}
    results = {
        "m": mutants.Outcome("a_test: A.B", 2.5, "0123"),
        "survivor": mutants.Outcome("", 1.5, "0123"),
    }
    mutants.write_results(file, results)
    assert mutants.read_results(file) == results
    page = f"before\n{mutants.BEGIN}\n{mutants.END}\nafter\n"
    both = [mutant(), mutant(name="survivor")]
    assert mutants.read_rows(mutants.with_rows(page, both, {})) == {
        "m": mutants.NOT_RUN,
        "survivor": mutants.NOT_RUN,
    }
    written = mutants.with_rows(page, both, results)
    assert mutants.read_rows(written) == {"m": "a_test: A.B", "survivor": "**survives**"}
    assert mutants.with_rows(written, both, {}) == written
