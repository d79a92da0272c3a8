"""The protocol of vLLM's lookup buffer over a signal pipe and a data pipe, in front of a Quire
buffer: what the worked example 16 writes down. For tests only; it has neither versions nor
checksums and trusts its peer."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np


class Pipe:
    """Tensors, or None, in order; what went through is written down."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.transcript: list[str] = []

    def send_tensor(self, tensor: Any) -> None:
        if tensor is not None:
            shape = ",".join(map(str, tensor.shape))
            self.transcript.append(f"{tensor.dtype.kind}{8 * tensor.dtype.itemsize}[{shape}]")
        self._queue.put(tensor)

    def recv_tensor(self) -> Any:
        return self._queue.get(timeout=120)


class LegacyPipeAdapter:
    """The producer's thread and the consumer's call, over three pipes."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.signal, self.query, self.reply = Pipe(), Pipe(), Pipe()

    def serve(self) -> None:
        """Until the end signal."""
        while self.signal.recv_tensor() is not None:
            tokens, roi = self.query.recv_tensor(), self.query.recv_tensor()
            mask = None if roi is None else roi > 0.5
            found = self._buffer.drop_select(tokens, mask)
            for tensor in found:
                is_mask = tensor is not None and tensor.dtype == np.bool_
                self.reply.send_tensor(tensor.astype(np.float32) if is_mask else tensor)

    def drop_select(self, tokens: Any, roi: Any) -> list[Any]:
        self.signal.send_tensor(np.zeros(1, np.int64))
        self.query.send_tensor(tokens)
        self.query.send_tensor(roi.astype(np.float32))
        found = [self.reply.recv_tensor() for _ in range(5)]
        found[1] = found[1] > 0.5
        return found

    def end(self) -> None:
        self.signal.send_tensor(None)
