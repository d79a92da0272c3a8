# Functions that every folder of src uses, so that flags and rules stand in one place.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Flags for our own code only: a project that adds Quire as a subdirectory keeps its own.
# -ffp-contract=off is part of the promise of exactness (docs/exactness.md): an fma is one only where it is written.
function(quire_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wswitch-enum
                                           $<$<BOOL:${QUIRE_WERROR}>:-Werror>
                                           -ffp-contract=off -fno-math-errno
    # GCC 12 reports overlapping copies inside operator+(const char*, std::string&&), which are none (its bug 105651).
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON
                                             CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  if(QUIRE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${QUIRE_SANITIZE} -fno-omit-frame-pointer
                                             -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${QUIRE_SANITIZE})
  endif()
endfunction()

# quire_layer(NAME [FUZZED] [ARITHMETIC] SOURCES... DEPENDS layers...): the object library of one folder of src; src/kv/pages is kv_pages. FUZZED: fuzz
# targets are guided by which of its code they reach. ARITHMETIC: its loops over numbers gain from -O3, as do the plans of kv, which
# are timed in microseconds. The others decide, wait and copy; they compile faster with -O2.
function(quire_layer name)
  cmake_parse_arguments(ARG "FUZZED;ARITHMETIC" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(quire_${name} OBJECT ${ARG_SOURCES})
  quire_compile_options(quire_${name})
  if(NOT ARG_ARITHMETIC AND NOT name MATCHES "^kv_")
    target_compile_options(quire_${name} PRIVATE $<$<CONFIG:Release>:-O2>)
  endif()
  if(QUIRE_FUZZ AND ARG_FUZZED)
    target_compile_options(quire_${name} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
  target_include_directories(quire_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  foreach(layer ${ARG_DEPENDS})
    target_link_libraries(quire_${name} PUBLIC quire_${layer})
  endforeach()
  if(QUIRE_UNITY)
    # 0: the whole folder. Its sources are written so that their local names differ.
    set_target_properties(quire_${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND name MATCHES "^kv_")
      # GCC bounds how much inlining may add to a file, which is a whole folder here: planning 256 sequences took 1.7 times as
      # long without this.
      target_compile_options(quire_${name} PRIVATE --param=inline-unit-growth=400 --param=large-unit-insns=200000)
    endif()
  endif()
  set_property(GLOBAL APPEND PROPERTY QUIRE_LAYERS quire_${name})
endfunction()

# quire_layer_libraries(NAME libraries...): what the folder links, and with it whoever links Quire.
function(quire_layer_libraries name)
  target_link_libraries(quire_${name} PRIVATE ${ARGN})
  set_property(GLOBAL APPEND PROPERTY QUIRE_LIBRARIES ${ARGN})
endfunction()

# What tests are made of. Undefined behaviour is looked for in the code under test; the checks in tests' own code would take
# a third of the time of the sanitized build.
function(quire_test_options target)
  quire_compile_options(${target})
  if(QUIRE_SANITIZE MATCHES undefined)
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src")
endfunction()

# quire_test_support(NAME SOURCES...): what several test programs share, compiled once. Give it to quire_test as DEPENDS.
function(quire_test_support name)
  if(NOT QUIRE_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  quire_test_options(${name})
  target_link_libraries(${name} PUBLIC ${ARG_DEPENDS} quire GTest::gtest)
endfunction()

# What test programs are compiled with. They run each line of theirs a few times: a third of their compile time is better saved,
# and under a sanitizer a third again; the library and what tests share are compiled as everywhere.
function(quire_test_program name)
  quire_test_options(${name})
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  if(QUIRE_SANITIZE MATCHES address)
    target_compile_options(${name} PRIVATE -O0)
  endif()
endfunction()

# The headers of others that most tests include, compiled once for all of them.
function(quire_test_headers)
  add_executable(quire_test_headers EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/cmake/test_headers.cc")
  quire_test_program(quire_test_headers)
  target_link_libraries(quire_test_headers PRIVATE GTest::gtest)
  target_precompile_headers(quire_test_headers PRIVATE
    <algorithm> <array> <atomic> <chrono> <cstring> <filesystem> <fstream> <functional> <map> <memory> <mutex> <numeric>
    <optional> <random> <set> <span> <sstream> <string> <string_view> <thread> <unordered_map> <utility> <variant> <vector>
    <gtest/gtest.h> <nlohmann/json.hpp>)
endfunction()

# quire_test(NAME [REFUSES_ALLOCATIONS | REFUSES_EACH_ALLOCATION] SOURCES... [DEPENDS targets...] [ENVIRONMENT NAME=value...]): one GoogleTest program;
# cases are registered with ctest one by one. REFUSES_ALLOCATIONS: its operator new can be made to fail;
# REFUSES_EACH_ALLOCATION: by RefuseEach of base/testing/refuse_each.h.
function(quire_test name)
  if(NOT QUIRE_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "REFUSES_ALLOCATIONS;REFUSES_EACH_ALLOCATION" "" "SOURCES;DEPENDS;LABELS;ENVIRONMENT" ${ARGN})
  if(ARG_REFUSES_EACH_ALLOCATION)
    list(APPEND ARG_SOURCES "${PROJECT_SOURCE_DIR}/src/base/testing/refuse_each.cc")
  endif()
  if(ARG_REFUSES_ALLOCATIONS OR ARG_REFUSES_EACH_ALLOCATION)
    list(APPEND ARG_SOURCES "${PROJECT_SOURCE_DIR}/src/base/testing/replaced_new.cc")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  quire_test_program(${name})
  target_precompile_headers(${name} REUSE_FROM quire_test_headers)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} quire GTest::gtest GTest::gtest_main)
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS "${ARG_LABELS}" ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()

# quire_bench(NAME SOURCES...): one Google-Benchmark program.
function(quire_bench name)
  if(NOT QUIRE_BENCH)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  quire_compile_options(${name})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(${name} PRIVATE quire benchmark::benchmark benchmark::benchmark_main)
endfunction()

# quire_fuzz(NAME SOURCES...): one libFuzzer target. `fuzz_targets` builds all of them.
function(quire_fuzz name)
  if(NOT QUIRE_FUZZ)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  quire_compile_options(${name})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  target_link_libraries(${name} PRIVATE quire)
  if(NOT TARGET fuzz_targets)
    add_custom_target(fuzz_targets)
  endif()
  add_dependencies(fuzz_targets ${name})
endfunction()

# include/quire/version.h says what project() says.
function(quire_check_version_header)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/quire/version.h")
  file(READ "${PROJECT_SOURCE_DIR}/include/quire/version.h" header)
  foreach(part MAJOR MINOR PATCH)
    if(NOT header MATCHES "#define QUIRE_VERSION_${part} ${PROJECT_VERSION_${part}}\n")
      message(FATAL_ERROR "include/quire/version.h: QUIRE_VERSION_${part} is not ${PROJECT_VERSION_${part}}, "
                          "which project() says; change the header")
    endif()
  endforeach()
endfunction()

function(quire_library_archive)
  get_property(layers GLOBAL PROPERTY QUIRE_LAYERS)
  set(objects)
  foreach(layer ${layers})
    list(APPEND objects $<TARGET_OBJECTS:${layer}>)
  endforeach()
  add_library(quire STATIC ${objects})
  add_library(quire::quire ALIAS quire)
  target_compile_features(quire PUBLIC cxx_std_20)
  target_include_directories(quire PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(quire PUBLIC Threads::Threads)
  get_property(libraries GLOBAL PROPERTY QUIRE_LIBRARIES)
  target_link_libraries(quire PRIVATE ${libraries})
  if(QUIRE_SANITIZE)
    target_link_options(quire PUBLIC -fsanitize=${QUIRE_SANITIZE})
  endif()

  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/quire)
  install(TARGETS quire EXPORT quireTargets)
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/quire" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT quireTargets NAMESPACE quire:: DESTINATION ${package_dir})
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/quireConfig.cmake.in"
    "${PROJECT_BINARY_DIR}/quireConfig.cmake" INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file("${PROJECT_BINARY_DIR}/quireConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
  install(FILES "${PROJECT_BINARY_DIR}/quireConfig.cmake" "${PROJECT_BINARY_DIR}/quireConfigVersion.cmake"
                "${PROJECT_SOURCE_DIR}/cmake/Finduring.cmake"
    DESTINATION ${package_dir})
  quire_pkg_config_file()
endfunction()

# quire.pc: libquire is a static archive, so what it needs is private, and `pkg-config --static` names it.
function(quire_pkg_config_file)
  set(folder "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig")
  file(RELATIVE_PATH libdir "${folder}" "${CMAKE_INSTALL_FULL_LIBDIR}")
  file(RELATIVE_PATH includedir "${folder}" "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
  set(requires)
  if(QUIRE_IO_URING)
    list(APPEND requires liburing)
  endif()
  if(QUIRE_TLS)
    list(APPEND requires "openssl >= 3.0")
  else()
    list(APPEND requires "libcrypto >= 3.0")
  endif()
  list(JOIN requires ", " requires)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/quire.pc.in" "${PROJECT_BINARY_DIR}/quire.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/quire.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()
