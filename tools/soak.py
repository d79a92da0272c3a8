#!/usr/bin/env python3
"""Runs random tests with ever new seeds and keeps the figures: soak.py [--minutes N]
[CAPABILITY...].

A capability is some test cases of one program of build/release, or of Python's tests. Each round
runs them with QUIRE_SOAK_ROUND one higher (src/base/testing/soak.h), and adds up what they say that
they did. It ends at the goal, when its minutes are over, or at the first failure, whose round
repeats it. What was reached goes into docs/reliability.md, one row per capability; what an earlier
run of the same commit reached counts on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BUILD = ROOT / "build" / "release"
BEGIN = "<!-- figures: written by tools/soak -->"
END = "<!-- end of figures -->"
SERVER = "tests/python/serve/test_serve_soak.py"
STAGES = "tests/python/transfer/test_transfer_stages.py"
NETWORK = "tests/python/transfer/test_transfer_network.py"
ATTACKERS = "tests/python/serve/test_serve_attackers.py"
HEAD = "| capability | what must not happen | reached | goal | rounds | date | commit | machine |"


@dataclass(frozen=True)
class Capability:
    name: str
    program: str  # below build/release; or a file of Python's tests
    cases: str  # gtest's filter; or the name of a test
    figure: str  # the property that the cases report
    goal: int
    claim: str
    also: tuple[str, ...] = ()  # other properties that they report, for whoever reads the output


CAPABILITIES = (
    Capability(
        "walks",
        "src/kv/cache/kv_walk_test",
        "*/KVWalk.*",
        "operations",
        30_000_000,
        "R1: the KV cache differs from the naive model, in anything that can be observed",
    ),
    Capability(
        "wide-walks",
        "src/kv/cache/kv_walk_test",
        "*/KVWideWalk.*",
        "operations",
        300_000,
        "R1: the same with wide heads, long pages, large batches and tokens that are not finite",
    ),
    Capability(
        "composite-walks",
        "src/kv/composite/composite_walk_test",
        "*",
        "operations",
        1_000_000,
        "R1: attention and recurrent layers of one state differ from their models",
    ),
    Capability(
        "peers",
        "src/buffers/wire_session_test",
        "HostilePeer.*",
        "sessions",
        1_000_000,
        "R5: a hostile peer of the buffer server breaks it, or holds more memory than it may",
    ),
    Capability(
        "transfer-peers",
        "src/transfer/transfer_session_test",
        "HostileTransferPeer.*",
        "sessions",
        100_000,
        "R5: a hostile peer of a transfer breaks it, touches what it was not asked for, or holds "
        "more memory than it may",
    ),
    Capability(
        "transfer-faults",
        "src/transfer/transfer_session_test",
        "*NoFaultOfTheNetworkCountsAWrongByte",
        "sessions",
        100_000,
        "R17: bytes of a transfer that are changed, repeated, moved or cut off count as rows",
    ),
    Capability(
        "transfer-networks",
        NETWORK,
        "test_no_network_costs_a_bit_or_a_page",
        "faults",
        1_000,
        "R17: a network between two namespaces that is slow, cut for a while or dead in one "
        "direction costs a transfer a bit, a row that had come or a page",
    ),
    Capability(
        "transfer-copies",
        "src/kv/cache/kv_copies_test",
        "*EndsAtAnyMomentCostNobodyABit",
        "cancels",
        1_000_000,
        "R18: rows that are copied while their reservation ends reach a page of somebody else",
    ),
    Capability(
        "transfer-cancels",
        "src/transfer/peer_connection_test",
        "*AfterACancelNoLateRowIsTaken",
        "cancels",
        1_000_000,
        "R18: rows that come after their transfer was cancelled are taken",
    ),
    Capability(
        "sender-losses",
        STAGES,
        "test_a_lost_sender_costs_no_bit_and_no_page",
        "losses",
        12_000,
        "R16: a prefill process that is killed, stopped or cut off at a stage of a transfer costs "
        "its receiver a bit, a page or a row that had come",
    ),
    Capability(
        "receiver-losses",
        STAGES,
        "test_a_lost_receiver_costs_no_forward_and_no_page",
        "losses",
        12_000,
        "R16: a decode process that is lost so costs its sender a forward, a page or the next "
        "receiver",
    ),
    Capability(
        "flips",
        "src/store/disk/disk_tier_fault_test",
        "*NoFlippedBitIsServed",
        "flips",
        100_000,
        "R9: a chunk file with a flipped bit is served, or costs its neighbours",
    ),
    Capability(
        "kills",
        "src/store/disk/disk_tier_kill_test",
        "*AtRandomTimes",
        "kills",
        1_000,
        "R10: SIGKILL at a random time loses what was acknowledged, or leaves damage",
    ),
    Capability(
        "power",
        "src/store/disk/disk_tier_fault_test",
        "DiskTierPower.*",
        "cuts",
        20_000,
        "R11: a simulated loss of power loses what was synced, or leaves damage that is served",
    ),
    Capability(
        "tiers",
        "src/store/tiered/store_walk_test",
        "*AccountsAreRight",
        "moves",
        10_000_000,
        "R14b: moves between RAM, disk and Redis with faults at each edge serve a wrong byte, "
        "bring back what was removed, or lose count",
    ),
    Capability(
        "answers",
        "src/engine/engine_exactness_test",
        "*NoScheduleCanBeSeenInAnAnswer*",
        "answers",
        20_000,
        "R15: an answer depends on batch, cuts, cache, preemption, speculation or store",
    ),
    Capability(
        "blends",
        "src/engine/engine_blend_walk_test",
        "*EachIsAsAloneAndStoresAreExact*",
        "mixes",
        10_000,
        "R15b: in a mix of 16 blended and exact requests a blended answer depends on what runs "
        "beside it, or KV under an exact key, in pages, RAM, a folder or Redis, is not what full "
        "prefill gives",
        ("requests", "compared_sections", "approximate_sections"),
    ),
    Capability(
        "abuse",
        SERVER,
        "test_abuse",
        "connections",
        100_000,
        "R8: idle, slow and hostile peers cost the server more than 64 MiB and 16 KiB each, or "
        "slow others to more than twice",
    ),
    Capability(
        "slowhttptest",
        ATTACKERS,
        "test_slowhttptest",
        "connections",
        100_000,
        "R8: slow headers, bodies and readers of slowhttptest cost more than the bound, or stay",
    ),
    Capability(
        "wrk",
        ATTACKERS,
        "test_wrk",
        "connections",
        10_000,
        "R8: hundreds of connections of one key that never pause get a wrong answer, or keep "
        "another key from its own",
    ),
    Capability(
        "isolation",
        SERVER,
        "test_isolation",
        "requests",
        1_000_000,
        "R12: a request finds KV that its tenant has not computed",
    ),
    Capability(
        "collisions",
        "src/store/tiered/store_walk_test",
        "*CollidingKeyIsNotServed",
        "collisions",
        1_000_000,
        "R12: a tier in which keys collide all the time gets a chunk of another text or tenant "
        "served",
    ),
    Capability(
        "timing",
        SERVER,
        "test_timing",
        "samples",
        2_000,
        "R12: times tell an attacker what another tenant has asked; of its own prompts they must "
        "tell",
    ),
    Capability(
        "memory",
        SERVER,
        "test_memory_stays_within_its_bound",
        "requests",
        1_000_000,
        "R20: memory, files or threads of the server grow with what clients do",
    ),
    Capability(
        "overload",
        SERVER,
        "test_overload",
        "requests",
        100_000,
        "R21: excess is not refused at once, costs a tenth of the speed, or what is accepted is "
        "not answered whole",
    ),
    Capability(
        "server-kills",
        SERVER,
        "test_kills",
        "kills",
        500,
        "R22: a stream of a server that is killed looks whole, the next one is not ready within "
        "2 s, or the disk's KV is not there at once",
    ),
    Capability("drains", SERVER, "test_drains", "drains", 100, "R22: SIGTERM loses a stream"),
)


@dataclass
class Row:
    reached: int = 0
    rounds: int = 0
    date: str = ""
    commit: str = ""
    machine: str = ""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [capability.name for capability in CAPABILITIES]
    parser.add_argument(
        "capabilities", nargs="*", metavar="CAPABILITY", help=f"of {', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="N", help="of each capability; default: 10"
    )
    parser.add_argument("--list", action="store_true", help="print the capabilities and end")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.capabilities) - set(names))
    if unknown:
        parser.error(f"no capability is called {unknown[0]!r}; there are {', '.join(names)}")
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g}; it must be greater than 0")
    return options


def read_rows(page: str) -> dict[str, Row]:
    rows = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 8 or not re.fullmatch(r"[0-9 ]+", cells[2]):
            continue
        rows[cells[0]] = Row(number(cells[2]), number(cells[4]), *cells[5:])
    return rows


def write_rows(page: str, rows: dict[str, Row]) -> str:
    lines = [HEAD, "| --- | --- | ---: | ---: | ---: | --- | --- | --- |"]
    for capability in CAPABILITIES:
        row = rows.get(capability.name)
        reached = "not run | " if row is None else f"{spaced(row.reached)} | "
        rest = "| | | |"
        if row is not None:
            rest = f"{row.rounds} | {row.date} | {row.commit} | {row.machine} |"
        lines.append(
            f"| {capability.name} | {capability.claim} | {reached}{spaced(capability.goal)} | "
            f"{rest}"
        )
    before, begin, after = page.partition(BEGIN)
    if not begin or END not in after:
        raise SystemExit(f"{PAGE} has lost the lines {BEGIN!r} and {END!r} around its figures")
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after.partition(END)[2]}"


def spaced(count: int) -> str:
    return f"{count:,}".replace(",", " ")


def number(text: str) -> int:
    return int(text.replace(" ", ""))


def figure_of(report: object, name: str) -> int:
    """The sum of a property over the cases of a report of gtest (--gtest_output=json) or pytest."""
    if isinstance(report, ElementTree.Element):
        found = report.iter("property")
        return sum(int(each.get("value", 0)) for each in found if each.get("name") == name)
    if isinstance(report, dict):
        own = int(report.get(name, 0)) if isinstance(report.get(name, 0), str | int) else 0
        return own + sum(figure_of(part, name) for part in report.values())
    if isinstance(report, list):
        return sum(figure_of(part, name) for part in report)
    return 0


def command_of(capability: Capability, report: str) -> list[str]:
    """Without the word that names the report it repeats a round."""
    if capability.program.endswith(".py"):
        place = f"{ROOT / capability.program}::{capability.cases}"
        pytest = [sys.executable, "-m", "pytest", place, "-q"]
        return [*pytest, "-o", "junit_family=xunit1", f"--junitxml={report}"]
    return [
        str(BUILD / capability.program),
        f"--gtest_filter={capability.cases}",
        f"--gtest_output=json:{report}",
        "--gtest_brief=1",
    ]


def run_round(capability: Capability, number_of_round: int) -> dict[str, int]:
    """What the cases did, by property; SystemExit if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        command = command_of(capability, str(report))
        done = subprocess.run(
            command,
            env={**os.environ, "QUIRE_SOAK_ROUND": str(number_of_round)},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            again = " ".join(word for word in command if str(report) not in word)
            raise SystemExit(
                f"{done.stdout[-4000:]}{done.stderr[-2000:]}\n{capability.name}: failed in round "
                f"{number_of_round}; again: QUIRE_SOAK_ROUND={number_of_round} {again}"
            )
        text = report.read_text(encoding="utf-8")
        read = ElementTree.fromstring if capability.program.endswith(".py") else json.loads
        report_of_round = read(text)
    names = (capability.figure, *capability.also)
    counts = {name: figure_of(report_of_round, name) for name in names}
    if counts[capability.figure] == 0:
        raise SystemExit(f"{capability.name}: no case of {capability.cases!r} did anything")
    return counts


def statement(capability: Capability, reached: int, others: dict[str, int]) -> str:
    """What is printed in the end; `others`: of the rounds of this run."""
    text = f"{capability.name}: {spaced(reached)} {capability.figure}, no failure"
    counts = [f"{spaced(others[name])} {name.replace('_', ' ')}" for name in capability.also]
    return f"{text}; in this run {', '.join(counts)}" if counts else text


def soak(capability: Capability, row: Row, seconds: float) -> None:
    end = time.monotonic() + seconds
    others = dict.fromkeys(capability.also, 0)
    while row.reached < capability.goal and time.monotonic() < end:
        counts = run_round(capability, row.rounds + 1)
        row.reached += counts[capability.figure]
        row.rounds += 1
        for name in others:
            others[name] += counts[name]
    print(statement(capability, row.reached, others), flush=True)


def commit_of_tree() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.list:
        for capability in CAPABILITIES:
            print(f"{capability.name}: {spaced(capability.goal)} {capability.figure}")
        return 0
    wanted = [c for c in CAPABILITIES if not options.capabilities or c.name in options.capabilities]
    commit = commit_of_tree()
    for capability in wanted:
        page = PAGE.read_text(encoding="utf-8")
        rows = read_rows(page)
        row = rows.get(capability.name)
        if row is None or row.commit != commit:
            row = Row(commit=commit)
        row.date = datetime.date.today().isoformat()
        row.machine = f"{platform.machine()}, {os.cpu_count()} cores"
        soak(capability, row, options.minutes * 60)
        rows[capability.name] = row
        PAGE.write_text(write_rows(page, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
