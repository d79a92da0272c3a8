// Test only: goes between a sender and its channel, and may do wrong on the way.
#ifndef QUIRE_KV_TESTING_SABOTEUR_H_
#define QUIRE_KV_TESTING_SABOTEUR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "quire/kv_transfer.h"
#include "quire/seams.h"

namespace quire {

class Saboteur final : public LayerSink {
 public:
  explicit Saboteur(std::shared_ptr<LayerSink> channel) : channel_(std::move(channel)) {}

  int64_t layer = -1;            // that it meddles with; -1: all
  KVTransfer* victim = nullptr;  // a byte of its next part is changed on the way
  Status refusal;                // the answer to every part, if not ok

  Status OnLayerAppended(int64_t to, std::span<const SendRange> ranges) override {
    const bool meddles = layer < 0 || layer == to;
    if (meddles && !refusal.ok()) return refusal;
    if (!meddles || victim == nullptr || ranges.empty())
      return channel_->OnLayerAppended(to, ranges);
    const SendRange& range = ranges.front();
    const ReceivePart part{.first_row = range.first_row,
                           .count = range.count,
                           .first_head = range.remote_head,
                           .head_count = range.head_count};
    KVTransfer& receiver = *std::exchange(victim, nullptr);
    QUIRE_ASSIGN_OR_RETURN(const ReceiveView view, receiver.View(range.epoch, to, part));
    CopyHeads(range.local, range.local_head, view.rows, 0, range.head_count);
    const uint32_t digest = DigestOfHeads(view.rows, 0, range.head_count);
    view.rows.k.data_as<std::byte>()[0] ^= std::byte{1};
    return receiver.Store(range.epoch, to, part, view, digest);
  }
  Status OnForwardEnded(std::span<const SendRecord> records) override {
    return channel_->OnForwardEnded(records);
  }
  Status OnForwardAborted(std::span<const SendRecord> records) override {
    return channel_->OnForwardAborted(records);
  }
  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override {
    return channel_->OnSendStopped(records, why);
  }

 private:
  const std::shared_ptr<LayerSink> channel_;
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_SABOTEUR_H_
