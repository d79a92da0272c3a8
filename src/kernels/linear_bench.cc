// Speed of linear layers beside two bounds of the same machine: reading the weights once, and the
// float32 fma peak.
//   linear_bench --benchmark_filter='avx512/bfloat16/rows:1/' --benchmark_repetitions=5
//   linear_bench --benchmark_filter='avx2/Q4_K/'
//   linear_bench --benchmark_filter='avx2/(bfloat16|fp8_blocks)/'
// Few rows: compare GB/s with Read; many rows: GFLOP/s with Fma, of quantised weights with Int8.
// Two threads on busy machines vary, so alternate runs.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/cpu/path_includes.h"
#include "kernels/float8_weights.h"
#include "kernels/quantised_weights.h"
#include "kernels/testing/quantised_rows.h"
#include "tensor/float8.h"
#include "tensor/half.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

constexpr int64_t kN = 5632;
constexpr int64_t kK = 2048;
// The copies of the weights that are used in turn have this size together: none is left in a cache.
constexpr size_t kColdBytes = size_t{256} << 20;

HostMemory Memory(size_t bytes) { return HostMemory::Allocate(bytes).value(); }

void ReadMemory(benchmark::State& state) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(0))).value();
  const HostMemory memory = Memory(2 * kColdBytes);
  std::memset(memory.data(), 1, memory.size());
  constexpr int64_t kRun = int64_t{1} << 20;
  const int64_t runs = static_cast<int64_t>(memory.size()) / kRun;
  std::vector<int64_t> sums(static_cast<size_t>(pool->worker_count()) * 16);
  for (auto _ : state) {
    pool->ParallelFor(runs, [&](int64_t run, int worker) {
      const auto* from = reinterpret_cast<const int64_t*>(memory.data() + run * kRun);
      int64_t sum[4] = {};
      for (int64_t i = 0; i < kRun / 8; i += 32) {
        __builtin_prefetch(from + i + 512, 0, 2);
        __builtin_prefetch(from + i + 520, 0, 2);
        __builtin_prefetch(from + i + 528, 0, 2);
        __builtin_prefetch(from + i + 536, 0, 2);
        for (int j = 0; j < 4; ++j) sum[j] += from[i + 8 * j];
      }
      sums[static_cast<size_t>(worker) * 16] += sum[0] + sum[1] + sum[2] + sum[3];
    });
    benchmark::DoNotOptimize(sums.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(memory.size()));
}

#if defined(__x86_64__)
// Chains of fma that hide each other's latency: two per cycle on most CPUs, each 4 cycles long.
constexpr int kChains = 16;
constexpr int64_t kFmas = 4096;

__attribute__((target("avx2,fma"))) void FmaAvx2() {
  __m256 sums[kChains / 2];
  QUIRE_UNROLL
  for (int j = 0; j < kChains / 2; ++j) sums[j] = _mm256_setzero_ps();
  for (int64_t i = 0; i < 2 * kFmas; ++i) {
    QUIRE_UNROLL
    for (int j = 0; j < kChains / 2; ++j) {
      __asm__ volatile("vfmadd231ps %0, %0, %0" : "+x"(sums[j]));
    }
  }
}

__attribute__((target("avx512f"))) void FmaAvx512() {
  __m512 sums[kChains];
  QUIRE_UNROLL
  for (int j = 0; j < kChains; ++j) sums[j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < kFmas; ++i) {
    QUIRE_UNROLL
    for (int j = 0; j < kChains; ++j) {
      __asm__ volatile("vfmadd231ps %0, %0, %0" : "+v"(sums[j]));
    }
  }
}

void FmaPeak(benchmark::State& state, void (*fma)(), int lanes) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(0))).value();
  constexpr int64_t kTasks = 64;
  for (auto _ : state) pool->ParallelFor(kTasks, [&](int64_t, int) { fma(); });
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(lanes * kChains * kFmas * kTasks * state.iterations()),
      benchmark::Counter::kIsRate);
}
#endif

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512vnni"))) void Int8Avx512() {
  __m512i sums[kChains];
  QUIRE_UNROLL
  for (int j = 0; j < kChains; ++j) sums[j] = _mm512_setzero_si512();
  for (int64_t i = 0; i < kFmas; ++i) {
    QUIRE_UNROLL
    for (int j = 0; j < kChains; ++j) {
      __asm__ volatile("vpdpbusd %0, %0, %0" : "+v"(sums[j]));
    }
  }
}

void Int8Peak(benchmark::State& state) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(0))).value();
  constexpr int64_t kTasks = 64;
  for (auto _ : state) pool->ParallelFor(kTasks, [&](int64_t, int) { Int8Avx512(); });
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(64 * kChains * kFmas * kTasks * state.iterations()),
      benchmark::Counter::kIsRate);
}
#endif

