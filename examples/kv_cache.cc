// Two sequences that share a prefix: prefill once, fork, decode both in one forward.
#include <cstdio>
#include <vector>

#include "quire/attention_kv_cache.h"

using quire::AttentionKVCache;
using quire::DType;
using quire::Status;
using quire::TensorView;

Status Run() {
  quire::AttentionKVCacheOptions options;
  options.layers.assign(1, {.num_qo_heads = 8,
                            .num_kv_heads = 2,
                            .qk_head_dim = 64,
                            .v_head_dim = 64,
                            .dtype = DType::kBF16});
  options.max_num_sequences = 16;
  options.token_capacity = 4096;
  options.prefill_chunk_size = 512;
  options.rope.mode = quire::RopeMode::kNormal;
  options.rope.theta = 10000.0;
  QUIRE_ASSIGN_OR_RETURN(auto cache, AttentionKVCache::Create(options));

  std::vector<float> qkv(100 * (8 + 2 + 2) * 64, 0.5F);
  std::vector<float> o(100 * 8 * 64);
  auto forward = [&](std::vector<int64_t> ids, std::vector<int64_t> lengths,
                     int64_t rows) -> Status {
    QUIRE_RETURN_IF_ERROR(cache->BeginForward(ids, lengths));
    QUIRE_RETURN_IF_ERROR(
        cache->AttentionWithFusedQKV(0, TensorView(qkv.data(), DType::kF32, {rows, 12, 64}),
                                     TensorView(o.data(), DType::kF32, {rows, 8, 64}), 0.125));
    return cache->EndForward();
  };
  QUIRE_RETURN_IF_ERROR(cache->AddSequence(0));
  QUIRE_RETURN_IF_ERROR(forward({0}, {100}, 100));  // prefill of 100 tokens
  QUIRE_RETURN_IF_ERROR(
      cache->ForkSequence(0, 1, 90));  // sequence 1 = the first 90 of them; copies nothing
  QUIRE_RETURN_IF_ERROR(forward({0, 1}, {1, 1}, 2));  // one decode step of both
  std::printf("%lld tokens in %lld pages\n",
              static_cast<long long>(cache->GetTotalSequenceLength()),
              static_cast<long long>(cache->pages_in_use()));
  return Status();
}

int main() {
  const Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
