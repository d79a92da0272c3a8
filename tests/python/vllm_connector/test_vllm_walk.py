"""quire.vllm.QuireConnector under a fake vLLM: random walks of requests, aborts, preemption,
damage, a dead Redis, full queues and lost memory. A forward that reads a wrong byte fails the test."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import quire
from fake_vllm import BLOCK, ONE_GROUP, FakeGroup, FakeRequest, config
from late_stream import LateStream
from quire.vllm import QuireConnector, _arena, _identity, _scheduler, _worker
from vllm_pair import PROMPT, Pair, damage, fake_passport, walk

passport = pytest.fixture(autouse=True)(fake_passport)

_HYBRID = (FakeGroup(), FakeGroup(window=6, layers=3))


def _stored(folder: Path, **shape: Any) -> None:
    pair = Pair({"directory": str(folder)}, **shape)
    assert pair.generate(PROMPT).external == 0
    assert "errors" not in pair.stats()
    pair.close()


@pytest.fixture(params=[False, True], ids=["one process", "two processes"])
def apart(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def test_a_second_engine_finds_what_the_first_has_saved(tmp_path: Path, apart: bool) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=apart)
    first.generate(PROMPT)
    assert first.generate(PROMPT).external == 12
    assert first.stats()["hit_tokens.ram"] if not apart else True
    first.close()
    second = Pair({"directory": str(tmp_path)}, apart=apart)
    assert second.generate(PROMPT).external == 12
    assert second.generate(PROMPT[:12]).external == 8, "one token is left to compute"
    assert second.generate(PROMPT, cache_salt="other").external == 0
    assert second.stats()["hit_tokens.disk"] >= 12
    assert "errors" not in second.stats()
    second.close()


def test_generated_tokens_are_saved_unless_prompts_only(tmp_path: Path) -> None:
    for folder, extra, expected in (("a", {}, 20), ("b", {"prompts_only": True}, 12)):
        pair = Pair({"directory": str(tmp_path / folder), **extra})
        answer = pair.generate(PROMPT, 9)
        assert pair.generate(answer.all_token_ids, 1).external == expected
        pair.close()


def test_a_request_may_skip_expire_and_pin(tmp_path: Path) -> None:
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT, kv_transfer_params={"quire_skip": True})
    assert (
        pair.generate(PROMPT, kv_transfer_params={"quire_ttl": 1000, "quire_pin": True}).external
        == 0
    )
    assert pair.generate(PROMPT, kv_transfer_params={"quire_skip": "load"}).external == 0
    assert pair.generate(PROMPT).external == 12
    store = pair.scheduler._store
    kept = store.list("ram")
    assert kept and all(chunk.expires is not None for chunk in kept)  # the first request kept none
    assert store.statistics()["pins"] >= 3
    pair.close()


def _image(identifier: str, offset: int = 5, length: int = 6) -> Any:
    place = types.SimpleNamespace(offset=offset, length=length)
    return types.SimpleNamespace(identifier=identifier, mm_position=place)


def test_images_are_a_part_of_the_key(tmp_path: Path) -> None:
    """By their digests and places, from the chunk on that they begin in: ids are placeholders."""
    pair = Pair({"directory": str(tmp_path)})

    def found(*images: Any) -> int:
        pair.flush()
        answer = pair.generate(PROMPT, mm_features=list(images))
        return answer.external

    assert found(_image("a")) == 0
    assert found(_image("a")) == 12
    assert found(_image("b")) == 4, "the chunk before it"
    assert found(_image("b")) == 12
    assert found(_image("a", offset=6)) == 4
    assert found(_image("a", offset=5, length=2)) == 8, "the tokens behind it are others'"
    assert found() == 4
    assert found(_image("a", 0, 2), _image("b", 2, 2)) == 0
    assert found(_image("b", 0, 2), _image("a", 2, 2)) == 0, "in another order"
    pair.close()


def test_a_prompt_of_embeddings_has_nothing_to_do_with_the_store(tmp_path: Path) -> None:
    """Where vLLM takes them beside ids, all embeddings have one id, which says nothing of them."""
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT, prompt_embeds="an array")
    pair.flush()
    assert pair.generate(PROMPT).external == 0, "nothing was saved"
    pair.flush()
    assert pair.generate(PROMPT, prompt_embeds="another array").external == 0
    assert pair.generate(PROMPT).external == 12
    pair.close()


def test_a_request_that_computes_its_whole_prompt_is_not_looked_for(tmp_path: Path) -> None:
    """As vLLM does for logits of the prompt; what the connector found it would not take."""
    pair = Pair({"directory": str(tmp_path)})
    request = pair.generate(PROMPT, skip_reading_prefix_cache=True)
    assert "lookups" not in pair.stats() and request.external == 0
    pair.flush()
    assert pair.generate(PROMPT).external == 12, "it is saved"
    pair.close()


def test_a_request_of_the_same_name_takes_the_place_of_the_other(
    tmp_path: Path, apart: bool
) -> None:
    """What was promised to that one holds no memory any more."""
    _stored(tmp_path)
    pair = Pair({"directory": str(tmp_path)}, apart=apart)
    scheduler, request = pair.scheduler, FakeRequest("r", PROMPT, 2)
    scheduler.on_new_request(request)
    while scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        pass
    before = scheduler._scheduler._requests["r"]
    assert before.promise.border == 3
    scheduler.on_new_request(request)
    assert before.promise is None and before.lookup is None
    for arena in scheduler._scheduler._arenas or ():
        assert arena.free_count == arena.slot_count
    pair.close()


@pytest.mark.parametrize("more", [0, 12], ids=["not taken", "in vLLM by now"])
def test_what_vllm_does_not_take_holds_no_memory(tmp_path: Path, apart: bool, more: int) -> None:
    """While its request runs."""
    _stored(tmp_path)
    pair = Pair({"directory": str(tmp_path)}, apart=apart)
    scheduler, request = pair.scheduler, FakeRequest("r", PROMPT, 2)
    scheduler.on_new_request(request)
    while (found := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        pass
    assert found == 12
    if more:
        assert scheduler.get_num_new_matched_tokens(request, more) == (0, False)
    blocks = types.SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],))
    scheduler.update_state_after_alloc(request, blocks, 0)
    assert scheduler._scheduler._requests["r"].lookup is None
    for arena in scheduler._scheduler._arenas or ():
        assert arena.free_count == arena.slot_count
    pair.close()


def test_a_step_waits_for_the_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests are looked for; running ones would wait for the sum."""
    pair = Pair({"directory": str(tmp_path)})
    waited: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(quire.ChunkFetch, "wait", lambda _, seconds: bool(waited.append(seconds)))
        for i in range(5):
            pair.engine.add(FakeRequest(f"r{i}", [i, *PROMPT], 1))
        for _ in range(3):
            pair.engine.step()
    assert len(waited) == 15
    assert [bool(each) for each in waited] == [True, False, False, False, False] * 3
    pair.run()
    pair.close()