// One call an iteration, with packed weights of `bytes` bytes that lie one after the other and take
// turns. `w` and the rounding of the rows are what is measured.
void MeasureLinear(benchmark::State& state, const Backend& backend, ParallelRunner& runner,
                   const PackedLinear& w, DType rounding, const HostMemory& packed, size_t bytes) {
  const int64_t rows = state.range(0);
  std::vector<float> x(static_cast<size_t>(rows * kK), 0.5F);
  std::vector<float> y(static_cast<size_t>(rows * kN));
  const HostMemory scratch =
      Memory(backend.linear_scratch_bytes(rows, kN, kK, runner.worker_count()));
  LinearArgs args;
  args.w = w;
  args.row_count = rows;
  args.x = x.data();
  args.x_stride = kK;
  args.x_rounding = rounding;
  args.y = y.data();
  args.y_stride = kN;
  args.scratch = scratch.data();
  const size_t copies = packed.size() / bytes;
  size_t copy = 0;
  for (auto _ : state) {
    args.w.data = packed.data() + copy * bytes;
    copy = (copy + 1) % copies;
    backend.linear(args, runner);
    benchmark::DoNotOptimize(y.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes));
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(rows * kN * kK * state.iterations()), benchmark::Counter::kIsRate);
}

void RunLinear(benchmark::State& state, const Backend& backend, DType dtype, DType rounding) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(1))).value();
  const size_t bytes = backend.packed_linear_bytes(dtype, kN, kK);
  const size_t copies = kColdBytes / bytes + 1;
  const HostMemory packed = Memory(copies * bytes);
  std::vector<float> weights(static_cast<size_t>(kN * kK));
  RandomSequence random(1);
  for (float& w : weights) w = static_cast<float>(random.Uniform(-1, 1));
  for (size_t i = 0; i < copies; ++i) {
    backend.pack_linear(weights.data(), DType::kF32, kN, kK, dtype, packed.data() + i * bytes,
                        *pool);
  }
  MeasureLinear(state, backend, *pool, {dtype, kN, kK, nullptr, nullptr, {}}, rounding, packed,
                bytes);
}

// Float8 codes that stand for bfloat16 weights, with scales of blocks of 128 x 128 or of outputs.
void RunFloat8(benchmark::State& state, const Backend& backend, bool of_outputs) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(1))).value();
  const size_t bytes = PackedFloat8Bytes(kN, kK);
  const size_t copies = kColdBytes / bytes + 1;
  const HostMemory packed = Memory(copies * bytes);
  std::vector<uint8_t> codes(static_cast<size_t>(kN * kK));
  RandomSequence random(1);
  for (uint8_t& code : codes) {
    code = F32ToF8E4M3(static_cast<float>(random.Uniform(-kF8E4M3Max, kF8E4M3Max)));
  }
  std::vector<const uint8_t*> outputs;
  for (int64_t n = 0; n < kN; ++n) outputs.push_back(codes.data() + n * kK);
  for (size_t i = 0; i < copies; ++i) {
    PackFloat8(outputs, kK, reinterpret_cast<uint8_t*>(packed.data()) + i * bytes, *pool);
  }
  Float8Scales layout{nullptr, of_outputs ? kK : 128, of_outputs};
  std::vector<float> scales(static_cast<size_t>(Float8ScaleCount(layout, kN, kK)));
  for (float& scale : scales) scale = static_cast<float>(random.Uniform(1e-4, 2e-4));
  layout.data = scales.data();
  MeasureLinear(state, backend, *pool, {DType::kBF16, kN, kK, nullptr, nullptr, layout},
                DType::kBF16, packed, bytes);
}

HostMemory PackedCopies(WeightFormat format, size_t bytes, size_t copies, ParallelRunner& runner) {
  HostMemory packed = Memory(copies * bytes);
  const std::vector<std::byte> weights = RandomQuantisedRows(format, kN, kK, 1, 1);
  for (size_t i = 0; i < copies; ++i) {
    PackQuantised(format, weights.data(), kN, kK, 0, packed.data() + i * bytes, runner);
  }
  return packed;
}

// Quantised weights whose rows stay bfloat16.
void RunWidened(benchmark::State& state, const Backend& backend, WeightFormat format) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(1))).value();
  const size_t bytes = PackedQuantisedBytes(format, kN, kK);
  const HostMemory packed = PackedCopies(format, bytes, kColdBytes / bytes + 1, *pool);
  PackedLinear w{.dtype = DType::kBF16, .n = kN, .k = kK};
  w.blocks = format;
  MeasureLinear(state, backend, *pool, w, DType::kBF16, packed, bytes);
}

