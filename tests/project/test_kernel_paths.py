"""./run compiles the kernel paths of this machine (tools/setup.sh), and the CPU finds its own there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import quire
import source_tree

_AVX512 = "avx2 fma f16c avx512f avx512dq avx512bw avx512vl"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"


def shell(command: str, root: Path = source_tree.ROOT) -> str:
    """What a command prints behind tools/setup.sh."""
    setup = source_tree.ROOT / "tools" / "setup.sh"
    script = f"set -euo pipefail; QUIRE_ROOT={root}; source {setup}; {command}"
    return subprocess.run(
        ["bash", "-c", script], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(
    "flags,paths",
    [
        ("fpu sse2", ""),
        ("avx2 fma", ""),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512dq avx512bw", "avx2"),
        (_AVX512, "avx512"),
        (f"{_AVX512} avx512_vnni", "avx512_vnni"),
        (f"{_AVX512} avx512_bf16 amx_bf16 amx_tile", "avx512"),
        (_BF16, "avx512_vnni"),
        (f"{_BF16} amx_tile", "avx512_vnni"),
        (f"{_BF16} amx_bf16 amx_tile", "avx512_amx;avx512_vnni"),
    ],
)
def test_a_cpu_gets_the_path_that_it_chooses(tmp_path: Path, flags: str, paths: str):
    info = tmp_path / "cpuinfo"
    write_cpu(info, "GenuineIntel", flags)
    assert shell(f"kernel_paths {info}") == paths


def write_cpu(info: Path, vendor: str, flags: str) -> None:
    cpu = f"vendor_id\t: {vendor}\nflags\t\t: {flags}\nvmx flags\t: avx2 fma f16c\n"
    info.write_text(f"processor\t: 0\n{cpu}\nprocessor\t: 1\n{cpu}")


@pytest.mark.parametrize(
    "features,paths",
    [
        ("fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", "neon"),
        ("half thumb fastmult vfp edsp neon vfpv3", ""),  # 32 bits: no vectors of ours
    ],
)
def test_aarch64_gets_neon(tmp_path: Path, features: str, paths: str):
    info = tmp_path / "cpuinfo"
    cpu = f"BogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
    info.write_text(f"processor\t: 0\n{cpu}\nprocessor\t: 1\n{cpu}")
    assert shell(f"kernel_paths {info}") == paths


def test_aarch64_under_an_emulator_gets_neon():
    """Whose /proc/cpuinfo is that of x86: the build was configured for a path that it has not."""
    assert shell("uname() { echo aarch64; }; kernel_paths") == "neon"


def test_dot_products_of_bfloat16_are_chosen_where_they_are_fast(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    write_cpu(info, "AuthenticAMD", _BF16)
    assert shell(f"kernel_paths {info}") == "avx512_bf16"


def test_this_cpu_gets_the_path_that_a_build_with_all_of_them_chooses():
    named = [name.replace("avx512_vnni", "avx512") for name in shell("kernel_paths").split(";")]
    # The operating system may refuse the tiles that the CPU has.
    assert quire.kernel_paths()[0] in {name or "scalar" for name in named}


def test_machines_that_share_a_checkout_keep_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = set(shell("kernel_paths").split(";")) - {""}
    assert set(shell("run_kernel_paths", tmp_path).split(";")) - {""} == own
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "kernel_paths").write_text("avx2;avx512_amx\n")
    both = own | {"avx2", "avx512_amx"}
    assert shell("run_kernel_paths", tmp_path).split(";") == sorted(both)
    monkeypatch.setenv("QUIRE_KERNEL_PATHS", "avx512_bf16")
    assert shell("run_kernel_paths", tmp_path).split(";") == sorted(both | {"avx512_bf16"})
