// Which sequences' tokens go to other caches, and how far that has got.
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
};

// Of a layer with `heads` kv heads here and `remote_heads` there, what the target'th of `targets`
// peers gets. head_count 0: such heads do not fit together.
struct HeadsOfTarget {
  int64_t local_head = 0;
  int64_t remote_head = 0;
  int64_t head_count = 0;
};
HeadsOfTarget HeadsFor(int64_t heads, int64_t remote_heads, int64_t rank, int64_t target,
                       int64_t targets);

// By index in the sequence table.
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
  bool any_active() const;
  // Makes Put succeed, and rows_memory of that size. May throw std::bad_alloc.
  void Reserve(int32_t sequence, int64_t rows_bytes);
  void Put(int32_t sequence, std::unique_ptr<SendMark> mark) noexcept;
  void Erase(int32_t sequence) noexcept;
  // The sequence has `length` tokens: those behind are sent anew when there are such again.
  void ShortenTo(int32_t sequence, int64_t length) noexcept;

  // Scratch of sending, for kRowsMax tokens of any layer.
  std::byte* rows_memory() const { return memory_.get(); }
  std::span<AppendTarget> rows_slots() { return slots_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  int64_t memory_bytes_ = 0;
  std::vector<AppendTarget> slots_;
  std::vector<std::unique_ptr<SendMark>> marks_;
  int64_t count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_SEND_MARKS_H_
