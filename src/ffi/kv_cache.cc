// quire.KVCache: AttentionKVCache for tvm-ffi. Tensors are borrowed for the call and never copied.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/chunk_space.h"
#include "ffi/errors.h"
#include "ffi/kv_state.h"
#include "ffi/options.h"
#include "ffi/snapshot.h"
#include "ffi/tensors.h"
#include "ffi/transfer.h"
#include "quire/attention_kv_cache.h"
#include "quire/kv_export.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

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
  reader.Read("max_pop", &options.max_pop);
  if (const auto rope = reader.Get<OptionMap>("rope")) options.rope = ReadRopeOptions(*rope);
  reader.Read("kernel_path", &options.kernel_path);
  reader.Read("poison_freed_pages", &options.poison_freed_pages);
  reader.Read("tvm_window_span", &options.tvm_window_span);
  reader.Read("allow_skipped_layers", &options.allow_skipped_layers);
  options.runner = reader.ReadRunner();
  reader.Finish();
  return options;
}

// A view that may be missing.
class OptionalView {
 public:
  explicit OptionalView(const tf::Optional<tf::TensorView>& tensor)
      : view_(tensor.has_value() ? ViewOf(tensor.value()) : TensorView()),
        is_there_(tensor.has_value()) {}
  const TensorView* get() const { return is_there_ ? &view_ : nullptr; }

 private:
  const TensorView view_;
  const bool is_there_;
};

class KVCacheObj : public TransferObject<AttentionKVCache> {
 public:
  explicit KVCacheObj(const OptionMap& fields)
      : TransferObject([&] { return AttentionKVCache::Create(ReadCacheOptions(fields)); }) {}

  std::shared_ptr<AttentionKVCache> attention() const override { return state_; }

