// A chunk of 256 tokens of an 8B model's shape (32 layers of 8 heads of 128, bfloat16: 32 MiB) out
// of a cache and into one, and its parts: what to compare with a copy of the same bytes.
#include <benchmark/benchmark.h>

#include <cstring>
#include <numeric>

#include "base/check.h"
#include "quire/kv_export.h"

namespace quire {
namespace {

constexpr int64_t kTokens = 256;
constexpr int64_t kLayers = 32;
constexpr int64_t kSequence = 0;

std::unique_ptr<AttentionKVCache> MakeCache() {
  AttentionKVCacheOptions options;
  options.layers.assign(kLayers, {.num_qo_heads = 32,
                                  .num_kv_heads = 8,
                                  .qk_head_dim = 128,
                                  .v_head_dim = 128,
                                  .dtype = DType::kBF16});
  options.max_num_sequences = 2;
  options.token_capacity = 2 * kTokens;
  options.prefill_chunk_size = kTokens;
  Result<std::unique_ptr<AttentionKVCache>> cache = AttentionKVCache::Create(options);
  QUIRE_CHECK(cache.ok()) << cache.status().ToString();
  return *std::move(cache);
}

ChunkFields Fields() {
  ChunkFields fields;
  fields.tokens.resize(kTokens);
  std::iota(fields.tokens.begin(), fields.tokens.end(), 0);
  return fields;
}

// A cache with the tokens, and the chunk of them.
struct Scene {
  Scene() : cache(MakeCache()) {
    std::vector<std::byte> zeros(static_cast<size_t>(kTokens) * 8 * 128 * 2);
    const LayerKV layer{TensorView(zeros.data(), DType::kBF16, {kTokens, 8, 128}),
                        TensorView(zeros.data(), DType::kBF16, {kTokens, 8, 128})};
    const KVBlock block(kLayers, layer);
    QUIRE_CHECK(cache->AddSequence(kSequence).ok());
    QUIRE_CHECK(cache->ImportKV(kSequence, std::span(&block, 1)).ok());
    chunk = ExportChunk(*cache, kSequence, 0, Fields()).value();
  }
  ChunkView View() const {
    return ChunkView::Open(chunk.bytes(), ChunkExpectation{}, ChunkLimits{}).value();
  }
  std::unique_ptr<AttentionKVCache> cache;
  ChunkBuffer chunk;
};

void SetBytes(benchmark::State& state, const Scene& scene) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(scene.chunk.bytes().size()));
}

void Copy(benchmark::State& state) {
  const Scene scene;
  ChunkBuffer to(static_cast<int64_t>(scene.chunk.bytes().size()));
  for (auto _ : state) {
    std::memcpy(to.bytes().data(), scene.chunk.bytes().data(), to.bytes().size());
    benchmark::ClobberMemory();
  }
  SetBytes(state, scene);
}
BENCHMARK(Copy)->UseRealTime();

void Verify(benchmark::State& state) {
  const Scene scene;
  for (auto _ : state) QUIRE_CHECK(scene.View().CheckAll().ok());
  SetBytes(state, scene);
}
BENCHMARK(Verify)->UseRealTime();

void Export(benchmark::State& state) {
  const Scene scene;
  for (auto _ : state) QUIRE_CHECK(ExportChunk(*scene.cache, kSequence, 0, Fields()).ok());
  SetBytes(state, scene);
}
BENCHMARK(Export)->UseRealTime();

void Import(benchmark::State& state) {
  const Scene scene;
  for (auto _ : state) {
    const ChunkView view = scene.View();
    QUIRE_CHECK(ImportChunks(*scene.cache, 1, std::span(&view, 1)).ok());
    QUIRE_CHECK(scene.cache->RemoveSequence(1).ok());
  }
  SetBytes(state, scene);
}
BENCHMARK(Import)->UseRealTime();

}  // namespace
}  // namespace quire
