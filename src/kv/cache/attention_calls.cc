#include "kv/cache/attention_calls.h"

#include <algorithm>
#include <numbers>

#include "base/check.h"
#include "base/float_environment.h"

namespace quire {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

}  // namespace

AttentionCalls::LayerConstants::LayerConstants(const AttentionKVCacheOptions& options) {
  const ScopedFloatEnvironment environment;
  for (const AttentionLayerSpec& spec : options.layers) {
    std::vector<float>& sinks = head_sinks_log2.emplace_back();
    for (const float logit : spec.head_sinks)
      sinks.push_back(static_cast<float>(static_cast<double>(logit) * std::numbers::log2e));
    if (!options.allow_skipped_layers) continue;
    const auto dims = static_cast<size_t>(std::max(spec.qk_head_dim, spec.v_head_dim));
    zero_row.resize(std::max(zero_row.size(), dims), 0.0F);
  }
}

AttentionCalls::AttentionCalls(const Owners& owners, const Backend& backend)
    : owners_(owners),
      kv_(owners.kv),
      backend_(backend),
      constants_(kv_.options),
      scratch_(kv_.options, kv_.groups, backend) {}

void AttentionCalls::Clear() noexcept {
  scratch_.Clear();
  ragged_ = {};
  mask_ = {};
}

int64_t AttentionCalls::RowsOfCall(int64_t layer) const {
  return owners_.blending.is_open() ? owners_.blending.RowsOfCall(layer) : owners_.plan.row_count();
}

// ---------------------------------------------------------------------- the calls

Status AttentionCalls::AttentionWithFusedQKV(int64_t layer, const TensorView& qkv,
                                             const TensorView& o, double sm_scale,
                                             const TensorView* mask) {
  return Run("AttentionWithFusedQKV", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, false, "AttentionWithMLA"));
    QUIRE_ASSIGN_OR_RETURN(const QKVRows rows, ViewFusedQKV(call, qkv));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}}, {{"qkv", &qkv}}));
    if (mask != nullptr) QUIRE_RETURN_IF_ERROR(owners_.blending.Refuse(call, "masks"));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, owners_.plan));
    QUIRE_RETURN_IF_ERROR(owners_.steps.RequireAppended(call, false));
    QUIRE_RETURN_IF_ERROR(AppendRows(call, rows.k, rows.v));
    RunAttend(layer, Sees::kUpToOwn, rows.q, owners_.ropes.OfQueries(layer), o_rows, nullptr,
              sm_scale, masks);
    return Status();
  });
}

Status AttentionCalls::Append(int64_t layer, const TensorView& k, const TensorView& v) {
  return Run("Append", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, false, "AppendMLAKV"));
    const int64_t heads = call.spec.num_kv_heads;
    QUIRE_ASSIGN_OR_RETURN(const HeadRows k_rows,
                           ViewHeads(call, "k", k, heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const HeadRows v_rows,
                           ViewHeads(call, "v", v, heads, call.spec.v_head_dim));
    QUIRE_RETURN_IF_ERROR(owners_.steps.RequireAppended(call, false));
    return AppendRows(call, k_rows, v_rows);
  });
}

Result<AttentionCalls::QueryTensors> AttentionCalls::CheckQueries(
    const AttentionCall& call, const TensorView& q, const TensorView& o, const TensorView* lse,
    double sm_scale, const TensorView* mask) {
  QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                         ViewHeads(call, "q", q, call.spec.num_qo_heads, call.spec.qk_head_dim));
  QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
  if (lse != nullptr) QUIRE_RETURN_IF_ERROR(CheckLse(call, *lse));
  QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
  QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}, {"lse", lse}}, {{"q", &q}}));
  if (mask != nullptr) QUIRE_RETURN_IF_ERROR(owners_.blending.Refuse(call, "masks"));
  QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, owners_.plan));
  QUIRE_RETURN_IF_ERROR(owners_.steps.RequireAppended(call, true));
  return QueryTensors{.q = q_rows, .o = o_rows, .masks = masks};
}

