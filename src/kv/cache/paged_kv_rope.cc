// Angles of PagedKVCache: which positions a forward needs, and when the others go.
//
// A forward needs the positions of its rows; with a window's sinks also those that sinks are seen
// from (p - slid(p)); in RopeMode::kInline all that its rows see. These are made resident before
// the commit. Tiles that neither this forward nor the next one of any sequence needs are dropped at
// sweeps (SweepPace), also when a sequence is removed or shortened; those near the beginning stay.
// Sequences that do not take part give way where the tables would be larger than the memory plan
// says (RopeLayers::tile_count_max); their angles are computed again when they do.
#include <algorithm>

#include "kv/cache/paged_kv_cache.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

// Tiles that are looked at in the time of a sequence, which may have to come from memory. A call
// pays for as many.
constexpr int64_t kTilesPerSequence = 16;

// A sequence with rows from `base` to `end`: calls need(begin, end) for positions.
template <typename F>
void VisitRowPositions(const SequenceWindow& window, int64_t base, int64_t end, F&& need) {
  need(base, end);
  if (window.sinks == 0 || base >= end) return;
  need(base - SlidAt(window, base), end - SlidAt(window, end - 1));
}

// What the row at `base` sees before itself.
template <typename F>
void VisitSeenPositions(const SequenceWindow& window, int64_t layer_window, int64_t base,
                        F&& need) {
  const HiddenRange hidden = HiddenOf(ViewOfRow(window, layer_window, base));
  need(0, std::min(hidden.begin, base));
  need(std::min(hidden.end, base), base);
}

}  // namespace

bool PagedKVCache::NeedsNoAngles(const Rope& rope, int64_t more_rows) const {
  const BatchTotals& totals = plan_.totals();
  const bool has_short =
      totals.short_end == 0 || totals.short_end + more_rows <= rope.short_table.dense_end();
  const bool has_long =
      totals.long_end == 0 || totals.long_end + more_rows <= rope.long_table.dense_end();
  return has_short && has_long;
}

// `repeats`: each member gets one row more than in the plan, and sees nothing new but it.
void PagedKVCache::WantAngles(Rope& rope, bool repeats) {
  for (const ForwardMember& member : plan_.members) {
    RopeTable& table = rope.table(member.long_factors);
    const auto want = [&](int64_t begin, int64_t end) { table.Want(begin, end); };
    if (repeats) {
      const int64_t position = plan_.positions()[static_cast<size_t>(member.first_row)] + 1;
      VisitRowPositions(member.window, position, position + 1, want);
      continue;
    }
    VisitRowPositions(member.window, member.base(), member.position_end(), want);
    if (rope.layers.inline_window > 0)
      VisitSeenPositions(member.window, rope.layers.inline_window, member.base(), want);
  }
}

// What WantAngles wants, of a batch that is not committed yet. Returns the tiles looked at.
int64_t PagedKVCache::KeepAnglesOfBatch(Rope& rope) noexcept {
  int64_t visits = 0;
  for (const ForwardMember& member : plan_.members) {
    RopeTable& table = rope.table(member.long_factors);
    const auto keep = [&](int64_t begin, int64_t end) { visits += 1 + table.Keep(begin, end); };
    // Where a plan is repeated, it is still that of the position before.
    const int64_t base = CommittedLength(control_[member.sequence]) + member.imported;
    const int64_t end = std::max(member.position_end(), base + 1);
    VisitRowPositions(member.window, base, end, keep);
    if (rope.layers.inline_window > 0)
      VisitSeenPositions(member.window, rope.layers.inline_window, base, keep);
  }
  return visits;
}

// What the next row of any sequence needs.
int64_t PagedKVCache::KeepAnglesOfAll(Rope& rope) noexcept {
  int64_t visits = 0;
  for (const Sequence& sequence : control_.table().entries()) {
    visits += kTilesPerSequence;
    if (sequence.last == kNoBlock) continue;
    RopeTable& table = rope.table(sequence.long_factors);
    const auto keep = [&](int64_t begin, int64_t end) { visits += table.Keep(begin, end); };
    const int64_t base = CommittedLength(sequence);
    VisitRowPositions(sequence.window, base, tree_.End(sequence.last) + 1, keep);
    if (rope.layers.inline_window > 0)
      VisitSeenPositions(sequence.window, rope.layers.inline_window, base, keep);
  }
  return visits;
}

