// A caller's mask among the new tokens of a forward, as the kernels take it: bits by position.
#ifndef QUIRE_KV_PLAN_ATTENTION_MASK_H_
#define QUIRE_KV_PLAN_ATTENTION_MASK_H_

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kv/plan/attention_tensors.h"
#include "kv/plan/forward_plan.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// Where the kernels of a call count positions from: those of the cache from the first token,
// SelfAttention from each member's base (RaggedKV).
enum class MaskFrom : uint8_t { kFirstToken, kBase };

class AttentionMask {
 public:
  // The masks of the plan's rows for `mask`, as AttentionKVCache has it; null for null. They stand
  // until the next call. BadArgument if it does not fit. May throw std::bad_alloc.
  Result<const RowMask*> RowsOf(const AttentionCall& call, const TensorView* mask,
                                const ForwardPlan& plan, MaskFrom from = MaskFrom::kFirstToken);

 private:
  void AddMember(const ForwardMember& member, const uint8_t* mask, int64_t base);

  std::vector<uint16_t> tiles_;
  std::vector<RowMask> rows_;
};

}  // namespace quire

#endif  // QUIRE_KV_PLAN_ATTENTION_MASK_H_
