#include "engine/sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/check.h"
#include "base/float_environment.h"
#include "base/random.h"
#include "engine/sampling/candidates.h"
#include "engine/sampling/token_weights.h"
#include "kernels/backend.h"

namespace quire {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

bool HasPenalties(const SamplingOptions& options) {
  return options.repetition_penalty != 1.0F || options.presence_penalty != 0.0F ||
         options.frequency_penalty != 0.0F;
}

double Repeated(double logit, double penalty) {
  QUIRE_DCHECK(penalty > 0);
  return logit > 0 ? logit / penalty : logit * penalty;
}

// Each token's logit is touched once per kind of penalty, so the order of the history cannot be
// seen in the sums. `counts` is cleared on the way back through the same tokens: a token's first
// visit applies and marks, the second pass unmarks.
void ApplyPenalties(const DrawInput& input, DrawScratch* scratch) {
  const SamplingOptions& options = *input.options;
  for (const int32_t token : input.answer) {
    QUIRE_DCHECK(token >= 0 && token < std::ssize(input.logits));
    QUIRE_DCHECK(scratch->counts[token] >= 0) << "another draw's counts are left";
    ++scratch->counts[token];
  }
  for (const int32_t token : input.prompt) {
    QUIRE_DCHECK(token >= 0 && token < std::ssize(input.logits));
    if (scratch->counts[token] != 0) continue;  // of the answer too, or seen
    scratch->adjusted[token] = Repeated(scratch->adjusted[token], options.repetition_penalty);
    scratch->counts[token] = -1;
  }
  for (const int32_t token : input.prompt) {
    if (scratch->counts[token] == -1) scratch->counts[token] = 0;
  }
  for (const int32_t token : input.answer) {
    const int32_t count = scratch->counts[token];
    if (count == 0) continue;  // seen
    double& logit = scratch->adjusted[token];
    logit = Repeated(logit, options.repetition_penalty);
    logit -= static_cast<double>(options.presence_penalty);
    logit -= static_cast<double>(options.frequency_penalty) * count;
    scratch->counts[token] = 0;
  }
}

// e^((logit - greatest) / temperature), by id.
std::span<const float> Weigh(std::span<const float> logits, float greatest, double temperature,
                             DrawScratch* scratch) {
  QUIRE_DCHECK(logits.size() <= scratch->weights.size() && temperature > 0);
  scratch->backend->exp2_scaled(logits.data(), std::ssize(logits), greatest,
                                LogitScale(std::numbers::log2e, temperature),
                                scratch->weights.data());
  return {scratch->weights.data(), logits.size()};
}
// The weights of adjusted logits: their distance from the greatest is rounded to float32.
std::span<const float> Weigh(std::span<const double> logits, double greatest, double temperature,
                             DrawScratch* scratch) {
  for (size_t i = 0; i < logits.size(); ++i) {
    scratch->weights[i] = static_cast<float>(logits[i] - greatest);
  }
  return Weigh({scratch->weights.data(), logits.size()}, 0.0F, temperature, scratch);
}

template <typename T>
int32_t Sample(const DrawInput& input, std::span<const T> logits, T greatest,
               DrawScratch* scratch) {
  const SamplingOptions& options = *input.options;
  const auto temperature = static_cast<double>(options.temperature);
  const std::span<const float> weights = Weigh(logits, greatest, temperature, scratch);
  const Candidates candidates =
      FindCandidates(options, logits, greatest, weights, &scratch->candidates);
  const double uniform = RandomUniform(options.seed, static_cast<uint64_t>(input.stream),
                                       static_cast<uint64_t>(input.answer.size()));
  return candidates == Candidates::kAll ? DrawFromAll(uniform, weights)
                                        : DrawFromListed(uniform, weights, scratch->candidates);
}

int32_t DrawAdjusted(const DrawInput& input, DrawScratch* scratch) {
  const SamplingOptions& options = *input.options;
  std::copy(input.logits.begin(), input.logits.end(), scratch->adjusted.begin());
  if (HasPenalties(options)) ApplyPenalties(input, scratch);
  for (const auto& [token, bias] : options.logit_bias) scratch->adjusted[token] += bias;
  const std::span<const double> logits(scratch->adjusted.data(), input.logits.size());
  const auto best = std::max_element(logits.begin(), logits.end());
  return options.temperature == 0.0F ? static_cast<int32_t>(best - logits.begin())
                                     : Sample(input, logits, *best, scratch);
}

// REQUIRES: draw->logprobs has its final size.
// Tokens that are masked are none of the best.
void FillLogprobs(std::span<const float> logits, float greatest, bool is_masked,
                  DrawScratch* scratch, Draw* draw) {
  if (draw->logprobs.empty()) return;
  const double log_total =
      static_cast<double>(greatest) + std::log(TotalWeight(Weigh(logits, greatest, 1.0, scratch)));
  const auto entry = [&](int32_t token) {
    return TokenLogprob{token, static_cast<float>(static_cast<double>(logits[token]) - log_total)};
  };
  QUIRE_DCHECK(draw->token >= 0 && draw->token < std::ssize(logits));
  draw->logprobs[0] = entry(draw->token);
  const auto best_count = static_cast<int64_t>(draw->logprobs.size()) - 1;
  if (best_count == 0) return;
  std::vector<int32_t>& best = scratch->candidates;
  FindBest(logits, best_count, &best);
  std::sort(best.begin(), best.end(), Better<float>{logits.data()});
  for (int64_t i = 0; i < best_count; ++i) {
    if (is_masked && logits[best[i]] == kMasked) return draw->logprobs.resize(i + 1);
    draw->logprobs[i + 1] = entry(best[i]);
  }
}

// The logits of allowed tokens, -infinity for the others.
std::span<const float> ApplyMask(const DrawInput& input, DrawScratch* scratch) {
  QUIRE_DCHECK(input.logits.size() <= scratch->allowed.size());
  for (size_t token = 0; token < input.logits.size(); ++token) {
    const bool is_allowed = ((input.mask[token / 32] >> (token % 32)) & 1U) != 0;
    scratch->allowed[token] = is_allowed ? input.logits[token] : kMasked;
  }
  return {scratch->allowed.data(), input.logits.size()};
}

bool AllowsAny(std::span<const uint32_t> mask, size_t tokens) {
  QUIRE_DCHECK(mask.size() * 32 >= tokens) << "a mask has a bit for each token";
  const size_t words = tokens / 32;
  const auto is_set = [](uint32_t word) { return word != 0; };
  if (std::any_of(mask.begin(), mask.begin() + static_cast<ptrdiff_t>(words), is_set)) return true;
  return tokens % 32 != 0 && (mask[words] & ((uint32_t{1} << (tokens % 32)) - 1)) != 0;
}

}  // namespace

