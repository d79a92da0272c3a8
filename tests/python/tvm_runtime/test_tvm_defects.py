"""The defects of TVM's caches that docs/tvm.md lists, each provoked on ours through TVM's names."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm_calls import Calls, OneCache, plain_attention, unused_kernel

import quire
import quire.tvm

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

pytestmark = pytest.mark.usefixtures("as_tvm")


def assert_kept(cache: OneCache, seq: int, qkv: np.ndarray, tokens: list[int]) -> None:
    """The sequence holds these rows of qkv [layers, rows, heads, dim], in this order."""
    k, v = cache.kv_of(seq)
    hq, hkv = cache.qo_heads, cache.kv_heads
    np.testing.assert_array_equal(k, qkv[:, tokens, hq : hq + hkv])
    np.testing.assert_array_equal(v, qkv[:, tokens, hq + hkv :])


def kept_of(length: int, window: int, sinks: int, span: bool) -> list[int]:
    """Tokens that a next query sees when `length` were appended to a window."""
    last = length - (window - sinks) + (0 if span else 1)
    return [*range(sinks), *range(max(sinks, last), length)]


def grow(cache: OneCache, seq: int, qkv: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Appends rows [begin, end) one at a time."""
    parts = [cache.forward([seq], [1], qkv[:, i : i + 1]) for i in range(begin, end)]
    return np.concatenate(parts, axis=1)


# ---------------------------------------------------------------------- nothing changes on errors


def test_b1_a_refused_forward_changes_no_length() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    cache.add_sequence(1)
    cache.forward([0, 1], [4, 4])
    before = cache.digest()
    for ids, lengths, error in (
        ([0, 7], [3, 3], quire.UnknownSequenceError),
        ([0, 1], [3, 0], quire.BadArgumentError),
        ([0, 1], [3], quire.BadArgumentError),
        ([0, 1], [3, 62], quire.TooLargeError),
        ([0, 0], [1, 1], quire.BadArgumentError),  # B17
        ([], [], quire.BadArgumentError),  # B22
    ):
        with pytest.raises(error):
            cache.begin(ids, lengths)
        assert cache.digest() == before
    assert [cache.get_sequence_length(seq) for seq in (0, 1)] == [4, 4]
    with pytest.raises(quire.BadArgumentError):
        cache.kv(0, 0, 7, (2, 1, 8))


def test_b1_lacking_pages_take_none() -> None:
    cache = OneCache(tokens=12)  # 4 pages
    cache.add_sequence(0)
    cache.add_sequence(1)
    cache.forward([0], [12])
    before = cache.digest()
    with pytest.raises(quire.OutOfPagesError, match="3 pages"):
        cache.begin([1], [9])
    assert cache.digest() == before and cache.get_num_available_pages() == 1
    cache.remove_sequence(0)
    cache.forward([1], [9])


def test_b21_a_fork_on_a_full_cache_leaks_nothing() -> None:
    cache = OneCache(tokens=8, sequences=2)  # 3 pages
    cache.add_sequence(0)
    cache.forward([0], [10])
    cache.fork_sequence(0, 1, 6)
    with pytest.raises(quire.TooLargeError):
        cache.fork_sequence(0, 2, 3)
    cache.remove_sequence(0)
    cache.remove_sequence(1)
    assert cache.attention_kv_cache_empty() and cache.get_num_available_pages() == 3


def test_b19_ids_are_not_negative() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    with pytest.raises(quire.BadArgumentError):
        cache.add_sequence(-1)
    with pytest.raises(quire.BadArgumentError):
        cache.fork_sequence(0, -1, -1)


def test_b22_calls_out_of_order() -> None:
    cache = OneCache()
    cache.add_sequence(0)
    qkv = cache.qkv(2)
    for call in (
        lambda: cache.attend(0, qkv[0], 1),
        lambda: cache.get_query_positions(),
        lambda: cache.end_forward(),
    ):
        with pytest.raises(quire.BadStateError):
            call()
    cache.begin([0], [2])
    with pytest.raises(quire.BadStateError):
        cache.begin([0], [2])
    for layer in range(2):
        cache.attend(layer, qkv[layer], 1)
    cache.end_forward()
    with pytest.raises(quire.BadStateError):
        cache.end_forward()


