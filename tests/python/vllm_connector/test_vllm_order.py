"""Canonical chunks of quire.vllm: the order of a kernel's blocks is learnt, and what one kernel has
computed is found by others with blocks of another size."""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import quire
from fake_kernel import BROKEN_KERNELS, KERNELS, FakeKernel
from fake_vllm import BLOCK, FakeGroup, FakeRequest
from late_stream import LateStream
from quire.vllm import _identity, _order
from quire.vllm._groups import KvGroup, KvRows
from quire.vllm._kernel import CacheWriter, NotLearntError
from vllm_pair import PROMPT, Pair, damage, fake_passport, walk

passport = pytest.fixture(autouse=True)(fake_passport)

_HYBRID = (FakeGroup(), FakeGroup(window=6, layers=3))


class _Layer:
    """Blocks of a layer that a kernel writes, and what the connector knows of them."""

    def __init__(self, kernel: FakeKernel, block_size: int, blocks: int = 5) -> None:
        self.kernel = kernel
        row_bytes = kernel.row * kernel.element_bytes
        self.pages = torch.randint(256, (blocks, block_size, row_bytes), dtype=torch.uint8)
        self.rows = KvRows(
            kernel.heads, kernel.key_dim, kernel.value_dim, "", kernel.element_bytes
        )
        self.group = KvGroup(("layer",), block_size, block_size * row_bytes, self.rows, None, 128)
        self.writer = CacheWriter(
            element=kernel.element,
            given=kernel.element if kernel.element_bytes > 1 else torch.bfloat16,
            cache=self.pages,
            update=lambda *given: kernel.do_kv_cache_update(None, *given[:2], self.pages, given[2]),
        )

    def learn(self) -> _order.KernelOrder:
        place = (self.writer, self.pages, self.group, self.rows)
        order = _order.learn_order(*place)
        _order.check_order(order, *place)
        return order


_SHAPES = [
    FakeKernel("", heads=2, key_dim=8, value_dim=8),
    FakeKernel("", heads=3, key_dim=5, value_dim=2, element=torch.float16),
    FakeKernel("", heads=1, key_dim=4, value_dim=4, element=torch.float32),
    FakeKernel("", heads=2, key_dim=16, value_dim=16, element=torch.float8_e4m3fn),
    FakeKernel("", heads=2, key_dim=3, value_dim=1, element=torch.float8_e5m2),
]


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: str(shape.element)[6:])
@pytest.mark.parametrize("order", [each.order for each in KERNELS])
def test_the_order_of_a_kernel_is_learnt(order: str, shape: FakeKernel, block_size: int) -> None:
    """And its blocks have the bytes that they had before."""
    layer = _Layer(dataclasses.replace(shape, order=order), block_size)
    before = layer.pages.clone()
    found = layer.learn()
    assert torch.equal(layer.pages, before)
    places = layer.kernel.places(block_size)
    keys = shape.heads * shape.key_dim
    for name, expected in ((found.key, places[:, :keys]), (found.value, places[:, keys:])):
        runs = name.offsets[:, None] + np.arange(0, name.run_bytes, shape.element_bytes)
        assert np.array_equal(runs.ravel(), expected.ravel() * shape.element_bytes)


def test_elements_that_follow_each_other_are_moved_together() -> None:
    shape = _SHAPES[0]
    run_bytes = {
        each.order: _Layer(dataclasses.replace(shape, order=each.order), 16).learn().key.run_bytes
        for each in KERNELS
    }
    assert run_bytes == {
        "rows": 2 * 8 * 2,  # all heads of a token
        "planes": 16 * 2 * 8 * 2,  # all keys of a block
        "heads": 2,
        "random": 2,
    }