Status AttentionCalls::Attend(int64_t layer, const TensorView& q, const TensorView& o,
                              const TensorView* lse, double sm_scale, const TensorView* mask) {
  return Run("Attend", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const QueryTensors queries,
                           CheckQueries(call, q, o, lse, sm_scale, mask));
    if (owners_.blending.is_open()) QUIRE_RETURN_IF_ERROR(owners_.blending.RequireLatest(call));
    const auto angles = call.spec.latent ? owners_.ropes.OfRotatedQueries(layer, owners_.plan)
                                         : owners_.ropes.OfQueries(layer);
    RunAttend(layer, Sees::kUpToOwn, queries.q, angles, queries.o, lse, sm_scale, queries.masks);
    return Status();
  });
}

Status AttentionCalls::AppendLatent(const AttentionCall& call, const TensorView& kv) {
  QUIRE_ASSIGN_OR_RETURN(const HeadRows rows, ViewLatent(call, kv));
  QUIRE_RETURN_IF_ERROR(owners_.steps.RequireAppended(call, false));
  return AppendRows(call, rows, {});
}

Status AttentionCalls::AppendMLAKV(int64_t layer, const TensorView& kv) {
  return Run("AppendMLAKV", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, true, "Append"));
    return AppendLatent(call, kv);
  });
}

Status AttentionCalls::AttentionWithMLA(int64_t layer, const TensorView& q_absorbed,
                                        const TensorView& kv, const TensorView& o, double sm_scale,
                                        const TensorView* mask) {
  return Run("AttentionWithMLA", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, true, "AttentionWithFusedQKV"));
    QUIRE_ASSIGN_OR_RETURN(
        const HeadRows q_rows,
        ViewHeads(call, "q_absorbed", q_absorbed, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(
        CheckApart(call, {{"o", &o}}, {{"q_absorbed", &q_absorbed}, {"kv", &kv}}));
    if (mask != nullptr) QUIRE_RETURN_IF_ERROR(owners_.blending.Refuse(call, "masks"));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, owners_.plan));
    QUIRE_RETURN_IF_ERROR(AppendLatent(call, kv));
    RunAttend(layer, Sees::kUpToOwn, q_rows, owners_.ropes.OfRotatedQueries(layer, owners_.plan),
              o_rows, nullptr, sm_scale, masks);
    return Status();
  });
}

Status AttentionCalls::AttentionWithSharedKV(int64_t source_layer, const TensorView& q,
                                             const TensorView& o, const TensorView* lse,
                                             double sm_scale, const TensorView* mask) {
  const char* name = "AttentionWithSharedKV";
  return Run(name, source_layer, [&](const AttentionCall& of_layer) -> Status {
    // Its rows are those that go on: it is a layer behind the last one that was appended to.
    AttentionCall call = of_layer;
    if (owners_.blending.is_open()) {
      owners_.blending.StartLayer();
      call.row_count = owners_.blending.RowsOfCall(source_layer);
    }
    QUIRE_ASSIGN_OR_RETURN(const QueryTensors queries,
                           CheckQueries(call, q, o, lse, sm_scale, mask));
    const bool attended = owners_.steps.attended(source_layer);
    RunAttend(source_layer, Sees::kUpToOwn, queries.q,
              owners_.ropes.OfRotatedQueries(source_layer, owners_.plan), queries.o, lse, sm_scale,
              queries.masks);
    owners_.steps.SetAttended(source_layer, attended);  // this was another layer's
    return Status();
  });
}

// ---------------------------------------------------------------------- rows

Status AttentionCalls::AppendRows(const AttentionCall& call, const HeadRows& k, const HeadRows& v) {
  if (owners_.blending.is_open()) QUIRE_RETURN_IF_ERROR(owners_.blending.RequireNext(call));
  QUIRE_RETURN_IF_ERROR(owners_.importer.LoadLayer(call, owners_.plan));
  if (!owners_.blending.is_open()) {
    StoreRows(call.layer, k, v, owners_.ropes.OfNewKeys(call.layer));
    return Status();
  }
  QUIRE_RETURN_IF_ERROR(owners_.blending.Store(call, k, v, backend_));
  owners_.steps.SetAppended(call.layer);
  owners_.sender.SendLayer(call.layer, owners_.plan);
  return owners_.blending.Choose(call);
}

