"""What the layers of a transformers configuration keep, as quire.LayerSpec; the rest is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quire import errors
from quire._arrays import dtype_name
from quire.kv_cache import LayerSpec

__all__ = ["architecture_digest", "layer_specs"]

# Fields that change nothing about keys and values of given weights.
_VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


def layer_specs(config: Any, dtype: Any) -> list[LayerSpec]:
    """A LayerSpec for each layer of the decoder. BadArgumentError names what Quire cannot keep.

    dtype: of the stored keys and values; None = the configuration's, else float32.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(config, "an encoder and a decoder")
    if config.get_text_config(decoder=True) is not config:
        raise _refused(config, "more than text; give the text model and config.get_text_config()")
    if getattr(config, "kv_lora_rank", None):
        raise _refused(config, "multi-head latent attention")
    types = getattr(config, "layer_types", None) or []
    if "chunked_attention" in types or getattr(config, "attention_chunk_size", None):
        raise _refused(config, "chunked attention")
    name = dtype_name(dtype or getattr(config, "dtype", None) or "float32")
    kept = DynamicCache(config=config).layers
    return [
        dataclasses.replace(_spec(config, of_layer, kept_as), dtype=name)
        for of_layer, kept_as in zip(_per_layer(config, len(kept)), kept, strict=True)
    ]


def architecture_digest(config: Any) -> str:
    """A digest of the configuration without what does not change keys and values."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _per_layer(config: Any, count: int) -> list[Any]:
    return list(getattr(config, "per_layer_config", None) or [config] * count)


def _spec(config: Any, of_layer: Any, kept_as: Any) -> LayerSpec:
    if type(kept_as) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise _refused(config, f"layers that transformers keeps as {type(kept_as).__name__}")
    heads = of_layer.num_attention_heads
    return LayerSpec(
        num_qo_heads=heads,
        num_kv_heads=getattr(of_layer, "num_key_value_heads", None) or heads,
        qk_head_dim=getattr(of_layer, "head_dim", None) or of_layer.hidden_size // heads,
        window=int(kept_as.sliding_window) if kept_as.is_sliding else 0,
        soft_cap=float(getattr(of_layer, "attn_logit_softcapping", None) or 0.0),
    )


def _refused(config: Any, what: str) -> errors.BadArgumentError:
    return errors.BadArgumentError(
        f"QuireCache: models of type {config.model_type!r} cannot be kept: they have {what}"
    )
