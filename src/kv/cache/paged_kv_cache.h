// PagedKVCache: the AttentionKVCache of this library. It has the control of a step: what a call
// checks and reserves, and in which order its owners commit. What it works on has owners: the
// sequences and their pages (PagedSequences), the forward as arrays (ForwardPlan) and what it may
// have (BatchPlanner), angles (RopeAngles), what layers store and attend to (AttentionCalls), calls
// that change sequences (SequenceCalls), windows (WindowBook), token trees (TreeForward), rows that
// go on without others (BlendingForward), tokens that are imported (KVImporter), sent (KVSender),
// received (KVReceiver) and read (StoredTokens).
//
// Every call enters through the gate: one call at a time, std::bad_alloc becomes OutOfMemory.
// Inside, a call checks and reserves first and changes nothing until all of that has succeeded;
// what follows is noexcept.
#ifndef QUIRE_KV_CACHE_PAGED_KV_CACHE_H_
#define QUIRE_KV_CACHE_PAGED_KV_CACHE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kv/cache/attention_calls.h"
#include "kv/cache/batch_planner.h"
#include "kv/cache/blending_forward.h"
#include "kv/cache/cache_transfer.h"
#include "kv/cache/counting_gate.h"
#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_receiver.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/layer_steps.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/sequence_calls.h"
#include "kv/cache/stored_tokens.h"
#include "kv/cache/tree_forward.h"
#include "kv/cache/window_book.h"
#include "kv/control/control_call.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/rope_angles.h"
#include "quire/attention_kv_cache.h"

namespace quire {

class PagedKVCache final : public ControlledState<AttentionKVCache>, public PlannedState {
 public:
  static Result<std::unique_ptr<AttentionKVCache>> Create(AttentionKVCacheOptions options);

  // The calls of ControlledState in two halves, for a state that has this cache as a part. The call
  // is inside the gate from a Plan that worked until Commit or Drop.
  Status Plan(const ControlCall& call) override;
  void Commit() noexcept override;
  void Drop() noexcept override;
  Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                             std::span<const int64_t> append_lengths,
                             std::span<const LayerLoad> loads) override;
  Status BeginBlendingForward(std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths,
                              std::span<const LayerLoad> loads,
                              std::span<const BlendMember> blends) override;
  Result<int64_t> GetTreeSize(int64_t seq_id) const override;

