// SendMarks: which sequences' tokens go to other caches, how far that has got, and what the sink is
// told of it. What a layer's rows are, its user knows: KVSender sends rows of pages as forwards
// compute them, JointTransfer sends states when a forward has ended.
//
// Invariants:
// - An active mark has a sink to send to: SetSink refuses while there is one.
// - A mark's tokens before `next` are sent. What has been given to the sink since counts when
//   Finish tells it that the forward has ended.
// - The first failure ends a mark. It stays, to say why, until it is taken away or replaced; its
//   sequence and the forward are not affected.
#ifndef QUIRE_KV_TRANSFER_SEND_MARKS_H_
#define QUIRE_KV_TRANSFER_SEND_MARKS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kv/transfer/slot_runs.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"

namespace quire {

// Tokens at positions [begin, end) go to the maps' tokens 0, 1, ...; those before `next` are sent.
struct SendMark {
  int64_t seq_id = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t rank = 0;
  // One of the peers that share the receiver's heads, or the only one.
  struct Target {
    ReceiveMap map;
    SlotRuns slots;
    int64_t peer = 0;
  };
  std::vector<Target> targets;
  int64_t next = 0;
  int64_t given =
      0;  // the open forward, or the fence, has given the sink what is before it; 0: none
  Status failure;

  // What a mark sends, memory for it: planned once, so that sending allocates nothing here.
  std::vector<SendRange> ranges;
  std::vector<SendRecord> records;
  std::vector<int64_t> remote_slots;  // [target][row], of one piece

  bool active() const { return failure.ok() && next < end; }
  int64_t count() const { return end - begin; }
  // Records of tokens [first, first + count) of the map, one for each target. Allocates nothing.
  std::span<const SendRecord> RecordsOf(int64_t first, int64_t count) noexcept;
};

// A mark for positions from `begin` on, of which the map's tokens before first_row are sent; peers:
// [map]. BadArgument for a map whose slots are no encoding of its tokens, or a row that it has not.
// May throw std::bad_alloc.
// REQUIRES: maps of equal counts.
Result<std::unique_ptr<SendMark>> MakeMark(int64_t seq_id, int64_t begin,
                                           std::span<const ReceiveMap> maps,
                                           std::span<const int64_t> peers, int64_t rank,
                                           int64_t first_row);

// What the target'th of `targets` peers gets of a layer with `heads` kv heads here and
// `remote_heads` there. head_count 0: such heads do not fit together.
struct HeadsOfTarget {
  int64_t local_head = 0;
  int64_t remote_head = 0;
  int64_t head_count = 0;
};
HeadsOfTarget HeadsFor(int64_t heads, int64_t remote_heads, int64_t rank, int64_t target,
                       int64_t targets);

// Marks by index: that of the sequence in a table, or any that IndexOf gives.
class SendMarks {
 public:
  // Tokens that are read and given at once: enough to keep all threads busy, few enough that the
  // memory for them is small beside a page pool.
  static constexpr int64_t kRowsMax = 256;

  // Null if the sequence has none.
  SendMark* Find(int32_t sequence) {
    const size_t i = static_cast<size_t>(sequence);
    return i < marks_.size() ? marks_[i].get() : nullptr;
  }
  const SendMark* Find(int32_t sequence) const {
    return const_cast<SendMarks*>(this)->Find(sequence);
  }
  bool empty() const { return count_ == 0; }
  // All marks, some of them null.
  std::span<const std::unique_ptr<SendMark>> all() const { return marks_; }
  // The index of the sequence's mark; without one, an index that has no mark.
  int32_t IndexOf(int64_t seq_id) const;

  // ---- Calls of KVTransfer. NotFound without a mark.
  // BadState while a mark is active: it sends to the present sink.
  Status RequireNoneActive() const;
  Status SetSink(std::shared_ptr<LayerSink> sink);
  Status RequireSink() const;
  LayerSink& sink() const { return *sink_; }
  Status Require(const char* call, int64_t seq_id, int32_t index) const;
  Status Unmark(const char* call, int64_t seq_id, int32_t index);
  // Ends the mark; its receivers are not told. The rows that were sent, or the mark's failure.
  Result<int64_t> Detach(const char* call, int64_t seq_id, int32_t index);
  Result<SendProgress> Progress(const char* call, int64_t seq_id, int32_t index) const;
  // Makes Put succeed, and rows_memory of that size. May throw std::bad_alloc.
  void Reserve(int32_t sequence, int64_t rows_bytes);
  // Replaces the sequence's mark, if it has one. Receivers that both marks have are not told.
  void Put(int32_t sequence, std::unique_ptr<SendMark> mark) noexcept;
  // The mark, if there is one, goes; the sink hears of it.
  void Stop(int32_t sequence, const char* why) noexcept;
  // What the sink was given of the map's tokens [first_row, ...) counts from now on, or never.
  // REQUIRES: `given` says up to where.
  enum class Outcome : uint8_t { kEnded, kAborted };
  void Finish(SendMark* mark, Outcome outcome, int64_t first_row) noexcept;
  // The sequence has `length` tokens: those behind are sent again once they are computed again.
  void ShortenTo(int32_t sequence, int64_t length) noexcept;

  // Scratch of sending, for kRowsMax tokens of any layer.
  std::byte* rows_memory() const { return memory_.get(); }
  std::span<AppendTarget> rows_slots() { return slots_; }

 private:
  void Drop(int32_t sequence) noexcept;

  std::shared_ptr<LayerSink> sink_;
  std::unique_ptr<std::byte[]> memory_;
  int64_t memory_bytes_ = 0;
  std::vector<AppendTarget> slots_;
  std::vector<std::unique_ptr<SendMark>> marks_;
  int64_t count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_SEND_MARKS_H_