@pytest.mark.parametrize("kernel", BROKEN_KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_a_kernel_without_an_order_is_found_out(kernel: FakeKernel) -> None:
    layer = _Layer(dataclasses.replace(kernel, key_dim=2, value_dim=2), 16)
    before = layer.pages.clone()
    with pytest.raises((NotLearntError, RuntimeError)):
        layer.learn()
    assert torch.equal(layer.pages, before)


def test_too_few_blocks_are_said() -> None:
    with pytest.raises(NotLearntError, match="there are 2 blocks; 3 are needed"):
        _Layer(KERNELS[0], 16, blocks=2).learn()


def test_another_tensor_than_the_registered_one_is_not_written() -> None:
    layer = _Layer(KERNELS[0], 16)
    layer.writer = dataclasses.replace(layer.writer, cache=layer.pages.clone())
    with pytest.raises(NotLearntError, match="another tensor"):
        layer.learn()


# ---- Under the fake vLLM

def _stored(folder: Path, kernel: FakeKernel | None, **shape: Any) -> None:
    pair = Pair({"directory": str(folder)}, kernel=kernel, **shape)
    assert pair.generate(PROMPT).external == 0
    assert "errors" not in pair.stats()
    pair.close()


def _found(folder: Path, kernel: FakeKernel | None, extra: dict[str, Any], **shape: Any) -> int:
    pair = Pair({"directory": str(folder), **extra}, kernel=kernel, **shape)
    found = pair.generate(PROMPT, kv_transfer_params={"quire_skip": "save"}).external
    assert not pair.stats().keys() & {"errors", "failed_loads"}
    pair.close()
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["one process", "two processes"])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("first", KERNELS, ids=lambda kernel: kernel.order)
def test_other_kernels_find_what_one_has_computed(
    first: FakeKernel, late: bool, apart: bool, tmp_path: Path
) -> None:
    _stored(tmp_path, first, apart=apart, stream=LateStream(random.Random(1)) if late else None)
    for kernel in KERNELS:
        for block in (1, 2, 4):
            stream = None if late else LateStream(random.Random(2))
            shape = {"groups": (FakeGroup(block=block),), "apart": apart, "stream": stream}
            assert _found(tmp_path, kernel, {}, **shape) == 12, (kernel, block)


def test_chunks_have_rows_of_keys_and_values(tmp_path: Path) -> None:
    """Whatever the kernel: the sections are those of docs/formats/chunk.md."""
    pair = Pair({"directory": str(tmp_path)}, kernel=KERNELS[2])
    request = pair.generate(PROMPT)
    pair.flush()
    fetch = pair.scheduler._scheduler._space(b"", 0).fetch(PROMPT)
    assert fetch.wait(120.0)
    for chunk in range(3):
        for layer in range(2):
            rows = pair.engine.truth(request, layer, chunk * BLOCK, (chunk + 1) * BLOCK)
            for kind, part in (("key", rows[:, :4]), ("value", rows[:, 4:])):
                section = fetch.section(chunk, kind, layer)
                assert section.shape == (BLOCK, 2, 1)
                assert section.view(np.uint8).reshape(BLOCK, -1).tolist() == part.tolist()
    fetch.close()
    pair.close()


def test_blocks_of_16_32_and_128_tokens_share_a_store(tmp_path: Path) -> None:
    prompt = [random.Random(i).randrange(9) for i in range(300)]
    found = []
    for block, kernel in zip((16, 128, 32, 16), KERNELS, strict=True):
        extra = {"directory": str(tmp_path), "chunk_tokens": 128}
        pair = Pair(extra, groups=(FakeGroup(block=block, layers=1),), kernel=kernel)
        found.append(pair.generate(prompt, 1).external)
        assert "errors" not in pair.stats()
        pair.close()
    assert found == [0, 256, 256, 256]


