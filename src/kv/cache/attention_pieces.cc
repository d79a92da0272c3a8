// The pieces of attention: new tokens among themselves, new tokens against cached ones, and the
// merge of such results.
#include <algorithm>

#include "base/check.h"
#include "kernels/row_view.h"
#include "kv/cache/attention_calls.h"
#include "kv/plan/attention_tensors.h"

namespace quire {
namespace {

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

Status BadPiece(const AttentionCall& call, const std::string& why) {
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) + ": " + why);
}

// The heads and dimensions that the tensors of SelfAttention name.
Result<AttentionLayerSpec> SelfSpec(const AttentionCall& call, const TensorView& q,
                                    const TensorView& k, const TensorView& v) {
  const TensorView* const tensors[] = {&q, &k, &v};
  const char* const names[] = {"q", "k", "v"};
  for (int i = 0; i < 3; ++i) {
    const TensorView& tensor = *tensors[i];
    const bool fits = tensor.rank() == 3 && std::min(tensor.dim(1), tensor.dim(2)) >= 1 &&
                      std::max(tensor.dim(1), tensor.dim(2)) <= kExtentMax;
    if (!fits) {
      return BadPiece(call, std::string(names[i]) + " is " + tensor.ToString() +
                                "; it must be [rows, heads, dim], none of them 0");
    }
  }
  AttentionLayerSpec spec = call.spec;
  spec.num_qo_heads = q.dim(1);
  spec.num_kv_heads = k.dim(1);
  spec.qk_head_dim = q.dim(2);
  spec.v_head_dim = v.dim(2);
  if (spec.num_qo_heads % spec.num_kv_heads == 0) return spec;
  return BadPiece(call, "q has " + std::to_string(spec.num_qo_heads) +
                            " heads; that must be a multiple of the " +
                            std::to_string(spec.num_kv_heads) + " heads of k");
}

// Keys of the call are rotated as the layer's are.
Status CheckRotatedDim(const AttentionCall& call, const AttentionLayerSpec& of_layer) {
  if (call.spec.qk_head_dim == of_layer.qk_head_dim) return Status();
  return BadPiece(call, "q and k have dimension " + std::to_string(call.spec.qk_head_dim) +
                            "; with RopeMode::kInline it must be the layer's, " +
                            std::to_string(of_layer.qk_head_dim));
}

// A window has slid past sinks that are among the new tokens: they are turned as the layer's keys.
Status CheckTurnedDim(const AttentionCall& call, const AttentionLayerSpec& of_layer) {
  const std::string is = "q and k have dimension " + std::to_string(call.spec.qk_head_dim);
  if (of_layer.latent) {
    const int64_t rope_dim = RopeDim(of_layer);
    if (call.spec.qk_head_dim >= rope_dim) return Status();
    return BadPiece(
        call, is + "; it must hold the layer's rope part, the last " + std::to_string(rope_dim));
  }
  if (call.spec.qk_head_dim == of_layer.qk_head_dim) return Status();
  return BadPiece(call, is +
                            "; where a window has slid past sinks that are among the new tokens it "
                            "must be the layer's, " +
                            std::to_string(of_layer.qk_head_dim));
}

struct MergeSide {
  const char* o_name;
  const char* lse_name;
  const TensorView& o;
  const TensorView& lse;
};

Status BadMerge(const char* name, const TensorView& tensor, const std::string& wanted) {
  return Status(StatusCode::kBadArgument, std::string("MergeAttnOutputInplace: ") + name + " is " +
                                              tensor.ToString() + "; it must be " + wanted);
}

