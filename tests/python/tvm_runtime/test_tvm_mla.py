"""Layers of kind MLA behind TVM's names: beside TVM's own cache, and against plain attention where
TVM refuses them (windows, trees, other kinds of layers beside them) or is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tvm_calls import (
    Calls,
    create_arguments,
    path_to,
    plain_attention,
    unused_kernel,
    visible_rows,
)
from tvm_mla import (
    DECODE,
    DIM,
    EXTEND,
    HEADS,
    PREFILL,
    RANK,
    ROPE,
    SCALE,
    WIDTH,
    MlaCache,
    causal,
    output,
    tensor,
)

import quire
import quire.tvm

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


# ---------------------------------------------------------------------- beside TVM's own


class Pair:
    """TVM's cache, ours, and the tokens that both must have."""

    MAX_SEQUENCES = 6
    CHUNK = 24

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        sizes = {"sequences": self.MAX_SEQUENCES, "tokens": 1024, "chunk": self.CHUNK}
        self.caches = [MlaCache(oracle=True, **sizes)]
        quire.tvm.install()
        try:
            self.caches.append(MlaCache(**sizes))
        finally:
            quire.tvm.uninstall()
        self.tokens: dict[int, np.ndarray] = {}
        self.next_id = 0
        self.done: dict[str, int] = {}

    def below(self, n: int) -> int:
        return int(self.random.integers(0, n))

    def both(self, name: str, *arguments: Any) -> Any:
        theirs, ours = (getattr(cache, name)(*arguments) for cache in self.caches)
        if theirs is not None:
            assert theirs == ours, name
        return ours

    def pick(self) -> int | None:
        live = list(self.tokens)
        return live[self.below(len(live))] if live else None

    def length(self, seq: int) -> int:
        return int(self.tokens[seq].shape[1])

    # ---- Operations; each says what it did.

    def add(self) -> str | None:
        if len(self.tokens) == self.MAX_SEQUENCES:
            return None
        self.both("add_sequence", self.next_id)
        self.tokens[self.next_id] = np.zeros((2, 0, WIDTH), "float32")
        self.next_id += 1
        return "add"

    def remove(self) -> str | None:
        seq = self.pick()
        if seq is None or len(self.tokens) < 3:
            return None
        self.both("remove_sequence", seq)
        del self.tokens[seq]
        return "remove"

    def fork(self) -> str | None:
        seq = self.pick()
        if seq is None or len(self.tokens) == self.MAX_SEQUENCES:
            return None
        position = self.below(self.length(seq) + 1) if self.below(3) else -1
        self.both("fork_sequence", seq, self.next_id, position)
        end = self.length(seq) if position == -1 else position
        self.tokens[self.next_id] = self.tokens[seq][:, :end]
        self.next_id += 1
        return "fork"

    def pop(self) -> str | None:
        seq = self.pick()
        if seq is None:
            return None
        n = self.below(min(self.length(seq), 20) + 1)
        self.both("popn", seq, n)
        self.tokens[seq] = self.tokens[seq][:, : self.length(seq) - n]
        return "pop"

    def read(self) -> str | None:
        seq = self.pick()
        if seq is None or self.length(seq) == 0:
            return None
        start = self.below(self.length(seq))
        end = start + 1 + self.below(self.length(seq) - start)
        for cache in self.caches:
            latents = cache.latents(seq, start, end)
            np.testing.assert_array_equal(latents, self.tokens[seq][:, start:end, :DIM])
        return "read"

    def forward(self) -> str | None:
        new = [seq for seq in self.tokens if self.length(seq) == 0]
        batch = new if new and self.below(2) else [seq for seq in self.tokens if self.below(2)]
        if not batch:
            return None
        self.random.shuffle(batch)
        decodes = batch != new and self.below(2)
        most = self.CHUNK // len(batch)
        lengths = [1 if decodes else 1 + self.below(most) for _ in batch]
        rows = self.random.standard_normal((2, sum(lengths), WIDTH)).astype("float32")
        all_new = all(self.length(seq) == 0 for seq in batch)
        # As a model is compiled: with both pieces a forward of one token per sequence counts the
        # tokens twice in TVM.
        pieces = DECODE if max(lengths) == 1 else PREFILL if all_new else EXTEND
        self.both("begin", batch, lengths)
        self.both("positions")
        outputs = [
            [cache.run(layer, rows[layer], pieces) for layer in range(2)] for cache in self.caches
        ]
        self.both("end_forward")
        np.testing.assert_allclose(outputs[1], outputs[0], **TOLERANCE, err_msg=f"{lengths}")
        first = 0
        for seq, length in zip(batch, lengths):
            part = slice(first, first + length)
            self.tokens[seq] = np.concatenate([self.tokens[seq], rows[:, part]], axis=1)
            for layer, mla in enumerate(self.caches[1].mla):
                tokens = self.tokens[seq][layer]
                expected = mla.expected(tokens, causal(len(tokens)))[-length:]
                np.testing.assert_allclose(outputs[1][layer][part], expected, **TOLERANCE)
            first += length
        return {DECODE: "decode", PREFILL: "prefill", EXTEND: "extend"}[pieces]

    def step(self) -> None:
        kinds = [self.add, self.remove, self.fork, self.pop, self.read]
        kind = (kinds[self.below(len(kinds))] if self.below(2) else self.forward)()
        if kind is not None:
            self.done[kind] = self.done.get(kind, 0) + 1
        self.both("get_total_sequence_length")
        self.both("attention_kv_cache_empty")
        self.caches[1].digest()


