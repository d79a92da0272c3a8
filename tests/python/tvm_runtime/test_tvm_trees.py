"""Token trees behind TVM's names: defects of TVM's caches provoked on ours, ``tvm_tree_commit``,
and random calls on both where TVM is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tvm_ffi
import tvm_llama
from tvm_calls import (
    Calls,
    OneCache,
    create_arguments,
    function,
    path_to,
    plain_attention,
    unused_kernel,
)

import quire
import quire.tvm

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Trees(OneCache):
    """A cache whose every forward is compared with plain attention, and every commit with the
    tokens that it must leave."""

    def __init__(self, arguments: list[Any] | None = None, **options: Any) -> None:
        super().__init__(arguments, **options)
        shape = (self.layers, 0, self.qo_heads + 2 * self.kv_heads, self.dim)
        self._none = np.zeros(shape, "float32")
        self.tokens: dict[int, np.ndarray] = {}
        self.nodes: dict[int, np.ndarray] = {}
        self.parents: dict[int, list[int]] = {}

    def add(self, seq: int, length: int) -> None:
        self.add_sequence(seq)
        self.tokens[seq] = self._none
        self.drop_nodes(seq)
        if length:
            self.tokens[seq] = self.qkv(length)
            self.forward([seq], [length], self.tokens[seq])

    def fork(self, parent: int, child: int, position: int) -> None:
        self.fork_sequence(parent, child, position)
        self.tokens[child] = self.tokens[parent][:, :position]
        self.drop_nodes(child)

    def drop_nodes(self, seq: int) -> None:
        self.nodes[seq], self.parents[seq] = self._none, []

    def grow(self, trees: dict[int, list[int]]) -> None:
        """A forward of new nodes; parents count all nodes of a sequence."""
        parts = {seq: self.qkv(len(parents)) for seq, parents in trees.items()}
        rows = np.concatenate(list(parts.values()), axis=1)
        flat = [parent for parents in trees.values() for parent in parents]
        outputs = self.forward(list(trees), [len(p) for p in trees.values()], rows, flat)
        first = 0
        for seq, parents in trees.items():
            self.parents[seq] += parents
            self.nodes[seq] = np.concatenate([self.nodes[seq], parts[seq]], axis=1)
            self.check_rows(seq, outputs[:, first : first + len(parents)])
            first += len(parents)

    def check_rows(self, seq: int, outputs: np.ndarray) -> None:
        base, size = self.tokens[seq].shape[1], len(self.parents[seq])
        rows = np.concatenate([self.tokens[seq], self.nodes[seq]], axis=1)
        visible = [[row] for row in range(base)]
        for node in range(size):
            path = path_to(self.parents[seq], node)
            visible.append([*range(base), *(base + n for n in path)])
        for layer in range(self.layers):
            expected = plain_attention(rows[layer], visible, self.kv_heads)
            count = outputs.shape[1]
            np.testing.assert_allclose(outputs[layer], expected[-count:], **TOLERANCE)

    def accept(self, seqs: Sequence[int], leaves: Sequence[int]) -> None:
        self.commit(seqs, leaves)
        for seq, leaf in zip(seqs, leaves):
            accepted = self.nodes[seq][:, path_to(self.parents[seq], leaf)]
            self.tokens[seq] = np.concatenate([self.tokens[seq], accepted], axis=1)
            self.drop_nodes(seq)
            self.check_tokens(seq)

    def check_tokens(self, seq: int) -> None:
        rows = self.tokens[seq]
        assert self.get_sequence_length(seq) == rows.shape[1]
        if rows.shape[1] == 0:
            return
        k, v = self.kv_of(seq)
        np.testing.assert_array_equal(k, rows[:, :, self.qo_heads : self.qo_heads + self.kv_heads])
        np.testing.assert_array_equal(v, rows[:, :, self.qo_heads + self.kv_heads :])


def test_one_tree_of_six(as_tvm: bool) -> None:
    trees = Trees()
    trees.add(0, 5)
    trees.begin([0], [6], [-1, 0, 0, 1, 1, 2])
    assert trees.positions() == [5, 6, 6, 7, 7, 7]
    for layer, rows in enumerate(trees.qkv(6)):
        trees.attend(layer, rows, trees.kv_heads)
    trees.end_forward()
    assert trees.get_total_sequence_length() == 11
    trees.commit([0], [-1])
    trees.grow({0: [-1, 0, 0, 1, 1, 2]})
    trees.accept([0], [4])
    trees.check_tokens(0)
    assert trees.get_sequence_length(0) == 8


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_b6_trees_and_chains_are_committed_by_id(as_tvm: bool, order: list[int]) -> None:
    trees = Trees()
    for seq in range(3):
        trees.add(seq, 3 + 2 * seq)
    trees.grow({0: [-1, 0, 0, 1], 1: [-1, 0, 1], 2: [-1, -1, 1]})
    leaves = {0: 3, 1: 0, 2: 2}
    trees.accept(order[:2], [leaves[seq] for seq in order[:2]])  # a subset
    trees.accept(order[2:], [leaves[seq] for seq in order[2:]])
    trees.cache.check_invariants()


def test_b7_a_path_reaches_into_an_earlier_forward(as_tvm: bool) -> None:
    trees = Trees()
    trees.add(0, 4)
    trees.grow({0: [-1]})
    trees.grow({0: [0, 0]})
    trees.accept([0], [2])
    assert trees.get_sequence_length(0) == 6
    trees.grow({0: [-1, 0]})
    trees.grow({0: [-1, 2, 2]})
    trees.accept([0], [4])  # wholly in the last forward
    assert trees.get_sequence_length(0) == 8


def test_b8_a_commit_is_not_repeated(as_tvm: bool) -> None:
    trees = Trees()
    trees.add(0, 4)
    trees.add(1, 4)
    trees.grow({0: [-1, 0, 0]})
    trees.accept([0], [2])
    before = trees.digest()
    for seq in (0, 1):
        with pytest.raises(quire.BadStateError, match="no uncommitted tree"):
            trees.commit([seq], [-1])
        assert trees.digest() == before
    trees.check_tokens(0)


def test_b9_popn_shrinks_the_tree(as_tvm: bool) -> None:
    trees = Trees()
    trees.add(0, 4)
    trees.grow({0: [-1, 0, 1, 1]})
    trees.popn(0, 2)
    trees.parents[0] = trees.parents[0][:2]
    trees.nodes[0] = trees.nodes[0][:, :2]
    with pytest.raises(quire.BadArgumentError, match="node 2"):
        trees.begin([0], [1], [3])
    trees.grow({0: [1, 1]})
    trees.accept([0], [3])
    trees.grow({0: [-1, 0]})
    trees.popn(0, 4)  # the tree and two tokens
    trees.tokens[0] = trees.tokens[0][:, :5]
    trees.drop_nodes(0)
    trees.check_tokens(0)
    trees.forward([0], [1])


def test_b13_b14_later_forwards_of_chains_and_of_mixed_depths(as_tvm: bool) -> None:
    trees = Trees(tokens=256)
    trees.add(0, 9)
    trees.fork(0, 1, 7)
    trees.add(2, 3)
    trees.grow({2: [-1], 1: [-1, 0], 0: [-1, 0, 1]})
    trees.grow({2: [0, 0, 0], 1: [1, 2, 3], 0: [2, 3, 3]})
    trees.grow({0: [5, 5], 2: [3]})
    trees.accept([2, 0, 1], [4, 7, 4])


@pytest.mark.parametrize("given", ["swapped", "in order", "one", "none"])
def test_b24_kernels_of_trees_may_stand_in_either_place(as_tvm: bool, given: str) -> None:
    """TVM's builder for the CPU gives the paged kernel as argument 21 and the ragged one as 20."""
    paged, ragged, none = ["tirx", unused_kernel], ["tirx", lambda *_: unused_kernel()], []
    orders = {
        "swapped": (ragged, paged),
        "in order": (paged, ragged),
        "one": (none, paged),
        "none": (none, none),
    }
    arguments = create_arguments()
    arguments[20:22] = orders[given]
    trees = Trees(arguments)
    trees.add(0, 5)
    trees.add(1, 3)
    trees.grow({0: [-1, 0, 0, 2], 1: [-1, -1, 1]})  # TVM: ragged
    trees.grow({0: [1, 3], 1: [2, 2, 0]})  # TVM: paged
    trees.accept([1, 0], [4, 5])


