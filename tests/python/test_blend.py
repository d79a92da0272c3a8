"""quire.blend: the worked examples of blending's specification on NumPy and torch, and a toy
transformer in float32 on which blended and full prefill are compared."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
import torch
from quire import blend, errors
from quire.blend import BlendExecutor, KeyRotation
from toy_transformer import ToyTransformer

Make = Callable[[Any], Any]


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """An array of the library."""
    if request.param == "numpy":
        return np.array
    return lambda values: torch.from_numpy(np.array(values))


class Batch:
    """N rows of which rows 2 and 6 differ: the fields of examples 2, 3, 14 and 18."""

    def __init__(self, make: Make, token_dim: int = 0, **changes: Any) -> None:
        shape = (10, 4) if token_dim == 0 else (2, 10, 2)
        ones = np.ones(shape, np.float32)
        fresh = ones.copy()
        q = np.zeros(shape, np.float32)
        if token_dim == 0:
            fresh[[2, 6]] = 0
            q[:] = np.arange(10)[:, None]
        else:
            fresh[:, [2, 6]] = 0
            q[:] = np.arange(10)[None, :, None]
        self.arguments: dict[str, Any] = {
            "retrieved_k": make(ones),
            "retrieved_v": make(ones),
            "valid_mask": make(np.ones(10, np.int64)),
            "original_positions": make(np.arange(10)),
            "fresh_q": make(q),
            "fresh_k": make(fresh),
            "fresh_v": make(fresh),
            "positions": make(np.arange(10, 20)),
            "query_start_loc": make(np.array([0, 10], np.int32)),
            "token_dim": token_dim,
        } | changes

    def at(self, executor: BlendExecutor, layer: int, **changes: Any) -> blend.BlendOutput:
        return executor.blend(layer, **(self.arguments | changes))


def numbers(array: Any) -> list[Any]:
    return np.asarray(array).tolist()


def original(ratio: float, **options: Any) -> BlendExecutor:
    """Without the rule that the last token is recomputed, as most examples have it."""
    return BlendExecutor(ratio, force_last=False, **options)


# Example 1.
def test_layer_0_passes_everything_through(make: Make) -> None:
    batch = Batch(make)
    out = batch.at(original(0.2), 0)
    for name in ("q", "k", "v"):
        assert getattr(out, name) is batch.arguments[f"fresh_{name}"]
    assert out.positions is batch.arguments["positions"]
    assert numbers(out.local_indices) == list(range(10))
    assert np.asarray(out.local_indices).dtype == np.int64
    assert isinstance(out.local_indices, type(out.q)) and out.query_start_loc is None


# Examples 2 and 18: the same with tokens in the second axis.
@pytest.mark.parametrize("token_dim", [0, 1])
def test_one_request(make: Make, token_dim: int) -> None:
    batch = Batch(make, token_dim)
    executor = original(0.2)
    out = batch.at(executor, 1)
    assert numbers(out.local_indices) == [2, 6] and numbers(out.positions) == [12, 16]
    q = np.moveaxis(np.asarray(out.q), token_dim, 0).reshape(2, -1)
    assert q.tolist() == [[2] * 4, [6] * 4]
    assert out.k.shape[token_dim] == out.v.shape[token_dim] == 10
    assert numbers(out.query_start_loc) == [0, 2]
    assert out.query_start_loc.dtype == batch.arguments["query_start_loc"].dtype
    shape = (2, 4) if token_dim == 0 else (2, 2, 2)
    rows = make(np.zeros(shape, np.float32))
    later = batch.at(
        executor, 2, fresh_q=out.q, fresh_k=rows, fresh_v=rows, positions=out.positions
    )
    for array in (later.k, later.v):
        first = np.moveaxis(np.asarray(array), token_dim, 0).reshape(10, -1)[:, 0]
        assert first.tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert later.q is out.q and later.positions is out.positions
    assert numbers(later.local_indices) == [2, 6] and later.query_start_loc is None


# Examples 3 and 14: what undefined rows hold changes nothing.
@pytest.mark.parametrize("undefined", [1.0, np.nan, np.inf])
def test_invalid_tokens_are_always_computed(make: Make, undefined: float) -> None:
    valid = np.ones(10, np.int64)
    valid[[3, 7]] = 0
    cached = np.ones((10, 4), np.float32)
    cached[[3, 7]] = undefined
    batch = Batch(make, valid_mask=make(valid), retrieved_k=make(cached), retrieved_v=make(cached))
    for ratio, rows in [
        (0.0, [3, 7]),
        (0.1, [3, 7]),
        (0.2, [2, 3, 7]),
        (0.3, [2, 3, 6, 7]),
        (0.5, [0, 1, 2, 3, 6, 7]),
        (1.0, list(range(10))),
    ]:
        executor = original(ratio)
        out = batch.at(executor, 1)
        assert numbers(out.local_indices) == rows
        assert numbers(out.query_start_loc) == [0, len(rows)]
        fresh = make(np.full((len(rows), 4), 5, np.float32))
        later = batch.at(executor, 2, fresh_q=out.q, fresh_k=fresh, fresh_v=fresh)
        for array in (later.k, later.v):
            assert np.isfinite(np.asarray(array)).all()
            assert numbers(array[:, 0]) == [5 if row in rows else 1 for row in range(10)]


# Example 4.
def test_the_amplitude_of_scaled_rotations_is_not_applied_again(make: Make) -> None:
    rotation = KeyRotation([1.0, 0.01])
    k = np.array([[1, 2, 3, 4]], np.float32)
    at3 = np.array(
        [[-1.413352520780047, 1.8791180666879925, -2.828857481741469, 4.058191135400942]]
    )
    at10 = [0.7929918035916569, 1.590674663968739, -3.061235698118727, 4.17968349440576]
    moved = blend.shift_keys(make(k), [0], [3], rotation)
    assert isinstance(moved, type(make(k)))
    np.testing.assert_allclose(np.asarray(moved), at3, rtol=0, atol=1e-6)
    scaled = blend.shift_keys(make(np.float32(1.2 * at3)), [3], [10], rotation)
    np.testing.assert_allclose(np.asarray(scaled)[0], 1.2 * np.array(at10), rtol=0, atol=2e-6)
    pairs = blend.shift_keys(make(k), [0], [3], KeyRotation([1.0, 0.01], "interleaved"))
    expected = [-1.27223251272018, -1.8388649851410237, 2.87866810043698, 4.088186635603437]
    np.testing.assert_allclose(np.asarray(pairs)[0], expected, rtol=0, atol=1e-6)


# Example 5.
def test_keys_that_stay_keep_their_bits(make: Make) -> None:
    rotation = KeyRotation([1.0])
    k = make(np.array([[np.cos(3), np.sin(3)], [0.1, 0.7]], np.float32))
    moved = np.asarray(blend.shift_keys(k, [3, 3], [5, 3], rotation))
    np.testing.assert_allclose(moved[0], [0.2836621855, -0.9589242747], atol=1e-7)
    assert moved[1].tolist() == np.asarray(k)[1].tolist()
    assert blend.shift_keys(k, [3, 3], [5, 3], rotation, out=k) is k
    assert np.array_equal(np.asarray(k), moved)


def test_bfloat16_of_torch_is_rounded_once() -> None:
    k = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    rotation = KeyRotation([1.0, 0.1, 0.01, 0.001])
    moved = blend.shift_keys(k, list(range(16)), list(range(40, 56)), rotation)
    wide = blend.shift_keys(k.float(), list(range(16)), list(range(40, 56)), rotation)
    assert moved.dtype == torch.bfloat16 and torch.equal(moved, wide.bfloat16())


# Examples 6 and 7.
def test_budgets_are_those_of_each_request(make: Make) -> None:
    fresh = np.ones((8, 2), np.float32)
    fresh[[1, 6]] = 0
    arguments = {
        "retrieved_k": make(np.ones((8, 2), np.float32)),
        "retrieved_v": make(np.ones((8, 2), np.float32)),
        "valid_mask": make(np.ones(8, np.int32)),
        "original_positions": make(np.zeros(8, np.int32)),
        "fresh_q": make(fresh),
        "fresh_k": make(fresh),
        "fresh_v": make(fresh),
        "positions": make([0, 1, 2, 3, 4, 0, 1, 2]),
        "query_start_loc": make(np.array([0, 5, 8], np.int32)),
    }
    out = original(0.5).blend(1, **arguments)
    assert numbers(out.local_indices) == [0, 1, 6] and numbers(out.positions) == [0, 1, 1]
    assert numbers(out.query_start_loc) == [0, 2, 3]
    out = BlendExecutor(0.5).blend(1, **arguments)
    assert numbers(out.local_indices) == [0, 1, 4, 6, 7]
    assert numbers(out.positions) == [0, 1, 4, 1, 2] and numbers(out.query_start_loc) == [0, 3, 5]


@pytest.mark.parametrize(
    "starts,ratio,expected",
    [([0, 8, 14, 18], 0.2, [0, 1, 2, 2]), ([0, 1, 2, 4], 0.5, [0, 0, 0, 1])],
)
def test_small_requests(starts: list[int], ratio: float, expected: list[int]) -> None:
    count = starts[-1]
    options = {"ratios": [ratio], "force_last": False}
    _, new = blend.select_tokens(starts, np.ones(count, np.uint8), np.zeros(count), options)
    assert new.tolist() == expected and new.dtype == np.int32


# Example 15, and a pass that failed.
def test_an_executor_serves_one_pass_after_the_other(make: Make) -> None:
    executor = original(0.2)
    batch = Batch(make)
    with pytest.raises(quire.BadStateError, match="layer 2 comes before layer 1"):
        batch.at(executor, 2)
    outs = [batch.at(executor, layer) for layer in (0, 1, 0, 1)]
    assert numbers(outs[1].local_indices) == numbers(outs[3].local_indices) == [2, 6]
    assert numbers(outs[3].query_start_loc) == [0, 2]
    with pytest.raises(quire.BadArgumentError, match="10 fresh rows, but 2 were selected"):
        batch.at(executor, 2)
    rows = make(np.zeros((2, 4), np.float32))
    out = batch.at(executor, 2, fresh_q=rows, fresh_k=rows, fresh_v=rows)
    assert numbers(out.k[:, 0]).count(0) == 2


# Example 16.
@pytest.mark.parametrize("inplace", [False, True])
def test_arguments_are_written_only_where_asked(make: Make, inplace: bool) -> None:
    batch = Batch(make)
    before = {name: np.asarray(value).copy() for name, value in batch.arguments.items()}
    executor = original(0.2, rotation=KeyRotation([1.0, 0.5], head_dim=4), inplace=inplace)
    batch.at(executor, 0)
    rows = make(np.zeros((2, 4), np.float32))
    out = batch.at(executor, 1)
    later = batch.at(executor, 2, fresh_q=out.q, fresh_k=rows, fresh_v=rows)
    for name, value in batch.arguments.items():
        changed = not np.array_equal(before[name], np.asarray(value))
        assert changed == (inplace and name.startswith("retrieved_")), name
    assert (later.k is batch.arguments["retrieved_k"]) == inplace


@pytest.mark.parametrize(
    "name", ["fresh_k", "fresh_v", "retrieved_v", "fresh_q", "fewer fresh_v", "fewer retrieved_v"]
)
def test_a_refused_layer_has_moved_no_keys(make: Make, name: str) -> None:
    """Called again with what fits, it moved them once more."""
    batch = Batch(make)
    rotation = KeyRotation([1.0, 0.5], head_dim=4)
    executor = BlendExecutor(
        ratios=[0.25, 0.25], check_layers=[1, 2], force_last=False, rotation=rotation, inplace=True
    )
    out = batch.at(executor, 1)
    count = len(out.local_indices)
    rows = make(np.zeros((count, 4), np.float32))
    good = {"fresh_q": out.q, "fresh_k": rows, "fresh_v": rows, "positions": out.positions}
    before = np.asarray(batch.arguments["retrieved_k"]).copy()
    wrong = name.removeprefix("fewer ")
    bad = np.zeros((10 if wrong.startswith("retrieved") else count, 4))  # float64
    if name.startswith("fewer"):
        bad = bad[1:].astype(np.float32)
    with pytest.raises(quire.BadArgumentError):
        batch.at(executor, 2, **{**good, wrong: make(bad)})
    assert np.array_equal(np.asarray(batch.arguments["retrieved_k"]), before)
    moved = batch.at(executor, 2, **good)
    assert moved.k is batch.arguments["retrieved_k"]
    expected = blend.shift_keys(before, np.arange(10), np.arange(10, 20), rotation)
    kept = np.setdiff1d(np.arange(10), numbers(moved.local_indices))
    assert np.array_equal(np.asarray(moved.k)[kept], expected[kept])


# Example 19.
def test_later_check_layers_keep_fewer_rows(make: Make) -> None:
    executor = BlendExecutor(ratios=[0.5, 0.25], check_layers=[1, 3], force_last=False)
    cached = make(np.zeros((8, 1), np.float32))

    def at(layer: int, fresh: list[float]) -> blend.BlendOutput:
        rows = make(np.array(fresh, np.float32)[:, None])
        positions = make(np.arange(len(fresh)))
        ones = make(np.ones(8, np.int64))
        starts = make(np.array([0, 8], np.int32))
        return executor.blend(
            layer, cached, cached, ones, make(np.arange(8)), rows, rows, rows, positions, starts
        )

    assert at(0, [1.0] * 8).query_start_loc is None
    first = at(1, [8, 1, 7, 2, 6, 3, 5, 4])
    assert numbers(first.local_indices) == [0, 2, 4, 6] and numbers(first.query_start_loc) == [0, 4]
    assert at(2, [1, 1, 1, 1]).query_start_loc is None
    last = at(3, [1, 2, 9, 4])
    assert numbers(last.local_indices) == [4, 6] and numbers(last.query_start_loc) == [0, 2]
    assert numbers(last.positions) == [2, 3] and numbers(last.q) == [[9], [4]]
    assert numbers(last.k) == [[0], [0], [0], [0], [9], [0], [4], [0]]
    assert at(4, [1, 1]).query_start_loc is None


def test_positions_take_memory_only_for_offsets_that_are_taken() -> None:
    """With room for far fewer rows than the last offset claims."""
    last = 2**31 - 1
    refused = [
        ([0, 8, 5, last], [0, 0, 0], "falls at request 1"),
        ([1, last], [0], "does not begin with 0"),
        ([0, last], [0, 0], "2 context lengths"),
        ([0, last], [-1], "context length of request 0 is -1"),
        ([], [], "does not begin with 0"),
    ]
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**31, before[1]))
    try:
        for starts, contexts, why in refused:
            with pytest.raises(errors.BadArgumentError, match=why):
                blend.batch_positions(starts, contexts)
        with pytest.raises(errors.OutOfMemoryError, match="allocator refused"):
            blend.batch_positions([0, last], [0])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# Examples 21 and 22.
def test_segments_move_behind_a_prefix_and_behind_themselves(make: Make) -> None:
    starts = [0, 5, 8]
    assert blend.batch_positions(starts, [10, 0]).tolist() == [10, 11, 12, 13, 14, 0, 1, 2]
    rotation = KeyRotation([1.0])
    rng = np.random.default_rng(4)
    five = rng.standard_normal((5, 1, 2)).astype(np.float32)
    behind = blend.batch_positions([0, 5], [10])
    by_ten = blend.shift_keys(make(five), [0] * 5, [10] * 5, rotation)
    assert np.array_equal(blend.shift_keys(make(five), list(range(5)), behind, rotation), by_ten)
    a = rng.standard_normal((3, 1, 2)).astype(np.float32)
    twice = make(np.concatenate([a, a]))
    positions = blend.batch_positions([0, 6], [0])
    moved = np.asarray(blend.shift_keys(twice, [0, 1, 2, 0, 1, 2], positions, rotation))
    assert np.array_equal(moved[:3], a)
    by_three = np.asarray(blend.shift_keys(make(a), [0, 0, 0], [3, 3, 3], rotation))
    assert np.array_equal(moved[3:], by_three)


def test_exact_rows_and_documents(make: Make) -> None:
    exact = np.zeros(10, np.int64)
    exact[:3] = 1
    batch = Batch(make, exact_mask=make(exact))
    assert numbers(batch.at(original(1.0), 1).local_indices) == list(range(3, 10))
    documents = [(0, 3), (3, 6), (6, 9, 1.0)]
    linked = original(0.0, link_tokens=2)
    out = batch.at(linked, 1, documents=documents)
    assert numbers(out.local_indices) == [3, 4, 6, 7, 8]
    with pytest.raises(quire.BadArgumentError, match="exact_mask has rows that valid_mask lacks"):
        batch.at(original(1.0), 1, valid_mask=make(1 - exact))
    with pytest.raises(quire.BadArgumentError, match="do not overlap"):
        batch.at(linked, 1, documents=[(0, 3), (2, 4)])
    with pytest.raises(quire.BadArgumentError, match="not in"):
        batch.at(linked, 1, documents=[(0, 3, -1.0)])


# P11: ranks with a part of the heads each add up their deviations before they select.
def test_sharded_heads_select_the_same_rows() -> None:
    rng = np.random.default_rng(11)
    fresh, cached = rng.standard_normal((2, 40, 4, 8)).astype(np.float32)
    kinds = np.ones(40, np.uint8)
    whole = blend.token_deviations(None, fresh, None, cached, kinds)
    parts = [
        blend.token_deviations(None, fresh[:, part], None, cached[:, part], kinds)
        for part in (slice(0, 2), slice(2, 4))
    ]
    options = {"ratios": [0.3]}
    rows, _ = blend.select_tokens([0, 40], kinds, whole, options)
    reduced, _ = blend.select_tokens([0, 40], kinds, (parts[0] + parts[1]) / 2, options)
    assert rows.tolist() == reduced.tolist()


@pytest.mark.parametrize("metric", ["v_l2", "k_l2", "kv_l2", "cosine"])
def test_metrics_see_through_a_move(make: Make, metric: str) -> None:
    """Keys that differ by their rotation alone do not deviate."""
    rng = np.random.default_rng(7)
    rotation = KeyRotation([1.0, 0.1])
    k, v = rng.standard_normal((2, 10, 1, 4)).astype(np.float32)
    fresh_k = np.asarray(blend.shift_keys(k, np.arange(10), np.arange(10, 20), rotation))
    fresh_v = v.copy()
    fresh_v[5] += 1
    fresh_k[5] += 1
    batch = Batch(make, retrieved_k=make(k), retrieved_v=make(v))
    executor = original(0.1, metric=metric, rotation=rotation)
    out = batch.at(executor, 1, fresh_k=make(fresh_k), fresh_v=make(fresh_v))
    assert numbers(out.local_indices) == [5]


def test_what_does_not_fit_is_refused(make: Make) -> None:
    batch = Batch(make)
    executor = original(0.2)
    for changes, part in [
        ({"valid_mask": make(np.ones(9, np.int64))}, "there are 9 fresh and 9 cached tokens"),
        ({"retrieved_v": make(np.ones((9, 4), np.float32))}, "10 fresh and 10 cached tokens"),
        ({"fresh_v": make(np.ones((10, 4)))}, "float64"),
        ({"query_start_loc": make(np.array([0, 11], np.int32))}, "ends with 11"),
        ({"valid_mask": make(np.ones((10, 1), np.int64))}, "integers in one dimension"),
        ({"retrieved_k": None, "retrieved_v": None}, "retrieved_k is None"),
        ({"token_dim": 2}, "token_dim 2"),
    ]:
        with pytest.raises(quire.BadArgumentError) as caught:
            batch.at(executor, 1, **changes)
        assert part in str(caught.value)
    with pytest.raises(quire.BadArgumentError, match="layer_id is -1"):
        batch.at(executor, -1)


def test_later_layers_have_what_the_first_one_had(make: Make) -> None:
    """Without it the selected rows alone came out, as if they were all."""
    batch = Batch(make)
    executor = original(0.2)
    out = batch.at(executor, 1)
    rows = make(np.zeros((2, 4), np.float32))
    fresh = {"fresh_q": out.q, "fresh_k": rows, "fresh_v": rows, "positions": out.positions}
    with pytest.raises(quire.BadArgumentError, match="retrieved_k of layer 2 is None, but valid"):
        batch.at(executor, 2, retrieved_k=None, retrieved_v=None, **fresh)
    with pytest.raises(quire.BadArgumentError, match="retrieved_v of layer 2 is None, and the oth"):
        batch.at(executor, 2, retrieved_v=None, **fresh)
    later = batch.at(executor, 2, **fresh)  # the pass is as it was
    assert later.k.shape == (10, 4)


@pytest.mark.parametrize(
    "document", [(1.7, 4), (1, 4.5), (1, np.float32(4)), (1, 4, "0.5"), (None, 4)]
)
def test_documents_are_not_rounded(document: Any) -> None:
    """Rows of 1.7 were those of 1."""
    options = {"ratios": [0.5], "force_last": False}
    with pytest.raises(quire.BadArgumentError, match="must be (an integer|a number), not"):
        blend.select_tokens(
            [0, 10], np.ones(10, np.uint8), np.zeros(10), options, documents=[document]
        )


@pytest.mark.parametrize(
    "options,part",
    [
        ({"ratio": 1.5}, "ratios: 1.5"),
        ({"ratio": 0.1, "ratios": [0.1]}, "not both"),
        ({"ratios": [0.1, 0.2], "check_layers": [1, 2]}, "not above the one before"),
        ({"check_layers": [2, 1]}, "layers ascend"),
        ({"check_layers": []}, "at least one layer"),
        ({"metric": "l3"}, '"l3"'),
        ({"link_tokens": -1}, "link_tokens is -1"),
    ],
)
def test_schedules_are_checked(options: dict[str, Any], part: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=part):
        BlendExecutor(**options)


def test_torch_is_not_needed() -> None:
    code = '''
import sys
sys.modules["torch"] = None
import numpy as np
from quire import blend, lmcache
ones = np.ones((3, 4), np.float32)
memory = blend.SegmentMemory(2, chunk_tokens=2)
memory.store([1, 2, 3], [(ones, ones)] * 2)
with blend.BlendRetriever(memory) as retriever:
    found = retriever.new_request([[1, 2, 3]], [[]]).result(1)
out = lmcache.CacheBlendImpl(0.5, force_last=True).blend(
    1, found.k, found.v, found.valid_mask, found.original_positions, ones, ones, ones,
    np.arange(3), np.array([0, 3], np.int32), 0)
print(out.local_indices.tolist())
'''
    environment = os.environ | {"PYTHONPATH": str(Path(quire.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.split() == ["[0,", "2]"], done.stderr


# ---- Example 17: a toy transformer, segments of 6, 7 and 5 tokens, a question of 4.


@pytest.fixture(scope="module")
def toy() -> ToyTransformer:
    return ToyTransformer(seed=3)


def test_ratio_1_is_full_prefill(toy: ToyTransformer) -> None:
    """P1, for every pattern of valid tokens; P6 is the one without any."""
    rng = np.random.default_rng(1)
    full = toy.prefill(toy.prompt)
    patterns = [np.zeros(22, bool), toy.in_segments, *(rng.random((5, 22)) < 0.6)]
    for pattern in patterns:
        hidden, rows = toy.blended(BlendExecutor(1.0, rotation=toy.rotation), pattern)
        assert rows.tolist() == list(range(22))
        assert np.array_equal(hidden, full.hidden)


def test_ratio_0_is_full_reuse(toy: ToyTransformer) -> None:
    """P2: behind the check layer, cached rows for all valid tokens."""
    hidden, rows = toy.blended(BlendExecutor(0.0, rotation=toy.rotation), toy.in_segments)
    assert rows.tolist() == [18, 19, 20, 21]
    for layer in (2, 3):
        cached_k, cached_v = toy.cached[layer]
        positions = np.arange(22)
        moved = blend.shift_keys(cached_k, toy.original_positions, positions, toy.rotation)
        assert np.array_equal(toy.seen[layer][0][:18], moved[:18])
        assert np.array_equal(toy.seen[layer][1][:18], cached_v[:18])
    error = np.abs(hidden[-1] - toy.prefill(toy.prompt).hidden[-1]).max()
    assert error > 1e-3


def test_enough_rows_make_it_exact(toy: ToyTransformer) -> None:
    """The 6 tokens of the first segment do not deviate, so 0.8 of 18 are all the others."""
    full = toy.prefill(toy.prompt).hidden[-1]
    errors = []
    for ratio in (0.0, 0.15, 0.3, 0.5, 0.8, 1.0):
        hidden, _ = toy.blended(BlendExecutor(ratio, rotation=toy.rotation), toy.in_segments)
        errors.append(float(np.linalg.norm(hidden[-1] - full) / np.linalg.norm(full)))
    assert errors[0] > errors[3] and errors[4] < 1e-5 and errors[5] == 0


def test_a_prefix_is_exact_at_any_ratio(toy: ToyTransformer) -> None:
    """P3 and P4: one segment at position 0; marked as exact, no token is recomputed."""
    full = toy.prefill(toy.prompt)
    first = np.arange(22) < 6
    for ratio in (0.0, 0.3):
        executor = BlendExecutor(ratio, rotation=toy.rotation)
        hidden, rows = toy.blended(executor, first)
        assert np.abs(hidden[-1] - full.hidden[-1]).max() < 1e-5
        hidden, rows = toy.blended(BlendExecutor(1.0, rotation=toy.rotation), first, exact=first)
        assert rows.tolist() == list(range(6, 22))
        assert np.abs(hidden[-1] - full.hidden[-1]).max() < 1e-5
    k, v = full.layers[1]
    cached_k, cached_v = toy.cached[1]
    kinds = first.astype(np.uint8)
    deviations = blend.token_deviations(k, v, cached_k, cached_v, kinds, metric="kv_l2")
    assert deviations[:6].max() < 1e-12


def test_layer_0_is_known_wherever_a_token_stands(toy: ToyTransformer) -> None:
    """P5."""
    k, v = toy.prefill(toy.prompt).layers[0]
    cached_k, cached_v = toy.cached[0]
    moved = blend.shift_keys(cached_k, toy.original_positions, np.arange(22), toy.rotation)
    np.testing.assert_allclose(moved[:18], k[:18], rtol=0, atol=2e-6)
    np.testing.assert_allclose(cached_v[:18], v[:18], rtol=0, atol=1e-6)


def test_undefined_rows_never_reach_an_output(toy: ToyTransformer) -> None:
    """P10."""
    clean, rows = toy.blended(BlendExecutor(0.3, rotation=toy.rotation), toy.in_segments)
    for undefined in (np.nan, np.inf):
        dirty, dirty_rows = toy.blended(
            BlendExecutor(0.3, rotation=toy.rotation), toy.in_segments, undefined=undefined
        )
        assert np.array_equal(dirty, clean) and np.array_equal(rows, dirty_rows)
