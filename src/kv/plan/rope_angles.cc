#include "kv/plan/rope_angles.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/float_environment.h"
#include "kernels/row_view.h"
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

// Whether all that the batch needs is among what has been computed from position 0 on.
bool HasAll(const BatchTotals& totals, int64_t more_rows, const RopeTable& short_table,
            const RopeTable& long_table) {
  const bool has_short =
      totals.short_end == 0 || totals.short_end + more_rows <= short_table.dense_end();
  const bool has_long =
      totals.long_end == 0 || totals.long_end + more_rows <= long_table.dense_end();
  return has_short && has_long;
}

// The positions of the member's rows.
std::span<const int32_t> PositionsOf(const ForwardPlan& plan, const ForwardMember& member) {
  return plan.positions().subspan(static_cast<size_t>(member.first_row),
                                  static_cast<size_t>(member.row_count()));
}

}  // namespace

RopeAngles::RopeAngles(const AttentionKVCacheOptions& options,
                       const std::vector<LayerGroup>& groups, std::vector<RopeLayers> layers,
                       const SequenceTable& sequences, const BlockTree& tree)
    : options_(options),
      groups_(groups),
      sequences_(sequences),
      tree_(tree),
      layers_(options.layers.size()) {
  for (RopeLayers& rope : layers) {
    RopeTable short_table(rope.short_set);
    RopeTable long_table(rope.long_set);
    ropes_.push_back({.layers = std::move(rope),
                      .short_table = std::move(short_table),
                      .long_table = std::move(long_table)});
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    const AttentionLayerSpec& spec = options.layers[l];
    if (!spec.latent) layers_[l].mode = options.rope.mode;
    if (spec.latent) layers_[l].first_dim = static_cast<int>(spec.v_head_dim);
    const RopeOptions* const rope = RopeOf(options, spec);
    if (rope == nullptr) continue;
    layers_[l].interleaved = rope->pairing == RopePairing::kInterleaved;
    for (size_t r = 0; r < ropes_.size(); ++r) {
      if (ropes_[r].layers.IsOf(spec)) layers_[l].rope = static_cast<int>(r);
    }
    QUIRE_DCHECK(layers_[l].rope >= 0) << "the angles are those of other options";
  }
}

// ---------------------------------------------------------------------- of a planned forward

// `repeats`: each member gets one row more than in the plan, and sees nothing new but it.
void RopeAngles::Want(Rope& rope, const ForwardPlan& plan, bool repeats) {
  for (const ForwardMember& member : plan.members) {
    RopeTable& table = rope.table(member.long_factors);
    const auto want = [&](int64_t begin, int64_t end) { table.Want(begin, end); };
    if (repeats) {
      const int64_t position = plan.positions()[static_cast<size_t>(member.first_row)] + 1;
      VisitRowPositions(member.window, position, position + 1, want);
      continue;
    }
    VisitRowPositions(member.window, member.base(), member.position_end(), want);
    if (rope.layers.inline_window > 0)
      VisitSeenPositions(member.window, rope.layers.inline_window, member.base(), want);
  }
}

// What WantAngles wants, of a batch that is not committed yet. Returns the tiles looked at.
int64_t RopeAngles::KeepOfBatch(Rope& rope, const ForwardPlan& plan) noexcept {
  int64_t visits = 0;
  for (const ForwardMember& member : plan.members) {
    RopeTable& table = rope.table(member.long_factors);
    const auto keep = [&](int64_t begin, int64_t end) { visits += 1 + table.Keep(begin, end); };
    // Where a plan is repeated, it is still that of the position before.
    const int64_t base = CommittedLength(sequences_[member.sequence]) + member.imported;
    const int64_t end = std::max(member.position_end(), base + 1);
    VisitRowPositions(member.window, base, end, keep);
    if (rope.layers.inline_window > 0)
      VisitSeenPositions(member.window, rope.layers.inline_window, base, keep);
  }
  return visits;
}

