// SelfAttention, CrossAttention and MergeAttnOutputInplace of the oracle.
#include <cmath>
#include <limits>

#include "kv/testing/kv_model.h"

namespace quire {
namespace {

Status Bad(const std::string& message) {
  return Status(StatusCode::kBadArgument, "KVModel: " + message);
}

}  // namespace

Status KVModel::SelfAttention(int64_t layer, const TensorView& q, const TensorView& k,
                              const TensorView& v, const TensorView& o, const TensorView& lse,
                              double sm_scale, const TensorView* mask) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  if (is_blending_) return FailAttention(Bad("a forward that blends has no pieces"));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckMask(mask)));
  const size_t l = static_cast<size_t>(layer);
  if (q.rank() != 3 || k.rank() != 3 || v.rank() != 3 || q.dim(1) % k.dim(1) != 0) {
    return FailAttention(Bad("q, k and v do not fit together"));
  }
  const RopeMode mode = ModeOf(l);
  const bool rotates = mode == RopeMode::kInline;
  AttentionLayerSpec spec = options_.layers[l];
  if (rotates && q.dim(2) != spec.qk_head_dim) return FailAttention(Bad("dimension of inline q"));
  const int64_t layer_dim = spec.qk_head_dim;
  spec.num_qo_heads = q.dim(1);
  spec.num_kv_heads = k.dim(1);
  spec.qk_head_dim = q.dim(2);
  spec.v_head_dim = v.dim(2);
  spec.dtype = k.dtype() == v.dtype() ? k.dtype() : DType::kF32;
  spec.v_dtype.reset();
  Status status = CheckRows("q", q, layer, spec.num_qo_heads, spec.qk_head_dim);
  if (status.ok()) status = CheckRows("k", k, layer, spec.num_kv_heads, spec.qk_head_dim);
  if (status.ok()) status = CheckRows("v", v, layer, spec.num_kv_heads, spec.v_head_dim);
  if (status.ok()) status = CheckRows("o", o, layer, spec.num_qo_heads, spec.v_head_dim);
  QUIRE_RETURN_IF_ERROR(FailAttention(status));
  if (!LseFits(lse, spec.num_qo_heads)) return FailAttention(Bad("lse is of another shape"));
  const bool turns_sinks =
      spec.latent || (mode == RopeMode::kNormal && spec.qk_head_dim == layer_dim);
  for (size_t m = 0; m < batch_.size() && spec.qk_head_dim != layer_dim; ++m) {
    const Sequence& sequence = sequences_.at(batch_[m]);
    int64_t last = 0;
    for (int64_t n = 0; n < batch_lengths_[m]; ++n)
      last = std::max(last, BaseOf(m) + std::ssize(NewTokensUpTo(m, n)) - 1);
    const bool slides = sequence.sinks > BaseOf(m) && sequence.SlidAt(last) > 0;
    if (slides && mode == RopeMode::kNormal)
      return FailAttention(Bad("sinks are scored by turned queries of the layer's dimension"));
  }

  const Rows q_rows{&q, 0, spec.qk_head_dim};
  const Rows k_rows{&k, 0, spec.qk_head_dim};
  const Rows v_rows{&v, 0, spec.v_head_dim};
  const Rows o_rows{&o, 0, spec.v_head_dim};
  const auto turned = [&](size_t member, int64_t row, std::vector<double> x) {
    if (!rotates) return x;
    return RotateReference(x, FrequenciesOf(sequences_.at(batch_[member]), l),
                           options_.rope.pairing, positions_[static_cast<size_t>(row)]);
  };
  const auto head_of = [](const Rows& rows, int64_t row, int64_t head) {
    std::vector<double> x(static_cast<size_t>(rows.dim));
    for (int64_t d = 0; d < rows.dim; ++d) x[static_cast<size_t>(d)] = rows.Get(row, head, d);
    return x;
  };
  last_bounds_ = Bounds();
  int64_t first = 0;
  for (size_t m = 0; m < batch_.size(); first += batch_lengths_[m], ++m) {
    const Sequence& sequence = sequences_.at(batch_[m]);
    const int64_t base = BaseOf(m);
    TokenRows new_keys;
    TokenRows new_values;
    for (int64_t row = first; row < first + batch_lengths_[m]; ++row) {
      const int64_t position = positions_[static_cast<size_t>(row)];
      new_keys.emplace_back();
      new_values.emplace_back();
      for (int64_t h = 0; h < spec.num_kv_heads; ++h) {
        for (const double x : turned(m, row, head_of(k_rows, row, h))) new_keys.back().push_back(x);
        for (const double x : head_of(v_rows, row, h)) new_values.back().push_back(x);
      }
      // By position from base on; nodes of earlier forwards have none.
      const std::vector<int64_t> tokens = NewTokensUpTo(m, row - first);
      TokenRows keys(tokens.size());
      TokenRows values(tokens.size());
      for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0) continue;
        keys[i] = new_keys[static_cast<size_t>(tokens[i])];
        values[i] = new_values[static_cast<size_t>(tokens[i])];
      }
      for (int64_t h = 0; h < spec.num_qo_heads; ++h) {
        const std::vector<double> query = head_of(q_rows, row, h);
        HeadArguments head{
            .spec = &spec,
            .kv_head = static_cast<size_t>(h / (spec.num_qo_heads / spec.num_kv_heads)),
            .visible = {},
            .sink_end = sequence.sinks - base,
            .query = query,
            .sink_query = query,
            .sm_scale = sm_scale,
            .head_sink = nullptr,  // CrossAttention counts it
            .keys = &keys,
            .values = &values,
            .output_dtype = o.dtype()};
        for (int64_t p = base; p <= position; ++p) {
          const int64_t token = tokens[static_cast<size_t>(p - base)];
          if (token >= 0 && sequence.Sees(position, p, spec.window) &&
              MaskShows(mask, m, row - first, token))
            head.visible.push_back(static_cast<size_t>(p - base));
        }
        if (rotates || turns_sinks)
          TurnQuery(sequence, l, position, rotates ? Rotated::kNo : Rotated::kYes, &head);
        std::vector<double> output(static_cast<size_t>(spec.v_head_dim));
        double log_sum = 0;
        AttendHead(head, &log_sum, output);
        for (size_t d = 0; d < output.size(); ++d) {
          o_rows.Set(row, h, static_cast<int64_t>(d), output[d]);
        }
        lse.data_as<float>()[row * lse.stride(0) + h] = static_cast<float>(log_sum);
      }
    }
  }
  attended_[l] = 1;
  return Status();
}

