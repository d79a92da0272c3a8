"""Quire: the KV-state engine for LLM serving.

* :class:`quire.Engine` answers prompts with a model from a Hugging Face folder.
* :class:`quire.KVCache` is the paged KV state beneath it, for engines of your own.
* :class:`quire.RNNState` and :class:`quire.RecurrentCache` are the same for recurrent layers, and
  :class:`quire.CompositeState` for models with both.
* :class:`quire.ChunkStore` keeps KV beyond its request: in RAM, a folder, Redis.
* :class:`quire.LookupBuffer` and :class:`quire.StoreBuffer` hand tensors over by tokens or by name.
* :class:`quire.LocalChannel` moves KV from one cache to another while it is computed.
* :mod:`quire.hf` is a cache for ``generate()`` of Hugging Face transformers.
* :func:`quire.pack_model` makes a model folder that engines start from faster.
* :mod:`quire.blend` uses KV of documents wherever they stand in a prompt.
* :mod:`quire.snapshot` keeps the state of a text in a file.
* ``quire --help`` (or ``python -m quire``) is the program.

Errors derive from :class:`quire.QuireError`. The C++ library is loaded with the first name that
needs it, so that the program can start, and say what is wrong, before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire import errors
from quire.errors import *  # noqa: F403 (the list stands in errors.__all__)

if TYPE_CHECKING:
    from quire.buffers import LookupBuffer, StoreBuffer
    from quire.composite_state import CompositeState
    from quire.engine import (
        BlendUsage,
        Engine,
        EngineOptions,
        MemoryPlan,
        ModelInfo,
        Piece,
        PrefillPeer,
        PrefixMiss,
        Result,
        Sample,
        SamplingOptions,
        Stream,
        Usage,
    )
    from quire.grammar import Grammar
    from quire.kv_cache import KVCache, LayerSpec, RopeOptions, default_page_size, rope_frequencies
    from quire.packing import pack_model
    from quire.recurrent_cache import RecurrentCache, RecurrentLayerSpec
    from quire.rnn_state import RNNState, StateSpec
    from quire.chunk_space import BlockMemory, BlockOrder, ChunkFetch, ChunkSpace
    from quire.store import ChunkStore, Passport, chunk_keys
    from quire.transfer import (
        LocalChannel,
        ReceiveMap,
        RemoteChannel,
        TransferListener,
        TransferPeer,
        TransferRequest,
    )

    __version__: str

_MODULE_OF = {
    "BlendUsage": "quire.engine",
    "BlockMemory": "quire.chunk_space",
    "BlockOrder": "quire.chunk_space",
    "ChunkFetch": "quire.chunk_space",
    "ChunkSpace": "quire.chunk_space",
    "ChunkStore": "quire.store",
    "CompositeState": "quire.composite_state",
    "Engine": "quire.engine",
    "Grammar": "quire.grammar",
    "EngineOptions": "quire.engine",
    "KVCache": "quire.kv_cache",
    "LayerSpec": "quire.kv_cache",
    "LocalChannel": "quire.transfer",
    "LookupBuffer": "quire.buffers",
    "MemoryPlan": "quire.engine",
    "ModelInfo": "quire.engine",
    "Passport": "quire.store",
    "Piece": "quire.engine",
    "PrefillPeer": "quire.engine",
    "PrefixMiss": "quire.engine",
    "RNNState": "quire.rnn_state",
    "ReceiveMap": "quire.transfer",
    "RecurrentCache": "quire.recurrent_cache",
    "RecurrentLayerSpec": "quire.recurrent_cache",
    "RemoteChannel": "quire.transfer",
    "Result": "quire.engine",
    "RopeOptions": "quire.kv_cache",
    "Sample": "quire.engine",
    "SamplingOptions": "quire.engine",
    "StateSpec": "quire.rnn_state",
    "StoreBuffer": "quire.buffers",
    "Stream": "quire.engine",
    "TransferListener": "quire.transfer",
    "TransferPeer": "quire.transfer",
    "TransferRequest": "quire.transfer",
    "Usage": "quire.engine",
    "chunk_keys": "quire.store",
    "default_page_size": "quire.kv_cache",
    "pack_model": "quire.packing",
    "rope_frequencies": "quire.kv_cache",
}


def version() -> str:
    """Version of the C++ library; also ``quire.__version__``."""
    from quire import _ffi

    return str(_ffi.function("version")())


def kernel_paths() -> list[str]:
    """The kernel paths that this build has and this CPU can run, best first."""
    from quire import _ffi

    return [str(name) for name in _ffi.function("kernel_paths")()]


def embedded_model_dir() -> str:
    """The folder of the embedded model, SmolLM2-135M-Instruct; the first call makes it."""
    from quire.embedded import embedded_model_dir as make

    return str(make())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "BlendUsage",
    "BlockMemory",
    "BlockOrder",
    "ChunkFetch",
    "ChunkSpace",
    "ChunkStore",
    "CompositeState",
    "Engine",
    "EngineOptions",
    "Grammar",
    "KVCache",
    "LayerSpec",
    "LocalChannel",
    "LookupBuffer",
    "MemoryPlan",
    "ModelInfo",
    "Passport",
    "Piece",
    "PrefillPeer",
    "PrefixMiss",
    "RNNState",
    "ReceiveMap",
    "RecurrentCache",
    "RecurrentLayerSpec",
    "RemoteChannel",
    "Result",
    "RopeOptions",
    "Sample",
    "SamplingOptions",
    "StateSpec",
    "StoreBuffer",
    "Stream",
    "TransferListener",
    "TransferPeer",
    "TransferRequest",
    "Usage",
    "__version__",
    "chunk_keys",
    "default_page_size",
    "embedded_model_dir",
    "kernel_paths",
    "pack_model",
    "rope_frequencies",
    "version",
    *errors.__all__,
]
