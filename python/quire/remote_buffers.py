"""Lookup buffers and stores between processes: one serves, any number of others connect.

The classes have the methods and parameters of those in :mod:`quire.buffers`. An endpoint is
``"ADDRESS:PORT"`` with a numeric address or ``localhost``, or ``"unix:PATH"``. Addresses that other
machines reach need a ``secret``, which clients show that they have without sending it; what is sent
is not encrypted.
"""

from __future__ import annotations

from typing import Any, Literal

from quire import _ffi, errors
from quire._numbers import real
from quire.buffers import LookupBuffer, StoreBuffer

__all__ = [
    "LookupBufferServer",
    "RemoteLookupBuffer",
    "RemoteStoreBuffer",
    "StoreBufferServer",
]

_CONNECT_TIMEOUT = 2.0  # seconds


class _Served(_ffi.ClosingOwner):
    """What both kinds of server have."""

    _server: Any

    @property
    def endpoint(self) -> str:
        """Where clients connect to, with the port that was taken."""
        return str(self._server.endpoint())

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        return int(self._server.connections())

    def close(self) -> None:
        """Drops everything, tells the clients and waits for none of them. Twice is fine."""
        self._server.close()
        super().close()

    def _abandon_after_fork(self) -> None:
        _ffi.leak(self._server)
        _ffi.ClosingOwner._abandon_after_fork(self)


class LookupBufferServer(_Served, LookupBuffer):
    """The producer's side: a lookup buffer that consumers in other processes take from.

    ``insert`` and the properties are those of :class:`LookupBuffer`; ``drop_select`` raises
    WrongRoleError here.
    """

    def __init__(
        self,
        capacity: int,
        *,
        bind: str = "127.0.0.1:0",
        secret: str = "",
        prefer: Literal["fifo", "longest"] = "fifo",
    ) -> None:
        options = {"capacity_bytes": capacity, "prefer": prefer}
        self._server = _ffi.new(
            _ffi.BufferServerHandle, {"endpoint": bind, "secret": secret, "lookup": options}
        )
        self._open(self._server.lookup())

    def drop_select_bundle(self, *args: Any, **kwargs: Any) -> Any:
        """Raises WrongRoleError, as :meth:`drop_select` does."""
        raise errors.WrongRoleError(
            "LookupBufferServer is the producer's side; take entries with a RemoteLookupBuffer "
            f"connected to {self.endpoint}"
        )


class RemoteLookupBuffer(LookupBuffer):
    """The consumer's side of a :class:`LookupBufferServer`, which ``close`` leaves as it is;
    ``insert`` raises WrongRoleError.

    ``drop_select`` raises StoreUnavailable when the server cannot be reached or died (the next call
    connects again), RemoteError when it failed. An entry that this process does not take to its end
    is put back on the server.
    """

    _abandon_after_fork = _ffi.ClosingOwner._abandon_after_fork  # the connection is the parent's

    def __init__(
        self, endpoint: str, *, secret: str = "", connect_timeout: float = _CONNECT_TIMEOUT
    ) -> None:
        self._open(_ffi.create("LookupBuffer", _remote_options(endpoint, secret, connect_timeout)))


class StoreBufferServer(_Served, StoreBuffer):
    """A store that other processes use as well."""

    def __init__(
        self,
        capacity: int,
        *,
        bind: str = "127.0.0.1:0",
        secret: str = "",
        strict: bool = False,
    ) -> None:
        self._server = _ffi.new(
            _ffi.BufferServerHandle,
            {"endpoint": bind, "secret": secret, "store": {"capacity_bytes": capacity}},
        )
        self._open(self._server.store(), strict)


class RemoteStoreBuffer(StoreBuffer):
    """The store of a :class:`StoreBufferServer` in another process, which ``close`` leaves as it
    is.

    A server that cannot be reached makes ``get`` a miss and ``put`` a counted drop: a cache must
    not take its server down. With ``strict`` both raise StoreUnavailable or RemoteError.
    """

    _OUTAGES = (errors.UnavailableError, errors.RemoteError)

    _abandon_after_fork = _ffi.ClosingOwner._abandon_after_fork  # the connection is the parent's

    def __init__(
        self,
        endpoint: str,
        *,
        secret: str = "",
        connect_timeout: float = _CONNECT_TIMEOUT,
        strict: bool = False,
    ) -> None:
        handle = _ffi.create("StoreBuffer", _remote_options(endpoint, secret, connect_timeout))
        self._open(handle, strict)

    def put(self, key: str, value: Any | None) -> None:
        """As :meth:`StoreBuffer.put`; an outage is a drop as well."""
        try:
            super().put(key, value)
        except self._OUTAGES:
            if self._strict:
                raise
            self._dropped += 1

    def get(self, key: str) -> Any | None:
        """As :meth:`StoreBuffer.get`; None in an outage."""
        return self._or_miss(super().get, key, None)

    def exists(self, key: str) -> bool:
        """As :meth:`StoreBuffer.exists`; False in an outage."""
        return bool(self._or_miss(super().exists, key, False))

    def prefix_hits(self, keys: Any) -> int:
        """As :meth:`StoreBuffer.prefix_hits`; 0 in an outage."""
        return int(self._or_miss(super().prefix_hits, keys, 0))

    def _or_miss(self, call: Any, argument: Any, miss: Any) -> Any:
        try:
            return call(argument)
        except self._OUTAGES:
            if self._strict:
                raise
            return miss


def _remote_options(endpoint: str, secret: str, connect_timeout: float) -> dict[str, Any]:
    seconds = real(connect_timeout, "connect_timeout")
    if not seconds > 0:
        raise errors.BadArgumentError(f"connect_timeout is {connect_timeout}; it must be above 0")
    nanoseconds = int(min(seconds * 1e9, 2.0**62))
    return {"connect": endpoint, "secret": secret, "connect_timeout_ns": nanoseconds}
