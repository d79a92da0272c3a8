// RopeAngles: the angles by which the rows of a cache's forwards are rotated, for all of its
// layers.
//
// A forward needs the positions of its rows; with a window's sinks also those that sinks are seen
// from (p - slid(p)); in RopeMode::kInline all that its rows see.
//
// Invariants:
// - The positions that the open forward needs are resident: Reserve computes them before the
//   commit, and while a forward is open nothing is dropped.
// - Tiles that neither this forward nor the next one of any sequence needs are dropped at sweeps
//   (SweepPace), also when a sequence is removed or shortened; those near the beginning stay.
// - No tables are larger than the memory plan says (RopeLayers::tile_count_max): sequences that do
//   not take part in the forward give way, and their angles are computed again when they do.
#ifndef QUIRE_KV_PLAN_ROPE_ANGLES_H_
#define QUIRE_KV_PLAN_ROPE_ANGLES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kv/pages/block_tree.h"
#include "kv/pages/layer_groups.h"
#include "kv/pages/sequence_table.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/rope_layers.h"
#include "kv/plan/rope_table.h"
#include "quire/attention_kv_cache.h"

namespace quire {

class RopeAngles {
 public:
  // The options, groups, sequences and the tree must outlive it. `layers`: MakeRopeLayers of these
  // options and groups.
  RopeAngles(const AttentionKVCacheOptions& options, const std::vector<LayerGroup>& groups,
             std::vector<RopeLayers> layers, const SequenceTable& sequences, const BlockTree& tree);

  // ---- A forward: Reserve, then, once the plan is filled, Fill.
  // Computes what the planned forward needs. `repeats`: it is one row more for each member than in
  // the plan. May throw std::bad_alloc. REQUIRES: no forward is open.
  void Reserve(const ForwardPlan& plan, bool repeats);
  // The rows' own angles; in RopeMode::kInline the plan's sequences get the tables of all
  // positions.
  void Fill(ForwardPlan& plan, bool repeats) noexcept;

  // Room for Select. May throw std::bad_alloc. REQUIRES: Reserve.
  void ReserveSelection(const ForwardPlan& plan);
  // From now on rows are these of the open forward's, ascending. REQUIRES: ReserveSelection; Fill.
  void Select(std::span<const int32_t> rows) noexcept;

  // A sequence has gone or become shorter. REQUIRES: no forward is open.
  void DropUnneeded() noexcept;
  // Gives all memory back.
  void Clear() noexcept;

  // ---- The open forward's rows, in a layer.
  // Rows for ordinary keys, and their angles for sinks of a window that has slid; null: the same.
  struct QueryAngles {
    RotaryRows rows;
    const RotaryAngles* sinks = nullptr;
  };
  // What keys are rotated by as they are stored: nothing but in RopeMode::kNormal.
  RotaryRows OfNewKeys(int64_t layer) const {
    return at(layer).mode == RopeMode::kNormal ? OfRows(at(layer)) : RotaryRows();
  }
  // Queries that the kernels rotate.
  QueryAngles OfQueries(int64_t layer) const noexcept;
  // Queries as callers of the pieces, of shared KV and of latent layers give them: rotated, but in
  // RopeMode::kInline.
  QueryAngles OfRotatedQueries(int64_t layer, const ForwardPlan& plan) noexcept;
  // Whether something says how the layer's rows are rotated.
  bool rotates(int64_t layer) const { return at(layer).rope >= 0; }
  bool is_inline(int64_t layer) const { return at(layer).mode == RopeMode::kInline; }
  // REQUIRES: rotates(layer).
  const AngleTable& TableOf(int64_t layer, bool long_factors) const {
    return ropes_[static_cast<size_t>(at(layer).rope)].table(long_factors).view();
  }

  // For tests of the bound.
  int64_t bytes() const;
  int64_t bytes_max() const;
  // REQUIRES: no forward has begun.
  void set_limits(const RopeLimits& limits);

 private:
  // Angles for layers of one dimension that is rotated and one set of options.
  struct Rope {
    RopeLayers layers;
    RopeTable short_table;
    RopeTable long_table;  // grows only if a sequence uses it
    SweepPace pace{};
    std::vector<RotaryAngles> angles{};       // of the forward's rows
    std::vector<RotaryAngles> sink_angles{};  // for keys of sinks; empty: the same
    // The same of selected rows.
    std::vector<RotaryAngles> selected_angles{};
    std::vector<RotaryAngles> selected_sink_angles{};
    RopeTable& table(bool long_factors) { return long_factors ? long_table : short_table; }
    const RopeTable& table(bool long_factors) const {
      return long_factors ? long_table : short_table;
    }
    int64_t tile_count() const { return short_table.tile_count() + long_table.tile_count(); }
  };
  struct Layer {
    int rope = -1;                    // index in ropes_; -1: nothing says how this layer is rotated
    RopeMode mode = RopeMode::kNone;  // what the cache does to its keys
    int first_dim = 0;
    bool interleaved = false;
  };
  enum class SweepFor : uint8_t { kAll, kBatch, kSequences };

  const Layer& at(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  int64_t CommittedLength(const Sequence& sequence) const {
    return tree_.End(sequence.last) - sequence.reserved;
  }
  RotaryRows OfRows(const Layer& layer) const noexcept;
  void Want(Rope& rope, const ForwardPlan& plan, bool repeats);
  // `plan`: of a batch that is planned and not committed, if the sweep is for one.
  void Sweep(Rope& rope, SweepFor whom, const ForwardPlan* plan) noexcept;
  int64_t KeepOfBatch(Rope& rope, const ForwardPlan& plan) noexcept;
  int64_t KeepOfAll(Rope& rope) noexcept;
  void FillSinks(Rope& rope, const ForwardPlan& plan) noexcept;
  void ReserveSlid(int64_t pairs, int64_t rows);
  void FillSlid(const Layer& layer, const ForwardPlan& plan) noexcept;

  const AttentionKVCacheOptions& options_;
  const std::vector<LayerGroup>& groups_;
  const SequenceTable& sequences_;
  const BlockTree& tree_;
  std::vector<Layer> layers_;
  std::vector<Rope> ropes_;
  RopeLimits limits_;
  // Rows that Select has left; the forward has all of them if nothing is selected.
  bool selects_ = false;
  std::vector<int32_t> selected_;
  // For queries that come rotated, what turns a row that was rotated to p back by slid(p): cos and
  // sin [row][pair], and where each row's lie; empty if no row needs them.
  std::vector<float> slid_cos_, slid_sin_;
  std::vector<RotaryAngles> slid_angles_;
};

}  // namespace quire

#endif  // QUIRE_KV_PLAN_ROPE_ANGLES_H_
