"""Disaggregated prefill and decode: one cache computes tokens, another receives their keys and
values layer by layer and goes on behind them (docs/transfer.md)::

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
from collections.abc import Mapping
from typing import Any

from quire import _ffi

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
