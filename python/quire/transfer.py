"""Disaggregated prefill and decode: one cache computes tokens, another receives their keys and
values layer by layer and continues after them (docs/transfer.md)::

    channel = quire.LocalChannel()
    decode.connect_channel(channel, peer=0)
    prefill.send_through(channel)

    receive = decode.disagg_prepare_recv(seq, n)      # reserves; the tokens are pending
    prefill.disagg_mark_send(seq, 0, receive, peer=0)
    ...                                               # forwards of `prefill` send as they run
    decode.disagg_commit_recv(receive.epoch, n)       # from here on they are tokens like others
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from quire import _ffi
from quire._numbers import nanoseconds

__all__ = ["LocalChannel", "ReceiveMap", "ReceiveProgress", "SendProgress"]


@dataclasses.dataclass(frozen=True)
class ReceiveMap:
    """What a receiver publishes and a sender needs: numbers only, so that it can go over any wire
    (``dataclasses.asdict`` and ``ReceiveMap(**fields)``).

    ``slots`` is TVM's encoding: the number of segments, then begin and length of each.
    """

    epoch: int
    slots: tuple[int, ...]
    first_position: int
    count: int
    kv_heads: tuple[int, ...]
    layout: int

    def _fields(self) -> dict[str, Any]:
        import tvm_ffi

        fields = dataclasses.asdict(self)
        for name in ("slots", "kv_heads"):
            fields[name] = tvm_ffi.Shape(tuple(int(number) for number in fields[name]))
        return fields

    @staticmethod
    def _of(fields: Mapping[str, Any]) -> ReceiveMap:
        return ReceiveMap(
            epoch=int(fields["epoch"]),
            slots=tuple(int(number) for number in fields["slots"]),
            first_position=int(fields["first_position"]),
            count=int(fields["count"]),
            kv_heads=tuple(int(number) for number in fields["kv_heads"]),
            layout=int(fields["layout"]),
        )


@dataclasses.dataclass(frozen=True)
class ReceiveProgress:
    """How far a reservation is: complete tokens per layer, and the first failure ("": none)."""

    count: int
    layer_rows: tuple[int, ...]
    failure: str


@dataclasses.dataclass(frozen=True)
class SendProgress:
    """How far a mark is: ``sent`` of ``count`` tokens from position ``begin`` on."""

    begin: int
    count: int
    sent: int
    active: bool
    failure: str


class LocalChannel:
    """Moves keys and values between caches of this process, digests checked.

    Give it to the receivers' ``connect_channel`` and the senders' ``send_through``.
    """

    def __init__(self) -> None:
        self._handle: Any = _ffi.new_local_channel()


class TransferCalls:
    """What KVCache and CompositeState have for transfers. A CompositeState also sends the
    states of recurrent layers, at the positions where forwards of the sender end: commit there."""

    _handle: Any

    def connect_channel(self, channel: LocalChannel, peer: int) -> None:
        """This state receives as `peer` of the channel, until it is closed or disconnected."""
        self._handle.connect_channel(channel._handle, peer)

    def disconnect_channel(self, channel: LocalChannel, peer: int) -> None:
        """Ends connect_channel. NotFoundError if this state is not that peer."""
        self._handle.disconnect_channel(channel._handle, peer)

    def send_through(self, channel: LocalChannel | None) -> None:
        """What is marked goes through this channel; None: nothing can be marked.

        BadStateError while a mark is active.
        """
        if channel is None:
            self._handle.send_nowhere()
        else:
            self._handle.send_through(channel._handle)

    def disagg_prepare_recv(self, seq_id: int, count: int) -> ReceiveMap:
        """Reserves the sequence's next `count` tokens for a sender. They are pending: until
        disagg_commit_recv or disagg_cancel_recv the sequence is in no forward (BadStateError).

        Errors as begin_forward.
        """
        return ReceiveMap._of(self._handle.disagg_prepare_recv(seq_id, count))

    def disagg_commit_recv(self, epoch: int, n: int) -> None:
        """The first `n` tokens of the reservation count from now on; the others are given back.

        BadStateError unless they are complete in every layer; NotFoundError for one that is over.
        """
        self._handle.disagg_commit_recv(epoch, n)

    def disagg_cancel_recv(self, epoch: int) -> None:
        """The sequence is as before disagg_prepare_recv."""
        self._handle.disagg_cancel_recv(epoch)

    def receive_progress(self, epoch: int) -> ReceiveProgress:
        """How many tokens of the reservation are complete, layer by layer."""
        return read_receive_progress(self._handle.receive_progress(epoch))

    def wait_received(self, epoch: int, n: int, timeout: float) -> None:
        """Waits until the first `n` tokens are complete in every layer.

        TimeoutError of quire.errors after `timeout` seconds; CancelledError when the reservation is
        over; the sender's failure if it has reported one. Any thread.
        """
        self._handle.wait_received(epoch, n, nanoseconds(timeout, "timeout"))

    def disagg_mark_send(
        self,
        seq_id: int,
        begin: int,
        maps: ReceiveMap | Sequence[ReceiveMap],
        peer: int,
        rank: int = 0,
    ) -> None:
        """From the next forward on, the sequence's tokens from position `begin` on go to the
        tokens of the map, until it is full.

        Several maps: of the receivers that share this cache's heads, peer + rank * len(maps)
        onwards. With fewer heads than the receiver, `rank` says which part of them this cache has.

        BadArgumentError, IncompatibleError, BadStateError (no channel, or in a forward); nothing is
        marked then.
        """
        if isinstance(maps, ReceiveMap):
            maps = [maps]
        self._handle.disagg_mark_send(seq_id, begin, [m._fields() for m in maps], peer, rank)

    def disagg_unmark_send(self, seq_id: int) -> None:
        """Ends the sequence's mark; its receiver is told. NotFoundError without one."""
        self._handle.disagg_unmark_send(seq_id)

    def disagg_flush_send(self, seq_id: int) -> None:
        """Sends what the sequence has and no forward has sent; raises the mark's failure."""
        self._handle.disagg_flush_send(seq_id)

    def send_progress(self, seq_id: int) -> SendProgress:
        """How far the sequence's mark is."""
        return read_send_progress(self._handle.send_progress(seq_id))


def read_receive_progress(fields: Mapping[str, Any]) -> ReceiveProgress:
    return ReceiveProgress(
        count=int(fields["count"]),
        layer_rows=tuple(int(rows) for rows in fields["layer_rows"]),
        failure=str(fields["failure"]),
    )


def read_send_progress(fields: Mapping[str, Any]) -> SendProgress:
    return SendProgress(
        begin=int(fields["begin"]),
        count=int(fields["count"]),
        sent=int(fields["sent"]),
        active=bool(fields["active"]),
        failure=str(fields["failure"]),
    )
