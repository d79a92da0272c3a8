"""The file that has the key chunks are signed with."""

from __future__ import annotations

import os
from pathlib import Path

from quire import errors

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
