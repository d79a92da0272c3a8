# Sourced by ./run and ./test: brings a Debian 12 machine and this checkout to the point where Quire is built. Every function
# does only what is missing, so that a second call starts at once. Messages go to standard error; what the tools print
# goes to build/setup.log, which holds the last call, and is shown only when one of them fails.

QUIRE_VENV="$QUIRE_ROOT/.venv"
QUIRE_PYTHON="$QUIRE_VENV/bin/python"
QUIRE_LOG="$QUIRE_ROOT/build/setup.log"
# The imported embedded model and other caches stay in the checkout, unless the user has a place for them.
export QUIRE_HOME="${QUIRE_HOME:-$QUIRE_ROOT/.quire}"
CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
export CMAKE_BUILD_PARALLEL_LEVEL
# The cache of objects: for all build folders alike, and for what includes the precompiled headers of the tests.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$QUIRE_ROOT}" CCACHE_SLOPPINESS="${CCACHE_SLOPPINESS:-pch_defines,time_macros}"

say() { printf 'quire: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# quietly COMMAND...: output into the log; on failure the end of it is shown.
quietly() {
  local begin
  printf '\n$ %s\n' "$*" >>"$QUIRE_LOG"
  begin=$(wc -l <"$QUIRE_LOG")
  "$@" >>"$QUIRE_LOG" 2>&1 && return
  local code=$?
  tail -n "+$begin" "$QUIRE_LOG" | tail -n 60 >&2
  say "failed ($code): $*; the whole output is in $QUIRE_LOG"
  return $code
}

# lock_setup, unlock_setup: two calls at the same time set up one after the other.
lock_setup() {
  mkdir -p "$QUIRE_ROOT/build"
  exec 9>"$QUIRE_ROOT/build/.setup.lock"
  flock -n 9 || { say "another call sets up this checkout; waiting for it"; flock 9; }
  : >"$QUIRE_LOG"
}
unlock_setup() { exec 9>&-; }

# ---- System packages

python_command() { printf '%s' "${PYTHON:-python3}"; }

cmake_is_new_enough() {
  command -v cmake >/dev/null &&
    [[ $(printf '%s\n' 3.25 "$(cmake --version | sed -n '1s/[^0-9]*//p')" | sort -V | head -n 1) == 3.25 ]]
}

# What a header search of the compiler does not find, by the package that has it.
missing_headers() {
  g++ -E -P -x c++ - <<'CODE'
#if !__has_include(<nlohmann/json.hpp>)
nlohmann-json3-dev
#endif
#if !__has_include(<dlpack/dlpack.h>)
libdlpack-dev
#endif
#if !__has_include(<liburing.h>)
liburing-dev
#endif
#if !__has_include(<openssl/ssl.h>)
libssl-dev
#endif
CODE
}

missing_run_packages() {
  if command -v g++ >/dev/null; then missing_headers; else
    printf '%s\n' build-essential nlohmann-json3-dev libdlpack-dev liburing-dev libssl-dev
  fi
  cmake_is_new_enough || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  "$(python_command)" -c 'import ensurepip, venv' 2>/dev/null || printf '%s\n' python3 python3-venv
}

missing_test_packages() {
  missing_run_packages
  [[ -e /usr/include/gtest/gtest.h ]] || echo libgtest-dev
  [[ -e /usr/include/hiredis/hiredis.h ]] || echo libhiredis-dev  # a client that tests and benchmarks compare with
  [[ -e /usr/include/ucp/api/ucp.h ]] || echo libucx-dev  # connections over UCX; nothing else needs it
  command -v clang++-14 >/dev/null || echo clang-14
  command -v clang-format-14 >/dev/null || echo clang-format-14
  compgen -G '/usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a' >/dev/null || echo libclang-rt-14-dev
  command -v git >/dev/null || echo git
  command -v ccache >/dev/null || echo ccache  # the wheel and the tests of other builds take the release build's objects
  command -v mold >/dev/null || echo mold      # a hundred test programs are linked
  command -v redis-server >/dev/null || echo redis-server
  [[ -x /usr/sbin/haproxy ]] || echo haproxy     # in front of several servers
  command -v openssl >/dev/null || echo openssl  # certificates for tests of TLS
  command -v chromium >/dev/null || echo chromium  # uses the page of `quire serve`
}

# Programs that hurt servers, and one that reads metrics: tests without them are skipped.
missing_soak_packages() {
  missing_test_packages
  command -v slowhttptest >/dev/null || echo slowhttptest
  command -v wrk >/dev/null || echo wrk
  command -v promtool >/dev/null || echo prometheus
}

# The step aarch64 of ./test: a compiler for it, libraries for it, and what runs its programs.
missing_aarch64_packages() {
  missing_test_packages
  command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
  command -v qemu-aarch64 >/dev/null || echo qemu-user
  [[ -e /usr/lib/aarch64-linux-gnu/libcrypto.a ]] || echo libssl-dev:arm64
  [[ -e /usr/lib/aarch64-linux-gnu/libgtest.a ]] || echo libgtest-dev:arm64
}

# The step run-aarch64 of ./test: a Debian for arm64, and what runs its programs.
missing_run_aarch64_packages() {
  missing_test_packages
  command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
  command -v qemu-aarch64-static >/dev/null || echo qemu-user-static
  command -v debootstrap >/dev/null || echo debootstrap
}

# The step numa of ./test: a machine with two NUMA nodes.
missing_numa_packages() {
  missing_test_packages
  command -v qemu-system-x86_64 >/dev/null || echo qemu-system-x86
  command -v busybox >/dev/null || echo busybox-static
}

missing_docs_packages() {
  missing_run_packages
  command -v doxygen >/dev/null || echo doxygen
}

# install_system run|test|soak|aarch64|run_aarch64|numa|docs
install_system() {
  local packages as_root=()
  mapfile -t packages < <("missing_$1_packages" | sort -u)
  [[ ${#packages[@]} -eq 0 ]] && return
  command -v apt-get >/dev/null ||
    die "missing: ${packages[*]} (names of Debian 12 packages); install what your system calls them"
  if [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null || die "missing packages; as root: apt-get install ${packages[*]}"
    as_root=(sudo)
  fi
  say "installing system packages: ${packages[*]}"
  [[ "${packages[*]} " != *":arm64 "* ]] || quietly "${as_root[@]}" dpkg --add-architecture arm64
  quietly "${as_root[@]}" apt-get update
  quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
  mapfile -t packages < <("missing_$1_packages" | sort -u)
  [[ ${#packages[@]} -eq 0 ]] || die "still missing after their installation: ${packages[*]}"
}

# ---- The virtual environment

python_version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'; }

create_venv() {
  local python version
  python="$(python_command)"
  version="$(python_version "$python")"
  [[ $(printf '%s\n' 3.11 "$version" | sort -V | head -n 1) == 3.11 ]] ||
    die "$python is Python $version; Quire needs 3.11 or newer: set PYTHON to one"
  [[ ! -L $QUIRE_VENV ]] || die "$QUIRE_VENV is a link, and what it leads to would be emptied; remove the link"
  say "making the virtual environment .venv (Python $version)"
  quietly "$python" -m venv --clear "$QUIRE_VENV"
  # `import quire` in this environment is the checkout's.
  echo "$QUIRE_ROOT/python" >"$("$QUIRE_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire.pth"
}

pip_install() {
  quietly env PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    "$QUIRE_PYTHON" -m pip install --no-input "$@"
}

# What the stamp of a list says: for which list and place it was installed.
requirements_stamp() { printf '%s %s' "$(sha256sum <"$QUIRE_ROOT/requirements/$1.txt")" "$QUIRE_VENV"; }

# requirements_are_installed run|test: also not when the folder was moved or the interpreter has gone.
requirements_are_installed() {
  local stamp="$QUIRE_VENV/quire-$1.stamp"
  [[ -f $stamp && $(<"$stamp") == "$(requirements_stamp "$1")" ]] && "$QUIRE_PYTHON" -c '' 2>/dev/null
}

install_requirements() {
  requirements_are_installed "$1" && return
  say "installing the Python packages of requirements/$1.txt"
  if [[ $1 == run ]]; then
    pip_install --no-deps -r "$QUIRE_ROOT/requirements/run.txt"
  else
    # Most modules of torch and transformers are never imported: those that are get compiled then.
    pip_install --no-compile -c "$QUIRE_ROOT/requirements/run.txt" -r "$QUIRE_ROOT/requirements/$1.txt"
  fi
  requirements_stamp "$1" >"$QUIRE_VENV/quire-$1.stamp"
}

# install_python run|test: a changed run.txt starts from an empty environment, so that nothing of the old one stays.
install_python() {
  requirements_are_installed run || create_venv
  install_requirements run
  [[ $1 == run ]] || install_requirements "$1"
}

# ---- The build

configure_stamp() {
  printf '%s %s %s %s' "$(sha256sum <"$QUIRE_ROOT/CMakePresets.json")" "$QUIRE_ROOT" "$*" "${QUIRE_BUILD_ONCE:-}"
}

# is_configured PRESET [cmake arguments]: ninja itself watches the CMakeLists.txt, but not the presets.
is_configured() {
  local folder="$QUIRE_ROOT/build/$1"
  [[ -f $folder/build.ninja && -f $folder/quire.stamp && $(<"$folder/quire.stamp") == "$(configure_stamp "$@")" ]]
}

# configure PRESET [cmake arguments]: with a cache of objects and a fast linker where the machine has them; with QUIRE_BUILD_ONCE
# a folder of sources is one file.
configure() {
  local folder="$QUIRE_ROOT/build/$1" tools=()
  is_configured "$@" && return
  command -v ccache >/dev/null && tools=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  # The cross compiler finds no linker but its own.
  [[ $1 != aarch64 ]] && command -v mold >/dev/null && tools+=(-DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=mold)
  [[ -n ${QUIRE_BUILD_ONCE:-} ]] && tools+=(-DQUIRE_UNITY=ON)
  rm -rf "$folder"  # a cache of another place or compiler is not to be trusted
  (cd "$QUIRE_ROOT" && quietly cmake --preset "$@" "${tools[@]}")
  configure_stamp "$@" >"$folder/quire.stamp"
}

# kernel_paths [FILE]: the path of src/kernels that dispatch.cc chooses on the CPU of FILE (/proc/cpuinfo); also the next one, with a
# semicolon, where the operating system may refuse the first. All paths are half of the time that the library takes to compile.
kernel_paths() {
  local flags path=""
  # Under an emulator the file is that of the machine around it; each aarch64 has NEON.
  if [[ $# -eq 0 && $(uname -m) == aarch64 ]]; then printf neon; return; fi
  if grep -q '^Features.* asimd' "${1:-/proc/cpuinfo}"; then path=neon; fi  # aarch64
  flags=" $(sed -n 's/^flags[^:]*://p;T;q' "${1:-/proc/cpuinfo}") "
  has() { local flag; for flag in "$@"; do [[ $flags == *" $flag "* ]] || return 1; done; }
  is_intel() { grep -q '^vendor_id.*GenuineIntel' "${1:-/proc/cpuinfo}"; }
  if has avx2 fma f16c; then
    path=avx2
    if has avx512f avx512dq avx512bw avx512vl; then
      path=avx512
      if has avx512_vnni; then path=avx512_vnni; fi
      if has avx512_vnni avx512_bf16 && ! is_intel "$@"; then path=avx512_bf16; fi
      if has avx512_vnni avx512_bf16 amx_bf16 amx_tile; then path="avx512_amx;$path"; fi
    fi
  fi
  printf '%s' "$path"
}

# run_kernel_paths: that of every CPU on which ./run was called in this checkout, so that machines that share it do not build it in
# turns, and those in QUIRE_KERNEL_PATHS.
run_kernel_paths() {
  { cat "$QUIRE_ROOT/build/kernel_paths" 2>/dev/null || true; echo "$(kernel_paths);${QUIRE_KERNEL_PATHS:-}"; } |
    tr ';' '\n' | sed '/^$/d' | sort -u | paste -sd ';'
}

RELEASE=(release -DQUIRE_PYTHON=ON "-DPython_EXECUTABLE=$QUIRE_PYTHON")
configure_release() { configure "${RELEASE[@]}"; }
# The library alone, in half the time: its sources are compiled a folder at a time (QUIRE_UNITY).
RUN=(run -DQUIRE_PYTHON=ON "-DPython_EXECUTABLE=$QUIRE_PYTHON")

# build PRESET [targets]
build() {
  local preset="$1"
  shift
  (cd "$QUIRE_ROOT" && quietly cmake --build --preset "$preset" ${1:+--target "$@"})
}

# build_shown PRESET TARGET: with the number of steps that are done, on a terminal in one line.
build_shown() {
  local status=0 line end='\n'
  [[ -t 2 ]] && end='\r'
  printf '\n$ cmake --build --preset %s --target %s\n' "$1" "$2" >>"$QUIRE_LOG"
  (cd "$QUIRE_ROOT" && cmake --build --preset "$1" --target "$2" 2>&1) | tee -a "$QUIRE_LOG" | while read -r line; do
    [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
    # Where lines stay, every eighth is enough.
    [[ -t 2 || $((BASH_REMATCH[1] % 8)) -eq 0 || ${BASH_REMATCH[1]} == "${BASH_REMATCH[2]}" ]] || continue
    printf "quire: building: %s of %s steps$end" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" >&2
  done || status=$?
  [[ -t 2 ]] && printf '\n' >&2
  [[ $status -eq 0 ]] && return
  tail -n 60 "$QUIRE_LOG" >&2
  say "failed ($status): the build; the whole output is in $QUIRE_LOG"
  return $status
}

# setup_run: everything up to libquire_ffi.so. Where nothing is to be built, the system's packages are not looked for.
setup_run() {
  lock_setup
  RUN+=("-DQUIRE_KERNEL_PATHS=$(run_kernel_paths)")
  if ! requirements_are_installed run || ! is_configured "${RUN[@]}"; then
    install_system run
    install_python run
    configure "${RUN[@]}"
    run_kernel_paths >"$QUIRE_ROOT/build/kernel_paths"
  fi
  if ! ninja -C "$QUIRE_ROOT/build/run" -n quire_ffi 2>/dev/null | grep -q 'no work to do'; then
    install_system run
    say "building Quire (some minutes the first time)"
    build_shown run quire_ffi
  fi
  unlock_setup
}
