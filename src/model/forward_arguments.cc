#include "model/forward_arguments.h"

#include <string>

namespace quire {
namespace {

Status Bad(const std::string& why) {
  return Status(StatusCode::kBadArgument, "Model::Forward: " + why);
}

}  // namespace

Status CheckModelState(const ModelInfo& info, const ModelState& state) {
  if (!info.layers.empty() && state.attention == nullptr) {
    return Bad(info.architecture + " has attention layers; give an attention cache");
  }
  if (!info.recurrent_layers.empty() && state.recurrent == nullptr) {
    return Bad(info.architecture + " has recurrent layers; give a recurrent cache");
  }
  return Status();
}

Status CheckTokenCount(const AttentionKVCache& cache, std::span<const int32_t> token_ids) {
  QUIRE_ASSIGN_OR_RETURN(const std::span<const int32_t> positions, cache.GetQueryPositions());
  if (token_ids.size() == positions.size()) return Status();
  return Bad(std::to_string(token_ids.size()) + " token ids for a forward of " +
             std::to_string(positions.size()) + " tokens");
}

Status CheckForwardArguments(int64_t vocab_size, std::span<const int32_t> token_ids,
                             std::span<const int64_t> logit_rows, const float* logits) {
  for (size_t i = 0; i < token_ids.size(); ++i) {
    if (token_ids[i] < 0 || token_ids[i] >= vocab_size) {
      return Bad("token_ids[" + std::to_string(i) + "] is " + std::to_string(token_ids[i]) +
                 "; the vocabulary has " + std::to_string(vocab_size) + " tokens");
    }
  }
  int64_t previous = -1;
  for (const int64_t row : logit_rows) {
    if (row <= previous || row >= static_cast<int64_t>(token_ids.size())) {
      return Bad("logit_rows has " + std::to_string(row) + " after " + std::to_string(previous) +
                 "; it must ascend within [0, " + std::to_string(token_ids.size()) + ")");
    }
    previous = row;
  }
  if (!logit_rows.empty() && logits == nullptr) return Bad("logits is null");
  return Status();
}

}  // namespace quire
