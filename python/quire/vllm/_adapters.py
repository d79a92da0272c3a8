"""LoRA adapters: digests of their files, which are a part of the keys of what they compute.

vLLM tells name, number and path of an adapter, and all of these may come again with other files. It
may have read the files at any time since the engine started, and may read them again. So a digest
stands for what it has read only if nothing has changed since before that start: neither a file, nor
the folder, nor a link on the way to them. The time at which an inode has changed last, which no
program sets, says so. It is looked at when a request comes, and after each forward whose KV is
saved. What has changed once has no digest until the process ends, nor has a name or a number that
comes with another path: vLLM may have either version, in its own prefix cache as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

from quire import errors
from quire.identity import files_digest
from quire.vllm._base import log

__all__ = ["Adapter", "Adapters", "Facts", "facts_of", "is_unchanged"]

#: Each path with its device, inode, size, and when it was written and changed last, ns. Folders
#: above the adapter's, in which others write, have zeros for size and times.
Facts = tuple[tuple[str, int, int, int, int, int], ...]

_NS_PER_S = 1_000_000_000
# Clocks of file servers, and steps of this machine's.
_MARGIN_NS = 10 * _NS_PER_S
_LINKS_MAX = 40
_NAMES_MAX = 4096
# vLLM gives each load of an adapter a new one; about 8 MB.
_NUMBERS_MAX = 1 << 16
_BYTES_MAX = 4 << 30
# Fields of vLLM's LoRAConfig that change how many adapters there are, and not what one computes.
_COUNTS = ("max_loras", "max_cpu_loras")


def _steps(path: str) -> tuple[list[tuple[str, os.stat_result]], str]:
    """Folders and links that lead to a file or folder, and where it is itself. OSError."""
    found: list[tuple[str, os.stat_result]] = []
    whole, left = "/", path.split("/")[::-1]
    links = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            whole = os.path.dirname(whole)
            continue
        step = os.path.join(whole, part)
        facts = os.lstat(step)
        found.append((step, facts))
        if not stat.S_ISLNK(facts.st_mode):
            whole = step
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(step)
        left.extend(target.split("/")[::-1])
        if target.startswith("/"):
            whole = "/"
    return found, whole


def _walk(path: str) -> tuple[dict[str, os.stat_result], set[str]]:
    """All that an adapter's files depend on, and which of it are folders above. OSError."""
    way, folder = _steps(path)
    found = dict(way)
    above = {step for step, facts in way if stat.S_ISDIR(facts.st_mode)} - {folder}
    for name in sorted(os.listdir(folder)):
        own, place = _steps(os.path.join(folder, name))
        found.update(own)
        above |= {step for step, facts in own if stat.S_ISDIR(facts.st_mode)} - {folder, place}
    return found, above


def _facts(found: dict[str, os.stat_result], above: set[str]) -> Facts:
    return tuple(
        (path, each.st_dev, each.st_ino, 0, 0, 0)
        if path in above
        else (
            path,
            each.st_dev,
            each.st_ino,
            each.st_size,
            each.st_mtime_ns,
            each.st_ctime_ns,
        )
        for path, each in sorted(found.items())
    )


def facts_of(path: str) -> Facts:
    """What is known of an adapter's files without reading them. path: absolute.

    Raises OSError where there is no such folder.
    """
    return _facts(*_walk(path))


def is_unchanged(path: str, facts: Facts) -> bool:
    """Whether the adapter's files still are those."""
    try:
        return facts_of(path) == facts
    except OSError:
        return False


def _check_age(found: dict[str, os.stat_result], above: set[str], start_ns: int) -> None:
    """Raises BadStateError for what has changed since `start_ns`. A new entry of a folder sets both
    its times; a folder that takes the place of another one has only the second one set."""
    for path, each in found.items():
        is_same = path in above and each.st_ctime_ns == each.st_mtime_ns
        if each.st_ctime_ns >= start_ns and not is_same:
            raise errors.BadStateError(
                f"{path} has changed after the engine started, or within {_MARGIN_NS // _NS_PER_S} "
                "seconds before; vLLM may have read what was there before"
            )


