#include "kv/plan/attention_tensors.h"

#include <cmath>
#include <string>

#include "base/check.h"

namespace quire {
namespace {

Status BadTensor(const AttentionCall& call, const char* name, const TensorView& tensor,
                 const std::string& wanted) {
  return Status(StatusCode::kBadArgument, std::string(call.name) + ": layer " +
                                              std::to_string(call.layer) + ": " + name + " is " +
                                              tensor.ToString() + "; it must be " + wanted);
}

std::string Shape(const AttentionCall& call, std::initializer_list<int64_t> dims) {
  std::string text = "[m >= " + std::to_string(call.row_count);
  for (const int64_t dim : dims) text += ", " + std::to_string(dim);
  return text + "]";
}

// What holds for every tensor: type, memory.
Status CheckElements(const AttentionCall& call, const char* name, const TensorView& tensor) {
  // What is stored as codes is computed with as bfloat16.
  const DType keys = ComputeDType(call.spec.dtype);
  const DType values = ComputeDType(call.spec.value_dtype());
  if (tensor.dtype() != DType::kF32 && tensor.dtype() != keys && tensor.dtype() != values) {
    std::string wanted = "float32 or " + std::string(DTypeName(keys));
    if (values != keys) wanted += " or " + std::string(DTypeName(values));
    return BadTensor(call, name, tensor, wanted);
  }
  QUIRE_DCHECK(tensor.rank() >= 1) << "its shape has been checked";
  const int last = tensor.rank() - 1;
  if (tensor.stride(last) != 1 && tensor.dim(last) > 1) {
    return BadTensor(
        call, name, tensor,
        "contiguous in its last dimension, whose stride is " + std::to_string(tensor.stride(last)));
  }
  if (tensor.data() == nullptr)
    return BadTensor(call, name, tensor, "in memory: its pointer is null");
  return Status();
}

bool HasShape(const AttentionCall& call, const TensorView& tensor,
              std::initializer_list<int64_t> dims) {
  if (tensor.rank() != static_cast<int>(dims.size()) + 1 || tensor.dim(0) < call.row_count)
    return false;
  int axis = 1;
  for (const int64_t dim : dims) {
    if (tensor.dim(axis++) != dim) return false;
  }
  return true;
}

HeadRows Heads(const TensorView& tensor, int64_t offset, int64_t head_stride) {
  return {.data = tensor.data_as<std::byte>() + offset * DTypeBytes(tensor.dtype()),
          .dtype = tensor.dtype(),
          .row_stride = tensor.stride(0),
          .head_stride = head_stride};
}

}  // namespace

Result<HeadRows> ViewHeads(const AttentionCall& call, const char* name, const TensorView& tensor,
                           int64_t heads, int64_t dim) {
  if (!HasShape(call, tensor, {heads, dim}))
    return BadTensor(call, name, tensor, Shape(call, {heads, dim}));
  QUIRE_RETURN_IF_ERROR(CheckElements(call, name, tensor));
  return Heads(tensor, 0, tensor.stride(1));
}

Result<HeadRows> ViewLatent(const AttentionCall& call, const TensorView& kv) {
  if (!HasShape(call, kv, {call.spec.qk_head_dim}))
    return BadTensor(call, "kv", kv, Shape(call, {call.spec.qk_head_dim}));
  QUIRE_RETURN_IF_ERROR(CheckElements(call, "kv", kv));
  return Heads(kv, 0, call.spec.qk_head_dim);
}

Status RequireLatent(const AttentionCall& call, bool latent, const char* instead) {
  if (call.spec.latent == latent) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    (latent ? " has keys and values; call " : " is latent (MLA); call ") + instead);
}

Result<QKVRows> ViewFusedQKV(const AttentionCall& call, const TensorView& qkv) {
  const AttentionLayerSpec& spec = call.spec;
  const int64_t width = (spec.num_qo_heads + spec.num_kv_heads) * spec.qk_head_dim +
                        spec.num_kv_heads * spec.v_head_dim;
  const int64_t heads = spec.num_qo_heads + 2 * spec.num_kv_heads;
  const bool one_dim = spec.qk_head_dim == spec.v_head_dim;
  const bool by_head = one_dim && HasShape(call, qkv, {heads, spec.qk_head_dim});
  if (!by_head && !HasShape(call, qkv, {width})) {
    const std::string by_head_shape =
        one_dim ? Shape(call, {heads, spec.qk_head_dim}) + " or " : "";
    return BadTensor(call, "qkv", qkv, by_head_shape + Shape(call, {width}));
  }
  QUIRE_RETURN_IF_ERROR(CheckElements(call, "qkv", qkv));
  const int64_t stride = by_head ? qkv.stride(1) : spec.qk_head_dim;
  const int64_t v_offset = (spec.num_qo_heads + spec.num_kv_heads) * stride;
  return QKVRows{.q = Heads(qkv, 0, stride),
                 .k = Heads(qkv, spec.num_qo_heads * stride, stride),
                 .v = Heads(qkv, v_offset, by_head ? stride : spec.v_head_dim)};
}

Result<MutableHeadRows> ViewOutput(const AttentionCall& call, const TensorView& o) {
  const AttentionLayerSpec& spec = call.spec;
  const int64_t width = spec.num_qo_heads * spec.v_head_dim;
  const bool by_head = HasShape(call, o, {spec.num_qo_heads, spec.v_head_dim});
  if (!by_head && !HasShape(call, o, {width})) {
    return BadTensor(
        call, "o", o,
        Shape(call, {spec.num_qo_heads, spec.v_head_dim}) + " or " + Shape(call, {width}));
  }
  QUIRE_RETURN_IF_ERROR(CheckElements(call, "o", o));
  return MutableHeadRows{.data = o.data(),
                         .dtype = o.dtype(),
                         .row_stride = o.stride(0),
                         .head_stride = by_head ? o.stride(1) : spec.v_head_dim};
}

Status CheckLse(const AttentionCall& call, const TensorView& lse) {
  if (!HasShape(call, lse, {call.spec.num_qo_heads}) || lse.dtype() != DType::kF32) {
    return BadTensor(call, "lse", lse, "float32 " + Shape(call, {call.spec.num_qo_heads}));
  }
  return CheckElements(call, "lse", lse);
}

Status CheckApart(const AttentionCall& call, std::initializer_list<NamedTensor> outputs,
                  std::initializer_list<NamedTensor> inputs) {
  return CheckOutputs({.name = call.name, .layer = call.layer}, outputs, inputs, call.row_count);
}

Status CheckScale(const AttentionCall& call, double sm_scale) {
  if (std::isfinite(sm_scale)) return Status();
  return Status(StatusCode::kBadArgument, std::string(call.name) + ": layer " +
                                              std::to_string(call.layer) + ": sm_scale is " +
                                              std::to_string(sm_scale) + "; it must be finite");
}

}  // namespace quire
