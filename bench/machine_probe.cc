#include "machine_probe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>

#include "bench_case.h"
#include "kernels/backend.h"

namespace quire::bench {
namespace {

// The compiler must not drop a loop whose result nobody reads.
std::atomic<uint64_t> g_sink{0};

// Independent chains: two FMA units of four cycles need eight, the rest hides the loop.
constexpr int kChains = 12;
// Of every chain and call: some milliseconds, so that waking a thread is lost in it.
constexpr int64_t kPeakSteps = 1'000'000;
// A read of one thread, in rows of this many bytes: four registers of AVX-512.
constexpr size_t kRowBytes = 256;
// Many short samples: their median does not see the moments in which something else had a core.
constexpr size_t kPieceBytes = size_t{32} << 20;
constexpr int kPeakSamples = 8;

#define QUIRE_TARGET(names) __attribute__((target(names), noinline))

void ReadPlain(const std::byte* p, size_t bytes) {
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i + 32 <= bytes; i += 32) {
    uint64_t w[4];
    std::memcpy(w, p + i, sizeof w);
    a ^= w[0];
    b ^= w[1];
    c ^= w[2];
    d ^= w[3];
  }
  g_sink += a ^ b ^ c ^ d;
}

float PeakPlain() {
  float chains[kChains] = {};
  for (float& chain : chains) asm volatile("" : "+m"(chain));
  float x = 1.0000001F;
  for (int64_t step = 0; step < kPeakSteps; ++step) {
    for (float& chain : chains) chain = chain * x + 1e-9F;
    asm volatile("" : "+m"(x));
  }
  float sum = 0;
  for (float chain : chains) sum += chain;
  return sum;
}

#if defined(__x86_64__)

QUIRE_TARGET("avx2") void ReadAvx2(const std::byte* p, size_t bytes) {
  __m256i sum[4] = {};
  for (size_t i = 0; i + kRowBytes <= bytes; i += kRowBytes) {
    for (int s = 0; s < 4; ++s) {
      const auto* row = reinterpret_cast<const __m256i*>(p + i) + 2 * s;
      sum[s] = _mm256_xor_si256(
          sum[s], _mm256_xor_si256(_mm256_load_si256(row), _mm256_load_si256(row + 1)));
    }
  }
  sum[0] = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  g_sink += static_cast<uint64_t>(_mm256_extract_epi64(sum[0], 0));
}

QUIRE_TARGET("avx512f") void ReadAvx512(const std::byte* p, size_t bytes) {
  __m512i sum[4];
  for (auto& s : sum) s = _mm512_setzero_si512();
  for (size_t i = 0; i + kRowBytes <= bytes; i += kRowBytes) {
    for (int s = 0; s < 4; ++s) {
      sum[s] = _mm512_xor_si512(sum[s], _mm512_load_si512(p + i + 64 * s));
    }
  }
  sum[0] = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  // The reductions of GCC 12's header warn of uninitialized values.
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, sum[0]);
  g_sink += lanes[0];
}

// `asm volatile` keeps the factors from being folded into the loop, and the chains from being seen
// to be equal (one chain's latency would then be read as a peak of three multiply-adds per cycle).
QUIRE_TARGET("avx2,fma") float PeakAvx2() {
  __m256 x = _mm256_set1_ps(1.0000001F), y = _mm256_set1_ps(1e-9F);
  __m256 chains[kChains];
  for (auto& chain : chains) chain = _mm256_setzero_ps();
  for (auto& chain : chains) asm volatile("" : "+x"(chain));
  for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chains[i] = _mm256_fmadd_ps(chains[i], x, y);
    asm volatile("" : "+x"(x), "+x"(y));
  }
  for (int i = 1; i < kChains; ++i) chains[0] = _mm256_add_ps(chains[0], chains[i]);
  return _mm256_cvtss_f32(chains[0]);
}

