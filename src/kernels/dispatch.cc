#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/cpu/stream_prefetch.h"

#if QUIRE_SIMD
#include <cpuid.h>
#endif

namespace quire {
namespace {

#if QUIRE_SIMD
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

// The family of an AMD processor (Zen 5: 0x1A), else 0.
unsigned AmdFamily() {
  const CpuidLeaf vendor = ReadCpuid(0, 0);
  const bool is_amd = vendor.ebx == 0x68747541 && vendor.edx == 0x69746E65 &&
                      vendor.ecx == 0x444D4163;  // "AuthenticAMD"
  const unsigned version = ReadCpuid(1, 0).eax;
  return is_amd ? (version >> 8 & 0xF) + (version >> 20 & 0xFF) : 0;
}

std::vector<const Backend*> DetectVectorPaths() {
  const CpuidLeaf leaf1 = ReadCpuid(1, 0);
  const CpuidLeaf leaf7 = ReadCpuid(7, 0);
  const unsigned states = SavedStates(leaf1);
  const bool saves_ymm = HasBits(states, {1, 2});  // SSE, AVX
  const bool avx2 = saves_ymm && HasBits(leaf1.ecx, {12, 28, 29}) &&
                    HasBits(leaf7.ebx, {5});  // FMA, AVX, F16C; AVX2
#if QUIRE_EMULATE_AVX512                      // what they are made of
  const bool avx512 = avx2;
  const bool bf16 = avx2;
#else
  const bool saves_zmm =
      HasBits(states, {1, 2, 5, 6, 7});  // and opmasks, both parts of the ZMM registers
  const bool avx512 = avx2 && saves_zmm && HasBits(leaf7.ebx, {16, 17, 30, 31});  // F, DQ, BW, VL
  const bool bf16 = avx512 && HasBits(leaf7.ecx, {11}) && leaf7.eax >= 1 &&
                    HasBits(ReadCpuid(7, 1).eax, {5});  // VNNI, BF16
#endif
  std::vector<const Backend*> paths;
  if (bf16) paths.push_back(&kAvx512Bf16Backend);
  if (avx512) paths.push_back(&kAvx512Backend);
  if (avx2) paths.push_back(&kAvx2Backend);
  return paths;
}
#endif

// Measured with decode attention of bfloat16 out of memory. On Cascade Lake the L1 has too few fill
// buffers to keep memory busy (a third of the speed is lost); on Zen 5 it has enough, and one core
// is a quarter faster (8 KiB ahead of 2 to 32).
StreamPrefetch DetectStreamPrefetch() {
  constexpr StreamPrefetch kCommon = {.into_l1 = false, .bytes_ahead = 16384};
#if QUIRE_SIMD
  constexpr unsigned kZen5Family = 0x1A;
  if (AmdFamily() >= kZen5Family) return {.into_l1 = true, .bytes_ahead = 8192};
#endif
  return kCommon;
}

std::vector<const Backend*> DetectPaths() {
#if QUIRE_SIMD
  std::vector<const Backend*> paths = DetectVectorPaths();
#else
  std::vector<const Backend*> paths;
#endif
  paths.push_back(&kScalarBackend);
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

std::span<const Backend* const> Backends() {
  static const std::vector<const Backend*> paths = DetectPaths();
  return paths;
}

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
