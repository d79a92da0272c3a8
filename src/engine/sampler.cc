#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/float_environment.h"
#include "base/random.h"

namespace quire {
namespace {

// The total order of candidates.
template <typename T>
struct Better {
  const T* logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

bool HasPenalties(const SamplingOptions& options) {
  return options.repetition_penalty != 1.0F || options.presence_penalty != 0.0F ||
         options.frequency_penalty != 0.0F;
}

double Repeated(double logit, double penalty) {
  return logit > 0 ? logit / penalty : logit * penalty;
}

// Each token's logit is touched once per kind of penalty, so the order of the history cannot be
// seen in the sums. `counts` is cleared on the way back through the same tokens: a token's first
// visit applies and marks, the second pass unmarks.
void ApplyPenalties(const DrawInput& input, DrawScratch* scratch) {
  const SamplingOptions& options = *input.options;
  for (const int32_t token : input.answer) ++scratch->counts[token];
  for (const int32_t token : input.prompt) {
    if (scratch->counts[token] != 0) continue;  // of the answer too, or seen
    scratch->logits[token] = Repeated(scratch->logits[token], options.repetition_penalty);
    scratch->counts[token] = -1;
  }
  for (const int32_t token : input.prompt) {
    if (scratch->counts[token] == -1) scratch->counts[token] = 0;
  }
  for (const int32_t token : input.answer) {
    const int32_t count = scratch->counts[token];
    if (count == 0) continue;  // seen
    double& logit = scratch->logits[token];
    logit = Repeated(logit, options.repetition_penalty);
    logit -= static_cast<double>(options.presence_penalty);
    logit -= static_cast<double>(options.frequency_penalty) * count;
    scratch->counts[token] = 0;
  }
}

DrawError CheckLogits(std::span<const float> logits) {
  bool any = false;
  for (const float logit : logits) {
    if (!(logit < std::numeric_limits<float>::infinity())) return DrawError::kNotANumber;
    any |= logit > -std::numeric_limits<float>::infinity();
  }
  return any ? DrawError::kNone : DrawError::kAllMasked;
}

// Keeps the `count` best candidates, in id order.
void KeepBest(int64_t count, DrawScratch* scratch) {
  std::vector<int32_t>& candidates = scratch->candidates;
  if (count >= static_cast<int64_t>(candidates.size())) return;
  std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end(),
                   Better<double>{scratch->logits.data()});
  candidates.resize(count);
  std::sort(candidates.begin(), candidates.end());
}

// REQUIRES: candidates in id order.
double TotalWeight(const DrawScratch& scratch) {
  double total = 0;
  for (const int32_t token : scratch.candidates) total += scratch.weights[token];
  return total;
}

// Keeps the shortest run of best candidates whose weight reaches top_p of the whole, in id order.
//
// Only candidates of at least (1 - top_p) / candidates of the whole weight are sorted: all lighter
// ones together weigh less than 1 - top_p, so the run ends before them. (A vocabulary has 10^5
// tokens, the run some tens.)
void KeepTopP(double top_p, DrawScratch* scratch) {
  std::vector<int32_t>& candidates = scratch->candidates;
  const double total = TotalWeight(*scratch);
  const double light = (1.0 - top_p) * total / static_cast<double>(candidates.size());
  const auto heavy_end = std::partition(candidates.begin(), candidates.end(), [&](int32_t token) {
    return scratch->weights[token] >= light;
  });
  std::sort(candidates.begin(), heavy_end, Better<double>{scratch->logits.data()});
  double run = 0;
  auto end = candidates.begin();
  while (end != heavy_end && run < top_p * total) run += scratch->weights[*end++];
  candidates.erase(end, candidates.end());
  std::sort(candidates.begin(), candidates.end());
}

void KeepMinP(double min_p, DrawScratch* scratch) {
  // The best candidate's weight is exp(0) = 1.
  std::erase_if(scratch->candidates,
                [&](int32_t token) { return scratch->weights[token] < min_p; });
}

int32_t Best(size_t vocab_size, const DrawScratch& scratch) {
  int32_t best = 0;
  const auto size = static_cast<int32_t>(vocab_size);
  for (int32_t token = 1; token < size; ++token) {
    if (scratch.logits[token] > scratch.logits[best]) best = token;
  }
  return best;
}

int32_t DrawByWeight(double uniform, const DrawScratch& scratch) {
  const double target = uniform * TotalWeight(scratch);
  double sum = 0;
  int32_t last =
      -1;  // the last candidate that can be drawn: rounding may leave target at the total
  for (const int32_t token : scratch.candidates) {
    if (scratch.weights[token] == 0) continue;
    sum += scratch.weights[token];
    last = token;
    if (sum > target) break;
  }
  return last;
}

int32_t Sample(const DrawInput& input, DrawScratch* scratch) {
  const SamplingOptions& options = *input.options;
  const auto vocab_size = static_cast<int64_t>(input.logits.size());
  scratch->candidates.resize(vocab_size);
  std::iota(scratch->candidates.begin(), scratch->candidates.end(), 0);
  if (options.top_k > 0) KeepBest(options.top_k, scratch);
  const double best = scratch->logits[Best(input.logits.size(), *scratch)];
  for (const int32_t token : scratch->candidates) {
    scratch->weights[token] =
        std::exp((scratch->logits[token] - best) / static_cast<double>(options.temperature));
  }
  if (options.top_p < 1.0F) KeepTopP(static_cast<double>(options.top_p), scratch);
  if (options.min_p > 0.0F) KeepMinP(static_cast<double>(options.min_p), scratch);
  const double uniform = RandomUniform(options.seed, static_cast<uint64_t>(input.stream),
                                       static_cast<uint64_t>(input.answer.size()));
  return DrawByWeight(uniform, *scratch);
}

double LogSumExp(std::span<const float> logits) {
  const double best = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - best);
  return best + std::log(sum);
}

// REQUIRES: draw->logprobs has its final size.
void FillLogprobs(std::span<const float> logits, DrawScratch* scratch, Draw* draw) {
  if (draw->logprobs.empty()) return;
  const double log_total = LogSumExp(logits);
  const auto entry = [&](int32_t token) {
    return TokenLogprob{token, static_cast<float>(static_cast<double>(logits[token]) - log_total)};
  };
  draw->logprobs[0] = entry(draw->token);
  const auto best_count = static_cast<int64_t>(draw->logprobs.size()) - 1;
  std::vector<int32_t>& candidates = scratch->candidates;
  candidates.resize(logits.size());
  std::iota(candidates.begin(), candidates.end(), 0);
  std::partial_sort(candidates.begin(), candidates.begin() + best_count, candidates.end(),
                    Better<float>{logits.data()});
  for (int64_t i = 0; i < best_count; ++i) draw->logprobs[i + 1] = entry(candidates[i]);
}

}  // namespace

