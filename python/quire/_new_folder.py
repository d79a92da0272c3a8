"""A folder that is there completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from quire import errors


def check_free(out: Path) -> None:
    """FileExistsError unless `out` is not there, or an empty folder that can be replaced."""
    place = _place(out)
    if os.path.lexists(place) and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(
            f"{out}: exists already and is not an empty folder; remove it or name another"
        )
    if os.path.ismount(place):
        raise _mounted(out)


def _place(out: Path) -> Path:
    """Where the folder will lie: behind links, which a folder cannot replace."""
    return Path(os.path.realpath(out))


def _mounted(out: Path) -> FileExistsError:
    return FileExistsError(
        f"{out}: is where a disk is mounted, which cannot be replaced; name a folder in it"
    )


def check_room(out: Path, wanted: int) -> None:
    """IoError if the disk that `out` will be on has fewer bytes free than `wanted`."""
    place = _place(out).parent  # the folder is made beside its place
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise errors.IoError(
            f"{out}: takes {wanted / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free on the "
            f"disk of {place}; nothing was written"
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The folder to write into: it has another name beside `out` and gets that of `out` when the
    block ends well and all files are on the disk, so that a failure, a kill or a cut of power
    leaves no half folder there. IoError names what of it cannot be written; `out` may be a link to
    its place."""
    check_free(out)
    place = _place(out)
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".part", dir=place.parent))
    try:
        yield part
        _publish(part, place, out)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            for name in (error.filename2, error.filename):  # a copy has two
                if isinstance(name, (str, Path)) and Path(name).is_relative_to(part):
                    file = out / Path(name).relative_to(part)
                    raise errors.IoError(f"{file}: cannot be written: {error.strerror}") from error
        raise


class NewFile:
    """A file to write. Nothing is buffered, so that write() alone meets a full disk; the error has
    the file's name."""

    def __init__(self, path: Path) -> None:
        self._name = os.fspath(path)
        self._file = open(path, "xb", buffering=0)

    def write(self, data: bytes | np.ndarray) -> None:
        plain = data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
        left = memoryview(plain)
        with _naming(self._name):
            while left:
                left = left[self._file.write(left) :]

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def _publish(part: Path, place: Path, out: Path) -> None:
    for path in part.rglob("*"):
        _sync(path)
    _sync(part)
    part.chmod(0o777 & ~_umask())  # mkdtemp made it private
    try:
        os.rename(part, place)  # replaces an empty folder, nothing else
    except OSError as error:
        check_free(out)  # somebody else was quicker: say it in our words
        if error.errno == errno.EBUSY:  # a folder of the same disk, which ismount does not see
            raise _mounted(out) from error
        raise
    _sync(place.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(os.fspath(path)):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
