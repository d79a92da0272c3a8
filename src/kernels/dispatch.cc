#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/cpu/stream_prefetch.h"

#if QUIRE_SIMD && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#endif

namespace quire {
namespace {

// What DetectPaths found.
struct Paths {
  std::vector<const Backend*> all;  // the default first
  std::string tiles_refused;        // TilesRefused()
};

#if QUIRE_SIMD
// Whether the build has the path (QUIRE_KERNEL_PATHS).
[[maybe_unused]] bool IsBuilt(const Backend& backend) { return !backend.name.empty(); }
#endif

#if QUIRE_SIMD && defined(__aarch64__)
// Every CPU of this architecture has NEON.
Paths DetectVectorPaths() {
  if (!IsBuilt(kNeonBackend)) return {};
  return {{&kNeonBackend}, ""};
}
#elif QUIRE_SIMD
struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf ReadCpuid(unsigned leaf, unsigned subleaf) {
  CpuidLeaf r;
  // Leaves zeros where the CPU has no such leaf.
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool HasBits(unsigned value, std::initializer_list<int> bits) {
  for (const int bit : bits) {
    if ((value >> bit & 1) == 0) return false;
  }
  return true;
}

// Which register states the operating system saves; without that an instruction traps whatever the
// CPU can do.
unsigned SavedStates(const CpuidLeaf& leaf1) {
  constexpr int kOsXsave = 27;
  if (!HasBits(leaf1.ecx, {kOsXsave})) return 0;
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// `name`: "GenuineIntel", "AuthenticAMD".
bool IsVendor(std::string_view name) {
  const CpuidLeaf leaf = ReadCpuid(0, 0);
  std::string vendor;
  for (const unsigned part : {leaf.ebx, leaf.edx, leaf.ecx}) {
    for (int byte = 0; byte < 4; ++byte) vendor += static_cast<char>(part >> 8 * byte & 0xFF);
  }
  return vendor == name;
}

// The family of an AMD processor (Zen 5: 0x1A), else 0.
unsigned AmdFamily() {
  const bool is_amd = IsVendor("AuthenticAMD");
  const unsigned version = ReadCpuid(1, 0).eax;
  return is_amd ? (version >> 8 & 0xF) + (version >> 20 & 0xFF) : 0;
}

bool HasAvx2(const CpuidLeaf& leaf1, const CpuidLeaf& leaf7, unsigned states) {
  const bool saves_ymm = HasBits(states, {1, 2});          // SSE, AVX
  return saves_ymm && HasBits(leaf1.ecx, {12, 28, 29}) &&  // FMA, AVX, F16C
         HasBits(leaf7.ebx, {5});                          // AVX2
}

#if QUIRE_EMULATE_AVX512
// Emulated paths need what they are made of.
Paths DetectVectorPaths() {
  const CpuidLeaf leaf1 = ReadCpuid(1, 0);
  const CpuidLeaf leaf7 = ReadCpuid(7, 0);
  if (!HasAvx2(leaf1, leaf7, SavedStates(leaf1))) return {};
  return {{&kAvx512Bf16Backend, &kAvx512Backend, &kEmulatedAmxBackend, &kAvx2Backend}, ""};
}
#else
// Why this process may not use the tile unit, which the CPU has; "" if it may. Linux grants its
// registers on request, to all threads of the process at once.
std::string RequestTiles(unsigned states) {
  constexpr int kTileConfig = 17;
  constexpr int kTileData = 18;
  if (!HasBits(states, {kTileConfig, kTileData})) {
    return "the operating system does not save the tile registers";
  }
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return "arch_prctl(ARCH_REQ_XCOMP_PERM): " + std::generic_category().message(errno);
}

// The order is that of speed where it was measured. On Intel a dot product of bfloat16 pairs has
// half the rate of two fma: `avx512` is 1.35 to 1.5 times as fast as `avx512_bf16` with 16 rows and
// more, and as fast with few (Sapphire Rapids). Tiles are faster than either.
Paths DetectVectorPaths() {
  const CpuidLeaf leaf1 = ReadCpuid(1, 0);
  const CpuidLeaf leaf7 = ReadCpuid(7, 0);
  const unsigned states = SavedStates(leaf1);
  const bool avx2 = HasAvx2(leaf1, leaf7, states);
  const bool saves_zmm =
      HasBits(states, {1, 2, 5, 6, 7});  // and opmasks, both parts of the ZMM registers
  const bool avx512 = avx2 && saves_zmm && HasBits(leaf7.ebx, {16, 17, 30, 31});  // F, DQ, BW, VL
  const bool vnni = avx512 && HasBits(leaf7.ecx, {11});
  const bool bf16 = vnni && leaf7.eax >= 1 && HasBits(ReadCpuid(7, 1).eax, {5});
  const bool tiles = bf16 && HasBits(leaf7.edx, {22, 24, 25});  // AMX-BF16, AMX-TILE, AMX-INT8
  Paths paths;
  if (tiles) paths.tiles_refused = RequestTiles(states);
  const bool amx = tiles && paths.tiles_refused.empty();
  const bool dots_are_slow = IsVendor("GenuineIntel");
  if (amx) paths.all.push_back(&kAvx512AmxBackend);
  if (bf16 && !dots_are_slow) paths.all.push_back(&kAvx512Bf16Backend);
  // Two tables of one path; either one serves in a build for other CPUs.
  const bool sums_by_vnni = vnni && IsBuilt(kAvx512VnniBackend);
  if (avx512) paths.all.push_back(sums_by_vnni ? &kAvx512VnniBackend : &kAvx512Backend);
  if (bf16 && dots_are_slow) paths.all.push_back(&kAvx512Bf16Backend);
  if (avx2) paths.all.push_back(&kAvx2Backend);
#if QUIRE_EMULATED_AMX
  if (avx512 && !amx) paths.all.push_back(&kEmulatedAmxBackend);
#endif
  std::erase_if(paths.all, [](const Backend* path) { return !IsBuilt(*path); });
  return paths;
}
#endif
#endif

// Measured with decode attention of bfloat16 out of memory. On Cascade Lake the L1 has too few fill
// buffers to keep memory busy (a third of the speed is lost); on Zen 5 it has enough, and one core
// is a quarter faster (8 KiB ahead of 2 to 32).
StreamPrefetch DetectStreamPrefetch() {
  constexpr StreamPrefetch kCommon = {.into_l1 = false, .bytes_ahead = 16384};
#if QUIRE_SIMD && defined(__x86_64__)
  constexpr unsigned kZen5Family = 0x1A;
  if (AmdFamily() >= kZen5Family) return {.into_l1 = true, .bytes_ahead = 8192};
#endif
  return kCommon;
}

// Measured on Zen 4 (docs/notes/speed.md). Codes of up to 6 bits are faster through L1 (Q4_K with
// one row and one thread 25 GB/s, 14 through L2), codes of 8 bits through L2: they need little
// arithmetic per line, and requests fill L1's buffers. One row reads codes of 8 bits a quarter
// faster with 1 KiB ahead than with 4; with 2 rows and AVX2, or 4 and AVX-512, 1 KiB takes up to
// twice as long as 4. Other CPUs were not measured.
StreamPrefetch DetectWeightPrefetch([[maybe_unused]] bool eight_bits,
                                    [[maybe_unused]] bool one_row) {
  constexpr StreamPrefetch kCommon = {.into_l1 = false, .bytes_ahead = 4096};
#if QUIRE_SIMD && defined(__x86_64__)
  constexpr unsigned kZen3Family = 0x19;
  if (AmdFamily() >= kZen3Family && !eight_bits) return {.into_l1 = true, .bytes_ahead = 4096};
  if (AmdFamily() >= kZen3Family && one_row) return {.into_l1 = false, .bytes_ahead = 1024};
#endif
  return kCommon;
}

Paths DetectPaths() {
#if QUIRE_SIMD
  Paths paths = DetectVectorPaths();
#else
  Paths paths;
#endif
  paths.all.push_back(&kScalarBackend);
  return paths;
}

const Paths& PathsOfCpu() {
  static const Paths paths = DetectPaths();
  return paths;
}

std::string Names(std::span<const Backend* const> backends) {
  std::string names;
  for (const Backend* backend : backends) {
    if (!names.empty()) names += ", ";
    names += backend->name;
  }
  return names;
}

}  // namespace

StreamPrefetch StreamPrefetchOfCpu() {
  static const StreamPrefetch advice = DetectStreamPrefetch();
  return advice;
}

StreamPrefetch WeightPrefetchOfCpu(bool eight_bits, bool one_row) {
  static const StreamPrefetch advice[2][2] = {
      {DetectWeightPrefetch(false, false), DetectWeightPrefetch(false, true)},
      {DetectWeightPrefetch(true, false), DetectWeightPrefetch(true, true)}};
  return advice[eight_bits ? 1 : 0][one_row ? 1 : 0];
}

std::span<const Backend* const> Backends() { return PathsOfCpu().all; }

std::string_view TilesRefused() { return PathsOfCpu().tiles_refused; }

Result<const Backend*> FindBackend(std::string_view name) {
  const char* const from_environment = name.empty() ? std::getenv("QUIRE_KERNELS") : nullptr;
  if (from_environment != nullptr) name = from_environment;
  if (name.empty()) return Backends().front();
  for (const Backend* backend : Backends()) {
    if (backend->name == name) return backend;
  }
  return Status(StatusCode::kBadArgument,
                std::string("FindBackend: no kernel path \"") + std::string(name) + "\"" +
                    (from_environment != nullptr ? " (environment variable QUIRE_KERNELS)" : "") +
                    " on this machine and in this build; there are: " + Names(Backends()));
}

}  // namespace quire
