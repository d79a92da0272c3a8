#include "kv/cache/window_book.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kv/pages/sliding_window.h"

namespace quire {

// ---------------------------------------------------------------------- switching

Status WindowBook::Enable(const char* call, int32_t index, int64_t window, int64_t sinks) {
  QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  Sequence& sequence = kv_.control[index];
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
  kv_.tree.hidden().Track(kv_.control.table().entries().size());
  plan_.ForbidRepeat();
  if (kv_.options.tvm_window_span) {
    sequence.span = {window, sinks};
    return Status();
  }
  sequence.window.window = window;
  sequence.window.sinks = sinks;
  return Status();
}

Status WindowBook::Disable(const char* call, int32_t index) {
  QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  Sequence& sequence = kv_.control[index];
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
}

namespace {

// Windows of 0 are none outside, kNoWindow inside.
int64_t OrZero(int64_t window) { return window == kNoWindow ? 0 : window; }
int64_t OrNone(int64_t window) { return window == 0 ? kNoWindow : window; }

}  // namespace

TokenRange HiddenTokens(const WindowSettings& windows, int64_t layer_window, int64_t length) {
  const SequenceWindow now = {.window = kNoWindow, .sinks = windows.sinks, .slid = windows.slid};
  const HiddenRange hidden = HiddenOf(ViewOfRow(now, OrNone(layer_window), length));
  return {std::min(hidden.begin, length), std::min(hidden.end, length)};
}

WindowSettings WindowBook::Of(const Sequence& sequence) const {
  return WindowSettings{.window = OrZero(sequence.window.window),
                        .sinks = sequence.window.sinks,
                        .lost = sequence.window.slid,
                        .slid = sequence.slid,
                        .span = OrZero(sequence.span.tokens),
                        .span_sinks = sequence.span.sinks};
}

void WindowBook::Set(int32_t index, const WindowSettings& windows) noexcept {
  Sequence& sequence = kv_.control[index];
  sequence.window = {
      .window = OrNone(windows.window), .sinks = windows.sinks, .slid = windows.lost};
  sequence.slid = windows.slid;
  sequence.span = {OrNone(windows.span), windows.span_sinks};
  QUIRE_DCHECK(windows.lost <= windows.slid);
  UpdateHidden(index);
  plan_.ForbidRepeat();
}

// ---------------------------------------------------------------------- what is legal

int WindowBook::LosingGroup(const Sequence& sequence, int64_t length) const {
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    if (!CanEndAt(kv_.tree, sequence, g, kv_.groups[static_cast<size_t>(g)].window, length))
      return g;
  }
  return -1;
}

Status WindowBook::RefuseEnd(const char* call, const Sequence& sequence, int64_t length) const {
  const int group = LosingGroup(sequence, length);
  QUIRE_CHECK(group >= 0) << "sequence " << sequence.id << " has no tokens at " << length;
  return Status(StatusCode::kBadState,
                OfSequence(call, sequence.id) + "of length " +
                    std::to_string(kv_.CommittedLength(sequence)) + " cannot end at " +
                    std::to_string(length) + ": in layer " +
                    std::to_string(kv_.groups[static_cast<size_t>(group)].layers.front()) +
                    " tokens that a query there would see have slid out of the window and are "
                    "no longer held; compute the sequence again from an empty one");
}

Status WindowBook::CheckImport(const char* call, const Sequence& sequence,
                               const WindowSettings& windows, int64_t length) const {
  const WindowSettings none;
  const bool has_own =
      sequence.window.window != kNoWindow || sequence.slid > 0 || sequence.span.tokens != kNoWindow;
  if (kv_.tree.End(sequence.last) > 0 || has_own) {
    if (windows == none && !has_own) return Status();
    return Status(StatusCode::kBadState,
                  std::string(call) + ": sequence " + std::to_string(sequence.id) +
                      " is not empty, or has a window; only one that is both new and empty can be "
                      "given the windows of another");
  }
  const auto is_window = [](int64_t window, int64_t sinks) {
    return window == 0 || (window > sinks && window < kNoWindow);
  };
  const bool hides = windows.window > 0 || windows.slid > 0;
  const int64_t slid_max =
      windows.window > 0 ? std::max(windows.lost, length + 1 - windows.window) : windows.lost;
  const bool fits = windows.window >= 0 && windows.sinks >= 0 &&
                    is_window(windows.window, windows.sinks) && (hides || windows.sinks == 0) &&
                    windows.lost >= 0 && windows.slid >= windows.lost && windows.slid <= slid_max &&
                    (windows.slid == 0 || windows.slid <= length - windows.sinks);
  const bool span_fits = windows.span >= 0 && windows.span_sinks >= 0 &&
                         is_window(windows.span, windows.span_sinks) &&
                         (windows.span == 0 ? windows.span_sinks == 0
                                            : kv_.options.tvm_window_span && windows.window == 0);
  if (fits && span_fits) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": no sequence of " + std::to_string(length) +
                    " tokens can have the windows: window " + std::to_string(windows.window) +
                    ", sinks " + std::to_string(windows.sinks) + ", lost " +
                    std::to_string(windows.lost) + ", slid " + std::to_string(windows.slid) +
                    ", span " + std::to_string(windows.span) + " with sinks " +
                    std::to_string(windows.span_sinks));
}

void WindowBook::LeaveOutHidden(const WindowSettings& windows, int64_t start, int64_t end,
                                std::span<GroupAppend> groups) const {
  QUIRE_DCHECK(groups.size() == kv_.groups.size());
  QUIRE_DCHECK(start <= end);
  for (size_t g = 0; g < kv_.groups.size(); ++g) {
    const TokenRange hidden = HiddenTokens(windows, kv_.groups[g].window, end);
    const AbsentRange absent = {std::max(hidden.begin, start), hidden.end};
    if (absent.begin < absent.end) groups[g].absent = absent;
  }
}

// ---------------------------------------------------------------------- sliding

void WindowBook::MoveWindow(const Sequence& from, int64_t length, Sequence* to) const noexcept {
  QUIRE_DCHECK(length <= kv_.CommittedLength(from)) << "sequence " << from.id << " at " << length;
  const SequenceWindow window = WindowAt(from.window, length);
  to->slid = std::min(from.slid, std::max<int64_t>(SlidAt(window, length), 0));
  to->window = window;
}

void WindowBook::Slide(int32_t index) noexcept {
  Sequence& sequence = kv_.control[index];
  QUIRE_DCHECK(sequence.reserved == 0) << "sequence " << sequence.id << " is not committed";
  const int64_t length = kv_.CommittedLength(sequence);
  // What a kept span loses is hidden for good: the rows of the next forward all see the rest.
  if (length - sequence.span.tokens > sequence.window.slid) {
    sequence.window = {
        .window = kNoWindow, .sinks = sequence.span.sinks, .slid = length - sequence.span.tokens};
    plan_.ForbidRepeat();
  }
  sequence.slid = SlidAt(sequence.window, length);
  TellTree(index);
  QUIRE_DCHECK(sequence.slid >= sequence.window.slid) << "what is lost came back";
}

void WindowBook::TellTree(int32_t index) noexcept {
  const Sequence& sequence = kv_.control[index];
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    kv_.tree.hidden().Set(
        index, sequence.last, g,
        HiddenPagesOf(sequence, kv_.CommittedLength(sequence), kv_.options.max_pop,
                      kv_.tree.pool(g), kv_.groups[static_cast<size_t>(g)].window));
  }
}

}  // namespace quire
