"""Programs of TVM's calls as its own tests of the cache make them, forward after forward against a
naive model: some layers only, per-layer windows, shared KV, growing trees, forks, pops, windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tvm_programs import INLINE, NONE, NORMAL, Program

import quire
import quire.tvm

SIZES = pytest.mark.parametrize(
    "size",
    [
        {"dtype": "float32", "dim": 64},
        {"dtype": "float16", "dim": 64},
        {"dtype": "float32", "dim": 128},
        {"dtype": "float16", "dim": 128},
    ],
    ids=["float32-64", "float16-64", "float32-128", "float16-128"],
)
ROPES = pytest.mark.parametrize(
    "rope_mode", [NONE, NORMAL, INLINE], ids=["none", "normal", "inline"]
)


@pytest.fixture
def tvm_lengths() -> Iterator[None]:
    quire.tvm.install(tvm_tree_lengths=True)
    yield
    quire.tvm.uninstall()


Forwards = list[tuple[list[int], list[int]]]
PREFILL_AND_DECODE: Forwards = [([0, 1, 2], [3, 37, 1]), ([3], [64]), ([2, 0, 3], [20, 1, 1])] + [
    ([3, 1, 0, 2], [1, 1, 1, 1])
] * 3


def run(program: Program, forwards: Forwards, **arguments: Any) -> None:
    for ids, lengths in forwards:
        for seq in ids:
            if seq not in program.stored:
                program.add(seq)
        program.forward(ids, lengths, **arguments)


# ---------------------------------------------------------------------- some layers only


@SIZES
@ROPES
@pytest.mark.parametrize("layers", [[2, 0], []], ids=str)
def test_some_layers_only(
    installed: None, size: dict[str, Any], rope_mode: int, layers: list[int]
) -> None:
    program = Program(kinds=(0, 0, 0), rope_mode=rope_mode, **size)
    run(program, PREFILL_AND_DECODE, layers=layers)
    program.fork(1, 4, 11)
    program.fork(3, 5)
    program.pop(0, 2)
    program.forward([4, 0, 5], [6, 1, 2], layers=layers)
    program.remove(1)
    run(program, [([0, 3, 4, 5, 2], [1, 9, 1, 1, 3])])  # all layers, on zeros in some


def test_other_layers_every_time(installed: None) -> None:
    program = Program(kinds=(0, 3, 0, 3), layer_window=7, rope_mode=INLINE)
    program.reads_back = False
    program.add(0)
    program.add(1)
    for step in range(24):
        lengths = [1 + int(program.random.integers(0, 9)), 1]
        layers = [layer for layer in range(4) if program.random.integers(0, 2)]
        program.forward([0, 1], lengths, layers=layers)
        if step % 8 == 5:
            program.pop(0, 1)
        if step % 8 == 7:
            program.fork(0, 2 + step)
            program.forward([2 + step], [4], layers=layers[:1])


def test_a_forward_that_ran_no_layer_may_end(installed: None) -> None:
    program = Program(dtype="float16")
    program.add(0)
    program.forward([0], [5], layers=[])
    program.forward([0], [1])


def test_pages_that_others_had_are_never_seen(installed: None) -> None:
    """A layer that did not run gets zeros where another sequence's keys were."""
    program = Program(tokens=64, sequences=2)
    for seq in range(6):
        program.add(seq)
        program.forward([seq], [60])
        program.remove(seq)
        program.add(seq)
        program.forward([seq], [59], layers=[seq % 2])
        program.forward([seq], [1])
        program.remove(seq)