def test_random_calls_give_the_same_on_both() -> None:
    done: dict[str, int] = {}
    for seed in range(3):
        pair = Pair(seed)
        for _ in range(70):
            pair.step()
        for kind, count in pair.done.items():
            done[kind] = done.get(kind, 0) + count
        for seq in list(pair.tokens):
            pair.both("remove_sequence", seq)
        assert pair.both("attention_kv_cache_empty")
    kinds = ["add", "remove", "fork", "pop", "read", "decode", "prefill", "extend"]
    assert {kind: done.get(kind, 0) > 3 for kind in kinds} == dict.fromkeys(kinds, True)


# ---------------------------------------------------------------------- defects of TVM


@pytest.mark.parametrize("pieces", [DECODE, EXTEND, ("cross", "self")])
def test_a_new_token_counts_once(as_tvm: bool, pieces: Sequence[str]) -> None:
    """In a forward of one token per sequence TVM's CrossAttention sees it, and its SelfAttention too:
    a model that is compiled to call both counts it twice there."""
    cache = MlaCache()
    tokens = {0: cache.rows(9), 1: cache.rows(0), 2: cache.rows(0)}
    for seq in (0, 1):
        cache.add_sequence(seq)
    cache.mla_forward([0], [9], tokens[0], PREFILL)
    cache.fork_sequence(0, 2, 6)
    tokens[2] = tokens[0][:, :6]
    for _ in range(3):  # sequence 1 has no tokens in the first one
        rows = cache.rows(3)
        outputs = cache.mla_forward([2, 1, 0], [1, 1, 1], rows, pieces)
        for row, seq in enumerate((2, 1, 0)):
            tokens[seq] = np.concatenate([tokens[seq], rows[:, row : row + 1]], axis=1)
            for layer, mla in enumerate(cache.mla):
                all_rows = tokens[seq][layer]
                expected = mla.expected(all_rows, causal(len(all_rows)))[-1]
                np.testing.assert_allclose(outputs[layer, row], expected, **TOLERANCE)


@pytest.mark.parametrize("sharers", [31, 32, 33, 40])
def test_b10_many_sharers_of_a_chain_see_themselves(as_tvm: bool, sharers: int) -> None:
    """Of two chains of three blocks, turn by turn in the batch."""
    cache = MlaCache(layers=1, sequences=sharers + 4, tokens=512)
    prefixes = []
    for family in range(2):
        first, second = 1000 + 2 * family, 1001 + 2 * family
        tokens = cache.rows(14)
        cache.add_sequence(first)
        cache.mla_forward([first], [8], tokens[:, :8], PREFILL)
        cache.fork_sequence(first, second, 8)
        cache.mla_forward([second], [6], tokens[:, 8:])
        prefixes.append((second, tokens))
    for child in range(sharers):
        cache.fork_sequence(prefixes[child % 2][0], child, 14)
    rows = cache.rows(sharers)
    outputs = cache.mla_forward(list(range(sharers)), [1] * sharers, rows, DECODE)
    for child in range(sharers):
        tokens = np.concatenate([prefixes[child % 2][1][0], rows[0, child : child + 1]])
        expected = cache.mla[0].expected(tokens, causal(15))[-1]
        np.testing.assert_allclose(outputs[0, child], expected, **TOLERANCE)


