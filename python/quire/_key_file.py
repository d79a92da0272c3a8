"""Files with a key or a secret, of which a guess must not be possible."""

from __future__ import annotations

import os
from pathlib import Path

from quire import errors

_BYTES_MIN = 16  # kMacKeyBytesMin in include/quire/chunk_store.h


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file as the key that chunks are signed with.

    Raises:
        BadArgumentError: it has fewer than 16 bytes. An empty key would switch signing off.
        OSError: the file cannot be read.
    """
    return read_unguessable(path, "signing key")


def read_unguessable(path: str | os.PathLike[str], purpose: str) -> bytes:
    """The content of a file. Raises as :func:`read_key_file`, with what the file is for."""
    key = Path(path).read_bytes()
    if len(key) < _BYTES_MIN:
        raise errors.BadArgumentError(
            f"{os.fspath(path)}: {len(key)} bytes are too few for a {purpose}; it needs at least "
            f"{_BYTES_MIN}, for example: head -c 32 /dev/urandom > {os.fspath(path)}"
        )
    return key