// Both sides must have the shape of `first`.
Status CheckMergeSide(const MergeSide& side, const TensorView& first) {
  const auto text = [](std::initializer_list<int64_t> dims) {
    std::string shape;
    for (const int64_t dim : dims) shape += (shape.empty() ? "[" : ", ") + std::to_string(dim);
    return shape + "]";
  };
  if (first.rank() != 3) return BadMerge(side.o_name, side.o, "[n, heads, dim]");
  const bool o_fits = side.o.rank() == 3 && std::ranges::equal(side.o.shape(), first.shape()) &&
                      IsFloat(side.o.dtype()) && (side.o.stride(2) == 1 || side.o.dim(2) <= 1) &&
                      (side.o.data() != nullptr || first.element_count() == 0);
  if (!o_fits) {
    return BadMerge(side.o_name, side.o,
                    "float32, float16 or bfloat16 " +
                        text({first.dim(0), first.dim(1), first.dim(2)}) +
                        ", contiguous in its last dimension");
  }
  const bool lse_fits = side.lse.rank() == 2 && side.lse.dtype() == DType::kF32 &&
                        side.lse.dim(0) == first.dim(0) && side.lse.dim(1) == first.dim(1) &&
                        (side.lse.stride(1) == 1 || side.lse.dim(1) <= 1) &&
                        (side.lse.data() != nullptr || side.lse.element_count() == 0);
  if (lse_fits) return Status();
  return BadMerge(
      side.lse_name, side.lse,
      "float32 " + text({first.dim(0), first.dim(1)}) + ", contiguous in its last dimension");
}

// Whether some row scores a sink among the new tokens from nearer than it stands.
bool SlidePastNewSinks(std::span<const AttentionSequence> sequences) {
  return std::ranges::any_of(sequences, [](const AttentionSequence& sequence) {
    return sequence.window.sinks > 0 && SlidAt(sequence.window, LastPosition(sequence)) > 0;
  });
}

}  // namespace

void AttentionCalls::RotateInline(int64_t layer) noexcept {
  QUIRE_DCHECK(ragged_.sequences().size() == owners_.plan.members.size());
  for (size_t m = 0; m < owners_.plan.members.size(); ++m) {
    const ForwardMember& member = owners_.plan.members[m];
    ragged_.sequences()[m].inline_angles = &owners_.ropes.TableOf(layer, member.long_factors);
    ragged_.sequences()[m].inline_base = member.base();
  }
}

