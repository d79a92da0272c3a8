// quire.KVCache: AttentionKVCache for tvm-ffi. Tensors are borrowed for the call and never copied.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/tensors.h"
#include "ffi/transfer.h"
#include "quire/attention_kv_cache.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

std::span<const int64_t> SpanOf(const tf::Shape& shape) { return {shape.data(), shape.size()}; }

AttentionKVCacheOptions ReadCacheOptions(const OptionMap& fields) {
  AttentionKVCacheOptions options;
  OptionsReader reader("KVCache", fields);
  for (const OptionMap& layer :
       reader.Get<tf::Array<OptionMap>>("layers").value_or(tf::Array<OptionMap>())) {
    options.layers.push_back(ReadLayerSpec(layer));
  }
  reader.Read("max_num_sequences", &options.max_num_sequences);
  reader.Read("token_capacity", &options.token_capacity);
  reader.Read("prefill_chunk_size", &options.prefill_chunk_size);
  reader.Read("page_size", &options.page_size);
  reader.Read("max_tree_size", &options.max_tree_size);
  if (const auto rope = reader.Get<OptionMap>("rope")) options.rope = ReadRopeOptions(*rope);
  reader.Read("kernel_path", &options.kernel_path);
  reader.Read("poison_freed_pages", &options.poison_freed_pages);
  reader.Read("tvm_window_span", &options.tvm_window_span);
  int threads = 0;
  reader.Read("threads", &threads);
  reader.Finish();
  if (threads < 0) {
    ThrowBadArgument("KVCache: option 'threads' = " + std::to_string(threads) +
                     " is negative; 0 stands for one per core");
  }
  if (threads > 0) options.runner = CreateThreadPool(threads);
  return options;
}

class KVCacheObj : public tf::Object {
 public:
  explicit KVCacheObj(const OptionMap& fields)
      : cache_(latch_.Run([&] { return AttentionKVCache::Create(ReadCacheOptions(fields)); })) {}

