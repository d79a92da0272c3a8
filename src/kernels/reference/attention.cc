#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/row_view.h"
#include "tensor/half.h"

namespace quire {
namespace {

double Element(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<double>(static_cast<const float*>(data)[index]);
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return static_cast<double>(dtype == DType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits));
}

void Rotate(std::vector<double>* row, const RotaryAngles& angles, const RotaryRows& rotary) {
  const int half = rotary.rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const size_t first = static_cast<size_t>(rotary.first_dim + (rotary.interleaved ? 2 * i : i));
    const size_t second =
        static_cast<size_t>(rotary.first_dim + (rotary.interleaved ? 2 * i + 1 : i + half));
    const double c = static_cast<double>(angles.cos[i]);
    const double s = static_cast<double>(angles.sin[i]);
    const double x = (*row)[first];
    const double y = (*row)[second];
    (*row)[first] = x * c - y * s;
    (*row)[second] = y * c + x * s;
  }
}

// Keys and values of one kv head of one sequence by position, wherever they lie.
struct Context {
  std::vector<std::vector<double>> keys;
  std::vector<std::vector<double>> values;
};

// One Context per kv head.
std::vector<Context> ReadContexts(const AttentionArgs& args, const AttentionSequence& sequence) {
  const KVLayout& layout = args.pages.layout;
  const auto heads = static_cast<size_t>(layout.num_kv_heads);
  std::vector<float> k(heads * static_cast<size_t>(layout.qk_head_dim));
  std::vector<float> v(heads * static_cast<size_t>(layout.v_head_dim));
  std::vector<Context> contexts(heads);
  for (int64_t r = 0; r < sequence.run_count; ++r) {
    const PageRun& run = sequence.runs[r];
    int64_t entry = 0;
    for (int64_t position = run.begin; position < run.end; ++position) {
      while (entry + 1 < run.entry_count && run.entries[entry + 1].start <= position) ++entry;
      const AppendTarget slot = {run.entries[entry].page,
                                 static_cast<int32_t>(position % layout.page_size)};
      if (slot.page < 0) {  // no row may see it
        std::fill(k.begin(), k.end(), std::numeric_limits<float>::quiet_NaN());
        std::fill(v.begin(), v.end(), std::numeric_limits<float>::quiet_NaN());
      } else {
        ReadSlot(args.pages, slot, DType::kF32, k.data(), v.data());
      }
      for (int head = 0; head < layout.num_kv_heads; ++head) {
        Context& context = contexts[static_cast<size_t>(head)];
        const float* key = k.data() + head * layout.qk_head_dim;
        const float* value = v.data() + head * layout.v_head_dim;
        context.keys.emplace_back(key, key + layout.qk_head_dim);
        context.values.emplace_back(value, value + layout.v_head_dim);
        if (sequence.inline_angles == nullptr) continue;
        Rotate(&context.keys.back(), sequence.inline_angles->At(sequence.inline_base + position),
               args.rotary);
      }
    }
  }
  return contexts;
}

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double Capped(const AttentionArgs& args, double score_log2) {
  if (args.soft_cap == 0.0F) return score_log2;
  const double cap_log2 = static_cast<double>(args.soft_cap) / std::log(2.0);
  return cap_log2 * std::tanh(score_log2 / cap_log2);
}

// One row of one query head.
void AttendRow(const AttentionArgs& args, const Context& context, const RowView& view, int64_t row,
               int64_t head, ReferenceOutput* out) {
  const KVLayout& layout = args.pages.layout;
  const size_t index = static_cast<size_t>(row * args.num_qo_heads + head);
  const int half = args.rotary.rotary_dim / 2;
  std::vector<double> q;
  for (int d = 0; d < layout.qk_head_dim; ++d) {
    q.push_back(Element(args.q.data, args.q.dtype,
                        row * args.q.row_stride + head * args.q.head_stride + d));
  }
  std::vector<double> sink_q = q;
  if (half > 0 && args.rotary.angles != nullptr) Rotate(&q, args.rotary.angles[row], args.rotary);
  if (args.sink_angles == nullptr) {
    sink_q = q;
  } else if (half > 0) {
    Rotate(&sink_q, args.sink_angles[row], args.rotary);
  }
  const double scale = static_cast<double>(args.scale_log2);
  std::vector<int64_t> seen;
  for (int64_t p = 0; p < view.end; ++p) {
    if (Sees(view, p)) seen.push_back(p);
  }
  std::vector<double> scores;
  double m = -std::numeric_limits<double>::infinity();
  for (const int64_t p : seen) {
    const std::vector<double>& key = context.keys[static_cast<size_t>(p)];
    scores.push_back(Capped(args, Dot(p < view.sink_end ? sink_q : q, key) * scale));
    m = std::max(m, scores.back());
    out->score_scale[index] =
        std::max(out->score_scale[index], std::fabs(scale) * std::sqrt(Dot(q, q) * Dot(key, key)));
  }
  double l = 0;
  if (args.head_sinks_log2 != nullptr) {
    const double sink = static_cast<double>(args.head_sinks_log2[head]);
    m = std::max(m, sink);
    l = std::exp2(sink - m);
  }
  double* o = out->o.data() + index * static_cast<size_t>(layout.v_head_dim);
  double peak = 0;
  double* value_scale = out->value_scale.data() + index * static_cast<size_t>(layout.v_head_dim);
  for (size_t i = 0; i < seen.size(); ++i) {
    const double weight = std::exp2(scores[i] - m);
    l += weight;
    for (int d = 0; d < layout.v_head_dim; ++d) {
      const double v = context.values[static_cast<size_t>(seen[i])][static_cast<size_t>(d)];
      o[d] += weight * v;
      value_scale[d] += weight * std::fabs(v);
      peak = std::max(peak, weight * std::fabs(v));
    }
  }
  if (l == 0) return;
  for (int d = 0; d < layout.v_head_dim; ++d) o[d] /= l;
  for (int d = 0; d < layout.v_head_dim; ++d) value_scale[d] /= l;
  out->value_peak[index] = static_cast<double>(seen.size()) * peak / l;
  out->lse[index] = m + std::log2(l);
}

}  // namespace

ReferenceOutput ReferenceAttention(const AttentionArgs& args) {
  const KVLayout& layout = args.pages.layout;
  const size_t rows = static_cast<size_t>(args.row_count * args.num_qo_heads);
  ReferenceOutput out;
  out.o.resize(rows * static_cast<size_t>(layout.v_head_dim));
  out.value_scale.resize(out.o.size());
  out.lse.assign(rows, -std::numeric_limits<double>::infinity());
  out.score_scale.resize(rows);
  out.value_peak.resize(rows);
  const int group = args.num_qo_heads / layout.num_kv_heads;
  for (const AttentionSequence& sequence : args.sequences) {
    const std::vector<Context> contexts = ReadContexts(args, sequence);
    for (int64_t r = 0; r < sequence.row_count; ++r) {
      const RowView view = ViewOf(args, sequence, r);
      for (int head = 0; head < args.num_qo_heads; ++head) {
        AttendRow(args, contexts[static_cast<size_t>(head / group)], view, sequence.first_row + r,
                  head, &out);
      }
    }
  }
  return out;
}

}  // namespace quire
