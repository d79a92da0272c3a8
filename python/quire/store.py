"""quire.ChunkStore: KV that outlives its request, in RAM, a folder and Redis.

    with quire.ChunkStore("kv-cache", redis="10.0.0.5:6379") as store:
        engine = quire.Engine(model, kv_store=store)

What comes back is, byte for byte, what was put; what is damaged, late or gone is a miss.

A chunk has a key of 64 hexadecimal digits. :meth:`ChunkStore.list` gives the keys of what is
stored, :func:`chunk_keys` those of a prompt:

    (passport,) = store.passports(model)
    keys = quire.chunk_keys(passport, prompt_ids, cache_salt="ann")
    store.pin(keys)
"""

from __future__ import annotations

import dataclasses
import json
import builtins
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from quire import _ffi, errors, redis_url
from quire._arrays import int_list
from quire._numbers import checked_fields, int64, milliseconds, text
from quire.chunk_space import ChunkSpace
from quire.identity import model_identity

__all__ = [
    "ChunkInfo",
    "ChunkStore",
    "Passport",
    "Prefetched",
    "StoredChunk",
    "Tier",
    "chunk_keys",
    "read_key_file",
]

Tier: TypeAlias = Literal["ram", "disk", "redis"]
Eviction: TypeAlias = Literal["lru", "s3fifo", "cost"]
WritePolicy: TypeAlias = Literal["through", "selective", "back"]
Durability: TypeAlias = Literal["none", "async", "os", "sync"]
FolderUse: TypeAlias = Literal["create", "existing", "look"]

