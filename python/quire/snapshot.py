"""Snapshots: the KV of a text as one file, which another process or machine goes on from.

    engine.generate(prompt)
    snapshot.save(engine, tokens, "chat.quire")
    ...
    info = snapshot.restore(other_engine, "chat.quire")
    other_engine.generate(info.tokens + more)     # starts after the tokens of the snapshot

What is restored is equal bit for bit to what the engine would compute; a damaged file, or one of
another model, is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire import _ffi
from quire._arrays import int_list
from quire._numbers import file_name, int64, octets
from quire.identity import model_identity

if TYPE_CHECKING:
    from quire._kv_state import KVState
    from quire.engine import Engine

__all__ = [
    "SnapshotDifference",
    "SnapshotInfo",
    "diff",
    "info",
    "model_identity",
    "restore",
    "restore_sequence",
    "save",
    "save_sequence",
    "verify",
]


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """What a snapshot contains.

    passport: model, layers, types, RoPE and kernels, as docs/formats/chunk.md has them.
    tokens: whose KV is in it.
    sampler: bytes of the program that saved it.
    created: seconds since 1970.
    chunk_count: pieces of passport["block"] tokens; the last one may be shorter.
    version: of the file; 2 if it has windows, rows that are left out, or recurrent states.
    window, sinks: of the sequence's sliding window, 0 without one. Windows of layers stand in
        passport["window"].
    slid: tokens after the sinks that the window hides; lost: those that stay hidden without it.
    state_bytes: of recurrent layers.
    """

    passport: dict[str, Any]
    tokens: list[int]
    sampler: bytes
    created: float
    chunk_count: int
    file_bytes: int
    long_factors: bool
    version: int
    window: int
    sinks: int
    slid: int
    lost: int
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class SnapshotDifference:
    """What two snapshots do not have in common.

    passport: the first field in which the passports differ, with both values; empty if none.
    common_tokens: of the same beginning.
    compared_sections, different_sections: keys or values of one layer and chunk, of the chunks with
        the same tokens after the same tokens.
    first_section: which is the first different one; empty if none.
    same_windows, same_states: of the sequence, and of recurrent layers at its end.
    """

    passport: str
    common_tokens: int
    compared_sections: int
    different_sections: int
    first_section: str
    same_sampler: bool
    same_windows: bool
    same_states: bool


def info(path: str | os.PathLike[str]) -> SnapshotInfo:
    """Reads and checks all but the KV.

    Raises:
        NotFoundError, IoError: the file cannot be read.
        CorruptError: it is damaged, or no snapshot.
        IncompatibleError: a newer version of Quire wrote it.
    """
    return _read_info(_ffi.function("snapshot_info")(file_name(path, "path")))


def verify(path: str | os.PathLike[str]) -> SnapshotInfo:
    """Reads and checks everything; raises as :func:`info`."""
    return _read_info(_ffi.function("snapshot_verify")(file_name(path, "path")))


def diff(ours: str | os.PathLike[str], theirs: str | os.PathLike[str]) -> SnapshotDifference:
    """Compares two snapshots, both of which are verified."""
    fields = _ffi.function("snapshot_diff")(
        file_name(ours, "ours"), file_name(theirs, "theirs")
    )
    return SnapshotDifference(
        passport=str(fields["passport"]),
        common_tokens=int(fields["common_tokens"]),
        compared_sections=int(fields["compared_sections"]),
        different_sections=int(fields["different_sections"]),
        first_section=str(fields["first_section"]),
        same_sampler=bool(fields["same_sampler"]),
        same_windows=bool(fields["same_windows"]),
        same_states=bool(fields["same_states"]),
    )


def save(
    engine: Engine,
    tokens: Sequence[int],
    path: str | os.PathLike[str],
    *,
    sampler: bytes = b"",
    block_tokens: int = 256,
    cache_salt: str | bytes = b"",
) -> int:
    """Writes the KV of the longest beginning of `tokens` that the engine's prefix cache holds.

    cache_salt: of the requests whose KV it is; it is not written to the file.

    The file is written whole or not at all. Returns how many tokens are in it: all but the last one
    of an answer, whose KV nobody has needed yet.

    Raises:
        NotFoundError: nothing of these tokens has been computed; generate first.
        BadStateError: the engine was made without a prefix cache.
        IoError: the file cannot be written.
    """
    identity = model_identity(engine.model_dir)
    contents = {**identity, **_contents(tokens, sampler, block_tokens)}
    contents["cache_salt"] = octets(cache_salt, "cache_salt")
    return int(engine.__tvm_ffi_object__().save_snapshot(contents, file_name(path, "path")))


def restore(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    any_numerics: bool = False,
    cache_salt: str | bytes = b"",
) -> SnapshotInfo:
    """Puts the KV of a snapshot into the engine's prefix cache: prompts that begin with its tokens
    start after them.

    any_numerics: also take KV that other kernels computed (another CPU), which is close to what
    this engine would compute and not equal to it.

    cache_salt: only requests with this salt start after the tokens.

    Raises:
        IncompatibleError: another model, element type or kernel; the message names the difference.
        CorruptError: the file is damaged. Nothing of it is used.
        TooLargeError, OutOfPagesError: it does not fit.
    """
    identity = model_identity(engine.model_dir)
    handle = engine.__tvm_ffi_object__()
    salt = octets(cache_salt, "cache_salt")
    name = file_name(path, "path")
    return _read_info(handle.load_snapshot(identity, name, any_numerics, salt))


def save_sequence(
    state: KVState,
    seq_id: int,
    tokens: Sequence[int],
    path: str | os.PathLike[str],
    *,
    identity: Mapping[str, str],
    sampler: bytes = b"",
    block_tokens: int = 256,
) -> None:
    """Writes one sequence of a cache, a recurrent state or a composite state.

    tokens: all of the sequence, in order. identity: what the state was computed with, "model" and
    where they matter "revision", "tokenizer" and "adapter"; :func:`restore_sequence` compares them.

    Raises:
        BadArgumentError: other tokens than the sequence has, or parts that cannot be written.
        UnknownSequenceError, IoError. The file is written whole or not at all.
    """
    contents = {**identity, **_contents(tokens, sampler, block_tokens)}
    state.__tvm_ffi_object__().save_snapshot(seq_id, contents, file_name(path, "path"))


def restore_sequence(
    state: KVState,
    seq_id: int,
    path: str | os.PathLike[str],
    *,
    identity: Mapping[str, str],
    any_numerics: bool = False,
) -> SnapshotInfo:
    """Adds the sequence `seq_id` with all that the snapshot has of it.

    any_numerics: as :func:`restore`.

    Raises:
        IncompatibleError: another identity, other layers or kernels; the message says which.
        CorruptError, SequenceExistsError, OutOfPagesError. A failed call has changed nothing.
    """
    handle = state.__tvm_ffi_object__()
    name = file_name(path, "path")
    return _read_info(handle.load_snapshot(seq_id, dict(identity), name, any_numerics))


def _contents(tokens: Sequence[int], sampler: bytes, block_tokens: int) -> dict[str, Any]:
    return {
        "block_tokens": int64(block_tokens, "block_tokens"),
        "tokens": np.asarray(int_list(tokens, "tokens"), dtype=np.int64),
        "sampler": octets(sampler, "sampler"),
        "created_ms": time.time_ns() // 1_000_000,
    }


def _read_info(fields: Any) -> SnapshotInfo:
    return SnapshotInfo(
        passport=json.loads(str(fields["passport"])),
        tokens=np.from_dlpack(fields["tokens"]).tolist(),
        sampler=bytes(fields["sampler"]),
        created=int(fields["created_ms"]) / 1000,
        chunk_count=int(fields["chunk_count"]),
        file_bytes=int(fields["file_bytes"]),
        long_factors=bool(fields["long_factors"]),
        version=int(fields["version"]),
        window=int(fields["window"]),
        sinks=int(fields["sinks"]),
        slid=int(fields["slid"]),
        lost=int(fields["lost"]),
        state_bytes=int(fields["state_bytes"]),
    )
