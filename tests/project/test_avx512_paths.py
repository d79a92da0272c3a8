"""The AVX-512 paths: emulated for tests, and only there (docs/testing.md)."""

from __future__ import annotations

import re
from pathlib import Path

import source_tree
from test_objects import X86, output_of

_PATHS = Path("src/kernels/cpu")
_EMULATION = _PATHS / "avx512_emulation.h"
_INTRINSIC = re.compile(r"\b_mm512_\w+")


def intrinsics(text: str) -> set[str]:
    return set(_INTRINSIC.findall(re.sub(r"//.*", "", text)))


def emulated(text: str) -> set[str]:
    return set(re.findall(r"QUIRE_EMULATED\s+\w+\s+(_mm512_\w+)\(", text))


def test_every_intrinsic_of_the_paths_is_emulated_and_no_other():
    used: set[str] = set()
    for path in source_tree.cpp_files("src"):
        if path.parent == _PATHS and path.name.endswith("-inl.h"):
            used |= intrinsics(source_tree.read(path))
    assert len(used) > 30, "the paths call no intrinsics: the test looks at the wrong files"
    there = emulated(source_tree.read(_EMULATION))
    assert used - there == set(), (
        f"{_EMULATION}: add these, and say in avx512_intrinsics_test.cc what they do"
    )
    assert there - used == set(), f"{_EMULATION}: no path calls these"


def test_an_intrinsic_that_is_not_emulated_is_found():
    assert intrinsics("VF x = _mm512_new_ps(a, b);  // not _mm512_old_ps") == {"_mm512_new_ps"}
    definition = "QUIRE_EMULATED __m512 _mm512_new_ps(__m512 a) { return _mm512_old_ps(a); }"
    assert emulated(definition) == {"_mm512_new_ps"}


@X86
def test_the_library_has_the_real_instructions():
    objects = {path.name: path for path in source_tree.object_files() if path.parent.name == "cpu"}
    for name, instruction in (
        ("avx512.cc.o", r"\tvfmadd\w+\s.*%zmm"),
        ("avx512_bf16.cc.o", r"\tvdpbf16ps\s.*%zmm"),
        ("avx512_amx.cc.o", r"\ttdpbf16ps\s.*%tmm"),
        ("avx512_amx.cc.o", r"\ttdpbssd\s.*%tmm"),
        ("avx512_amx.cc.o", r"\ttdpbusd\s.*%tmm"),
    ):
        code = output_of("objdump", "-d", "--no-show-raw-insn", objects[name])
        assert re.search(instruction, code), f"{name}: emulated, or compiled without AVX-512"
