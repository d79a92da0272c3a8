// WindowBook: the windows and sinks of a cache's sequences. It switches them, says what is legal
// under them, and keeps the block tree told of what they hide.
//
// Invariants, of every sequence outside of the open forward's batch:
// - `slid` is how many positions after the sinks a next query does not see. It is a function of the
//   window and the committed length as of the last forward, import or commit (SlideTo), and never
//   grows by a fork or a pop (MoveEnd).
// - While the tree tracks what is hidden, it has from UpdateHidden what the sequence hides at its
//   present end, less what a pop of max_pop tokens would show again.
// - A plan made before a window changed is not repeated.
#ifndef QUIRE_KV_CACHE_WINDOW_BOOK_H_
#define QUIRE_KV_CACHE_WINDOW_BOOK_H_

#include <cstdint>
#include <span>

#include "kv/cache/paged_sequences.h"
#include "kv/plan/forward_plan.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

class WindowBook {
 public:
  // Both must outlive it. `plan`: the last forward's.
  WindowBook(PagedSequences& kv, ForwardPlan& plan) : kv_(kv), plan_(plan) {}

  // ---- Switching, as AttentionKVCache has it. REQUIRES: the sequence is outside of the batch.
  Status Enable(const char* call, int32_t index, int64_t window, int64_t sinks);
  Status Disable(const char* call, int32_t index);
  WindowSettings Of(const Sequence& sequence) const;
  // The sequence was just imported with them. REQUIRES: CheckImport, and
  // BlockTree::TrackHidden.
  void Set(int32_t index, const WindowSettings& windows) noexcept;

  // ---- What is legal.
  // BadState unless the sequence can be cut or forked at `length`.
  Status CheckEnd(const char* call, const Sequence& sequence, int64_t length) const {
    return CanEnd(sequence, length) ? Status() : RefuseEnd(call, sequence, length);
  }
  bool CanEnd(const Sequence& sequence, int64_t length) const {
    QUIRE_DCHECK(length >= 0);
    const int64_t committed = kv_.CommittedLength(sequence);
    if (length >= committed) return length == committed;
    QUIRE_DCHECK(hides() || LosingGroup(sequence, length) < 0);
    return !hides() || LosingGroup(sequence, length) < 0;
  }
  // Whether a sequence of `length` tokens can be imported with these windows.
  Status CheckImport(const char* call, const Sequence& sequence, const WindowSettings& windows,
                     int64_t length) const;
  // Windows of layers and `windows` hide tokens of [start, end) from what stands behind them: the
  // appends leave these out.
  void LeaveOutHidden(const WindowSettings& windows, int64_t start, int64_t end,
                      std::span<GroupAppend> groups) const;

  // ---- Sliding.
  // `to` ends at `length` of what `from` holds; they may be the same.
  void MoveEnd(const Sequence& from, int64_t length, Sequence* to) const noexcept {
    QUIRE_DCHECK(hides() || (from.window == SequenceWindow{} && to->window == from.window));
    if (hides()) MoveWindow(from, length, to);
  }
  // The sequence has got committed tokens.
  void SlideTo(int32_t index) noexcept {
    if (hides()) Slide(index);
  }
  // What the sequence hides, by its length, has changed, or it ends in another block than before.
  void UpdateHidden(int32_t index) noexcept {
    if (hides()) TellTree(index);
  }
  // Pages that nobody sees any more go, unless a forward is open: its plan may read them.
  void FreeHidden() noexcept {
    if (!kv_.control.in_forward()) kv_.tree.hidden().Free();
  }

 private:
  // Whether any window has been in use since all sequences went. If not, no sequence has one, none
  // has slid, and all pages are held.
  bool hides() const { return kv_.tree.hidden().tracks(); }
  // The first group that does not hold all that a query at `length` would see, or -1.
  int LosingGroup(const Sequence& sequence, int64_t length) const;
  Status RefuseEnd(const char* call, const Sequence& sequence, int64_t length) const;
  // MoveEnd, SlideTo and UpdateHidden once windows are in use.
  void MoveWindow(const Sequence& from, int64_t length, Sequence* to) const noexcept;
  void Slide(int32_t index) noexcept;
  void TellTree(int32_t index) noexcept;

  PagedSequences& kv_;
  ForwardPlan& plan_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_WINDOW_BOOK_H_
