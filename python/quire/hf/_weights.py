"""Whose keys and values a QuireCache holds: the attention modules of one model."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from quire import errors

__all__ = ["Weights", "model_digest", "module_digest"]

# What _stamp gives of the weights of a model, and their digest, which holds as long as that does.
_models: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def _digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for name, weight in weights:
        whole.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        whole.update(_bytes(weight).numpy().data)
    return whole.hexdigest()


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().contiguous().flatten().view(torch.uint8)


def _stamp(weight: torch.Tensor) -> tuple[int, int, int]:
    """Changes when the weight does. torch does not count what is written through `.data`, as PEFT
    does when it merges an adapter, so there is a sum of all bits, many times faster than a digest.
    """
    raw = _bytes(weight)
    count = len(raw) // 8 * 8 if raw.storage_offset() % 8 == 0 else 0
    sums = raw[:count].view(torch.int64).sum(), raw[count:].sum(dtype=torch.int64)
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, int(sums[0]) ^ int(sums[1])


def module_digest(module: torch.nn.Module) -> str:
    """A digest of the weights of one attention module."""
    return _digest(module.named_parameters())


def model_digest(model: torch.nn.Module) -> str:
    """A digest of all weights of a model; computed again when one of them has been written to."""
    weights = model.state_dict()
    stamp = [(name, *_stamp(each)) for name, each in weights.items()]
    known = _models.get(model)
    if known is None or known[0] != stamp:
        known = _models[model] = (stamp, _digest(weights.items()))
    return known[1]


class Weights:
    """Unknown; or modules; or digests of modules, of which load() knows no more; or a model."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Any]] = []
        self._digests: list[str] = []
        self._model: weakref.ref[Any] | None = None

    def forget(self) -> None:
        self._modules, self._digests, self._model = [], [], None

    def copy(self) -> Weights:
        copied = Weights()
        copied._modules, copied._digests = [*self._modules], [*self._digests]
        copied._model = self._model
        return copied

    def check(self, layer: int, module: torch.nn.Module) -> None:
        """BadStateError if keys of another model are held."""
        if self._modules:
            same = self._modules[layer]() is module
        elif self._model is not None:
            same = _is_part(module, self._model())
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
        self.forget()
        self._digests = [*digests]

    def expect_model(self, model: torch.nn.Module) -> None:
        """Only modules of this model may go on."""
        self.forget()
        self._model = weakref.ref(model)

    def are_of(self, model: torch.nn.Module) -> bool:
        """Whether what is held was computed by this model."""
        if self._modules:
            parts = {id(each) for each in model.modules()}
            return all(id(reference()) in parts for reference in self._modules)
        if self._model is not None:
            return self._model() is model
        layers = {module_digest(each) for each in model.modules() if hasattr(each, "layer_idx")}
        return layers.issuperset(self._digests)

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


def _is_part(module: torch.nn.Module, model: torch.nn.Module | None) -> bool:
    return model is not None and any(each is module for each in model.modules())
