"""tools/run_aarch64: what is handed to qemu, and the packages of its step. The whole of it is
`./test run-aarch64`, which takes root, a network and some minutes."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest
import source_tree

SCRIPT = source_tree.read(Path("tools/run_aarch64"))
X86_64, AARCH64 = 62, 183
BIG_ENDIAN = 2


def constant(name: str) -> bytes:
    """Bytes as `printf` and binfmt_misc read them."""
    (text,) = re.findall(rf"^{name}='(.*)'$", SCRIPT, re.MULTILINE)
    return bytes(text, "ascii").decode("unicode_escape").encode("latin-1")


def header(kind: int, machine: int, bits: int = 2, order: int = 1, system: int = 0) -> bytes:
    """The first bytes of an ELF file. `kind`: 1 an object, 2 and 3 programs, 4 a memory image."""
    return struct.pack("<4s5B7xHH", b"\x7fELF", bits, order, 1, system, 0, kind, machine)


@pytest.mark.parametrize(
    "start, is_handed_over",
    [
        (header(2, AARCH64), True),
        (header(3, AARCH64), True),
        (header(2, AARCH64, system=3), True),
        (header(3, X86_64), False),
        (header(1, AARCH64), False),
        (header(4, AARCH64), False),
        (header(3, AARCH64, bits=1), False),
        (header(3, AARCH64, order=BIG_ENDIAN), False),
        (b"#!/bin/sh\nexit 0\nexit 0\n", False),
    ],
)
def test_qemu_gets_programs_for_aarch64_alone(start: bytes, is_handed_over: bool):
    magic, mask = constant("QEMU_MAGIC"), constant("QEMU_MASK")
    assert len(magic) == len(mask) == 20
    masked = [byte & bits for byte, bits in zip(start, mask)]
    assert (masked == [byte & bits for byte, bits in zip(magic, mask)]) == is_handed_over


def test_the_step_asks_for_the_packages_that_it_calls():
    setup = source_tree.ROOT / "tools" / "setup.sh"
    script = f"QUIRE_ROOT={source_tree.ROOT}; source {setup}; command() {{ false; }}; "
    done = subprocess.run(
        ["bash", "-c", script + "missing_run_aarch64_packages"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert {"debootstrap", "g++-aarch64-linux-gnu", "qemu-user-static"} <= set(done.stdout.split())
