"""Prompts that other processes compute for an engine, and it for them: options, and what is known
of the other side."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire import _ffi, _numbers, errors
from quire._key_file import read_unguessable

__all__ = [
    "PEERS_MAX",
    "STREAMS_MAX",
    "OncePerCause",
    "PrefillPeer",
    "ReadSecretFile",
    "Refusals",
    "connection_fields",
    "peer_fields",
    "read_peers",
    "read_secret_file",
]

PEERS_MAX = 64  # of TransferListenerOptions
STREAMS_MAX = 16  # of TransferPeerOptions
_TLS_FILES = ("peer_tls_ca_file", "peer_tls_cert_file", "peer_tls_key_file")
# Signs of life for each time after which a peer without one counts as dead; at most this apart.
_HEARTBEATS = 6
_HEARTBEAT_SECONDS_MAX = 0.5
# Fields of a passport (docs/formats/chunk.md): a refusal is about one of them, or has another
# cause.
_FIELDS = frozenset(
    (
        "adapter",
        "block",
        "dtype",
        "first_layer",
        "head_dim",
        "kind",
        "kv_heads",
        "latent",
        "layers",
        "layout",
        "model",
        "numerics",
        "quant",
        "revision",
        "rope",
        "shard",
        "state_shape",
        "tokenizer",
        "v_dtype",
        "v_head_dim",
        "window",
    )
)
_DIFFERENCE = re.compile(r"the two sides hold other KV: (\w+)")


@dataclasses.dataclass(frozen=True)
class PrefillPeer:
    """A process that computes prompts for an engine, as things stand.

    address: as the engine was given it.
    connected: whether prompts can go there now. error: why the last connection or prompt failed;
        "" if none did.
    queued_tokens: that it has to compute before a prompt that comes now.
    seconds_per_token: that it computes prompts in; 0 = not measured yet.
    bytes_per_second: of KV that came from it, at least; 0 = nothing did yet.
    prompts, tokens, bytes: that came from it. losses: prompts that it did not finish.
    streams: of the connection to it; 0 = there is none.
    """

    address: str
    connected: bool
    error: str
    queued_tokens: int
    seconds_per_token: float
    bytes_per_second: float
    prompts: int
    tokens: int
    bytes: int
    losses: int
    streams: int


def read_peers(peers: Sequence[Any]) -> list[PrefillPeer]:
    """As the library gives them."""
    return [
        PrefillPeer(
            address=str(peer["address"]),
            connected=bool(peer["connected"]),
            error=str(peer["error"]),
            queued_tokens=int(peer["queued_tokens"]),
            seconds_per_token=float(peer["seconds_per_token"]),
            bytes_per_second=float(peer["bytes_per_second"]),
            prompts=int(peer["prompts"]),
            tokens=int(peer["tokens"]),
            bytes=int(peer["bytes"]),
            losses=int(peer["losses"]),
            streams=int(peer["streams"]),
        )
        for peer in peers
    ]


class ReadSecretFile(str):
    """The name of a file as it was when its secret was read. So what was checked is what is used,
    and a pipe can be read once."""

    secret: bytes

    def __new__(cls, path: str) -> ReadSecretFile:
        """Raises as :func:`read_secret_file`."""
        made = super().__new__(cls, path)
        made.secret = read_secret_file(path)
        return made


def read_secret_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file as what both sides of a connection must have.

    Raises:
        BadArgumentError: it has fewer than 16 bytes, which can be guessed.
        OSError: the file cannot be read.
    """
    if isinstance(path, ReadSecretFile):
        return path.secret
    return read_unguessable(path, "secret")


def connection_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """What connections of either direction need, as the library takes it. options: of the part
    "connection"."""
    dead_after = _numbers.real(options["peer_dead_after"], "peer_dead_after")
    if not 1.0 <= dead_after <= 86400.0:
        raise errors.BadArgumentError(
            f"peer_dead_after is {dead_after:g}; it must be from 1 to 86400 seconds, because the "
            "other side gives a sign of life twice a second"
        )
    file = options["peer_secret_file"]
    return {
        **_tls_fields(options),
        "secret": b"" if file is None else read_secret_file(file),
        "dead_after_ns": round(dead_after * 1e9),
        "heartbeat_ns": round(min(_HEARTBEAT_SECONDS_MAX, dead_after / _HEARTBEATS) * 1e9),
    }