def test_b25_windows_of_layers_stored_tokens_that_go_away_and_a_tree_at_once(as_tvm: bool) -> None:
    """One array each: of the layer's window, of the tokens to send, of the tree's ancestry."""
    shape = {"kinds": (0, 3), "layer_window": 4, "tokens": 128}
    sender, receiver = (Trees(transfer=True, page_size=size, **shape) for size in (4, 16))
    alone = OneCache(**shape)
    for seq, length in ((0, 4), (1, 7)):
        sender.add(seq, length)
    receiver.add(0, 0)
    alone.add_sequence(0)
    sender.kv_cache_disagg_mark_send(0, 0, receiver.kv_cache_disagg_prepare_recv(0, 8), 1)
    first, nodes, last = sender.tokens[0], sender.qkv(6), sender.qkv(3)
    parents = [-1, 0, 0]
    outputs = sender.forward([1, 0], [3, 3], nodes, [-1, -1, 1, *parents])
    rows = np.concatenate([first, nodes[:, 3:]], axis=1)
    for layer, window in ((0, 100), (1, 4)):
        visible = [[row] for row in range(4)]
        for node in range(3):
            visible.append([*range(4), *(4 + n for n in path_to(parents, node))][-window:])
        expected = plain_attention(rows[layer], visible, sender.kv_heads)
        np.testing.assert_allclose(outputs[layer, 3:], expected[4:], **TOLERANCE)
    sender.commit([0], [2])
    sender.forward([0], [2], last[:, :2])
    tokens = np.concatenate([first, nodes[:, [3, 5]], last[:, :2]], axis=1)
    alone.forward([0], [8], tokens)
    np.testing.assert_array_equal(
        receiver.forward([0], [1], last[:, 2:]), alone.forward([0], [1], last[:, 2:])
    )
    for cache in (sender, receiver):
        cache.digest()


