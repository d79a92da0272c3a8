"""The walks of the connector are worth something: with the connector broken on purpose they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import quire
from fake_kernel import KERNELS
from fake_vllm import BLOCK, ONE_GROUP, FakeGroup, FakeRequest, WrongBytes, WrongReport
from quire.vllm import _arena, _blocks, _groups, _parts, _plan, _scheduler, _worker
from vllm_pair import PROMPT, STATES, NothingFound, Pair, fake_passport, walk

passport = pytest.fixture(autouse=True)(fake_passport)

Patch = pytest.MonkeyPatch


def _unverified_byte(patch: Patch) -> None:
    """A byte of a block that was loaded is not that of the chunk."""
    real = _worker.WorkerSide._load

    def load(side: Any, plan: Any, each: Any) -> None:
        real(side, plan, each)
        side._blocks[0]._layers[1][each.groups[0].blocks[-1]].view(-1)[3] ^= 1

    patch.setattr(_worker.WorkerSide, "_load", load)


def _promise_not_kept(patch: Patch) -> None:
    """A promised chunk is gone when it is loaded, and nobody says so."""

    def load(side: Any, plan: Any, each: Any) -> None:
        for fetch in _scheduler.fetches_in_flight.pop(each.number, []):
            fetch.close()

    patch.setattr(_worker.WorkerSide, "_load", load)


def _failure_not_reported(patch: Patch) -> None:
    """Blocks of a load that failed are not named."""
    patch.setattr(_worker.WorkerSide, "take_bad_blocks", lambda side: set())


def _failed_load_is_saved(patch: Patch) -> None:
    """What a step computes from blocks that were not filled goes to the store."""

    class Plan(_plan.StepPlan):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.heard = 1 << 30

    patch.setattr(_scheduler, "StepPlan", Plan)


def _salts_are_mixed(patch: Patch) -> None:
    real = _scheduler.SchedulerSide.add

    def add(side: Any, request: Any) -> None:
        real(side, request)
        side._requests[request.request_id].salt = b""

    patch.setattr(_scheduler.SchedulerSide, "add", add)


def _reset_forgets_nothing(patch: Patch) -> None:
    patch.setattr(_scheduler.SchedulerSide, "reset", lambda side: True)


def _reset_saves_what_was_there(patch: Patch) -> None:
    """Requests that have blocks of the weights before go on with being saved."""
    real = _scheduler.SchedulerSide.reset

    def reset(side: Any) -> bool:
        before = {name: state.save for name, state in side._requests.items()}
        real(side)
        for name, state in side._requests.items():
            state.save = before[name]
        return True

    patch.setattr(_scheduler.SchedulerSide, "reset", reset)


def _reported_twice(patch: Patch) -> None:
    real = _worker.WorkerSide.take_report

    def take(side: Any) -> Any:
        report = real(side)
        return report if report is None else report.aggregate(report)

    patch.setattr(_worker.WorkerSide, "take_report", take)


def _report_lost(patch: Patch) -> None:
    patch.setattr(_worker.WorkerSide, "take_report", lambda side: None)


def _lease_not_ended(patch: Patch) -> None:
    patch.setattr(_scheduler.SchedulerSide, "ended", lambda *_: None)


def _staging_used_again_early(patch: Patch) -> None:
    """A slot of pinned memory is free for others while the device still copies from or to it."""
    real = _blocks.DeviceBlocks._take

    def take(side: Any) -> int:
        slot = real(side)
        side._free.insert(0, slot)
        return slot

    patch.setattr(_blocks.DeviceBlocks, "_take", take)
    patch.setattr(_blocks.DeviceBlocks, "_end_oldest", _end_without(frees=False, waits=True))


def _put_before_it_is_copied(patch: Patch) -> None:
    """What lies in the pinned memory before the device has copied goes to the store."""
    patch.setattr(_blocks.DeviceBlocks, "_end_oldest", _end_without(frees=True, waits=False))


def _end_without(*, frees: bool, waits: bool) -> Callable[[Any], None]:
    def end(side: Any) -> None:
        copy = side._copies.popleft()
        if waits:
            copy.event.synchronize()
        if copy.put is not None:
            copy.put(side._staging.memory, side._staged(copy.slot))
        if frees:
            side._free.append(copy.slot)

    return end


def _failure(folder: Path, **options: Any) -> AssertionError | None:
    """The first walk that fails; a defect may also leave a walk nothing to find."""
    for seed in range(48):
        try:
            walk(seed, folder / str(seed), **options)
        except NothingFound:
            continue
        except AssertionError as error:
            return error
    return None


@pytest.mark.parametrize(
    ("defect", "apart", "failure"),
    [
        (_unverified_byte, False, WrongBytes),
        (_unverified_byte, True, WrongBytes),
        (_promise_not_kept, False, WrongBytes),
        (_promise_not_kept, True, WrongBytes),
        (_failure_not_reported, True, WrongBytes),
        (_failed_load_is_saved, True, WrongBytes),
        (_salts_are_mixed, False, WrongBytes),
        (_reset_forgets_nothing, False, WrongBytes),
        (_reported_twice, None, WrongReport),
        (_report_lost, None, WrongReport),
        (_lease_not_ended, True, AssertionError),
    ],
)
def test_a_walk_notices(
    defect: Callable[[Patch], None],
    apart: bool,
    failure: type[AssertionError],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    defect(monkeypatch)
    error = _failure(tmp_path, apart=apart, staged=False)
    assert isinstance(error, failure), f"{defect.__name__}: {error!r}"


def _reset_amid_an_answer(pair: Pair) -> None:
    """The same tokens come again, after their first request has seen a reset."""
    request = FakeRequest("r", PROMPT, 3)
    pair.engine.add(request)
    while request.num_computed_tokens < len(PROMPT):
        pair.engine.step()
    pair.scheduler.reset_cache()
    pair.engine.weights = 1
    pair.run()
    for _ in range(2):  # one saves the chunks before the last one, and one finds all
        pair.flush()
        pair.generate(request.all_token_ids)
    pair.close()


def test_saves_of_what_a_reset_has_found_are_noticed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A walk draws such a reset too seldom."""
    _reset_amid_an_answer(Pair({"directory": str(tmp_path / "right")}))
    _reset_saves_what_was_there(monkeypatch)
    with pytest.raises(WrongBytes):
        _reset_amid_an_answer(Pair({"directory": str(tmp_path / "wrong")}))