QUIRE_TARGET("avx512f") float PeakAvx512() {
  __m512 x = _mm512_set1_ps(1.0000001F), y = _mm512_set1_ps(1e-9F);
  __m512 chains[kChains];
  for (auto& chain : chains) chain = _mm512_setzero_ps();
  for (auto& chain : chains) asm volatile("" : "+v"(chain));
  for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chains[i] = _mm512_fmadd_ps(chains[i], x, y);
    asm volatile("" : "+v"(x), "+v"(y));
  }
  for (int i = 1; i < kChains; ++i) chains[0] = _mm512_add_ps(chains[0], chains[i]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, chains[0]);
  return lanes[0];
}

QUIRE_TARGET("avx512f,avx512bf16") float PeakBf16() {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  auto x = (__m512bh)ones;
  __m512 chains[kChains];
  for (auto& chain : chains) chain = _mm512_setzero_ps();
  for (auto& chain : chains) asm volatile("" : "+v"(chain));
  for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chains[i] = _mm512_dpbf16_ps(chains[i], x, x);
    asm volatile("" : "+v"(x));
  }
  for (int i = 1; i < kChains; ++i) chains[0] = _mm512_add_ps(chains[0], chains[i]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, chains[0]);
  return lanes[0];
}

// Sums of products of bytes as the kernels take them: dot products of four where the CPU has them,
// else pairs to 16 bits, pairs of these to 32, and an addition.
QUIRE_TARGET("avx512f,avx512vnni") float PeakInt8Avx512() {
  __m512i x = _mm512_set1_epi8(1);
  __m512i chains[kChains];
  for (auto& chain : chains) chain = _mm512_setzero_si512();
  for (auto& chain : chains) asm volatile("" : "+v"(chain));
  for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chains[i] = _mm512_dpbusd_epi32(chains[i], x, x);
    asm volatile("" : "+v"(x));
  }
  for (int i = 1; i < kChains; ++i) chains[0] = _mm512_add_epi32(chains[0], chains[i]);
  alignas(64) int32_t lanes[16];
  _mm512_store_si512(lanes, chains[0]);
  return static_cast<float>(lanes[0]);
}

QUIRE_TARGET("avx2") float PeakInt8Avx2() {
  __m256i x = _mm256_set1_epi8(1);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i chains[kChains];
  for (auto& chain : chains) chain = _mm256_setzero_si256();
  for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      // Not the same for all chains: each is multiplied.
      asm volatile("" : "+x"(x));
      chains[i] = _mm256_add_epi32(chains[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), ones));
    }
  }
  for (int i = 1; i < kChains; ++i) chains[0] = _mm256_add_epi32(chains[0], chains[i]);
  return static_cast<float>(_mm256_cvtsi256_si32(chains[0]));
}

// Products of whole tiles: of 16 rows, and of 16 columns in rows of 64 bytes. Four sums hide the
// latency of one.
constexpr int64_t kTileSteps = kPeakSteps / 16;
constexpr int kTileSums = 4;

QUIRE_TARGET("amx-tile") void ConfigureTiles() {
  alignas(64) uint8_t config[64] = {1};  // the palette
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;  // bytes of a row
    config[48 + tile] = 16;      // rows
  }
  asm volatile("" : "+m"(config));  // GCC 12's intrinsic reads no more than 8 bytes, it says
  _tile_loadconfig(config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
}