@pytest.mark.parametrize(("saved", "block"), [(4, 2), (4, 4), (2, 4), (8, 4), (2, 8), (1, 2)])
@pytest.mark.parametrize("window", [2, 3, 6, 7, 13])
def test_of_a_window_other_blocks_are_filled(
    window: int, saved: int, block: int, tmp_path: Path
) -> None:
    """The first chunk that reaches into it is saved and loaded in part, in whole blocks. Where some
    tokens of a block would lack, the chunk is not found."""
    extra = {"chunk_tokens": 8}
    groups = (FakeGroup(block=saved), FakeGroup(window=window, block=saved))
    lacking = [max(0, 8 - (window - 1)) // each * each for each in (saved, block)]
    found = 1 if lacking[0] == lacking[1] else 0
    first = Pair(
        {"directory": str(tmp_path), **extra}, blocks=160, groups=groups, kernel=KERNELS[2]
    )
    first.generate(PROMPT[:9])
    first.generate(PROMPT * 2)
    first.close()
    others = tuple(dataclasses.replace(each, block=block) for each in groups)
    for stream in (None, LateStream(random.Random(3))):
        for apart in (False, True):
            pair = Pair(
                {"directory": str(tmp_path), **extra},
                blocks=160,
                groups=others,
                kernel=KERNELS[3],
                apart=apart,
                stream=stream,
            )
            for prompt, tokens in ((PROMPT[:9], 8), (PROMPT * 2, 24)):
                request = pair.generate(prompt, kv_transfer_params={"quire_skip": "save"})
                assert request.external == found * tokens
            assert not pair.stats().keys() & {"errors", "failed_loads"}
            pair.close()


def test_two_workers_have_orders_of_their_own(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"ranks": 2, "apart": True, "groups": _HYBRID}
    _stored(tmp_path, KERNELS[1], **shape)
    assert _found(tmp_path, KERNELS[3], {}, **shape) == 12
    assert _found(tmp_path, KERNELS[3], {}, groups=_HYBRID) == 0, "chunks of half of the heads"


def test_opaque_chunks_and_canonical_ones_are_apart(tmp_path: Path) -> None:
    """Opaque ones are found by the layout "opaque" alone."""
    _stored(tmp_path / "opaque", None)
    _stored(tmp_path / "canonical", KERNELS[0])
    opaque = {"layout": "opaque"}
    assert _found(tmp_path / "opaque", KERNELS[0], opaque) == 12
    assert _found(tmp_path / "opaque", KERNELS[0], {"layout": "auto"}) == 0
    assert _found(tmp_path / "canonical", KERNELS[0], opaque) == 0
    assert _found(tmp_path / "canonical", KERNELS[0], {"layout": "auto"}) == 12


@pytest.mark.parametrize("kernel", BROKEN_KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_without_an_order_chunks_are_opaque_and_the_log_says_so(
    kernel: FakeKernel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a kernel that can be run is written by its order, which the connector does not learn."""
    with caplog.at_level(logging.INFO, "quire.vllm"):
        pair = Pair({"directory": str(tmp_path)}, kernel=kernel)
    (message,) = [each.message for each in caplog.records]
    assert "is not known" in message
    assert pair.worker.get_handshake_metadata() is None
    passports = pair.scheduler._scheduler._passports
    assert [each["kind"] for each in passports] == ["latent"]
    pair.close()


def test_a_scheduler_that_hears_nothing_has_opaque_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker, which has learnt its order, follows."""
    _stored(tmp_path, None)
    scheduler = quire.vllm.QuireConnector
    monkeypatch.setattr(scheduler, "set_xfer_handshake_metadata", lambda *_: None)
    for apart in (False, True):
        for stream in (None, LateStream(random.Random(4))):
            assert _found(tmp_path, KERNELS[0], {}, apart=apart, stream=stream) == 12


def test_an_order_that_is_told_late_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        connector = quire.vllm.QuireConnector
        patch.setattr(connector, "set_xfer_handshake_metadata", lambda *_: None)
        pair = Pair({"directory": str(tmp_path)}, kernel=KERNELS[0])
    told = {0: pair.worker.get_handshake_metadata()}
    pair.scheduler.on_new_request(FakeRequest("r", PROMPT, 1))
    pair.scheduler.set_xfer_handshake_metadata(told)
    assert pair.stats()["errors"] == 1
    pair.scheduler._scheduler.finish("r")
    assert pair.generate(PROMPT).external == 0
    assert pair.generate(PROMPT).external == 12
    pair.close()


def test_a_damaged_chunk_is_a_miss_and_is_repaired(tmp_path: Path) -> None:
    _stored(tmp_path, KERNELS[0])
    found = set()
    for file in sorted(tmp_path.rglob("*.qkv")):
        damage(file)
        pair = Pair({"directory": str(tmp_path)}, kernel=KERNELS[3])
        found.add(pair.generate(PROMPT).external)
        pair.flush()
        assert pair.generate(PROMPT).external == 12
        pair.close()
    assert found == {0, 4, 8, 12}


def test_a_wrong_layout_is_named(tmp_path: Path) -> None:
    with pytest.raises(quire.BadArgumentError, match="layout is 'rows'; it must be one of"):
        Pair({"directory": str(tmp_path), "layout": "rows"})


@pytest.mark.parametrize("seed", range(24))
def test_walk_over_kernels(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path, has_kernels=True)


@pytest.mark.parametrize("seed", range(24))
def test_walk_over_kernels_groups_and_workers(seed: int, tmp_path: Path) -> None:
    walk(seed, tmp_path, groups=None, ranks=None, has_kernels=True)


# ---- The passport

class _Spec(types.SimpleNamespace):
    """vLLM's KV of a layer."""


def _rows(**changed: Any) -> KvRows | None:
    whole = {
        "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16,
        "page_size_bytes": 16 * 2 * (64 + 64) * 2,
    }  # fmt: skip
    return KvRows.of(_Spec(**{**whole, **changed}))


def test_rows_of_a_page() -> None:
    assert _rows() == KvRows(2, 64, 64, "bf16", 2)
    assert _rows(dtype=torch.uint8, page_size_bytes=16 * 2 * 128) == KvRows(2, 64, 64, "u8", 1)
    values = _rows(head_size_v=32, page_size_bytes=16 * 2 * (64 + 32) * 2)
    assert values == KvRows(2, 64, 32, "bf16", 2)
    assert _rows(page_size_bytes=16 * 2 * 128 * 2 + 64) is None, "scales, or padding"
    assert _rows(dtype=torch.int32) is None


def test_a_canonical_passport_names_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    identity = {"model": "M", "revision": "r"}
    monkeypatch.setattr(_identity, "weights_identity", lambda _: identity)

    def passport(block_size: int = 16, window: int | None = None, **model: Any) -> Any:
        rows = KvRows(2, 64, 64, "bf16", 2)
        group = KvGroup(("a", "b"), block_size, 0, rows, window, 128)
        config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(
                **{
                    "dtype": "torch.bfloat16",
                    "quantization": None,
                    "max_model_len": 100,
                    "hf_text_config": types.SimpleNamespace(rope_theta=1e4),
                    **model,
                }
            ),
            cache_config=types.SimpleNamespace(cache_dtype="auto"),
        )
        return _identity.canonical_passport_of(config, group, _identity.Shard(), True)

    found = passport()
    assert found["numerics"] == "vllm/0.32.0/bfloat16/auto/none"
    assert found["layout"] == "L2THD"
    assert _identity.is_canonical(found)
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        assert store.space(found).chunk_tokens == 128
    assert passport(block_size=128) == found
    assert passport(max_model_len=200) == found
    window = passport(window=8)
    assert window["layout"].startswith("L2THD/window-8/")
    assert _identity.is_canonical(window)
    long = types.SimpleNamespace(rope_scaling={"rope_type": "longrope"})
    others = [
        window,
        passport(dtype="torch.float16"),
        passport(quantization="fp8"),
        passport(hf_text_config=types.SimpleNamespace(rope_theta=1e6)),
        passport(hf_text_config=long),
        passport(hf_text_config=long, max_model_len=200),
    ]
    assert all(a != b for i, a in enumerate([found, *others]) for b in others[i:])


def _of_arguments(load_format: str = "auto", **model: Any) -> Any:
    """A configuration of vLLM: what passports are made of."""
    config = types.SimpleNamespace(to_dict=lambda: {"eps": 1e-6, "_name_or_path": "/a", **fields})
    fields = model.pop("config", {})
    rotation = types.SimpleNamespace(rope_theta=model.pop("rope_theta", 1e4))
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            dtype="torch.bfloat16",
            quantization=None,
            hf_text_config=rotation,
            hf_config=config,
            **model,
        ),
        cache_config=types.SimpleNamespace(cache_dtype="auto"),
        load_config=types.SimpleNamespace(load_format=load_format),
    )


