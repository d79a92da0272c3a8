// Windows of PagedKVCache: switching them, what is legal under them, what they free.
#include <algorithm>
#include <cmath>

#include "base/float_environment.h"
#include "kv/paged_kv_cache.h"
#include "kv/reserve.h"

namespace quire {
namespace {

std::string OfSequence(const char* call, const Sequence& sequence) {
  return std::string(call) + ": sequence " + std::to_string(sequence.id) + " ";
}

}  // namespace

// ---------------------------------------------------------------------- switching

Status PagedKVCache::EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
  const char* call = "EnableSlidingWindowForSeq";
  return Enter(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindOutsideBatch(call, seq_id));
    QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
    Sequence& sequence = sequences_[index];
    if (sinks < 0 || sinks >= window || window >= kNoWindow) {
      return Status(StatusCode::kBadArgument,
                    OfSequence(call, sequence) + "cannot have a window of " +
                        std::to_string(window) + " tokens, " + std::to_string(sinks) +
                        " of them sinks; sinks are 0 or more and fewer than the window");
    }
    const int64_t present = std::min(sequence.window.window, sequence.span.tokens);
    if (present != kNoWindow) {
      return Status(StatusCode::kBadState, OfSequence(call, sequence) + "has a window of " +
                                               std::to_string(present) +
                                               " tokens; call DisableSlidingWindowForSeq first");
    }
    if (sequence.window.slid > 0 && sequence.window.sinks != sinks) {
      return Status(StatusCode::kBadState,
                    OfSequence(call, sequence) + "has lost tokens behind its first " +
                        std::to_string(sequence.window.sinks) + "; it cannot have " +
                        std::to_string(sinks) + " sinks instead");
    }
    has_windows_ = true;
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
  return Enter(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindOutsideBatch(call, seq_id));
    QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
    Sequence& sequence = sequences_[index];
    if (sequence.window.window == kNoWindow && sequence.span.tokens == kNoWindow) {
      return Status(StatusCode::kBadState, OfSequence(call, sequence) + "has no window");
    }
    plan_.ForbidRepeat();
    sequence.span = {};
    sequence.window.window = kNoWindow;
    sequence.window.slid = sequence.slid;
    if (sequence.slid == 0) sequence.window = {};
    return Status();
  });
}

Result<int64_t> PagedKVCache::HeldTokens(int64_t seq_id) const {
  return Enter("HeldTokens", [&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("HeldTokens", seq_id));
    const Sequence& sequence = sequences_[index];
    return CountHeldTokens(tree_, sequence.last) - sequence.reserved + trees_.SizeOf(index);
  });
}

Result<TokenRange> PagedKVCache::SlidRange(int64_t seq_id) const {
  return Enter("SlidRange", [&]() -> Result<TokenRange> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("SlidRange", seq_id));
    const Sequence& sequence = sequences_[index];
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
  return Enter("GetWindows", [&]() -> Result<SequenceWindows> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("GetWindows", seq_id));
    const Sequence& sequence = sequences_[index];
    return SequenceWindows{.window = OrZero(sequence.window.window),
                           .sinks = sequence.window.sinks,
                           .lost = sequence.window.slid,
                           .slid = sequence.slid,
                           .span = OrZero(sequence.span.tokens),
                           .span_sinks = sequence.span.sinks};
  });
}

// Of a sequence that has been imported with them.
void PagedKVCache::SetWindows(Sequence* sequence, const SequenceWindows& windows) noexcept {
  sequence->window = {
      .window = OrNone(windows.window), .sinks = windows.sinks, .slid = windows.lost};
  sequence->slid = windows.slid;
  sequence->span = {OrNone(windows.span), windows.span_sinks};
  has_windows_ |= windows != SequenceWindows{};
  hides_more_ = true;
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
                  OfSequence(call, sequence) + "of length " + std::to_string(committed) +
                      " cannot end at " + std::to_string(length) + ": in layer " +
                      std::to_string(group.layers.front()) +
                      " tokens that a query there would see have slid out of the window and are "
                      "no longer held; compute the sequence anew from an empty one");
  }
  return Status();
}

