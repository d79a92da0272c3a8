// KVSender: sequences whose tokens go to other caches, layer by layer as forwards compute them.
//
// Invariants:
// - An active mark has a sink to send to: SetSink refuses while there is one.
// - A mark's tokens before `next` are sent: given to the sink in every layer, by forwards that have
//   ended or by Flush. What an open forward has given counts from its end on.
// - The first failure ends a mark. It stays, to say why, until it is taken away or replaced; its
//   sequence and the forward are not affected.
#ifndef QUIRE_KV_CACHE_KV_SENDER_H_
#define QUIRE_KV_CACHE_KV_SENDER_H_

#include <cstdint>
#include <memory>
#include <span>
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
  Status SetSink(std::shared_ptr<LayerSink> sink);
  Status Mark(int32_t index, int64_t begin, std::span<const ReceiveMap> maps, int64_t peer,
              int64_t rank);
  Status Unmark(const char* call, int32_t index);
  // Sends what is committed and has not been sent.
  Status Flush(const char* call, int32_t index);
  Result<SendProgress> Progress(const char* call, int32_t index) const;

  // ---- The forward. Nothing is done where there is no mark.
  // The layer has stored its rows of the open forward: sends what marks want of them. Failures end
  // the mark.
  void SendLayer(int64_t layer, const ForwardPlan& plan) noexcept {
    if (!marks_.empty()) SendMembers(layer, plan);
  }
  enum class Outcome : uint8_t { kEnded, kAborted };
  void FinishForward(const ForwardPlan& plan, Outcome outcome) noexcept;

  // ---- The sequence.
  // The mark, if there is one, goes; the sink hears of it.
  void Stop(int32_t index, const char* why) noexcept;
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
  void Finish(SendMark* mark, Outcome outcome) noexcept;

  const PagedSequences& kv_;
  SendMarks marks_;
  std::shared_ptr<LayerSink> sink_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_SENDER_H_