def test_b15_cross_attention_to_nothing_is_an_empty_set(as_tvm: bool) -> None:
    """Alone in the batch, where TVM writes nothing, and beside a sequence that has tokens."""
    cache = MlaCache(layers=1)
    mla = cache.mla[0]
    tokens = {0: cache.rows(7), 1: cache.rows(3)}
    for seq in tokens:
        cache.add_sequence(seq)
    cache.begin([0], [4])
    rows = tokens[0][0, :4]
    o, lse = cache.cross_piece(0, mla, rows)
    assert (o.numpy() == 0).all() and (lse.numpy() == -np.inf).all()
    alone = cache.run(0, rows, PREFILL)
    np.testing.assert_array_equal(cache.self_piece(0, mla, rows)[0].numpy(), alone)
    cache.end_forward()
    both = np.concatenate([tokens[1], tokens[0][:, 4:]], axis=1)
    outputs = cache.mla_forward([1, 0], [3, 3], both)[0]
    np.testing.assert_allclose(outputs[:3], mla.expected(tokens[1][0], causal(3)), **TOLERANCE)
    expected = mla.expected(tokens[0][0], causal(7))[4:]
    np.testing.assert_allclose(outputs[3:], expected, **TOLERANCE)


def test_refused_calls_leave_the_forward_to_be_aborted(as_tvm: bool) -> None:
    """TVM takes fewer rows than tokens and reads positions that have none."""
    cache = MlaCache(layers=1)
    mla = cache.mla[0]
    cache.add_sequence(0)
    cache.mla_forward([0], [3], cache.rows(3), PREFILL)
    before = cache.digest()
    rows = cache.rows(2)[0]
    for call, error in (
        (lambda: cache.append_mla_kv(0, tensor(rows[:1, :DIM])), quire.BadArgumentError),
        (lambda: cache.append_mla_kv(0, tensor(rows[:, : DIM - 1])), quire.BadArgumentError),
        (lambda: cache.append_mla_kv(1, tensor(rows[:, :DIM])), quire.BadArgumentError),
        (lambda: cache.attend(0, cache.qkv(2)[0], 1), quire.BadArgumentError),
        (lambda: cache.self_attention(-1, 1.0, *[output(2, 2, 4)] * 5), quire.BadArgumentError),
    ):
        cache.begin([0], [2])
        with pytest.raises(error):
            call()
        cache.cache.abort_forward()
        assert cache.digest() == before
    cache.begin([0], [1])
    with pytest.raises(quire.BadStateError, match="has not been appended"):
        cache.cross_piece(0, mla, rows[:1])
    cache.cache.abort_forward()
    with pytest.raises(quire.BadStateError):
        cache.cache.abort_forward()
    assert cache.digest() == before


# ---------------------------------------------------------------------- what TVM refuses


def test_a_decode_step_is_a_row_of_the_whole_prompt(as_tvm: bool) -> None:
    """Bit for bit, and that of quire.KVCache."""
    cache = MlaCache(layers=1)
    rows = cache.rows(20)[0]
    q, kv = cache.mla[0].absorbed(rows), rows[:, :DIM].copy()
    spec = quire.LayerSpec(HEADS, qk_head_dim=DIM, v_head_dim=RANK, latent=True)
    plain = quire.KVCache([spec], max_num_sequences=1, token_capacity=64, page_size=16)
    plain.add_sequence(0)
    with plain.forward([0], [20]):
        expected = plain.attention_with_mla(0, q, kv, sm_scale=SCALE)
    cache.add_sequence(0)
    cache.mla_forward([0], [11], rows[None, :11], PREFILL)
    for row in range(11, 20):
        o, lse = output(1, HEADS, RANK), output(1, HEADS)
        cache.begin([0], [1])
        cache.append_mla_kv(0, tensor(kv[row : row + 1]))
        cache.cross_attention(0, SCALE, tensor(q[row : row + 1]), o, lse)
        cache.end_forward()
        np.testing.assert_array_equal(o.numpy()[0], expected[row])
    np.testing.assert_array_equal(cache.latents(0)[0], kv)