def test_b15_cross_attention_to_nothing_is_an_empty_set() -> None:
    cache = OneCache(kinds=(0,))
    cache.add_sequence(0)
    cache.begin([0], [3])
    qkv = cache.qkv(3)[0]
    q, k, v = (np.ascontiguousarray(x) for x in (qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]))
    tensor = tvm.runtime.tensor
    o, o2 = (tensor(np.full((3, 2, 8), np.nan, "float32")) for _ in range(2))
    lse, lse2 = (tensor(np.full((3, 2), np.nan, "float32")) for _ in range(2))
    cache.cross_attention(0, 0.5, tensor(q), o, lse)
    assert (o.numpy() == 0).all() and (lse.numpy() == -np.inf).all()
    cache.self_attention(0, 0.5, tensor(q), tensor(k), tensor(v), o2, lse2)
    alone = o2.numpy()
    merged_o, merged_lse = cache.merge_attn_output_inplace(o, lse, o2, lse2)
    np.testing.assert_array_equal(merged_o.numpy(), alone)
    np.testing.assert_array_equal(merged_lse.numpy(), lse2.numpy())
    np.testing.assert_array_equal(o.numpy(), alone)


# ---------------------------------------------------------------------- windows of sequences


def test_b2_a_fork_in_the_sinks_after_sliding_leaves_the_parent(as_tvm: bool) -> None:
    cache = OneCache(windows=True, tokens=128)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 12, 6)
    qkv = cache.qkv(20)
    grow(cache, 0, qkv, 0, 20)
    kept = kept_of(20, 12, 6, as_tvm)
    assert_kept(cache, 0, qkv, kept)
    cache.fork_sequence(0, 1, 5)
    assert_kept(cache, 0, qkv, kept)
    assert_kept(cache, 1, qkv, [0, 1, 2, 3, 4])


def test_b3_a_window_over_many_blocks(as_tvm: bool) -> None:
    """The same tokens in one block and behind three forks: the same bits."""
    qkv = OneCache().qkv(40)
    outputs = []
    for forks in (False, True):
        cache = OneCache(windows=True, tokens=256)
        cache.add_sequence(0)
        seq = 0
        for begin, end in ((0, 4), (4, 8), (8, 12), (12, 14)):
            cache.forward([seq], [end - begin], qkv[:, begin:end])
            if forks:
                cache.fork_sequence(seq, seq + 1, -1)
                seq += 1
        cache.enable_sliding_window_for_seq(seq, 10, 3)
        outputs.append(grow(cache, seq, qkv, 14, 40))
        assert_kept(cache, seq, qkv, kept_of(40, 10, 3, as_tvm))
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_b4_a_pop_after_sliding_keeps_its_pages(as_tvm: bool) -> None:
    cache = OneCache(windows=True, tokens=24, chunk=32)
    cache.add_sequence(0)
    cache.add_sequence(1)
    cache.enable_sliding_window_for_seq(0, 8, 2)
    qkv = cache.qkv(15)
    grow(cache, 0, qkv, 0, 15)
    cache.popn(0, 1)
    # An exact window sees one token further back again, whose page is still held.
    expected = kept_of(15, 8, 2, True)[:-1] if as_tvm else kept_of(14, 8, 2, False)
    assert_kept(cache, 0, qkv, expected)
    while cache.get_num_available_pages() > 0:  # all that was freed is written by another one
        cache.forward([1], [1])
    assert_kept(cache, 0, qkv, expected)


def test_b4_a_pop_into_the_sinks_begins_anew(as_tvm: bool) -> None:
    cache = OneCache(windows=True, tokens=128)
    cache.add_sequence(0)
    cache.enable_sliding_window_for_seq(0, 8, 4)
    qkv = cache.qkv(20)
    grow(cache, 0, qkv, 0, 20)
    cache.popn(0, cache.get_sequence_length(0) - 3)
    assert_kept(cache, 0, qkv, [0, 1, 2])
    again = cache.qkv(20)
    again[:, :3] = qkv[:, :3]
    grow(cache, 0, again, 3, 20)
    assert_kept(cache, 0, again, kept_of(20, 8, 4, as_tvm))


def test_b5_a_pop_into_a_shared_block_keeps_the_window(as_tvm: bool) -> None:
    cache = OneCache(windows=True, tokens=128)
    cache.add_sequence(0)
    qkv = cache.qkv(30)
    cache.forward([0], [9], qkv[:, :9])
    cache.fork_sequence(0, 1, 9)
    cache.enable_sliding_window_for_seq(1, 12, 4)
    cache.forward([1], [1], qkv[:, 9:10])
    cache.popn(1, 4)
    assert cache.get_sequence_length(1) == 6 and cache.get_sequence_length(0) == 9
    grow(cache, 1, qkv, 6, 30)
    assert_kept(cache, 1, qkv, kept_of(30, 12, 4, as_tvm))
    assert_kept(cache, 0, qkv, list(range(9)))