def test_a_load_that_no_worker_took_ends_with_the_scheduler(tmp_path: Path) -> None:
    """As where vLLM fails between the two."""
    _stored(tmp_path)
    pair = Pair({"directory": str(tmp_path)})
    pair.engine.add(FakeRequest("r", PROMPT, 2))
    while not _scheduler.fetches_in_flight:
        output, _ = pair.engine._schedule()
        pair.scheduler.build_connector_meta(output)
    pair.close()
    assert not _scheduler.fetches_in_flight


def test_a_load_that_cannot_begin_holds_no_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed in memory as long as the process, one prompt's for each such load."""
    _stored(tmp_path)
    pair = Pair({"directory": str(tmp_path)})
    with monkeypatch.context() as patch:
        patch.setattr(_worker.WorkerSide, "_follow", lambda *_: 1 / 0)
        assert pair.generate(PROMPT, 1).done
    assert pair.engine.refused_blocks == 3
    assert not _scheduler.fetches_in_flight
    pair.close()


def test_a_promise_that_fails_holds_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots were never given back: after some of them there was no room for anything."""
    _stored(tmp_path)
    pair = Pair({"directory": str(tmp_path), "events": True}, apart=True)
    (arena,) = pair.scheduler._scheduler._arenas
    with monkeypatch.context() as patch:
        patch.setattr(_scheduler.SchedulerSide, "_learn", lambda *_: 1 / 0)
        request = FakeRequest("r", PROMPT, 1)
        pair.scheduler.on_new_request(request)
        found = None
        while found is None:
            found, _ = pair.scheduler.get_num_new_matched_tokens(request, 0)
        assert found == 0
    assert arena.free_count == arena.slot_count
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (12, False)
    assert arena.free_count == arena.slot_count - 3
    pair.close()


def test_a_save_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair({"directory": str(tmp_path)}, blocks=80)
    real = quire.ChunkSpace.wanted

    def wanted(space: Any, tokens: Any, **options: Any) -> Any:
        if tokens[0] == 0:
            raise OSError("broken")
        return real(space, tokens, **options)

    monkeypatch.setattr(quire.ChunkSpace, "wanted", wanted)
    pair.engine.budget = 200
    prompts = [[i, *PROMPT] for i in range(3)]
    for i, prompt in enumerate(prompts):
        pair.engine.add(FakeRequest(f"r{i}", prompt, 1))
    pair.run()
    pair.flush()
    assert [pair.generate(each, 1).external for each in prompts] == [0, 12, 12]
    assert pair.stats()["errors"] >= 1
    pair.close()


def test_one_flipped_bit_is_a_miss_and_is_repaired(tmp_path: Path, apart: bool) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=apart)
    first.generate(PROMPT)
    first.close()
    damaged = sorted(tmp_path.rglob("*.qkv"))
    for file in damaged:
        damage(file)
    second = Pair({"directory": str(tmp_path)}, apart=apart)
    assert second.generate(PROMPT).external == 0
    assert second.stats()["misses.corrupt"] >= 1
    # A request repairs what it has found damaged: it may not have read those behind the first one.
    for _ in damaged:
        second.flush()
        found = second.generate(PROMPT).external
    assert found == 12
    second.close()


def test_one_damaged_chunk_is_repaired_by_the_request_that_finds_it(
    tmp_path: Path, apart: bool
) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=apart)
    first.generate(PROMPT)
    first.close()
    found = set()
    for file in sorted(tmp_path.rglob("*.qkv")):
        damage(file)
        second = Pair({"directory": str(tmp_path)}, apart=apart)
        found.add(second.generate(PROMPT).external)
        second.flush()
        assert second.generate(PROMPT).external == 12
        second.close()
    assert found == {0, 4, 8, 12}, "up to the damaged one; the fourth has tokens of the answer"


def test_a_miss_is_asked_for_once(tmp_path: Path) -> None:
    pair = Pair({"directory": str(tmp_path)}, blocks=5)
    for i in range(3):
        pair.engine.add(FakeRequest(f"r{i}", [i, *PROMPT], 3))
    pair.run()
    assert pair.stats()["lookups"] == 3
    pair.close()


def test_a_reset_leaves_nothing_of_the_weights_before(tmp_path: Path, apart: bool) -> None:
    pair = Pair({"directory": str(tmp_path)}, apart=apart)
    pair.generate(PROMPT)
    assert pair.generate(PROMPT).external == 12
    assert pair.scheduler.reset_cache() is True
    pair.engine.weights = 1
    assert pair.generate(PROMPT).external == 0
    pair.flush()
    assert pair.generate(PROMPT).external == 12
    pair.close()
    again = Pair({"directory": str(tmp_path)}, apart=apart)
    assert again.generate(PROMPT).external == 12  # of the weights that are on disk
    again.close()


@pytest.mark.parametrize("late", [False, True], ids=["loaded", "on its way"])
@pytest.mark.parametrize("groups", [_HYBRID, ONE_GROUP], ids=["waits", "one group"])
def test_blocks_that_vllm_has_at_a_reset_are_not_saved(
    tmp_path: Path, late: bool, groups: tuple[FakeGroup, ...]
) -> None:
    """They are loaded, or computed in part, before it; what comes behind reads them."""
    shape: dict[str, Any] = {"groups": groups, "is_ahead": lambda: late}
    _stored(tmp_path, groups=groups)
    pair = Pair({"directory": str(tmp_path)}, **shape)
    request = FakeRequest("r", [*PROMPT, 9, 9, 9, 9], 9)
    pair.engine.add(request)
    while not request.external:
        pair.engine.step()
    pair.scheduler.reset_cache()
    pair.engine.weights = 1
    pair.run()
    assert request.external == 12
    assert set(request.weights[:12]) == {0} and set(request.weights[19:]) == {1}
    pair.flush()
    assert pair.generate(request.prompt_token_ids).external == 0
    pair.flush()
    assert pair.generate(request.prompt_token_ids).external == 16
    pair.close()


def test_a_request_may_end_before_its_load_does(tmp_path: Path, apart: bool) -> None:
    """Its blocks are others' only once the workers have ended the load."""
    _stored(tmp_path, groups=_HYBRID)
    pair = Pair(
        {"directory": str(tmp_path)}, groups=_HYBRID, apart=apart, is_ahead=lambda: True
    )
    request = FakeRequest("r", PROMPT, 2)
    pair.engine.add(request)
    while not pair.engine.loading:
        pair.engine.step()
    pair.engine.abort(request)
    assert len(pair.engine.free) < pair.engine.usable_blocks
    pair.run()
    assert len(pair.engine.free) == pair.engine.usable_blocks
    assert pair.generate(PROMPT).external == 12
    for arena in pair.scheduler._scheduler._arenas or ():
        assert arena.free_count == arena.slot_count
    assert not _scheduler.fetches_in_flight
    pair.close()


