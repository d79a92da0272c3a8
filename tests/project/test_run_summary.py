"""tools/test_summary.py: what ./test says at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import source_tree

sys.path.insert(0, str(source_tree.ROOT / "tools"))
import test_summary as summary

_CTEST = """<testsuite>
<testcase name="A.Fast" classname="A.Fast" time="0.5" status="run"/>
<testcase name="A.Slow" classname="A.Slow" time="61.25" status="run"/>
{more}</testsuite>"""
_PYTEST = """<testsuites><testsuite>
<testcase classname="tests.python.test_x" name="test_y" time="7.0"/>
<testcase classname="tests.python.test_x" name="test_z" time="0.1"><skipped/></testcase>
</testsuite></testsuites>"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> int:
    (folder / "ctest-release.xml").write_text(_CTEST.format(more=more))
    (folder / "pytest.xml").write_text(_PYTEST)
    monkeypatch.setattr(sys, "argv", ["test_summary.py", str(folder)])
    return summary.main()


def test_the_slowest_tests_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = "".join(f'<testcase name="B.{i}" time="0.0{i}" status="run"/>\n' for i in range(10))
    assert run(tmp_path, monkeypatch, fast) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "slowest of 14 tests:"
    assert [line.split() for line in lines[1:4]] == [
        ["61.2", "s", "ctest-release:", "A.Slow"],
        ["7.0", "s", "pytest:", "tests.python.test_x.test_y"],
        ["0.5", "s", "ctest-release:", "A.Fast"],
    ]
    assert lines[11] == "  ctest-release: 12 passed, 0 failed, 0 skipped"  # ten of them are shown
    assert lines[-1] == "pytest: 1 passed, 0 failed, 1 skipped"


def test_a_failure_is_shown_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = (
        '<testcase name="C.Bad" time="0" status="fail"><failure/>'
        "<system-out>why it failed</system-out></testcase>"
    )
    assert run(tmp_path, monkeypatch, failed) == 1
    out = capsys.readouterr().out
    assert "FAILED ctest-release: C.Bad\n    why it failed" in out
    assert "ctest: 2 passed, 1 failed, 0 skipped" in out
