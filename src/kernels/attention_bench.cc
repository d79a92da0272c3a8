// Attention on the best path (QUIRE_KERNELS names another), 8 kv heads x 4, head dimension 128,
// pages of 16 tokens in random order, memory full of random values:
//   Decode/DTYPE/BATCH/LENGTH/THREADS      one query per sequence; GB/s of keys and values
//   Chunk/DTYPE/ROWS/BATCH/LENGTH/THREADS  some queries per sequence; GB/s and GFLOP/s
//   Prefill/DTYPE/ROWS/CONTEXT/THREADS     one sequence; GFLOP/s
//   Cascade/DTYPE/BATCH/PREFIX/OWN/THREADS one query per sequence, the prefix is shared; GFLOP/s
//   Latent/DTYPE/HEADS/BATCH/LENGTH/THREADS decode of MLA, absorbed: latents of 512 + 64, the one
//                                          kv head of all query heads; GB/s and GFLOP/s
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "tensor/half.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

constexpr int kKVHeads = 8;
constexpr int kGroup = 4;
constexpr int kHeadDim = 128;
constexpr int kPageSize = 16;
constexpr int kHeads = kKVHeads * kGroup;
constexpr int kLatentRank = 512;
constexpr int kLatentDim = 576;

KVLayout PlainLayout(DType dtype) { return {dtype, kKVHeads, kHeadDim, kHeadDim, kPageSize}; }
KVLayout LatentLayout(DType dtype) {
  return {dtype, 1, kLatentDim, kLatentRank, kPageSize, std::nullopt, true};
}

struct Batch {
  KVLayout layout;
  HostMemory pages;
  std::vector<uint8_t> v_nonfinite;
  std::vector<std::vector<PageEntry>> entries;
  std::vector<PageRun> runs;
  std::vector<AttentionSequence> sequences;
  std::vector<SharedSpan> shared;
  std::vector<float> q, o;
  HostMemory scratch;
  AttentionArgs args;
  std::shared_ptr<ParallelRunner> pool;
  const Backend* backend;

  // Sequences of prefix + own positions; the prefix is stored once.
  Batch(DType dtype, int64_t count, int64_t prefix, int64_t own, int64_t rows, int threads)
      : Batch(PlainLayout(dtype), kHeads, count, prefix, own, rows, threads) {}
  Batch(const KVLayout& kv_layout, int heads, int64_t count, int64_t prefix, int64_t own,
        int64_t rows, int threads)
      : layout(kv_layout) {
    const DType dtype = layout.dtype;
    const int64_t page_count = (prefix + count * own) / kPageSize;
    pages = std::move(HostMemory::Allocate(static_cast<size_t>(page_count) * layout.page_bytes()))
                .value();
    if (IsQuantised(dtype)) {
      FillCodes(page_count);
    } else {
      Fill(static_cast<size_t>(page_count) * layout.page_bytes() /
           static_cast<size_t>(DTypeBytes(dtype)));
    }
    v_nonfinite.assign(static_cast<size_t>(page_count), 0);
    std::vector<int32_t> order(static_cast<size_t>(page_count));
    std::iota(order.begin(), order.end(), 0);
    RandomSequence random(5);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.Below(static_cast<int64_t>(i)))]);
    }
    const int64_t length = prefix + own;
    for (int64_t s = 0; s < count; ++s) {
      std::vector<PageEntry> table;
      for (int64_t p = 0; p < length; p += kPageSize) {
        const int64_t page = p < prefix ? p / kPageSize : (p + s * own) / kPageSize;
        table.push_back({p, order[static_cast<size_t>(page)]});
      }
      entries.push_back(std::move(table));
    }
    for (const auto& table : entries) {
      runs.push_back({table.data(), static_cast<int64_t>(table.size()), 0, length});
    }
    for (int64_t s = 0; s < count; ++s) {
      sequences.push_back({s * rows, rows, length - rows, &runs[static_cast<size_t>(s)], 1,
                           prefix / kSegmentPositions, nullptr, 0});
    }
    if (prefix > 0) shared.push_back({0, count, 0, prefix / kSegmentPositions});
    q.resize(static_cast<size_t>(count * rows * heads * layout.qk_head_dim));
    o.resize(static_cast<size_t>(count * rows * heads * layout.v_head_dim));
    for (float& x : q) x = static_cast<float>(random.Normal());
    pool = CreateThreadPool(threads).value();
    const char* path = std::getenv("QUIRE_KERNELS");
    backend = FindBackend(path == nullptr ? "" : path).value();
    args.pages = {layout, pages.data(), v_nonfinite.data()};
    args.num_qo_heads = heads;
    args.scale_log2 = 1.44269504F / std::sqrt(static_cast<float>(layout.qk_head_dim));
    args.q = {q.data(), DType::kF32, heads * layout.qk_head_dim, layout.qk_head_dim};
    args.o = {o.data(), DType::kF32, heads * layout.v_head_dim, layout.v_head_dim};
    args.row_count = count * rows;
    args.sequences = sequences;
    args.shared = shared;
    scratch = std::move(HostMemory::Allocate(backend->attention_scratch_bytes(
                            layout, heads, args.row_count, count, threads)))
                  .value();
    args.scratch = scratch.data();
  }

  void Fill(size_t count) {
    constexpr size_t kBlock = size_t{1} << 20;
    RandomSequence random(3);
    std::vector<float> block(std::min(count, kBlock));
    for (float& x : block) x = static_cast<float>(random.Uniform(-1, 1));
    const auto bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
    for (size_t i = 0; i < count; i += kBlock) {
      ConvertElements(block.data(), DType::kF32, pages.data() + i * bytes, layout.dtype,
                      static_cast<int64_t>(std::min(kBlock, count - i)));
    }
  }

  // Every byte is a code; all scales are equal.
  void FillCodes(int64_t page_count) {
    RandomSequence random(3);
    for (int64_t page = 0; page < page_count; ++page) {
      std::byte* const bytes = pages.data() + static_cast<size_t>(page) * layout.page_bytes();
      for (size_t i = 0; i < layout.scale_offset(); ++i) {
        bytes[i] = static_cast<std::byte>(random.Bits());
      }
      auto* const scales = reinterpret_cast<float*>(bytes + layout.scale_offset());
      std::fill(scales, reinterpret_cast<float*>(bytes + layout.page_bytes()), 0.01F);
    }
  }

  void Run() { backend->attention(args, *pool); }
};