def test_shared_memory_that_is_full_or_lost_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Pair({"directory": str(tmp_path)}, apart=True)
    first.generate(PROMPT)
    first.close()
    small = Pair({"directory": str(tmp_path), "shared_bytes": 2 * 2 * 32}, apart=True)
    assert small.generate(PROMPT).external == 8, "two slots"
    assert small.stats()["no_room"] == 1
    assert small.scheduler._scheduler._arenas[0].free_count == 2
    monkeypatch.setattr(_arena.ArenaView, "layer", lambda *_: 1 / 0)
    request = small.generate(PROMPT)
    assert request.done
    assert small.engine.refused_blocks == 2
    assert small.stats()["failed_loads"] == 1
    assert small.scheduler._scheduler._arenas[0].free_count == 2
    small.close()


def test_a_request_without_room_is_counted_once(tmp_path: Path) -> None:
    """However often it is looked for: vLLM has a chunk itself, and then has it no more."""
    _stored(tmp_path)
    pair = Pair({"directory": str(tmp_path), "shared_bytes": 2 * 32}, apart=True)
    request = FakeRequest("r", PROMPT, 1)
    pair.scheduler.on_new_request(request)
    for computed in (4, 0):
        found = None
        while found is None:
            found, _ = pair.scheduler.get_num_new_matched_tokens(request, computed)
        assert found == 4, "one slot"
    assert pair.stats()["lookups"] == 2
    assert pair.stats()["no_room"] == 1
    pair.close()