@pytest.mark.parametrize(
    "defect", [_staging_used_again_early, _put_before_it_is_copied, _failed_load_is_saved]
)
def test_a_walk_over_a_late_device_notices(
    defect: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    defect(monkeypatch)
    error = _failure(tmp_path, apart=True, staged=True, lost_share=0.3)
    assert isinstance(error, WrongBytes), f"{defect.__name__}: {error!r}"


def _order_wrong(patch: Patch) -> None:
    """Two elements of each block are taken for each other."""
    real = _worker.learn_order

    def learn(*place: Any) -> Any:
        order = real(*place)
        first, last = order.key.offsets[[0, -1]]
        order.key.offsets[[0, -1]] = last, first
        return order

    patch.setattr(_worker, "learn_order", learn)


def test_a_wrong_order_is_not_used(tmp_path: Path, monkeypatch: Patch) -> None:
    _order_wrong(monkeypatch)
    pair = Pair({"directory": str(tmp_path)}, kernel=KERNELS[3])
    assert pair.worker.get_handshake_metadata() is None
    pair.close()


def test_without_its_check_a_walk_notices(tmp_path: Path, monkeypatch: Patch) -> None:
    _order_wrong(monkeypatch)
    monkeypatch.setattr(_worker, "check_order", lambda *_: None)
    assert isinstance(_failure(tmp_path, has_kernels=True), WrongBytes)


def _window_too_short(patch: Patch) -> None:
    """The first chunk that reaches into the window is left out."""
    real = _groups.KvGroup.first_needed

    def first_needed(group: Any, border: int) -> int:
        needed = real(group, border)
        return needed if group.window is None else min(needed + 1, border - 1)

    patch.setattr(_groups.KvGroup, "first_needed", first_needed)


def _groups_are_mixed(patch: Patch) -> None:
    patch.setattr(_groups.KvGroup, "identity", "group")


def _workers_are_mixed(patch: Patch) -> None:
    real = _parts.passport_of

    def passport_of(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**real(*args, **kwargs), "shard": "canonical"}

    patch.setattr(_parts, "passport_of", passport_of)


def _stages_are_mixed(patch: Patch) -> None:
    _workers_are_mixed(patch)
    _groups_are_mixed(patch)


def _loss_not_reported(patch: Patch) -> None:
    """A request that waited for a load that failed is computed as if it had ended well."""
    real = _worker.WorkerSide.take_finished
    patch.setattr(_worker.WorkerSide, "take_finished", lambda side: (real(side)[0], set()))


def _end_not_reported(patch: Patch) -> None:
    patch.setattr(_worker.WorkerSide, "take_finished", lambda side: (set(), set()))


_HYBRID = (FakeGroup(), FakeGroup(window=6))
_TWO_WINDOWS = (FakeGroup(window=6), FakeGroup(), FakeGroup(window=6))


@pytest.mark.parametrize(
    ("defect", "groups", "workers", "failure"),
    [
        (_window_too_short, _HYBRID, (1, 1), WrongBytes),
        (_groups_are_mixed, _TWO_WINDOWS, (1, 1), WrongBytes),
        (_workers_are_mixed, ONE_GROUP, (2, 1), WrongBytes),
        (_workers_are_mixed, _HYBRID, (2, 1), WrongBytes),
        (_stages_are_mixed, ONE_GROUP, (1, 2), WrongBytes),
        (_loss_not_reported, _HYBRID, (1, 1), WrongBytes),
        (_loss_not_reported, ONE_GROUP, (2, 1), WrongBytes),
        (_loss_not_reported, ONE_GROUP, (1, 2), WrongBytes),
        (_end_not_reported, _HYBRID, (1, 1), AssertionError),
        (_report_lost, ONE_GROUP, (2, 1), WrongReport),
        (_lease_not_ended, _HYBRID, (2, 1), AssertionError),
        (_lease_not_ended, ONE_GROUP, (1, 2), AssertionError),
    ],
)
def test_a_walk_over_groups_and_workers_notices(
    defect: Callable[[Patch], None],
    groups: tuple[FakeGroup, ...],
    workers: tuple[int, int],
    failure: type[AssertionError],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    defect(monkeypatch)
    ranks, stages = workers
    error = _failure(
        tmp_path, apart=True, staged=False, groups=groups, ranks=ranks, stages=stages
    )
    assert isinstance(error, failure), f"{defect.__name__}: {error!r}"


def _states_of_other_tokens_are_saved(patch: Patch) -> None:
    """Of the last token of any step."""

    class Plan(_plan.SavePlan):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.ends_there = True

    patch.setattr(_scheduler, "SavePlan", Plan)


def _prompts_in_small_steps(folder: Path) -> None:
    """Steps end at 3, 6 and 8 tokens: the first block has the state behind 3 tokens when its chunk
    is full."""
    pair = Pair({"directory": str(folder)}, groups=STATES[0])
    pair.engine.budget = 3
    pair.generate(PROMPT[:9])
    assert pair.generate(PROMPT[:9]).external == 8
    assert pair.generate(PROMPT[:5]).external == 0
    pair.close()


def test_states_of_other_tokens_are_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    _prompts_in_small_steps(tmp_path / "right")
    _states_of_other_tokens_are_saved(monkeypatch)
    with pytest.raises(WrongBytes):
        _prompts_in_small_steps(tmp_path / "wrong")


def test_a_walk_over_states_notices(tmp_path: Path, monkeypatch: Patch) -> None:
    _groups_are_mixed(monkeypatch)
    assert isinstance(_failure(tmp_path, groups=STATES[1], staged=False), WrongBytes)


def _two_requests_of_one_slot(pair: Pair) -> None:
    """Both are promised before either is loaded, and there is room for one chunk."""
    for i, prompt in enumerate((PROMPT[: BLOCK + 1], PROMPT[BLOCK : 2 * BLOCK + 1])):
        pair.engine.add(FakeRequest(f"r{i}", prompt, 2))
    pair.run()


def _stored(folder: Path) -> Pair:
    """Both requests' chunks are on disk; shared memory has one slot."""
    extra = {"directory": str(folder), "shared_bytes": 2 * BLOCK * 8}
    first = Pair(extra)
    for prompt in (PROMPT[:BLOCK], PROMPT[BLOCK : 2 * BLOCK]):
        first.generate(prompt)
    first.close()
    return Pair(extra, apart=True)


def _lease_dropped_early(patch: Patch) -> None:
    """A slot is free for others as soon as it is leased. Schedulers that are made from now on
    promise both requests in one step, however slow the disk is."""
    patch.setattr(_scheduler, "_POLL_SECONDS", 10.0)
    real = _arena.Arena.lease

    def lease(arena: Any, fetch: quire.ChunkFetch, first: int, count: int) -> Any:
        slots = real(arena, fetch, first, count)
        arena.release(slots)
        return slots

    patch.setattr(_arena.Arena, "lease", lease)


def test_a_lease_that_is_dropped_early_is_found_out_by_its_number(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    _lease_dropped_early(monkeypatch)
    pair = _stored(tmp_path)
    _two_requests_of_one_slot(pair)
    assert pair.stats()["failed_loads"] == 1
    assert pair.engine.refused_blocks == 1
    pair.close()


def test_without_its_number_it_would_be_read_as_another_chunk(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    _lease_dropped_early(monkeypatch)
    pair = _stored(tmp_path)
    monkeypatch.setattr(
        _arena.ArenaView,
        "layer",
        lambda view, slots, layer: view._slots[[place for place, _ in slots], layer],
    )
    with pytest.raises(WrongBytes):
        _two_requests_of_one_slot(pair)


def test_an_overdue_lease_ends_and_a_late_worker_reads_nothing(tmp_path: Path) -> None:
    """The worker is given a plan, and comes to it after another load has taken the slot."""
    pair = _stored(tmp_path)
    scheduler = pair.scheduler._scheduler
    now = [100.0]
    scheduler._clock = lambda: now[0]
    engine = pair.engine
    late = FakeRequest("late", PROMPT[: BLOCK + 1], 2)
    engine.add(late)
    output, scheduled = engine._schedule()
    while not scheduled:  # its chunk is on its way from disk
        output, scheduled = engine._schedule()
    plan = pair.scheduler.build_connector_meta(output)
    (arena,) = scheduler._arenas
    assert arena.free_count == 0
    engine.running.remove(late)
    now[0] += 59.0
    scheduler._end_overdue_leases()
    assert arena.free_count == 0
    now[0] += 2.0
    assert pair.generate(PROMPT[BLOCK : 2 * BLOCK + 1]).external == BLOCK
    assert pair.stats()["overdue_leases"] == 1
    pair.worker.bind_connector_metadata(plan)
    pair.worker.start_load_kv(None)
    assert pair.worker.get_block_ids_with_load_errors() == set(late.blocks[0][:1])
    pair.close()
