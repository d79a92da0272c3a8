"""The package as a whole: names in the process, what the library needs, what the import needs."""

from __future__ import annotations

import ast
import pwd
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import quire
import tvm_ffi
from quire import _blend_verdict, _ffi
from quire._home import cache_dir
from quire.identity import model_identity
from tiny_model import TinyModel

ROOT = Path(__file__).parents[2]

# Run in a fresh interpreter: what an import of quire adds to the process-wide tables of tvm-ffi.
_NEW_NAMES = """
import tvm_ffi
functions = set(tvm_ffi.registry.list_global_func_names())
import quire
quire.version()
print("\\n".join(sorted(set(tvm_ffi.registry.list_global_func_names()) - functions)))
"""


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(quire.__file__).parents[1])},
    )
    return result.stdout


def needed_libraries(path: Path) -> list[str]:
    dynamic = subprocess.run(
        ["readelf", "-d", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", dynamic)


def test_a_user_without_a_home_is_told_what_to_set(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So runs a container under a number that its system does not know. Without QUIRE_HOME there
    are no digests to keep, and that ends nothing."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("QUIRE_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(quire.NotFoundError, match="no home folder; set QUIRE_HOME"):
        cache_dir()
    assert model_identity(tiny.directory)["revision"]
    assert _blend_verdict.find("0" * 64) is None


def test_all_functions_are_named_quire() -> None:
    names = python(_NEW_NAMES).split()
    assert names and all(name.startswith("quire.") for name in names)
    assert "quire.version" in names


def test_all_type_keys_of_the_library_are_named_quire() -> None:
    """Keys that clash pass unnoticed and corrupt memory later, so the sources are read for them."""
    sources = [*(ROOT / "src" / "ffi").glob("*.cc"), *(ROOT / "src" / "ffi").glob("*.h")]
    keys = re.findall(
        r"TVM_FFI_DECLARE_OBJECT_INFO\w*\(\s*\"([^\"]+)\"",
        "\n".join(path.read_text() for path in sources),
    )
    assert {"quire.KVCache", "quire.Engine"} <= set(keys) and len(keys) == len(set(keys))
    assert all(key.startswith("quire.") for key in keys)


def test_the_library_needs_tvm_ffi_and_the_compilers_libraries_only() -> None:
    allowed = {
        "libtvm_ffi.so",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
    }
    allowed |= {"ld-linux-x86-64.so.2", "libatomic.so.1"}
    needed = needed_libraries(_ffi.LIBRARY_PATH)
    assert "libtvm_ffi.so" in needed and set(needed) <= allowed


def test_the_library_exports_nothing_of_its_own() -> None:
    """Only template instances that other libraries must share may be seen; none of quire's
    functions."""
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", "-C", str(_ffi.LIBRARY_PATH)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not re.findall(r" [TDB] quire::.*", symbols)


def test_there_is_one_libtvm_ffi_in_the_process() -> None:
    maps = python("import quire; quire.version(); print(open('/proc/self/maps').read())")
    assert len(set(re.findall(r"\S*/libtvm_ffi\.so\S*", maps))) == 1


def test_import_and_attention_need_no_torch() -> None:
    """tvm-ffi imports torch where it is installed, so its absence is made."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'gguf', 'tvm'): sys.modules[name] = None\n"
        "import numpy, quire\n"
        "cache = quire.KVCache(num_layers=1, num_qo_heads=1, qk_head_dim=16, "
        "max_num_sequences=1, token_capacity=16)\n"
        "cache.add_sequence(0)\n"
        "with cache.forward([0], [2]):\n"
        "    o = cache.attention_with_fused_qkv(0, numpy.ones((2, 3, 16), numpy.float32))\n"
        "print((o == 1).all())"
    )
    assert python(code) == "True\n"


def test_torch_is_not_imported_though_tvm_ffi_would(tmp_path: Path) -> None:
    """tvm-ffi imports torch where it finds one: here one that says so."""
    (tmp_path / "torch.py").write_text("raise ImportError(print('torch was imported'))\n")
    setup = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert "torch was imported" in python(setup + "import tvm_ffi")
    assert python(setup + "import quire; quire.version()") == ""
    assert python(setup + "from quire.cli import main; main(['inspect', '/nowhere'])") == ""
    # It can be imported afterwards, and nothing of the way there is left.
    after = "import quire; quire.version(); path = list(sys.meta_path)\nimport torch"
    process = subprocess.run(
        [sys.executable, "-c", setup + after], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1 and "torch was imported" in process.stdout
    finders = "import quire; before = list(sys.meta_path); quire.version()\n"
    assert python(setup + finders + "print(before == sys.meta_path)") == "True\n"


def test_torch_tensors_are_taken_without_torch_in_tvm_ffi() -> None:
    code = (
        "import sys, quire\n"
        "cache = quire.KVCache(num_layers=1, num_qo_heads=1, qk_head_dim=16, "
        "max_num_sequences=1, token_capacity=16)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "cache.add_sequence(0)\n"
        "with cache.forward([0], [2]):\n"
        "    o = cache.attention_with_fused_qkv(0, torch.ones((2, 3, 16)))\n"
        "print(type(o).__module__, bool((o == 1).all()))"
    )
    assert python(code) == "torch True\n"


def test_import_loads_no_part_that_only_some_commands_need() -> None:
    loaded = python("import quire, sys; quire.KVCache; quire.Engine; print(*sys.modules)").split()
    assert "quire.engine" in loaded
    for name in ("transformers", "gguf", "tvm", "fastapi", "quire.cli", "quire.importer"):
        assert name not in loaded


def test_import_alone_loads_no_library() -> None:
    loaded = python("import quire, sys; print(*sys.modules)").split()
    assert "quire.errors" in loaded and "tvm_ffi" not in loaded and "numpy" not in loaded


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert quire.__version__ == quire.version() == project["version"]


def test_all_names_of_the_package_are_there() -> None:
    assert [name for name in quire.__all__ if not hasattr(quire, name)] == []
    assert set(quire.__all__) <= set(dir(quire))
    with pytest.raises(AttributeError, match="Enginee"):
        quire.Enginee  # noqa: B018


def test_a_type_checker_sees_all_names_of_the_package() -> None:
    tree = ast.parse(Path(quire.__file__).read_text(encoding="utf-8"))
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in for_checkers.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    loaded = quire._MODULE_OF
    assert {name: seen.get(name) for name in loaded} == loaded


def test_the_example_of_the_readme_runs(
    tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None and "MODEL_DIR" in example[1]
    names: dict[str, Any] = {}
    exec(example[1].replace("MODEL_DIR", str(tiny.directory)), names)
    first, second = names["messages"][1]["content"], str(names["piece"].finish_reason)
    assert first == names["answer"].text and capsys.readouterr().out.startswith(first)
    assert second in ("stop", "length") and names["piece"].result.usage.cached_tokens > 0


def test_kernel_paths_end_with_the_one_that_runs_everywhere() -> None:
    assert quire.kernel_paths()[-1] == "scalar"


def test_objects_go_to_other_libraries_of_tvm_ffi() -> None:
    cache = quire.KVCache(
        num_layers=1,
        num_qo_heads=1,
        qk_head_dim=16,
        max_num_sequences=1,
        token_capacity=16,
        threads=1,
    )
    held = tvm_ffi.convert([cache])[0]
    held.add_sequence(3)
    assert cache.has_sequence(3)


def test_a_missing_library_says_what_to_do(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "quire", "inspect"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "python"), "QUIRE_FFI_LIBRARY": str(tmp_path / "no.so")},
    )
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "no.so is missing" in result.stderr and "./run" in result.stderr


def test_an_open_cache_at_the_end_of_the_interpreter_is_closed() -> None:
    code = (
        "import quire\n"
        "cache = quire.KVCache(num_layers=1, num_qo_heads=1, qk_head_dim=16, max_num_sequences=1,"
        " token_capacity=16, threads=2)\n"
        "print('done')"
    )
    assert python(code) == "done\n"