def test_failures_never_reach_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair({"directory": str(tmp_path)})
    pair.generate(PROMPT)

    def fail(*_: object, **__: object) -> Any:
        raise OSError("broken")

    for owner, name in (
        (quire.ChunkSpace, "fetch"),
        (quire.ChunkSpace, "put"),
        (quire.ChunkSpace, "wanted"),
        (quire.ChunkFetch, "wait"),
        (quire.ChunkFetch, "scatter"),
        (_scheduler.SchedulerSide, "allocated"),
        (_scheduler.SchedulerSide, "finish"),
        (_scheduler.SchedulerSide, "_load"),
        (_scheduler.SchedulerSide, "_save"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert pair.generate([*PROMPT, 1]).done, name
    assert pair.stats()["errors"] > 0
    assert pair.generate(PROMPT).external == 12
    pair.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"unknown": 1}, "unknown names"),
        ({"chunk_tokens": 6}, "multiple of vLLM's block"),
        ({}, "two processes"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=message):
        Pair({**({"ram_bytes": 1 << 20} if extra else {}), **extra}, apart=not extra)


def test_a_device_copies_late_and_nothing_is_lost(tmp_path: Path, apart: bool) -> None:
    """Two slots of pinned memory, copies that come as late as they may."""
    extra = {"directory": str(tmp_path), "staging_bytes": 1}
    late = Pair(extra, apart=apart, stream=LateStream(random.Random(0)))
    late.generate(PROMPT)
    late.close()  # writes what the device had not copied
    for stream in (None, LateStream(random.Random(1))):
        again = Pair(extra, apart=apart, stream=stream)
        assert again.generate(PROMPT).external == 12
        assert "errors" not in again.stats()
        again.close()


