"""Prints the failures, the slowest tests and the counts in the JUnit files of ./test:
test_summary.py FOLDER.

ctest-*.xml are of ctest, pytest*.xml of pytest. Exits with 1 if a test failed or a file has none.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# Lines of a failed test's output that are shown: an assertion and what led to it.
_LINES_SHOWN = 40
_SLOWEST_SHOWN = 10


def counts_of(path: Path) -> dict[str, int]:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(path).iter("testcase"):
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        if failure is not None or case.get("status") == "fail":
            counts["failed"] += 1
            # pytest has shown its failures already.
            if path.name.startswith("ctest"):
                print_failure(path.stem, case)
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def times_of(path: Path) -> list[tuple[float, str]]:
    """Seconds and name of each test that ran."""
    times = []
    for case in ElementTree.parse(path).iter("testcase"):
        # pytest's names are unique in their file only.
        folder = "" if path.name.startswith("ctest") else f"{case.get('classname')}."
        times.append((float(case.get("time") or 0), f"{path.stem}: {folder}{case.get('name')}"))
    return times


def print_slowest(paths: list[Path]) -> None:
    times = sorted((time for path in paths for time in times_of(path)), reverse=True)
    print(f"slowest of {len(times)} tests:")
    for seconds, name in times[:_SLOWEST_SHOWN]:
        print(f"  {seconds:7.1f} s  {name}")


def print_failure(run: str, case: ElementTree.Element) -> None:
    print(f"\nFAILED {run}: {case.get('name')}")
    output = case.findtext("system-out") or ""
    print("\n".join("    " + line for line in output.splitlines()[-_LINES_SHOWN:]))


def main() -> int:
    failed = False
    folder = Path(sys.argv[1])
    print_slowest([path for name in ("ctest", "pytest") for path in folder.glob(f"{name}*.xml")])
    for runner in ("ctest", "pytest"):
        total = {"passed": 0, "failed": 0, "skipped": 0}
        for path in sorted(folder.glob(f"{runner}*.xml")):
            counts = counts_of(path)
            failed |= counts["failed"] > 0 or counts["passed"] == 0
            print(f"  {path.stem}: {as_text(counts)}")
            total = {kind: total[kind] + counts[kind] for kind in total}
        print(f"{runner}: {as_text(total)}")
    return int(failed)


def as_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
