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
  KVTransfer* victim = nullptr;  // a byte of its next part is changed before it is completed
  Status refusal;                // the answer to every part, if not ok

  Status OnLayerAppended(int64_t to, std::span<const SendRange> ranges) override {
    const bool meddles = layer < 0 || layer == to;
    if (meddles && !refusal.ok()) return refusal;
    QUIRE_RETURN_IF_ERROR(channel_->OnLayerAppended(to, ranges));
    if (!meddles || victim == nullptr || ranges.empty()) return Status();
    const SendRange& range = ranges.front();
    const auto view = std::exchange(victim, nullptr)
                          ->View(range.epoch, to,
                                 {.first_row = range.first_row,
                                  .count = 1,
                                  .first_head = range.remote_head,
                                  .head_count = range.head_count});
    if (!view.ok()) return view.status();
    const int64_t at =
        range.remote_head * view->rows.k.stride(1) * DTypeBytes(view->rows.k.dtype());
    view->rows.k.data_as<std::byte>()[at] ^= std::byte{1};
    return Status();
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
