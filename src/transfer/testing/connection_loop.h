// Both ends of a connection, in this process, and rows that go over it from plain memory to plain
// memory: the channel alone, with digests and records, for benchmarks.
#ifndef QUIRE_TRANSFER_TESTING_CONNECTION_LOOP_H_
#define QUIRE_TRANSFER_TESTING_CONNECTION_LOOP_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "quire/transfer_peer.h"
#include "transfer/testing/channel_receiver.h"

namespace quire {

// Rows of one layer in plain memory. As a receiver it counts what is complete and copies nothing.
class RowMemory final : public ChannelReceiver {
 public:
  static constexpr int64_t kHeads = 8;
  static constexpr int64_t kDim = 128;
  static constexpr int64_t kRowBytes = kHeads * kDim * 2 * 2;  // keys and values of bfloat16

  explicit RowMemory(int64_t rows)
      : memory_(std::make_shared<std::vector<std::byte>>(static_cast<size_t>(rows * kRowBytes),
                                                         std::byte{0x3c})),
        rows_(rows) {}

  LayerKV Rows(int64_t first, int64_t count) const {
    std::byte* const k = memory_->data() + first * kRowBytes / 2;
    return {.k = TensorView(k, DType::kBF16, {count, kHeads, kDim}),
            .v = TensorView(k + rows_ * kRowBytes / 2, DType::kBF16, {count, kHeads, kDim})};
  }
  const std::shared_ptr<std::vector<std::byte>>& memory() const { return memory_; }
  // Until that number is complete; the count begins at 0 then.
  void WaitFor(int64_t rows) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ >= rows; });
    completed_ = 0;
  }

  Result<ReceiveView> View(uint64_t, int64_t, const ReceivePart& part) override {
    return ReceiveView{.rows = Rows(part.first_row, part.count), .memory = nullptr};
  }
  Status Store(uint64_t, int64_t, const ReceivePart&, const ReceiveView&,
               std::optional<uint32_t>) override {
    return Status();
  }
  Status Complete(uint64_t, int64_t, const ReceivePart& part) override {
    const std::lock_guard lock(mutex_);
    completed_ += part.count;
    changed_.notify_all();
    return Status();
  }
  StagingUse staging() const override { return StagingUse(); }
  Status SetStagingLimit(int64_t) override { return Status(); }
  Status FailReceive(uint64_t, const Status&) override { return Status(); }
  Result<ReceiveProgress> GetReceiveProgress(uint64_t) const override { return ReceiveProgress{}; }

 private:
  const std::shared_ptr<std::vector<std::byte>> memory_;
  const int64_t rows_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t completed_ = 0;
};

class ConnectionLoop {
 public:
  // For `rows` rows. endpoint: as TransferListenerOptions. streams: as TransferPeerOptions.
  static Result<std::unique_ptr<ConnectionLoop>> Open(const std::string& endpoint, int64_t rows,
                                                      int64_t streams = 1) {
    TransferPeerOptions options;
    options.streams = streams;
    PassportLayer layer;
    layer.kv_heads = layer.head_dim = layer.v_head_dim = 1;
    options.passport.layers = {layer};
    options.send_wait = std::chrono::minutes(1);
    QUIRE_ASSIGN_OR_RETURN(const std::unique_ptr<TransferListener> listener,
                           TransferListener::Start({.endpoint = endpoint, .peer = options}));
    std::unique_ptr<ConnectionLoop> loop(new ConnectionLoop(rows));
    QUIRE_ASSIGN_OR_RETURN(loop->to_, TransferPeer::Connect(listener->endpoint(), options));
    const auto from = listener->Accept(*loop->clock_, kNever);
    QUIRE_RETURN_IF_ERROR(from.status());
    loop->from_ = from->value();
    QUIRE_RETURN_IF_ERROR(loop->to_->SetReceiver(&loop->target_));
    const ReceiveMap map{
        .epoch = kEpoch, .slots = {1, 0, rows}, .count = rows, .kv_heads = {RowMemory::kHeads}};
    QUIRE_RETURN_IF_ERROR(loop->to_->Request({}, map));
    QUIRE_RETURN_IF_ERROR(loop->from_->NextRequest(*loop->clock_, kNever).status());
    return loop;
  }

  // All rows, handed over as many at a time as a cache would, until they count.
  Status Move(int64_t rows_at_a_time) {
    for (int64_t first = 0; first < rows_; first += rows_at_a_time) {
      SendRange range;
      range.epoch = kEpoch;
      range.first_row = first;
      range.count = std::min(rows_at_a_time, rows_ - first);
      range.local = source_.Rows(first, range.count);
      range.memory = source_.memory();
      range.head_count = RowMemory::kHeads;
      QUIRE_RETURN_IF_ERROR(from_->OnLayerAppended(0, std::span(&range, 1)));
    }
    const SendRecord record{.epoch = kEpoch, .count = rows_};
    QUIRE_RETURN_IF_ERROR(from_->OnForwardEnded(std::span(&record, 1)));
    target_.WaitFor(rows_);
    return Status();
  }

 private:
  static constexpr uint64_t kEpoch = 1;

  explicit ConnectionLoop(int64_t rows) : rows_(rows), source_(rows), target_(rows) {}

  const int64_t rows_;
  const std::shared_ptr<Clock> clock_ = MachineTime();
  RowMemory source_;
  RowMemory target_;  // of to_, which ends before it
  std::shared_ptr<TransferPeer> to_;
  std::shared_ptr<TransferPeer> from_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_CONNECTION_LOOP_H_
