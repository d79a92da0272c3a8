// Prefill in one cache, decode in another: KV goes over layer by layer while it is computed.
#include "quire/transfer.h"

#include <cstdio>
#include <memory>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/kv_transfer.h"

using quire::AttentionKVCache;
using quire::DType;
using quire::Result;
using quire::Status;

constexpr int64_t kPeer = 1;
constexpr int64_t kTokens = 40;

Result<std::unique_ptr<AttentionKVCache>> MakeCache(int64_t page_size) {
  quire::AttentionKVCacheOptions options;
  options.layers.assign(
      2, {.num_qo_heads = 4, .num_kv_heads = 2, .qk_head_dim = 16, .v_head_dim = 16});
  options.max_num_sequences = 1;
  options.token_capacity = 256;
  options.prefill_chunk_size = kTokens;
  options.page_size = page_size;
  QUIRE_ASSIGN_OR_RETURN(auto cache, AttentionKVCache::Create(options));
  QUIRE_RETURN_IF_ERROR(cache->AddSequence(0));
  return cache;
}

// A forward of `count` tokens; q, k and v are functions of the position. The last layer's output.
Result<std::vector<float>> Extend(AttentionKVCache& cache, int64_t start, int64_t count) {
  std::vector<float> qkv(static_cast<size_t>(count * 8 * 16));
  std::vector<float> o(static_cast<size_t>(count * 4 * 16));
  for (size_t i = 0; i < qkv.size(); ++i) {
    qkv[i] = static_cast<float>((static_cast<size_t>(start) * 128 + i) % 97) / 97.0F;
  }
  const std::vector<int64_t> ids{0};
  const std::vector<int64_t> lengths{count};
  QUIRE_RETURN_IF_ERROR(cache.BeginForward(ids, lengths));
  for (int64_t layer = 0; layer < 2; ++layer) {
    QUIRE_RETURN_IF_ERROR(
        cache.AttentionWithFusedQKV(layer, {qkv.data(), DType::kF32, {count, 8, 16}},
                                    {o.data(), DType::kF32, {count, 4, 16}}, 0.25));
  }
  QUIRE_RETURN_IF_ERROR(cache.EndForward());
  return o;
}

Status Run() {
  QUIRE_ASSIGN_OR_RETURN(auto sender, MakeCache(16));
  QUIRE_ASSIGN_OR_RETURN(auto receiver, MakeCache(32));  // page sizes may differ
  QUIRE_ASSIGN_OR_RETURN(auto alone, MakeCache(16));
  const std::shared_ptr<quire::LocalChannel> channel = quire::CreateLocalChannel();
  QUIRE_RETURN_IF_ERROR(channel->Connect(kPeer, receiver->transfer()));
  QUIRE_RETURN_IF_ERROR(sender->transfer()->SetLayerSink(channel));

  QUIRE_ASSIGN_OR_RETURN(const quire::ReceiveMap map,
                         receiver->transfer()->DisaggPrepareRecv(0, kTokens));
  const std::vector<quire::ReceiveMap> maps{map};
  QUIRE_RETURN_IF_ERROR(sender->transfer()->DisaggMarkSend(0, 0, maps, kPeer, 0));
  QUIRE_RETURN_IF_ERROR(Extend(*sender, 0, kTokens).status());  // sends each layer as it is stored
  QUIRE_RETURN_IF_ERROR(receiver->transfer()->DisaggCommitRecv(map.epoch, kTokens));

  QUIRE_RETURN_IF_ERROR(Extend(*alone, 0, kTokens).status());
  QUIRE_ASSIGN_OR_RETURN(const std::vector<float> received, Extend(*receiver, kTokens, 1));
  QUIRE_ASSIGN_OR_RETURN(const std::vector<float> expected, Extend(*alone, kTokens, 1));
  QUIRE_RETURN_IF_ERROR(channel->Disconnect(kPeer));
  if (received != expected) return Status(quire::StatusCode::kInternal, "the outputs differ");
  std::printf("%lld tokens received; the next token has the same bits\n",
              static_cast<long long>(kTokens));
  return Status();
}

int main() {
  const Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
