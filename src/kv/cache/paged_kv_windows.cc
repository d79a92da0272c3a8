// Windows of PagedKVCache: switching them, what is legal under them, what they free.
#include <algorithm>

#include "kv/cache/paged_kv_cache.h"

namespace quire {
// ---------------------------------------------------------------------- switching

Status PagedKVCache::EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
  const char* call = "EnableSlidingWindowForSeq";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.FindOutsideBatch(call, seq_id));
    QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
    Sequence& sequence = control_[index];
    if (sinks < 0 || sinks >= window || window >= kNoWindow) {
      return Status(StatusCode::kBadArgument,
                    OfSequence(call, sequence.id) + "cannot have a window of " +
                        std::to_string(window) + " tokens, " + std::to_string(sinks) +
                        " of them sinks; sinks are 0 or more and fewer than the window");
    }
    const int64_t present = std::min(sequence.window.window, sequence.span.tokens);
    if (present != kNoWindow) {
      return Status(StatusCode::kBadState, OfSequence(call, sequence.id) + "has a window of " +
                                               std::to_string(present) +
                                               " tokens; call DisableSlidingWindowForSeq first");
    }
    if (sequence.window.slid > 0 && sequence.window.sinks != sinks) {
      return Status(StatusCode::kBadState,
                    OfSequence(call, sequence.id) + "has lost tokens behind its first " +
                        std::to_string(sequence.window.sinks) + "; it cannot have " +
                        std::to_string(sinks) + " sinks instead");
    }
    tree_.TrackHidden(control_.table().entries().size());
    plan_.ForbidRepeat();
    if (options_.tvm_window_span) {
      sequence.span = {window, sinks};
      return Status();
    }
    sequence.window.window = window;
    sequence.window.sinks = sinks;
    return Status();
  });
}

Status PagedKVCache::DisableSlidingWindowForSeq(int64_t seq_id) {
  const char* call = "DisableSlidingWindowForSeq";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.FindOutsideBatch(call, seq_id));
    QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
    Sequence& sequence = control_[index];
    if (sequence.window.window == kNoWindow && sequence.span.tokens == kNoWindow) {
      return Status(StatusCode::kBadState, OfSequence(call, sequence.id) + "has no window");
    }
    plan_.ForbidRepeat();
    sequence.span = {};
    sequence.window.window = kNoWindow;
    sequence.window.slid = sequence.slid;
    if (sequence.slid == 0) sequence.window = {};
    UpdateHidden(index);  // what had slid cannot be popped back to
    FreeHidden();
    return Status();
  });
}

Result<int64_t> PagedKVCache::HeldTokens(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("HeldTokens", seq_id));
    const Sequence& sequence = control_[index];
    return CountHeldTokens(tree_, sequence.last) - sequence.reserved + trees_.SizeOf(index);
  });
}

Result<TokenRange> PagedKVCache::SlidRange(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<TokenRange> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("SlidRange", seq_id));
    const Sequence& sequence = control_[index];
    if (sequence.slid == 0) return TokenRange();
    return TokenRange{sequence.window.sinks, sequence.window.sinks + sequence.slid};
  });
}

namespace {

// Windows of 0 are none outside, kNoWindow inside.
int64_t OrZero(int64_t window) { return window == kNoWindow ? 0 : window; }
int64_t OrNone(int64_t window) { return window == 0 ? kNoWindow : window; }

}  // namespace

TokenRange HiddenTokens(const SequenceWindows& windows, int64_t layer_window, int64_t length) {
  const SequenceWindow now = {.window = kNoWindow, .sinks = windows.sinks, .slid = windows.slid};
  const HiddenRange hidden = HiddenOf(ViewOfRow(now, OrNone(layer_window), length));
  return {std::min(hidden.begin, length), std::min(hidden.end, length)};
}

Result<SequenceWindows> PagedKVCache::GetWindows(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<SequenceWindows> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("GetWindows", seq_id));
    const Sequence& sequence = control_[index];
    return SequenceWindows{.window = OrZero(sequence.window.window),
                           .sinks = sequence.window.sinks,
                           .lost = sequence.window.slid,
                           .slid = sequence.slid,
                           .span = OrZero(sequence.span.tokens),
                           .span_sinks = sequence.span.sinks};
  });
}