DrawScratch::DrawScratch(int64_t vocab_size, const Backend& path)
    : backend(&path),
      adjusted(vocab_size),
      weights(vocab_size),
      allowed(vocab_size),
      mask((vocab_size + 31) / 32),
      counts(vocab_size) {
  candidates.reserve(vocab_size);
}

int64_t DrawScratch::Bytes(int64_t vocab_size) {
  return vocab_size *
             static_cast<int64_t>(sizeof(double) + 2 * sizeof(float) + 2 * sizeof(int32_t)) +
         (vocab_size + 31) / 32 * static_cast<int64_t>(sizeof(uint32_t));
}

int64_t DrawScratch::bytes() const {
  return static_cast<int64_t>(adjusted.capacity() * sizeof(double) +
                              (weights.capacity() + allowed.capacity()) * sizeof(float) +
                              mask.capacity() * sizeof(uint32_t) +
                              (candidates.capacity() + counts.capacity()) * sizeof(int32_t));
}

void ReserveLogprobs(const SamplingOptions& options, int64_t vocab_size, Draw* draw) {
  if (options.logprobs >= 0) draw->logprobs.resize(1 + std::min(options.logprobs, vocab_size));
}

void DrawToken(const DrawInput& given, DrawScratch* scratch, Draw* draw) noexcept {
  const ScopedFloatEnvironment environment;
  DrawInput input = given;
  const bool is_masked = !given.mask.empty();
  if (is_masked && !AllowsAny(given.mask, given.logits.size())) {
    draw->error = DrawError::kNoneAllowed;
    return;
  }
  if (is_masked) input.logits = ApplyMask(given, scratch);
  const SamplingOptions& options = *input.options;
  const int64_t best = scratch->backend->arg_max(input.logits.data(), std::ssize(input.logits));
  if (best < 0) {
    draw->error = DrawError::kNotANumber;
    return;
  }
  const float greatest = input.logits[best];
  if (greatest == kMasked) {
    draw->error = DrawError::kAllMasked;
    return;
  }
  draw->error = DrawError::kNone;
  if (HasPenalties(options) || !options.logit_bias.empty()) {
    draw->token = DrawAdjusted(input, scratch);
  } else {
    draw->token = options.temperature == 0.0F ? static_cast<int32_t>(best)
                                              : Sample(input, input.logits, greatest, scratch);
  }
  QUIRE_DCHECK(!is_masked || input.logits[draw->token] != kMasked) << "a masked token is drawn";
  FillLogprobs(input.logits, greatest, is_masked, scratch, draw);
}

}  // namespace quire
