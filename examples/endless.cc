// A sequence without an end in bounded memory: a sliding window with sinks.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "quire/attention_kv_cache.h"

using quire::AttentionKVCache;
using quire::DType;
using quire::Status;

constexpr int64_t kWindow = 256;
constexpr int64_t kSinks = 4;
constexpr int64_t kTokens = 10'000;

Status Run() {
  quire::AttentionKVCacheOptions options;
  options.layers.assign(
      1, {.num_qo_heads = 4, .num_kv_heads = 1, .qk_head_dim = 32, .v_head_dim = 32});
  options.max_num_sequences = 1;
  options.token_capacity = 1024;
  options.prefill_chunk_size = 1;
  options.page_size = 16;
  options.rope.mode = quire::RopeMode::kNormal;
  QUIRE_ASSIGN_OR_RETURN(auto cache, AttentionKVCache::Create(options));
  QUIRE_RETURN_IF_ERROR(cache->AddSequence(0));
  // A token sees the first kSinks tokens and the last kWindow - kSinks.
  QUIRE_RETURN_IF_ERROR(cache->EnableSlidingWindowForSeq(0, kWindow, kSinks));
  std::vector<float> qkv(6 * 32, 0.5F);
  std::vector<float> o(4 * 32);
  const std::vector<int64_t> ids{0};
  const std::vector<int64_t> lengths{1};
  int64_t pages_max = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    QUIRE_RETURN_IF_ERROR(cache->BeginForward(ids, lengths));
    QUIRE_RETURN_IF_ERROR(cache->AttentionWithFusedQKV(0, {qkv.data(), DType::kF32, {1, 6, 32}},
                                                       {o.data(), DType::kF32, {1, 4, 32}}, 0.177));
    QUIRE_RETURN_IF_ERROR(cache->EndForward());
    pages_max = std::max(pages_max, cache->pages_in_use());
  }
  std::printf("%lld tokens in at most %lld pages of 16\n", static_cast<long long>(kTokens),
              static_cast<long long>(pages_max));
  return pages_max * 16 <= 2 * kWindow ? Status()
                                       : Status(quire::StatusCode::kInternal, "memory grew");
}

int main() {
  const Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