def test_a_device_at_which_torch_fails_ends_in_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"directory": str(tmp_path), "staging_bytes": 1}
    pair = Pair(extra, stream=LateStream(random.Random(0)))
    pair.generate(PROMPT)
    pair.flush()
    with monkeypatch.context() as patch:
        patch.setattr(LateStream, "run", lambda *_: 1 / 0)
        patch.setattr(LateStream, "run_out", lambda *_: 1 / 0)
        for i in range(3):  # the last one finds no pinned memory any more
            assert pair.generate([*PROMPT, i]).done
    assert pair.stats()["failed_loads"] == 3
    assert pair.generate(PROMPT).done
    pair.close()


def test_kv_on_a_device_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(quire.BadArgumentError, match="the KV is on meta"):
        Pair({"directory": str(tmp_path)}, device="meta")


def test_the_passport_names_the_gpu_and_what_computes_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(backend: str) -> Any:
        return types.SimpleNamespace(
            device_config=types.SimpleNamespace(device_type="cuda"),
            attention_config=types.SimpleNamespace(backend=types.SimpleNamespace(name=backend)),
            model_config=types.SimpleNamespace(dtype="torch.bfloat16", quantization=None),
            cache_config=types.SimpleNamespace(cache_dtype="auto"),
        )

    def layout(backend: str, name: str = "NVIDIA H100", block: int = 16) -> Any:
        platform = types.SimpleNamespace(
            get_device_name=lambda: name,
            get_device_capability=lambda: types.SimpleNamespace(major=9, minor=0),
        )
        monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
        platforms = types.SimpleNamespace(current_platform=platform)
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        return _identity._layout(config(backend), block)

    found = layout("FLASH_ATTN")
    assert found[0].startswith("vllm/0.32.0/gpu/nvidia_h100/9.0/torch/")
    assert found[0].endswith("/16/FLASH_ATTN")
    assert found[1].endswith("/bfloat16/auto/none/FLASH_ATTN")
    assert layout("FLASH_ATTN", "NVIDIA H200") != found != layout("FLASHINFER")
    assert layout("FLASH_ATTN", block=32)[0] != found[0]