// Of a sequence that has been imported with them.
void PagedKVCache::SetWindows(int32_t index, const SequenceWindows& windows) noexcept {
  Sequence& sequence = control_[index];
  sequence.window = {
      .window = OrNone(windows.window), .sinks = windows.sinks, .slid = windows.lost};
  sequence.slid = windows.slid;
  sequence.span = {OrNone(windows.span), windows.span_sinks};
  UpdateHidden(index);
  plan_.ForbidRepeat();
}

// ---------------------------------------------------------------------- what is legal

Status PagedKVCache::CheckEnd(const char* call, const Sequence& sequence, int64_t length) const {
  const int64_t committed = CommittedLength(sequence);
  if (length == committed) return Status();
  for (int g = 0; g < tree_.group_count(); ++g) {
    const LayerGroup& group = groups_[static_cast<size_t>(g)];
    if (CanEndAt(tree_, sequence, g, group.window, length)) continue;
    return Status(StatusCode::kBadState,
                  OfSequence(call, sequence.id) + "of length " + std::to_string(committed) +
                      " cannot end at " + std::to_string(length) + ": in layer " +
                      std::to_string(group.layers.front()) +
                      " tokens that a query there would see have slid out of the window and are "
                      "no longer held; compute the sequence anew from an empty one");
  }
  return Status();
}

bool PagedKVCache::CanFork(int64_t seq_id, int64_t position) const {
  const auto lock = gate_.Lock();
  const int32_t index = control_.table().Find(seq_id);
  if (index == SequenceTable::kAbsent || position < 0) return false;
  const Sequence& sequence = control_[index];
  const int64_t length = CommittedLength(sequence);
  if (position >= length) return position == length;
  for (int g = 0; g < tree_.group_count(); ++g) {
    if (!CanEndAt(tree_, sequence, g, groups_[static_cast<size_t>(g)].window, position))
      return false;
  }
  return true;
}

Status PagedKVCache::CheckHeld(const char* call, const Sequence& sequence, int group, int64_t start,
                               int64_t end) const {
  if (tree_.IsHeld(sequence.last, group, start, end)) return Status();
  return Status(StatusCode::kBadArgument,
                OfSequence(call, sequence.id) + "no longer holds all tokens of [" +
                    std::to_string(start) + ", " + std::to_string(end) + ") in layer " +
                    std::to_string(groups_[static_cast<size_t>(group)].layers.front()) +
                    ": some have slid out of the window");
}

// ---------------------------------------------------------------------- sliding

// `to` ends at `length` of what `from` holds; they may be the same.
void PagedKVCache::MoveEnd(const Sequence& from, int64_t length, Sequence* to) const noexcept {
  const SequenceWindow window = WindowAt(from.window, length);
  to->slid = std::min(from.slid, std::max<int64_t>(SlidAt(window, length), 0));
  to->window = window;
}

// After a forward.
void PagedKVCache::SlideTo(int32_t index) noexcept {
  if (!tree_.tracks_hidden()) return;
  Sequence& sequence = control_[index];
  const int64_t length = CommittedLength(sequence);
  // What a kept span loses is hidden for good: the rows of the next forward all see the rest.
  if (length - sequence.span.tokens > sequence.window.slid) {
    sequence.window = {
        .window = kNoWindow, .sinks = sequence.span.sinks, .slid = length - sequence.span.tokens};
    plan_.ForbidRepeat();
  }
  sequence.slid = SlidAt(sequence.window, length);
  UpdateHidden(index);
}

void PagedKVCache::UpdateHidden(int32_t index) noexcept {
  if (!tree_.tracks_hidden()) return;
  const Sequence& sequence = control_[index];
  for (int g = 0; g < tree_.group_count(); ++g) {
    tree_.SetHidden(index, sequence.last, g,
                    HiddenPagesOf(sequence, CommittedLength(sequence), options_.max_pop,
                                  tree_.pool(g), groups_[static_cast<size_t>(g)].window));
  }
}

}  // namespace quire
