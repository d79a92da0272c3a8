#include "engine/engine_facts.h"

#include <algorithm>

#include "kernels/quantised_weights.h"

namespace quire {
namespace {

bool LiesInBlocks(const WeightType& type) {
  return std::ranges::any_of(
      kWeightFormats, [&](WeightFormat format) { return WeightFormatName(format) == type.name; });
}

}  // namespace

int64_t LogitsSequencesMax(int64_t max_num_sequences) {
  return std::min<int64_t>(max_num_sequences, 16);
}

int64_t CacheSequencesMax(int64_t max_num_sequences) {
  return max_num_sequences + LogitsSequencesMax(max_num_sequences);
}

int64_t StepSamplesMax(int64_t max_num_sequences, int64_t prefill_chunk) {
  return std::min(max_num_sequences, prefill_chunk);
}

int64_t StepLogitRowsMax(int64_t max_num_sequences, int64_t prefill_chunk, int64_t max_tree_nodes) {
  return std::max(StepSamplesMax(max_num_sequences, prefill_chunk),
                  std::min(max_tree_nodes, prefill_chunk));
}

int64_t RetainedSequencesMax(int64_t pages_total, bool forks_anywhere) {
  return forks_anywhere ? std::max<int64_t>(pages_total, 1) : 1024;
}

int64_t RetainedTokensMax(int64_t pages_total, int64_t page_size) {
  constexpr int64_t kTexts = 16;
  constexpr int64_t kTokensMax = int64_t{1} << 28;
  const int64_t pages = std::min(pages_total, kTokensMax / kTexts / page_size);
  return kTexts * page_size * std::max<int64_t>(pages, 1);
}

Passport EngineFacts::WithNumerics(const Passport& identity) const {
  Passport own = identity;
  own.numerics.clear();
  if (options.dtype != DType::kBF16)
    own.numerics = "model=" + std::string(DTypeName(options.dtype));
  if (options.activations != DType::kI8 &&
      std::ranges::any_of(reported_info.weight_types, LiesInBlocks)) {
    own.numerics += own.numerics.empty() ? "" : "/";
    own.numerics += "activations=" + std::string(DTypeName(options.activations));
  }
  return own;
}

Status EngineFacts::RequirePrefixCache(const char* call) const {
  if (options.prefix_cache) return {};
  return Status(StatusCode::kBadState,
                std::string("Engine::") + call +
                    ": this engine keeps no KV between requests (EngineOptions::prefix_cache)");
}

}  // namespace quire
