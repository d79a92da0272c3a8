"""Quire under TVM's names: ``install()`` puts it under the global functions ``vm.builtin.*``.

    import quire.tvm
    quire.tvm.install()                      # before the virtual machine is made
    vm = relax.VirtualMachine(executable, tvm.cpu())
    cache = vm["create_paged_kv_cache"](...)  # one of Quire's

TVM's virtual machine looks functions up when it loads an executable: one that was made before
``install()`` keeps TVM's caches, one that was made while it was installed keeps Quire's, also
after ``uninstall()``. Objects that are not Quire's go to the functions that had the names before.
See docs/tvm.md.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire import errors

if TYPE_CHECKING:
    from quire.kv_cache import RopeOptions

__all__ = ["TESTED_VERSIONS", "install", "installed", "uninstall"]

_installation: Any = None  # of the library: what was replaced, while it is installed

# Names, argument orders and what the virtual machine does with them are one version's.
TESTED_VERSIONS = ("0.27.0.post1",)


def _check_version() -> None:
    try:
        tvm = importlib.import_module("tvm")
    except ImportError as error:
        raise ImportError(
            "quire.tvm.install: TVM is not there; install apache-tvm==" + TESTED_VERSIONS[-1]
        ) from error
    version = str(getattr(tvm, "__version__", "unknown"))
    if version not in TESTED_VERSIONS:
        raise errors.IncompatibleError(
            f"quire.tvm.install: this is TVM {version}; the functions that Quire stands in for "
            f"were tested with {', '.join(TESTED_VERSIONS)} only"
        )


@functools.cache
def _installation_class() -> Any:
    """The class of the C++ object; libquire_tvm.so is loaded at the first call."""
    from quire import _ffi

    import tvm_ffi  # noqa: I001  # after _ffi, which imports it without torch

    # Kept for the life of the process: objects hold pointers to its code.
    tvm_ffi.load_module(str(_ffi.library_path("libquire_tvm.so")), keep_module_alive=True)

    @tvm_ffi.register_object("quire.tvm.Installation")
    class Installation(tvm_ffi.Object):
        """The C++ object behind this module; its methods come from the library."""

    return Installation


def install(
    *,
    tvm_window_span: bool = True,
    tvm_tree_commit: bool = True,
    tvm_tree_lengths: bool = False,
    tvm_rnn_history1: bool = True,
    rope: RopeOptions | Mapping[str, Any] | None = None,
    pipeline_stage: int | None = None,
) -> None:
    """Caches and recurrent states that are created through TVM's names from now on are Quire's.

    Args:
        tvm_window_span: windows of sequences as in TVM: a decode step sees window + 1 tokens and a
            chunk all of itself; forks begin without a window. Off: a row sees the window exactly.
        tvm_tree_commit: leaf -1 for a token tree of several forwards takes back the nodes of the
            last one, and those before it stay, where they are a chain. Off: it drops all nodes.
        tvm_tree_lengths: the commit of a token tree of several forwards gives TVM's tokens, which
            are wrong: all nodes of the forwards before the last one, in node order, then those of
            the last forward whose number within it is that of a node on the accepted path. For
            comparisons with TVM alone; in place of `tvm_tree_commit`. A commit that ends with
            ``OutOfMemoryError`` may have dropped the nodes. Off: the accepted path.
        tvm_rnn_history1: in a recurrent state with a history of 1, Get sees what was Set before it
            in the same forward. Off: Get gives the state of before the forward.
        rope: the rotation of caches that are created with a rope mode but NONE, in place of what
            the model's compiled rotation kernel does. Its mode is not read. Also how a model
            rotates the rope part of MLA layers, which matters to windows with sinks alone.
        pipeline_stage: which stage of the layer partition the caches of this process are of. None:
            that of the Disco worker that creates a cache, as in TVM.

    Raises:
        BadArgumentError: for a negative stage.
        IncompatibleError: for a version of TVM that was not tested.
        BadStateError: if it is installed already.
    """
    global _installation
    _check_version()
    if _installation is not None:
        raise errors.BadStateError(
            "quire.tvm.install: it is installed already; call uninstall first to install with "
            "other options"
        )
    fields: dict[str, Any] = {
        "tvm_window_span": tvm_window_span,
        "tvm_tree_commit": tvm_tree_commit,
        "tvm_tree_lengths": tvm_tree_lengths,
        "tvm_rnn_history1": tvm_rnn_history1,
    }
    if rope is not None:
        fields["rope"] = dict(rope)
    if pipeline_stage is not None:
        fields["pipeline_stage"] = pipeline_stage
    _installation = _installation_class()(fields)


def uninstall() -> None:
    """Gives the names back to the functions that had them. Objects of Quire live on.

    Raises:
        BadStateError: if it is not installed, or somebody has replaced a name after it.
    """
    global _installation
    if _installation is None:
        raise errors.BadStateError("quire.tvm.uninstall: it is not installed")
    _installation.uninstall()
    _installation = None


def installed() -> bool:
    return _installation is not None
