"""Pipeline stages behind TVM's names: a cache of some of the model's layers, which callers number
as in the model (defect B26: TVM's DebugGetKV takes the kinds of the wrong layers)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm_calls import OneCache, create_arguments, function
from tvm_ffi import Shape
from tvm_mla import DIM, HEADS, PREFILL, MlaCache, output, tensor

import quire
import quire.tvm

MHA, MLA, SLIDING = 0, 1, 3
KINDS = (MHA, SLIDING, MLA, MHA, MLA)
PARTITION = (0, 2, 5)
TOKENS = 9


@pytest.fixture
def install_stage() -> Iterator[Callable[[int | None], None]]:
    yield lambda stage: quire.tvm.install(pipeline_stage=stage)
    if quire.tvm.installed():
        quire.tvm.uninstall()


def layers_of(stage: int | None) -> range:
    return range(5) if stage is None else range(PARTITION[stage], PARTITION[stage + 1])


def stage_cache(install_stage: Callable[[int | None], None], stage: int | None) -> MlaCache:
    """Of all layers if `stage` is None. Weights and inputs are the same for all."""
    install_stage(stage)
    partition = None if stage is None else PARTITION
    cache = MlaCache(kinds=KINDS, layer_window=3, partition=partition)
    quire.tvm.uninstall()
    return cache


def rows_of_layers() -> tuple[np.ndarray, np.ndarray]:
    """Inputs [layers, tokens, ...] of layers that are not MLA and of those that are."""
    random = np.random.default_rng(7)
    plain = random.standard_normal((5, TOKENS, HEADS + 2, DIM)).astype("float32")
    return plain, random.standard_normal((5, TOKENS, DIM + HEADS * 10)).astype("float32")


def run(cache: MlaCache, stage: int | None) -> dict[int, np.ndarray]:
    """A forward of sequence 3: the outputs of the layers that the cache has."""
    plain, latent = rows_of_layers()
    cache.add_sequence(3)
    cache.begin([3], [TOKENS])
    outputs = {
        layer: cache.run(layer, latent[layer], PREFILL)
        if KINDS[layer] == MLA
        else cache.attend(layer, plain[layer], 1)
        for layer in layers_of(stage)
    }
    cache.end_forward()
    return outputs


@pytest.mark.parametrize("stage", [0, 1])
def test_b26_a_stage_has_its_layers_and_gives_their_rows(
    install_stage: Callable[[int | None], None], stage: int
) -> None:
    whole = run(stage_cache(install_stage, None), None)
    cache = stage_cache(install_stage, stage)
    for layer, o in run(cache, stage).items():
        np.testing.assert_array_equal(o, whole[layer])
    plain, latent = rows_of_layers()
    of_kind = {mla: [n for n in layers_of(stage) if (KINDS[n] == MLA) == mla] for mla in (0, 1)}
    # The layer with a window of 3 tokens has let the others go.
    begin = TOKENS - 3 if stage == 0 else 2
    count = TOKENS - begin
    k, v = (output(len(of_kind[0]), count, 1, DIM) for _ in range(2))
    cache.debug_get_kv(3, begin, TOKENS, k, v)
    np.testing.assert_array_equal(k.numpy(), plain[of_kind[0], begin:, HEADS : HEADS + 1])
    np.testing.assert_array_equal(v.numpy(), plain[of_kind[0], begin:, HEADS + 1 :])
    if not of_kind[1]:
        return
    kv = output(len(of_kind[1]), count, DIM)
    cache.debug_get_kv_mla(3, begin, TOKENS, kv)
    np.testing.assert_array_equal(kv.numpy(), latent[of_kind[1], begin:, :DIM])


def test_layers_of_other_stages_are_refused(
    install_stage: Callable[[int | None], None],
) -> None:
    cache = stage_cache(install_stage, 1)
    cache.add_sequence(0)
    cache.begin([0], [1])
    qkv = np.zeros((1, HEADS + 2, DIM), "float32")
    for layer in (-1, 0, 1, 5):
        with pytest.raises(quire.BadArgumentError, match=f"no layer {layer}; .* from 2 to 4"):
            cache.attend(layer, qkv, 1)
        with pytest.raises(quire.BadArgumentError, match=f"no layer {layer};"):
            cache.append_mla_kv(layer, tensor(qkv[:, 0]))
    cache.attend(3, qkv, 1)


def test_checkpoints_are_of_the_stage(install_stage: Callable[[int | None], None]) -> None:
    hashes = set()
    for stage in (0, 1, None):
        cache = stage_cache(install_stage, stage)
        hashes.add(str(cache.get_layout_hash()))
        run(cache, stage)
        metadata = str(cache.get_checkpoint_metadata(3))
        layers = layers_of(stage)
        assert f'"layer_begin":{layers[0]},' in metadata
        assert f'"layer_end":{layers[-1] + 1},' in metadata
    assert len(hashes) == 3


def test_without_an_option_the_stage_is_the_disco_workers(
    install_stage: Callable[[int | None], None],
) -> None:
    install_stage(None)
    arguments = create_arguments(kinds=(0, 0, 0), partition=(0, 1, 3))
    create = function("paged_attention_kv_cache_create")
    with pytest.raises(quire.BadArgumentError, match=r"2 pipeline stages.*pipeline_stage="):
        create(*arguments)
    names = ["runtime.disco.worker_rank", "runtime.disco.world_size"]
    before = {name: tvm_ffi.get_global_func(name) for name in names}

    def as_worker(rank: int, size: int) -> OneCache:
        for name, value in zip(names, (rank, size), strict=True):
            tvm_ffi.register_global_func(name, lambda value=value: value, override=True)
        cache = OneCache(arguments, kinds=(0, 0, 0))
        cache.add_sequence(0)
        cache.begin([0], [1])
        return cache

    try:
        for rank, layers in ((0, [0]), (1, [0]), (2, [1, 2]), (3, [1, 2])):
            cache = as_worker(rank, 4)
            for layer in layers:
                cache.attend(layer, cache.qkv(1)[layer], 1)
            cache.end_forward()
        with pytest.raises(quire.BadArgumentError, match="3 Disco workers"):
            as_worker(0, 3)
    finally:
        for name, was in before.items():
            tvm_ffi.register_global_func(name, was, override=True)


def test_a_stage_that_there_is_not(install_stage: Callable[[int | None], None]) -> None:
    with pytest.raises(quire.BadArgumentError, match="negative"):
        install_stage(-1)
    install_stage(2)
    create: Any = function("paged_attention_kv_cache_create")
    with pytest.raises(quire.BadArgumentError, match="this is stage 2"):
        create(*create_arguments(kinds=KINDS, partition=PARTITION, dim=DIM, value_dim=8))
    for wrong in ((0,), (1, 5), (0, 3, 3, 5)):
        arguments = create_arguments(kinds=KINDS, dim=DIM, value_dim=8)
        arguments[1] = Shape(wrong)
        with pytest.raises(quire.BadArgumentError, match="layer partition"):
            create(*arguments)
