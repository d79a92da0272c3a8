"""Which model KV is of: digests of its files, as passports have them.

To read all weights takes seconds, so digests are kept in the folder :func:`quire._home.cache_dir`,
under the paths, sizes and times of the files that they are of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire import errors
from quire._home import cache_dir, write_whole
from quire._model_folder import GGUF_WEIGHTS, has_safetensors

__all__ = ["files_digest", "keep_source", "kept_identity", "model_identity"]

# In a packed folder: what it was made of.
_SOURCE = "quire_source.json"

_BLOCK_BYTES = 1 << 20  # read at a time: hashing it takes about a millisecond


def model_identity(
    model_dir: str | os.PathLike[str], *, stop: threading.Event | None = None
) -> dict[str, str]:
    """Architecture's name, and digests of weights and tokenizer. Reads all of them, unless their
    digests are kept. A packed folder has the identity of what it was made of (:func:`keep_source`).

    Raises:
        CancelledError: `stop` was set meanwhile.
    """
    folder = Path(model_dir)
    kept = kept_identity(folder)
    if kept is not None:
        return kept
    facts = _facts(folder)  # before they are read: a file that changes meanwhile is read again
    identity = _own_identity(folder, stop)
    source = _source_of(folder, identity)
    if source is not None:
        identity = source
    _keep(folder, {"files": facts, "identity": identity})
    return identity


def keep_source(packed: Path, source: dict[str, str]) -> None:
    """Notes in the folder `packed` that its files as they are now give the same KV as a model of
    the identity `source`. Changed files are another model again."""
    note = {"files": _own_identity(packed, None), "identity": source}
    (packed / _SOURCE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def kept_identity(model_dir: str | os.PathLike[str]) -> dict[str, str] | None:
    """What :func:`model_identity` gives, if it is known without reading the weights."""
    folder = Path(model_dir)
    try:
        return _read_identity(_place(folder), _facts(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not kept, or damaged


def _source_of(packed: Path, files: dict[str, str]) -> dict[str, str] | None:
    """What :func:`keep_source` has noted in a folder whose files still are `files`."""
    try:
        return _read_identity(packed / _SOURCE, files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.CorruptError(
            f"{packed / _SOURCE}: is damaged ({error}); remove it, or pack the model again"
        ) from error


def _read_identity(path: Path, files: object) -> dict[str, str] | None:
    """The identity in a file of "files" and "identity", if it is one of `files`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    identity = kept["identity"]
    if kept["files"] != files or set(identity) != {"model", "revision", "tokenizer"}:
        return None
    return {name: str(value) for name, value in identity.items()}


def _own_identity(folder: Path, stop: threading.Event | None) -> dict[str, str]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = folder / "tokenizer.json"
    return {
        "model": str((config.get("architectures") or ["unknown"])[0]),
        "revision": files_digest(_weights(folder), stop),
        "tokenizer": files_digest([tokenizer], stop) if tokenizer.is_file() else "",
    }


def _weights(folder: Path) -> list[Path]:
    gguf = folder / GGUF_WEIGHTS
    is_gguf = gguf.is_file() and not has_safetensors(folder)
    files = [gguf] if is_gguf else sorted(folder.glob("*.safetensors"))
    return [folder / "config.json", *files]


def _facts(folder: Path) -> list[list[str | int]]:
    """Path, size and time of the last change of all files."""
    others = (folder / "tokenizer.json", folder / _SOURCE)
    files = [file.resolve() for file in (*_weights(folder), *others)]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in found]


def _place(folder: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    return cache_dir() / "identities" / f"{name}.json"


def _keep(folder: Path, facts: dict[str, object]) -> None:
    """Whole or not at all; where it cannot be kept it is computed again."""
    with contextlib.suppress(OSError):
        write_whole(_place(folder), json.dumps(facts))


def files_digest(files: Sequence[Path], stop: threading.Event | None) -> str:
    """A digest of the names and contents of files, independent of their folder. Hashing releases
    Python's lock, so the files of a large model are read in parallel."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        parts = list(pool.map(lambda file: _file_digest(file, stop), files))
    whole = hashlib.blake2b(digest_size=32)
    for file, part in zip(files, parts, strict=True):
        whole.update(file.name.encode() + b"\0" + part)
    return whole.hexdigest()


def _file_digest(path: Path, stop: threading.Event | None) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            if stop is not None and stop.is_set():
                raise errors.CancelledError(f"{path}: nobody waits for its digest any more")
            digest.update(block)
    return digest.digest()
