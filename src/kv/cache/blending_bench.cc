// One layer of a forward of 3 072 rows: all of them, and 15 % of them behind a check layer.
//   WholeLayer            every row is stored and attends
//   BlendedLayer/<run>    460 rows in runs of that many attend; the others are stored as moved rows
//   Chunk                 the 460 rows from 1 306 to 1 765, behind stored ones: as many keys as
//                         scattered rows see
// Counters: ms of the layer, and of it that of attention alone.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/random.h"
#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

constexpr int64_t kRows = 3072;
constexpr int64_t kSelected = 460;

void CheckOk(const Status& status) {
  if (!status.ok()) std::abort();
}

class AllMoved final : public MovedSource {
 public:
  explicit AllMoved(const AttentionLayerSpec& spec)
      : k_(static_cast<size_t>(kRows * spec.num_kv_heads * spec.qk_head_dim), 0x3c00),
        rows_{.rows = {0, kRows},
              .kv = {.k = TensorView(k_.data(), spec.dtype,
                                     {kRows, spec.num_kv_heads, spec.qk_head_dim}),
                     .v = TensorView(k_.data(), spec.dtype,
                                     {kRows, spec.num_kv_heads, spec.v_head_dim})}} {}
  Result<std::span<const MovedRows>> Load(int64_t) override {
    return std::span<const MovedRows>(&rows_, 1);
  }

 private:
  std::vector<uint16_t> k_;
  MovedRows rows_;
};

class Chosen final : public LayerHook {
 public:
  explicit Chosen(std::vector<int32_t> rows) : rows_(std::move(rows)) {}
  Result<RowSelection> BeforeAttention(int64_t, const FreshRows&) override {
    return RowSelection{.selects = true, .rows = rows_};
  }
  int64_t count() const { return std::ssize(rows_); }

 private:
  std::vector<int32_t> rows_;
};

// About kSelected rows in runs of `run`, spread evenly by chance; the last row is one.
std::vector<int32_t> Scattered(int64_t run) {
  RandomSequence random(3);
  std::vector<int32_t> starts;
  for (int32_t i = 0; i < kRows / run; ++i) starts.push_back(i);
  for (size_t i = starts.size() - 1; i > 0; --i)
    std::swap(starts[i], starts[static_cast<size_t>(random.Below(static_cast<int64_t>(i) + 1))]);
  starts.resize(static_cast<size_t>(kSelected / run));
  std::vector<int32_t> rows;
  for (const int32_t start : starts) {
    for (int64_t r = 0; r < run; ++r) rows.push_back(static_cast<int32_t>(start * run + r));
  }
  rows.push_back(kRows - 1);
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

struct Bench {
  Bench() {
    options.layers = {spec, spec};
    options.max_num_sequences = 4;
    options.token_capacity = 2 * kRows;
    options.prefill_chunk_size = kRows;
    options.rope.mode = RopeMode::kNormal;
    options.runner = CreateThreadPool(0).value();
    cache = AttentionKVCache::Create(options).value();
    CheckOk(cache->AddSequence(0));
    RandomSequence random(1);
    const int64_t width = (spec.num_qo_heads + 2 * spec.num_kv_heads) * spec.qk_head_dim;
    numbers.resize(static_cast<size_t>(kRows * width));
    for (float& x : numbers) x = static_cast<float>(random.Uniform(-1, 1));
    outputs.resize(static_cast<size_t>(kRows * spec.num_qo_heads * spec.v_head_dim));
  }
  TensorView View(int64_t rows, int64_t first_head, int64_t heads) {
    // Any numbers do: heads of a row need not lie beside those of the others.
    return TensorView(numbers.data() + first_head * kRows * spec.qk_head_dim, DType::kF32,
                      {rows, heads, spec.qk_head_dim});
  }
  // Append and Attend; times in seconds.
  void RunLayer(int64_t layer, int64_t rows, double* append, double* attend) {
    const auto start = std::chrono::steady_clock::now();
    CheckOk(cache->Append(layer, View(rows, spec.num_qo_heads, spec.num_kv_heads),
                          View(rows, spec.num_qo_heads + spec.num_kv_heads, spec.num_kv_heads)));
    const auto middle = std::chrono::steady_clock::now();
    CheckOk(cache->Attend(
        layer, View(rows, 0, spec.num_qo_heads),
        TensorView(outputs.data(), DType::kF32, {rows, spec.num_qo_heads, spec.v_head_dim}),
        nullptr, 0.1));
    const auto end = std::chrono::steady_clock::now();
    *append = std::chrono::duration<double>(middle - start).count();
    *attend = std::chrono::duration<double>(end - middle).count();
  }

  AttentionLayerSpec spec{.num_qo_heads = 32,
                          .num_kv_heads = 8,
                          .qk_head_dim = 64,
                          .v_head_dim = 64,
                          .dtype = DType::kBF16};
  AttentionKVCacheOptions options;
  std::unique_ptr<AttentionKVCache> cache;
  std::vector<float> numbers, outputs;
};

// Best of the iterations: other work on the machine only adds to it.
struct Times {
  double append = 1e9, attend = 1e9;
  void Note(benchmark::State& state, double append_now, double attend_now) {
    state.SetIterationTime(append_now + attend_now);
    append = std::min(append, append_now);
    attend = std::min(attend, attend_now);
  }
  void Report(benchmark::State& state) const {
    state.counters["append_ms"] = append * 1e3;
    state.counters["attend_ms"] = attend * 1e3;
  }
};

void WholeLayer(benchmark::State& state) {
  Bench bench;
  Times times;
  for (auto _ : state) {
    CheckOk(bench.cache->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{kRows}));
    double append = 0, attend = 0;
    bench.RunLayer(0, kRows, &append, &attend);
    CheckOk(bench.cache->AbortForward());
    times.Note(state, append, attend);
  }
  times.Report(state);
}
BENCHMARK(WholeLayer)->UseManualTime()->Unit(benchmark::kMillisecond);

void BlendedLayer(benchmark::State& state) {
  Bench bench;
  Chosen hook(Scattered(state.range(0)));
  AllMoved source(bench.spec);
  const std::vector<int64_t> checks{0};
  const BlendMember blend{0, &hook, &source, checks};
  Times times;
  for (auto _ : state) {
    CheckOk(bench.cache->BeginBlendingForward(std::vector<int64_t>{0}, std::vector<int64_t>{kRows},
                                              {}, {&blend, 1}));
    double append = 0, attend = 0;
    bench.RunLayer(0, kRows, &append, &attend);
    bench.RunLayer(1, hook.count(), &append, &attend);
    CheckOk(bench.cache->AbortForward());
    times.Note(state, append, attend);
  }
  times.Report(state);
  state.counters["rows"] = static_cast<double>(hook.count());
}
BENCHMARK(BlendedLayer)
    ->Arg(1)
    ->Arg(4)
    ->Arg(16)
    ->ArgName("run")
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

void Chunk(benchmark::State& state) {
  Bench bench;
  double append = 0, attend = 0;
  const int64_t before = (kRows - kSelected) / 2;
  CheckOk(bench.cache->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{before}));
  for (int64_t l = 0; l < 2; ++l) bench.RunLayer(l, before, &append, &attend);
  CheckOk(bench.cache->EndForward());
  Times times;
  for (auto _ : state) {
    CheckOk(bench.cache->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{kSelected}));
    bench.RunLayer(0, kSelected, &append, &attend);
    CheckOk(bench.cache->AbortForward());
    times.Note(state, append, attend);
  }
  times.Report(state);
}
BENCHMARK(Chunk)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace quire
