// AttentionCalls: what a layer does in the open forward: it stores keys and values of the new
// tokens and attends to them, or computes pieces of attention for callers that combine these.
//
// A call first checks that a forward is open and has not failed, then its tensors, then that the
// layer's turn has come (LayerSteps, BlendingForward). What the layer imports is loaded next, its
// rows are stored, and kernels run last.
//
// Invariants:
// - A call that has returned an error leaves the forward failed: no further one begins.
// - A layer stores its rows once in a forward, and only after its imported tokens.
// - Kernels read the pages of the plan alone, or those of SelfAttention's own tokens (RaggedKV).
//   Their scratch memory is what was reserved when the forward began.
#ifndef QUIRE_KV_CACHE_ATTENTION_CALLS_H_
#define QUIRE_KV_CACHE_ATTENTION_CALLS_H_

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kv/cache/attention_scratch.h"
#include "kv/cache/blending_forward.h"
#include "kv/cache/counting_gate.h"
#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/layer_steps.h"
#include "kv/cache/paged_sequences.h"
#include "kv/plan/attention_mask.h"
#include "kv/plan/attention_tensors.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/ragged_kv.h"
#include "kv/plan/rope_angles.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

class AttentionCalls {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    const CountingGate& gate;
    PagedSequences& kv;
    const ForwardPlan& plan;  // of the open forward
    LayerSteps& steps;
    RopeAngles& ropes;
    BlendingForward& blending;
    KVImporter& importer;
    KVSender& sender;
  };
  AttentionCalls(const Owners& owners, const Backend& backend);

  // ---- The calls of AttentionKVCache with these names.
  Status AttentionWithFusedQKV(int64_t layer, const TensorView& qkv, const TensorView& o,
                               double sm_scale, const TensorView* mask);
  Status Append(int64_t layer, const TensorView& k, const TensorView& v);
  Status Attend(int64_t layer, const TensorView& q, const TensorView& o, const TensorView* lse,
                double sm_scale, const TensorView* mask);
  Status AttentionWithSharedKV(int64_t source_layer, const TensorView& q, const TensorView& o,
                               const TensorView* lse, double sm_scale, const TensorView* mask);
  Status AppendMLAKV(int64_t layer, const TensorView& kv);
  Status AttentionWithMLA(int64_t layer, const TensorView& q_absorbed, const TensorView& kv,
                          const TensorView& o, double sm_scale, const TensorView* mask);
  Status SelfAttention(int64_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& o, const TensorView& lse, double sm_scale,
                       const TensorView* mask);
  Status CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                        const TensorView& lse, double sm_scale);
  Status MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1, const TensorView& o2,
                                const TensorView& lse2);

  // ---- The forward, with what its layers need.
  // Scratch memory for the planned forward, whose kernels see `sequence_count` sequences at most.
  // May throw std::bad_alloc. REQUIRES: the plan is reserved.
  void Reserve(int64_t sequence_count) {
    scratch_.Reserve(owners_.plan.totals().rows, sequence_count);
  }
  // For a forward that needs what the one before it did.
  void ReserveAgain() { scratch_.ReserveAgain(); }
  // The new tokens of a layer that was skipped become zeros. REQUIRES: allow_skipped_layers; what
  // the layer imports is loaded.
  void StoreZeros(int64_t layer) noexcept;
  // Gives all memory back.
  void Clear() noexcept;

  int64_t scratch_bytes() const { return static_cast<int64_t>(scratch_.bytes()); }

 private:
  // What kernels read of the layers' options.
  struct LayerConstants {
    explicit LayerConstants(const AttentionKVCacheOptions& options);

    std::vector<std::vector<float>> head_sinks_log2;  // [layer][query head], or empty
    std::vector<float> zero_row;  // of one head of any layer; empty unless layers may be skipped
  };
  // Which tokens a row attends to: those up to its own, or those of before the forward.
  enum class Sees : uint8_t { kUpToOwn, kCached };

  // Runs a call of this name: only a success leaves the forward open for further ones.
  template <typename F>
  Status Run(const char* name, int64_t layer, F&& body);
  int64_t RowsOfCall(int64_t layer) const;
  Status AppendLatent(const AttentionCall& call, const TensorView& kv);
  // What Attend and AttentionWithSharedKV are given, checked; the layer must have been appended to.
  struct QueryTensors {
    HeadRows q;
    MutableHeadRows o;
    const RowMask* masks;  // null: there are none
  };
  Result<QueryTensors> CheckQueries(const AttentionCall& call, const TensorView& q,
                                    const TensorView& o, const TensorView* lse, double sm_scale,
                                    const TensorView* mask);
  // What comes before the layer's rows, these, and the choice of those that go on.
  Status AppendRows(const AttentionCall& call, const HeadRows& k, const HeadRows& v);
  // Keys are rotated by `rotary`.
  void StoreRows(int64_t layer, const HeadRows& k, const HeadRows& v,
                 const RotaryRows& rotary) noexcept;
  // The keys of SelfAttention's own tokens are rotated as they are read.
  void RotateInline(int64_t layer) noexcept;
  // `masks`: of the rows, or null.
  void RunAttend(int64_t layer, Sees sees, const HeadRows& q, const RopeAngles::QueryAngles& angles,
                 const MutableHeadRows& o, const TensorView* lse, double sm_scale,
                 const RowMask* masks = nullptr) noexcept;
  // `args` says what is attended to; what is the same for all calls is set here.
  void RunKernel(int64_t layer, AttentionArgs args, const TensorView* lse,
                 double sm_scale) noexcept;

  const Owners owners_;
  PagedSequences& kv_;
  const Backend& backend_;
  const LayerConstants constants_;
  AttentionScratch scratch_;
  RaggedKV ragged_;     // of the last SelfAttention
  AttentionMask mask_;  // of the last call that has one
};

template <typename F>
Status AttentionCalls::Run(const char* name, int64_t layer, F&& body) {
  return owners_.gate.Enter(name, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireForward(name));
    kv_.control.set_failed(true);
    if (layer < 0 || layer >= static_cast<int64_t>(kv_.options.layers.size())) {
      return Status(StatusCode::kBadArgument, std::string(name) + ": no layer " +
                                                  std::to_string(layer) + "; this cache has " +
                                                  std::to_string(kv_.options.layers.size()));
    }
    QUIRE_RETURN_IF_ERROR(body(AttentionCall{.name = name,
                                             .layer = layer,
                                             .spec = kv_.options.layers[static_cast<size_t>(layer)],
                                             .row_count = RowsOfCall(layer)}));
    kv_.control.set_failed(false);
    return Status();
  });
}

}  // namespace quire

#endif  // QUIRE_KV_CACHE_ATTENTION_CALLS_H_
