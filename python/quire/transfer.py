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
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire import _ffi, errors
from quire._arrays import int_list
from quire._numbers import int64, nanoseconds, octets, text

__all__ = [
    "LocalChannel",
    "ReceiveMap",
    "ReceiveProgress",
    "RemoteChannel",
    "SendProgress",
    "TransferListener",
    "TransferPeer",
    "TransferRequest",
]

_CONNECT_TIMEOUT = 2.0  # seconds
_NO_DEADLINE = 2**63 - 1  # TransferJob::kNoDeadline


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
    """How far a reservation is: complete tokens per layer, how many of the first ones
    ``disagg_commit_recv`` takes now (after a failure, too), and the first failure ("": none)."""

    count: int
    layer_rows: tuple[int, ...]
    complete: int
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
        self._handle: Any = _ffi.new(_ffi.LocalChannelHandle)


@dataclasses.dataclass(frozen=True)
class TransferRequest:
    """What a peer wants computed: the tokens of a job, into the tokens of its map.

    job: the receiver's number of it; 0: none, and no tokens. salt: its cache salt. seconds: until
    its deadline, when it came; None for none.
    """

    job: int
    tokens: tuple[int, ...]
    salt: bytes
    seconds: float | None
    map: ReceiveMap


class TransferPeer(_ffi.ClosingOwner):
    """One connection to another process, which carries keys and values of caches either way
    (docs/transfer.md has both halves by example).

    A side that receives gives the peer to its state's ``receive_from``, reserves tokens and asks
    for them with :meth:`request`. A side that sends gives it to ``send_through`` and marks what
    :meth:`next_request` returns. Any thread.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)

    @classmethod
    def connect(
        cls,
        endpoint: str,
        state: TransferCalls,
        *,
        model: str = "",
        revision: str = "",
        tokenizer: str = "",
        adapter: str = "",
        secret: str = "",
        tls_ca_file: str | os.PathLike[str] = "",
        tls_cert_file: str | os.PathLike[str] = "",
        tls_key_file: str | os.PathLike[str] = "",
        tls_server_name: str = "",
        connect_timeout: float = _CONNECT_TIMEOUT,
        heartbeat: float = 0.5,
        dead_after: float = 3.0,
        lease: float = 30.0,
        window_bytes: int = 64 << 20,
        send_wait: float = 0.25,
        streams: int = 1,
    ) -> TransferPeer:
        """Connects to a :class:`TransferListener`: ``"ADDRESS:PORT"`` over TCP,
        ``"ucx:ADDRESS:PORT"`` over UCX, ``"unix:PATH"`` through shared memory.

        Args:
            state: a cache or composite state whose layers, types, RoPE and kernels are those of all
                that this side moves over the connection.
            model, revision, tokenizer, adapter: which model it is of, as
                :func:`quire.identity.model_identity` gives them; both sides' must be equal.
            secret: what both sides must have, without sending it. It encrypts nothing. This, or
                TLS, is needed for addresses that other machines reach.
            tls_ca_file, tls_cert_file, tls_key_file: PEM files; with them TCP goes through TLS. An
                authority of the first one must have signed the certificates of both sides; the
                others are this side's certificate and its key.
            tls_server_name: whose certificate the listener's must be; "" = that of the address.
            heartbeat, dead_after: seconds between signs of life, and without one until the other
                side counts as dead.
            lease: seconds that a transfer lives without a renewal from its receiver.
            window_bytes: of parts on their way to this side.
            send_wait: seconds that a forward of this side waits for room in the other side's window
                before its mark ends.
            streams: TCP streams of the connection, 1 to 16; over UCX and shared memory there is
                one, and with a listener of an older Quire too, as :meth:`stats` tells.

        Raises:
            UnavailableError, TimeoutError: nobody answers.
            IncompatibleError: the two sides hold other KV; the message has the first field that
                differs, and both values.
            RemoteError: the other side refused, for another secret for example.
            BadArgumentError: an option is out of range, a file is of no use, or the address needs
                a secret or TLS.
        """
        options = _peer_options(
            state, model, revision, tokenizer, adapter, secret, heartbeat, dead_after, lease
        )
        options |= _tls_options(tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
        options["window_bytes"] = int64(window_bytes, "window_bytes")
        options["send_wait_ns"] = nanoseconds(send_wait, "send_wait")
        options["streams"] = int64(streams, "streams")
        options["connect_timeout_ns"] = nanoseconds(connect_timeout, "connect_timeout")
        return cls(_ffi.create("TransferPeer", text(endpoint, "endpoint"), options))

    @property
    def endpoint(self) -> str:
        """Where the listener of the connection is."""
        return str(self._handle.endpoint())

    @property
    def failure(self) -> str:
        """Why the connection is over; "" while it is open."""
        return str(self._handle.failure())

    def stats(self) -> dict[str, int]:
        """parts_sent, parts_sent_again (arrived damaged), bytes_sent, parts_received,
        bytes_received, the transfers that are open: sends_open, receives_open; and the streams of
        the connection."""
        return {str(name): int(count) for name, count in self._handle.stats().items()}

    def request(
        self,
        receive: ReceiveMap,
        tokens: Sequence[int] = (),
        *,
        job: int = 0,
        cache_salt: str | bytes = b"",
        timeout: float | None = None,
    ) -> None:
        """Asks the other side for the tokens of a reservation of the state that ``receive_from``
        named.

        `tokens`, with a number `job` of the caller's, say what is to be computed; `cache_salt` is
        their tenant's, at most 4 096 bytes. It travels as it is: BadArgumentError over TCP or
        UCX with neither a secret nor TLS. When `timeout` seconds are over, or the
        connection is lost, the reservation fails, which ``wait_received`` raises.

        BadStateError without a receiving state, TooLargeError for a job or map of more than 1 MiB,
        UnavailableError and the like when the connection is over.
        """
        fields = {
            "id": int64(job, "job"),
            "tokens": np.asarray(int_list(tokens, "tokens"), np.int64),
            "salt": octets(cache_salt, "cache_salt"),
            "deadline_ns": _NO_DEADLINE if timeout is None else nanoseconds(timeout, "timeout"),
        }
        if job == 0 and len(tokens) > 0:
            raise errors.BadArgumentError("request: tokens need the number of a job above 0")
        self._handle.request(fields, receive._fields())

    def cancel(self, epoch: int) -> None:
        """Ends a transfer to here at once, which the end of its reservation does within a
        heartbeat. NotFoundError."""
        self._handle.cancel(epoch)

    def next_request(self, timeout: float) -> TransferRequest:
        """What the other side asks for next.

        TimeoutError after `timeout` seconds; the connection's error when it is over.
        """
        fields = self._handle.next_request(nanoseconds(timeout, "timeout"))
        if fields is None:
            raise errors.TimeoutError(
                f"next_request: {self.endpoint} has asked for nothing for {timeout} seconds"
            )
        deadline = int(fields["deadline_ns"])
        return TransferRequest(
            job=int(fields["id"]),
            tokens=tuple(int(token) for token in fields["tokens"]),
            salt=bytes(fields["salt"]),
            seconds=None if deadline == _NO_DEADLINE else deadline / 1e9,
            map=ReceiveMap._of(fields["map"]),
        )

    def refuse(self, epoch: int, why: str) -> None:
        """Ends a request that is not going to be computed; the receiver's wait raises `why`.
        NotFoundError."""
        self._handle.refuse(epoch, text(why, "why"))


class TransferListener(_ffi.ClosingOwner):
    """Where other processes connect to, to receive or to send.

    Arguments and errors are those of :meth:`TransferPeer.connect`. ``bind``: port 0 is any that is
    free. At most `peers_max` connections at a time.
    """

    def __init__(
        self,
        bind: str,
        state: TransferCalls,
        *,
        model: str = "",
        revision: str = "",
        tokenizer: str = "",
        adapter: str = "",
        secret: str = "",
        tls_ca_file: str | os.PathLike[str] = "",
        tls_cert_file: str | os.PathLike[str] = "",
        tls_key_file: str | os.PathLike[str] = "",
        heartbeat: float = 0.5,
        dead_after: float = 3.0,
        lease: float = 30.0,
        window_bytes: int = 64 << 20,
        send_wait: float = 0.25,
        peers_max: int = 64,
    ) -> None:
        options = _peer_options(
            state, model, revision, tokenizer, adapter, secret, heartbeat, dead_after, lease
        )
        options |= _tls_options(tls_ca_file, tls_cert_file, tls_key_file)
        options["window_bytes"] = int64(window_bytes, "window_bytes")
        options["send_wait_ns"] = nanoseconds(send_wait, "send_wait")
        options["endpoint"] = text(bind, "bind")
        options["peers_max"] = int64(peers_max, "peers_max")
        super().__init__(_ffi.new(_ffi.TransferListenerHandle, options))

    @property
    def endpoint(self) -> str:
        """Where others connect to, with the port that was taken."""
        return str(self._handle.endpoint())

    @property
    def refused(self) -> int:
        """Connections that did not come to be: another secret, certificate or passport, or no
        peer."""
        return int(self._handle.refused())

    @property
    def last_refusal(self) -> str:
        """Why the last of them did not; "" before the first."""
        return str(self._handle.last_refusal())

    def accept(self, timeout: float) -> TransferPeer:
        """The next connection whose two sides match. TimeoutError after `timeout` seconds."""
        peer = self._handle.accept(nanoseconds(timeout, "timeout"))
        if peer is None:
            refusal = self.last_refusal
            raise errors.TimeoutError(
                f"accept: nobody has connected to {self.endpoint} for {timeout} seconds"
                + (f"; the last that was refused: {refusal}" if refusal else "")
            )
        return TransferPeer(peer)


class RemoteChannel:
    """A channel to several peers: those that share the heads of a sender, for example. Give it to
    ``send_through``; the numbers are those of ``disagg_mark_send``."""

    def __init__(self) -> None:
        self._handle: Any = _ffi.new(_ffi.RemoteChannelHandle)

    def connect(self, peer: int, connection: TransferPeer) -> None:
        """What is marked for `peer` goes through the connection. BadArgumentError if the number is
        taken."""
        self._handle.connect(peer, connection._handle)

    def disconnect(self, peer: int) -> None:
        """Ends connect. NotFoundError."""
        self._handle.disconnect(peer)


def _peer_options(
    state: TransferCalls,
    model: str,
    revision: str,
    tokenizer: str,
    adapter: str,
    secret: str,
    heartbeat: float,
    dead_after: float,
    lease: float,
) -> dict[str, Any]:
    identity = {
        "model": text(model, "model"),
        "revision": text(revision, "revision"),
        "tokenizer": text(tokenizer, "tokenizer"),
        "adapter": text(adapter, "adapter"),
    }
    return {
        "passport": str(state._handle.transfer_passport(identity)),
        "secret": text(secret, "secret"),
        "heartbeat_ns": nanoseconds(heartbeat, "heartbeat"),
        "dead_after_ns": nanoseconds(dead_after, "dead_after"),
        "lease_ns": nanoseconds(lease, "lease"),
    }


def _tls_options(
    ca_file: str | os.PathLike[str],
    cert_file: str | os.PathLike[str],
    key_file: str | os.PathLike[str],
    server_name: str = "",
) -> dict[str, Any]:
    return {
        "tls_ca_file": text(os.fspath(ca_file), "tls_ca_file"),
        "tls_cert_file": text(os.fspath(cert_file), "tls_cert_file"),
        "tls_key_file": text(os.fspath(key_file), "tls_key_file"),
        "tls_server_name": text(server_name, "tls_server_name"),
    }


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

    def receive_from(self, peer: TransferPeer) -> None:
        """This state receives over a connection to another process, until either is closed.
        BadStateError if another one does."""
        self._handle.receive_from(peer._handle)

    def send_through(self, channel: LocalChannel | RemoteChannel | TransferPeer | None) -> None:
        """What is marked goes through this channel or connection; None: nothing can be marked.

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

    def staging(self) -> dict[str, int]:
        """Bytes of what arrives and is not in its pages yet: limit, held (now), largest (of held,
        ever). Any thread."""
        return {name: int(value) for name, value in self._handle.staging().items()}

    def set_staging_limit(self, count: int) -> None:
        """The most that arriving rows of this state may hold, in bytes, whatever the number of
        senders and reservations; 64 MiB unless set.

        BadArgumentError for less than one row of the largest layer, or one state.
        """
        self._handle.set_staging_limit(int64(count, "count"))

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
        first_row: int = 0,
    ) -> None:
        """From the next forward on, the sequence's tokens from position `begin` on go to the
        tokens of the map, until it is full. Those that are stored already, all perhaps, go with the
        next forward or :meth:`disagg_flush_send`.

        ``first_row``: the receiver has the map's tokens before it, and they are not sent.

        Several maps: of the receivers that share this cache's heads, peer + rank * len(maps)
        onwards. With fewer heads than the receiver, `rank` says which part of them this cache has.

        BadArgumentError, IncompatibleError, BadStateError (no channel, or in a forward); nothing is
        marked then.
        """
        if isinstance(maps, ReceiveMap):
            maps = [maps]
        fields = [m._fields() for m in maps]
        self._handle.disagg_mark_send(seq_id, begin, fields, peer, rank, first_row)

    def disagg_unmark_send(self, seq_id: int) -> None:
        """Ends the sequence's mark; its receiver is told. NotFoundError without one."""
        self._handle.disagg_unmark_send(seq_id)

    def disagg_detach_send(self, seq_id: int) -> int:
        """Ends the sequence's mark without a word to its receiver, which goes on waiting.

        Returns the map's tokens that were sent: ``first_row`` of the mark that goes on with it, on
        another sequence perhaps. NotFoundError without a mark; raises the mark's failure.
        """
        return int(self._handle.disagg_detach_send(seq_id))

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
        complete=int(fields["complete"]),
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