Status AttentionCalls::SelfAttention(int64_t layer, const TensorView& q, const TensorView& k,
                                     const TensorView& v, const TensorView& o,
                                     const TensorView& lse, double sm_scale,
                                     const TensorView* mask) {
  return Run("SelfAttention", layer, [&](const AttentionCall& layer_call) -> Status {
    QUIRE_RETURN_IF_ERROR(owners_.blending.Refuse(layer_call, "pieces of attention"));
    QUIRE_ASSIGN_OR_RETURN(const AttentionLayerSpec spec, SelfSpec(layer_call, q, k, v));
    const AttentionCall call{layer_call.name, layer, spec, layer_call.row_count};
    QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                           ViewHeads(call, "q", q, spec.num_qo_heads, spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const HeadRows k_rows,
                           ViewHeads(call, "k", k, spec.num_kv_heads, spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const HeadRows v_rows,
                           ViewHeads(call, "v", v, spec.num_kv_heads, spec.v_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckLse(call, lse));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(
        CheckApart(call, {{"o", &o}, {"lse", &lse}}, {{"q", &q}, {"k", &k}, {"v", &v}}));
    const bool rotates = owners_.ropes.is_inline(layer);
    if (rotates) QUIRE_RETURN_IF_ERROR(CheckRotatedDim(call, layer_call.spec));
    // As wide as the wider of both: nothing is rounded.
    const KVLayout layout{.dtype = k.dtype() == v.dtype() ? k.dtype() : DType::kF32,
                          .num_kv_heads = static_cast<int>(spec.num_kv_heads),
                          .qk_head_dim = static_cast<int>(spec.qk_head_dim),
                          .v_head_dim = static_cast<int>(spec.v_head_dim),
                          .page_size = kTilePositions};
    ragged_.Prepare(layout, owners_.plan, kv_.options.poison_freed_pages);
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks,
                           mask_.RowsOf(call, mask, owners_.plan, MaskFrom::kBase));
    const bool turns_sinks =
        !rotates && owners_.ropes.rotates(layer) && SlidePastNewSinks(ragged_.sequences());
    const int64_t rope_dim = RopeDim(layer_call.spec);
    if (turns_sinks) QUIRE_RETURN_IF_ERROR(CheckTurnedDim(call, layer_call.spec));
    const int64_t members = static_cast<int64_t>(owners_.plan.members.size());
    scratch_.Grow(backend_.attention_scratch_bytes(layout, static_cast<int>(spec.num_qo_heads),
                                                   owners_.plan.row_count(), members,
                                                   kv_.options.runner->worker_count()));
    RopeAngles::QueryAngles angles;
    if (rotates || turns_sinks) angles = owners_.ropes.OfRotatedQueries(layer, owners_.plan);
    if (layer_call.spec.latent) {
      angles.rows.first_dim = static_cast<int>(spec.qk_head_dim - rope_dim);
    }
    QUIRE_DCHECK(std::ssize(ragged_.targets()) == owners_.plan.row_count());
    if (rotates) RotateInline(layer);
    backend_.append_kv({.pages = ragged_.pages(),
                        .row_count = owners_.plan.row_count(),
                        .k = k_rows,
                        .v = v_rows,
                        .rotary = {},
                        .targets = ragged_.targets().data(),
                        .opens_tile = ragged_.opens_tile().data()},
                       *kv_.options.runner);
    RunKernel(layer,
              {.pages = ragged_.pages(),
               .num_qo_heads = static_cast<int>(spec.num_qo_heads),
               .q = q_rows,
               .rotary = angles.rows,
               .sink_angles = angles.sinks,
               .o = o_rows,
               .sequences = ragged_.sequences(),
               .masks = masks},
              &lse, sm_scale);
    return Status();
  });
}

Status AttentionCalls::CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                                      const TensorView& lse, double sm_scale) {
  return Run("CrossAttention", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(owners_.blending.Refuse(call, "pieces of attention"));
    QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                           ViewHeads(call, "q", q, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckLse(call, lse));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}, {"lse", &lse}}, {{"q", &q}}));
    QUIRE_RETURN_IF_ERROR(owners_.importer.LoadLayer(call, owners_.plan));
    RunAttend(layer, Sees::kCached, q_rows, owners_.ropes.OfRotatedQueries(layer, owners_.plan),
              o_rows, &lse, sm_scale);
    return Status();
  });
}

Status AttentionCalls::MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1,
                                              const TensorView& o2, const TensorView& lse2) {
  return owners_.gate.Enter("MergeAttnOutputInplace", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckMergeSide({"o1", "lse1", o1, lse1}, o1));
    QUIRE_RETURN_IF_ERROR(CheckMergeSide({"o2", "lse2", o2, lse2}, o1));
    QUIRE_RETURN_IF_ERROR(CheckOutputs({.name = "MergeAttnOutputInplace"},
                                       {{"o1", &o1}, {"lse1", &lse1}},
                                       {{"o2", &o2}, {"lse2", &lse2}}, -1));
    backend_.merge_attention({.row_count = o1.dim(0),
                              .head_count = static_cast<int>(o1.dim(1)),
                              .dim = static_cast<int>(o1.dim(2)),
                              .o = {.data = o1.data(),
                                    .dtype = o1.dtype(),
                                    .row_stride = o1.stride(0),
                                    .head_stride = o1.stride(1)},
                              .lse = lse1.data_as<float>(),
                              .lse_row_stride = lse1.stride(0),
                              .other_o = {.data = o2.data(),
                                          .dtype = o2.dtype(),
                                          .row_stride = o2.stride(0),
                                          .head_stride = o2.stride(1)},
                              .other_lse = lse2.data_as<float>(),
                              .other_lse_row_stride = lse2.stride(0)},
                             *kv_.options.runner);
    return Status();
  });
}

}  // namespace quire
