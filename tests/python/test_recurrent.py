"""quire.RNNState and quire.RecurrentCache against plain NumPy; tensors of NumPy and torch; errors."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
import torch
from quire import RecurrentCache, RecurrentLayerSpec, RNNState, StateSpec, snapshot

# Of results of float32 arithmetic with values of order 1, against float64.
TOLERANCE = 2e-5


# ---- RNNState


def scalar_state(**changes: Any) -> RNNState:
    options: dict[str, Any] = dict(max_num_sequences=4, max_history=3, poison_freed_slots=True)
    return RNNState([StateSpec((1,), initial=np.full(1, 9, np.float32))], **(options | changes))


def step(state: RNNState, seq: int, value: float, length: int = 1) -> None:
    with state.forward([seq], [length]):
        state.set(0, 0, np.full((1, 1), value, np.float32))


def current(state: RNNState, seq: int) -> float:
    return float(state.debug_get(0, 0, seq)[0])


def test_get_in_a_tree_forward_gives_the_committed_states() -> None:
    state = scalar_state(max_tree_slots=4)
    state.add_sequence(0)
    state.begin_forward([0], [2], [-1, 0])
    assert state.get(0, 0).tolist() == [[9]]
    state.abort_forward()
    step(state, 0, 3)
    state.begin_forward([0], [2], [-1, 0])
    assert state.get(0, 0).tolist() == [[3]]
    state.abort_forward()


def test_history_goes_back_and_ends() -> None:
    state = scalar_state()
    state.add_sequence(0)
    assert current(state, 0) == 9
    for value in (1, 2, 3, 4):
        step(state, 0, value)
    state.pop_n(0, 2)
    assert current(state, 0) == 2
    digest = state.state_digest()
    with pytest.raises(quire.NeedsReplayError, match="go to position 0 "):
        state.pop_n(0, 1)
    assert state.state_digest() == digest
    assert state.replay_start(0, 1) == 0
    state.fork_sequence(0, 1, 0)
    assert current(state, 1) == 9
    assert state.get_sequence_length(1) == 0 and state.sequence_count() == 2
    state.check_invariants()


def test_get_is_of_before_and_every_state_must_be_set() -> None:
    state = scalar_state(max_history=1)
    state.add_sequence(0)
    state.begin_forward([0], [5])
    with pytest.raises(quire.BadStateError, match="was not set at position 5"):
        state.end_forward()
    state.set(0, 0, np.full((1, 1), 4, np.float32))
    assert state.get(0, 0).tolist() == [[9]]
    state.end_forward()
    with state.forward([0], [1]):
        assert state.get(0, 0).tolist() == [[4]]
        state.set(0, 0, np.zeros((1, 1), np.float32))


def test_an_exception_aborts_the_forward() -> None:
    state = scalar_state()
    state.add_sequence(0)
    step(state, 0, 3)
    digest = state.state_digest()
    with pytest.raises(ZeroDivisionError), state.forward([0], [1]):
        state.set(0, 0, np.zeros((1, 1), np.float32))
        raise ZeroDivisionError
    assert state.state_digest() == digest and current(state, 0) == 3


def test_checkpoints_inside_a_forward() -> None:
    state = scalar_state(max_history=1, max_checkpoints=2)
    for seq in (0, 1):
        state.add_sequence(seq)
    with state.forward([0, 1], [4, 6]):
        values = np.array([[2], [4], [22], [26]], np.float32)
        state.set_at(0, 0, [1, 3, 5, 9], values)
        assert state.get_at(0, 0, [5, 1]).tolist() == [[22], [2]]
        with pytest.raises(quire.TooLargeError):
            state.set_at(0, 0, [0, 2], values[:2])
    assert current(state, 1) == 26
    state.fork_sequence(1, 2, 2)
    assert current(state, 2) == 22
    with pytest.raises(quire.NeedsReplayError):
        state.pop_n(1, 1)
    state.set_retained(1, False)
    with pytest.raises(quire.OutOfPagesError):
        state.set_retained(1, True)


def test_tensors_of_torch_and_any_dtype() -> None:
    state = RNNState(
        [
            {"shape": (2, 3), "dtype": torch.bfloat16},
            {"shape": (), "dtype": "int64", "initial": np.array(7)},
        ],
        num_layers=2,
        max_num_sequences=2,
    )
    state.add_sequence(5)
    data = torch.randn(1, 2, 3).to(torch.bfloat16)
    with state.forward([5], [1]):
        assert state.get(0, 1).tolist() == [7]
        with pytest.raises(TypeError, match="bfloat16"):
            state.get(0, 0)
        before = state.get(0, 0, torch.empty(1, 2, 3, dtype=torch.bfloat16))
        assert not before.any()
        for layer in range(2):
            state.set(layer, 0, data)
            state.set(layer, 1, np.array([layer]))
    assert torch.equal(state.debug_get(1, 0, 5, torch.empty(2, 3, dtype=torch.bfloat16)), data[0])
    assert int(state.debug_get(1, 1, 5)) == 1


def test_bad_arguments_of_rnn_state() -> None:
    state = scalar_state()
    state.add_sequence(0)
    with pytest.raises(quire.SequenceExistsError):
        state.add_sequence(0)
    with pytest.raises(quire.BadArgumentError, match="no state 1 of layer 0"):
        state.debug_get(0, 1, 0)
    with pytest.raises(quire.BadStateError):
        state.set(0, 0, np.zeros((1, 1), np.float32))
    with pytest.raises(quire.BadArgumentError, match="max_history"):
        scalar_state(max_history=0)
    with pytest.raises(quire.BadArgumentError, match="states"):
        RNNState([], max_num_sequences=1)
    with pytest.raises(quire.BadArgumentError, match="initial"):
        RNNState([StateSpec((2,), initial=np.zeros(3, np.float32))], max_num_sequences=1)
    read_only = np.zeros(1, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(quire.BadArgumentError, match="read-only"):
        state.debug_get(0, 0, 0, read_only)


def test_close() -> None:
    with scalar_state() as state:
        state.add_sequence(0)
        assert state.storage_bytes() > 0 and state.slot_counts().retained == 0
    with pytest.raises(quire.ClosedError, match="RNNState"):
        state.add_sequence(1)
    gc.collect()


# ---- RecurrentCache

LAYERS = [
    RecurrentLayerSpec("linear_attention", num_heads=2, key_dim=4, value_dim=5),
    RecurrentLayerSpec("gated_delta", num_heads=4, num_key_heads=2, key_dim=3, value_dim=6),
    RecurrentLayerSpec("state_space", num_heads=4, num_key_heads=2, key_dim=5, value_dim=3),
    RecurrentLayerSpec("convolution", num_channels=7, width=4),
]


def make_cache(**changes: Any) -> RecurrentCache:
    options: dict[str, Any] = dict(
        max_num_sequences=4, prefill_chunk_size=400, threads=1, poison_freed_slots=True
    )
    return RecurrentCache(LAYERS, **(options | changes))


class Inputs:
    """Inputs of every layer for `count` tokens; slices are those of some of them."""

    def __init__(self, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return rng.uniform(-1, 1, (count, *shape)).astype(np.float32)

        self.rows: list[list[np.ndarray]] = []
        for spec in LAYERS[:3]:
            key = (spec.num_key_heads or spec.num_heads, spec.key_dim)
            positive = [0.8 + 0.2 * np.abs(draw(spec.num_heads)), np.abs(draw(spec.num_heads))]
            self.rows.append(
                [draw(*key), draw(*key), draw(spec.num_heads, spec.value_dim), *positive]
            )
        self.rows.append([draw(LAYERS[3].num_channels)])
        self.a = -np.arange(1, 5, dtype=np.float32) / 4
        self.d = np.linspace(-1, 1, 4, dtype=np.float32)
        self.weight = rng.uniform(-1, 1, (7, 4)).astype(np.float32)
        self.bias = rng.uniform(-1, 1, 7).astype(np.float32)

    def run(self, cache: RecurrentCache, begin: int, end: int) -> list[np.ndarray]:
        linear, delta, space, conv = [[x[begin:end] for x in rows] for rows in self.rows]
        return [
            cache.linear_attention(0, *linear[:4], sm_scale=0.5),
            cache.gated_delta(1, *delta, sm_scale=0.5),
            cache.state_space(2, space[2], space[4], self.a, space[1], space[0], self.d),
            cache.convolution(3, conv[0], self.weight, self.bias, silu=True),
        ]

    def forward(self, cache: RecurrentCache, seq: int, begin: int, end: int) -> list[np.ndarray]:
        with cache.forward([seq], [end - begin]):
            return self.run(cache, begin, end)


def matrix_oracle(spec: RecurrentLayerSpec, inputs: Inputs, layer: int) -> np.ndarray:
    q, k, v, decay, beta = (x.astype(np.float64) for x in inputs.rows[layer])
    groups = spec.num_heads // (spec.num_key_heads or spec.num_heads)
    q, k = (np.repeat(x, groups, axis=1) for x in (q, k))
    state = np.zeros((spec.num_heads, spec.key_dim, spec.value_dim))
    outputs = []
    for t in range(len(q)):
        add = v[t]
        factor = decay[t]
        if spec.kind == "state_space":
            add = beta[t][:, None] * v[t]
            factor = np.exp(beta[t] * inputs.a)
        state = state * factor[:, None, None]
        if spec.kind == "gated_delta":
            add = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + np.einsum("hk,hv->hkv", k[t], add)
        o = np.einsum("hkv,hk->hv", state, q[t])
        outputs.append(
            o + inputs.d[:, None] * v[t] if spec.kind == "state_space" else 0.5 * o
        )
    return np.stack(outputs)


def convolution_oracle(inputs: Inputs) -> np.ndarray:
    x = inputs.rows[3][0].astype(np.float64)
    padded = np.concatenate([np.zeros((3, 7)), x])
    y = inputs.bias + sum(inputs.weight[:, j] * padded[j : j + len(x)] for j in range(4))
    return np.asarray(y / (1 + np.exp(-y)))


def test_layers_against_numpy() -> None:
    inputs = Inputs(90)
    cache = make_cache()
    cache.add_sequence(0)
    outputs = inputs.forward(cache, 0, 0, 90)
    for layer in range(3):
        expected = matrix_oracle(LAYERS[layer], inputs, layer)
        np.testing.assert_allclose(outputs[layer], expected, atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(outputs[3], convolution_oracle(inputs), atol=TOLERANCE)
    np.testing.assert_array_equal(cache.debug_get(3, 0), inputs.rows[3][0][-3:])


@pytest.mark.parametrize("path", quire.kernel_paths())
def test_positions_of_the_past_are_reached_bit_for_bit(path: str) -> None:
    inputs = Inputs(300)
    whole = make_cache()
    whole.add_sequence(0)
    expected = inputs.forward(whole, 0, 0, 300)
    cache = make_cache(kernel_path=path, threads=2, recent_checkpoints=2, thinned_checkpoints=1)
    cache.add_sequence(0)
    inputs.forward(cache, 0, 0, 270)
    for child, position in enumerate((269, 256, 255, 200, 192), start=1):
        assert cache.replay_start(0, position) == position
        cache.fork_sequence(0, child, position)
        outputs = inputs.forward(cache, child, position, 300)
        for layer in range(4):
            np.testing.assert_array_equal(outputs[layer], expected[layer][position:])
        cache.remove_sequence(child)
    start = cache.replay_start(0, 191)
    assert start in (64, 128)
    with pytest.raises(quire.NeedsReplayError, match=f"go to position {start} "):
        cache.pop_n(0, 270 - 191)
    cache.pop_n(0, 270 - start)
    outputs = inputs.forward(cache, 0, start, 300)
    for layer in range(4):
        np.testing.assert_array_equal(outputs[layer], expected[layer][start:])
    cache.check_invariants()


def test_torch_tensors_and_a_decay_for_all_tokens() -> None:
    spec = LAYERS[0]
    cache = RecurrentCache([spec], max_num_sequences=1, prefill_chunk_size=8, threads=1)
    cache.add_sequence(0)
    q, k = torch.randn(2, 3, 2, 4).to(torch.bfloat16)
    v = torch.randn(3, 2, 5).to(torch.bfloat16)
    decay = torch.tensor([0.5, 0.25])
    with cache.forward([0], [3]):
        one = cache.linear_attention(0, q, k, v, decay)
        each = cache.linear_attention(0, q, k, v, decay.expand(3, 2).contiguous())
    assert one.dtype == torch.bfloat16 and torch.equal(one, each)


def test_bad_arguments_of_recurrent_cache() -> None:
    cache = make_cache()
    cache.add_sequence(0)
    inputs = Inputs(4)
    with pytest.raises(quire.BadStateError):
        inputs.run(cache, 0, 4)
    with pytest.raises(quire.TooLargeError, match="prefill_chunk_size"):
        cache.begin_forward([0], [401])
    cache.begin_forward([0], [4])
    with pytest.raises(quire.BadArgumentError, match="layer 0 is of kind LinearAttention"):
        cache.convolution(0, inputs.rows[3][0], inputs.weight)
    with pytest.raises(quire.BadArgumentError, match="k is float32"):
        cache.linear_attention(0, inputs.rows[0][0], inputs.rows[0][2], *inputs.rows[0][2:4])
    with pytest.raises(quire.BadStateError, match="layer 0 was not run"):
        cache.end_forward()
    with pytest.raises(quire.BadArgumentError, match="kind"):
        RecurrentCache(
            [{"kind": "lstm"}],  # type: ignore[typeddict-item]
            max_num_sequences=1,
            prefill_chunk_size=1,
        )
    with pytest.raises(quire.BadArgumentError, match="no multiple"):
        RecurrentCache(
            [RecurrentLayerSpec("gated_delta", 3, 2, 1, 1)],
            max_num_sequences=1,
            prefill_chunk_size=1,
        )


# ---- States as chunks and snapshots

IDENTITY = {"model": "toy", "revision": "r1"}


def caller_state(**changes: Any) -> RNNState:
    """Of no, two and five dimensions, in three types."""
    options: dict[str, Any] = dict(
        num_layers=2, max_num_sequences=4, max_history=2, poison_freed_slots=True
    )
    specs = [
        StateSpec((), "int64"),
        StateSpec((3, 5), "float32"),
        StateSpec((2, 3, 1, 2, 2), "float16"),
    ]
    return RNNState(specs, **(options | changes))


def fill(state: RNNState, seq: int, tokens: list[int]) -> None:
    """States that follow from those before and from the tokens."""
    with state.forward([seq], [len(tokens)]):
        for layer in range(2):
            for index in range(3):
                value = state.get(layer, index)
                for token in tokens:
                    value = (value * 3 + token + layer + index).astype(value.dtype) % 1000
                state.set(layer, index, value)


def all_states(state: RNNState, seq: int) -> list[bytes]:
    return [
        state.debug_get(layer, index, seq).tobytes() for layer in range(2) for index in range(3)
    ]


def test_chunks_of_a_callers_states_go_on_exactly() -> None:
    writer = caller_state()
    writer.add_sequence(0)
    tokens = list(range(1, 10))
    chunks = []
    for end in (4, 8, 9):
        fill(writer, 0, tokens[4 * len(chunks) : end])
        chunks.append(writer.export_chunk(0, tokens[:end], identity=IDENTITY, block_tokens=4))
    for count, end in ((1, 4), (2, 8), (3, 9)):
        reader, cold = caller_state(), caller_state()
        reader.import_chunks(7, tokens[:end], chunks[:count], identity=IDENTITY, block_tokens=4)
        cold.add_sequence(7)
        fill(cold, 7, tokens[:end])
        for state in (reader, cold):
            fill(state, 7, [50, 51])
        assert all_states(reader, 7) == all_states(cold, 7)
        reader.check_invariants()
    with pytest.raises(quire.NeedsReplayError):
        writer.export_chunk(0, tokens[:5], identity=IDENTITY, block_tokens=4)


def test_what_is_not_the_chunk_that_was_asked_for_is_a_miss() -> None:
    writer = caller_state()
    writer.add_sequence(0)
    fill(writer, 0, [1, 2, 3])
    chunk = writer.export_chunk(0, [1, 2, 3], identity=IDENTITY, salt=b"tenant")
    reader = caller_state()
    digest = reader.state_digest()

    def refused(error: type[Exception], target: RNNState = reader, **changes: Any) -> None:
        arguments: dict[str, Any] = dict(
            tokens=[1, 2, 3], chunks=[chunk], identity=IDENTITY, salt=b"tenant"
        )
        with pytest.raises(error):
            target.import_chunks(5, **(arguments | changes))
        assert not target.has_sequence(5)

    refused(quire.IncompatibleError, tokens=[1, 2, 4])
    refused(quire.IncompatibleError, salt=b"other")
    refused(quire.IncompatibleError, identity=IDENTITY | {"revision": "r2"})
    refused(quire.IncompatibleError, caller_state(num_layers=1))
    refused(quire.IncompatibleError, RNNState([StateSpec((15,))], max_num_sequences=1))
    refused(quire.BadArgumentError, chunks=[])
    refused(quire.BadArgumentError, identity={"modell": "toy"})
    for at in (0, 20, 60, len(chunk) - 70):
        damaged = bytearray(chunk)
        damaged[at] ^= 1
        refused(quire.CorruptError, chunks=[bytes(damaged)])
    refused(quire.CorruptError, chunks=[chunk[:-1]])
    assert reader.state_digest() == digest
    reader.import_chunks(5, [1, 2, 3], [chunk], identity=IDENTITY, salt=b"tenant")
    assert all_states(reader, 5) == all_states(writer, 0)
    with pytest.raises(quire.SequenceExistsError):
        reader.import_chunks(5, [1, 2, 3], [chunk], identity=IDENTITY, salt=b"tenant")


def test_snapshots_of_recurrent_states(tmp_path: Path) -> None:
    path = tmp_path / "sequence.quire"
    writer = caller_state()
    writer.add_sequence(0)
    fill(writer, 0, [1, 2, 3])
    snapshot.save_sequence(writer, 0, [1, 2, 3], path, identity=IDENTITY, sampler=b"seed")
    info = snapshot.verify(path)
    assert info.tokens == [1, 2, 3] and info.sampler == b"seed"
    assert info.passport["kind"] == "caller"
    assert info.passport["state"] == ["scalar", "3x5", "2x3x1x2x2"] * 2
    reader = caller_state()
    assert snapshot.restore_sequence(reader, 3, path, identity=IDENTITY) == info
    assert all_states(reader, 3) == all_states(writer, 0)
    specs = [StateSpec((), "int64"), StateSpec((5, 3)), StateSpec((2, 3, 1, 2, 2), "float16")]
    other = RNNState(specs, num_layers=2, max_num_sequences=1)
    with pytest.raises(quire.IncompatibleError, match="state: .*5x3.* here, .*3x5.* there"):
        snapshot.restore_sequence(other, 3, path, identity=IDENTITY)
    with pytest.raises(quire.IncompatibleError, match="r2"):
        snapshot.restore_sequence(caller_state(), 3, path, identity=IDENTITY | {"revision": "r2"})
    with pytest.raises(quire.SequenceExistsError):
        snapshot.restore_sequence(reader, 3, path, identity=IDENTITY)


def test_states_that_quire_computes_leave_alone_too(tmp_path: Path) -> None:
    layer = RecurrentLayerSpec("convolution", num_channels=3, width=4)
    caches = [RecurrentCache([layer], max_num_sequences=2, prefill_chunk_size=8) for _ in range(3)]
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    caches[0].add_sequence(0)
    with caches[0].forward([0], [4]):
        caches[0].convolution(0, x, np.ones((3, 4), np.float32))
    chunk = caches[0].export_chunk(0, [1, 2, 3, 4], identity=IDENTITY)
    caches[1].import_chunks(0, [1, 2, 3, 4], [chunk], identity=IDENTITY)
    snapshot.save_sequence(caches[0], 0, [1, 2, 3, 4], tmp_path / "c.quire", identity=IDENTITY)
    snapshot.restore_sequence(caches[2], 0, tmp_path / "c.quire", identity=IDENTITY)
    for cache in caches[1:]:
        assert np.array_equal(cache.debug_get(0, 0), caches[0].debug_get(0, 0))
