"""Whose keys and values a QuireCache holds: the attention modules of one model."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch

from quire import errors

__all__ = ["Weights", "module_digest"]


def module_digest(module: torch.nn.Module) -> str:
    """A digest of the weights of one attention module."""
    whole = hashlib.blake2b(digest_size=16)
    for name, weight in module.named_parameters():
        whole.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        whole.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


class Weights:
    """Unknown; or modules; or digests of modules, of which load() knows no more."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Any]] = []
        self._digests: list[str] = []

    def forget(self) -> None:
        self._modules, self._digests = [], []

    def copy(self) -> Weights:
        copied = Weights()
        copied._modules, copied._digests = [*self._modules], [*self._digests]
        return copied

    def check(self, layer: int, module: torch.nn.Module) -> None:
        """BadStateError if keys of another model are held."""
        if self._modules:
            same = self._modules[layer]() is module
        else:
            same = not self._digests or module_digest(module) == self._digests[layer]
        if not same:
            raise errors.BadStateError(
                f"QuireCache: holds keys and values of another model (its layer {layer} differs); "
                "give each model a cache of its own, or reset() this one first"
            )

    def bind(self, modules: list[Any]) -> None:
        """A forward of these modules, all of them checked, has ended."""
        if not self._modules:
            self._modules = [weakref.ref(module) for module in modules]

    def expect(self, digests: list[str]) -> None:
        """Only modules with these digests may go on."""
        self._modules, self._digests = [], [*digests]

    def digests(self) -> list[str]:
        """Digests of the modules. BadStateError if the model is gone."""
        if not self._modules:
            return [*self._digests]
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if len(modules) < len(self._modules):
            raise errors.BadStateError(
                "QuireCache: the model whose keys and values these are is gone, so save() cannot "
                "note which it was; save while it is there"
            )
        return [module_digest(module) for module in modules]
