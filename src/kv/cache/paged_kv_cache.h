// PagedKVCache: the AttentionKVCache of this library. It holds the parts together: the sequence
// table (which sequences), the block tree (which pages), the page storage (their bytes), the
// forward plan (one forward as arrays) and a backend (the kernels).
//
// Every call enters through the gate: one call at a time, std::bad_alloc becomes OutOfMemory.
// Inside, a call checks and reserves first and changes nothing until all of that has succeeded;
// what follows is noexcept.
#ifndef QUIRE_KV_CACHE_PAGED_KV_CACHE_H_
#define QUIRE_KV_CACHE_PAGED_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kv/cache/attention_scratch.h"
#include "kv/cache/counting_gate.h"
#include "kv/cache/page_counts.h"
#include "kv/control/sequence_control.h"
#include "kv/pages/block_tree.h"
#include "kv/pages/layer_groups.h"
#include "kv/pages/page_storage.h"
#include "kv/pages/reserve.h"
#include "kv/pages/sliding_window.h"
#include "kv/pages/token_tree.h"
#include "kv/plan/attention_mask.h"
#include "kv/plan/attention_tensors.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/ragged_kv.h"
#include "kv/plan/rope_angles.h"
#include "kv/transfer/pending_receives.h"
#include "kv/transfer/send_marks.h"
#include "quire/attention_kv_cache.h"