void RunQuantised(benchmark::State& state, const Backend& backend, WeightFormat format) {
  const int64_t rows = state.range(0);
  const auto pool = CreateThreadPool(static_cast<int>(state.range(1))).value();
  const size_t bytes = PackedQuantisedBytes(format, kN, kK);
  const size_t copies = kColdBytes / bytes + 1;
  const HostMemory packed = PackedCopies(format, bytes, copies, *pool);
  std::vector<float> x(static_cast<size_t>(rows * kK));
  RandomSequence random(2);
  for (float& value : x) value = static_cast<float>(random.Uniform(-1, 1));
  std::vector<float> y(static_cast<size_t>(rows * kN));
  const HostMemory scratch = Memory(backend.quantised_scratch_bytes(rows, kK));
  QuantisedLinear w{.format = format, .n = kN, .k = kK};
  QuantisedLinearArgs args{.parts = {&w, 1},
                           .row_count = rows,
                           .x = x.data(),
                           .x_stride = kK,
                           .y = y.data(),
                           .y_stride = kN,
                           .scratch = scratch.data()};
  size_t copy = 0;
  for (auto _ : state) {
    w.data = packed.data() + copy * bytes;
    copy = (copy + 1) % copies;
    backend.quantised_linear(args, *pool);
    benchmark::DoNotOptimize(y.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes));
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(rows * kN * kK * state.iterations()), benchmark::Counter::kIsRate);
}

void RunPack(benchmark::State& state, const Backend& backend, DType dtype) {
  const auto pool = CreateThreadPool(static_cast<int>(state.range(0))).value();
  const HostMemory weights = Memory(static_cast<size_t>(kN * kK * DTypeBytes(dtype)));
  std::memset(weights.data(), 1, weights.size());
  const HostMemory packed = Memory(backend.packed_linear_bytes(dtype, kN, kK));
  for (auto _ : state) {
    backend.pack_linear(weights.data(), dtype, kN, kK, dtype, packed.data(), *pool);
    benchmark::DoNotOptimize(packed.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(weights.size()));
}

int RegisterAll() {
  benchmark::RegisterBenchmark("Read", ReadMemory)
      ->ArgName("threads")
      ->Arg(1)
      ->Arg(2)
      ->UseRealTime();
  for (const Backend* backend : Backends()) {
    if (backend->name == "scalar") continue;
#if defined(__x86_64__)
    const bool wide = backend->name != "avx2";
    benchmark::RegisterBenchmark((std::string(backend->name) + "/fma").c_str(), FmaPeak,
                                 wide ? FmaAvx512 : FmaAvx2, wide ? 16 : 8)
        ->ArgName("threads")
        ->Arg(1)
        ->Arg(2)
        ->UseRealTime();
    if (backend->name == "avx512_bf16") {  // which has VNNI
      benchmark::RegisterBenchmark("Int8", Int8Peak)
          ->ArgName("threads")
          ->Arg(1)
          ->Arg(2)
          ->UseRealTime();
    }
#endif
    for (const WeightFormat format : kWeightFormats) {
      const std::string name =
          std::string(backend->name) + "/" + std::string(WeightFormatName(format));
      benchmark::RegisterBenchmark(name.c_str(), RunQuantised, *backend, format)
          ->ArgNames({"rows", "threads"})
          ->ArgsProduct({{1, 2, 4, 8, 12, 16, 32, 64, 128, 512}, {1, 2}})
          ->UseRealTime();
      benchmark::RegisterBenchmark((name + "_rows_bfloat16").c_str(), RunWidened, *backend, format)
          ->ArgNames({"rows", "threads"})
          ->ArgsProduct({{1, 4, 16, 128, 512}, {1, 2}})
          ->UseRealTime();
    }
    for (const bool of_outputs : {false, true}) {
      const std::string name =
          std::string(backend->name) + (of_outputs ? "/fp8_outputs" : "/fp8_blocks");
      benchmark::RegisterBenchmark(name.c_str(), RunFloat8, *backend, of_outputs)
          ->ArgNames({"rows", "threads"})
          ->ArgsProduct({{1, 2, 4, 8, 12, 16, 32, 64, 128, 512}, {1, 2}})
          ->UseRealTime();
    }
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const DType rounding = dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
      const std::string name = std::string(backend->name) + "/" + std::string(DTypeName(dtype));
      benchmark::RegisterBenchmark(name.c_str(), RunLinear, *backend, dtype, rounding)
          ->ArgNames({"rows", "threads"})
          ->ArgsProduct({{1, 2, 4, 8, 12, 16, 32, 64, 128, 512}, {1, 2}})
          ->UseRealTime();
      benchmark::RegisterBenchmark((name + "/pack").c_str(), RunPack, *backend, dtype)
          ->ArgName("threads")
          ->Arg(1)
          ->Arg(2)
          ->UseRealTime();
    }
  }
  return 0;
}

const int registered = RegisterAll();

}  // namespace
}  // namespace quire
