// StoredTokens: the keys and values of a cache's tokens as tensors: what ExportKV and the Debug
// calls read, and what DebugSetKV writes.
//
// Invariants:
// - A token is read only once its layer has stored it: of the open forward's tokens, those of
//   layers that have been appended to.
// - A token is written only in pages that no other sequence sees: what is shared moves to pages of
//   the sequence's own first.
#ifndef QUIRE_KV_CACHE_STORED_TOKENS_H_
#define QUIRE_KV_CACHE_STORED_TOKENS_H_

#include <cstdint>
#include <span>

#include "kv/cache/layer_steps.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/plan/forward_plan.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

class StoredTokens {
 public:
  // All must outlive it. `plan`: the last forward's.
  StoredTokens(PagedSequences& kv, WindowBook& windows, const LayerSteps& steps,
               const ForwardPlan& plan)
      : kv_(kv), windows_(windows), steps_(steps), plan_(plan) {}

  // As AttentionKVCache::ExportKV.
  Status Export(const char* call, int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to);
  // As its Debug calls. Layers that are not latent have keys [layers, tokens, heads, dim] and `v`;
  // if `v` is null, latent ones have `keys` [layers, tokens, dim].
  Status Get(const char* call, int64_t seq_id, int64_t start, int64_t end, const TensorView& keys,
             const TensorView* v);
  Status Set(const char* call, int64_t seq_id, int64_t start, const TensorView& keys,
             const TensorView* v);

 private:
  // For calls that read tokens of a layer up to `end`, nodes of a tree behind the committed ones:
  // BadState while the open forward has still to store some of them.
  Status RequireStored(const char* call, int32_t index, int64_t layer, int64_t end) const;
  Status CheckTensors(const char* call, int64_t count, const TensorView& k,
                      const TensorView* v) const;
  // Slots of the positions from `start` on, where those behind the committed tokens are the nodes
  // of the sequence's tree.
  void FillSlots(int32_t index, int group, int64_t start,
                 std::span<AppendTarget> slots) const noexcept;
  Status PrivatizeFrom(const char* call, int32_t index, int64_t start);

  PagedSequences& kv_;
  WindowBook& windows_;
  const LayerSteps& steps_;
  const ForwardPlan& plan_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_STORED_TOKENS_H_