@SIZES
@pytest.mark.parametrize("partition, stage", [([0, 2, 4], 0), ([0, 2, 4], 1), ([0, 1, 2, 4], 2)])
def test_a_pipeline_stage_runs_its_layers_alone(
    size: dict[str, Any], partition: list[int], stage: int
) -> None:
    quire.tvm.install(pipeline_stage=stage)
    try:
        program = Program(kinds=(0,) * 4, partition=partition, **size)
        first, count = partition[stage], partition[stage + 1] - partition[stage]
        program.at_stage(first, count)
        run(program, PREFILL_AND_DECODE)
        with pytest.raises(quire.BadArgumentError, match="has no layer"):
            program.cache.attend(first - 1, np.zeros((1, 8, size["dim"]), size["dtype"]), 2)
        program.add(7)
        program.forward([7], [4], layers=[0])
    finally:
        quire.tvm.uninstall()


# ---------------------------------------------------------------------- layers with windows


@SIZES
@pytest.mark.parametrize("rope_mode", [NONE, INLINE], ids=["none", "inline"])
@pytest.mark.parametrize("layers", [None, [1]], ids=str)
def test_a_window_of_a_layer(
    installed: None, size: dict[str, Any], rope_mode: int, layers: list[int] | None
) -> None:
    program = Program(kinds=(0, 3), layer_window=20, rope_mode=rope_mode, **size)
    program.reads_back = False
    run(program, PREFILL_AND_DECODE, layers=layers)
    program.fork(3, 6)
    program.forward([6, 3], [5, 30], layers=layers)
    program.forward([6, 3, 1], [1, 1, 1], layers=layers)


@SIZES
@ROPES
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("layers", [None, [0]], ids=["all", "one"])
def test_shared_kv(
    installed: None,
    size: dict[str, Any],
    rope_mode: int,
    window: int | None,
    layers: list[int] | None,
) -> None:
    """The keys and values of layer 0, with a window of its own or without."""
    kinds = (0, 0) if window is None else (3, 0)
    program = Program(kinds=kinds, layer_window=window, rope_mode=rope_mode, **size)
    program.reads_back = window is None
    run(program, PREFILL_AND_DECODE, layers=layers, shared=3)
    program.fork(3, 4)
    program.forward([4, 0], [8, 1], layers=layers, shared=2)


# ---------------------------------------------------------------------- windows of sequences


@SIZES
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "one"])
def test_windows_of_sequences(
    installed: None, size: dict[str, Any], sinks: int, layers: list[int] | None
) -> None:
    program = Program(windows=True, rope_mode=INLINE, **size)
    for seq, window in ((0, 20), (1, 25), (2, 0)):
        program.add(seq)
        if window:
            program.slide(seq, window, sinks)
    for lengths in ([20, 30, 40], [6, 5, 4], [6, 5, 4], [1, 1, 1], [1, 1, 1]):
        program.forward([0, 1, 2], lengths, layers=layers)
    program.fork(0, 3)
    program.slide(3, 20, sinks)
    program.forward([3, 0], [7, 2], layers=layers)
    program.forward([3, 0, 2], [1, 1, 1], layers=layers)


# ---------------------------------------------------------------------- trees


