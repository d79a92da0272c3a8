// Control calls of the cache, without kernels.
//   BeginAndAbort/<sequences>          decode batch, nothing shared, 4096 tokens each
//   BeginAndAbortShared/<sequences>    decode batch, 4096 tokens shared by all
//   DecodeStep/<same>/<warm>/<rope>    decode batch of 256, nothing shared, 4096 tokens each, as
//                                      in the step before or (0) in another order each time
//   ForkAndRemove                      fork in mid-page of a sequence of 4096 tokens
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

constexpr int64_t kLength = 4096;

void CheckOk(const Status& status) {
  if (!status.ok()) std::abort();
}

std::unique_ptr<AttentionKVCache> MakeCache(int64_t sequence_count, RopeMode rope) {
  AttentionKVCacheOptions options;
  options.layers = {{.num_qo_heads = 1, .num_kv_heads = 1, .qk_head_dim = 128, .v_head_dim = 16}};
  options.max_num_sequences = sequence_count + 2;
  options.token_capacity = (sequence_count + 2) * (kLength + 256);
  options.prefill_chunk_size = kLength;
  options.page_size = 256;
  options.rope.mode = rope;
  options.runner = CreateThreadPool(1).value();
  auto cache = AttentionKVCache::Create(options);
  CheckOk(cache.status());
  return *std::move(cache);
}

void Prefill(AttentionKVCache& cache, int64_t id, int64_t count) {
  std::vector<float> k(static_cast<size_t>(count) * 128);
  std::vector<float> o(static_cast<size_t>(count) * 16);
  const TensorView qk(k.data(), DType::kF32, {count, 1, 128});
  const TensorView v(o.data(), DType::kF32, {count, 1, 16});
  CheckOk(cache.BeginForward(std::vector<int64_t>{id}, std::vector<int64_t>{count}));
  CheckOk(cache.Append(0, qk, v));
  CheckOk(cache.Attend(0, qk, v, nullptr, 1));
  CheckOk(cache.EndForward());
}

// A sequence of its own pages, without the quadratic work of a prefill: writing to a shared token
// copies what is shared.
void ForkAndCopy(AttentionKVCache& cache, int64_t parent, int64_t child, int64_t count) {
  std::vector<float> zeros(128);
  CheckOk(cache.ForkSequence(parent, child, count));
  CheckOk(cache.DebugSetKV(child, 0, TensorView(zeros.data(), DType::kF32, {1, 1, 1, 128}),
                           TensorView(zeros.data(), DType::kF32, {1, 1, 1, 16})));
}

void RunBeginAndAbort(benchmark::State& state, AttentionKVCache& cache) {
  std::vector<int64_t> ids, lengths;
  for (int64_t id = 0; id < state.range(0); ++id) {
    ids.push_back(id);
    lengths.push_back(1);
  }
  for (auto _ : state) {
    CheckOk(cache.BeginForward(ids, lengths));
    CheckOk(cache.AbortForward());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void BeginAndAbort(benchmark::State& state) {
  const auto cache =
      MakeCache(state.range(0), state.range(1) != 0 ? RopeMode::kNormal : RopeMode::kNone);
  CheckOk(cache->AddSequence(0));
  Prefill(*cache, 0, kLength - 1);
  for (int64_t id = 1; id < state.range(0); ++id)
    ForkAndCopy(*cache, 0, id, kLength - 1 - id % 200);
  RunBeginAndAbort(state, *cache);
}
BENCHMARK(BeginAndAbort)
    ->Args({1, 0})
    ->Args({256, 0})
    ->Args({256, 1})
    ->ArgNames({"sequences", "rope"});

void BeginAndAbortShared(benchmark::State& state) {
  const auto cache = MakeCache(state.range(0), RopeMode::kNone);
  CheckOk(cache->AddSequence(0));
  Prefill(*cache, 0, kLength - 30);
  for (int64_t id = 1; id < state.range(0); ++id) {
    CheckOk(cache->ForkSequence(0, id));
    Prefill(*cache, id, 20);
  }
  RunBeginAndAbort(state, *cache);
}
BENCHMARK(BeginAndAbortShared)->Arg(256)->ArgName("sequences");

// In microseconds; sorts.
double Median(std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e6;
}

// Medians of BeginForward and EndForward; the layers between are run and not timed. They leave none
// of the cache's tables in the processor's caches; with `warm` a PagesNeeded brings these back.
void DecodeStep(benchmark::State& state) {
  constexpr int64_t kSequences = 256;
  const bool same = state.range(0) != 0;
  const bool warm = state.range(1) != 0;
  const auto cache =
      MakeCache(kSequences, state.range(2) != 0 ? RopeMode::kNormal : RopeMode::kNone);
  CheckOk(cache->AddSequence(0));
  Prefill(*cache, 0, kLength - 1);
  for (int64_t id = 1; id < kSequences; ++id) ForkAndCopy(*cache, 0, id, kLength - 1 - id % 200);
  std::vector<int64_t> ids(kSequences);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<int64_t> lengths(kSequences, 1);
  std::vector<float> k(kSequences * 128), o(kSequences * 16);
  const TensorView qk(k.data(), DType::kF32, {kSequences, 1, 128});
  const TensorView v(o.data(), DType::kF32, {kSequences, 1, 16});
  std::vector<double> begin_times, end_times;
  const auto time = [](std::vector<double>& times, auto&& call) {
    const auto start = std::chrono::steady_clock::now();
    CheckOk(call());
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  };
  for (auto _ : state) {
    if (!same) std::rotate(ids.begin(), ids.begin() + 1, ids.end());
    if (warm) CheckOk(cache->PagesNeeded(ids, lengths).status());
    time(begin_times, [&] { return cache->BeginForward(ids, lengths); });
    CheckOk(cache->Append(0, qk, v));
    CheckOk(cache->Attend(0, qk, v, nullptr, 1));
    time(end_times, [&] { return cache->EndForward(); });
  }
  state.counters["begin_us"] = Median(begin_times);
  state.counters["end_us"] = Median(end_times);
}
// Few enough that every sequence has pages for its new tokens.
BENCHMARK(DecodeStep)
    ->ArgsProduct({{1, 0}, {1, 0}, {0, 1}})
    ->ArgNames({"same", "warm", "rope"})
    ->Iterations(40);

void ForkAndRemove(benchmark::State& state) {
  const auto cache = MakeCache(4, RopeMode::kNone);
  CheckOk(cache->AddSequence(0));
  Prefill(*cache, 0, kLength - 30);
  for (auto _ : state) {
    CheckOk(cache->ForkSequence(0, 1, 2011));
    CheckOk(cache->RemoveSequence(1));
  }
}
BENCHMARK(ForkAndRemove);

}  // namespace
}  // namespace quire