def test_what_is_refused_changes_nothing(as_tvm: bool) -> None:
    trees = Trees(tokens=1024, chunk=512)
    trees.add(0, 2)
    trees.add(1, 2)
    before = trees.digest()
    for lengths, parents in (
        ([2, 1], [-1, 1, -1]),
        ([1, 1], [-2, -1]),
        ([2, 1], [-1, 0]),
        ([1, 1], [-1, -1, 0]),
    ):
        with pytest.raises(quire.BadArgumentError):
            trees.begin([0, 1], lengths, parents)
        assert trees.digest() == before
    with pytest.raises(quire.TooLargeError, match="max_tree_size is 256"):
        trees.begin([0], [257], [-1] * 257)
    assert trees.digest() == before
    trees.grow({0: [-1] * 256})
    with pytest.raises(quire.BadStateError, match="uncommitted tree"):
        trees.begin([0], [1])


@pytest.mark.parametrize("rope_mode", [0, 2])
def test_trees_under_windows(as_tvm: bool, rope_mode: int) -> None:
    """TVM refuses them: a node sees what a token at its place would see."""
    shape = {"windows": True, "rope_mode": rope_mode, "tokens": 256}
    trees, plain = OneCache(**shape), OneCache(**shape)
    for cache in (trees, plain):
        cache.add_sequence(0)
        cache.enable_sliding_window_for_seq(0, 9, 2)
    rows = trees.qkv(40)
    for cache in (trees, plain):
        cache.forward([0], [30], rows[:, :30])
    nodes = trees.forward([0], [4], rows[:, 30:34], [-1, 0, 0, 2])
    trees.commit([0], [3])
    chain = plain.forward([0], [3], rows[:, [30, 32, 33]])
    np.testing.assert_array_equal(nodes[:, [0, 2, 3]], chain)
    for cache in (trees, plain):
        cache.begin([0], [1])
    assert trees.positions() == plain.positions()