  const AttentionKVCacheOptions& options() const override { return kv_.options; }
  bool Empty() const override { return sequence_count() == 0; }
  Status EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) override;
  Status DisableSlidingWindowForSeq(int64_t seq_id) override;
  bool CanFork(int64_t seq_id, int64_t position) const override;
  Result<int64_t> HeldTokens(int64_t seq_id) const override;
  Result<TokenRange> SlidRange(int64_t seq_id) const override;
  Result<SequenceWindows> GetWindows(int64_t seq_id) const override;

  int64_t GetNumAvailablePages() const override;
  int64_t GetTotalSequenceLength() const override;
  int64_t GetDistinctTokenCount() const override {
    const auto lock = gate_.Lock();
    return kv_.tree.distinct_token_count() - kv_.trees.level_count() + kv_.trees.node_count();
  }
  int64_t sequence_count() const override {
    const auto lock = gate_.Lock();
    return kv_.control.table().count();
  }
  int64_t retained_sequence_count() const override {
    const auto lock = gate_.Lock();
    return kv_.control.table().retained_count();
  }
  PageCounts page_counts() const override { return gate_.counts(); }
  int64_t pages_in_use() const override;
  int64_t pages_allocated() const override;
  bool HasSequence(int64_t seq_id) const override {
    const auto lock = gate_.Lock();
    return kv_.control.table().Find(seq_id) != SequenceTable::kAbsent;
  }
  Result<int64_t> GetSequenceLength(int64_t seq_id) const override;
  Result<int64_t> PagesNeeded(std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths) const override;
  Result<int64_t> PagesNeededForTree(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const int64_t> token_tree_parents) const override;
  Status SelectLongRope(int64_t seq_id, bool use_long_factors) override;
  Result<bool> UsesLongRope(int64_t seq_id) const override;

  Status AttentionWithFusedQKV(int64_t layer, const TensorView& qkv, const TensorView& o,
                               double sm_scale, const TensorView* mask = nullptr) override {
    return attention_.AttentionWithFusedQKV(layer, qkv, o, sm_scale, mask);
  }
  Status Append(int64_t layer, const TensorView& k, const TensorView& v) override {
    return attention_.Append(layer, k, v);
  }
  Status Attend(int64_t layer, const TensorView& q, const TensorView& o, const TensorView* lse,
                double sm_scale, const TensorView* mask = nullptr) override {
    return attention_.Attend(layer, q, o, lse, sm_scale, mask);
  }
  Status SelfAttention(int64_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& o, const TensorView& lse, double sm_scale,
                       const TensorView* mask = nullptr) override {
    return attention_.SelfAttention(layer, q, k, v, o, lse, sm_scale, mask);
  }
  Status CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                        const TensorView& lse, double sm_scale) override {
    return attention_.CrossAttention(layer, q, o, lse, sm_scale);
  }
  Status MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1, const TensorView& o2,
                                const TensorView& lse2) override {
    return attention_.MergeAttnOutputInplace(o1, lse1, o2, lse2);
  }
  Status AttentionWithSharedKV(int64_t source_layer, const TensorView& q, const TensorView& o,
                               const TensorView* lse, double sm_scale,
                               const TensorView* mask = nullptr) override {
    return attention_.AttentionWithSharedKV(source_layer, q, o, lse, sm_scale, mask);
  }
  Status AppendMLAKV(int64_t layer, const TensorView& kv) override {
    return attention_.AppendMLAKV(layer, kv);
  }
  Status AttentionWithMLA(int64_t layer, const TensorView& q_absorbed, const TensorView& kv,
                          const TensorView& o, double sm_scale,
                          const TensorView* mask = nullptr) override {
    return attention_.AttentionWithMLA(layer, q_absorbed, kv, o, sm_scale, mask);
  }
  Result<std::span<const int32_t>> GetQueryRows() const override;
  Result<std::span<const int32_t>> GetQueryPositions() const override;

  Status ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) override;
  Status ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) override;
  Status ImportVisibleKV(int64_t seq_id, const KVImport& import) override;

  KVTransfer* transfer() override { return &transfer_; }

  Status DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                    const TensorView& v) override;
  Status DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                    const TensorView& v) override;
  Status DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, const TensorView& kv) override;
  Status DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) override;
  Result<std::string> DebugPlan() const override;
  uint64_t StateDigest() const override;
  Status CheckInvariants() const override;

  // Forwards whose plan was that of the step before, one token further. For tests.
  int64_t repeated_forward_count() const { return planned_.repeated_forward_count; }
  // For tests of growth: what windows have had to look at since the cache was made, and how many
  // entries all page tables have.
  int64_t blocks_visited() const { return kv_.tree.hidden().blocks_visited(); }
  int64_t page_entry_count() const { return kv_.tree.tables().entry_count(); }
  // What is taken now, for tests of kv_memory.h.
  int64_t storage_bytes() const { return kv_.storage->bytes(); }
  int64_t scratch_bytes() const { return attention_.scratch_bytes(); }
  int64_t blend_bytes() const { return blending_.bytes(); }
  int64_t angle_bytes() const { return ropes_.bytes(); }
  int64_t table_bytes() const { return kv_.tree.memory_bytes(); }
  int64_t angle_bytes_max() const { return ropes_.bytes_max(); }
  // For tests. REQUIRES: no forward has begun.
  void set_rope_limits(const RopeLimits& limits) { ropes_.set_limits(limits); }

 private:
  // The call that was planned last.
  struct PlannedCall {
    ControlCall::Kind kind = ControlCall::Kind::kClear;
    bool repeats = false;  // kBegin: the batch of the last forward, one token further
    int64_t repeated_forward_count = 0;
  };
  PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
               std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
               const Backend& backend, std::shared_ptr<ParallelRunner> receive_runner);

  // The members of the open forward, if any.
  std::span<const ForwardMember> Batch() const {
    return kv_.control.in_forward() ? std::span<const ForwardMember>(plan_.members)
                                    : std::span<const ForwardMember>();
  }

  // Both halves of a call.
  Status Run(const ControlCall& call) override;
  Status PlanCall(const ControlCall& call);
  void CommitCall() noexcept;
  void ClearAll() noexcept;

  // ---- A forward: what is planned is reserved, then committed, which opens it.
  Status PlanBegin(const ControlCall& call);
  Status PlanBeginTree(const ControlCall& call);
  Status PlanEnd(const ControlCall& call);
  // `sequences_max`: that attention will have to do with.
  void ReserveForward(int64_t sequences_max);
  void CommitForward() noexcept;
  void CommitRepeatedForward() noexcept;
  void OpenForward(bool repeats) noexcept;
  // EndForward with AttentionKVCacheOptions::allow_skipped_layers: what may fail, and the rest.
  Status LoadSkippedLayers(const ControlCall& call);
  void FillSkippedLayers() noexcept;
  void CloseForward() noexcept;
  void RollBackForward() noexcept;

  PagedSequences kv_;
  CountingGate gate_;

  PlannedCall planned_;
  ForwardPlan plan_;  // of the open forward or the last one
  // Of PagesNeeded, which leaves plan_ as it is, to be repeated.
  mutable ForwardPlan query_;
  LayerSteps steps_;
  RopeAngles ropes_;

  WindowBook windows_;
  BatchPlanner planner_;
  TreeForward trees_;
  KVImporter importer_;
  KVSender sender_;
  BlendingForward blending_;
  AttentionCalls attention_;
  KVReceiver receiver_;
  SequenceCalls sequences_;
  CacheTransfer transfer_;
  StoredTokens stored_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_PAGED_KV_CACHE_H_