  void Clear() {
    latch_.Run([&] { return cache_->Clear(); });
  }
  void AddSequence(int64_t seq_id) {
    latch_.Run([&] { return cache_->AddSequence(seq_id); });
  }
  void RemoveSequence(int64_t seq_id) {
    latch_.Run([&] { return cache_->RemoveSequence(seq_id); });
  }
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
    latch_.Run([&] { return cache_->ForkSequence(parent_id, child_id, fork_pos); });
  }
  void PopN(int64_t seq_id, int64_t n) {
    latch_.Run([&] { return cache_->PopN(seq_id, n); });
  }
  void EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
    latch_.Run([&] { return cache_->EnableSlidingWindowForSeq(seq_id, window, sinks); });
  }
  void DisableSlidingWindowForSeq(int64_t seq_id) {
    latch_.Run([&] { return cache_->DisableSlidingWindowForSeq(seq_id); });
  }
  int64_t HeldTokens(int64_t seq_id) {
    return latch_.Run([&] { return cache_->HeldTokens(seq_id); });
  }
  tf::Shape SlidRange(int64_t seq_id) {
    const TokenRange range = latch_.Run([&] { return cache_->SlidRange(seq_id); });
    return tf::Shape({range.begin, range.end});
  }
  void BeginForward(const tf::Shape& seq_ids, const tf::Shape& append_lengths) {
    latch_.Run([&] { return cache_->BeginForward(SpanOf(seq_ids), SpanOf(append_lengths)); });
  }
  void BeginTreeForward(const tf::Shape& seq_ids, const tf::Shape& append_lengths,
                        const tf::Shape& parents) {
    latch_.Run([&] {
      return cache_->BeginTreeForward(SpanOf(seq_ids), SpanOf(append_lengths), SpanOf(parents));
    });
  }
  void CommitAcceptedTokenTreeNodes(const tf::Shape& seq_ids, const tf::Shape& leaf_indices) {
    latch_.Run([&] {
      return cache_->CommitAcceptedTokenTreeNodes(SpanOf(seq_ids), SpanOf(leaf_indices));
    });
  }
  int64_t GetTreeSize(int64_t seq_id) {
    return latch_.Run([&] { return cache_->GetTreeSize(seq_id); });
  }
  void EndForward() {
    latch_.Run([&] { return cache_->EndForward(); });
  }
  void AbortForward() {
    latch_.Run([&] { return cache_->AbortForward(); });
  }

  bool Empty() {
    return latch_.Run([&] { return cache_->Empty(); });
  }
  int64_t GetNumAvailablePages() {
    return latch_.Run([&] { return cache_->GetNumAvailablePages(); });
  }
  int64_t GetTotalSequenceLength() {
    return latch_.Run([&] { return cache_->GetTotalSequenceLength(); });
  }
  int64_t GetDistinctTokenCount() {
    return latch_.Run([&] { return cache_->GetDistinctTokenCount(); });
  }
  int64_t SequenceCount() {
    return latch_.Run([&] { return cache_->sequence_count(); });
  }
  int64_t PagesInUse() {
    return latch_.Run([&] { return cache_->pages_in_use(); });
  }
  int64_t PagesAllocated() {
    return latch_.Run([&] { return cache_->pages_allocated(); });
  }
  bool HasSequence(int64_t seq_id) {
    return latch_.Run([&] { return cache_->HasSequence(seq_id); });
  }
  int64_t GetSequenceLength(int64_t seq_id) {
    return latch_.Run([&] { return cache_->GetSequenceLength(seq_id); });
  }
  int64_t PagesNeeded(const tf::Shape& seq_ids, const tf::Shape& append_lengths) {
    return latch_.Run([&] { return cache_->PagesNeeded(SpanOf(seq_ids), SpanOf(append_lengths)); });
  }
  void SelectLongRope(int64_t seq_id, bool use_long_factors) {
    latch_.Run([&] { return cache_->SelectLongRope(seq_id, use_long_factors); });
  }

  void AttentionWithFusedQKV(int64_t layer, tf::TensorView qkv, tf::TensorView o, double sm_scale) {
    const TensorView qkv_view = ViewOf(qkv);
    const TensorView o_view = ViewOf(o);
    latch_.Run([&] { return cache_->AttentionWithFusedQKV(layer, qkv_view, o_view, sm_scale); });
  }
  void Append(int64_t layer, tf::TensorView k, tf::TensorView v) {
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    latch_.Run([&] { return cache_->Append(layer, k_view, v_view); });
  }
  void Attend(int64_t layer, tf::TensorView q, tf::TensorView o, tf::Optional<tf::TensorView> lse,
              double sm_scale) {
    const TensorView q_view = ViewOf(q);
    const TensorView o_view = ViewOf(o);
    const TensorView lse_view = lse.has_value() ? ViewOf(lse.value()) : TensorView();
    const TensorView* lse_pointer = lse.has_value() ? &lse_view : nullptr;
    latch_.Run([&] { return cache_->Attend(layer, q_view, o_view, lse_pointer, sm_scale); });
  }
  void AppendMLAKV(int64_t layer, tf::TensorView kv) {
    const TensorView kv_view = ViewOf(kv);
    latch_.Run([&] { return cache_->AppendMLAKV(layer, kv_view); });
  }
  void AttentionWithMLA(int64_t layer, tf::TensorView q_absorbed, tf::TensorView kv,
                        tf::TensorView o, double sm_scale) {
    const TensorView q_view = ViewOf(q_absorbed);
    const TensorView kv_view = ViewOf(kv);
    const TensorView o_view = ViewOf(o);
    latch_.Run([&] { return cache_->AttentionWithMLA(layer, q_view, kv_view, o_view, sm_scale); });
  }
  void SelfAttention(int64_t layer, tf::TensorView q, tf::TensorView k, tf::TensorView v,
                     tf::TensorView o, tf::TensorView lse, double sm_scale) {
    const TensorView q_view = ViewOf(q);
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    const TensorView o_view = ViewOf(o);
    const TensorView lse_view = ViewOf(lse);
    latch_.Run([&] {
      return cache_->SelfAttention(layer, q_view, k_view, v_view, o_view, lse_view, sm_scale);
    });
  }
  void CrossAttention(int64_t layer, tf::TensorView q, tf::TensorView o, tf::TensorView lse,
                      double sm_scale) {
    const TensorView q_view = ViewOf(q);
    const TensorView o_view = ViewOf(o);
    const TensorView lse_view = ViewOf(lse);
    latch_.Run([&] { return cache_->CrossAttention(layer, q_view, o_view, lse_view, sm_scale); });
  }
  void MergeAttnOutputInplace(tf::TensorView o1, tf::TensorView lse1, tf::TensorView o2,
                              tf::TensorView lse2) {
    const TensorView o1_view = ViewOf(o1);
    const TensorView lse1_view = ViewOf(lse1);
    const TensorView o2_view = ViewOf(o2);
    const TensorView lse2_view = ViewOf(lse2);
    latch_.Run(
        [&] { return cache_->MergeAttnOutputInplace(o1_view, lse1_view, o2_view, lse2_view); });
  }
  void AttentionWithSharedKV(int64_t source_layer, tf::TensorView q, tf::TensorView o,
                             tf::Optional<tf::TensorView> lse, double sm_scale) {
    const TensorView q_view = ViewOf(q);
    const TensorView o_view = ViewOf(o);
    const TensorView lse_view = lse.has_value() ? ViewOf(lse.value()) : TensorView();
    const TensorView* lse_pointer = lse.has_value() ? &lse_view : nullptr;
    latch_.Run([&] {
      return cache_->AttentionWithSharedKV(source_layer, q_view, o_view, lse_pointer, sm_scale);
    });
  }
  // A copy: the cache's own array changes with the next forward.
  tf::Tensor GetQueryPositions() {
    return NewTensor(latch_.Run([&] { return cache_->GetQueryPositions(); }));
  }

  // ---- Transfer.
  void ConnectChannel(const LocalChannelObj* channel, int64_t peer) {
    KVTransfer* const receiver = latch_.Run([&] { return cache_->transfer(); });
    places_.emplace_back(channel->channel(), peer, receiver);
  }
  void DisconnectChannel(const LocalChannelObj* channel, int64_t peer) {
    latch_.Run([&]() -> Status {
      const auto place = std::ranges::find_if(
          places_, [&](const ChannelPlace& p) { return p.Is(channel->channel(), peer); });
      if (place == places_.end()) {
        return Status(StatusCode::kNotFound, "disconnect_channel: this cache is not peer " +
                                                 std::to_string(peer) + " of the channel");
      }
      places_.erase(place);
      return Status();
    });
  }
  void SendThrough(const LocalChannelObj* channel) {
    latch_.Run([&] { return cache_->transfer()->SetLayerSink(channel->channel()); });
  }
  void SendNowhere() {
    latch_.Run([&] { return cache_->transfer()->SetLayerSink(nullptr); });
  }
  OptionMap DisaggPrepareRecv(int64_t seq_id, int64_t count) {
    return ReceiveMapFields(
        latch_.Run([&] { return cache_->transfer()->DisaggPrepareRecv(seq_id, count); }));
  }
  void DisaggCommitRecv(int64_t epoch, int64_t n) {
    latch_.Run(
        [&] { return cache_->transfer()->DisaggCommitRecv(static_cast<uint64_t>(epoch), n); });
  }
  void DisaggCancelRecv(int64_t epoch) {
    latch_.Run([&] { return cache_->transfer()->DisaggCancelRecv(static_cast<uint64_t>(epoch)); });
  }
  OptionMap ReceiveProgress(int64_t epoch) {
    return ReceiveProgressFields(latch_.Run(
        [&] { return cache_->transfer()->GetReceiveProgress(static_cast<uint64_t>(epoch)); }));
  }
  void WaitReceived(int64_t epoch, int64_t n, int64_t timeout_ns) {
    const auto clock = MachineTime();
    const int64_t until = clock->SteadyNs() + timeout_ns;
    latch_.Run([&] {
      return cache_->transfer()->WaitReceived(static_cast<uint64_t>(epoch), n, *clock, until);
    });
  }
  void DisaggMarkSend(int64_t seq_id, int64_t begin, const tf::Array<OptionMap>& maps, int64_t peer,
                      int64_t rank) {
    std::vector<ReceiveMap> read;
    for (const OptionMap& map : maps) read.push_back(ReadReceiveMap(map));
    latch_.Run([&] { return cache_->transfer()->DisaggMarkSend(seq_id, begin, read, peer, rank); });
  }
  void DisaggUnmarkSend(int64_t seq_id) {
    latch_.Run([&] { return cache_->transfer()->DisaggUnmarkSend(seq_id); });
  }
  void DisaggFlushSend(int64_t seq_id) {
    latch_.Run([&] { return cache_->transfer()->DisaggFlushSend(seq_id); });
  }
  OptionMap SendProgress(int64_t seq_id) {
    return SendProgressFields(
        latch_.Run([&] { return cache_->transfer()->GetSendProgress(seq_id); }));
  }

  void DebugGetKV(int64_t seq_id, int64_t start, int64_t end, tf::TensorView k, tf::TensorView v) {
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    latch_.Run([&] { return cache_->DebugGetKV(seq_id, start, end, k_view, v_view); });
  }
  void DebugSetKV(int64_t seq_id, int64_t start, tf::TensorView k, tf::TensorView v) {
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    latch_.Run([&] { return cache_->DebugSetKV(seq_id, start, k_view, v_view); });
  }
  void DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, tf::TensorView kv) {
    const TensorView kv_view = ViewOf(kv);
    latch_.Run([&] { return cache_->DebugGetKVMLA(seq_id, start, end, kv_view); });
  }
  void DebugSetKVMLA(int64_t seq_id, int64_t start, tf::TensorView kv) {
    const TensorView kv_view = ViewOf(kv);
    latch_.Run([&] { return cache_->DebugSetKVMLA(seq_id, start, kv_view); });
  }
  tf::String DebugPlan() {
    return tf::String(latch_.Run([&] { return cache_->DebugPlan(); }));
  }
  // The digest's bits as a signed number: tvm-ffi has no unsigned ones.
  int64_t StateDigest() {
    return static_cast<int64_t>(latch_.Run([&] { return cache_->StateDigest(); }));
  }
  void CheckInvariants() {
    latch_.Run([&] { return cache_->CheckInvariants(); });
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.KVCache", KVCacheObj, tf::Object);

 private:
  FaultLatch latch_;
  std::unique_ptr<AttentionKVCache> cache_;
  std::list<ChannelPlace> places_;  // given back before the cache goes
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<KVCacheObj>()
      .def(tf::reflection::init<OptionMap>())
      .def("clear", &KVCacheObj::Clear)
      .def("add_sequence", &KVCacheObj::AddSequence)
      .def("remove_sequence", &KVCacheObj::RemoveSequence)
      .def("fork_sequence", &KVCacheObj::ForkSequence)
      .def("pop_n", &KVCacheObj::PopN)
      .def("enable_sliding_window_for_seq", &KVCacheObj::EnableSlidingWindowForSeq)
      .def("disable_sliding_window_for_seq", &KVCacheObj::DisableSlidingWindowForSeq)
      .def("held_tokens", &KVCacheObj::HeldTokens)
      .def("slid_range", &KVCacheObj::SlidRange)
      .def("begin_forward", &KVCacheObj::BeginForward)
      .def("begin_tree_forward", &KVCacheObj::BeginTreeForward)
      .def("commit_accepted_token_tree_nodes", &KVCacheObj::CommitAcceptedTokenTreeNodes)
      .def("get_tree_size", &KVCacheObj::GetTreeSize)
      .def("end_forward", &KVCacheObj::EndForward)
      .def("abort_forward", &KVCacheObj::AbortForward)
      .def("empty", &KVCacheObj::Empty)
      .def("get_num_available_pages", &KVCacheObj::GetNumAvailablePages)
      .def("get_total_sequence_length", &KVCacheObj::GetTotalSequenceLength)
      .def("get_distinct_token_count", &KVCacheObj::GetDistinctTokenCount)
      .def("sequence_count", &KVCacheObj::SequenceCount)
      .def("pages_in_use", &KVCacheObj::PagesInUse)
      .def("pages_allocated", &KVCacheObj::PagesAllocated)
      .def("has_sequence", &KVCacheObj::HasSequence)
      .def("get_sequence_length", &KVCacheObj::GetSequenceLength)
      .def("pages_needed", &KVCacheObj::PagesNeeded)
      .def("select_long_rope", &KVCacheObj::SelectLongRope)
      .def("attention_with_fused_qkv", &KVCacheObj::AttentionWithFusedQKV)
      .def("append", &KVCacheObj::Append)
      .def("append_mla_kv", &KVCacheObj::AppendMLAKV)
      .def("attention_with_mla", &KVCacheObj::AttentionWithMLA)
      .def("attend", &KVCacheObj::Attend)
      .def("self_attention", &KVCacheObj::SelfAttention)
      .def("cross_attention", &KVCacheObj::CrossAttention)
      .def("merge_attn_output_inplace", &KVCacheObj::MergeAttnOutputInplace)
      .def("attention_with_shared_kv", &KVCacheObj::AttentionWithSharedKV)
      .def("get_query_positions", &KVCacheObj::GetQueryPositions)
      .def("connect_channel", &KVCacheObj::ConnectChannel)
      .def("disconnect_channel", &KVCacheObj::DisconnectChannel)
      .def("send_through", &KVCacheObj::SendThrough)
      .def("send_nowhere", &KVCacheObj::SendNowhere)
      .def("disagg_prepare_recv", &KVCacheObj::DisaggPrepareRecv)
      .def("disagg_commit_recv", &KVCacheObj::DisaggCommitRecv)
      .def("disagg_cancel_recv", &KVCacheObj::DisaggCancelRecv)
      .def("receive_progress", &KVCacheObj::ReceiveProgress)
      .def("wait_received", &KVCacheObj::WaitReceived)
      .def("disagg_mark_send", &KVCacheObj::DisaggMarkSend)
      .def("disagg_unmark_send", &KVCacheObj::DisaggUnmarkSend)
      .def("disagg_flush_send", &KVCacheObj::DisaggFlushSend)
      .def("send_progress", &KVCacheObj::SendProgress)
      .def("debug_get_kv", &KVCacheObj::DebugGetKV)
      .def("debug_set_kv", &KVCacheObj::DebugSetKV)
      .def("debug_get_kv_mla", &KVCacheObj::DebugGetKVMLA)
      .def("debug_set_kv_mla", &KVCacheObj::DebugSetKVMLA)
      .def("debug_plan", &KVCacheObj::DebugPlan)
      .def("state_digest", &KVCacheObj::StateDigest)
      .def("check_invariants", &KVCacheObj::CheckInvariants);
}

}  // namespace
}  // namespace quire::ffi
