"""Keys and values as int8 and fp8 through the package: cache, engine, store and `quire
kv-quality`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
from program import run
from quire.cli.kv_quality import measure
from tiny_model import TinyModel

KINDS = ["int8", "fp8", "bfloat16,int8", "fp8,float32"]
IDS = [(7 * i * i + 3 * i + 5) % 90 + 5 for i in range(150)]


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_the_plan_is_what_the_engine_takes(tiny: TinyModel, kv_dtype: str) -> None:
    options = {"kv_dtype": kv_dtype, "page_size": 16, "kv_bytes": 1 << 20, "threads": 1}
    plan = quire.Engine.plan_memory(tiny.directory, **options)
    with quire.Engine(tiny.directory, **options) as engine:
        stats = engine.stats()
    assert plan.kv_bytes_per_token == stats["kv_bytes_per_token"]
    assert plan.page_count == stats["pages_total"] and plan.kv_bytes == stats["kv_bytes"]


def test_codes_take_a_byte_and_a_scale_per_head(tiny: TinyModel) -> None:
    shape = tiny.shape
    heads = shape.layers * shape.kv_heads
    for kv_dtype in ("int8", "fp8"):
        plan = quire.Engine.plan_memory(tiny.directory, kv_dtype=kv_dtype, page_size=16)
        assert plan.kv_bytes_per_token == heads * 2 * (shape.head_dim + 4)


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_rows_depend_on_their_tokens_alone(tiny: TinyModel, kv_dtype: str) -> None:
    with quire.Engine(tiny.directory, kv_dtype=kv_dtype, page_size=16) as engine:
        alone = engine.logits(IDS)
        batch = engine.logits([IDS[:40], IDS, IDS[::-1]])
        answer = engine.generate(IDS[:100], max_tokens=6, ignore_eos=True)
        again = engine.generate(IDS[:100], max_tokens=6, ignore_eos=True)
    with quire.Engine(
        tiny.directory, kv_dtype=kv_dtype, page_size=48, prefill_chunk=17, threads=1
    ) as other:
        cut = other.logits(IDS)
    assert np.array_equal(alone, batch[1]) and np.array_equal(alone, cut)
    assert np.array_equal(alone[:40], batch[0])
    assert answer.ids == again.ids and again.usage.memory_tokens > 0


def test_the_store_keeps_codes_and_knows_types_apart(tiny: TinyModel, tmp_path: Path) -> None:
    def answer(kv_dtype: str) -> tuple[list[int], int]:
        options: Any = {"kv_dir": tmp_path, "kv_load_always": True, "kv_load_timeout": 60}
        with quire.Engine(tiny.directory, kv_dtype=kv_dtype, threads=1, **options) as engine:
            engine.wait_for_store()
            result = engine.generate(IDS, max_tokens=4, ignore_eos=True)
            engine.flush_store()
            return result.ids, result.usage.disk_tokens

    first = answer("int8")
    assert first[1] == 0
    second = answer("int8")
    assert second[0] == first[0] and second[1] > 0
    assert answer("fp8")[1] == 0


def test_types_that_are_none_are_refused(tiny: TinyModel) -> None:
    for kv_dtype in ("int4", "int8,", "int32", "int8,int8,int8"):
        with pytest.raises(quire.BadArgumentError):
            quire.Engine(tiny.directory, kv_dtype=kv_dtype)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_cache_is_near_that_of_float32(dtype: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((60, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    outputs = []
    for stored in ("float32", dtype):
        with quire.KVCache(
            [quire.LayerSpec(4, 2, 32, v_dtype=stored, dtype=stored)],
            max_num_sequences=1,
            token_capacity=128,
        ) as cache:
            cache.add_sequence(0)
            with cache.forward([0], [60]):
                cache.append(0, k, v)
                outputs.append(cache.attend(0, q))
            kept, _ = cache.debug_get_kv(0, 0, 60)
    assert kept.dtype == np.float32
    step = np.abs(k).max() * (0.51 / 127 if dtype == "int8" else 0.07)
    assert np.abs(kept[0] - k).max() <= step
    assert 0 < np.abs(outputs[0] - outputs[1]).max() < 0.2


# ---- quire kv-quality


def test_quality_of_the_reference_is_no_difference(tiny: TinyModel) -> None:
    found = measure(str(tiny.directory), IDS, ["int8", "fp8"], context=64, threads=1)
    reference, int8, fp8 = found
    assert reference.logit_difference == 0 and reference.agreement == 1
    assert abs(reference.divergence) < 1e-12
    assert 0 < int8.logit_difference < fp8.logit_difference
    assert 0 < int8.divergence < fp8.divergence
    assert int8.kv_bytes_per_token < reference.kv_bytes_per_token


def test_perplexity_is_that_of_the_logits(tiny: TinyModel) -> None:
    found = measure(str(tiny.directory), IDS, [], context=64, threads=1)[0]
    losses: list[float] = []
    with quire.Engine(tiny.directory, kv_dtype="bfloat16", threads=1) as engine:
        for first in range(0, len(IDS) - 1, 64):
            rows = engine.logits(IDS[first : first + 64]).astype(np.float64)
            for i, row in enumerate(rows):
                if first + i + 1 < len(IDS):
                    losses.append(np.log(np.exp(row).sum()) - row[IDS[first + i + 1]])
    assert len(losses) == len(IDS) - 1
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)))


def test_the_command_prints_a_line_per_type(
    capsys: pytest.CaptureFixture[str], embedded_model: str, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France. It is known for its towers. " * 3)
    arguments = ["kv-quality", embedded_model, "--text", str(text), "--tokens", "24"]
    code, out, err = run(capsys, *arguments, "--types", "int8", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [each["kv_dtype"] for each in found["types"]] == ["bfloat16", "int8"]
    assert found["tokens"] == 24 and found["types"][1]["logit_difference"] > 0
    code, _, err = run(capsys, *arguments, "--context", "1")
    assert code == 2 and "--context" in err
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and [line.split()[0] for line in out.splitlines()[2:]] == [
        "bfloat16",
        "float32",
        "int8",
        "bfloat16,int8",
        "fp8",
    ]
