"""Loads libquire_ffi.so and gives its objects and functions."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from quire import errors
from quire._tvm_ffi_import import import_tvm_ffi

import_tvm_ffi()

import tvm_ffi  # noqa: E402  # before our library: it must bring the one libtvm_ffi.so


def library_path(name: str = "libquire_ffi.so") -> Path:
    """The file of a library: beside QUIRE_FFI_LIBRARY if that is set, else beside this module."""
    override = os.environ.get("QUIRE_FFI_LIBRARY")
    first = Path(override) if override else Path(__file__).with_name("libquire_ffi.so")
    path = first if name == first.name or name == "libquire_ffi.so" else first.with_name(name)
    if not path.exists():
        raise ImportError(
            f"quire: {path} is missing. In a source tree build it with "
            "`cmake --preset release -DQUIRE_PYTHON=ON && cmake --build --preset release`"
            + (", or call ./run" if path == first else "")
        )
    return path


LIBRARY_PATH = library_path()
# Kept for the life of the process: objects hold pointers to its code.
_module = tvm_ffi.load_module(str(LIBRARY_PATH), keep_module_alive=True)


def load_library(path: Path) -> None:
    """Loads another library whose objects tvm-ffi knows, for the life of the process."""
    tvm_ffi.load_module(str(path), keep_module_alive=True)


for _error in errors.BY_CODE.values():
    tvm_ffi.register_error(f"quire.{_error.__name__}", _error)


# One token for each call that is in the library now; a set's add and discard need no lock.
_calls_inside: set[object] = set()
_interpreter_ends = False


def _counted(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, known to be inside until it has the interpreter's lock again.

    A daemon thread that asks for the lock when the interpreter has ended is ended by unwinding its
    stack, which frames of tvm-ffi turn into an abort of the process. So the end waits for calls
    that are inside (:func:`_close_all`), and none comes after.
    """

    @functools.wraps(call)
    def counted(*args: Any) -> Any:
        if _interpreter_ends and threading.current_thread() is not threading.main_thread():
            raise errors.ClosedError(
                "the interpreter ends; no other thread may call Quire any more"
            )
        token = object()
        _calls_inside.add(token)
        try:
            return call(*args)
        finally:
            _calls_inside.discard(token)

    return counted


def _register(name: str) -> Callable[[type[_Handle]], type[_Handle]]:
    """The C++ class `name`, whose methods are counted."""

    def register(cls: type[_Handle]) -> type[_Handle]:
        registered = tvm_ffi.register_object(name)(cls)
        for method in registered.__tvm_ffi_type_info__.methods:  # type: ignore[attr-defined]
            if not method.is_static:
                setattr(registered, method.name, _counted(getattr(registered, method.name)))
        return registered

    return register


_Handle = TypeVar("_Handle", bound=tvm_ffi.Object)


@_register("quire.KVState")
class KVStateHandle(tvm_ffi.Object):
    """What the C++ objects of all states have in common; its methods come from the library."""


@_register("quire.KVCache")
class KVCacheHandle(KVStateHandle):
    """The C++ object behind quire.KVCache; constructor and methods come from the library."""


@_register("quire.LayerSink")
class LayerSinkHandle(tvm_ffi.Object):
    """What the C++ objects that send have in common."""


@_register("quire.LocalChannel")
class LocalChannelHandle(LayerSinkHandle):
    """The C++ object behind quire.LocalChannel; constructor and methods come from the library."""


@_register("quire.RemoteChannel")
class RemoteChannelHandle(LayerSinkHandle):
    """The C++ object behind quire.RemoteChannel; constructor and methods come from the library."""


@_register("quire.TransferPeer")
class TransferPeerHandle(LayerSinkHandle):
    """The C++ object behind quire.TransferPeer; its methods come from the library."""


@_register("quire.TransferListener")
class TransferListenerHandle(tvm_ffi.Object):
    """The C++ object behind quire.TransferListener; constructor and methods come from the
    library."""


@_register("quire.Engine")
class EngineHandle(tvm_ffi.Object):
    """The C++ object behind quire.Engine; its methods come from the library."""


@_register("quire.Grammar")
class GrammarHandle(tvm_ffi.Object):
    """A compiled grammar, which the engine takes."""


@_register("quire.GrammarCompiler")
class GrammarCompilerHandle(tvm_ffi.Object):
    """The C++ object behind quire.grammar.GrammarCompiler; its methods come from the library."""


@_register("quire.StepQueue")
class StepQueueHandle(tvm_ffi.Object):
    """What the steps of an engine gave; its methods come from the library."""


@_register("quire.RefusalQueue")
class RefusalQueueHandle(tvm_ffi.Object):
    """Why connections were refused; constructor and methods come from the library."""