def _tls_fields(options: Mapping[str, Any]) -> dict[str, str]:
    given = [name for name in _TLS_FILES if options[name] is not None]
    for name in _TLS_FILES:
        if given and name not in given:
            raise errors.BadArgumentError(
                f"{', '.join(_TLS_FILES)} go together, and {name} is not given"
            )
    server_name = _numbers.text(options["peer_tls_server_name"], "peer_tls_server_name")
    if server_name and not given:
        raise errors.BadArgumentError(
            f"peer_tls_server_name is {server_name!r}, and {', '.join(_TLS_FILES)} are not given"
        )
    fields = {name: _numbers.text(os.fspath(options[name]), name) for name in given}
    fields["peer_tls_server_name"] = server_name
    return {name.removeprefix("peer_"): value for name, value in fields.items()}


def peer_fields(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where prompts are computed, as the library takes it; None for an engine without peers.
    options: of the part "peers"."""
    addresses = options["addresses"]
    if isinstance(addresses, str):
        addresses = addresses.split(",") if addresses else []
    if not isinstance(addresses, Sequence) or isinstance(addresses, (bytes, bytearray)):
        raise TypeError(f"prefill_from is a list of texts, not {type(addresses).__name__}")
    if not addresses:
        return None
    timeout = _numbers.milliseconds(options["timeout_ms"], "prefill_timeout")
    streams = _numbers.int64(options["streams"], "prefill_streams")
    if not 1 <= streams <= STREAMS_MAX:
        raise errors.BadArgumentError(
            f"prefill_streams is {streams}; it must be from 1 to {STREAMS_MAX}"
        )
    return {
        "addresses": [_numbers.text(address, "prefill_from") for address in addresses],
        "when": _numbers.text(options["when"], "prefill_remote"),
        "on_loss": _numbers.text(options["on_loss"], "on_peer_loss"),
        "timeout_ms": max(1, timeout),
        "streams": streams,
    }


class OncePerCause:
    """Hands a refusal to `tell` when its cause is new, and the 10th, 100th, 1000th, ... of the same
    one with their number: a peer of another model tries again each second, for ever. At most
    `PER_MINUTE` are told in a minute: a stranger may have a new cause each time, and the log would
    fill a disk. The next one that is told has the number of those that were not.

    One thread at a time may call. clock: seconds.
    """

    PER_MINUTE = 60
    _CAUSES_MAX = 256

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell_one = tell
        self._clock = clock
        self._counts: dict[str, int] = {}  # by cause, the one that came last behind the others
        self._minute = -math.inf  # when it began
        self._told = 0  # in it
        self._untold = 0  # since the last that was told

    def __call__(self, why: str) -> None:
        count = self._counts.pop(why, 0) + 1
        self._counts[why] = count
        if len(self._counts) > self._CAUSES_MAX:
            del self._counts[next(iter(self._counts))]
        if count == 1:
            self._tell(why)
        elif _is_power_of_ten(count):
            self._tell(f"{why} ({count} times)")

    def _tell(self, line: str) -> None:
        now = self._clock()
        if now - self._minute >= 60:
            self._minute, self._told = now, 0
        if self._told >= self.PER_MINUTE:
            self._untold += 1
            return
        self._told += 1
        untold, self._untold = self._untold, 0
        self._tell_one(f"{line} ({untold} others were not told)" if untold else line)


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"


class Refusals:
    """Connections that an engine has refused. A thread takes them from the library, counts them by
    field, and hands each to `on_refused`.

    Any thread may call.
    """

    def __init__(self, on_refused: Callable[[str], None] | None) -> None:
        self.queue: Any = _ffi.new(_ffi.RefusalQueueHandle)
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="quire-refusals", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """How many there were, by the field of the passport that differs, or "other"."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Ends the thread, once it has handed on what was refused."""
        self.queue.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                why = str(self.queue.take())
            except errors.ClosedError:
                return
            field = _field_of(why)
            with self._lock:
                self._counts[field] = self._counts.get(field, 0) + 1
            if self._on_refused is not None:
                self._tell(why)

    def _tell(self, why: str) -> None:
        assert self._on_refused is not None
        try:
            self._on_refused(why)
        except BaseException as error:  # SystemExit, too: the thread has more to hand on
            told = (type(error), error, error.__traceback__, self._thread)
            threading.excepthook(threading.ExceptHookArgs(told))


def _field_of(why: str) -> str:
    """No text of a stranger: one of the names above, or "other"."""
    found = _DIFFERENCE.search(why)
    return found[1] if found is not None and found[1] in _FIELDS else "other"
