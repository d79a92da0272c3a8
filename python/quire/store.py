"""quire.ChunkStore: KV that outlives its request, in RAM, a folder and Redis.

    with quire.ChunkStore("kv-cache", redis="10.0.0.5:6379") as store:
        engine = quire.Engine(model, kv_store=store)

What comes back is, byte for byte, what was put; what is damaged, late or gone is a miss.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from quire import _ffi, errors, redis_url

__all__ = ["ChunkInfo", "ChunkStore", "StoredChunk", "Tier"]

Tier: TypeAlias = Literal["ram", "disk", "redis"]
Durability: TypeAlias = Literal["none", "async", "os", "sync"]

_FLUSH_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class ChunkInfo:
    """A chunk as a tier lists it.

    key: what it is found by. fingerprint: of the passport that it belongs to. tokens: how many.
    first_token: position of its first one; None if the tier does not know.
    created: seconds since 1970; expires: the same, None for never.
    """

    tier: Tier
    key: str
    fingerprint: str
    tokens: int
    first_token: int | None
    bytes: int
    created: float
    expires: float | None


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """A chunk with its content, verified.

    data: docs/formats/chunk.md. signed: whether it has a MAC. tail: it is shorter than a whole one.
    """

    key: str
    fingerprint: str
    context: str
    tokens: list[int]
    first_token: int | None
    created: float
    expires: float | None
    sections: int
    signed: bool
    tail: bool
    data: bytes


class ChunkStore(_ffi.ClosingOwner):
    """Keeps chunks of KV in up to three tiers.

    Args:
        directory: a folder for chunks, made if absent; several processes may share it.
        redis: "HOST:PORT", several with commas (seeds of a cluster), or "unix:PATH"; or all of it in
            one word, "redis://USER:PASSWORD@HOST:PORT/?prefix=PREFIX", percent-encoded; with TLS
            "rediss://...?ca=FILE" (:func:`quire.redis_url.parse` has all parameters).
        ram_bytes: memory for chunks; 0 = none (an engine's own pages come first anyway).
        disk_bytes: the most that the folder takes; 0 = what is free there, but a tenth.
        durability: what a put survives: "none" and "async" nothing, "os" the end of the process,
            "sync" a loss of power.
        key: chunks are signed with it, and those without its signature are not taken.
        redis_username, redis_password, redis_prefix, redis_ttl: seconds of what is written there;
            0 = for ever.
        redis_tls: with TLS. redis_tls_ca_file: PEM file of those who sign servers' certificates, ""
            = the system's. redis_tls_cert_file, redis_tls_key_file: this client's. redis_tls_server_name:
            whose certificate servers must have, "" = each one's host. redis_tls_verify: False takes
            anybody's certificate.
        **options: names of ChunkStoreOptions for what is rarely changed: write_policy ("through",
            "selective", "back"), admit_after, eviction ("lru", "s3fifo", "cost"), promote,
            use_uring, disk_timeout_ms, redis_connect_timeout_ms, redis_timeout_ms, redis_replicas,
            queue_bytes, fetch_bytes, scrub_bytes_per_second.

    Raises:
        BadArgumentError: an option, or no tier at all.
        IoError: the folder cannot be made or read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        redis: str = "",
        ram_bytes: int = 0,
        disk_bytes: int = 0,
        durability: Durability = "os",
        key: bytes = b"",
        redis_username: str = "",
        redis_password: str = "",
        redis_prefix: str = "",
        redis_ttl: float = 0,
        redis_tls: bool = False,
        redis_tls_ca_file: str | os.PathLike[str] = "",
        redis_tls_cert_file: str | os.PathLike[str] = "",
        redis_tls_key_file: str | os.PathLike[str] = "",
        redis_tls_server_name: str = "",
        redis_tls_verify: bool = True,
        **options: Any,
    ) -> None:
        self.key = bytes(key)
        place = redis_url.parse(redis)
        for name, given, in_url in (
            ("redis_username", redis_username, place.username),
            ("redis_password", redis_password, place.password),
            ("redis_prefix", redis_prefix, place.prefix),
            ("redis_tls_ca_file", redis_tls_ca_file, place.tls_ca_file),
            ("redis_tls_cert_file", redis_tls_cert_file, place.tls_cert_file),
            ("redis_tls_key_file", redis_tls_key_file, place.tls_key_file),
            ("redis_tls_server_name", redis_tls_server_name, place.tls_server_name),
        ):
            if given and in_url:
                raise errors.BadArgumentError(
                    f"ChunkStore: {name} is given twice, the second time in the URL"
                )
        super().__init__(
            _ffi.new_chunk_store(
                {
                    "directory": "" if directory is None else os.fspath(Path(directory)),
                    "redis": place.endpoints,
                    "ram_bytes": ram_bytes,
                    "disk_bytes": disk_bytes,
                    "durability": durability,
                    "key": self.key,
                    "redis_username": redis_username or place.username,
                    "redis_password": redis_password or place.password,
                    "redis_prefix": redis_prefix or place.prefix,
                    "redis_ttl_ms": round(redis_ttl * 1000),
                    "redis_tls": redis_tls or place.tls,
                    "redis_tls_ca_file": os.fspath(redis_tls_ca_file) or place.tls_ca_file,
                    "redis_tls_cert_file": os.fspath(redis_tls_cert_file) or place.tls_cert_file,
                    "redis_tls_key_file": os.fspath(redis_tls_key_file) or place.tls_key_file,
                    "redis_tls_server_name": redis_tls_server_name or place.tls_server_name,
                    "redis_tls_verify": redis_tls_verify and place.tls_verify,
                    **options,
                }
            )
        )

    @property
    def tiers(self) -> list[Tier]:
        """Those that it has, fastest first."""
        tiers = self.statistics()["tiers"]
        return [name for name in ("ram", "disk", "redis") if tiers[name]["present"]]

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges: "tiers" by name, "misses" by reason, fetches, fetched_tokens, ..."""
        fields = dict(self._handle.statistics())
        tiers = {str(name): _plain(tier) for name, tier in dict(fields.pop("tiers")).items()}
        misses = _plain(fields.pop("misses"))
        return {"tiers": tiers, "misses": misses, **_plain(fields)}

    def take_events(self) -> list[tuple[str, Tier, str]]:
        """(what happened, tier, key) since the last call: "stored", "removed", "evicted",
        "expired", "corrupt"."""
        events: Any = self._handle.take_events()
        return [(event["kind"], event["tier"], event["key"]) for event in map(_plain, events)]

    def list(self, tier: Tier) -> list[ChunkInfo]:
        """All chunks of a tier."""
        return [
            ChunkInfo(
                tier=str(fields["tier"]),  # type: ignore[arg-type]
                key=str(fields["key"]),
                fingerprint=str(fields["fingerprint"]),
                tokens=int(fields["tokens"]),
                first_token=_position(fields),
                bytes=int(fields["bytes"]),
                created=int(fields["created_ms"]) / 1000,
                expires=_expiry(fields),
            )
            for fields in self._handle.list(tier)
        ]

    def get(self, tier: Tier, key: str) -> StoredChunk:
        """One chunk by its key.

        Raises:
            NotFoundError: it is not there.
            CorruptError: it was damaged, and is gone now.
            UnavailableError: the tier does not answer.
        """
        fields = self._handle.get(tier, key)
        return StoredChunk(
            key=str(fields["key"]),
            fingerprint=str(fields["fingerprint"]),
            context=str(fields["context"]),
            tokens=np.from_dlpack(fields["tokens"]).tolist(),
            first_token=_position(fields),
            created=int(fields["created_ms"]) / 1000,
            expires=_expiry(fields),
            sections=int(fields["sections"]),
            signed=bool(fields["signed"]),
            tail=bool(fields["tail"]),
            data=bytes(fields["data"]),
        )

    def verify(self, tier: Tier) -> int:
        """Reads and checks everything in the tier; damaged chunks are removed. How many were."""
        return int(self._handle.verify(tier))

    def gc(self, tier: Tier) -> int:
        """Removes what is expired, over the quota, or left over by a process that died. The bytes
        that are free now."""
        return int(self._handle.collect_garbage(tier))

    def flush(self, timeout: float = _FLUSH_SECONDS) -> None:
        """Waits until all that was put is as durable as promised. TimeoutError after `timeout`
        seconds."""
        self._handle.flush(round(timeout * 1000))

    def close(self) -> None:
        """Writes what is queued and stops. Every later call raises ClosedError."""
        super().close()


def _plain(fields: Any) -> dict[str, Any]:
    return {str(name): value for name, value in dict(fields).items()}


def _position(fields: Any) -> int | None:
    position = int(fields["first_token"])
    return None if position < 0 else position


def _expiry(fields: Any) -> float | None:
    expires_ms = int(fields["expires_ms"])
    return expires_ms / 1000 if expires_ms > 0 else None