  void EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
    latch_.Run([&] { return state_->EnableSlidingWindowForSeq(seq_id, window, sinks); });
  }
  void DisableSlidingWindowForSeq(int64_t seq_id) {
    latch_.Run([&] { return state_->DisableSlidingWindowForSeq(seq_id); });
  }
  int64_t HeldTokens(int64_t seq_id) {
    return latch_.Run([&] { return state_->HeldTokens(seq_id); });
  }
  tf::Shape SlidRange(int64_t seq_id) {
    const TokenRange range = latch_.Run([&] { return state_->SlidRange(seq_id); });
    return tf::Shape({range.begin, range.end});
  }
  bool Empty() {
    return latch_.Run([&] { return state_->Empty(); });
  }
  int64_t GetNumAvailablePages() {
    return latch_.Run([&] { return state_->GetNumAvailablePages(); });
  }
  int64_t GetTotalSequenceLength() {
    return latch_.Run([&] { return state_->GetTotalSequenceLength(); });
  }
  int64_t GetDistinctTokenCount() {
    return latch_.Run([&] { return state_->GetDistinctTokenCount(); });
  }
  int64_t PagesInUse() {
    return latch_.Run([&] { return state_->pages_in_use(); });
  }
  int64_t PagesAllocated() {
    return latch_.Run([&] { return state_->pages_allocated(); });
  }
  int64_t PagesNeeded(const tf::Shape& seq_ids, const tf::Shape& append_lengths) {
    return latch_.Run([&] { return state_->PagesNeeded(SpanOf(seq_ids), SpanOf(append_lengths)); });
  }
  int64_t PagesNeededForTree(const tf::Shape& seq_ids, const tf::Shape& append_lengths,
                             const tf::Shape& parents) {
    return latch_.Run([&] {
      return state_->PagesNeededForTree(SpanOf(seq_ids), SpanOf(append_lengths), SpanOf(parents));
    });
  }
  void SelectLongRope(int64_t seq_id, bool use_long_factors) {
    latch_.Run([&] { return state_->SelectLongRope(seq_id, use_long_factors); });
  }

  void AttentionWithFusedQKV(int64_t layer, tf::TensorView qkv, tf::TensorView o, double sm_scale,
                             tf::Optional<tf::TensorView> mask) {
    const TensorView qkv_view = ViewOf(qkv);
    const TensorView o_view = ViewOf(o);
    const OptionalView mask_view(mask);
    latch_.Run([&] {
      return state_->AttentionWithFusedQKV(layer, qkv_view, o_view, sm_scale, mask_view.get());
    });
  }
  void Append(int64_t layer, tf::TensorView k, tf::TensorView v) {
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    latch_.Run([&] { return state_->Append(layer, k_view, v_view); });
  }
  void Attend(int64_t layer, tf::TensorView q, tf::TensorView o, tf::Optional<tf::TensorView> lse,
              double sm_scale, tf::Optional<tf::TensorView> mask) {
    const TensorView q_view = ViewOf(q);
    const TensorView o_view = ViewOf(o);
    const OptionalView lse_view(lse);
    const OptionalView mask_view(mask);
    latch_.Run([&] {
      return state_->Attend(layer, q_view, o_view, lse_view.get(), sm_scale, mask_view.get());
    });
  }
  void AppendMLAKV(int64_t layer, tf::TensorView kv) {
    const TensorView kv_view = ViewOf(kv);
    latch_.Run([&] { return state_->AppendMLAKV(layer, kv_view); });
  }
  void AttentionWithMLA(int64_t layer, tf::TensorView q_absorbed, tf::TensorView kv,
                        tf::TensorView o, double sm_scale, tf::Optional<tf::TensorView> mask) {
    const TensorView q_view = ViewOf(q_absorbed);
    const TensorView kv_view = ViewOf(kv);
    const TensorView o_view = ViewOf(o);
    const OptionalView mask_view(mask);
    latch_.Run([&] {
      return state_->AttentionWithMLA(layer, q_view, kv_view, o_view, sm_scale, mask_view.get());
    });
  }
  void SelfAttention(int64_t layer, tf::TensorView q, tf::TensorView k, tf::TensorView v,
                     tf::TensorView o, tf::TensorView lse, double sm_scale,
                     tf::Optional<tf::TensorView> mask) {
    const OptionalView mask_view(mask);
    const TensorView q_view = ViewOf(q);
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    const TensorView o_view = ViewOf(o);
    const TensorView lse_view = ViewOf(lse);
    latch_.Run([&] {
      return state_->SelfAttention(layer, q_view, k_view, v_view, o_view, lse_view, sm_scale,
                                   mask_view.get());
    });
  }
  void CrossAttention(int64_t layer, tf::TensorView q, tf::TensorView o, tf::TensorView lse,
                      double sm_scale) {
    const TensorView q_view = ViewOf(q);
    const TensorView o_view = ViewOf(o);
    const TensorView lse_view = ViewOf(lse);
    latch_.Run([&] { return state_->CrossAttention(layer, q_view, o_view, lse_view, sm_scale); });
  }
  void MergeAttnOutputInplace(tf::TensorView o1, tf::TensorView lse1, tf::TensorView o2,
                              tf::TensorView lse2) {
    const TensorView o1_view = ViewOf(o1);
    const TensorView lse1_view = ViewOf(lse1);
    const TensorView o2_view = ViewOf(o2);
    const TensorView lse2_view = ViewOf(lse2);
    latch_.Run(
        [&] { return state_->MergeAttnOutputInplace(o1_view, lse1_view, o2_view, lse2_view); });
  }
  void AttentionWithSharedKV(int64_t source_layer, tf::TensorView q, tf::TensorView o,
                             tf::Optional<tf::TensorView> lse, double sm_scale,
                             tf::Optional<tf::TensorView> mask) {
    const TensorView q_view = ViewOf(q);
    const TensorView o_view = ViewOf(o);
    const OptionalView lse_view(lse);
    const OptionalView mask_view(mask);
    latch_.Run([&] {
      return state_->AttentionWithSharedKV(source_layer, q_view, o_view, lse_view.get(), sm_scale,
                                           mask_view.get());
    });
  }
  // A copy: the cache's own array changes with the next forward.
  tf::Tensor GetQueryPositions() {
    return NewTensor(latch_.Run([&] { return state_->GetQueryPositions(); }));
  }

  void DebugGetKV(int64_t seq_id, int64_t start, int64_t end, tf::TensorView k, tf::TensorView v) {
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    latch_.Run([&] { return state_->DebugGetKV(seq_id, start, end, k_view, v_view); });
  }
  void DebugSetKV(int64_t seq_id, int64_t start, tf::TensorView k, tf::TensorView v) {
    const TensorView k_view = ViewOf(k);
    const TensorView v_view = ViewOf(v);
    latch_.Run([&] { return state_->DebugSetKV(seq_id, start, k_view, v_view); });
  }
  void DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, tf::TensorView kv) {
    const TensorView kv_view = ViewOf(kv);
    latch_.Run([&] { return state_->DebugGetKVMLA(seq_id, start, end, kv_view); });
  }
  void DebugSetKVMLA(int64_t seq_id, int64_t start, tf::TensorView kv) {
    const TensorView kv_view = ViewOf(kv);
    latch_.Run([&] { return state_->DebugSetKVMLA(seq_id, start, kv_view); });
  }
  tf::String DebugPlan() {
    return tf::String(latch_.Run([&] { return state_->DebugPlan(); }));
  }
  void SaveSnapshot(int64_t seq_id, const OptionMap& contents, const tf::String& path) {
    SaveStateSnapshot(&latch_, *state_, seq_id, contents, path);
  }
  OptionMap LoadSnapshot(int64_t seq_id, const OptionMap& identity, const tf::String& path,
                         bool any_numerics) {
    RefuseIfPart("LoadSnapshot");
    return LoadStateSnapshot(&latch_, *state_, seq_id, identity, path, any_numerics);
  }

  // The passport of chunks of this cache's, as JSON. `identity`: as ReadIdentity.
  tf::String ChunkPassport(const OptionMap& identity) {
    const Passport read = ReadIdentity(identity);
    return latch_.Run([&]() -> Result<tf::String> {
      QUIRE_ASSIGN_OR_RETURN(const Passport passport, CachePassport(*state_, read, false));
      QUIRE_ASSIGN_OR_RETURN(const std::string json, passport.ToJson());
      return tf::String(json);
    });
  }
  int64_t PutChunks(int64_t seq_id, const tf::TensorView& tokens, const ChunkSpaceRef& space,
                    int64_t ttl_ms) {
    const std::vector<int32_t> ids = TokenIds(tokens);
    return latch_.Run([&] { return space->PutSequence(*state_, seq_id, ids, ttl_ms); });
  }
  void TakeChunks(int64_t seq_id, const ChunkFetchRef& fetch, int64_t count) {
    RefuseIfPart("TakeChunks");
    latch_.Run([&] { return fetch->AppendTo(*state_, seq_id, count); });
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.KVCache", KVCacheObj, KVStateObj);
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<KVCacheObj> object;
  DefineTransfer(object);
  object.def(tf::reflection::init<OptionMap>())
      .def("enable_sliding_window_for_seq", &KVCacheObj::EnableSlidingWindowForSeq)
      .def("disable_sliding_window_for_seq", &KVCacheObj::DisableSlidingWindowForSeq)
      .def("held_tokens", &KVCacheObj::HeldTokens)
      .def("slid_range", &KVCacheObj::SlidRange)
      .def("empty", &KVCacheObj::Empty)
      .def("get_num_available_pages", &KVCacheObj::GetNumAvailablePages)
      .def("get_total_sequence_length", &KVCacheObj::GetTotalSequenceLength)
      .def("get_distinct_token_count", &KVCacheObj::GetDistinctTokenCount)
      .def("pages_in_use", &KVCacheObj::PagesInUse)
      .def("pages_allocated", &KVCacheObj::PagesAllocated)
      .def("pages_needed", &KVCacheObj::PagesNeeded)
      .def("pages_needed_for_tree", &KVCacheObj::PagesNeededForTree)
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
      .def("debug_get_kv", &KVCacheObj::DebugGetKV)
      .def("debug_set_kv", &KVCacheObj::DebugSetKV)
      .def("debug_get_kv_mla", &KVCacheObj::DebugGetKVMLA)
      .def("debug_set_kv_mla", &KVCacheObj::DebugSetKVMLA)
      .def("debug_plan", &KVCacheObj::DebugPlan)
      .def("save_snapshot", &KVCacheObj::SaveSnapshot)
      .def("load_snapshot", &KVCacheObj::LoadSnapshot)
      .def("chunk_passport", &KVCacheObj::ChunkPassport)
      .def("put_chunks", &KVCacheObj::PutChunks)
      .def("take_chunks", &KVCacheObj::TakeChunks);
}

}  // namespace
}  // namespace quire::ffi
