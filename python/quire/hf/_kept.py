"""Keys and values of a QuireCache in a quire.ChunkStore."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch

import quire
from quire import errors
from quire.hf._layers import architecture_digest
from quire.hf._sequences import Sequences
from quire.hf._weights import model_digest

__all__ = ["Prompts", "check_ids", "keep_rows", "space_of", "take_rows"]


def check_tensor(call: str, name: str, value: object) -> None:
    """TypeError for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"QuireCache.{call}: {name} must be a torch tensor, not {type(value).__name__}"
        )


def check_ids(call: str, input_ids: torch.Tensor) -> None:
    """TypeError for what is no tensor of integers: 1.5 is no token."""
    check_tensor(call, "input_ids", input_ids)
    kind = input_ids.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"QuireCache.{call}: input_ids must be integers, not {kind}")


class Prompts:
    """Token ids of a batch without its padding, which stands on the left.

    input_ids: int64 [rows, columns]. mask: of the same shape, zeros for padding; None = none.
    """

    def __init__(self, call: str, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        check_ids(call, input_ids)
        if mask is None:
            mask = torch.ones(input_ids.shape)
        check_tensor(call, "attention_mask", mask)
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise errors.BadArgumentError(
                f"QuireCache.{call}: input_ids has shape {tuple(input_ids.shape)}, not "
                "[rows, columns]"
            )
        self.columns = input_ids.shape[1]
        self.shown = mask.bool().clone()  # bool() of bools is the caller's own
        if self.shown.shape != input_ids.shape:
            raise errors.BadArgumentError(
                f"QuireCache.{call}: attention_mask has shape {tuple(self.shown.shape)}, input_ids "
                f"{tuple(input_ids.shape)}"
            )
        if (self.shown[:, :-1] & ~self.shown[:, 1:]).any() or not self.shown[:, -1].all():
            raise errors.BadArgumentError(
                f"QuireCache.{call}: attention_mask hides columns after tokens; pad on the left"
            )
        self.ids = [
            [int(token) for token in ids[shown]]
            for ids, shown in zip(input_ids, self.shown, strict=True)
        ]
        self.padding = [self.columns - len(ids) for ids in self.ids]


def space_of(
    kv: quire.KVCache,
    store: quire.ChunkStore,
    model: torch.nn.Module,
    architecture: str,
    salt: str | bytes,
    chunk_tokens: int,
) -> quire.ChunkSpace:
    """The space of what the model computes with this cache."""
    if architecture_digest(model.config) != architecture:
        raise errors.BadArgumentError(
            "QuireCache: the model has another configuration than the QuireCache was made from"
        )
    for kind in _rope_types(model.config):
        if kind == "longrope" or "dynamic" in kind:
            raise errors.BadArgumentError(
                f"QuireCache: keep() and find() take no model with rope_type {kind!r}: how it "
                "rotates a key depends on the length of the text, so a beginning of two texts may "
                "have two sets of keys"
            )
    facts = (
        architecture,
        model_digest(model),
        torch.__version__,
        str(torch.backends.cpu.get_cpu_capability()),
    )
    revision = hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
    identity = {"model": "transformers", "revision": revision}
    return store.space(kv.chunk_passport(identity, chunk_tokens=chunk_tokens), salt=salt)


def _rope_types(config: Any) -> set[str]:
    """How keys are rotated, in one or other of the layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [each for each in parameters.values() if isinstance(each, dict)]
    return {str(each.get("rope_type", "default")) for each in of_layers or [parameters]}


def keep_rows(
    kv: quire.KVCache,
    held: Sequence[int],
    ids: Sequence[list[int]],
    space: quire.ChunkSpace,
    ttl: float,
) -> list[int]:
    """Puts whole chunks of each row; how many of its tokens the store has or takes."""
    try:
        return [
            kv.put_chunks(sequence, tokens, space, ttl=ttl) * space.chunk_tokens
            for sequence, tokens in zip(held, ids, strict=True)
        ]
    except errors.BadArgumentError as error:
        if not any(spec.window for spec in kv.layers):
            raise
        raise errors.BadStateError(
            "QuireCache.keep: layers slide, and what they show after some chunk is held no more; "
            f"keep() more often, or make the QuireCache with a larger max_crop: {error}"
        ) from error


def take_rows(
    sequences: Sequences,
    prompts: Prompts,
    space: quire.ChunkSpace,
    timeout: float,
) -> tuple[int, list[int]]:
    """Columns that are stored of all rows, but not the last one, and a new sequence for each
    distinct row."""
    chunk = space.chunk_tokens
    slides = any(spec.window for spec in sequences.kv.layers)
    if slides and len(set(prompts.padding)) > 1:
        raise errors.BadArgumentError(
            "QuireCache.find: rows of several lengths in a model with sliding layers"
        )
    until = time.monotonic() + timeout
    fetches: dict[tuple[int, ...], Any] = {}
    new: dict[tuple[int, ...], int] = {}
    try:
        for ids in prompts.ids:
            if tuple(ids) not in fetches:
                fetches[tuple(ids)] = space.fetch(ids[:-1], timeout=timeout)
        for fetch in fetches.values():
            fetch.wait(max(0.0, until - time.monotonic()))
        found = {ids: fetch.ready * chunk for ids, fetch in fetches.items()}
        columns = min(
            padding + found[tuple(ids)]
            for padding, ids in zip(prompts.padding, prompts.ids, strict=True)
        )
        if columns <= min(prompts.padding):  # not a token of any row
            columns = 0
        for row, fetch in fetches.items():
            length = max(0, columns - (prompts.columns - len(row)))
            count = -(-length // chunk)
            new[row] = sequences.take(fetch, count)
            if count * chunk > length:
                sequences.kv.pop_n(new[row], count * chunk - length)
    except BaseException:
        sequences.drop(new.values())
        raise
    finally:
        for fetch in fetches.values():
            fetch.close()
    return columns, [new[tuple(ids)] for ids in prompts.ids]
