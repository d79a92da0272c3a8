// Keys and values of a prompt go from the pages of one cache to those of another one: in one
// process from hand to hand, and over a connection as between processes, whose two ends are both
// here. Beside it a plain copy of as many bytes.
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bench_case.h"
#include "quire/attention_kv_cache.h"
#include "quire/kv_export.h"
#include "quire/transfer.h"
#include "quire/transfer_peer.h"
#include "transfer/byte_channel.h"

namespace quire::bench {
namespace {

struct Shape {
  int64_t layers = 0, kv_heads = 0, head_dim = 0, tokens = 0;

  // Of the keys, or of the values, of a layer.
  size_t tensor_bytes() const {
    return static_cast<size_t>(tokens * kv_heads * head_dim * DTypeBytes(DType::kBF16));
  }
};

std::unique_ptr<AttentionKVCache> MakeCache(const Shape& shape) {
  AttentionKVCacheOptions options;
  options.layers.assign(static_cast<size_t>(shape.layers), {.num_qo_heads = 4 * shape.kv_heads,
                                                            .num_kv_heads = shape.kv_heads,
                                                            .qk_head_dim = shape.head_dim,
                                                            .v_head_dim = shape.head_dim,
                                                            .dtype = DType::kBF16});
  options.max_num_sequences = 2;
  options.token_capacity = 2 * shape.tokens;
  options.prefill_chunk_size = 512;
  options.rope.mode = RopeMode::kNormal;
  return Require(AttentionKVCache::Create(options));
}

class TransferCase : public BenchCase {
 public:
  // way: "hand", "tcp", "unix" or "ucx".
  TransferCase(const Shape& shape, const std::string& way)
      : shape_(shape), from_(MakeCache(shape)), to_(MakeCache(shape)) {
    Require(from_->AddSequence(0));
    Require(to_->AddSequence(0));
    Fill();
    if (way == "hand") {
      const std::shared_ptr<LocalChannel> hand = CreateLocalChannel();
      Require(hand->Connect(0, to_->transfer()));
      Require(from_->transfer()->SetLayerSink(hand));
    } else {
      Connect(way);
    }
  }
  ~TransferCase() override {
    if (receiver_ != nullptr) Require(receiver_->SetReceiver(nullptr));
  }

  nlohmann::json Run(const RunLimits& limits) override {
    nlohmann::json samples = nlohmann::json::object();
    const double begin = Now();
    for (int64_t i = 0; i < limits.min_calls || Now() - begin < limits.seconds; ++i) {
      const double start = Now();
      Move();
      samples["call"].push_back(Now() - start);
      Require(from_->transfer()->DisaggUnmarkSend(0));
      Require(to_->PopN(0, shape_.tokens));
    }
    return samples;
  }

 private:
  void Fill() {
    std::vector<std::byte> bytes(shape_.tensor_bytes(), std::byte{0x3c});
    const TensorView rows(bytes.data(), DType::kBF16,
                          {shape_.tokens, shape_.kv_heads, shape_.head_dim});
    const KVBlock block{
        .layers = std::vector<LayerKV>(static_cast<size_t>(shape_.layers), {.k = rows, .v = rows})};
    Require(from_->ImportKV(0, std::span(&block, 1)));
  }

  void Connect(const std::string& way) {
    TransferListenerOptions options;
    options.endpoint = PlaceToListen(way);
    options.peer.passport = Require(CachePassport(SequenceStates(*to_), Passport(), false));
    options.peer.send_wait = std::chrono::minutes(1);
    const std::unique_ptr<TransferListener> listener = Require(TransferListener::Start(options));
    receiver_ = Require(TransferPeer::Connect(listener->endpoint(), options.peer));
    Require(receiver_->SetReceiver(to_->transfer()));
    sender_ = *Require(listener->Accept(*clock_, kNever));
    Require(from_->transfer()->SetLayerSink(sender_));
  }

  void Move() {
    KVTransfer& to = *to_->transfer();
    ReceiveMap map = Require(to.DisaggPrepareRecv(0, shape_.tokens));
    if (receiver_ != nullptr) {
      Require(receiver_->Request({}, map));
      map = Require(sender_->NextRequest(*clock_, kNever))->map;
    }
    Require(from_->transfer()->DisaggMarkSend(0, 0, std::span(&map, 1), /*peer=*/0, /*rank=*/0));
    Require(from_->transfer()->DisaggFlushSend(0));
    Require(to.WaitReceived(map.epoch, shape_.tokens, *clock_, kNever));
    Require(to.DisaggCommitRecv(map.epoch, shape_.tokens));
    if (receiver_ == nullptr) return;
    // Unless the heartbeat was faster: it ends a transfer whose tokens are committed.
    const Status ended =
        receiver_->Cancel(map.epoch, Status(StatusCode::kCancelled, "all tokens are here"));
    if (ended.code() != StatusCode::kNotFound) Require(ended);
  }

  const Shape shape_;
  const std::shared_ptr<Clock> clock_ = MachineTime();
  const std::unique_ptr<AttentionKVCache> from_;
  const std::unique_ptr<AttentionKVCache> to_;
  std::shared_ptr<TransferPeer> receiver_;  // null: from hand to hand
  std::shared_ptr<TransferPeer> sender_;
};

class CopyCase : public BenchCase {
 public:
  explicit CopyCase(const Shape& shape)
      : from_(2 * static_cast<size_t>(shape.layers) * shape.tensor_bytes(), std::byte{0x3c}),
        to_(from_.size()) {}

  nlohmann::json Run(const RunLimits& limits) override {
    return TimeCalls(limits, [&] { std::memcpy(to_.data(), from_.data(), from_.size()); });
  }

 private:
  const std::vector<std::byte> from_;
  std::vector<std::byte> to_;
};

}  // namespace

bool HasUcx() {
  Endpoint endpoint = Require(Endpoint::Parse("127.0.0.1:0"));
  return ListenUcx(&endpoint).ok();
}

std::string PlaceToListen(const std::string& way) {
  static int sockets_made = 0;
  if (way == "tcp") return "127.0.0.1:0";
  if (way == "ucx") return "ucx:127.0.0.1:0";
  if (way != "unix") Require(Status(StatusCode::kBadArgument, "way: there is no " + way));
  return "unix:/tmp/quire-bench-" + std::to_string(::getpid()) + "-" +
         std::to_string(++sockets_made);
}

std::unique_ptr<BenchCase> MakeTransferCase(const JsonValue& request) {
  const Shape shape{.layers = Require(request.GetInt("layers", 1)),
                    .kv_heads = Require(request.GetInt("kv_heads", 1)),
                    .head_dim = Require(request.GetInt("head_dim", 1)),
                    .tokens = Require(request.GetInt("tokens", 1))};
  const std::string way = Require(request.GetString("way"));
  if (way == "copy") return std::make_unique<CopyCase>(shape);
  return std::make_unique<TransferCase>(shape, way);
}

}  // namespace quire::bench