def grow(program: Program, seqs: Sequence[int], new: Sequence[int]) -> None:
    """Forwards of so many new nodes; node k hangs below (k - 1) // 2."""
    size = 0
    for count in new:
        parents = [-1 if n == 0 else (n - 1) // 2 for n in range(size, size + count)]
        program.forward(seqs, [count] * len(seqs), parents * len(seqs))
        size += count


def make_seqs(program: Program) -> list[int]:
    for seq, length in ((0, 10), (1, 33), (2, 3)):
        program.add(seq)
        program.forward([seq], [length])
    program.fork(1, 3, 17)
    return [0, 1, 2, 3]


@SIZES
@pytest.mark.parametrize("rope_mode", [NONE, NORMAL], ids=["none", "normal"])
def test_one_tree_after_the_other(installed: None, size: dict[str, Any], rope_mode: int) -> None:
    program = Program(rope_mode=rope_mode, **size)
    seqs = make_seqs(program)
    for leaves in ([3, 14, 0, 5], [7, -1, 12, 1]):
        grow(program, seqs, [15])
        program.commit(seqs, leaves)
    program.forward(seqs, [1] * 4)


@SIZES
@pytest.mark.parametrize("rope_mode", [NONE, NORMAL], ids=["none", "normal"])
def test_a_tree_that_grows(installed: None, size: dict[str, Any], rope_mode: int) -> None:
    """Its nodes are read after every forward; it is committed at the end alone."""
    program = Program(rope_mode=rope_mode, **size)
    seqs = make_seqs(program)
    grow(program, seqs, [1, 2, 4, 8, 16])
    program.commit(seqs, [2, 6, -1, 4])
    assert [len(program.stored[s].tokens) for s in seqs] == [12, 36, 3, 20]
    program.forward(seqs, [1] * 4)


@SIZES
@pytest.mark.parametrize("rope_mode", [NONE, NORMAL], ids=["none", "normal"])
def test_a_tree_that_grows_with_tvms_lengths(
    tvm_lengths: None, size: dict[str, Any], rope_mode: int
) -> None:
    program = Program(rope_mode=rope_mode, tree_lengths=True, **size)
    seqs = make_seqs(program)
    grow(program, seqs, [1, 2, 4, 8, 16])
    program.commit(seqs, [2, 6, -1, 4])
    # Old length - (nodes of the last forward - length of the path).
    assert [len(program.stored[s].tokens) for s in seqs] == [
        length + 31 - (16 - path) for length, path in ((10, 2), (33, 3), (3, 0), (17, 3))
    ]
    program.forward(seqs, [1] * 4)
    grow(program, seqs, [15])  # of one forward: the accepted path
    program.commit(seqs, [3, 14, -1, 5])
    program.forward(seqs, [1] * 4)


def test_where_tvm_reads_behind_the_last_forward(tvm_lengths: None) -> None:
    program = Program(tree_lengths=True)
    program.add(0)
    grow(program, [0], [4, 2])
    before = program.cache.digest()
    with pytest.raises(quire.BadArgumentError, match="leaf 3 .* 2 nodes of the last forward"):
        program.cache.commit([0], [3])
    with pytest.raises(quire.BadArgumentError, match="named twice"):
        program.cache.commit([0, 0], [0, 0])
    with pytest.raises(quire.BadArgumentError, match="tree of 6 nodes"):
        program.cache.commit([0], [6])
    assert program.cache.digest() == before
    program.check(0)
    program.commit([0], [1])


@SIZES
def test_chains_as_trees(installed: None, size: dict[str, Any]) -> None:
    program = Program(rope_mode=NORMAL, **size)
    seqs = make_seqs(program)
    for leaves in ([4, 5, -1, 0], [5, 2, 3, -1]):
        node = 0
        for count in (1, 3, 2):
            chain = list(range(node - 1, node + count - 1))
            program.forward(seqs, [count] * 4, chain * 4)
            node += count
        program.commit(seqs, leaves)
        program.forward(seqs, [2] * 4)


@pytest.mark.parametrize("layers", [[1], [0], []], ids=str)
def test_trees_in_some_layers_only(installed: None, layers: list[int]) -> None:
    program = Program(rope_mode=NORMAL, dtype="float16")
    seqs = make_seqs(program)
    parents = [-1, 0, 0, 1, 1, 2, 2]
    program.forward(seqs, [7] * 4, parents * 4, layers=layers)
    program.commit(seqs, [6, 3, -1, 0])
    program.forward(seqs, [1] * 4)


def test_a_range_of_tokens_and_nodes(installed: None) -> None:
    program = Program()
    program.add(0)
    program.forward([0], [5])
    grow(program, [0], [1, 2])
    shape = (2, 2, 64)
    whole = program.cache.kv(0, 0, 8, shape)
    for start, end in ((0, 5), (3, 7), (5, 8), (7, 8)):
        part = program.cache.kv(0, start, end, shape)
        for one, all_ in zip(part, whole):
            np.testing.assert_array_equal(one, all_[:, start:end])
    with pytest.raises(quire.BadArgumentError, match="length 8"):
        program.cache.kv(0, 0, 9, shape)