void AttentionCalls::StoreRows(int64_t index, const HeadRows& k, const HeadRows& v,
                               const RotaryRows& rotary) noexcept {
  QUIRE_DCHECK(kv_.control.in_forward()) << "layer " << index;
  const GroupPlan& plan = owners_.plan.group(kv_.group_of(index));
  const AppendArgs args{.pages = kv_.storage->layer(index),
                        .row_count = owners_.plan.row_count(),
                        .k = k,
                        .v = v,
                        .rotary = rotary,
                        .targets = plan.rows.targets.data(),
                        .opens_tile = plan.rows.opens_tile.data()};
  backend_.append_kv(args, *kv_.options.runner);
  owners_.steps.SetAppended(index);
  owners_.sender.SendLayer(index, owners_.plan);
}

// Without rotation: 0 * cos(a) may be -0.
void AttentionCalls::StoreZeros(int64_t layer) noexcept {
  QUIRE_DCHECK(!constants_.zero_row.empty()) << "layers of this cache may not be skipped";
  QUIRE_DCHECK(!owners_.blending.is_open()) << "a forward that blends runs every layer";
  // For all rows and heads.
  const HeadRows zeros{.data = constants_.zero_row.data(), .dtype = DType::kF32};
  StoreRows(layer, zeros, zeros, {});
}

// ---------------------------------------------------------------------- kernels

void AttentionCalls::RunAttend(int64_t index, Sees sees, const HeadRows& q,
                               const RopeAngles::QueryAngles& angles, const MutableHeadRows& o,
                               const TensorView* lse, double sm_scale,
                               const RowMask* masks) noexcept {
  const std::vector<float>& head_sinks = constants_.head_sinks_log2[static_cast<size_t>(index)];
  const AttentionLayerSpec& spec = kv_.options.layers[static_cast<size_t>(index)];
  const int group = kv_.group_of(index);
  const bool blends = owners_.blending.is_open();
  RunKernel(index,
            {.pages = kv_.storage->layer(index),
             .num_qo_heads = static_cast<int>(spec.num_qo_heads),
             .q = q,
             .rotary = angles.rows,
             .sink_angles = angles.sinks,
             .head_sinks_log2 = head_sinks.empty() ? nullptr : head_sinks.data(),
             .o = o,
             .sequences = blends ? owners_.blending.queries().sequences(group)
                                 : owners_.plan.group(group).sequences,
             .shared = blends ? owners_.blending.queries().shared() : owners_.plan.shared(),
             .cached_only = sees == Sees::kCached,
             .masks = masks},
            lse, sm_scale);
}

void AttentionCalls::RunKernel(int64_t index, AttentionArgs args, const TensorView* lse,
                               double sm_scale) noexcept {
  const ScopedFloatEnvironment environment;  // scale_log2 is rounded here
  args.scale_log2 = static_cast<float>(sm_scale * kLog2E);
  args.layer_window = kv_.groups[static_cast<size_t>(kv_.group_of(index))].window;
  args.soft_cap = static_cast<float>(kv_.options.layers[static_cast<size_t>(index)].soft_cap);
  args.lse = lse == nullptr ? nullptr : lse->data_as<float>();
  args.lse_row_stride = lse == nullptr ? 0 : lse->stride(0);
  args.row_count = owners_.blending.is_open() ? std::ssize(owners_.blending.queries().rows())
                                              : owners_.plan.row_count();
  QUIRE_DCHECK(args.row_count > 0) << "layer " << index << " attends to nothing";
  args.scratch = scratch_.Take();
  backend_.attention(args, *kv_.options.runner);
  owners_.steps.SetAttended(index);
}

}  // namespace quire
