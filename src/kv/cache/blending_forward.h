// BlendingForward: the rows of an open forward that go on without others, layer by layer, and the
// stored keys and values of both.
//
// In each layer, in this order:
//   StartLayer  the layer's tensors have the rows that go on (QueryPlan::Pack)
//   Store       rows that do not go on get their keys and values from their member's source; then
//               those that go on are stored
//   Choose      a check layer's hooks are given these, as stored, and say which go on
//
// A layer's moved rows are checked before any of them is stored, and a hook's answer before it
// counts. After an error of a hook or a source only AbortForward goes on: pages hold what they
// hold, and no sequence ends behind them.
#ifndef QUIRE_KV_CACHE_BLENDING_FORWARD_H_
#define QUIRE_KV_CACHE_BLENDING_FORWARD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/paged_sequences.h"
#include "kv/plan/attention_tensors.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/query_plan.h"
#include "kv/plan/rope_angles.h"
#include "quire/attention_kv_cache.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class BlendingForward {
 public:
  // All must outlive it.
  BlendingForward(const PagedSequences& kv, KVImporter& importer, const KVSender& sender,
                  RopeAngles& ropes, const ForwardPlan& plan)
      : kv_(kv), importer_(importer), sender_(sender), ropes_(ropes), plan_(plan) {}

  // ---- Begin. Marks the members of a planned batch that blend.
  Status Plan(const char* call, std::span<const BlendMember> blends, ForwardPlan& plan) const;
  // Memory for the forward. May throw std::bad_alloc. REQUIRES: the plan and its angles are
  // reserved.
  void Reserve(std::span<const BlendMember> blends);
  // REQUIRES: Reserve; the plan and its angles are filled.
  void Open() noexcept { queries_.Open(plan_); }

  // ---- Of any forward.
  // Room for the rows of one that does not blend. May throw std::bad_alloc.
  void ReserveRows(int64_t row_count) { queries_.ReserveRows(row_count); }
  void Close() noexcept { queries_.Close(); }
  // Gives all memory back.
  void Clear() noexcept;
  bool is_open() const { return queries_.is_open(); }
  const QueryPlan& queries() const { return queries_; }

  // ---- A layer of an open one.
  // BadState unless all layers before it have been appended to and this is the next one.
  Status RequireNext(const AttentionCall& call) const;
  // BadState, if the forward blends, for what such a one does not have.
  Status Refuse(const AttentionCall& call, const char* what) const;
  // BadState unless this layer was the last to be appended to.
  Status RequireLatest(const AttentionCall& call) const;
  // Tensors have the rows that go on from now on.
  void StartLayer() noexcept;
  // Starts the layer, and stores its moved rows and these, which go on.
  Status Store(const AttentionCall& call, const HeadRows& k, const HeadRows& v,
               const Backend& backend);
  Status Choose(const AttentionCall& call);
  // Rows of a call's tensors: those that came to the layer, or go on to it.
  int64_t RowsOfCall(int64_t layer) const {
    return layer == latest_layer_ ? queries_.input_count() : std::ssize(queries_.rows());
  }

  // Bytes of a forward of prefill_chunk_size rows of `sequences_max` sequences all of which blend.
  static int64_t Bytes(const AttentionKVCacheOptions& options, int64_t group_count,
                       int64_t sequences_max);

  int64_t bytes() const {  // that are taken
    return queries_.bytes() + static_cast<int64_t>(fresh_floats_ * sizeof(float));
  }

 private:
  // A member that blends.
  struct Member {
    size_t index = 0;  // in the plan
    LayerHook* hook = nullptr;
    MovedSource* source = nullptr;
    size_t first_check = 0;  // in check_layers_
    size_t check_count = 0;
  };

  static int64_t FreshFloats(const AttentionLayerSpec& spec);
  Status StoreMovedOf(const AttentionCall& call, const Member& member);
  Status CheckMoved(const AttentionCall& call, const ForwardMember& member,
                    std::span<const MovedRows> moved) const;
  FreshRows ReadFresh(const AttentionCall& call, const ForwardMember& member) noexcept;
  Status CheckSelection(const AttentionCall& call, const ForwardMember& member,
                        std::span<const int32_t> rows) const;

  const PagedSequences& kv_;
  KVImporter& importer_;
  const KVSender& sender_;
  RopeAngles& ropes_;
  const ForwardPlan& plan_;
  QueryPlan queries_;
  std::vector<Member> members_;
  std::vector<int64_t> check_layers_;
  std::unique_ptr<float[]> fresh_;  // keys, then values of a member's rows in one layer
  size_t fresh_floats_ = 0;
  int64_t latest_layer_ = -1;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_BLENDING_FORWARD_H_
