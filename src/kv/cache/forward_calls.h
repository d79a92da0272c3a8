// ForwardCalls: the forwards of a paged cache: begin, of rows, token trees or rows that blend; end
// and abort. Each comes in two halves: Plan checks and reserves, Commit changes.
//
// Invariants:
// - Between Plan and Commit no other call has been made on the cache. Commit takes pages and memory
//   that Plan has counted and reserved, so it cannot fail.
// - While a forward is open, the plan's arrays describe it, and tree and pages have its tokens.
// - An end leaves every layer's rows stored. An abort leaves tokens and pages as they were before
//   the begin.
// - A begin that repeats the last forward's batch, each sequence one token further, changes the
//   plan's arrays in place: nothing has touched what they are made of since (CanRepeat).
#ifndef QUIRE_KV_CACHE_FORWARD_CALLS_H_
#define QUIRE_KV_CACHE_FORWARD_CALLS_H_

#include <cstdint>
#include <span>

#include "kv/cache/attention_calls.h"
#include "kv/cache/batch_planner.h"
#include "kv/cache/blending_forward.h"
#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/layer_steps.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/tree_forward.h"
#include "kv/cache/window_book.h"
#include "kv/control/control_call.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/rope_angles.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

class ForwardCalls {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    PagedSequences& kv;
    ForwardPlan& plan;  // of the open forward or the last one
    LayerSteps& steps;
    RopeAngles& ropes;
    WindowBook& windows;
    TreeForward& trees;
    KVImporter& importer;
    KVSender& sender;
    BlendingForward& blending;
    AttentionCalls& attention;
  };
  explicit ForwardCalls(const Owners& owners);

  // REQUIRES: the call is kBegin, kBeginTree, kEnd or kAbort; what it refers to stays until Commit.
  Status Plan(const ControlCall& call);
  // REQUIRES: a Plan of this call that worked.
  void Commit(const ControlCall& call) noexcept;
  // Both halves of BeginBlendingForward.
  Status BeginBlending(std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
                       std::span<const LayerLoad> loads, std::span<const BlendMember> blends);

  // ---- Queries. How many pages a begin would take of the group that needs most; no plan of a
  // forward changes. `parents`: those of all new nodes of trees [row].
  Result<int64_t> PagesNeeded(const char* call, std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths) const;
  Result<int64_t> PagesNeededForTree(const char* call, std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const int64_t> parents) const;
  // Rows of the open forward that the next layer computes, and their positions. BadState if no
  // forward is open.
  Result<std::span<const int32_t>> QueryRows(const char* call) const;
  Result<std::span<const int32_t>> QueryPositions(const char* call) const;
  // The members of the open forward, if any.
  std::span<const ForwardMember> members() const {
    return kv_.control.in_forward() ? std::span<const ForwardMember>(owners_.plan.members)
                                    : std::span<const ForwardMember>();
  }

  // Gives the memory of plans back; the next begin plans again. Sequences are not touched.
  void Clear() noexcept;
  // Forwards since the cache was made that have repeated the one before.
  int64_t repeated_count() const { return repeated_count_; }

 private:
  Status PlanBegin(const ControlCall& call);
  Status PlanBeginTree(const ControlCall& call);
  Status PlanEnd(const ControlCall& call);
  // `sequences_max`: that attention will have to do with.
  void Reserve(int64_t sequences_max);
  void CommitBegin() noexcept;
  void CommitRepeated() noexcept;
  void Open(bool repeats) noexcept;
  // An end with AttentionKVCacheOptions::allow_skipped_layers: what may fail, and the rest.
  Status LoadSkippedLayers(const ControlCall& call);
  void FillSkippedLayers() noexcept;
  void Close() noexcept;
  void RollBack() noexcept;

  PagedSequences& kv_;
  const Owners owners_;
  const BatchPlanner planner_;
  mutable ForwardPlan query_;  // of PagesNeeded, which leaves the forward's plan as it is
  bool repeats_ = false;  // of the planned begin: the batch of the last forward, one token further
  int64_t repeated_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_FORWARD_CALLS_H_
