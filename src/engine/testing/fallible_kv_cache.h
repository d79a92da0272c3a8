// Test only: the real cache behind a switch that makes any call fail before it does anything.
#ifndef QUIRE_ENGINE_TESTING_FALLIBLE_KV_CACHE_H_
#define QUIRE_ENGINE_TESTING_FALLIBLE_KV_CACHE_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "kv/control/control_call.h"
#include "kv/pages/block_queries.h"
#include "quire/attention_kv_cache.h"

namespace quire {

class FallibleKVCache final : public AttentionKVCache, public PlannedState, public BlockQueries {
 public:
  explicit FallibleKVCache(std::unique_ptr<AttentionKVCache> cache)
      : cache_(std::move(cache)),
        planned_(dynamic_cast<PlannedState&>(*cache_)),
        blocks_(dynamic_cast<const BlockQueries&>(*cache_)) {}

  // Asked before each call that may fail for want of pages or memory; its error is what the call
  // returns.
  std::function<Status(std::string_view call)> fault;
  int64_t out_of_pages = 0;  // of BeginForward, by the cache itself
  int64_t loading_forwards = 0;

  // As a part of a CompositeState: the same faults and counts.
  Status Plan(const ControlCall& call) override {
    using Kind = ControlCall::Kind;
    const bool may_fail =
        call.kind != Kind::kClear && call.kind != Kind::kRemove && call.kind != Kind::kAbort;
    const char* const name = call.kind == Kind::kImport ? "ImportVisibleKV" : call.name();
    if (may_fail) QUIRE_RETURN_IF_ERROR(Fault(name));
    const Status status = planned_.Plan(call);
    const bool begins = call.kind == Kind::kBegin || call.kind == Kind::kBeginTree;
    if (begins && status.code() == StatusCode::kOutOfPages) ++out_of_pages;
    loading_forwards += status.ok() && !call.loads.empty();
    return status;
  }
  void Commit() noexcept override { planned_.Commit(); }
  void Drop() noexcept override { planned_.Drop(); }

  Status Clear() override { return cache_->Clear(); }
  Status AddSequence(int64_t id) override {
    QUIRE_RETURN_IF_ERROR(Fault("AddSequence"));
    return cache_->AddSequence(id);
  }
  Status RemoveSequence(int64_t id) override { return cache_->RemoveSequence(id); }
  Status ForkSequence(int64_t parent, int64_t child, int64_t position) override {
    QUIRE_RETURN_IF_ERROR(Fault("ForkSequence"));
    return cache_->ForkSequence(parent, child, position);
  }
  Status PopN(int64_t id, int64_t n) override {
    QUIRE_RETURN_IF_ERROR(Fault("PopN"));
    return cache_->PopN(id, n);
  }
  Status SetRetained(int64_t id, bool retained) override {
    QUIRE_RETURN_IF_ERROR(Fault("SetRetained"));
    return cache_->SetRetained(id, retained);
  }
  Status BeginForward(std::span<const int64_t> ids, std::span<const int64_t> lengths) override {
    QUIRE_RETURN_IF_ERROR(Fault("BeginForward"));
    const Status status = cache_->BeginForward(ids, lengths);
    if (status.code() == StatusCode::kOutOfPages) ++out_of_pages;
    return status;
  }
  Status BeginTreeForward(std::span<const int64_t> ids, std::span<const int64_t> lengths,
                          std::span<const int64_t> parents) override {
    QUIRE_RETURN_IF_ERROR(Fault("BeginTreeForward"));
    const Status status = cache_->BeginTreeForward(ids, lengths, parents);
    if (status.code() == StatusCode::kOutOfPages) ++out_of_pages;
    return status;
  }
  Status CommitAcceptedTokenTreeNodes(std::span<const int64_t> ids,
                                      std::span<const int64_t> leaves) override {
    QUIRE_RETURN_IF_ERROR(Fault("CommitAcceptedTokenTreeNodes"));
    return cache_->CommitAcceptedTokenTreeNodes(ids, leaves);
  }
  Result<int64_t> GetTreeSize(int64_t id) const override { return cache_->GetTreeSize(id); }
  Status BeginLoadingForward(std::span<const int64_t> ids, std::span<const int64_t> lengths,
                             std::span<const LayerLoad> loads) override {
    QUIRE_RETURN_IF_ERROR(Fault("BeginLoadingForward"));
    const Status status = cache_->BeginLoadingForward(ids, lengths, loads);
    if (status.code() == StatusCode::kOutOfPages) ++out_of_pages;
    loading_forwards += status.ok();
    return status;
  }
  Status BeginBlendingForward(std::span<const int64_t> ids, std::span<const int64_t> lengths,
                              std::span<const LayerLoad> loads,
                              std::span<const BlendMember> blends) override {
    QUIRE_RETURN_IF_ERROR(Fault("BeginBlendingForward"));
    const Status status = cache_->BeginBlendingForward(ids, lengths, loads, blends);
    if (status.code() == StatusCode::kOutOfPages) ++out_of_pages;
    return status;
  }
  Status EndForward() override {
    QUIRE_RETURN_IF_ERROR(Fault("EndForward"));
    return cache_->EndForward();
  }
  Status AbortForward() override { return cache_->AbortForward(); }
  Status EnableSlidingWindowForSeq(int64_t id, int64_t window, int64_t sinks) override {
    return cache_->EnableSlidingWindowForSeq(id, window, sinks);
  }
  Status DisableSlidingWindowForSeq(int64_t id) override {
    return cache_->DisableSlidingWindowForSeq(id);
  }
  bool CanFork(int64_t id, int64_t position) const override {
    return cache_->CanFork(id, position);
  }
  Result<int64_t> HeldTokens(int64_t id) const override { return cache_->HeldTokens(id); }
  Result<TokenRange> SlidRange(int64_t id) const override { return cache_->SlidRange(id); }
  Result<WindowSettings> GetWindows(int64_t id) const override { return cache_->GetWindows(id); }