// The first argument of each benchmark.
DType TypeOf(int64_t index) {
  constexpr DType kTypes[] = {DType::kBF16, DType::kF32, DType::kF16, DType::kI8, DType::kF8E4M3};
  return kTypes[index];
}

void Report(benchmark::State& state, const Batch& batch, double flop, double bytes) {
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  state.SetLabel(std::string(batch.backend->name) + " " +
                 std::string(DTypeName(batch.layout.dtype)));
  state.counters["GFLOP/s"] = benchmark::Counter(flop * 1e-9, rate);
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, rate);
}

void Decode(benchmark::State& state) {
  const int64_t count = state.range(1);
  const int64_t length = state.range(2);
  Batch batch(TypeOf(state.range(0)), count, 0, length, 1, static_cast<int>(state.range(3)));
  for (auto _ : state) batch.Run();
  const auto keys = static_cast<double>(count * length);
  Report(state, batch, keys * 4 * kHeads * kHeadDim,
         keys * static_cast<double>(batch.layout.page_bytes()) / kPageSize);
}

void Chunk(benchmark::State& state) {
  const int64_t rows = state.range(1);
  const int64_t count = state.range(2);
  const int64_t length = state.range(3);
  Batch batch(TypeOf(state.range(0)), count, 0, length, rows, static_cast<int>(state.range(4)));
  for (auto _ : state) batch.Run();
  const auto keys = static_cast<double>(count * length);
  Report(state, batch, keys * 4 * static_cast<double>(rows * kHeads * kHeadDim),
         keys * static_cast<double>(batch.layout.page_bytes()) / kPageSize);
}

void Prefill(benchmark::State& state) {
  const int64_t rows = state.range(1);
  const int64_t context = state.range(2);
  Batch batch(TypeOf(state.range(0)), 1, 0, rows + context, rows, static_cast<int>(state.range(3)));
  for (auto _ : state) batch.Run();
  const double pairs = static_cast<double>(rows) *
                       (static_cast<double>(context) + (static_cast<double>(rows) + 1) / 2);
  Report(state, batch, pairs * 4 * kHeads * kHeadDim, 0);
}

void Cascade(benchmark::State& state) {
  const int64_t count = state.range(1);
  const int64_t prefix = state.range(2);
  const int64_t own = state.range(3);
  Batch batch(TypeOf(state.range(0)), count, prefix, own, 1, static_cast<int>(state.range(4)));
  for (auto _ : state) batch.Run();
  Report(state, batch, static_cast<double>(count * (prefix + own)) * 4 * kHeads * kHeadDim, 0);
}

void Latent(benchmark::State& state) {
  const int64_t heads = state.range(1);
  const int64_t count = state.range(2);
  const int64_t length = state.range(3);
  Batch batch(LatentLayout(TypeOf(state.range(0))), static_cast<int>(heads), count, 0, length, 1,
              static_cast<int>(state.range(4)));
  for (auto _ : state) batch.Run();
  const auto keys = static_cast<double>(count * length);
  Report(state, batch, keys * 2 * static_cast<double>(heads * (kLatentDim + kLatentRank)),
         keys * static_cast<double>(batch.layout.page_bytes()) / kPageSize);
}

BENCHMARK(Latent)
    ->ArgsProduct({{0, 3}, {16, 128}, {1, 8}, {4096}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(Decode)
    ->ArgsProduct({{0, 1, 2, 3, 4}, {1, 8, 32}, {4096}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(Chunk)
    ->ArgsProduct({{0, 1, 3, 4}, {2, 4}, {1, 8}, {4096}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(Prefill)
    ->Args({0, 512, 0, 1})
    ->Args({0, 512, 0, 2})
    ->Args({0, 512, 4096, 1})
    ->Args({0, 2048, 4096, 2})
    ->Args({1, 512, 0, 2})
    ->Args({1, 2048, 4096, 2})
    ->Args({2, 512, 0, 2})
    ->Args({3, 512, 0, 2})
    ->Args({3, 2048, 4096, 2})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(Cascade)
    ->ArgsProduct({{0, 1}, {8, 32}, {4096}, {256}, {2}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace quire