@pytest.mark.parametrize("rope_mode", [0, 1, 2])
def test_layers_of_all_kinds_in_one_cache(as_tvm: bool, rope_mode: int) -> None:
    kinds = (0, 1, 3, 1)
    cache = MlaCache(kinds=kinds, heads=(HEADS, 2), layer_window=5, rope_mode=rope_mode, page_size=3)
    bare = MlaCache(layers=2)
    qkv, rows = cache.qkv(20), bare.rows(20)
    assert qkv.shape == (4, 20, HEADS + 4, DIM)

    def forward(seq: int, begin: int, end: int) -> list[np.ndarray]:
        cache.begin([seq], [end - begin])
        outputs = [
            cache.attend(layer, qkv[layer, begin:end].copy(), 2)
            if kind != 1
            else cache.run(layer, rows[layer // 2, begin:end], EXTEND)
            for layer, kind in enumerate(kinds)
        ]
        cache.end_forward()
        return outputs

    cache.mla[1], cache.mla[3] = bare.mla
    cache.add_sequence(0)
    first = forward(0, 0, 12)
    cache.popn(0, 1)
    cache.fork_sequence(0, 1, -1)
    rest = forward(1, 11, 20)
    window = [list(range(max(0, row - 4), row + 1)) for row in range(20)]
    bare.add_sequence(0)
    alone = [bare.mla_forward([0], [end - begin], rows[:, begin:end]) for begin, end in ((0, 11), (11, 20))]
    for layer, kind in enumerate(kinds):
        if kind == 1:
            np.testing.assert_array_equal(first[layer][:11], alone[0][layer // 2])
            np.testing.assert_array_equal(rest[layer], alone[1][layer // 2])
        elif rope_mode == 0:
            visible = window if kind == 3 else causal(20)
            expected = plain_attention(qkv[layer], visible, 2)
            np.testing.assert_allclose(first[layer][:11], expected[:11], **TOLERANCE)
            np.testing.assert_allclose(rest[layer], expected[11:], **TOLERANCE)
    latents = output(2, 20, DIM)
    cache.debug_get_kv_mla(1, 0, 20, latents)
    np.testing.assert_array_equal(latents.numpy(), rows[..., :DIM])
    k, v = cache.kv(1, 16, 20, (2, 2, DIM))  # what the window still holds
    np.testing.assert_array_equal(v, qkv[[0, 2], 16:, HEADS + 2 :])
    if rope_mode != 1:
        np.testing.assert_array_equal(k, qkv[[0, 2], 16:, HEADS : HEADS + 2])


LENGTHS = [[1] * 40, [13, 3, 1, 1, 20, 1, 1], [40]]


@pytest.mark.parametrize("window, sinks", [(8, 2), (8, 0), (1, 0), (5, 4)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_windows_of_sequences(as_tvm: bool, window: int, sinks: int, lengths: list[int]) -> None:
    cache = MlaCache(windows=True, tokens=256)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, window, sinks)
    rows = cache.rows(40)
    visible = visible_rows(lengths, window, sinks, as_tvm)
    expected = np.stack([mla.expected(part, visible) for mla, part in zip(cache.mla, rows)])
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        cache.begin([0], [length])
        # The model rotates by these what is stored.
        assert cache.positions() == list(range(begin, begin + length))
        outputs = np.stack([cache.run(layer, rows[layer, part], EXTEND) for layer in range(2)])
        cache.end_forward()
        np.testing.assert_allclose(outputs, expected[:, part], **TOLERANCE)
        begin += length
    # What a next query sees before itself.
    kept = [*range(sinks), *range(40 - (window - sinks) + (not as_tvm), 40)]
    assert cache.get_sequence_length(0) == len(kept)
    if kept:
        np.testing.assert_array_equal(cache.latents(0), rows[:, kept, :DIM])


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rope parts [..., ROPE] at these positions, interleaved pairs, theta 100."""
    angles = positions[..., None] * 100.0 ** -(np.arange(0, ROPE, 2) / ROPE)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return out


@pytest.mark.parametrize("lengths", LENGTHS)
def test_sinks_stand_before_the_window_where_the_rotation_is_known(
    as_tvm: bool, lengths: list[int]
) -> None:
    window, sinks = 8, 3
    quire.tvm.uninstall()
    rope = {"theta": 100.0, "pairing": "interleaved"}
    quire.tvm.install(tvm_window_span=as_tvm, rope=rope)
    cache = MlaCache(layers=1, windows=True, tokens=256)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, window, sinks)
    mla, bare = cache.mla[0], cache.rows(40)[0]
    positions = np.arange(40)
    rotated = bare.copy()
    rotated[:, RANK:DIM] = turned(bare[:, RANK:DIM], positions)
    queries = rotated[:, DIM:].reshape(40, HEADS, -1)
    queries[..., -ROPE:] = turned(bare[:, DIM:].reshape(40, HEADS, -1)[..., -ROPE:], positions[:, None])
    visible = visible_rows(lengths, window, sinks, as_tvm)
    expected = []
    for row, sees in enumerate(visible):
        # As if what has slid had never been: this row and those in its window stand further left.
        seen, hidden = np.array(sees), row + 1 - len(sees)
        moved = bare[seen].copy()
        at = np.where(seen < sinks, seen, seen - hidden)
        moved[:, RANK:DIM] = turned(moved[:, RANK:DIM], at)
        q = moved[-1, DIM:].reshape(HEADS, -1)
        q[:, -ROPE:] = turned(q[:, -ROPE:], np.full(HEADS, row - hidden))
        expected.append(mla.expected(moved, causal(len(moved)))[-1])
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        o = cache.mla_forward([0], [length], rotated[None, part])[0]
        np.testing.assert_allclose(o, np.array(expected)[part], **TOLERANCE)
        begin += length


def test_token_trees(as_tvm: bool) -> None:
    """Several forwards of trees of two sequences, one of them a fork, one forward of single nodes."""
    cache = MlaCache(tokens=256, page_size=3)
    tokens = {0: cache.rows(9), 1: cache.rows(0)}
    cache.add_sequence(0)
    cache.mla_forward([0], [9], tokens[0], PREFILL)
    cache.fork_sequence(0, 1, 7)
    tokens[1] = tokens[0][:, :7]
    parents: dict[int, list[int]] = {0: [], 1: []}
    nodes = {seq: cache.rows(0) for seq in tokens}
    rounds: list[tuple[dict[int, list[int]], Sequence[str]]] = [
        ({1: [-1, 0, 0], 0: [-1, 0, 1, 1]}, EXTEND),
        ({0: [3], 1: [1]}, DECODE),
        ({0: [2], 1: [2]}, ("cross", "self")),
        ({1: [3, 4, 5], 0: [4]}, EXTEND),
    ]
    for trees, pieces in rounds:
        rows = cache.rows(sum(map(len, trees.values())))
        flat = [parent for new in trees.values() for parent in new]
        lengths = [len(new) for new in trees.values()]
        outputs = cache.mla_forward(list(trees), lengths, rows, pieces, flat)
        first = 0
        for seq, new in trees.items():
            parents[seq] += new
            part = slice(first, first + len(new))
            nodes[seq] = np.concatenate([nodes[seq], rows[:, part]], axis=1)
            base = tokens[seq].shape[1]
            visible = causal(base)
            for node in range(len(parents[seq])):
                path = path_to(parents[seq], node)
                visible.append([*range(base), *(base + n for n in path)])
            for layer, mla in enumerate(cache.mla):
                whole = np.concatenate([tokens[seq][layer], nodes[seq][layer]])
                expected = mla.expected(whole, visible)[-len(new) :]
                np.testing.assert_allclose(outputs[layer, part], expected, **TOLERANCE)
            first = part.stop
        cache.digest()
    cache.commit([1, 0], [6, 4])
    for seq, leaf in ((1, 6), (0, 4)):
        accepted = nodes[seq][:, path_to(parents[seq], leaf)]
        tokens[seq] = np.concatenate([tokens[seq], accepted], axis=1)
        np.testing.assert_array_equal(cache.latents(seq), tokens[seq][..., :DIM])
    before = cache.digest()
    cache.begin([0], [2], [-1, 0])
    cache.cache.abort_forward()
    assert cache.digest() == before


def test_transfer(as_tvm: bool) -> None:
    """TVM sends nothing of such layers."""
    sender, receiver = (MlaCache(transfer=True, page_size=size) for size in (4, 16))
    alone = MlaCache()
    for cache in (sender, receiver, alone):
        cache.add_sequence(3)
    rows = sender.rows(12)
    slots = receiver.kv_cache_disagg_prepare_recv(3, 10)
    sender.mla_forward([3], [4], rows[:, :4])
    sender.kv_cache_disagg_mark_send(3, 0, slots, 1)
    sender.mla_forward([3], [6], rows[:, 4:10])
    out = receiver.mla_forward([3], [2], rows[:, 10:])
    alone.mla_forward([3], [10], rows[:, :10])
    np.testing.assert_array_equal(out, alone.mla_forward([3], [2], rows[:, 10:]))
    np.testing.assert_array_equal(receiver.latents(3), rows[..., :DIM])


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "options, message",
    [
        ({"value_dim": DIM + 1}, "v_head_dim.*at most qk_head_dim, 12"),
        ({"kinds": (1, 2)}, "kind 2, LinearAttn"),
        ({"kinds": (1, 4)}, "kind 4"),
        ({"kinds": (0, 0), "value_dim": RANK}, "without MLA layers"),
    ],
)
def test_arguments_of_creation(as_tvm: bool, options: dict[str, Any], message: str) -> None:
    given = {"kinds": (1, 1), "heads": (HEADS, 1), "dim": DIM, "value_dim": RANK, **options}
    with pytest.raises(quire.BadArgumentError, match=message):
        Calls().paged_attention_kv_cache_create(*create_arguments(**given))


def test_kernels_are_taken_and_not_called(as_tvm: bool) -> None:
    """Those of layers that are not there may be absent; FlashInfer's come with plans and dims."""
    arguments = create_arguments(kinds=(1,), heads=(HEADS, 1), dim=DIM, value_dim=RANK)
    arguments[13] = None
    arguments[15] = ["flashinfer", unused_kernel, unused_kernel, 10, 6]
    arguments[16:22] = [[]] * 6
    arguments[22] = ["flashinfer", unused_kernel, unused_kernel]
    arguments[23] = [unused_kernel, unused_kernel]
    arguments[24] = None
    cache = MlaCache(layers=1)
    cache.cache = cache.calls.paged_attention_kv_cache_create(*arguments)
    cache.add_sequence(0)
    rows = cache.rows(4)
    for begin, end, pieces in ((0, 2, PREFILL), (2, 3, DECODE), (3, 4, EXTEND)):
        o = cache.mla_forward([0], [end - begin], rows[:, begin:end], pieces)[0]
        expected = cache.mla[0].expected(rows[0, :end], causal(end))[begin:]
        np.testing.assert_allclose(o, expected, **TOLERANCE)
    cache.fork_sequence(0, 1, 3)
    np.testing.assert_array_equal(cache.latents(1), rows[:, :3, :DIM])
    arguments[14] = "x"
    with pytest.raises(quire.BadArgumentError, match="argument 14.*MLA append kernel"):
        cache.calls.paged_attention_kv_cache_create(*arguments)


def test_a_value_may_be_the_whole_key(as_tvm: bool) -> None:
    Calls().paged_attention_kv_cache_create(*create_arguments(kinds=(1,), dim=8))


def test_debug_get_names_what_is_wrong(as_tvm: bool) -> None:
    cache = MlaCache()
    cache.add_sequence(0)
    cache.mla_forward([0], [5], cache.rows(5), PREFILL)
    for start, end in ((0, 6), (-1, 2), (3, 3)):
        with pytest.raises(quire.BadArgumentError, match="no range of tokens"):
            cache.debug_get_kv_mla(0, start, end, output(2, max(end - start, 1), DIM))
    with pytest.raises(quire.BadArgumentError, match=r"kv must be \[MLA layers, 5, D\]"):
        cache.debug_get_kv_mla(0, 0, 5, output(2, 4, DIM))
    with pytest.raises(quire.BadArgumentError, match="MLA|latent"):
        cache.kv(0, 0, 5, (2, 1, DIM))
    with pytest.raises(quire.UnknownSequenceError):
        cache.debug_get_kv_mla(1, 0, 5, output(2, 5, DIM))
