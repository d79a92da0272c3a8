"""Prints the failures and counts in the JUnit files of ./test: test_summary.py FOLDER.

ctest-*.xml are of ctest, pytest*.xml of pytest. Exits with 1 if a test failed or a file has none.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# Lines of a failed test's output that are shown: an assertion and what led to it.
_LINES_SHOWN = 40


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


def print_failure(run: str, case: ElementTree.Element) -> None:
    print(f"\nFAILED {run}: {case.get('name')}")
    output = case.findtext("system-out") or ""
    print("\n".join("    " + line for line in output.splitlines()[-_LINES_SHOWN:]))


def main() -> int:
    failed = False
    for runner in ("ctest", "pytest"):
        total = {"passed": 0, "failed": 0, "skipped": 0}
        for path in sorted(Path(sys.argv[1]).glob(f"{runner}*.xml")):
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
