// Checks of what Model::Forward is given, one text for all models.
#ifndef QUIRE_MODEL_FORWARD_ARGUMENTS_H_
#define QUIRE_MODEL_FORWARD_ARGUMENTS_H_

#include <cstdint>
#include <span>

#include "quire/model.h"
#include "quire/status.h"

namespace quire {

// BadArgument unless `state` has the caches that the model's layers need.
Status CheckModelState(const ModelInfo& info, const ModelState& state);
// BadArgument unless there is a token id for each row of the open forward.
Status CheckTokenCount(const AttentionKVCache& cache, std::span<const int32_t> token_ids);
// BadArgument for ids outside the vocabulary, for rows that do not ascend within the tokens, and
// for logits that have no place.
Status CheckForwardArguments(int64_t vocab_size, std::span<const int32_t> token_ids,
                             std::span<const int64_t> logit_rows, const float* logits);

}  // namespace quire

#endif  // QUIRE_MODEL_FORWARD_ARGUMENTS_H_