bool PagedKVCache::CanFork(int64_t seq_id, int64_t position) const {
  const int32_t index = sequences_.Find(seq_id);
  if (index == SequenceTable::kAbsent || position < 0) return false;
  const Sequence& sequence = sequences_[index];
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
                OfSequence(call, sequence) + "no longer holds all tokens of [" +
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

// After a forward that began at `old_length`.
void PagedKVCache::SlideTo(Sequence* sequence, int64_t old_length) noexcept {
  if (!has_windows_) return;
  const int64_t length = CommittedLength(*sequence);
  const int64_t old_slid = sequence->slid;
  // What a kept span loses is hidden for good: the rows of the next forward all see the rest.
  if (length - sequence->span.tokens > sequence->window.slid) {
    sequence->window = {
        .window = kNoWindow, .sinks = sequence->span.sinks, .slid = length - sequence->span.tokens};
    plan_.ForbidRepeat();
  }
  sequence->slid = SlidAt(sequence->window, length);
  for (int g = 0; g < tree_.group_count() && !hides_more_; ++g) {
    const int64_t layer_window = groups_[static_cast<size_t>(g)].window;
    const PagePool& pool = tree_.pool(g);
    Sequence before = *sequence;
    before.slid = old_slid;
    const HiddenRange old = HiddenFrom(before, old_length, layer_window);
    const HiddenRange now = HiddenFrom(*sequence, length, layer_window);
    hides_more_ = old.begin != now.begin || pool.RangeBegin(old.end) != pool.RangeBegin(now.end);
  }
}

void PagedKVCache::FreeHidden() noexcept {
  if (in_forward_ || !hides_more_ || !has_windows_) return;
  hides_more_ = false;
  for (int g = 0; g < tree_.group_count(); ++g)
    FreeHiddenPages(tree_, sequences_, g, groups_[static_cast<size_t>(g)].window);
}

// ---------------------------------------------------------------------- positions of sinks

void PagedKVCache::FillSinkAngles(Rope& rope) noexcept {
  rope.sink_angles.clear();
  if (!plan_.totals().has_sinks) return;
  for (const ForwardMember& member : plan_.members) {
    const RopeTable& table = rope.table(member.long_factors);
    for (const int64_t p : PositionsOf(member))
      rope.sink_angles.push_back(rope.far_rows.At(table, p - SlidAt(member.window, p)));
  }
}

void PagedKVCache::ReserveSlidAngles(int64_t pairs, int64_t rows) {
  const auto takes_rotated = [](const Layer& layer) {
    return layer.rope >= 0 && layer.mode != RopeMode::kInline;
  };
  if (std::ranges::none_of(layers_, takes_rotated)) return;
  ReserveGrowing(slid_cos_, static_cast<size_t>(rows * pairs));
  ReserveGrowing(slid_sin_, static_cast<size_t>(rows * pairs));
  ReserveGrowing(slid_angles_, static_cast<size_t>(rows));
}

void PagedKVCache::FillSlidAngles(const Layer& layer) noexcept {
  const ScopedFloatEnvironment environment;
  slid_angles_.clear();
  if (layer.rope < 0) return;
  Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
  if (rope.sink_angles.empty()) return;
  const size_t pairs = static_cast<size_t>(rope.short_table.pair_count());
  const size_t rows = static_cast<size_t>(plan_.row_count());
  slid_cos_.resize(rows * pairs);
  slid_sin_.resize(rows * pairs);
  slid_angles_.resize(rows);
  size_t row = 0;
  for (const ForwardMember& member : plan_.members) {
    const RopeFrequencies& frequencies = rope.table(member.long_factors).frequencies();
    for (const int64_t p : PositionsOf(member)) {
      const auto slid = static_cast<double>(SlidAt(member.window, p));
      float* const cos = slid_cos_.data() + row * pairs;
      float* const sin = slid_sin_.data() + row * pairs;
      for (size_t pair = 0; pair < pairs; ++pair) {
        const double angle = -slid * frequencies.inv_freq[pair];
        cos[pair] = static_cast<float>(std::cos(angle));
        sin[pair] = static_cast<float>(std::sin(angle));
      }
      slid_angles_[row++] = {cos, sin};
    }
  }
}

}  // namespace quire
