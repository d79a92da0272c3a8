// Checks of the tensors of attention calls, and their views for kernels. All checks of a call are
// made before it writes.
#ifndef QUIRE_KV_PLAN_ATTENTION_TENSORS_H_
#define QUIRE_KV_PLAN_ATTENTION_TENSORS_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kv/plan/memory_overlap.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// Which call on which layer, for messages, and what its tensors must fit.
struct AttentionCall {
  const char* name;
  int64_t layer;
  const AttentionLayerSpec& spec;
  int64_t row_count;  // new tokens of the forward; tensors may have more rows
};

struct QKVRows {
  HeadRows q, k, v;
};

// `tensor`: [m, heads, dim]. BadArgument otherwise.
Result<HeadRows> ViewHeads(const AttentionCall& call, const char* name, const TensorView& tensor,
                           int64_t heads, int64_t dim);
// [m, Hq + 2 Hkv, D] with D == Dv, or [m, Hq D + Hkv D + Hkv Dv].
Result<QKVRows> ViewFusedQKV(const AttentionCall& call, const TensorView& qkv);
// `kv`: [m, D].
Result<HeadRows> ViewLatent(const AttentionCall& call, const TensorView& kv);
// BadArgument with the call that does it, unless the layer's kind is as wanted.
Status RequireLatent(const AttentionCall& call, bool latent, const char* instead);
// [m, Hq, Dv] or [m, Hq Dv].
Result<MutableHeadRows> ViewOutput(const AttentionCall& call, const TensorView& o);
// float32 [m, Hq].
Status CheckLse(const AttentionCall& call, const TensorView& lse);
// BadArgument if what the call writes overlaps what it reads, or itself.
Status CheckApart(const AttentionCall& call, std::initializer_list<NamedTensor> outputs,
                  std::initializer_list<NamedTensor> inputs);
Status CheckScale(const AttentionCall& call, double sm_scale);

}  // namespace quire

#endif  // QUIRE_KV_PLAN_ATTENTION_TENSORS_H_
