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
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np

from quire import _ffi, _options, errors, redis_url
from quire._arrays import int_list
from quire._key_file import read_key_file
from quire._numbers import checked_fields, int64, milliseconds, octets, text
from quire._options import ChunkStoreOptions
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

_TTL_MAX = _options.STORE["redis_ttl"].most_seconds or 0.0
#: More than a store takes to write the largest queue to a slow disk.
FLUSH_SECONDS = 60.0
# What a URL of Redis may have; "redis_" stands before their options.
_IN_URL = (
    "username",
    "password",
    "prefix",
    "tls_ca_file",
    "tls_cert_file",
    "tls_key_file",
    "tls_server_name",
)


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


def _fingerprint(passport: Any) -> str:
    if not isinstance(passport, Passport):
        raise TypeError(
            "passport must be a quire.Passport, as ChunkStore.passports() gives them, not "
            f"{type(passport).__name__}"
        )
    return passport.fingerprint


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
        _fingerprint(passport), _salt(cache_salt), _ids(tokens), passport.chunk_tokens
    )
    return [str(key) for key in keys]


def _folder(directory: Any) -> str:
    """Its path. The system would take one with a NUL as the part before."""
    if not isinstance(directory, (str, os.PathLike)):
        raise errors.BadArgumentError(
            f"ChunkStore: directory must be a path, not {type(directory).__name__}"
        )
    path = os.fspath(Path(directory))
    if not os.fspath(directory) or "\0" in path:
        raise errors.BadArgumentError(
            "ChunkStore: directory is empty or has a NUL in it; give a folder, or None"
        )
    return path


def _key_bytes(key: bytes) -> bytes:
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"ChunkStore: key must be bytes, not {type(key).__name__}")
    return bytes(key)


def _with_url(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Options with what the URL of Redis has in their places."""
    place = redis_url.parse(text(whole["redis"], "ChunkStore: redis"))
    found = {**whole, "redis": place.endpoints}
    for name in _IN_URL:
        in_url: str = getattr(place, name)
        option = f"redis_{name}"
        if whole[option] and in_url:
            raise errors.BadArgumentError(
                f"ChunkStore: {option} is given twice, the second time in the URL"
            )
        found[option] = os.fspath(whole[option]) or in_url
    found["redis_tls"] = whole["redis_tls"] or place.tls
    found["redis_tls_verify"] = whole["redis_tls_verify"] and place.tls_verify
    return found


class ChunkStore(_ffi.ClosingOwner):
    """Keeps chunks of KV in up to three tiers.

    Args:
        directory: a folder for chunks; several processes may share it.
        OPTIONS

    Raises:
        BadArgumentError: an option, or no tier at all.
        NotFoundError: folder_use asks for a store, and there is none.
        IoError: the folder cannot be made or read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        **options: Unpack[ChunkStoreOptions],
    ) -> None:
        whole = _options.whole_store(options)
        self.key = whole["key"] = _key_bytes(whole["key"])
        fields = _options.store_fields(_with_url(whole))
        fields["directory"] = "" if directory is None else _folder(directory)
        super().__init__(_ffi.create("ChunkStore", checked_fields(fields)))

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
            for fields in self._handle.list(_tier(tier))
        ]

    def get(self, tier: Tier, key: str) -> StoredChunk:
        """One chunk by its key.

        Raises:
            NotFoundError: it is not there.
            CorruptError: it was damaged, and is gone now.
            UnavailableError: the tier does not answer.
        """
        fields = self._handle.get(_tier(tier), text(key, "key"))
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
        known = self._handle.known_prefix(_fingerprint(passport), _salt(cache_salt), keys)
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
            _fingerprint(passport),
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
            _fingerprint(passport),
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
        return int(self._handle.clear(_fingerprint(passport), _salt(cache_salt)))

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
        return int(self._handle.verify(_tier(tier)))

    def gc(self, tier: Tier) -> int:
        """Removes what is expired, over the quota, or left over by a process that died. The bytes
        that are free now."""
        return int(self._handle.collect_garbage(_tier(tier)))

    def flush(self, timeout: float = FLUSH_SECONDS) -> None:
        """Waits until all that was put is as durable as promised. TimeoutError after `timeout`
        seconds."""
        self._handle.flush(milliseconds(timeout, "timeout"))

    def close(self) -> None:
        """Writes what is queued and stops. Every later call raises ClosedError."""
        super().close()


_options.describe(ChunkStore, _options.STORE)
_options.with_signature(ChunkStore.__init__, _options.STORE, ChunkStoreOptions)


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


def _tier(tier: Any) -> str:
    return text(tier, "tier")


def _salt(salt: str | bytes) -> bytes:
    return octets(salt, "cache_salt")


def _ids(tokens: Sequence[int]) -> Any:
    return np.asarray(int_list(tokens, "tokens"), dtype=np.int64)


def _keys(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError("keys must be a list of keys, not one text")
    return [text(key, "key") for key in keys]
