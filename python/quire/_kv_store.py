"""How an engine comes to its chunk store: the model's digest is computed beside the first answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from quire import errors
from quire.identity import kept_identity, model_identity
from quire.store import ChunkStore


Attach = Callable[[ChunkStore, dict[str, Any], dict[str, Any]], None]


class Attachment:
    """A store, and the thread that attaches it unless the model's digest is known.

    attach: gives identity and options to the engine; called once, from any thread.
    """

    def __init__(
        self,
        store: ChunkStore,
        owned: bool,
        model_dir: os.PathLike[str],
        options: dict[str, Any],
        attach: Attach,
    ) -> None:
        self.store = store
        self.done = False  # the engine uses the store
        self._owned = owned
        self._options = {**options, "key": store.key}
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        known = kept_identity(model_dir)
        if known is not None:
            attach(store, known, self._options)
            self.done = True
            return
        # Only the thread refers to the engine, so dropping an attached engine frees it.
        self._thread = threading.Thread(
            target=self._compute, args=(model_dir, attach), name="quire-digest", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the store is attached; raises what kept it from being."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the thread, attached or not."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Closes a store that the engine has opened itself."""
        if self._owned:
            self.store.close()

    def abandon(self) -> Any:
        """In the child of a fork: the handle of a store that the engine has opened itself, which
        counts as closed; None if there is none."""
        if not self._owned:
            return None
        handle, self.store._open_handle = self.store._open_handle, None
        return handle

    def _compute(self, model_dir: os.PathLike[str], attach: Attach) -> None:
        try:
            identity = model_identity(model_dir, stop=self._stop)
            attach(self.store, identity, self._options)
            self.done = True
        except errors.CancelledError:
            pass
        except Exception as error:  # told by wait()
            self._error = error
