"""The attention implementation "quire" of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from quire import errors

if TYPE_CHECKING:
    from quire.hf._cache import QuireCache

__all__ = ["NAME", "NewKeys", "register"]

NAME = "quire"
_ABSENT = object()


class NewKeys:
    """What QuireCache.update() gives a model in place of all keys: the new ones, for the attention
    "quire" alone. Anything else that is done with it says so."""

    def __init__(self, cache: QuireCache, layer: int, key: torch.Tensor) -> None:
        self._cache = cache
        self._layer = layer
        self._key = key

    def __getattr__(self, name: str) -> Any:
        raise _other_attention()

    def __getitem__(self, index: Any) -> Any:
        raise _other_attention()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise _other_attention()


def register() -> None:
    """Makes "quire" known to transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    *_: Any,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **__: Any,
) -> torch.Tensor | None:
    """The mask of transformers' masking: bool [rows, columns], False for padding; the rest of a
    causal mask the cache knows."""
    if use_vmap:
        raise errors.BadArgumentError(
            "attention 'quire': this model adds a mask of its own to the causal one, which is not "
            "supported"
        )
    return attention_mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = _ABSENT,
    softcap: Any = _ABSENT,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [rows, heads, columns, dim]; the output is [rows,
    columns, heads, dim]."""
    if not isinstance(key, NewKeys):
        raise errors.BadStateError(
            "attention 'quire' computes nothing without a quire.hf.QuireCache: give the model "
            "past_key_values=QuireCache(model.config, token_capacity=...), or load it with another "
            "attn_implementation"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = {
        "attention that is not causal": not causal,
        "dropout": bool(dropout),
        "output_attentions": bool(others.get("output_attentions")),
        "a position bias": others.get("position_bias") is not None,
        "packed sequences": others.get("cu_seq_lens_q") is not None,
        "gradients": any(each.requires_grad for each in (query, key._key, value)),
        "tensors that are not on the CPU": query.device.type != "cpu",
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise errors.BadArgumentError(f"attention 'quire': {what} cannot be had")
    cache, layer = key._cache, key._layer
    spec = cache.kv_cache.layers[layer]
    given = {"sliding_window": (sliding_window, spec.window), "softcap": (softcap, spec.soft_cap)}
    for what, (asked, kept) in given.items():
        if (asked or 0) != kept if asked is not _ABSENT else what == "softcap" and kept:
            asked = None if asked is _ABSENT else asked
            raise errors.BadArgumentError(
                f"attention 'quire': layer {layer} asks for {what}={asked}, the configuration that "
                f"the QuireCache was made from says {kept or None}"
            )
    tensors = [query, key._key, value]
    positions = others.get("position_ids")
    return cache._attend(module, layer, tensors, attention_mask, positions, scaling, s_aux), None


def _other_attention() -> errors.BadStateError:
    return errors.BadStateError(
        "QuireCache: this model computes attention by itself, which a QuireCache has no keys for; "
        "load it with attn_implementation='quire', or call model.set_attn_implementation('quire')"
    )