# ---------------------------------------------------------------------- windows of layers


def layer_window(rows: int, window: int) -> list[list[int]]:
    return [list(range(max(0, row - window + 1), row + 1)) for row in range(rows)]


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_b11_windows_of_layers(window: int) -> None:
    """Exact in a chunk that is longer, on forks at every offset, and without a plain layer."""
    for kinds in ((0, 3), (3, 3)):
        cache = OneCache(kinds=kinds, layer_window=window, tokens=512, sequences=32)
        cache.add_sequence(0)
        qkv = cache.qkv(24)
        expected = [
            plain_attention(part, layer_window(24, window if kind == 3 else 1000), 1)
            for kind, part in zip(kinds, qkv)
        ]
        first = cache.forward([0], [20], qkv[:, :20])
        np.testing.assert_allclose(first, np.stack(expected)[:, :20], **TOLERANCE)
        for position in (20, 19, 18, 17):
            try:
                cache.fork_sequence(0, position, position)
            except quire.BadStateError:  # what it would see has slid out of the window
                assert position < 20 and 3 in kinds
                continue
            rest = cache.forward([position], [24 - position], qkv[:, position:])
            np.testing.assert_allclose(rest, np.stack(expected)[:, position:], **TOLERANCE)


def test_b11_a_window_of_layers_frees_memory() -> None:
    cache = OneCache(kinds=(3, 3), layer_window=4, tokens=16)
    cache.add_sequence(0)
    grow(cache, 0, cache.qkv(100), 0, 100)
    assert cache.get_sequence_length(0) == 100
    assert cache.get_num_available_pages() >= 3


