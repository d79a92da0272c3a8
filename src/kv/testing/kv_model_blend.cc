// A forward whose rows grow fewer, of the oracle.
#include <algorithm>

#include "kv/testing/kv_model.h"
#include "kv/testing/kv_model_codes.h"

namespace quire {
namespace {

Status BadBlend(StatusCode code, const std::string& message) { return Status(code, message); }

}  // namespace

Status KVModel::BeginBlendingForward(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const LayerLoad> loads,
                                     std::span<const BlendMember> blends) {
  QUIRE_RETURN_IF_ERROR(CheckBatch(seq_ids, append_lengths));
  if (options_.allow_skipped_layers)
    return BadBlend(StatusCode::kBadState, "layers may be skipped");
  std::vector<Blend> taken;
  for (size_t i = 0; i < seq_ids.size() && taken.size() < blends.size(); ++i) {
    const BlendMember& blend = blends[taken.size()];
    if (blend.seq_id != seq_ids[i]) continue;
    if (blend.hook == nullptr || blend.source == nullptr || blend.check_layers.empty())
      return BadBlend(StatusCode::kBadArgument, "a blend without its parts");
    int64_t before = -1;
    for (const int64_t layer : blend.check_layers) {
      if (layer <= before || layer >= std::ssize(options_.layers))
        return BadBlend(StatusCode::kBadArgument, "check layers");
      before = layer;
    }
    const auto mark = marks_.find(blend.seq_id);
    if (mark != marks_.end() && mark->second.active())
      return BadBlend(StatusCode::kBadState, "is marked to be sent");
    taken.push_back({.member = i,
                     .hook = blend.hook,
                     .source = blend.source,
                     .check_layers = {blend.check_layers.begin(), blend.check_layers.end()}});
  }
  if (taken.size() < blends.size())
    return BadBlend(StatusCode::kBadArgument, "a blend of no member");
  QUIRE_RETURN_IF_ERROR(BeginLoadingForward(seq_ids, append_lengths, loads));
  blends_ = std::move(taken);
  is_blending_ = true;
  return Status();
}

Result<std::span<const int32_t>> KVModel::GetQueryRows() const {
  if (!forward_) return BadBlend(StatusCode::kBadState, "no open forward");
  return std::span<const int32_t>(query_rows_);
}

void KVModel::PackRows() { input_rows_ = query_rows_; }

int64_t KVModel::InputOf(int64_t append_row) const {
  const auto found = std::ranges::find(input_rows_, append_row);
  return found == input_rows_.end() ? -1 : found - input_rows_.begin();
}

bool KVModel::GoesOn(int64_t append_row) const {
  return std::ranges::find(query_rows_, append_row) != query_rows_.end();
}

Status KVModel::StoreMoved(int64_t layer) {
  const auto l = static_cast<size_t>(layer);
  const AttentionLayerSpec& spec = options_.layers[l];
  for (const Blend& blend : blends_) {
    int64_t first = 0;
    for (size_t m = 0; m < blend.member; ++m) first += batch_lengths_[m];
    int64_t left_out = 0;
    for (int64_t n = 0; n < batch_lengths_[blend.member]; ++n) left_out += !GoesOn(first + n);
    if (left_out == 0) continue;
    QUIRE_ASSIGN_OR_RETURN(const auto moved, blend.source->Load(layer));
    for (const MovedRows& part : moved) {
      for (int64_t n = part.rows.begin; n < part.rows.end; ++n) {
        if (GoesOn(first + n)) continue;
        --left_out;
        TokenValues& values = ValuesOfRow(blend.member, n, first + n);
        const int64_t row = n - part.rows.begin;
        if (part.kv.k.dtype() == DType::kF32) {
          for (int64_t h = 0; h < spec.num_kv_heads; ++h) {
            const float* const head =
                part.kv.k.data_as<float>() + (row * spec.num_kv_heads + h) * spec.qk_head_dim;
            AppendStored(std::vector<float>(head, head + spec.qk_head_dim), spec.dtype,
                         &values.k[l]);
          }
        } else {
          LoadRow(part.kv.k, part.kv.k_scale, row, &values.k[l]);
        }
        if (spec.latent) {
          values.v[l].assign(values.k[l].begin(), values.k[l].begin() + spec.v_head_dim);
        } else {
          LoadRow(part.kv.v, part.kv.v_scale, row, &values.v[l]);
        }
      }
    }
    if (left_out != 0) return BadBlend(StatusCode::kBadArgument, "rows without keys and values");
  }
  return Status();
}

Status KVModel::Choose(int64_t layer) {
  const auto l = static_cast<size_t>(layer);
  const AttentionLayerSpec& spec = options_.layers[l];
  std::vector<int32_t> left = query_rows_;
  for (const Blend& blend : blends_) {
    if (!std::ranges::binary_search(blend.check_layers, layer)) continue;
    int64_t first = 0;
    for (size_t m = 0; m < blend.member; ++m) first += batch_lengths_[m];
    const int64_t end = first + batch_lengths_[blend.member];
    std::vector<float> k, v;
    std::vector<int32_t> positions;
    for (const int32_t row : query_rows_) {
      if (row < first || row >= end) continue;
      const TokenValues& values = ValuesOfRow(blend.member, row - first, row);
      k.insert(k.end(), values.k[l].begin(), values.k[l].end());
      v.insert(v.end(), values.v[l].begin(), values.v[l].end());
      positions.push_back(positions_[static_cast<size_t>(row)]);
    }
    const auto count = std::ssize(positions);
    FreshRows fresh{
        .seq_id = batch_[blend.member],
        .k = TensorView(k.data(), DType::kF32, {count, spec.num_kv_heads, spec.qk_head_dim}),
        .positions = positions};
    if (!spec.latent)
      fresh.v = TensorView(v.data(), DType::kF32, {count, spec.num_kv_heads, spec.v_head_dim});
    QUIRE_ASSIGN_OR_RETURN(const RowSelection selection, blend.hook->BeforeAttention(layer, fresh));
    if (!selection.selects) continue;
    if (selection.rows.empty()) return BadBlend(StatusCode::kBadArgument, "no row is left");
    int64_t before = -1;
    for (const int32_t row : selection.rows) {
      if (row <= before || row >= end - first || !GoesOn(first + row))
        return BadBlend(StatusCode::kBadArgument, "a row that has not come");
      before = row;
    }
    std::erase_if(left, [&](int32_t row) {
      return row >= first && row < end &&
             !std::ranges::binary_search(selection.rows, static_cast<int32_t>(row - first));
    });
  }
  query_rows_ = left;
  query_positions_.clear();
  for (const int32_t row : query_rows_)
    query_positions_.push_back(positions_[static_cast<size_t>(row)]);
  return Status();
}

}  // namespace quire
