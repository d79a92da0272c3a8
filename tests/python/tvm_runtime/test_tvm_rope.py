"""Rotations behind TVM's names: what a compiled rotation kernel does is found by calling it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.relax.frontend.nn.llm.kv_cache import llama_rope_with_position_map
from tvm_calls import Calls, OneCache, create_arguments

import quire
import quire.tvm

HEADS = (2, 1)
DIM = 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "inv_theta_log_scale": 0.5 / math.log(10000.0),  # TVM's cache adds it
}


def rotation_kernel(
    scaling: dict[str, Any], rotary_dim: int = DIM, dtype: str = "float32", theta: float = 10000.0
) -> Any:
    function = llama_rope_with_position_map(
        theta, 1.0, DIM, HEADS[0], HEADS[1], dtype, scaling, rotary_dim
    )
    return tvm.compile(function, target="llvm")["fused_rope"]


def rotated_keys(kernel: Any, qkv: np.ndarray, first: int) -> np.ndarray:
    """What the kernel itself makes of the keys of [rows, heads, dim]."""
    rows = qkv.shape[0]
    positions = np.arange(first, first + rows, dtype="int32")
    q, k, v = (
        tvm.runtime.tensor(np.zeros((rows, heads, DIM), qkv.dtype))
        for heads in (HEADS[0], HEADS[1], HEADS[1])
    )
    kernel(tvm.runtime.tensor(qkv), tvm.runtime.tensor(positions), q, k, v, 1)
    return k.numpy()


@pytest.mark.parametrize(
    "scaling, rotary_dim, dtype",
    [
        ({}, DIM, "float32"),
        ({}, 4, "float32"),
        ({"rope_type": "gptj"}, DIM, "float32"),
        ({"rope_type": "gptj"}, 6, "float32"),
        (LLAMA3, DIM, "float32"),
        ({}, DIM, "float16"),
        (LLAMA3, DIM, "float16"),
    ],
)
def test_keys_are_rotated_as_by_the_kernel(
    installed: None, scaling: dict[str, Any], rotary_dim: int, dtype: str
) -> None:
    kernel = rotation_kernel(scaling, rotary_dim, dtype)
    cache = OneCache(
        kinds=(0,), heads=HEADS, dim=DIM, rope_mode=1, rotation=kernel, dtype=dtype, tokens=2048
    )
    cache.add_sequence(0)
    for _ in range(16):  # to positions at which a wrong frequency shows
        cache.forward([0], [64], cache.qkv(64).astype(dtype))
    qkv = cache.qkv(8).astype(dtype)
    cache.forward([0], [8], qkv)
    k, _ = cache.kv(0, 1024, 1032, (1, HEADS[1], DIM))
    expected = rotated_keys(kernel, qkv[0], 1024)
    # A kernel of TVM computes angles in float32: 1e-4 at a thousand times one radian.
    tolerance = 5e-4 if dtype == "float32" else 4e-3
    np.testing.assert_allclose(k[0], expected.astype("float32"), atol=tolerance)


def test_b23_inline_rotation_is_the_kernels_too(as_tvm: bool) -> None:
    """TVM's attention kernels with RopeMode.INLINE rotate all dimensions, half-split."""
    kernel = rotation_kernel({"rope_type": "gptj"}, 6)
    results = []
    for mode in (1, 2):
        cache = OneCache(heads=HEADS, dim=DIM, rope_mode=mode, rotation=kernel)
        cache.add_sequence(0)
        qkv = cache.qkv(20)
        cache.forward([0], [12], qkv[:, :12])
        results.append(cache.forward([0], [8], qkv[:, 12:]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_b23_what_is_no_rotation_is_refused(as_tvm: bool) -> None:
    """TVM's YaRN turns the two halves of a pair by different angles."""
    arguments = create_arguments(
        heads=HEADS, dim=DIM, rope_mode=1, rotation=rotation_kernel(YARN)
    )
    with pytest.raises(quire.BadArgumentError, match=r"no rotation.*quire\.tvm\.install\(rope"):
        Calls().paged_attention_kv_cache_create(*arguments)


def test_b23_extension_factors_are_refused(as_tvm: bool) -> None:
    arguments = create_arguments(heads=HEADS, dim=DIM, rope_mode=1)
    arguments[11] = tvm.runtime.tensor(np.ones(DIM, "float32"))
    with pytest.raises(quire.BadArgumentError, match=r"argument 11.*quire\.tvm\.install\(rope"):
        Calls().paged_attention_kv_cache_create(*arguments)


def test_a_given_rotation_takes_the_kernels_place(installed: None) -> None:
    given: dict[str, Any] = {
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    quire.tvm.uninstall()
    quire.tvm.install(rope=given)
    cache = OneCache(
        kinds=(0,), heads=HEADS, dim=DIM, rope_mode=1, rotation=rotation_kernel(YARN)
    )
    cache.add_sequence(0)
    qkv = cache.qkv(10)
    cache.forward([0], [10], qkv)
    k, _ = cache.kv_of(0)
    frequencies, amplitude = quire.rope_frequencies({"mode": "normal", **given}, DIM)
    angles = np.arange(10)[:, None] * frequencies
    cos, sin = np.cos(angles) * amplitude, np.sin(angles) * amplitude
    low, high = qkv[0, :, 2, : DIM // 2], qkv[0, :, 2, DIM // 2 :]
    expected = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)
    np.testing.assert_allclose(k[0, :, 0], expected, atol=1e-5)