Status KVModel::CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                               const TensorView& lse, double sm_scale) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  if (is_blending_) return FailAttention(Bad("a forward that blends has no pieces"));
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  Status status = CheckRows("q", q, layer, spec.num_qo_heads, spec.qk_head_dim);
  if (status.ok()) status = CheckRows("o", o, layer, spec.num_qo_heads, spec.v_head_dim);
  QUIRE_RETURN_IF_ERROR(FailAttention(status));
  if (!LseFits(lse, spec.num_qo_heads)) return FailAttention(Bad("lse is of another shape"));
  QUIRE_RETURN_IF_ERROR(FailAttention(LoadLayer(layer)));
  AttendRows(layer, Sees::kCached, Rows{&q, 0, spec.qk_head_dim},
             ModeOf(static_cast<size_t>(layer)) == RopeMode::kInline ? Rotated::kNo : Rotated::kYes,
             Rows{&o, 0, spec.v_head_dim}, &lse, sm_scale);
  attended_[static_cast<size_t>(layer)] = 1;
  return Status();
}

Status KVModel::MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1,
                                       const TensorView& o2, const TensorView& lse2) {
  for (const TensorView* o : {&o1, &o2}) {
    const TensorView& lse = o == &o1 ? lse1 : lse2;
    if (o->rank() != 3 || lse.rank() != 2 || o->dim(0) != o1.dim(0) || o->dim(1) != o1.dim(1) ||
        o->dim(2) != o1.dim(2) || lse.dim(0) != o1.dim(0) || lse.dim(1) != o1.dim(1)) {
      return Bad("the two sides of a merge differ in shape");
    }
  }
  const Rows first{&o1, 0, o1.dim(2)};
  const Rows second{&o2, 0, o2.dim(2)};
  for (int64_t row = 0; row < o1.dim(0); ++row) {
    for (int64_t h = 0; h < o1.dim(1); ++h) {
      float& own = lse1.data_as<float>()[row * lse1.stride(0) + h];
      const double a = static_cast<double>(own);
      const double b = static_cast<double>(lse2.data_as<float>()[row * lse2.stride(0) + h]);
      constexpr double kEmpty = -std::numeric_limits<double>::infinity();
      const double largest = a == kEmpty ? b : b == kEmpty ? a : std::max(a, b);
      const bool empty = largest == kEmpty;
      // A side without keys gives nothing; else what is not finite makes all of it NaN.
      const double all = a == kEmpty || b == kEmpty ? 0 : (a + b) * 0;
      const double wa = a == kEmpty ? 0 : b == kEmpty ? 1 : std::exp2(a - largest) + all;
      const double wb = b == kEmpty ? 0 : a == kEmpty ? 1 : std::exp2(b - largest) + all;
      for (int64_t d = 0; d < o1.dim(2); ++d) {
        double sum = 0;  // an output of weight 0 may be NaN
        if (wa != 0) sum += wa * first.Get(row, h, d);
        if (wb != 0) sum += wb * second.Get(row, h, d);
        first.Set(row, h, d, empty ? 0 : sum / (wa + wb));
      }
      own = static_cast<float>(empty ? largest : largest + std::log2(wa + wb));
    }
  }
  return Status();
}

}  // namespace quire