DrawScratch::DrawScratch(int64_t vocab_size)
    : logits(vocab_size), weights(vocab_size), counts(vocab_size) {
  candidates.reserve(vocab_size);
}

int64_t DrawScratch::Bytes(int64_t vocab_size) {
  return vocab_size * static_cast<int64_t>(2 * sizeof(double) + 2 * sizeof(int32_t));
}

int64_t DrawScratch::bytes() const {
  return static_cast<int64_t>((logits.capacity() + weights.capacity()) * sizeof(double) +
                              (candidates.capacity() + counts.capacity()) * sizeof(int32_t));
}

void ReserveLogprobs(const SamplingOptions& options, int64_t vocab_size, Draw* draw) {
  if (options.logprobs >= 0) draw->logprobs.resize(1 + std::min(options.logprobs, vocab_size));
}

void DrawToken(const DrawInput& input, DrawScratch* scratch, Draw* draw) noexcept {
  const ScopedFloatEnvironment environment;
  const SamplingOptions& options = *input.options;
  draw->error = CheckLogits(input.logits);
  if (draw->error != DrawError::kNone) return;
  std::copy(input.logits.begin(), input.logits.end(), scratch->logits.begin());
  if (HasPenalties(options)) ApplyPenalties(input, scratch);
  for (const auto& [token, bias] : options.logit_bias) scratch->logits[token] += bias;
  draw->token =
      options.temperature == 0.0F ? Best(input.logits.size(), *scratch) : Sample(input, scratch);
  FillLogprobs(input.logits, scratch, draw);
}

}  // namespace quire