template <bool kBytes>
QUIRE_TARGET("amx-tile,amx-bf16,amx-int8")
float PeakTiles() {
  ConfigureTiles();
  for (int64_t step = 0; step < kTileSteps; ++step) {
    if constexpr (kBytes) {
      _tile_dpbusd(0, 4, 5);
      _tile_dpbusd(1, 4, 5);
      _tile_dpbusd(2, 4, 5);
      _tile_dpbusd(3, 4, 5);
    } else {
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 5);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_release();
  return 0;
}

// The kernels have asked the system for tiles, and got them.
bool HasTiles() { return Require(FindBackend(""))->name == std::string_view("avx512_amx"); }
bool HasAvx512() { return __builtin_cpu_supports("avx512f") != 0; }
bool HasAvx2() { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0; }

#endif  // __x86_64__

void Read(const std::byte* p, size_t bytes) {
#if defined(__x86_64__)
  if (HasAvx512()) return ReadAvx512(p, bytes);
  if (HasAvx2()) return ReadAvx2(p, bytes);
#endif
  ReadPlain(p, bytes);
}

// One loop of multiply-adds and the FLOP that it does.
struct Peak {
  float (*loop)();
  double flop;
};

Peak PeakOf(int lanes, float (*loop)()) {
  return {loop, 2.0 * lanes * kChains * static_cast<double>(kPeakSteps)};
}

#if defined(__x86_64__)
// `pairs`: products that a sum of a tile gets from one instruction.
Peak PeakOfTiles(int pairs, float (*loop)()) {
  return {loop, 2.0 * 16 * 16 * pairs * kTileSums * static_cast<double>(kTileSteps)};
}
#endif

Peak FloatPeak() {
#if defined(__x86_64__)
  if (HasAvx512()) return PeakOf(16, PeakAvx512);
  if (HasAvx2()) return PeakOf(8, PeakAvx2);
#endif
  return PeakOf(1, PeakPlain);
}

Peak Int8Peak() {
#if defined(__x86_64__)
  if (HasTiles()) return PeakOfTiles(64, PeakTiles<true>);
  if (__builtin_cpu_supports("avx512vnni") != 0) return PeakOf(64, PeakInt8Avx512);
  if (HasAvx2()) return PeakOf(32, PeakInt8Avx2);
#endif
  return PeakOf(1, PeakPlain);
}

double PeakRate(const Peak& peak, ParallelRunner& runner) {
  const int threads = runner.worker_count();
  const double begin = Now();
  runner.ParallelFor(threads, [&](int64_t, int) { g_sink += static_cast<uint64_t>(peak.loop()); });
  return peak.flop * threads / (Now() - begin);
}

}  // namespace

MachineProbe::MachineProbe(int threads, size_t bytes)
    : memory_(Require(HostMemory::Allocate(bytes))),
      one_(CreateThreadPool(1).value()),
      all_(CreateThreadPool(threads).value()) {
  // Unwritten pages are all the same one, which stays in the cache.
  std::memset(memory_.data(), 1, memory_.size());
}

bool MachineProbe::has_bf16_dot() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

void MachineProbe::ReadAll(ParallelRunner& runner, nlohmann::json* rates) const {
  const auto threads = static_cast<size_t>(runner.worker_count());
  for (size_t begin = 0; begin < memory_.size(); begin += kPieceBytes) {
    const size_t piece = std::min(kPieceBytes, memory_.size() - begin);
    const size_t part = piece / threads / kRowBytes * kRowBytes;
    const double start = Now();
    runner.ParallelFor(runner.worker_count(), [&](int64_t index, int) {
      Read(memory_.data() + begin + static_cast<size_t>(index) * part, part);
    });
    rates->push_back(static_cast<double>(part * threads) / (Now() - start));
  }
}

nlohmann::json MachineProbe::Measure(int repetitions, bool single) {
  nlohmann::json out;
  const auto peak = [&](const char* name, const Peak& loop, ParallelRunner& runner) {
    for (int i = 0; i < kPeakSamples; ++i) out[name].push_back(PeakRate(loop, runner));
  };
  for (int i = 0; i < repetitions; ++i) {
    ReadAll(*all_, &out["read_n"]);
    peak("f32_n", FloatPeak(), *all_);
    peak("int8_n", Int8Peak(), *all_);
    if (single) {
      ReadAll(*one_, &out["read_1"]);
      peak("f32_1", FloatPeak(), *one_);
    }
#if defined(__x86_64__)
    if (has_bf16_dot()) {
      peak("bf16_n", HasTiles() ? PeakOfTiles(32, PeakTiles<false>) : PeakOf(32, PeakBf16), *all_);
    }
#endif
  }
  return out;
}

}  // namespace quire::bench