def _digest(path: str, what: str, start_ns: int, stop: threading.Event) -> tuple[bytes, Facts]:
    """what: else decides what the adapter computes."""
    found, above = _walk(path)
    _check_age(found, above, start_ns)
    files = [Path(path, name) for name in sorted(os.listdir(path))]
    files = [file for file in files if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if not files or size > _BYTES_MAX:
        raise errors.BadArgumentError(
            f"{path} has {len(files)} files with {size} bytes; at least one and at most "
            f"{_BYTES_MAX} bytes are read"
        )
    content = files_digest(files, stop)
    facts = _facts(found, above)
    if not is_unchanged(path, facts):
        raise errors.BadStateError(f"{path} has changed while it was read")
    return hashlib.blake2b(f"{content}/{what}".encode(), digest_size=32).digest(), facts


class Adapter:
    """One adapter. key: its path and what else vLLM is told. One thread calls it."""

    def __init__(self, name: str, key: tuple[str, bool], read: Future[tuple[bytes, Facts]]) -> None:
        self.name, self.key = name, key
        self._read = read
        self.is_refused = False
        self._digest: bytes | None = None
        self.facts: Facts = ()

    @property
    def path(self) -> str:
        return self.key[0]

    @property
    def digest(self) -> bytes | None:
        """The digest of its files; None: it is not known, and nothing may be stored or found."""
        return None if self.is_refused else self._digest

    def wait(self, seconds: float) -> bool:
        """Whether it is settled if there is a digest. Waits so long at most."""
        if self.is_refused or self._digest is not None:
            return True
        if not wait_for([self._read], seconds).done:
            return False
        try:
            self._digest, self.facts = self._read.result()
        except (OSError, errors.QuireError) as error:
            self.refuse(str(error))
        return True

    def check(self) -> None:
        """Refuses it if its files have changed since they were read."""
        if self.digest is not None and not is_unchanged(self.path, self.facts):
            self.refuse(f"{self.path} has changed; vLLM may have either version")

    def refuse(self, why: str) -> None:
        if not self.is_refused:
            log.warning(
                "QuireConnector: nothing is stored or found for the LoRA %s until vLLM is started "
                "again: %s",
                self.name,
                why,
            )
        self.is_refused = True


def _has_place(table: dict[Any, Adapter], key: Any, most: int) -> bool:
    return key in table or len(table) < most


class Adapters:
    """All adapters of an engine. One thread calls it; another one reads their files."""

    def __init__(self, lora_config: Any = None) -> None:
        """lora_config: vLLM's; None: it has none."""
        self._start_ns = time.time_ns() - _MARGIN_NS
        fields = {
            name: str(value)
            for name, value in sorted(getattr(lora_config, "__dict__", {}).items())
            if name not in _COUNTS
        }
        self._what = json.dumps(fields, sort_keys=True)
        self._by_name: dict[str, Adapter] = {}
        self._by_number: dict[int, Adapter] = {}
        self._is_full = False
        self._stop = threading.Event()
        self._reader: ThreadPoolExecutor | None = None

    def of(self, lora: Any) -> Adapter | None:
        """The adapter of vLLM's LoRARequest; None: there are too many to be told apart. No name or
        number is forgotten for another one: vLLM may have what it stood for."""
        name, number = str(lora.lora_name), int(lora.lora_int_id)
        path = os.path.join(os.getcwd(), os.path.expanduser(str(lora.lora_path)))
        key = path, bool(getattr(lora, "is_3d_lora_weight", False))
        known = [
            each
            for each in (self._by_name.get(name), self._by_number.get(number))
            if each is not None
        ]
        if any(each.key != key for each in known):
            for each in known:
                each.refuse(f"its name or number {number} has come with {path}, too")
        known.sort(key=lambda each: not each.is_refused)  # such a one stands for both
        if not (
            _has_place(self._by_name, name, _NAMES_MAX)
            and _has_place(self._by_number, number, _NUMBERS_MAX)
        ):
            self._tell_full(name, number)
            return None
        adapter = known[0] if known else self._new(name, key)
        self._by_name[name] = self._by_number[number] = adapter
        adapter.check()
        return adapter

    def _tell_full(self, name: str, number: int) -> None:
        if not self._is_full:
            log.warning(
                "QuireConnector: nothing is stored or found for the LoRA %s with the number %d and "
                "others that are new: %d names and %d numbers of adapters are told apart, at most "
                "%d and %d; start vLLM again",
                name,
                number,
                len(self._by_name),
                len(self._by_number),
                _NAMES_MAX,
                _NUMBERS_MAX,
            )
        self._is_full = True

    def _new(self, name: str, key: tuple[str, bool]) -> Adapter:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-vllm-lora")
        what = f"{self._what}/{key[1]}"
        return Adapter(
            name, key, self._reader.submit(_digest, key[0], what, self._start_ns, self._stop)
        )

    def close(self) -> None:
        self._stop.set()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