// REQUIRES: no forward is open. Of the batch, if it is one of those: it is planned, not committed.
void PagedKVCache::SweepAngles(Rope& rope, SweepFor whom) noexcept {
  int64_t visits = 0;
  for (RopeTable* const table : {&rope.short_table, &rope.long_table}) {
    table->StartSweep();
    visits += table->Keep(0, rope_limits_.table_positions);
  }
  if (whom != SweepFor::kBatch) visits += KeepAnglesOfAll(rope);
  if (whom != SweepFor::kSequences) visits += KeepAnglesOfBatch(rope);
  for (RopeTable* const table : {&rope.short_table, &rope.long_table}) table->EndSweep();
  rope.pace.Swept(visits / kTilesPerSequence, rope.tile_count());
}

void PagedKVCache::ReserveRope(bool repeats) {
  const BatchTotals& totals = plan_.totals();
  const size_t rows = static_cast<size_t>(totals.rows);
  for (Rope& rope : ropes_) {
    if (totals.has_sinks) ReserveSlidAngles(rope.short_table.pair_count(), totals.rows);
    ReserveGrowing(rope.angles, rows);
    ReserveGrowing(rope.sink_angles, rows);
    rope.pace.CountCall();
    rope.short_table.ForgetWanted();
    rope.long_table.ForgetWanted();
    if (!NeedsNoAngles(rope, repeats ? 1 : 0)) WantAngles(rope, repeats);
    const int64_t wanted =
        rope.short_table.wanted_tile_count() + rope.long_table.wanted_tile_count();
    if (rope.pace.IsDue(rope.tile_count() + wanted)) SweepAngles(rope, SweepFor::kAll);
    if (rope.tile_count() + wanted > rope.layers.tile_count_max)
      SweepAngles(rope, SweepFor::kBatch);
    rope.short_table.AddWanted(*options_.runner);
    rope.long_table.AddWanted(*options_.runner);
  }
}

// After a sequence has gone or become shorter.
void PagedKVCache::ReleaseAngles() noexcept {
  if (control_.in_forward()) return;
  for (Rope& rope : ropes_) {
    rope.pace.CountCall();
    const bool is_empty = control_.table().count() == 0;
    if (is_empty || rope.pace.IsDue(rope.tile_count())) SweepAngles(rope, SweepFor::kSequences);
  }
}

int64_t PagedKVCache::angle_bytes() const {
  int64_t bytes = 0;
  for (const Rope& rope : ropes_)
    bytes += rope.short_table.memory_bytes() + rope.long_table.memory_bytes();
  return bytes;
}

int64_t PagedKVCache::angle_bytes_max() const {
  int64_t bytes = 0;
  for (const Rope& rope : ropes_) bytes += rope.layers.bytes_max;
  return bytes;
}

void PagedKVCache::set_rope_limits(const RopeLimits& limits) {
  rope_limits_ = limits;
  std::vector<RopeLayers> layers = MakeRopeLayers(options_, groups_, limits).value();
  for (size_t r = 0; r < ropes_.size(); ++r) ropes_[r].layers = std::move(layers[r]);
}

// ---------------------------------------------------------------------- of an open forward

// The rows' own angles, and for RopeMode::kInline the tables of all positions.
void PagedKVCache::FillRope(bool repeats) noexcept {
  for (Rope& rope : ropes_) {
    rope.angles.resize(static_cast<size_t>(plan_.row_count()));
    for (const ForwardMember& member : plan_.members) {
      const RopeTable& table = rope.table(member.long_factors);
      RotaryAngles* angles = rope.angles.data() + member.first_row;
      for (const int64_t p : PositionsOf(member)) {
        // In a repeated plan the row behind the one of before, in the same tile.
        *angles =
            repeats && p % kTilePositions != 0
                ? RotaryAngles{angles->cos + table.pair_count(), angles->sin + table.pair_count()}
                : table.At(p);
        ++angles;
      }
    }
    FillSinkAngles(rope);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Layer& layer = layers_[static_cast<size_t>(groups_[g].layers[0])];
    if (layer.mode != RopeMode::kInline) continue;
    Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
    std::vector<AttentionSequence>& sequences = plan_.group(static_cast<int>(g)).sequences;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const ForwardMember& member = plan_.members[static_cast<size_t>(plan_.order()[i])];
      sequences[i].inline_angles = &rope.table(member.long_factors).view();
    }
  }
}

}  // namespace quire