namespace quire {

class PagedKVCache final : public AttentionKVCache,
                           public KVTransfer,
                           private PendingReceives::Pages {
 public:
  static Result<std::unique_ptr<AttentionKVCache>> Create(AttentionKVCacheOptions options);

  Status Clear() override;
  Status AddSequence(int64_t seq_id) override;
  Status RemoveSequence(int64_t seq_id) override;
  Status ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) override;
  Status PopN(int64_t seq_id, int64_t n) override;
  Status SetRetained(int64_t seq_id, bool retained) override;
  Status BeginForward(std::span<const int64_t> seq_ids,
                      std::span<const int64_t> append_lengths) override;
  Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                             std::span<const int64_t> append_lengths,
                             std::span<const LayerLoad> loads) override;
  Status BeginTreeForward(std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
                          std::span<const int64_t> token_tree_parents) override;
  Status EndForward() override;
  Status AbortForward() override;
  Status CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> leaf_indices) override;
  Result<int64_t> GetTreeSize(int64_t seq_id) const override;

  const AttentionKVCacheOptions& options() const override { return options_; }
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
    return tree_.distinct_token_count() - trees_.level_count() + trees_.node_count();
  }
  int64_t sequence_count() const override {
    const auto lock = gate_.Lock();
    return control_.table().count();
  }
  int64_t retained_sequence_count() const override {
    const auto lock = gate_.Lock();
    return control_.table().retained_count();
  }
  PageCounts page_counts() const override { return gate_.counts(); }
  int64_t pages_in_use() const override;
  int64_t pages_allocated() const override;
  bool HasSequence(int64_t seq_id) const override {
    const auto lock = gate_.Lock();
    return control_.table().Find(seq_id) != SequenceTable::kAbsent;
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
                               double sm_scale, const TensorView* mask = nullptr) override;
  Status Append(int64_t layer, const TensorView& k, const TensorView& v) override;
  Status Attend(int64_t layer, const TensorView& q, const TensorView& o, const TensorView* lse,
                double sm_scale, const TensorView* mask = nullptr) override;
  Status SelfAttention(int64_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& o, const TensorView& lse, double sm_scale,
                       const TensorView* mask = nullptr) override;
  Status CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                        const TensorView& lse, double sm_scale) override;
  Status MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1, const TensorView& o2,
                                const TensorView& lse2) override;
  Status AttentionWithSharedKV(int64_t source_layer, const TensorView& q, const TensorView& o,
                               const TensorView* lse, double sm_scale,
                               const TensorView* mask = nullptr) override;
  Status AppendMLAKV(int64_t layer, const TensorView& kv) override;
  Status AttentionWithMLA(int64_t layer, const TensorView& q_absorbed, const TensorView& kv,
                          const TensorView& o, double sm_scale,
                          const TensorView* mask = nullptr) override;
  Result<std::span<const int32_t>> GetQueryPositions() const override;

  Status ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) override;
  Status ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) override;
  Status ImportVisibleKV(int64_t seq_id, const KVImport& import) override;

  KVTransfer* transfer() override { return this; }
  Result<ReceiveMap> DisaggPrepareRecv(int64_t seq_id, int64_t count) override;
  Status DisaggCommitRecv(uint64_t epoch, int64_t n) override;
  Status DisaggCancelRecv(uint64_t epoch) override;
  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) override;
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part, uint32_t digest) override;
  Status FailReceive(uint64_t epoch, const Status& why) override;
  Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const override;
  Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const override;
  Status SetLayerSink(std::shared_ptr<LayerSink> sink) override;
  Status DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                        int64_t peer, int64_t rank) override;
  Status DisaggUnmarkSend(int64_t seq_id) override;
  Status DisaggFlushSend(int64_t seq_id) override;
  Result<SendProgress> GetSendProgress(int64_t seq_id) const override;

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
  int64_t repeated_forward_count() const { return repeated_forward_count_; }
  // For tests of growth: what windows have had to look at since the cache was made, and how many
  // entries all page tables have.
  int64_t blocks_visited() const { return tree_.blocks_visited(); }
  int64_t page_entry_count() const { return tree_.page_entry_count(); }
  // What is taken now, for tests of kv_memory.h.
  int64_t storage_bytes() const { return storage_->bytes(); }
  int64_t scratch_bytes() const { return static_cast<int64_t>(scratch_.bytes()); }
  int64_t angle_bytes() const { return ropes_.bytes(); }
  int64_t table_bytes() const { return tree_.memory_bytes(); }
  int64_t angle_bytes_max() const { return ropes_.bytes_max(); }
  // For tests. REQUIRES: no forward has begun.
  void set_rope_limits(const RopeLimits& limits) { ropes_.set_limits(limits); }

 private:
  struct Layer {
    int group = 0;
    bool loaded = false;  // in this forward
    bool appended = false;
    bool attended = false;
    std::vector<float> head_sinks_log2{};
  };
  // Which tokens a row attends to: those up to its own, or those of before the forward.
  enum class Sees : uint8_t { kUpToOwn, kCached };
  PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
               std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
               const Backend* backend, std::shared_ptr<ParallelRunner> receive_runner);
  static std::vector<PagePool> MakePools(const std::vector<LayerGroup>& groups,
                                         PageStorage* storage);

  // Of the open forward, if any.
  std::span<const ForwardMember> Batch() const {
    return control_.in_forward() ? std::span<const ForwardMember>(plan_.members)
                                 : std::span<const ForwardMember>();
  }

  Status StartBatch(const char* call, std::span<const int64_t> seq_ids,
                    std::span<const int64_t> append_lengths, ForwardPlan& plan) const;
  // Whether a sequence may get new rows; if so, it counts as a member from now on. `index`: what
  // the table finds for the id.
  bool TakeMember(int32_t index, int64_t append_length, int64_t first_row) const noexcept {
    if (!control_.MayTake(index)) return false;
    if (append_length < 1 || append_length > options_.prefill_chunk_size - first_row) return false;
    control_.Name(index);
    return true;
  }
  Status RefuseMember(const char* call, int64_t seq_id, int32_t index, int64_t append_length) const;
  Status CheckSpecial(const char* call, int64_t seq_id, int32_t index, int64_t append_length,
                      const LayerLoad* load, std::span<GroupAppend> groups) const;
  Status PlanBatch(const char* call, std::span<const int64_t> seq_ids,
                   std::span<const int64_t> append_lengths, std::span<const LayerLoad> loads,
                   ForwardPlan& plan) const;
  class LookAhead;  // finds the members of a batch
  Status BeginPlanned(const char* call, std::span<const int64_t> seq_ids,
                      std::span<const int64_t> append_lengths, std::span<const LayerLoad> loads);
  Status CheckPages(const char* call, std::span<const int64_t> page_counts) const;
  void ReserveForward();
  void CommitForward() noexcept;
  void CommitRepeatedForward() noexcept;
  void OpenForward(bool repeats) noexcept;
  void CloseForward() noexcept;
  void RollBackForward() noexcept;

  // Runs an attention call: only a success leaves the forward open for further ones.
  template <typename F>
  Status RunAttention(const char* call, int64_t layer, F&& body);
  Status RequireAppended(const AttentionCall& call, bool appended) const;
  Status AppendLatent(const AttentionCall& call, const TensorView& kv);
  void RunAppend(int64_t layer, const HeadRows& k, const HeadRows& v) noexcept;
  // Keys are rotated by `rotary`.
  void StoreRows(int64_t layer, const HeadRows& k, const HeadRows& v,
                 const RotaryRows& rotary) noexcept;
  // Of EndForward, without and with AttentionKVCacheOptions::allow_skipped_layers.
  Status RequireAllLayers() const;
  Status FillSkippedLayers();
  // `args` says what is attended to; what is the same for all calls is set here.
  void RunKernel(int64_t layer, AttentionArgs args, const TensorView* lse,
                 double sm_scale) noexcept;
  // `masks`: of the rows, or null.
  void RunAttend(int64_t layer, Sees sees, const HeadRows& q, const RopeAngles::QueryAngles& angles,
                 const MutableHeadRows& o, const TensorView* lse, double sm_scale,
                 const RowMask* masks = nullptr) noexcept;
  // Token trees: paged_kv_trees.cc.
  // Tokens that the sequence has without its uncommitted tree, and with it.
  int64_t CommittedLength(const Sequence& sequence) const {
    return tree_.End(sequence.last) - sequence.reserved;
  }
  int64_t LengthOf(int32_t index) const {
    return CommittedLength(control_[index]) + trees_.SizeOf(index) + control_[index].pending;
  }
  // For calls that need the sequence without pending tokens.
  Status RequireReceived(const char* call, int32_t index) const;
  // For calls that read tokens of a layer up to `end`, nodes of a tree behind the committed ones:
  // BadState while the open forward has still to store some of them.
  Status RequireStored(const char* call, int32_t index, size_t layer, int64_t end) const;
  // For calls that need the sequence without a tree and without pending tokens.
  Status RequireCommitted(const char* call, int32_t index) const;
  Status PlanTreeBatch(const char* call, std::span<const int64_t> seq_ids,
                       std::span<const int64_t> append_lengths,
                       std::span<const int64_t> token_tree_parents, ForwardPlan& plan) const;
  Status PlanTreeMember(const char* call, int64_t seq_id, std::span<const int64_t> parents,
                        int64_t first_row, ForwardPlan& plan) const;
  void AddNodes(ForwardMember& member, std::span<const GroupAppend> groups) noexcept;
  // Nodes from `size` on go, and of the path what is deeper than those that stay.
  void DropNodes(int32_t index, int64_t size) noexcept;
  // Checks one leaf of a commit and reserves what CommitPath needs for it.
  Status PlanLeaf(const char* call, int64_t seq_id, int64_t leaf);
  void CommitPath(int32_t index, int64_t leaf) noexcept;

  // Windows.
  Status CheckEnd(const char* call, const Sequence& sequence, int64_t length) const;
  Status CheckHeld(const char* call, const Sequence& sequence, int group, int64_t start,
                   int64_t end) const;
  void MoveEnd(const Sequence& from, int64_t length, Sequence* to) const noexcept;
  void SlideTo(int32_t index) noexcept;
  // What the sequence hides, by its length, has changed, or it ends in another block than before.
  void UpdateHidden(int32_t index) noexcept;
  void FreeHidden() noexcept {
    if (!control_.in_forward()) tree_.FreeHidden();
  }
  void SetWindows(int32_t index, const SequenceWindows& windows) noexcept;

  Status Import(const char* call, int64_t seq_id, const KVImport& import, bool leaves_out);
  Result<int64_t> CheckTokens(const char* call, const Sequence& sequence,
                              const KVImport& import) const;
  Status CheckWindows(const char* call, const Sequence& sequence, const SequenceWindows& windows,
                      int64_t length) const;
  Status CheckBlocks(const char* call, int64_t start, const KVImport& import,
                     std::span<const GroupAppend> groups) const;
  // Plans and reserves `count` tokens without rows behind the sequence, alone in a plan.
  enum class FirstPage : uint8_t { kShared, kOwn };
  Status PlanImport(const char* call, const Sequence& sequence, int64_t count, FirstPage first,
                    ForwardPlan* plan);
  // Commits it: the slots of the tokens are the plan's imports.
  void CommitImport(int32_t index, ForwardPlan* plan) noexcept;
  void StoreImport(ForwardPlan& plan, int64_t start, const KVImport& import) noexcept;
  void StoreImport(const TokenSlots& imports, int64_t layer, int64_t first, const LayerKV& kv,
                   TokenRange rows, ParallelRunner& runner) noexcept;
  // Takes the layer's imported tokens from their sources; they stand before the first row, so
  // whatever stores or reads tokens of the layer calls this first.
  void LeaveOutHidden(const SequenceWindows& windows, int64_t start, int64_t end,
                      std::span<GroupAppend> groups) const;
  Status LoadLayer(const AttentionCall& call);
  Status CheckLoaded(const AttentionCall& call, const ForwardMember& member, int64_t planned,
                     std::span<const LayerKV> blocks) const;

  // Transfer: paged_kv_transfer.cc, paged_kv_sends.cc.
  Status CheckReceiver(const char* call, int32_t index, int64_t count) const;
  // `sequence`: of which the layers' keys are; for equal stored bytes of two caches.
  uint64_t TransferLayout(const Sequence& sequence) const;
  void OpenTiles(PendingReceives::Receive& receive, TokenSlots* tiles) noexcept;
  void StoreReceived(const TokenSlots& slots, int64_t layer, int64_t first,
                     const LayerKV& rows) noexcept override;
  // The first n pending tokens stay, as committed ones.
  void EndReceive(int32_t index, int64_t n) noexcept;
  Status CheckMaps(const Sequence& sequence, std::span<const ReceiveMap> maps, int64_t begin,
                   int64_t rank) const;
  Status CheckReceives() const;
  // Of a layer, what the mark's forward has to send; failures end the mark.
  void SendLayer(int64_t layer) noexcept;
  void SendRows(SendMark* mark, const Sequence& sequence, int64_t layer, int64_t end) noexcept;
  Status SendPiece(SendMark* mark, const Sequence& sequence, int64_t layer, int64_t begin,
                   int64_t end);
  enum class Outcome : uint8_t { kEnded, kAborted };
  void FinishSends(Outcome outcome) noexcept;
  void FinishSend(SendMark* mark, Outcome outcome) noexcept;
  void StopSend(int32_t index, const char* why) noexcept;
  void AppendMarkFacts(int32_t index, std::vector<int64_t>* facts) const;

  // Debug calls on the layers that are (`v` is null) or are not latent.
  Status GetDebug(const char* call, int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                  const TensorView* v);
  Status SetDebug(const char* call, int64_t seq_id, int64_t start, const TensorView& k,
                  const TensorView* v);
  Status CheckDebugTensors(const char* call, int64_t count, const TensorView& k,
                           const TensorView* v) const;
  // Slots of the positions from `start` on.
  void FillSlots(BlockIndex last, int group, int64_t start,
                 std::span<AppendTarget> slots) const noexcept;
  // The same where positions behind the committed tokens are the nodes of the sequence's tree.
  void FillDebugSlots(int32_t index, int group, int64_t start,
                      std::span<AppendTarget> slots) const noexcept;
  Status PrivatizeFrom(const char* call, int32_t index, int64_t start);

  const AttentionKVCacheOptions options_;
  const std::vector<LayerGroup> groups_;
  const std::unique_ptr<PageStorage> storage_;
  const Backend* const backend_;
  std::vector<Layer> layers_;
  std::vector<float> zero_row_;  // of one head of any layer; empty unless layers may be skipped

  SequenceControl control_;
  BlockTree tree_;
  RopeAngles ropes_;
  AttentionScratch scratch_;
  TokenTrees trees_;
  PendingReceives receives_;
  const std::shared_ptr<ParallelRunner> receive_runner_;  // of whoever completes a part
  SendMarks marks_;
  std::shared_ptr<LayerSink> sink_;
  ForwardPlan plan_;  // of the open forward or the last one
  // Of PagesNeeded, which leaves plan_ as it is, to be repeated.
  mutable ForwardPlan query_;
  int64_t repeated_forward_count_ = 0;

  // Scratch of a commit, and the parents of the tree forward that begins [row].
  std::span<const int64_t> tree_parents_;
  std::vector<int32_t> tree_path_;
  std::vector<AppendTarget> tree_from_, tree_to_;
  std::vector<uint8_t> tree_opens_;
  RaggedKV ragged_;     // of the last SelfAttention
  AttentionMask mask_;  // of the last call that has one

  CountingGate gate_;
};

template <typename F>
Status PagedKVCache::RunAttention(const char* call, int64_t layer, F&& body) {
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(control_.RequireForward(call));
    control_.set_failed(true);
    if (layer < 0 || layer >= static_cast<int64_t>(layers_.size())) {
      return Status(StatusCode::kBadArgument, std::string(call) + ": no layer " +
                                                  std::to_string(layer) + "; this cache has " +
                                                  std::to_string(layers_.size()));
    }
    QUIRE_RETURN_IF_ERROR(body(AttentionCall{.name = call,
                                             .layer = layer,
                                             .spec = options_.layers[static_cast<size_t>(layer)],
                                             .row_count = plan_.row_count()}));
    control_.set_failed(false);
    return Status();
  });
}

}  // namespace quire

#endif  // QUIRE_KV_CACHE_PAGED_KV_CACHE_H_
