// KVSender: sequences whose tokens go to other caches, layer by layer as forwards compute them. It
// knows which rows a mark sends and reads them from their pages; how far a mark has got and what
// the sink is told is SendMarks' business.
//
// Invariant: while no forward is open and no call is inside, no mark has `given` anything. What an
// open forward has given counts from its end on.
#ifndef QUIRE_KV_CACHE_KV_SENDER_H_
#define QUIRE_KV_CACHE_KV_SENDER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kv/cache/paged_sequences.h"
#include "kv/plan/forward_plan.h"
#include "kv/transfer/send_marks.h"
#include "quire/kv_transfer.h"
#include "quire/status.h"

namespace quire {

class KVSender {
 public:
  // Must outlive it.
  explicit KVSender(const PagedSequences& kv) : kv_(kv) {}

  // ---- Calls of KVTransfer. REQUIRES: no forward is open.
  Status SetSink(std::shared_ptr<LayerSink> sink) { return marks_.SetSink(std::move(sink)); }
  Status Mark(int32_t index, int64_t begin, std::span<const ReceiveMap> maps, int64_t peer,
              int64_t rank, int64_t first_row);
  Status Unmark(const char* call, int32_t index) {
    return marks_.Unmark(call, kv_.control[index].id, index);
  }
  Result<int64_t> Detach(const char* call, int32_t index) {
    return marks_.Detach(call, kv_.control[index].id, index);
  }
  // Sends what is committed and has not been sent.
  Status Flush(const char* call, int32_t index);
  Result<SendProgress> Progress(const char* call, int32_t index) const {
    return marks_.Progress(call, kv_.control[index].id, index);
  }

  // Whether a mark of the sequence still has tokens to send.
  bool Sends(int32_t index) const {
    const SendMark* const mark = marks_.Find(index);
    return mark != nullptr && mark->active();
  }

  // ---- The forward. Nothing is done where there is no mark.
  // The layer has stored its rows of the open forward: sends what marks want of them. Failures end
  // the mark.
  void SendLayer(int64_t layer, const ForwardPlan& plan) noexcept {
    if (!marks_.empty()) SendMembers(layer, plan);
  }
  void FinishForward(const ForwardPlan& plan, SendMarks::Outcome outcome) noexcept;

  // ---- The sequence.
  // The mark, if there is one, goes; the sink hears of it.
  void Stop(int32_t index, const char* why) noexcept { marks_.Stop(index, why); }
  // It has `length` tokens: those after them are sent again when they come again.
  void ShortenTo(int32_t index, int64_t length) noexcept { marks_.ShortenTo(index, length); }
  // What a digest of the cache's state has of the mark.
  void AppendFacts(int32_t index, std::vector<int64_t>* facts) const;

 private:
  Status CheckMaps(const Sequence& sequence, std::span<const ReceiveMap> maps, int64_t begin,
                   int64_t rank) const;
  void SendMembers(int64_t layer, const ForwardPlan& plan) noexcept;
  void SendRows(SendMark* mark, const Sequence& sequence, int64_t layer, int64_t end) noexcept;
  Status SendPiece(SendMark* mark, const Sequence& sequence, int64_t layer, int64_t begin,
                   int64_t end);
  void Finish(SendMark* mark, SendMarks::Outcome outcome) noexcept;

  const PagedSequences& kv_;
  SendMarks marks_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_SENDER_H_