@pytest.mark.parametrize("make", [_identity.passport_of, _identity.canonical_passport_of])
def test_passports_name_what_arguments_make_of_a_model(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """The model's folder is the same."""
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(_identity, "weights_identity", lambda _: {"model": "M", "revision": "r"})
    group = KvGroup(("a", "b"), 16, 8192, KvRows(2, 64, 64, "bf16", 2), None, 128)

    def passport(**given: Any) -> Any:
        return make(_of_arguments(**given), group, _identity.Shard(), True)

    found = passport()
    assert found == passport(load_format="safetensors", hf_overrides={})
    assert found == passport(config={"_name_or_path": "/b"})
    overridden = passport(hf_overrides={"eps": 1}, config={"eps": 1})
    assert overridden == passport(hf_overrides=dict, config={"eps": 1, "_name_or_path": "/b"})
    others = [
        passport(rope_theta=1e6),
        passport(load_format="dummy"),
        overridden,
        passport(hf_overrides={"eps": 2}, config={"eps": 2}),
        passport(quantization_config={"bits": 4}),
    ]
    assert all(a != b for i, a in enumerate([found, *others]) for b in others[i:])
    with quire.ChunkStore(ram_bytes=1 << 20) as store:
        assert len({store.space(each).fingerprint for each in (found, *others)}) == 6


def test_weights_of_other_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_identity, "weights_identity", lambda _: {})
    _identity.check_weights(_of_arguments())
    with pytest.raises(quire.BadArgumentError, match="load_format is 'pt'; .* load these"):
        _identity.check_weights(_of_arguments("pt"))
