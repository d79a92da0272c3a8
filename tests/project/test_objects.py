"""What the compiler made of the tree: instructions, calls, globals and exported names. Read from the
release build; each rule is also shown an object that breaks it."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
import source_tree

X86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="looks for x86 instructions"
)


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def layer_of(path: Path) -> str:
    """build/release/src/kv/CMakeFiles/... -> kv"""
    return path.relative_to(source_tree.RELEASE / "src").parts[0]


def of_object(allowed: dict[tuple[str, str], set[str]], path: Path) -> set[str]:
    """What an object may have. A folder that is compiled as one file (./test --once) may have what any
    object of its layer may."""
    layer = layer_of(path)
    if not path.name.startswith("unity_"):
        return allowed.get((layer, path.name), set())
    return set().union(*(names for (of, _), names in allowed.items() if of == layer))


# ---- Instruction sets: wide instructions stand only where the CPU was asked first ----------------

# Registers of more than 128 bits, and what the first CPUs of x86-64 lack: encodings of AVX (their
# names begin with v; -march=native gives them where registers stay narrow, too), bit operations.
_WIDE = re.compile(
    r"%[yz]mm\d|\{%k\d\}"
    r"|\t(?:v[a-z]|(?:popcnt|lzcnt|mulx|andn|bzhi|pdep|pext|sarx|shlx|shrx|rorx|crc32)[bwlq]?\s)"
)
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
# Functions that are called only when the CPU was asked, by how their names begin: they are a file's own.
_ASKED_FIRST = {
    ("base", "checksum.cc.o"): {"_ZN5quire12_GLOBAL__N_111Crc32cSse42ILb"},
    ("blend", "rotation_loops.cc.o"): {
        "_ZN5quire10avx2_loops12_GLOBAL__N_1",
        "_ZN5quire12avx512_loops12_GLOBAL__N_1",
    },
}


def wide_functions(path: Path) -> list[str]:
    """Mangled names of the functions of an object that some CPUs of x86-64 cannot run."""
    names: dict[str, None] = {}
    current = ""
    for line in output_of("objdump", "-d", "--no-show-raw-insn", path).splitlines():
        if match := _FUNCTION.match(line):
            current = match[1]
        elif _WIDE.search(line):
            names[current] = None
    return list(names)


def weak_symbols(path: Path) -> set[str]:
    """Functions of which the linker keeps any one copy."""
    lines = output_of("nm", "--defined-only", path).splitlines()
    return {
        fields[2] for line in lines if len(fields := line.split()) == 3 and fields[1] in "WwVvu"
    }


def shared_wide_functions(path: Path) -> list[str]:
    return sorted(weak_symbols(path) & set(wide_functions(path)))


@X86
def test_wide_instructions_stay_in_the_paths():
    found, wide_count = [], 0
    for path in source_tree.object_files():
        if "kernels/CMakeFiles/quire_kernels.dir/cpu/" in str(path):
            wide_count += len(wide_functions(path))
            found += [
                f"{path.name}: {name} is compiled wide, and the linker may keep this copy for everybody; include its "
                "header before the target region, or put it into the path's namespace"
                for name in shared_wide_functions(path)
            ]
            continue
        asked_first = of_object(_ASKED_FIRST, path)
        found += [
            f"{path.name}: {name} has instructions that not every CPU knows; only src/kernels/cpu may, behind dispatch"
            for name in wide_functions(path)
            if not name.startswith(tuple(asked_first))
        ]
    assert not found, "\n".join(found)
    assert wide_count > 10, "no wide kernels were found: the test looks at the wrong files"


_WIDENING_FLAG = re.compile(
    r"-m(?:arch|tune|avx|fma|sse|bmi|cpu)[\w.=-]*|-ffast-math|-Ofast|-ffp-contract=(?!off)"
)


def test_no_build_file_widens_a_whole_source():
    found = []
    for path in source_tree.files():
        if path.name != "CMakeLists.txt" and path.suffix not in (".cmake", ".toml"):
            continue
        for flag in _WIDENING_FLAG.findall(source_tree.read(path)):
            found.append(
                f"{path}: {flag}: an inline function compiled so may be the copy that the linker keeps, and fast-math "
                "changes bits; use a target region in src/kernels/cpu"
            )
    assert not found, "\n".join(found)


# ---- Calls: a library is a good guest -----------------------------------------------------------

# Mangled name -> why not.
_BANNED_CALLS = {
    r"abort|_?exit|_Exit|quick_exit": "ends the host's process",
    r"(?:__)?v?[fd]?printf(?:_chk)?|f?puts|putchar|fwrite|perror|stdout|stderr"
    r"|_ZSt4(?:cout|cerr|clog)": "writes where the host did not ask",
    r"u?sleep|nanosleep|clock_nanosleep": "sleeps",
    r"s?rand|random|[dl]rand48|_ZNSt13random_device.*": "cannot be repeated; use base/random.h",
    r"time|clock|gettimeofday|clock_gettime|_ZNSt6chrono.*3nowEv": "reads a clock",
    r"getenv|secure_getenv|setenv|putenv|unsetenv": "depends on the environment",
    r"system|popen|fork|vfork|exec[vl]\w*|dlopen": "starts or loads other programs",
    r"signal|sigaction|setlocale|_ZNSt6locale6global.*|fesetround": "changes the whole process",
    r"__cxa_throw": "throws; outcomes are Status and Result, only src/ffi throws",
}
# (layer, object) -> names that it may use, and why.
_ALLOWED_CALLS = {
    ("base", "check.cc.o"): {"abort", "fprintf", "stderr"},  # a defect, without a handler
    # A defect where nothing can be thrown: the process ends after it.
    ("ffi", "errors.cc.o"): {"fprintf", "stderr"},
    ("base", "clock.cc.o"): {
        "_ZNSt6chrono3_V212steady_clock3nowEv",
        "_ZNSt6chrono3_V212system_clock3nowEv",
    },  # the one place; others are given a Clock
    ("base", "json.cc.o"): {"__cxa_throw"},  # inside nlohmann-json, whose SAX parser never does
    ("chunk", "passport.cc.o"): {"__cxa_throw"},  # the same
    ("engine", "draft_vocabulary.cc.o"): {"__cxa_throw"},  # the same: its iterators over an object
    ("model", "quantisation_config.cc.o"): {"__cxa_throw"},  # the same: what was parsed is UTF-8
    ("model", "safetensors_writer.cc.o"): {"__cxa_throw"},  # the same: it writes valid names
    ("buffers", "lookup_buffer.cc.o"): {
        "_ZNSt6chrono3_V212steady_clock3nowEv"
    },  # how long a call may wait
    ("kernels", "dispatch.cc.o"): {"getenv"},  # QUIRE_KERNELS
    ("transfer", "ucx_channel.cc.o"): {"dlopen"},  # libquire_ucx.so, when it is asked for
    ("transfer", "ucx_library.cc.o"): {"getenv"},  # whether UCX_NET_DEVICES is set
}
# Of all objects of a layer.
_ALLOWED_IN_LAYER = {"ffi": {"__cxa_throw", "_ZSt4cerr"}}  # the edge; tvm-ffi's headers print


def banned_calls(path: Path) -> dict[str, str]:
    """Undefined names of an object that are banned, with the reason."""
    found = {}
    for line in output_of("nm", "--undefined-only", path).splitlines():
        name = line.split()[-1].split("@")[0]
        for pattern, why in _BANNED_CALLS.items():
            if re.fullmatch(pattern, name):
                found[name] = why
    return found


def test_the_library_is_a_good_guest():
    found = []
    for path in source_tree.object_files():
        layer = layer_of(path)
        allowed = of_object(_ALLOWED_CALLS, path) | _ALLOWED_IN_LAYER.get(layer, set())
        found += [
            f"src/{layer}: {path.name}: {name} {why}"
            for name, why in banned_calls(path).items()
            if name not in allowed
        ]
    assert not found, "\n".join(found)


# The operator new of failure tests, in no library.
_REFUSES_FOR_TESTS = Path("src/base/testing/replaced_new.cc")


def test_only_the_binding_says_throw():
    """The compiler drops a throw that cannot be reached, and templates of the standard library
    throw for us: this is about the text."""
    found = []
    for path in source_tree.cpp_files("src", "include"):
        if layer_in_source(path) == "ffi" or path.name.endswith("_test.cc"):
            continue
        if path == _REFUSES_FOR_TESTS:
            continue
        code = re.sub(r"//.*", "", source_tree.read(path))
        if re.search(r"\bthrow\b\s*[^;\s]", code):  # "throw;" passes std::bad_alloc on
            found.append(f"{path}: return a Status; only src/ffi throws")
    assert not found, "\n".join(found)


def layer_in_source(path: Path) -> str:
    return path.parts[1]


# ---- Globals: none that lasts and changes --------------------------------------------------------

_ALLOWED_GLOBALS = re.compile(
    r"quire::\(anonymous namespace\)::PathsOfCpu\(\)::paths|quire::(?:Stream|Weight)PrefetchOfCpu\((?:bool, bool)?\)::advice"  # what the CPU can: asked once
    r"|quire::\(anonymous namespace\)::HasSse42\(\)::has"
    r"|quire::\(anonymous namespace\)::kNoDetail"  # const; std::string keeps it out of .rodata
    r"|quire::\(anonymous namespace\)::handler_in_place"  # of failed checks, given by the host
    r"|quire::ffi::(?:\(anonymous namespace\)::)?\w+::_\w*(?:\(\)::tindex)?"  # tvm-ffi's type indices
    r"|quire::ffi::\(anonymous namespace\)::check_scopes"  # of a thread: how deep it is in calls
    r"|std::__ioinit|std::__detail::__waiter_pool_base::.*|TVMFFI\w*|tvm::ffi::.*"
)


def mutable_globals(path: Path) -> list[str]:
    found = []
    for line in output_of("nm", "-C", "--format=sysv", path).splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 7 or not re.match(r"\.(?:data|bss|tdata|tbss)\b", fields[6]):
            continue
        # Tables of pointers that the loader fills are read-only from then on; DW.ref.* are those of
        # exception handling.
        if not fields[6].startswith(".data.rel.ro") and not fields[0].startswith("DW.ref."):
            found.append(fields[0].removeprefix("guard variable for "))
    return found


def test_the_library_keeps_no_global_state():
    found = [
        f"{path.name}: {name} is a global that can change: two users of the library in one process would meet in it; "
        "give it an owner"
        for path in source_tree.object_files()
        for name in mutable_globals(path)
        if not _ALLOWED_GLOBALS.fullmatch(name)
    ]
    assert not found, "\n".join(found)


# ---- Exported names ------------------------------------------------------------------------------


def stray_exports(path: Path) -> list[str]:
    """Names that a shared library shows besides the template instances that it must share."""
    found = []
    for line in output_of("nm", "-D", "--defined-only", path).splitlines():
        kind, name = line.split()[-2:]
        if kind not in "WVu" or "5quire" in name:
            found.append(f"{kind} {name}")
    return found


def test_the_binding_exports_nothing_of_its_own():
    libraries = sorted(source_tree.RELEASE.glob("src/ffi/libquire_*.so"))
    assert libraries, f"{source_tree.RELEASE} has no binding: ./test release"
    for path in libraries:
        assert not stray_exports(path), (
            f"{path.name}: hide these (static, an unnamed namespace, visibility): another library in the process "
            "could take them for its own"
        )


# ---- The rules see what they are for -------------------------------------------------------------


def compiled(folder: Path, text: str, *flags: str) -> Path:
    made = folder / "broken.o"
    command = ["g++", "-std=c++20", "-O2", "-fPIC", *flags, "-x", "c++", "-c", "-", "-o", made]
    subprocess.run(command, input=text, check=True, text=True)
    return made


_SUM = (
    "float f(const float* a, const float* b, float c) "
    "{ for (int i = 0; i < 64; ++i) c = a[i] * b[i] + c; return c; }"
)


@X86
@pytest.mark.parametrize("flag", ["-mavx", "-mavx512f", "-mfma"])
def test_a_widened_source_is_noticed(tmp_path: Path, flag: str):
    assert wide_functions(compiled(tmp_path, _SUM, flag)) == ["_Z1fPKfS0_f"]
    assert not wide_functions(compiled(tmp_path, _SUM))


@X86
def test_a_wide_bit_operation_is_noticed(tmp_path: Path):
    text = "int f(unsigned x) { return __builtin_popcount(x); }"
    assert wide_functions(compiled(tmp_path, text, "-mpopcnt")) == ["_Z1fj"]


@X86
def test_a_shared_wide_function_is_noticed(tmp_path: Path):
    text = "inline __attribute__((noinline)) " + _SUM + "float g(float* a) { return f(a, a, 0); }"
    assert shared_wide_functions(compiled(tmp_path, text, "-mavx")) == ["_Z1fPKfS0_f"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("#include <cstdlib>\nvoid f() { std::abort(); }", "abort"),
        ("#include <cstdlib>\nvoid f() { std::exit(1); }", "exit"),
        ('#include <cstdio>\nvoid f(int x) { std::printf("%d", x); }', "printf"),
        ("#include <iostream>\nvoid f(int x) { std::cout << x; }", "_ZSt4cout"),
        ("#include <cstdlib>\nint f() { return std::rand(); }", "rand"),
        ("#include <random>\nint f() { return std::random_device()(); }", "_ZNSt13random_device"),
        ("#include <chrono>\nlong f() { return std::chrono::steady_clock::now().time_since_epoch().count(); }", "now"),
        ('#include <cstdlib>\nchar* f() { return std::getenv("X"); }', "getenv"),
        ("#include <thread>\nvoid f(int n) { std::this_thread::sleep_for(std::chrono::seconds(n)); }", "sleep"),
        ("void f(int x) { if (x) throw x; }", "__cxa_throw"),
    ],
)
def test_a_banned_call_is_noticed(tmp_path: Path, text: str, name: str):
    assert any(name in found for found in banned_calls(compiled(tmp_path, text)))


def test_a_plain_object_breaks_no_rule(tmp_path: Path):
    text = "#include <string>\nnamespace { const int kTable[] = {1, 2}; }\n" + (
        "std::string f(int i) { return std::to_string(kTable[i]); }"
    )
    made = compiled(tmp_path, text)
    assert not banned_calls(made) and not mutable_globals(made)


@pytest.mark.parametrize(
    "text",
    [
        "int counter = 1; int f() { return ++counter; }",
        "static int counter; int f() { return ++counter; }",
        "int f() { static int counter = 3; return ++counter; }",
        "thread_local int counter; int f() { return ++counter; }",
    ],
)
def test_a_global_that_can_change_is_noticed(tmp_path: Path, text: str):
    assert [name for name in mutable_globals(compiled(tmp_path, text)) if "counter" in name]


@pytest.mark.parametrize(
    "text",
    [
        'extern "C" int helper() { return 1; }',
        "namespace quire { int Helper() { return 1; } }",
        "namespace quire { template <typename T> struct S { virtual ~S() {} }; template struct S<int>; }",
        "int table[3];",
    ],
)
def test_a_stray_export_is_noticed(tmp_path: Path, text: str):
    library = tmp_path / "broken.so"

    def link(*flags: str) -> Path:
        subprocess.run(
            ["g++", "-shared", compiled(tmp_path, text, *flags), "-o", library], check=True
        )
        return library

    assert stray_exports(link())
    if "template" not in text:
        assert not stray_exports(link("-fvisibility=hidden"))



def test_the_objects_are_those_of_all_layers():
    layers = {layer_of(path) for path in source_tree.object_files()}
    folders = {path.parts[1] for path in source_tree.cpp_files("src")}
    assert folders - layers == set(), f"{source_tree.RELEASE} lacks {folders - layers}: ./test release"
