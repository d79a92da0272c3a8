"""The wheel: one for every Python 3, with the library and the types in it, that runs where nothing
but its dependencies are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Kept between runs, so that only what changed is compiled.
BUILD = ROOT / "build" / "wheel-test"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip does it, with the tools of this environment. With ccache the objects are those of
    `./test --once`, if the compiler has the same name. Else without the SIMD variants: most of the
    time of a build is theirs, and none of these tests looks at a kernel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "-w", str(out), "-C", f"build-dir={BUILD}"]
    if shutil.which("ccache"):
        command += ["-C", "cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache"]
        command += ["-C", "cmake.define.QUIRE_WERROR=ON"]  # the flags of the release build
    else:
        command += ["-C", "cmake.define.QUIRE_SIMD=OFF"]
    environment = {**os.environ, "CXX": "c++"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel as an installer lays them down."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_one_wheel_is_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"quire-0\.1\.0-py3-none-(?:many)?linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/WHEEL"))
        text = archive.read(metadata).decode()
    assert "Root-Is-Purelib: false" in text and re.search(r"^Tag: py3-none-", text, re.MULTILINE)


def test_it_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    modules = {
        str(path.relative_to(ROOT / "python")) for path in (ROOT / "python" / "quire").rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    built = {"quire/py.typed", "quire/libquire_ffi.so", "quire/libquire_tvm.so"}
    assert built <= names
    built.add("quire/libquire_ucx.so")  # where UCX's headers are
    page = {f"quire/serve/page/{name}" for name in ("index.html", "page.css", "page.js")}
    assert page <= names
    data = {"quire/blend/verdicts.json"}
    assert data <= names
    rest = names - modules - built - page - data
    assert all(re.match(r"quire-0\.1\.0\.dist-info/", name) for name in rest), rest
    assert any(name.endswith("licenses/LICENSE") for name in rest)
    assert any(name.endswith("licenses/NOTICES") for name in rest)


def test_the_library_is_a_file_without_libpython_or_rpath(installed: Path) -> None:
    library = installed / "quire" / "libquire_ffi.so"
    assert library.is_file() and not library.is_symlink()
    dynamic = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "libtvm_ffi.so" in dynamic and "libpython" not in dynamic
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_the_command_is_there(installed: Path) -> None:
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert re.search(r"^quire ?= ?quire\.cli:main$", entry_points.read_text(), re.MULTILINE)


def test_it_imports_and_computes_with_numpy_only(installed: Path) -> None:
    """Beside tvm-ffi, which loads the library. What else is installed here is hidden."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'gguf', 'tokenizers', 'jinja2', 'yaml', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "import numpy, quire\n"
        "cache = quire.KVCache(num_layers=1, num_qo_heads=1, qk_head_dim=16,"
        " max_num_sequences=1, token_capacity=16)\n"
        "cache.add_sequence(0)\n"
        "with cache.forward([0], [2]):\n"
        "    o = cache.attention_with_fused_qkv(0, numpy.ones((2, 3, 16), numpy.float32))\n"
        "print((o == 1).all(), quire.__version__, quire.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "QUIRE_FFI_LIBRARY"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=installed,
        env={**environment, "PYTHONPATH": str(installed)},
    )
    assert result.stdout.split() == ["True", "0.1.0", str(installed / "quire" / "__init__.py")], (
        result.stderr
    )
