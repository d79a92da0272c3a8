"""Imports tvm-ffi without torch.

tvm-ffi imports torch wherever it is installed, which takes seconds and hundreds of megabytes. Quire
takes torch tensors by DLPack and needs none of that. So torch cannot be found by the thread that
imports tvm-ffi, until tvm-ffi is there. Nothing changes if torch or tvm-ffi was imported before, or
for other threads.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Sequence


class _WithoutTorch(importlib.abc.MetaPathFinder):
    """Refuses the import of torch by one thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("tvm-ffi is imported by quire, without torch", name=name)
        return None


def import_tvm_ffi() -> None:
    """Imports tvm_ffi; without torch unless one of the two was imported before."""
    if "tvm_ffi" in sys.modules or "torch" in sys.modules:
        import tvm_ffi  # noqa: F401

        return
    finder = _WithoutTorch()
    sys.meta_path.insert(0, finder)
    try:
        import tvm_ffi  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
