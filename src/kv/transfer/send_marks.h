// SendMarks: which sequences' tokens go to other states, how far that has got, and what the sink is
// told of it. TransferSender knows what is sent when.
//
// Invariants:
// - An active mark has a sink to send to: SetSink refuses while there is one.
// - A mark's rows before `next` are sent, and the states at `state_next`, if that is not its begin.
//   What has been given to the sink since counts when Finish tells it that the forward has ended.
// - The first failure ends a mark. It stays, to say why, until it is taken away or replaced; its
//   sequence and the forward are not affected.
#ifndef QUIRE_KV_TRANSFER_SEND_MARKS_H_
#define QUIRE_KV_TRANSFER_SEND_MARKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/spare_memory.h"
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
  bool has_rows = true;
  bool has_states = false;
  int64_t next = 0;        // of rows
  int64_t state_next = 0;  // the position of the states that were sent last
  int64_t given =
      0;  // the open forward, or the fence, has given the sink what is before it; 0: none
  Status failure;

  // What a sink is told, planned once: only the rows' own memory is allocated as they are sent.
  std::vector<SendRange> ranges;
  std::vector<SendRecord> records;
  std::vector<int64_t> remote_slots;  // [target][row], of one piece

  bool active() const { return failure.ok() && reached() < end; }
  int64_t count() const { return end - begin; }
  // Everything of the tokens before it is sent.
  int64_t reached() const {
    if (!has_states) return next;
    return has_rows ? std::min(next, state_next) : state_next;
  }
  // The sequence has `length` tokens: rows after those are sent again once they are computed again.
  void ShortenTo(int64_t length) noexcept;
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

// A mark for a sequence at most, in the order of ids.
class SendMarks {
 public:
  // Tokens that are read and given at once: enough to keep all threads busy, few enough that the
  // memory for them is small beside a page pool.
  static constexpr int64_t kRowsMax = 256;

  // Null if the sequence has none.
  SendMark* Find(int64_t seq_id) {
    const size_t place = PlaceOf(seq_id);
    return place < marks_.size() && marks_[place]->seq_id == seq_id ? marks_[place].get() : nullptr;
  }
  const SendMark* Find(int64_t seq_id) const { return const_cast<SendMarks*>(this)->Find(seq_id); }
  // Null also if nothing is left to send.
  SendMark* FindActive(int64_t seq_id) {
    SendMark* const mark = Find(seq_id);
    return mark != nullptr && mark->active() ? mark : nullptr;
  }
  bool empty() const { return marks_.empty(); }
  std::span<const std::unique_ptr<SendMark>> all() const { return marks_; }

  // ---- Calls of KVTransfer. NotFound without a mark.
  // BadState while a mark is active: it sends to the present sink.
  Status RequireNoneActive() const;
  Status SetSink(std::shared_ptr<LayerSink> sink);
  Status RequireSink() const;
  LayerSink& sink() const { return *sink_; }
  Status Require(const char* call, int64_t seq_id) const;
  Status Unmark(const char* call, int64_t seq_id);
  // Ends the mark; its receivers are not told. The rows that were sent, or the mark's failure.
  Result<int64_t> Detach(const char* call, int64_t seq_id);
  Result<SendProgress> Progress(const char* call, int64_t seq_id) const;
  // Makes Put succeed. May throw std::bad_alloc.
  void Reserve();
  // Replaces the sequence's mark, if it has one. Receivers that both marks have are not told.
  void Put(std::unique_ptr<SendMark> mark) noexcept;
  // The mark, if there is one, goes; the sink hears of it.
  void Stop(int64_t seq_id, const char* why) noexcept;
  void StopAll(const char* why) noexcept;
  // What the sink was given of the map's tokens [first_row, ...) counts from now on, or never.
  // `reached`: how far the mark has got with them, next or state_next. REQUIRES: `given` says up to
  // where.
  enum class Outcome : uint8_t { kEnded, kAborted };
  void Finish(SendMark* mark, Outcome outcome, int64_t SendMark::*reached,
              int64_t first_row) noexcept;

  // Memory for what is read and given at once, which a sink may hold. May throw std::bad_alloc.
  std::shared_ptr<std::byte[]> TakeMemory(int64_t bytes) {
    return SharedSpareMemory::Take(memory_, bytes);
  }
  // Scratch, for kRowsMax tokens.
  std::span<AppendTarget> rows_slots() { return slots_; }

 private:
  // Where the sequence's mark is, or would come.
  size_t PlaceOf(int64_t seq_id) const {
    const auto place = std::ranges::lower_bound(
        marks_, seq_id, {}, [](const std::unique_ptr<SendMark>& mark) { return mark->seq_id; });
    return static_cast<size_t>(place - marks_.begin());
  }
  void Drop(int64_t seq_id) noexcept;

  // That no sink holds: as much as the window of a connection lets be on its way.
  static constexpr int64_t kSpareBytesMax = int64_t{64} << 20;

  std::shared_ptr<LayerSink> sink_;
  const std::shared_ptr<SharedSpareMemory> memory_ =
      std::make_shared<SharedSpareMemory>(kSpareBytesMax);
  std::vector<AppendTarget> slots_;
  std::vector<std::unique_ptr<SendMark>> marks_;  // by seq_id
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_SEND_MARKS_H_
