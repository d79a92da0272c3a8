"""One case: its sides in turn, round after round, the machine's bounds read between them; and the
arithmetic that makes a row of the table out of it."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Protocol

from cases import Case, Goal, Metric, Side

# Memory that gives more than this to all threads is in its fast mode: other goals hold there.
FAST_MEMORY = 40e9

# Stands for nothing where a ratio is asked for: tokens that come at once have no time between them.
_LEAST = 1e-9

# The probe of each precision's peak. A CPU without bfloat16 dot products computes in float32.
_PEAKS = {"float32": "f32_n", "bfloat16": "bf16_n", "int8": "int8_n"}

Samples = dict[str, list[float]]  # of one side and round, by metric
Probe = dict[str, list[float]]


class Runner(Protocol):
    def run(self, side: Side) -> Samples: ...
    def probe(self, single: bool) -> Probe: ...


@dataclasses.dataclass
class Measured:
    """Everything that was read. samples[side][round]; a round has one probe more than sides: before
    each side, and behind the last one; the first of a round is with one thread, too."""

    samples: dict[str, list[Samples]]
    probes: list[list[Probe]]


def measure(case: Case, sides: list[Side], rounds: int, runner: Runner) -> Measured:
    measured = Measured({side.name: [] for side in sides}, [])
    for _ in range(rounds):
        probes = [runner.probe(single=True)]
        for side in sides:
            measured.samples[side.name].append(runner.run(side))
            probes.append(runner.probe(single=False))
        measured.probes.append(probes)
    return measured


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many times Quire, or the side that a goal names, is as fast (as small), by rounds."""

    peer: str
    value: float  # the peer's, in the metric's own unit
    ratio: float
    lowest: float
    highest: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    goal: str
    reached: bool


@dataclasses.dataclass(frozen=True)
class Row:
    case: str
    metric: str
    unit: str
    value: float
    comparisons: list[Comparison]
    fraction: float | None  # of the bound
    bandwidth: float  # read in the same rounds, bytes per second
    outcomes: list[Outcome]


def rows(case: Case, measured: Measured) -> list[Row]:
    return [
        _row(case, metric, measured)
        for metric in case.metrics
        if all(metric.name in samples for samples in measured.samples["Quire"])
    ]


def _row(case: Case, metric: Metric, measured: Measured) -> Row:
    quire = _round_medians(measured.samples["Quire"], metric)
    peers = {
        name: _round_medians(rounds, metric)
        for name, rounds in measured.samples.items()
        if name != "Quire" and all(metric.name in samples for samples in rounds)
    }
    peers |= {name: [value] * len(quire) for name, value in metric.quoted.items()}
    sides = {"Quire": quire} | peers
    comparisons = _comparisons("Quire", sides, metric)
    bandwidths = [_around(probes, 0, "read_n") for probes in measured.probes]
    fractions = _fractions(metric, quire, measured.probes)
    outcomes = [
        outcome
        for goal in metric.goals
        if (outcome := _outcome(goal, metric, sides, fractions, bandwidths)) is not None
    ]
    return Row(
        case=case.name,
        metric=metric.name,
        unit=metric.unit,
        value=shown(statistics.median(quire), metric),
        comparisons=comparisons,
        fraction=statistics.median(fractions) if fractions else None,
        bandwidth=statistics.median(bandwidths),
        outcomes=outcomes,
    )


def shown(measured: float, metric: Metric) -> float:
    """Seconds or bytes, in the metric's unit."""
    if metric.unit == "tokens":
        return metric.tokens / measured
    if metric.unit == "GB/s":
        return metric.bytes / measured * 1e-9
    factors = {"ms": 1e3, "us": 1e6, "MiB": 2.0**-20}
    return measured * factors.get(metric.unit, 1.0)


def _round_medians(rounds: list[Samples], metric: Metric) -> list[float]:
    return [statistics.median(samples[metric.name]) for samples in rounds]


def _comparisons(side: str, sides: dict[str, list[float]], metric: Metric) -> list[Comparison]:
    """Of one side with all others."""
    return [
        _compare(name, values, sides[side], metric)
        for name, values in sides.items()
        if name != side
    ]


def _compare(name: str, peer: list[float], side: list[float], metric: Metric) -> Comparison:
    pairs = zip(peer, side, strict=True)
    ratios = [max(theirs, _LEAST) / max(ours, _LEAST) for theirs, ours in pairs]
    return Comparison(
        peer=name,
        value=shown(statistics.median(peer), metric),
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def _around(probes: list[Probe], side: int, name: str) -> float:
    """The mean of what was read before and behind a side."""
    return statistics.mean(statistics.median(probe[name]) for probe in probes[side : side + 2])


def _fractions(metric: Metric, quire: list[float], probes: list[list[Probe]]) -> list[float]:
    """Bound by measured time, in each round. Quire is the first side."""
    if not metric.work.phases:
        return []
    fractions = []
    for seconds, around in zip(quire, probes, strict=True):
        name = _PEAKS[metric.work.precision]
        peak = _around(around, 0, name if name in around[0] else "f32_n")
        bound = metric.work.bound_seconds(_around(around, 0, "read_n"), peak)
        fractions.append(bound / seconds)
    return fractions


def _outcome(
    goal: Goal,
    metric: Metric,
    sides: dict[str, list[float]],
    fractions: list[float],
    bandwidths: list[float],
) -> Outcome | None:
    """None if what the goal compares was not measured."""
    if goal.against == "limit":
        return Outcome(
            f"≤ {goal.value * 1e6:g} µs", statistics.median(sides["Quire"]) <= goal.value
        )
    if goal.against == "most":
        return Outcome(f"≤ {goal.value:g}", statistics.median(sides["Quire"]) <= goal.value)
    if goal.against == "bound":
        # Each round has the goal of its own memory mode.
        wanted = [
            goal.in_fast_memory
            if goal.in_fast_memory is not None and bandwidth > FAST_MEMORY
            else goal.value
            for bandwidth in bandwidths
        ]
        reached = statistics.median(f / w for f, w in zip(fractions, wanted, strict=True)) >= 1
        return Outcome(f"{statistics.median(wanted):g} of the bound", reached)
    if goal.side not in sides or goal.against not in sides:
        return None
    if goal.adds:
        pairs = zip(sides[goal.side], sides[goal.against], strict=True)
        added = statistics.median(ours - theirs for ours, theirs in pairs)
        return Outcome(f"≤ {goal.against} + {goal.value * 1e3:g} ms", added <= goal.value)
    subject = "" if goal.side == "Quire" else f"{goal.side}: "
    (comparison,) = (
        each for each in _comparisons(goal.side, sides, metric) if each.peer == goal.against
    )
    reached = comparison.ratio >= goal.value
    return Outcome(f"{subject}{goal.value:.3g} × {goal.against}", reached)


def as_json(case: Case, measured: Measured, result: list[Row]) -> dict[str, Any]:
    return {
        "name": case.name,
        "group": case.group,
        "samples": measured.samples,
        "probes": measured.probes,
        "rows": [dataclasses.asdict(row) for row in result],
    }
