#include "kv/cache/layer_kv.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace quire {
namespace {

Status BadTensor(const char* call, int64_t layer, const char* name, const TensorView& tensor,
                 const std::string& wanted) {
  return Status(StatusCode::kBadArgument, std::string(call) + ": layer " + std::to_string(layer) +
                                              ": " + name + " is " + tensor.ToString() +
                                              "; it must be " + wanted);
}

Status CheckRows(const char* call, int64_t layer, const char* name, const TensorView& tensor,
                 DType dtype, std::initializer_list<int64_t> shape) {
  const bool fits = std::ranges::equal(tensor.shape(), shape) && tensor.dtype() == dtype &&
                    tensor.is_contiguous();
  if (!fits) {
    std::string wanted;
    for (const int64_t dim : shape) wanted += (wanted.empty() ? "[" : ", ") + std::to_string(dim);
    return BadTensor(call, layer, name, tensor,
                     "contiguous " + std::string(DTypeName(dtype)) + " " + wanted + "]");
  }
  if (tensor.data() != nullptr) return Status();
  return BadTensor(call, layer, name, tensor, "in memory: its pointer is null");
}

}  // namespace

Status CheckLayerKV(const char* call, int64_t layer, const AttentionLayerSpec& spec,
                    const LayerKV& kv, int64_t count) {
  const int64_t heads = spec.num_kv_heads;
  QUIRE_RETURN_IF_ERROR(
      CheckRows(call, layer, "k", kv.k, spec.dtype, {count, heads, spec.qk_head_dim}));
  if (!spec.latent) {
    QUIRE_RETURN_IF_ERROR(
        CheckRows(call, layer, "v", kv.v, spec.value_dtype(), {count, heads, spec.v_head_dim}));
  }
  if (IsQuantised(spec.dtype)) {
    QUIRE_RETURN_IF_ERROR(
        CheckRows(call, layer, "k_scale", kv.k_scale, DType::kF32, {count, heads}));
  }
  if (spec.latent || !IsQuantised(spec.value_dtype())) return Status();
  return CheckRows(call, layer, "v_scale", kv.v_scale, DType::kF32, {count, heads});
}

Status CheckMovedKV(const char* call, int64_t layer, const AttentionLayerSpec& spec,
                    const LayerKV& kv, int64_t count) {
  if (kv.k.dtype() != DType::kF32) return CheckLayerKV(call, layer, spec, kv, count);
  AttentionLayerSpec given = spec;
  given.dtype = DType::kF32;
  given.v_dtype = spec.value_dtype();
  return CheckLayerKV(call, layer, given, kv, count);
}

int64_t TokenCount(const LayerKV& kv) { return kv.k.rank() == 3 ? kv.k.dim(0) : 0; }

}  // namespace quire