def test_shared_kv_and_pieces_in_a_tree(as_tvm: bool) -> None:
    trees = Trees(kinds=(0,))
    trees.add(0, 5)
    rows = trees.qkv(3)
    trees.begin([0], [3], [-1, 0, 0])
    whole = trees.attend(0, rows[0], trees.kv_heads)
    q, k, v = (
        np.ascontiguousarray(rows[0, :, begin:end]) for begin, end in ((0, 2), (2, 3), (3, 4))
    )
    tensor = tvm_llama.tvm.runtime.tensor
    empty = [tensor(np.full((3, 2, 8), np.nan, "float32")) for _ in range(3)]
    lse = [tensor(np.full((3, 2), np.nan, "float32")) for _ in range(2)]
    scale = 8**-0.5
    q, k, v = tensor(q), tensor(k), tensor(v)
    trees.attention_with_shared_kv(0, scale, q, k, v, empty[0])
    trees.self_attention(0, scale, q, k, v, empty[1], lse[0])
    trees.cross_attention(0, scale, q, empty[2], lse[1])
    trees.merge_attn_output_inplace(empty[1], lse[0], empty[2], lse[1])
    np.testing.assert_array_equal(empty[0].numpy(), whole)
    np.testing.assert_allclose(empty[1].numpy(), whole, **TOLERANCE)
    trees.end_forward()


def test_accepting_nothing_takes_back_the_last_forward(as_tvm: bool) -> None:
    trees = Trees()
    trees.add(0, 4)
    trees.grow({0: [-1, 0]})
    trees.grow({0: [1, 2, 2]})
    trees.commit([0], [-1])
    kept = trees.nodes[0][:, :2] if as_tvm else trees.nodes[0][:, :0]
    trees.tokens[0] = np.concatenate([trees.tokens[0], kept], axis=1)
    trees.drop_nodes(0)
    trees.check_tokens(0)
    # Of one forward, and behind nodes that do not follow one another, all go.
    trees.grow({0: [-1, 0]})
    trees.accept([0], [-1])
    trees.grow({0: [-1, -1]})
    trees.grow({0: [1]})
    trees.accept([0], [-1])
    # PopN may take back whole forwards.
    trees.grow({0: [-1, 0]})
    trees.grow({0: [1]})
    trees.popn(0, 1)
    trees.drop_nodes(0)
    trees.commit([0], [-1])
    trees.check_tokens(0)


# ---------------------------------------------------------------------- beside TVM's own


@pytest.fixture
def mended_creation() -> Iterator[None]:
    """TVM's builder for the CPU gives the two kernels of trees in each other's place (B24)."""
    name = "vm.builtin.paged_attention_kv_cache_create"
    original = function("paged_attention_kv_cache_create")

    def create(*arguments: Any) -> Any:
        given = list(arguments)
        given[20], given[21] = given[21], given[20]
        return original(*given)

    tvm_ffi.register_global_func(name, create, override=True)
    yield
    tvm_ffi.register_global_func(name, original, override=True)