_TTL_MAX = 1e12  # seconds: longer than any store is there
_FLUSH_SECONDS = 60.0
_PRIORITY_DEFAULT = 50  # kDefaultPriority in include/quire/chunk_store.h
_KEY_BYTES_MIN = 16  # kMacKeyBytesMin in include/quire/chunk_store.h


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file as the key that chunks are signed with.

    Raises:
        BadArgumentError: it has fewer than 16 bytes. An empty key would switch signing off.
        OSError: the file cannot be read.
    """
    key = Path(path).read_bytes()
    if len(key) < _KEY_BYTES_MIN:
        raise errors.BadArgumentError(
            f"{os.fspath(path)}: {len(key)} bytes are too few for a signing key; it needs at least "
            f"{_KEY_BYTES_MIN}, for example: head -c 32 /dev/urandom > {os.fspath(path)}"
        )
    return key


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


@dataclasses.dataclass(frozen=True)
class Passport:
    """What the KV of some chunks is of. Chunks of equal passports are exchangeable.

    fingerprint: SHA-256 of the passport, 64 hexadecimal digits. model: the architecture's name.
    revision, tokenizer: digests of the weights and of the tokenizer. adapter: of the LoRA, "" for
    none. numerics: kernels and types that computed it. chunk_tokens: tokens of a whole chunk.
    """

    fingerprint: str
    model: str
    revision: str
    tokenizer: str
    adapter: str
    numerics: str
    chunk_tokens: int


@dataclasses.dataclass(frozen=True)
class Prefetched:
    """What a prefetch brought.

    tokens: leading tokens of the prompt whose KV is in the fastest tier now. miss: why there are no
    more, as in :attr:`Usage.miss`; None if all of them are there.
    """

    tokens: int
    miss: str | None


def chunk_keys(
    passport: Passport, tokens: Sequence[int], *, cache_salt: str | bytes = b""
) -> list[str]:
    """The keys of the chunks that a prompt has, in order, stored or not.

    tokens: ids, [n]. cache_salt: that of the request.

    If n is no multiple of `passport.chunk_tokens`, the last key is that of a shorter chunk. For
    models with recurrent layers an engine ends that chunk one token earlier.

    Raises:
        BadArgumentError: an id that int32 cannot hold.
    """
    keys = _ffi.function("chunk_keys")(
        passport.fingerprint, _salt(cache_salt), _ids(tokens), passport.chunk_tokens
    )
    return [str(key) for key in keys]


def _key_bytes(key: bytes) -> bytes:
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"ChunkStore: key must be bytes, not {type(key).__name__}")
    return bytes(key)


def _words_of_redis(place: redis_url.RedisPlace, **given: str | os.PathLike[str]) -> dict[str, str]:
    """Fields of the library, "redis_NAME": what was given, or what the URL has."""
    fields = {}
    for name, value in given.items():
        in_url: str = getattr(place, name)
        if value and in_url:
            raise errors.BadArgumentError(
                f"ChunkStore: redis_{name} is given twice, the second time in the URL"
            )
        fields[f"redis_{name}"] = os.fspath(value) or in_url
    return fields


class ChunkStore(_ffi.ClosingOwner):
    """Keeps chunks of KV in up to three tiers.

    Args:
        directory: a folder for chunks; several processes may share it.
        folder_use: "create" makes the folder if it is absent; "existing" raises NotFoundError
            unless it is the folder of a store; "look" does the same, and changes nothing in it:
            what is damaged or expired stays, and puts fail.
        redis: "HOST:PORT", several with commas (seeds of a cluster), or "unix:PATH"; or all of it in
            one word, "redis://USER:PASSWORD@HOST:PORT/?prefix=PREFIX", percent-encoded; with TLS
            "rediss://...?ca=FILE" (:func:`quire.redis_url.parse` has all parameters).
        ram_bytes: memory for chunks; 0 = none (an engine's own pages come first anyway).
        disk_bytes: the most that the folder takes; 0 = what is free there, but a tenth.
        durability: what a put survives: "none" and "async" nothing, "os" the end of the process,
            "sync" a loss of power.
        key: at least 16 bytes: chunks are signed with it, and those without its signature are not
            taken; b"" = not signed.
        redis_username, redis_password, redis_prefix, redis_ttl: seconds of what is written there;
            0 = for ever.
        redis_tls: with TLS. redis_tls_ca_file: PEM file of the authorities for servers' certificates,
            "" = the system's. redis_tls_cert_file, redis_tls_key_file: this client's. redis_tls_server_name:
            whose certificate servers must have, "" = each one's host. redis_tls_verify: False takes
            anybody's certificate.
        eviction: which chunk goes first when a tier is full: "lru" the one that was not used for
            the longest time, "s3fifo" what was used once, so that one scan does not empty the tier,
            "cost" what saves least seconds per byte.
        write_policy: when the folder and Redis get a chunk: "through" at once, "selective" when it
            was put or found `admit_after` times, "back" when RAM gives it up, at flush() and at
            close().
        admit_after: with "selective"; at least 1.
        promote: what came from a slow tier is kept in the faster ones, too.
        priority: of chunks that are put, 0 to 100: those of lower priority are evicted first.
        pin_timeout: seconds after which a pin ends by itself.
        **options: names of ChunkStoreOptions for what is rarely changed: use_uring,
            disk_timeout_ms, redis_connect_timeout_ms, redis_timeout_ms, redis_replicas,
            queue_bytes, fetch_bytes, scrub_bytes_per_second.

    Raises:
        BadArgumentError: an option, or no tier at all.
        NotFoundError: folder_use asks for a store, and there is none.
        IoError: the folder cannot be made or read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        redis: str = "",
        ram_bytes: int = 0,
        folder_use: FolderUse = "create",
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
        eviction: Eviction = "lru",
        write_policy: WritePolicy = "through",
        admit_after: int = 2,
        promote: bool = True,
        priority: int = _PRIORITY_DEFAULT,
        pin_timeout: float = 60.0,
        **options: Any,
    ) -> None:
        self.key = _key_bytes(key)
        if directory is not None and not os.fspath(directory):
            raise errors.BadArgumentError("ChunkStore: directory is empty; give a folder, or None")
        place = redis_url.parse(redis)
        words = _words_of_redis(
            place,
            username=redis_username,
            password=redis_password,
            prefix=redis_prefix,
            tls_ca_file=redis_tls_ca_file,
            tls_cert_file=redis_tls_cert_file,
            tls_key_file=redis_tls_key_file,
            tls_server_name=redis_tls_server_name,
        )
        super().__init__(
            _ffi.new(
                _ffi.ChunkStoreHandle,
                checked_fields(
                    {
                        "directory": "" if directory is None else os.fspath(Path(directory)),
                        "redis": place.endpoints,
                        "folder_use": folder_use,
                        "ram_bytes": ram_bytes,
                        "disk_bytes": disk_bytes,
                        "durability": durability,
                        "key": self.key,
                        **words,
                        "redis_ttl_ms": milliseconds(redis_ttl, "redis_ttl", most=_TTL_MAX),
                        "redis_tls": redis_tls or place.tls,
                        "redis_tls_verify": redis_tls_verify and place.tls_verify,
                        "eviction": eviction,
                        "write_policy": write_policy,
                        "admit_after": admit_after,
                        "promote": promote,
                        "priority": priority,
                        "pin_timeout_ms": milliseconds(pin_timeout, "pin_timeout"),
                        **options,
                    }
                ),
            )
        )

    @property
    def tiers(self) -> builtins.list[Tier]:
        """Those that it has, fastest first."""
        tiers = self.statistics()["tiers"]
        return [name for name in ("ram", "disk", "redis") if tiers[name]["present"]]

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges: "tiers" by name, "misses" by reason, fetches, fetched_tokens, ..."""
        fields = dict(self._handle.statistics())
        tiers = {str(name): _plain(tier) for name, tier in dict(fields.pop("tiers")).items()}
        misses = _plain(fields.pop("misses"))
        return {"tiers": tiers, "misses": misses, **_plain(fields)}

    def take_events(self) -> builtins.list[tuple[str, Tier, str]]:
        """(what happened, tier, key) since the last call: "stored", "removed", "evicted",
        "expired", "corrupt"."""
        events: Any = self._handle.take_events()
        return [(event["kind"], event["tier"], event["key"]) for event in map(_plain, events)]

    def passports(self, model: str | os.PathLike[str] | None = None) -> builtins.list[Passport]:
        """What the store has KV of: passports of the engines that use it, and of the chunks in its
        folder. Redis keeps no passports.

        model: only those of the model in this folder. There may be several: one for each element
        type and kernel path that an engine computed with. Reads the weights unless their digest is
        known.

        Raises:
            IoError: the folder cannot be read.
        """
        passports = [_passport(fields) for fields in self._handle.passports()]
        if model is None:
            return passports
        identity = model_identity(model)
        wanted = (identity["revision"], identity["tokenizer"])
        return [each for each in passports if (each.revision, each.tokenizer) == wanted]

    # Its name hides the builtin from the annotations of this class.
    def list(self, tier: Tier) -> builtins.list[ChunkInfo]:
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

    # ---- Prompts

    def space(self, passport: Mapping[str, Any], *, salt: str | bytes = b"") -> ChunkSpace:
        """The chunks of one passport and salt, for an engine that is not Quire's.

        passport: what decides whether two engines may share KV, with the names of
        docs/formats/chunk.md: "model", "revision", "block" (tokens of a chunk), "layers" ([first,
        behind the last]), "kind", "dtype", "kv_heads", "head_dim", "v_head_dim", "rope", "quant",
        "numerics", "adapter"; "layout" names the order of the bytes where it is not Quire's own,
        "shard" the part that this engine has.

        Raises:
            BadArgumentError, CorruptError: a field lacks or is not what the page says.
            IoError: the folder cannot take the passport.
        """
        self._handle.statistics()  # raises after an internal error
        return ChunkSpace(self, passport, _salt(salt))

    def known_prefix(
        self, passport: Passport, tokens: Sequence[int], *, cache_salt: str | bytes = b""
    ) -> int:
        """How many leading tokens of a prompt are stored, as far as that is known without asking
        the folder or Redis. What another process has put is not.

        tokens: ids, [n].
        """
        keys = chunk_keys(passport, tokens, cache_salt=cache_salt)
        known = self._handle.known_prefix(passport.fingerprint, _salt(cache_salt), keys)
        return min(int(known) * passport.chunk_tokens, len(tokens))

    def prefetch(
        self,
        passport: Passport,
        tokens: Sequence[int],
        *,
        cache_salt: str | bytes = b"",
        timeout: float = 60.0,
    ) -> Prefetched:
        """Brings the chunks of a prompt into RAM, and what only Redis has into the folder (flush()
        waits until it is written there). Without a RAM tier the folder's own chunks are only read.

        tokens: ids, [n]. timeout: seconds; what has not come by then is left.

        Raises:
            BadArgumentError: a passport that this store does not know (:meth:`passports`).
        """
        fields = self._handle.prefetch(
            passport.fingerprint,
            _salt(cache_salt),
            _ids(tokens),
            passport.chunk_tokens,
            milliseconds(timeout, "timeout"),
        )
        miss = str(fields["miss"])
        ready = min(int(fields["ready"]) * passport.chunk_tokens, len(tokens))
        return Prefetched(tokens=ready, miss=None if miss == "none" else miss)

    def set_quota(
        self,
        passport: Passport,
        *,
        bytes_max: int = 0,
        bytes_guaranteed: int = 0,
        cache_salt: str | bytes = b"",
    ) -> None:
        """Limits what the chunks of one salt take in each tier.

        bytes_max: the most; 0 = no limit but that of the tier. bytes_guaranteed: chunks of other
        salts never evict what would leave this one with less.

        It holds for this object as long as it is open: nothing is written. Chunks go when more are
        put and at :meth:`gc`. Redis has limits of its own.

        Raises:
            BadArgumentError: a negative number, or more guaranteed than allowed.
        """
        self._handle.set_quota(
            passport.fingerprint,
            _salt(cache_salt),
            int64(bytes_max, "bytes_max"),
            int64(bytes_guaranteed, "bytes_guaranteed"),
        )

    def clear(self, passport: Passport, *, cache_salt: str | bytes = b"") -> int:
        """Removes all chunks of a passport and a salt from all tiers. How many.

        Raises:
            TimeoutError: some of them are being written still; call again.
            UnavailableError: Redis does not answer.
        """
        return int(self._handle.clear(passport.fingerprint, _salt(cache_salt)))

    # ---- Chunks by their keys

    def pin(self, keys: Iterable[str]) -> int:
        """Keeps chunks from being evicted until :meth:`unpin`, or for `pin_timeout` seconds. Pins
        are counted: two of them need two unpins.

        Returns how many of the chunks RAM or the folder has, and keeps. A pin holds in this process
        alone: another one that shares the folder may evict the chunk, and Redis has no pins.
        :meth:`set_priority` is kept in the folder.

        Raises:
            BadArgumentError: a key that is not 64 hexadecimal digits.
        """
        return int(self._handle.pin(_keys(keys)))

    def unpin(self, keys: Iterable[str]) -> int:
        """Ends one pin of each chunk. How many there were."""
        return int(self._handle.unpin(_keys(keys)))

    def touch(self, keys: Iterable[str]) -> None:
        """Counts as a use of the chunks, so that they are evicted later."""
        self._handle.touch(_keys(keys))

    def set_ttl(self, keys: Iterable[str], seconds: float) -> int:
        """Lets chunks expire `seconds` from now; 0 = never. The folder and Redis keep it. In RAM a
        chunk goes no later than its own header says.

        Returns how many of the chunks are in a tier.

        Raises:
            BadStateError: a chunk is signed, and the store was opened without its key.
            IoError, UnavailableError: a tier could not change all of its chunks.
        """
        return int(self._handle.set_ttl(_keys(keys), milliseconds(seconds, "ttl", most=_TTL_MAX)))

    def set_priority(self, keys: Iterable[str], priority: int) -> int:
        """Changes which chunks are evicted first: those of lower priority, 0 to 100. The folder
        keeps it; other processes learn of it when they open the folder. Redis has no priorities.

        Returns how many of the chunks RAM or the folder has.

        Raises:
            BadArgumentError: a priority out of [0, 100].
            IoError: the file system keeps no extended attributes, or the folder cannot be written.
        """
        return int(self._handle.set_priority(_keys(keys), int64(priority, "priority")))

    def remove(self, keys: Iterable[str]) -> int:
        """Removes chunks from all tiers, and from what waits to be written. How many were there.
        What hangs on a removed chunk stays, but no prompt finds it any more.

        Raises:
            TimeoutError: some of them are being written still; call again.
            UnavailableError: Redis does not answer.
        """
        return int(self._handle.remove(_keys(keys)))

    # ---- Upkeep

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
        self._handle.flush(milliseconds(timeout, "timeout"))

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


def _passport(fields: Any) -> Passport:
    passport = json.loads(str(fields["json"]))
    return Passport(
        fingerprint=str(fields["fingerprint"]),
        model=passport["model"],
        revision=passport.get("revision", ""),
        tokenizer=passport.get("tokenizer", ""),
        adapter=passport.get("adapter", ""),
        numerics=passport.get("numerics", ""),
        chunk_tokens=passport["block"],
    )


def _salt(salt: str | bytes) -> bytes:
    return text(salt, "cache_salt").encode() if isinstance(salt, str) else bytes(salt)


def _ids(tokens: Sequence[int]) -> Any:
    return np.asarray(int_list(tokens, "tokens"), dtype=np.int64)


def _keys(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError("keys must be a list of keys, not one text")
    return [text(key, "key") for key in keys]