// What the next row of any sequence needs.
int64_t RopeAngles::KeepOfAll(Rope& rope) noexcept {
  int64_t visits = 0;
  for (const Sequence& sequence : sequences_.entries()) {
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

// REQUIRES: no forward is open. `plan`, if any, is planned, not committed.
void RopeAngles::Sweep(Rope& rope, SweepFor whom, const ForwardPlan* plan) noexcept {
  QUIRE_DCHECK((whom == SweepFor::kSequences) == (plan == nullptr));
  int64_t visits = 0;
  for (RopeTable* const table : {&rope.short_table, &rope.long_table}) {
    table->StartSweep();
    visits += table->Keep(0, limits_.table_positions);
  }
  if (whom != SweepFor::kBatch) visits += KeepOfAll(rope);
  if (whom != SweepFor::kSequences) visits += KeepOfBatch(rope, *plan);
  for (RopeTable* const table : {&rope.short_table, &rope.long_table}) table->EndSweep();
  rope.pace.Swept(visits / kTilesPerSequence, rope.tile_count());
}

void RopeAngles::Reserve(const ForwardPlan& plan, bool repeats) {
  const BatchTotals& totals = plan.totals();
  const size_t rows = static_cast<size_t>(totals.rows);
  for (Rope& rope : ropes_) {
    if (totals.has_sinks) ReserveSlid(rope.short_table.pair_count(), totals.rows);
    ReserveGrowing(rope.angles, rows);
    ReserveGrowing(rope.sink_angles, rows);
    rope.pace.CountCall();
    rope.short_table.ForgetWanted();
    rope.long_table.ForgetWanted();
    if (!HasAll(totals, repeats ? 1 : 0, rope.short_table, rope.long_table))
      Want(rope, plan, repeats);
    const int64_t wanted =
        rope.short_table.wanted_tile_count() + rope.long_table.wanted_tile_count();
    if (rope.pace.IsDue(rope.tile_count() + wanted)) Sweep(rope, SweepFor::kAll, &plan);
    if (rope.tile_count() + wanted > rope.layers.tile_count_max)
      Sweep(rope, SweepFor::kBatch, &plan);
    rope.short_table.AddWanted(*options_.runner);
    rope.long_table.AddWanted(*options_.runner);
    QUIRE_DCHECK(rope.tile_count() <= rope.layers.tile_count_max)
        << "the memory plan has room for " << rope.layers.tile_count_max << " tiles";
  }
}

// After a sequence has gone or become shorter.
void RopeAngles::DropUnneeded() noexcept {
  for (Rope& rope : ropes_) {
    rope.pace.CountCall();
    const bool is_empty = sequences_.count() == 0;
    if (is_empty || rope.pace.IsDue(rope.tile_count())) Sweep(rope, SweepFor::kSequences, nullptr);
  }
}

int64_t RopeAngles::bytes() const {
  int64_t bytes = 0;
  for (const Rope& rope : ropes_)
    bytes += rope.short_table.memory_bytes() + rope.long_table.memory_bytes();
  return bytes;
}

int64_t RopeAngles::bytes_max() const {
  int64_t bytes = 0;
  for (const Rope& rope : ropes_) bytes += rope.layers.bytes_max;
  return bytes;
}

void RopeAngles::set_limits(const RopeLimits& limits) {
  limits_ = limits;
  std::vector<RopeLayers> layers = MakeRopeLayers(options_, groups_, limits).value();
  QUIRE_DCHECK(layers.size() == ropes_.size());
  for (size_t r = 0; r < ropes_.size(); ++r) ropes_[r].layers = std::move(layers[r]);
}

// ---------------------------------------------------------------------- of an open forward

// The rows' own angles, and for RopeMode::kInline the tables of all positions.
void RopeAngles::Fill(ForwardPlan& plan, bool repeats) noexcept {
  selects_ = false;
  for (Rope& rope : ropes_) {
    QUIRE_DCHECK(rope.angles.capacity() >= static_cast<size_t>(plan.row_count()));
    rope.angles.resize(static_cast<size_t>(plan.row_count()));
    for (const ForwardMember& member : plan.members) {
      const RopeTable& table = rope.table(member.long_factors);
      RotaryAngles* angles = rope.angles.data() + member.first_row;
      for (const int64_t p : PositionsOf(plan, member)) {
        // In a repeated plan the row behind the one of before, in the same tile.
        *angles =
            repeats && p % kTilePositions != 0
                ? RotaryAngles{angles->cos + table.pair_count(), angles->sin + table.pair_count()}
                : table.At(p);
        ++angles;
      }
    }
    FillSinks(rope, plan);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Layer& layer = layers_[static_cast<size_t>(groups_[g].layers[0])];
    if (layer.mode != RopeMode::kInline) continue;
    Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
    std::vector<AttentionSequence>& sequences = plan.group(static_cast<int>(g)).sequences;
    QUIRE_DCHECK(sequences.size() == plan.order().size());
    for (size_t i = 0; i < sequences.size(); ++i) {
      const ForwardMember& member = plan.members[static_cast<size_t>(plan.order()[i])];
      sequences[i].inline_angles = &rope.table(member.long_factors).view();
    }
  }
}

// ---------------------------------------------------------------------- selected rows

void RopeAngles::ReserveSelection(const ForwardPlan& plan) {
  const size_t rows = static_cast<size_t>(plan.totals().rows);
  ReserveGrowing(selected_, rows);
  for (Rope& rope : ropes_) {
    ReserveGrowing(rope.selected_angles, rows);
    if (plan.totals().has_sinks) ReserveGrowing(rope.selected_sink_angles, rows);
  }
}

void RopeAngles::Select(std::span<const int32_t> rows) noexcept {
  QUIRE_DCHECK(selected_.capacity() >= rows.size());
  QUIRE_DCHECK(std::ranges::is_sorted(rows));
  selects_ = true;
  selected_.assign(rows.begin(), rows.end());
  for (Rope& rope : ropes_) {
    rope.selected_angles.clear();
    rope.selected_sink_angles.clear();
    for (const int32_t row : rows) {
      rope.selected_angles.push_back(rope.angles[static_cast<size_t>(row)]);
      if (!rope.sink_angles.empty())
        rope.selected_sink_angles.push_back(rope.sink_angles[static_cast<size_t>(row)]);
    }
  }
}

// ---------------------------------------------------------------------- positions of sinks

void RopeAngles::FillSinks(Rope& rope, const ForwardPlan& plan) noexcept {
  rope.sink_angles.clear();
  if (!plan.totals().has_sinks) return;
  for (const ForwardMember& member : plan.members) {
    const RopeTable& table = rope.table(member.long_factors);
    for (const int64_t p : PositionsOf(plan, member))
      rope.sink_angles.push_back(
          table.At(member.window.sinks == 0 ? p : p - SlidAt(member.window, p)));
  }
  QUIRE_DCHECK(rope.sink_angles.size() == rope.angles.size());
}

void RopeAngles::ReserveSlid(int64_t pairs, int64_t rows) {
  const auto takes_rotated = [](const Layer& layer) {
    return layer.rope >= 0 && layer.mode != RopeMode::kInline;
  };
  if (std::ranges::none_of(layers_, takes_rotated)) return;
  ReserveGrowing(slid_cos_, static_cast<size_t>(rows * pairs));
  ReserveGrowing(slid_sin_, static_cast<size_t>(rows * pairs));
  ReserveGrowing(slid_angles_, static_cast<size_t>(rows));
}

void RopeAngles::FillSlid(const Layer& layer, const ForwardPlan& plan) noexcept {
  const ScopedFloatEnvironment environment;
  slid_angles_.clear();
  if (layer.rope < 0) return;
  Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
  if (rope.sink_angles.empty()) return;
  const size_t pairs = static_cast<size_t>(rope.short_table.pair_count());
  const size_t rows = static_cast<size_t>(plan.row_count());
  QUIRE_DCHECK(slid_angles_.capacity() >= rows);
  slid_cos_.resize(rows * pairs);
  slid_sin_.resize(rows * pairs);
  slid_angles_.resize(rows);
  size_t row = 0;
  for (const ForwardMember& member : plan.members) {
    const RopeFrequencies& frequencies = rope.table(member.long_factors).frequencies();
    for (const int64_t p : PositionsOf(plan, member)) {
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
  QUIRE_DCHECK(row == rows) << "a row would be turned by the angles of another forward";
  if (!selects_) return;
  for (size_t i = 0; i < selected_.size(); ++i)
    slid_angles_[i] = slid_angles_[static_cast<size_t>(selected_[i])];
}

// ---------------------------------------------------------------------- of a layer

RotaryRows RopeAngles::OfRows(const Layer& layer) const noexcept {
  if (layer.rope < 0) return {};
  const Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
  return {.angles = selects_ ? rope.selected_angles.data() : rope.angles.data(),
          .rotary_dim = static_cast<int>(2 * rope.short_table.pair_count()),
          .interleaved = layer.interleaved,
          .first_dim = layer.first_dim};
}

RopeAngles::QueryAngles RopeAngles::OfQueries(int64_t layer) const noexcept {
  QueryAngles angles{.rows = OfRows(at(layer))};
  if (!rotates(layer)) return angles;
  const Rope& rope = ropes_[static_cast<size_t>(at(layer).rope)];
  const std::vector<RotaryAngles>& sinks = selects_ ? rope.selected_sink_angles : rope.sink_angles;
  angles.sinks = sinks.empty() ? nullptr : sinks.data();
  return angles;
}

RopeAngles::QueryAngles RopeAngles::OfRotatedQueries(int64_t layer,
                                                     const ForwardPlan& plan) noexcept {
  if (is_inline(layer)) return OfQueries(layer);
  FillSlid(at(layer), plan);
  QueryAngles angles{.rows = OfRows(at(layer))};
  angles.rows.angles = nullptr;
  angles.sinks = slid_angles_.empty() ? nullptr : slid_angles_.data();
  return angles;
}

void RopeAngles::Clear() noexcept {
  for (std::vector<float>* const table : {&slid_cos_, &slid_sin_}) FreeAll(*table);
  FreeAll(slid_angles_);
  FreeAll(selected_);
  for (Rope& rope : ropes_) {
    FreeAll(rope.angles);
    FreeAll(rope.sink_angles);
    FreeAll(rope.selected_angles);
    FreeAll(rope.selected_sink_angles);
    rope.short_table.Clear();
    rope.long_table.Clear();
  }
}

}  // namespace quire