class Pair:
    def __init__(self, seed: int, **options: Any) -> None:
        self.random = np.random.default_rng(seed)
        self.sides = [(Calls(), self.new_cache())]
        quire.tvm.install(**options)
        try:
            self.sides.append((Calls(), self.new_cache()))
        finally:
            quire.tvm.uninstall()

    def new_cache(self) -> Any:
        return tvm_llama.new_cache(
            tvm_llama.new_machine(), sequences=6, tokens=2048, chunk=64, windows=False
        )

    def below(self, n: int) -> int:
        return int(self.random.integers(0, n))

    def both(self, name: str, *arguments: Any) -> None:
        for calls, cache in self.sides:
            getattr(calls, name)(cache, *arguments)

    def forward(self, ids: list[int], lengths: list[int], parents: list[int] | None) -> None:
        heads = tvm_llama.QO_HEADS + 2 * tvm_llama.KV_HEADS
        shape = (tvm_llama.LAYERS, sum(lengths), heads, tvm_llama.HEAD_DIM)
        qkv = self.random.standard_normal(shape).astype("float32")
        self.both("begin", ids, lengths, parents)
        assert self.sides[0][0].positions(self.sides[0][1]) == self.sides[1][0].positions(
            self.sides[1][1]
        )
        for layer in range(tvm_llama.LAYERS):
            theirs, ours = (
                calls.attend(cache, layer, qkv[layer], tvm_llama.KV_HEADS)
                for calls, cache in self.sides
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        self.both("end_forward")

    def tree(self, size: int, chain: bool) -> list[int]:
        """Parents of nodes; no chain unless it is to be one."""
        parents = [-1, *(self.below(n + 1) - 1 for n in range(1, size))]
        if chain:
            return list(range(-1, size - 1))
        return [*parents, -1, 0] if size < 3 or parents == [*range(-1, size - 1)] else parents

    def check(self, ids: list[int]) -> None:
        shape = (tvm_llama.LAYERS, tvm_llama.KV_HEADS, tvm_llama.HEAD_DIM)
        for seq in ids:
            lengths = [calls.get_sequence_length(cache, seq) for calls, cache in self.sides]
            assert lengths[0] == lengths[1]
            theirs, ours = (calls.kv(cache, seq, 0, lengths[0], shape) for calls, cache in self.sides)
            np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(ours[1], theirs[1])


def test_random_trees_give_the_same_on_both(mended_creation: None) -> None:
    for seed in range(2):
        pair = Pair(seed)
        ids = [0, 1, 2]
        for seq in ids[:2]:
            pair.both("add_sequence", seq)
        pair.forward([0, 1], [20, 7], None)
        pair.both("fork_sequence", 0, 2, 13)
        pair.forward([2], [5], None)
        for _ in range(8):
            pair.random.shuffle(ids)
            batch = ids[: 1 + pair.below(3)]
            # B6: all of the batch in its order, the last one no chain.
            trees = [pair.tree(1 + pair.below(12), chain=pair.below(3) == 0) for _ in batch[1:]]
            trees.append(pair.tree(1 + pair.below(12), chain=False))
            pair.forward(batch, [len(t) for t in trees], [p for t in trees for p in t])
            pair.both("commit", batch, [pair.below(len(t) + 1) - 1 for t in trees])
            pair.check(ids)
            pair.forward(batch, [1 + pair.below(3) for _ in batch], None)


@pytest.mark.parametrize("leaves", [[2, 6, -1, 4], [0, 15, 5, 7], [-1, -1, 14, 1]], ids=str)
def test_a_tree_of_five_forwards_has_tvms_tokens(mended_creation: None, leaves: list[int]) -> None:
    """With tvm_tree_lengths; its nodes are read after every forward."""
    pair = Pair(0, tvm_tree_lengths=True)
    ids = [0, 1, 2, 3]
    for seq, length in zip(ids, (20, 7, 16, 1)):
        pair.both("add_sequence", seq)
        pair.forward([seq], [length], None)
    size = 0
    for count in (1, 2, 4, 8, 16):
        parents = [-1 if n == 0 else (n - 1) // 2 for n in range(size, size + count)]
        pair.forward(ids, [count] * 4, parents * 4)
        pair.check(ids)
        size += count
    pair.both("commit", ids, leaves)
    pair.check(ids)
    pair.forward(ids, [1] * 4, None)
    pair.check(ids)