  const AttentionKVCacheOptions& options() const override { return cache_->options(); }
  bool Empty() const override { return cache_->Empty(); }
  int64_t GetNumAvailablePages() const override { return cache_->GetNumAvailablePages(); }
  int64_t GetTotalSequenceLength() const override { return cache_->GetTotalSequenceLength(); }
  int64_t GetDistinctTokenCount() const override { return cache_->GetDistinctTokenCount(); }
  int64_t sequence_count() const override { return cache_->sequence_count(); }
  int64_t retained_sequence_count() const override { return cache_->retained_sequence_count(); }
  KVTransfer* transfer() override { return cache_->transfer(); }
  PageCounts page_counts() const override { return cache_->page_counts(); }
  int64_t pages_in_use() const override { return cache_->pages_in_use(); }
  int64_t pages_allocated() const override { return cache_->pages_allocated(); }
  Result<SeenBlocks> DescribeBlocks(std::span<const int64_t> seq_ids,
                                    int64_t blocks_max) const override {
    return blocks_.DescribeBlocks(seq_ids, blocks_max);
  }
  bool HasSequence(int64_t id) const override { return cache_->HasSequence(id); }
  Result<int64_t> GetSequenceLength(int64_t id) const override {
    return cache_->GetSequenceLength(id);
  }
  Result<int64_t> PagesNeeded(std::span<const int64_t> ids,
                              std::span<const int64_t> lengths) const override {
    QUIRE_RETURN_IF_ERROR(Fault("PagesNeeded"));
    return cache_->PagesNeeded(ids, lengths);
  }
  Result<int64_t> PagesNeededForTree(std::span<const int64_t> ids, std::span<const int64_t> lengths,
                                     std::span<const int64_t> parents) const override {
    QUIRE_RETURN_IF_ERROR(Fault("PagesNeededForTree"));
    return cache_->PagesNeededForTree(ids, lengths, parents);
  }
  Status SelectLongRope(int64_t id, bool use_long_factors) override {
    QUIRE_RETURN_IF_ERROR(Fault("SelectLongRope"));
    return cache_->SelectLongRope(id, use_long_factors);
  }
  Result<bool> UsesLongRope(int64_t id) const override { return cache_->UsesLongRope(id); }
  Status AttentionWithFusedQKV(int64_t layer, const TensorView& qkv, const TensorView& o,
                               double sm_scale, const TensorView* mask) override {
    QUIRE_RETURN_IF_ERROR(Fault("AttentionWithFusedQKV"));
    return cache_->AttentionWithFusedQKV(layer, qkv, o, sm_scale, mask);
  }
  Status Append(int64_t layer, const TensorView& k, const TensorView& v) override {
    return cache_->Append(layer, k, v);
  }
  Status Attend(int64_t layer, const TensorView& q, const TensorView& o, const TensorView* lse,
                double sm_scale, const TensorView* mask) override {
    return cache_->Attend(layer, q, o, lse, sm_scale, mask);
  }
  Status SelfAttention(int64_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& o, const TensorView& lse, double sm_scale,
                       const TensorView* mask) override {
    return cache_->SelfAttention(layer, q, k, v, o, lse, sm_scale, mask);
  }
  Status CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                        const TensorView& lse, double sm_scale) override {
    return cache_->CrossAttention(layer, q, o, lse, sm_scale);
  }
  Status MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1, const TensorView& o2,
                                const TensorView& lse2) override {
    return cache_->MergeAttnOutputInplace(o1, lse1, o2, lse2);
  }
  Status AppendMLAKV(int64_t layer, const TensorView& kv) override {
    return cache_->AppendMLAKV(layer, kv);
  }
  Status AttentionWithMLA(int64_t layer, const TensorView& q, const TensorView& kv,
                          const TensorView& o, double sm_scale, const TensorView* mask) override {
    QUIRE_RETURN_IF_ERROR(Fault("AttentionWithMLA"));
    return cache_->AttentionWithMLA(layer, q, kv, o, sm_scale, mask);
  }
  Status AttentionWithSharedKV(int64_t layer, const TensorView& q, const TensorView& o,
                               const TensorView* lse, double sm_scale,
                               const TensorView* mask) override {
    return cache_->AttentionWithSharedKV(layer, q, o, lse, sm_scale, mask);
  }
  Result<std::span<const int32_t>> GetQueryRows() const override { return cache_->GetQueryRows(); }
  Result<std::span<const int32_t>> GetQueryPositions() const override {
    return cache_->GetQueryPositions();
  }
  Status ExportKV(int64_t id, int64_t layer, int64_t start, const LayerKV& to) override {
    return cache_->ExportKV(id, layer, start, to);
  }
  Status ImportKV(int64_t id, std::span<const KVBlock> blocks) override {
    QUIRE_RETURN_IF_ERROR(Fault("ImportKV"));
    return cache_->ImportKV(id, blocks);
  }
  Status DebugGetKVMLA(int64_t id, int64_t start, int64_t end, const TensorView& kv) override {
    return cache_->DebugGetKVMLA(id, start, end, kv);
  }
  Status DebugSetKVMLA(int64_t id, int64_t start, const TensorView& kv) override {
    return cache_->DebugSetKVMLA(id, start, kv);
  }
  Status ImportVisibleKV(int64_t id, const KVImport& import) override {
    QUIRE_RETURN_IF_ERROR(Fault("ImportVisibleKV"));
    return cache_->ImportVisibleKV(id, import);
  }
  Status DebugGetKV(int64_t id, int64_t start, int64_t end, const TensorView& k,
                    const TensorView& v) override {
    return cache_->DebugGetKV(id, start, end, k, v);
  }
  Status DebugSetKV(int64_t id, int64_t start, const TensorView& k, const TensorView& v) override {
    return cache_->DebugSetKV(id, start, k, v);
  }
  Result<std::string> DebugPlan() const override { return cache_->DebugPlan(); }
  uint64_t StateDigest() const override { return cache_->StateDigest(); }
  Status CheckInvariants() const override { return cache_->CheckInvariants(); }

 private:
  Status Fault(std::string_view call) const { return fault ? fault(call) : Status(); }

  std::unique_ptr<AttentionKVCache> cache_;
  PlannedState& planned_;
  const BlockQueries& blocks_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_FALLIBLE_KV_CACHE_H_