def test_a_kernel_may_have_smaller_blocks_than_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(tmp_path)
    monkeypatch.setattr(FakeGroup, "registered", lambda _, memory: memory.view(-1, BLOCK // 2, 8))
    pair = Pair({"directory": str(tmp_path)})
    assert pair.generate(PROMPT).external == 12
    assert pair.generate([*PROMPT[:9], 6, 6, 6, 6]).external == 8
    assert pair.generate([*PROMPT[:9], 6, 6, 6, 6]).external == 12
    assert "errors" not in pair.stats()
    pair.close()


def _heard(pair: Pair) -> set[tuple[str, int]]:
    """Blocks that a router knows of, by tier, once everything is written."""
    pair.flush()
    pair.generate([9] * 2, 1)  # one more step, in which a worker of its own tells
    return {(tier.removeprefix("quire-"), each) for tier, each in pair.engine.known_blocks}


def test_vllm_is_told_of_blocks_under_its_own_hashes(tmp_path: Path, apart: bool) -> None:
    extra = {"directory": str(tmp_path), "events": True}
    first = Pair(extra, apart=apart)
    blocks = first.generate(PROMPT).block_hashes[:4]
    told = _heard(first)
    assert {each for tier, each in told if tier == "disk"} == set(blocks)
    assert first.scheduler.take_events() == []
    first.close()
    second = Pair(extra, apart=apart)
    assert second.generate(PROMPT).external == 12
    assert {("disk", each) for each in blocks[:3]} <= _heard(second)
    store = second.scheduler._store if not apart else second.worker._worker._store
    store.remove([chunk.key for chunk in store.list("disk")])
    assert not {each for tier, each in _heard(second) if tier == "disk"} & set(blocks[3:])
    assert second.scheduler.reset_cache()
    assert _heard(second) == set()
    second.close()
    silent = Pair({"directory": str(tmp_path)}, apart=apart)
    silent.generate(PROMPT)
    assert _heard(silent) == set()
    silent.close()


@pytest.mark.parametrize("seed", range(24))
def test_walk(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path)


@pytest.mark.parametrize("seed", range(32))
def test_walk_over_groups_and_workers(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path, groups=None, ranks=None)


# ---- Groups of layers, and workers

@pytest.mark.parametrize(
    "groups",
    [
        _HYBRID,
        (FakeGroup(window=6), FakeGroup(), FakeGroup(window=9)),
        (FakeGroup(block=2), FakeGroup(window=3)),
        (FakeGroup(), FakeGroup(layers=1)),
        (FakeGroup(window=5),),
    ],
    ids=["a window", "two windows", "two sizes of blocks", "no window", "windows alone"],
)
def test_groups_of_layers_are_found_by_another_engine(
    tmp_path: Path, groups: tuple[FakeGroup, ...], apart: bool
) -> None:
    _stored(tmp_path, groups=groups, apart=apart)
    pair = Pair({"directory": str(tmp_path)}, groups=groups, apart=apart)
    assert pair.generate(PROMPT).external == 12
    assert pair.generate([*PROMPT[:9], 6, 6, 6]).external == 8
    assert pair.generate([6, *PROMPT]).external == 0
    assert "errors" not in pair.stats()
    pair.close()
    device = Pair({"directory": str(tmp_path)}, groups=groups, stream=LateStream(random.Random(3)))
    assert device.generate(PROMPT).external == 12
    device.close()


def test_of_a_window_only_the_end_is_read(tmp_path: Path) -> None:
    """The window of 6 tokens needs two chunks of 4."""
    _stored(tmp_path, groups=_HYBRID)
    pair = Pair({"directory": str(tmp_path)}, groups=_HYBRID)
    assert pair.generate(PROMPT).external == 12
    assert pair.scheduler._store.statistics()["tiers"]["disk"]["hits"] == 3 + 2
    pair.close()


def test_a_border_moves_to_where_all_groups_have_what_they_need(tmp_path: Path) -> None:
    """Tokens 4 to 11 are lost of the window's group: tokens 0 to 3 are in no window behind 12."""
    _stored(tmp_path, groups=_HYBRID)
    found = []
    for lost in ({1}, {2}, {0}):
        pair = Pair({"directory": str(tmp_path)}, groups=_HYBRID)
        space = pair.scheduler._scheduler._space(b"", 1)
        keys = space.keys(PROMPT)
        pair.scheduler._store.remove([keys[i] for i in lost])
        found.append(pair.generate(PROMPT, kv_transfer_params={"quire_skip": "save"}).external)
        assert pair.generate(PROMPT).done  # what was computed is saved
        pair.close()
    assert found == [4, 8, 12]


def test_a_load_of_several_groups_that_fails_is_computed_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(tmp_path, groups=_HYBRID)
    pair = Pair({"directory": str(tmp_path)}, groups=_HYBRID, apart=True)
    with monkeypatch.context() as patch:
        patch.setattr(_arena.ArenaView, "layer", lambda *_: 1 / 0)
        assert pair.generate(PROMPT).done
    assert pair.engine.refused_loads == 1
    assert pair.stats()["failed_loads"] == 1
    assert pair.generate(PROMPT).external == 12
    pair.close()


def test_what_vllm_takes_and_no_plan_has_is_reported_to_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(tmp_path, groups=_HYBRID)
    for name in ("allocated", "_load"):
        pair = Pair({"directory": str(tmp_path)}, groups=_HYBRID)
        with monkeypatch.context() as patch:
            patch.setattr(_scheduler.SchedulerSide, name, lambda *_: 1 / 0)
            assert pair.generate(PROMPT).done
        assert pair.engine.refused_loads == 1, name
        assert pair.generate(PROMPT).external == 12
        pair.close()


def test_a_load_that_failed_before_it_was_planned_is_not_planned_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has a chunk itself, so it does not ask again, and computes from there."""
    _stored(tmp_path, groups=_HYBRID)
    pair = Pair({"directory": str(tmp_path)}, groups=_HYBRID, apart=True)
    request = FakeRequest("r", PROMPT, 1, blocks=[[1, 2, 3, 4], [5, 6, 7, 8]])
    pair.scheduler.on_new_request(request)
    while pair.scheduler.get_num_new_matched_tokens(request, BLOCK) == (None, False):
        pass
    blocks = types.SimpleNamespace(get_block_ids=lambda: tuple(request.blocks))
    with monkeypatch.context() as patch:
        patch.setattr(_scheduler.SchedulerSide, "_load", lambda *_: 1 / 0)
        pair.scheduler.update_state_after_alloc(request, blocks, 2 * BLOCK)
    for arena in pair.scheduler._scheduler._arenas:
        assert arena.free_count == arena.slot_count
    plan = pair.scheduler.build_connector_meta(pair.engine._output({}, [], []))
    assert [(load.request, load.places) for load in plan.loads] == [("r", [])]
    pair.engine.running = [request]
    request.num_computed_tokens = BLOCK
    plan = pair.scheduler.build_connector_meta(pair.engine._output({"r": 11}, [], [request]))
    assert not plan.loads
    assert [(save.first, save.count) for save in plan.saves] == [(0, 3)]
    pair.close()


def test_what_vllm_has_itself_is_not_loaded(tmp_path: Path) -> None:
    """It has two chunks, and with them what is in the window of the third."""
    _stored(tmp_path, groups=_HYBRID)
    pair = Pair({"directory": str(tmp_path)}, groups=_HYBRID)
    request = FakeRequest("r", PROMPT, 1)
    pair.scheduler.on_new_request(request)

    def promised(computed: int) -> Any:
        while True:
            found = pair.scheduler.get_num_new_matched_tokens(request, computed)
            if found[0] is not None:
                return found

    assert promised(4) == (8, True)
    assert promised(8) == (4, True)
    blocks = [1, 2, 3, 4], [0, 6, 7, 8]
    pair.scheduler.update_state_after_alloc(
        request, types.SimpleNamespace(get_block_ids=lambda: blocks), 4
    )
    plan = pair.scheduler.build_connector_meta(pair.engine._output({}, [], []))
    (load,) = plan.loads
    assert [(each.chunk_count, each.lead, each.blocks) for each in load.groups] == [
        (1, 0, [3]),
        (1, 0, [7]),
    ]
    pair.worker.bind_connector_metadata(plan)
    pair.worker.start_load_kv(None)
    results = pair.worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    pair.scheduler.request_finished_all_groups(request, blocks)
    pair.close()


def test_two_workers_promise_what_both_have(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"ranks": 2, "apart": True}
    _stored(tmp_path, **shape)
    pair = Pair({"directory": str(tmp_path)}, **shape)
    assert pair.generate(PROMPT).external == 12
    keys = pair.scheduler._scheduler._space(b"", 1).keys(PROMPT)
    pair.close()
    pair = Pair({"directory": str(tmp_path)}, **shape)
    pair.scheduler._store.remove([keys[1]])
    assert pair.generate(PROMPT).external == 4
    pair.flush()
    assert pair.generate(PROMPT).external == 12, "the second worker has put it there again"
    pair.close()
    one = Pair({"directory": str(tmp_path)})
    assert one.generate(PROMPT).external == 0, "chunks of half of the heads"
    one.close()


def test_one_worker_that_fails_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"ranks": 2, "apart": True}
    _stored(tmp_path, **shape)
    pair = Pair({"directory": str(tmp_path)}, **shape)
    monkeypatch.setattr(pair.workers[1]._worker, "_load", lambda *_: 1 / 0)
    assert pair.generate(PROMPT).done
    assert pair.engine.refused_loads == 1
    for arena in pair.scheduler._scheduler._arenas:
        assert arena.free_count == arena.slot_count
    pair.close()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("CrossAttentionSpec", "is of kind CrossAttentionSpec"),
        ("ChunkedLocalAttentionSpec", "is of kind ChunkedLocalAttentionSpec"),
    ],
)
def test_kinds_of_kv_that_it_cannot_keep_are_named(kind: str, message: str) -> None:
    vllm_config, kv_cache_config = config({"ram_bytes": 1 << 20}, 8)
    (group,) = kv_cache_config.kv_cache_groups
    group.kv_cache_spec = type(kind, (types.SimpleNamespace,), {})(
        page_size_bytes=32, block_size=BLOCK
    )
    with pytest.raises(quire.BadArgumentError, match=message):
        QuireConnector(vllm_config, "WORKER", kv_cache_config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decode_context_parallel_size": 2}, "2 workers by context parallel"),
        ({"prefill_context_parallel_size": 2, "tensor_parallel_size": 1}, "by context parallel"),
        ({"nnodes": 2}, "the workers are on 2 hosts; it takes one"),
    ],
)
def test_workers_that_it_cannot_serve_are_refused(changed: dict[str, int], message: str) -> None:
    vllm_config, kv_cache_config = config({"ram_bytes": 1 << 20}, 8, ranks=2)
    vars(vllm_config.parallel_config).update(changed)
    with pytest.raises(quire.BadArgumentError, match=message):
        QuireConnector(vllm_config, "WORKER", kv_cache_config)