def test_b11_inline_keys_take_the_real_theta() -> None:
    results = []
    for mode in (1, 2):
        cache = OneCache(rope_mode=mode, theta=500.0)
        cache.add_sequence(0)
        qkv = cache.qkv(12)
        cache.forward([0], [7], qkv[:, :7])
        results.append(cache.forward([0], [5], qkv[:, 7:]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_b12_outputs_are_numbers() -> None:
    for _ in range(20):
        cache = OneCache(kinds=(0, 3), layer_window=3)
        cache.add_sequence(0)
        for length in (3, 3, 2, 1):
            assert np.isfinite(cache.forward([0], [length])).all()


# ---------------------------------------------------------------------- recurrent states


class State:
    """One layer with one state of two numbers."""

    def __init__(self, history: int = 3, initial: float = 9.0, sequences: int = 4) -> None:
        self.calls = Calls()
        value = tvm.runtime.tensor(np.full(2, initial, "float32"))
        self.state = self.calls.rnn_state_create(1, sequences, history, [unused_kernel], [unused_kernel], [value])

    def begin(self, ids: list[int], lengths: list[int]) -> None:
        self.calls.begin(self.state, ids, lengths)

    def get(self, batch: int = 1) -> list[float]:
        o = tvm.runtime.tensor(np.full((batch, 2), np.nan, "float32"))
        self.calls.rnn_state_get(self.state, 0, 0, o)
        return [float(x) for x in o.numpy()[:, 0]]

    def set(self, *values: float) -> None:
        data = np.repeat(np.array(values, "float32")[:, None], 2, axis=1)
        given = self.calls.rnn_state_set(self.state, 0, 0, tvm.runtime.tensor(data))
        assert given.same_as(self.state)

    def forward(self, value: float, length: int = 1, seq: int = 0) -> None:
        self.begin([seq], [length])
        self.set(value)
        self.calls.end_forward(self.state)

    def now(self, seq: int = 0) -> float:
        return float(self.calls.rnn_state_debug_get(self.state, 0, 0, seq).numpy()[0])

    def add(self, seq: int) -> None:
        self.calls.add_sequence(self.state, seq)

    def pop(self, n: int, seq: int = 0) -> None:
        self.calls.popn(self.state, seq, n)

    def fork(self, parent: int, child: int, position: int) -> None:
        self.calls.fork_sequence(self.state, parent, child, position)


def test_history_goes_back() -> None:
    state = State()
    state.add(0)
    assert state.now() == 9
    for value in (1, 2, 3, 4):
        state.forward(value)
    state.pop(1)
    assert state.now() == 3
    state.pop(1)
    assert state.now() == 2
    with pytest.raises(quire.NeedsReplayError):
        state.pop(1)
    state.forward(7)
    state.pop(1)
    assert state.now() == 2


def test_a_prefill_is_one_step_of_history() -> None:
    state = State(history=4)
    state.add(0)
    state.forward(1)
    state.forward(2)
    state.forward(5, length=4)
    with pytest.raises(quire.NeedsReplayError):
        state.pop(1)
    state.forward(6)
    with pytest.raises(quire.NeedsReplayError):
        state.pop(2)
    state.pop(1)
    assert state.now() == 5
    state.pop(4)  # TVM forgets what was before a prefill
    assert state.now() == 2


def test_forks_have_a_history_of_their_own() -> None:
    state = State()
    state.add(0)
    for value in (1, 2, 3):
        state.forward(value)
    state.fork(0, 1, -1)
    state.pop(2, seq=1)
    assert state.now(1) == 1 and state.now(0) == 3


def test_b20_the_position_of_a_fork_counts() -> None:
    state = State()
    state.add(0)
    for value in (1, 2, 3):
        state.forward(value)
    state.fork(0, 1, 2)
    assert state.now(1) == 2
    with pytest.raises(quire.BadArgumentError):
        state.fork(0, 2, 99)
    state.forward(4)
    with pytest.raises(quire.NeedsReplayError):
        state.fork(0, 2, 1)


def test_b20_what_is_not_set_does_not_end() -> None:
    state = State()
    state.add(0)
    state.begin([0], [1])
    with pytest.raises(quire.BadStateError, match="was not set"):
        state.calls.end_forward(state.state)
    state.set(1)
    state.calls.end_forward(state.state)
    with pytest.raises(quire.BadStateError):
        state.calls.end_forward(state.state)
    assert state.now() == 1


def test_b20_forwards_do_not_nest_and_have_tokens() -> None:
    state = State()
    state.add(0)
    state.add(1)
    with pytest.raises(quire.BadArgumentError):
        state.begin([0], [0])
    state.begin([0], [1])
    with pytest.raises(quire.BadStateError):
        state.begin([1], [1])
    with pytest.raises(quire.BadStateError):
        state.calls.remove_sequence(state.state, 0)
    assert state.get() == [9]
    state.set(1)
    state.calls.end_forward(state.state)
    state.state.check_invariants()


def test_only_chains_are_begun() -> None:
    state = State()
    state.add(0)
    state.add(1)
    for parents in ([-1, 0, 0, -1], [-1, 0, 1], [-1, 0, 1, -1, 0]):
        with pytest.raises(quire.BadArgumentError, match="parent"):
            state.calls.begin(state.state, [0, 1], [3, 1], parents)
    state.calls.begin(state.state, [0, 1], [3, 1], [-1, 0, 1, -1])
    state.set(1, 2)
    state.calls.end_forward(state.state)
    assert (state.now(0), state.now(1)) == (1, 2)


@pytest.mark.parametrize("history", [1, 2])
def test_get_after_set(as_tvm: bool, history: int) -> None:
    """The option tvm_rnn_history1."""
    state = State(history=history)
    state.add(0)
    state.begin([0], [1])
    assert state.get() == [9]
    state.set(5)
    assert state.get() == [5 if as_tvm and history == 1 else 9]
    state.calls.end_forward(state.state)
    assert state.now() == 5


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 1, 1, 1, 1, 1), "number of layers"),
        ((1, 0, 1, 1, 1, 1), "max_num_sequences"),
        ((1, 1, 0, 1, 1, 1), "max_history"),
        ((1, 1, 1, 2, 1, 1), "2 functions for 1 states"),
        ((1, 1, 1, 1, 0, 1), "0 functions for 1 states"),
        ((1, 1, 1, 0, 0, 0), "initial values"),
    ],
)
def test_arguments_of_a_recurrent_state(arguments: tuple[int, ...], message: str) -> None:
    layers, sequences, history, gets, sets, values = arguments
    initial = [tvm.runtime.tensor(np.zeros(2, "float32"))] * values
    with pytest.raises(quire.BadArgumentError, match=message):
        Calls().rnn_state_create(
            layers, sequences, history, [unused_kernel] * gets, [unused_kernel] * sets, initial
        )
