"""tools/soak: its capabilities are cases that say what they do, and its page keeps what was reached."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import source_tree

sys.path.insert(0, str(source_tree.ROOT / "tools"))
import soak


def built(program: str) -> Path:
    """The program, in either build of ./test: --once builds most of them under the sanitizers alone."""
    for build in (soak.BUILD, source_tree.ROOT / "build" / "asan-ubsan"):
        if (build / program).is_file():
            return build / program
    raise AssertionError(f"{program} is in neither build; ./test release builds it")


@pytest.mark.parametrize("capability", soak.CAPABILITIES, ids=lambda c: c.name)
def test_a_capability_is_cases_of_a_program_that_report_its_figure(
    capability: soak.Capability,
) -> None:
    if capability.program.endswith(".py"):
        text = source_tree.read(Path(capability.program))
        assert f"def {capability.cases}(" in text
        assert f'record_property("{capability.figure}"' in text
        return
    folder, name = os.path.split(capability.program)
    (source,) = (source_tree.ROOT / folder).rglob(f"{name}.cc")  # a target may have a folder's file
    for figure in (capability.figure, *capability.also):
        assert f'ReportFigure("{figure}"' in source.read_text(encoding="utf-8")
    listed = subprocess.run(
        [built(capability.program), "--gtest_list_tests", f"--gtest_filter={capability.cases}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert any(line.startswith("  ") for line in listed.splitlines()), listed


def test_the_page_has_a_row_for_each_capability() -> None:
    page = soak.PAGE.read_text(encoding="utf-8")
    assert soak.write_rows(page, soak.read_rows(page)) == page
    for capability in soak.CAPABILITIES:
        assert f"| {capability.name} |" in page


def test_rows_are_read_as_they_were_written() -> None:
    page = f"before\n{soak.BEGIN}\n{soak.END}\nafter\n"
    row = soak.Row(1_234_567, 8, "2026-01-02", "abcdef0", "x86_64, 2 cores")
    written = soak.write_rows(page, {"kills": row})
    assert soak.read_rows(written) == {"kills": row}
    assert "| walks |" in written and "not run" in written
    assert written.startswith("before\n") and written.endswith("\nafter\n")


def test_a_page_without_its_place_is_not_overwritten() -> None:
    with pytest.raises(SystemExit, match="has lost the lines"):
        soak.write_rows("a page\n", {})


def test_figures_are_added_over_cases() -> None:
    report = {"testsuites": [{"testsuite": [{"kills": "20"}, {"kills": "3", "flips": "9"}]}]}
    assert soak.figure_of(report, "kills") == 23


def test_what_else_was_counted_is_stated() -> None:
    (blends,) = (each for each in soak.CAPABILITIES if each.name == "blends")
    others = {"requests": 160_000, "compared_sections": 1_234, "approximate_sections": 0}
    assert soak.statement(blends, 10_000, others) == (
        "blends: 10 000 mixes, no failure; in this run 160 000 requests, "
        "1 234 compared sections, 0 approximate sections"
    )
    (walks,) = (each for each in soak.CAPABILITIES if each.name == "walks")
    assert soak.statement(walks, 5, {}) == "walks: 5 operations, no failure"


def test_figures_of_pytest_are_read() -> None:
    """A small round of a capability in Python."""
    (capability,) = (each for each in soak.CAPABILITIES if each.name == "overload")
    report = '<testsuites><testcase><properties><property name="requests" value="150" />'
    report += '<property name="other" value="9" /></properties></testcase></testsuites>'
    assert soak.figure_of(ElementTree.fromstring(report), capability.figure) == 150
    assert soak.command_of(capability, "R")[:3] == [sys.executable, "-m", "pytest"]


def test_unknown_names_and_times_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nothing"], ["--minutes", "0"]):
        with pytest.raises(SystemExit):
            soak.parse(arguments)
    assert "no capability is called 'nothing'" in capsys.readouterr().err
