"""How a GGUF file scales rotary positions, as config.json says it."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from .gguf_reader import GgufFile, TensorInfo
from .model_shape import ModelShape

ROPE_FACTORS_TENSOR = "rope_freqs.weight"
# What phi3 divides frequencies by in short and in long sequences.
LONG_ROPE_TENSORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
# The Llama 3.1 to 3.3 models all have these; GGUF keeps only the factors that follow from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def rope_scaling(file: GgufFile, shape: ModelShape) -> dict[str, Any] | None:
    metadata, prefix = file.metadata, f"{shape.architecture}.rope.scaling"
    if shape.architecture == "phi3":
        return _long_rope(file, shape)
    factor = f"{prefix}.factor"
    if factor not in metadata and f"{shape.architecture}.rope.scale_linear" in metadata:
        factor = f"{shape.architecture}.rope.scale_linear"  # its name in the first files
    # Files that name no type mean linear scaling with their factor.
    has_factor = factor in metadata and metadata.number(factor) != 1
    kind = metadata.text(f"{prefix}.type", default="linear" if has_factor else "none")
    if ROPE_FACTORS_TENSOR in file.tensors:
        if kind != "none":
            raise metadata.error(
                f"{prefix}.type", f'"{kind}" beside the tensor "{ROPE_FACTORS_TENSOR}"'
            )
        return _llama3_scaling(file, shape)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(factor)}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise metadata.error(f"{prefix}.type", f'"{kind}" is not one of none, linear, yarn')
    scaling["original_max_position_embeddings"] = metadata.integer(
        f"{prefix}.original_context_length", 1, 1 << 31
    )
    for theirs, ours in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"{prefix}.{theirs}" in metadata:
            scaling[ours] = metadata.number(f"{prefix}.{theirs}")
    if shape.latent is not None:
        # A tenth of what both fields have in all published models.
        scale = metadata.number(f"{prefix}.yarn_log_multiplier")
        scaling["mscale"] = scaling["mscale_all_dim"] = float(f"{10 * scale:.7g}")
    return scaling


def _long_rope(file: GgufFile, shape: ModelShape) -> dict[str, Any] | None:
    """LongRoPE, the only scaling that phi3 knows. The first files name none where they have the
    factors."""
    has_factors = any(name in file.tensors for name in LONG_ROPE_TENSORS.values())
    key = "phi3.rope.scaling.type"
    kind = file.metadata.text(key, default="longrope" if has_factors else "none")
    if kind == "none" and not has_factors:
        return None
    if kind != "longrope":
        raise file.metadata.error(key, f'"{kind}" is not longrope, or none without factors')
    return {
        "rope_type": "longrope",
        "attention_factor": file.metadata.number("phi3.rope.scaling.attn_factor"),
        **{
            field: _factors(file, name, shape.rotary_dim // 2)
            for field, name in LONG_ROPE_TENSORS.items()
        },
    }


def _factors(file: GgufFile, name: str, count: int) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise file.tensor_error(name, "is missing")
    factors = _stored_factors(file, tensor, count)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise file.tensor_error(name, "holds a factor that is not a finite number above zero")
    # As everywhere: the shortest decimal that rounds to the float32.
    return [float(str(factor)) for factor in factors]


def _stored_factors(file: GgufFile, tensor: TensorInfo, count: int) -> np.ndarray:
    if tensor.shape != (count,) or tensor.type != GGMLQuantizationType.F32:
        raise file.tensor_error(
            tensor.name,
            f"is {tensor.type.name} of the shape {list(tensor.shape)}, expected F32 {[count]}",
        )
    return file.rows(tensor, 0, 1).view("<f4").ravel()


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """By what each frequency is divided under Llama 3's rope scaling: 1 for short waves, `factor`
    for long ones."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    waves_per_context = _LLAMA3_CONTEXT * frequencies / (2 * np.pi)
    smooth = np.clip((waves_per_context - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GgufFile, shape: ModelShape) -> dict[str, Any]:
    """Recovers the parameters from the factors and proves them: they must give the same factors
    again."""
    tensor = file.tensors[ROPE_FACTORS_TENSOR]
    factors = _stored_factors(file, tensor, shape.head_dim // 2).astype(np.float64)
    factor = float(factors[-1])  # the longest wave
    theta = file.metadata.number(f"{shape.architecture}.rope.freq_base", default=10000.0)
    # 1e-3: the factors were computed in float32.
    if not factor >= 1 or not np.allclose(
        factors, llama3_factors(shape.head_dim, theta, factor), rtol=1e-3
    ):
        raise file.tensor_error(
            tensor.name,
            "its factors are not those of Llama 3 (low 1, high 4, context 8192), which "
            "is the only such scaling that config.json can express",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
