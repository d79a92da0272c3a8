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
# Numbers of each weight that are looked at for a change: an update that leaves all of them alone is
# none of a matrix.
_SAMPLE = 64


def _adapters(module: torch.nn.Module) -> list[str]:
    """Which adapters are in use, as PEFT's layers say. The weights of the others are there, too."""
    return [
        f"{name} {getattr(each, 'active_adapters', None)} {each.disable_adapters} "
        f"{getattr(each, 'scaling', None)}"
        for name, each in module.named_modules()
        if isinstance(getattr(each, "disable_adapters", None), bool)
    ]


def _digest(weights: Iterable[tuple[str, torch.Tensor]], adapters: list[str]) -> str:
    whole = hashlib.blake2b("\0".join(adapters).encode(), digest_size=16)
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
    """A digest of the weights of one attention module, and of which adapters are in use."""
    return _digest(module.named_parameters(), _adapters(module))


def _sample(module: torch.nn.Module) -> str:
    """A digest of some of the numbers of each weight of a module: quick to take, and another one
    after an optimizer's step, a merge or a change of adapters, or a load of other weights."""
    whole = hashlib.blake2b("\0".join(_adapters(module)).encode(), digest_size=16)
    for name, weight in module.named_parameters():
        whole.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        plain = weight.detach()
        # The shape must do for others, such as weights that are elsewhere between forwards.
        if type(plain) is torch.Tensor and plain.device.type == "cpu":
            flat = plain.flatten()
            whole.update(_bytes(flat[:: max(1, len(flat) // _SAMPLE)]).numpy().data)
    return whole.hexdigest()


def _attention_modules(model: torch.nn.Module, layers: int) -> list[torch.nn.Module]:
    """Those that compute attention, one for each layer, in order; [] where they cannot be told."""
    by_layer: dict[Any, torch.nn.Module] = {}
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx"):
            if module.layer_idx in by_layer:
                return []
            by_layer[module.layer_idx] = module
    return [by_layer[i] for i in range(layers)] if by_layer.keys() == {*range(layers)} else []


def model_digest(model: torch.nn.Module) -> str:
    """A digest of all weights of a model, and of which adapters are in use; computed again when one
    of them has been written to."""
    weights, adapters = model.state_dict(), _adapters(model)
    stamp = (adapters, [(name, *_stamp(each)) for name, each in weights.items()])
    known = _models.get(model)
    if known is None or known[0] != stamp:
        known = _models[model] = (stamp, _digest(weights.items(), adapters))
    return known[1]


class Weights:
    """Unknown; or modules; or digests of modules, of which load() knows no more; or a model whose
    modules are known with the next forward."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Any]] = []
        self._samples: list[str] = []  # of the modules, when they became known
        self._digests: list[str] = []
        self._model: weakref.ref[Any] | None = None
        self._model_digest = ""  # where the modules of the model are not known
        self._changed: str | None = None  # whose weights were others in a later forward

    def forget(self) -> None:
        self._modules, self._samples, self._digests, self._model = [], [], [], None
        self._model_digest, self._changed = "", None

    def copy(self) -> Weights:
        copied = Weights()
        copied._modules, copied._samples = [*self._modules], [*self._samples]
        copied._digests, copied._model = [*self._digests], self._model
        copied._model_digest, copied._changed = self._model_digest, self._changed
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

    def after(self, modules: list[Any]) -> Weights:
        """With a forward of these modules, all of them checked. Each one is looked at, for what
        was changed may be changed back before keep() or save()."""
        samples = [_sample(module) for module in modules]
        after = self.copy()
        after._changed = self._changed_since(samples)
        if not after._modules:
            after._bind(modules, samples)
        return after

    def expect(self, digests: list[str]) -> None:
        """Only modules with these digests may go on."""
        self.forget()
        self._digests = [*digests]

    def expect_model(self, model: torch.nn.Module, layers: int) -> None:
        """Only modules of this model, which has this number of layers, may go on."""
        self.forget()
        self._model = weakref.ref(model)
        if modules := _attention_modules(model, layers):
            self._bind(modules, [_sample(module) for module in modules])
        else:
            self._model_digest = model_digest(model)

    def are_of(self, model: torch.nn.Module) -> bool:
        """Whether what is held was computed by this model. BadStateError if that was before its
        weights were changed."""
        if self._modules:
            parts = {id(each) for each in model.modules()}
            if not all(id(reference()) in parts for reference in self._modules):
                return False
            self._known_modules("keep")
            return True
        if self._model is not None:
            if self._model() is not model:
                return False
            self._check_unchanged("keep", [])
            return True
        layers = {module_digest(each) for each in model.modules() if hasattr(each, "layer_idx")}
        return layers.issuperset(self._digests)

    def digests(self) -> list[str]:
        """Digests of the modules. BadStateError if the model is gone, if its weights are others
        now, or if its modules are not known yet."""
        if self._modules:
            return [module_digest(module) for module in self._known_modules("save")]
        if self._model is not None:
            raise errors.BadStateError(
                "QuireCache: which modules of the model compute its attention is known after a "
                "forward alone, so save() cannot note their weights; run one first"
            )
        return [*self._digests]

    def _bind(self, modules: list[Any], samples: list[str]) -> None:
        self._modules, self._samples = [weakref.ref(module) for module in modules], samples

    def _known_modules(self, call: str) -> list[Any]:
        """The modules, with the weights that they had when they became known."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if len(modules) < len(self._modules):
            raise errors.BadStateError(
                "QuireCache: the model whose keys and values these are is gone, so save() cannot "
                "note which it was; save while it is there"
            )
        self._check_unchanged(call, [_sample(module) for module in modules])
        return modules

    def _check_unchanged(self, call: str, samples: list[str]) -> None:
        changed = self._changed_since(samples)
        if changed is not None:
            raise errors.BadStateError(
                f"QuireCache.{call}: weights of {changed} have changed since keys and values were "
                "computed with them; reset(), and compute them again"
            )

    def _changed_since(self, samples: list[str]) -> str | None:
        """Whose weights were others in some forward, or are by these samples; None = nobody's."""
        if self._changed is not None:
            return self._changed
        if not self._modules:
            model = None if self._model is None else self._model()
            is_other = model is not None and self._model_digest not in ("", model_digest(model))
            return "the model" if is_other else None
        for layer, (known, now) in enumerate(zip(self._samples, samples, strict=True)):
            if known != now:
                return f"layer {layer}"
        return None


def _is_part(module: torch.nn.Module, model: torch.nn.Module | None) -> bool:
    return model is not None and any(each is module for each in model.modules())
