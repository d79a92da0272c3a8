# The preset aarch64, on x86-64: Debian's cross compiler, its packages of the architecture arm64, and qemu for the tests.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
# Static programs: with the cross compiler's shared libraries qemu 7.2 never starts a thread.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
# Else find_package(OpenSSL) is led to this machine's own.
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)
# Headers, of a package that is there for one architecture at a time.
set(dlpack_DIR /usr/lib/x86_64-linux-gnu/cmake/dlpack)