@_register("quire.LookupBuffer")
class LookupBufferHandle(tvm_ffi.Object):
    """The C++ object behind quire.LookupBuffer; its methods come from the library."""


@_register("quire.StoreBuffer")
class StoreBufferHandle(tvm_ffi.Object):
    """The C++ object behind quire.StoreBuffer; its methods come from the library."""


@_register("quire.BufferServer")
class BufferServerHandle(tvm_ffi.Object):
    """The C++ object that serves buffers; constructor and methods come from the library."""


@_register("quire.RNNState")
class RNNStateHandle(KVStateHandle):
    """The C++ object behind quire.RNNState; constructor and methods come from the library."""


@_register("quire.RecurrentCache")
class RecurrentCacheHandle(KVStateHandle):
    """The C++ object behind quire.RecurrentCache; constructor and methods come from the library."""


@_register("quire.CompositeState")
class CompositeStateHandle(KVStateHandle):
    """The C++ object behind quire.CompositeState; constructor and methods come from the library."""


@_register("quire.ChunkStore")
class ChunkStoreHandle(tvm_ffi.Object):
    """The C++ object behind quire.ChunkStore; its methods come from the library."""


@_register("quire.BlockMemory")
class BlockMemoryHandle(tvm_ffi.Object):
    """The C++ object behind quire.BlockMemory; constructor and methods come from the library."""


@_register("quire.ChunkSpace")
class ChunkSpaceHandle(tvm_ffi.Object):
    """The C++ object behind quire.ChunkSpace; constructor and methods come from the library."""


@_register("quire.ChunkFetch")
class ChunkFetchHandle(tvm_ffi.Object):
    """The C++ object behind quire.ChunkFetch; its methods come from the library."""


def new(handle: type[_Handle], *arguments: Any) -> Any:
    """A C++ object of the class, made by its constructor: other threads of Python stand still
    meanwhile."""
    return _counted(lambda: handle(*arguments))()


def create(name: str, *arguments: Any) -> Any:
    """A C++ object of the class `name` that may have to wait: other threads run meanwhile."""
    return function(f"{name}.create")(*arguments)


def function(name: str) -> Any:
    """The function `name` of the library."""
    return _counted(tvm_ffi.get_global_func(f"quire.{name}"))


class Closable(Protocol):
    def close(self) -> None: ...

    def _abandon_after_fork(self) -> None: ...


_open_objects: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(owner: Closable) -> None:
    """Closes `owner` when the interpreter ends, so that its threads are joined while Python still
    stands."""
    _open_objects.add(owner)


# What a call of another thread that nothing ends, such as a forward, may hold up the end.
_EXIT_SECONDS = 10.0


@atexit.register
def _close_all() -> None:
    global _interpreter_ends
    for owner in list(_open_objects):
        owner.close()
    _interpreter_ends = True
    deadline = time.monotonic() + _EXIT_SECONDS
    while _calls_inside and time.monotonic() < deadline:
        time.sleep(0.001)


def _abandon_in_child() -> None:
    _calls_inside.clear()  # their threads are not in the child
    for owner in list(_open_objects):
        owner._abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_in_child)


def leak(handle: Any) -> None:
    """Keeps a C++ object for ever: its destructor would wait for threads that a fork left
    behind."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


def closed_error(what: str) -> errors.ClosedError:
    return errors.ClosedError(f"{what}: it was closed; create a new one")


_Self = TypeVar("_Self", bound="Owner")


class Owner:
    """Has a C++ object until it is closed, at the latest when the interpreter ends."""

    def __init__(self, handle: Any) -> None:
        self._open_handle: Any = handle
        close_at_exit(self)

    @property
    def _handle(self) -> Any:
        if self._open_handle is None:
            raise closed_error(type(self).__name__)
        return self._open_handle

    def __tvm_ffi_object__(self) -> Any:
        """The C++ object, for functions of other tvm-ffi libraries."""
        return self._handle

    def close(self) -> None:
        """Frees what the object holds.

        Every later call raises ClosedError; closing twice is allowed.
        """
        self._open_handle = None

    def _abandon_after_fork(self) -> None:
        """In the child of a fork, which has none of the object's threads: it is never destroyed
        there, since that would wait for them. One that cannot do without them, or has a connection
        that stays the parent's, also counts as closed. Waits for nothing."""
        if self._open_handle is not None:
            leak(self._open_handle)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClosingOwner(Owner):
    """An owner whose C++ object is closed before it is let go: calls that wait in it end."""

    def _abandon_after_fork(self) -> None:
        super()._abandon_after_fork()
        self._open_handle = None

    def close(self) -> None:
        """Ends what waits in the object and frees what it holds.

        Waiting and later calls raise ClosedError; closing twice is allowed.
        """
        handle, self._open_handle = self._open_handle, None
        if handle is not None:
            handle.close()
