// KVSender: tokens of a cache's sequences that go to other caches, layer by layer as forwards
// compute them: the cache's part of a TransferSender. It reads rows from their pages.
#ifndef QUIRE_KV_CACHE_KV_SENDER_H_
#define QUIRE_KV_CACHE_KV_SENDER_H_

#include <cstdint>
#include <vector>

#include "kv/cache/paged_sequences.h"
#include "kv/plan/forward_plan.h"
#include "kv/transfer/transfer_sender.h"
#include "quire/status.h"

namespace quire {

class KVSender final : public SendingPart {
 public:
  // Must outlive it. `own`: the sender of this cache alone.
  KVSender(const PagedSequences& kv, TransferSender& own) : kv_(kv), own_(own), sender_(&own) {}

  // ---- SendingPart.
  std::vector<TransferLayer> send_layers() override;
  void SetSender(TransferSender* sender, int64_t first_layer) noexcept override {
    sender_ = sender == nullptr ? &own_ : sender;
    first_layer_ = first_layer;
  }
  uint64_t SendLayout(int64_t seq_id) const override;
  bool binds_positions() const override;
  Status CheckHeld(const char* call, int64_t seq_id, int64_t begin, int64_t end) const override;
  int64_t SendableLength(int64_t seq_id) const override;
  Status Send(SendMark* mark, int64_t begin, int64_t end) override;

  // Whether this is a part of another state, which knows when its forwards and sequences end.
  bool is_part() const { return sender_ != &own_; }
  // Whether a mark of the sequence still has tokens to send.
  bool Sends(int64_t seq_id) const { return sender_->FindActive(seq_id) != nullptr; }

  // ---- The forward.
  // The layer has stored its rows of the open forward: sends what marks want of them. Failures end
  // the mark.
  void SendLayer(int64_t layer, const ForwardPlan& plan) noexcept {
    if (sender_->has_marks()) SendMembers(layer, plan);
  }
  void FinishForward(SendMarks::Outcome outcome) noexcept {
    if (!is_part()) own_.FinishForward(outcome);
  }

  // ---- The sequence.
  // The mark, if there is one, goes; the sink hears of it.
  void Stop(int64_t seq_id, const char* why) noexcept {
    if (!is_part()) own_.Stop(seq_id, why);
  }
  // It has `length` tokens: those after them are sent again when they come again.
  void ShortenTo(int64_t seq_id, int64_t length) noexcept { sender_->ShortenRows(seq_id, length); }
  // All sequences go.
  void Clear() noexcept;
  // What a digest of the cache's state has of the mark.
  void AppendFacts(int64_t seq_id, std::vector<int64_t>* facts) const {
    sender_->AppendFacts(seq_id, facts);
  }

 private:
  // REQUIRES: it exists.
  const Sequence& SequenceOf(int64_t seq_id) const;
  void SendMembers(int64_t layer, const ForwardPlan& plan) noexcept;
  void SendRows(SendMark* mark, const Sequence& sequence, int64_t layer, int64_t end) noexcept;
  Result<TransferSender::ReadLayer> Read(const Sequence& sequence, int64_t layer, int64_t begin,
                                         int64_t end);

  const PagedSequences& kv_;
  TransferSender& own_;
  TransferSender* sender_;
  int64_t first_layer_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_SENDER_H_
