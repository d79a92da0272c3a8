"""A folder that is there completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire import errors


def check_free(out: Path) -> None:
    """FileExistsError unless `out` is not there, or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"{out}: exists already and is not an empty folder; remove it or name another"
        )


def check_room(out: Path, wanted: int) -> None:
    """IoError if the disk that `out` will be on has fewer bytes free than `wanted`."""
    place = out.absolute()
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
    leaves no half folder there."""
    check_free(out)
    out = Path(os.path.abspath(out))  # "." has a name and a parent, too
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    try:
        yield part
        _publish(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _publish(part: Path, out: Path) -> None:
    for path in part.rglob("*"):
        _sync(path)
    _sync(part)
    part.chmod(0o777 & ~_umask())  # mkdtemp made it private
    try:
        os.rename(part, out)  # replaces an empty folder, nothing else
    except OSError:
        check_free(out)  # somebody else was quicker: say it in our words
        raise
    _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
