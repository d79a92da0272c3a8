// PagedKVCache: the AttentionKVCache of this library. It takes each call through the gate and gives
// it to the owner of its rules. All work on one PagedSequences: which sequences there are and where
// their tokens lie.
//   a forward            ForwardCalls: what it may have (BatchPlanner), its arrays (ForwardPlan),
//                        token trees (TreeForward), rows that go on alone (BlendingForward)
//   a layer              AttentionCalls: how far it has got (LayerSteps), angles (RopeAngles)
//   sequences            SequenceCalls, windows (WindowBook), imported tokens (KVImporter)
//   transfer             CacheTransfer: KVSender, KVReceiver
//   a question           CacheQueries; keys and values as tensors (StoredTokens)
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
#include "kv/cache/blending_forward.h"
#include "kv/cache/cache_queries.h"
#include "kv/cache/cache_transfer.h"
#include "kv/cache/counting_gate.h"
#include "kv/cache/forward_calls.h"
#include "kv/cache/kv_importer.h"
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

class PagedKVCache final : public CacheQueries, public PlannedState {
 public:
  // `receive_runner` copies what is received, on the threads that bring it; null: one of its own.
  static Result<std::unique_ptr<AttentionKVCache>> Create(
      AttentionKVCacheOptions options, std::shared_ptr<ParallelRunner> receive_runner = nullptr);

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

  Status EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) override;
  Status DisableSlidingWindowForSeq(int64_t seq_id) override;
  Status SelectLongRope(int64_t seq_id, bool use_long_factors) override;

  Result<int64_t> PagesNeeded(std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths) const override;
  Result<int64_t> PagesNeededForTree(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const int64_t> token_tree_parents) const override;
  Result<std::span<const int32_t>> GetQueryRows() const override;
  Result<std::span<const int32_t>> GetQueryPositions() const override;

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

  // For tests: what the cache has done since it was made, and what memory it has now.
  struct Figures {
    int64_t repeated_forwards;  // with the plan of the one before, one token further
    int64_t blocks_visited;     // by windows
    int64_t page_entries;       // of all page tables
    int64_t storage_bytes;
    int64_t scratch_bytes;
    int64_t blend_bytes;
    int64_t angle_bytes;
    int64_t angle_bytes_max;
    int64_t table_bytes;
    int64_t tiles_received;  // that rows of other caches have opened, counted for each layer
  };
  Figures figures() const;
  // For tests. REQUIRES: no forward has begun.
  void set_rope_limits(const RopeLimits& limits) { ropes_.set_limits(limits); }

 private:
  PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
               std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
               const Backend& backend, std::shared_ptr<ParallelRunner> receive_runner);

  // Both halves of a call.
  Status Run(const ControlCall& call) override;
  Status PlanCall(const ControlCall& call);
  void CommitCall(const ControlCall& call) noexcept;
  void ClearAll() noexcept;

  PagedSequences kv_;
  CountingGate gate_;

  ControlCall planned_;  // of Plan, until its Commit or Drop
  ForwardPlan plan_;     // of the open forward or the last one
  LayerSteps steps_;
  RopeAngles ropes_;
  WindowBook windows_;
  TreeForward trees_;
  KVImporter importer_;
  CacheTransfer transfer_;
  BlendingForward blending_;
  AttentionCalls attention_;
  ForwardCalls forwards_;
  SequenceCalls sequences_;
  StoredTokens stored_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_PAGED_KV_CACHE_H_
