#include "engine/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "base/float_environment.h"
#include "base/random.h"
#include "kernels/backend.h"

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

// ---------------------------------------------------------------------------------------- weights

// Weights of all tokens are added in blocks: within one token i of it goes to sum i mod 16, so that
// the processor adds several at a time, then the sums are added over a tree; blocks one after the
// other.
constexpr int64_t kBlock = 128;
constexpr int64_t kSums = 16;

double BlockTotal(std::span<const float> weights) {
  double sums[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= weights.size(); i += kSums) {
    for (int64_t n = 0; n < kSums; ++n) sums[n] += static_cast<double>(weights[i + n]);
  }
  for (int64_t n = 0; i < weights.size(); ++i, ++n) sums[n] += static_cast<double>(weights[i]);
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t n = 0; n < half; ++n) sums[n] += sums[n + half];
  }
  return sums[0];
}

std::span<const float> Block(std::span<const float> weights, size_t begin) {
  return weights.subspan(begin, std::min<size_t>(kBlock, weights.size() - begin));
}

double Total(std::span<const float> weights) {
  double total = 0;
  for (size_t begin = 0; begin < weights.size(); begin += kBlock) {
    total += BlockTotal(Block(weights, begin));
  }
  return total;
}

// What the distance of a logit from the greatest is multiplied by to be counted in steps of which
// a factor e has `steps`. Of the least temperatures it would be infinite, and 0 times that is no
// number.
float Scale(double steps, double temperature) {
  return static_cast<float>(
      std::min<double>(steps / temperature, std::numeric_limits<float>::max()));
}

// e^((logit - greatest) / temperature), by id.
std::span<const float> Weigh(std::span<const float> logits, float greatest, double temperature,
                             DrawScratch* scratch) {
  scratch->backend->exp2_scaled(logits.data(), std::ssize(logits), greatest,
                                Scale(std::numbers::log2e, temperature), scratch->weights.data());
  return {scratch->weights.data(), logits.size()};
}
// Of adjusted logits: their distance from the greatest is rounded to float32.
std::span<const float> Weigh(std::span<const double> logits, double greatest, double temperature,
                             DrawScratch* scratch) {
  for (size_t i = 0; i < logits.size(); ++i) {
    scratch->weights[i] = static_cast<float>(logits[i] - greatest);
  }
  return Weigh({scratch->weights.data(), logits.size()}, 0.0F, temperature, scratch);
}

// ------------------------------------------------------------------------------------- candidates

template <size_t kCount, typename T, typename Wanted>
bool Any(const T* numbers, const Wanted& wanted) {
  int count = 0;
  for (size_t i = 0; i < kCount; ++i) count += wanted(numbers[i]) ? 1 : 0;
  return count != 0;
}

// Calls `found` with the ids of all numbers from `begin` on that are wanted, ascending. Few are:
// groups without any are passed over.
template <typename T, typename Wanted, typename Found>
void FindAll(std::span<const T> numbers, size_t begin, const Wanted& wanted, const Found& found) {
  constexpr size_t kGroup = 16;
  for (; begin < numbers.size(); begin += kGroup) {
    const size_t count = std::min(kGroup, numbers.size() - begin);
    if (count == kGroup && !Any<kGroup>(numbers.data() + begin, wanted)) continue;
    for (size_t i = begin; i < begin + count; ++i) {
      if (wanted(numbers[i])) found(static_cast<int32_t>(i));
    }
  }
}

// Makes the `count` best tokens the candidates, in any order. Twice as many are collected, then the
// lesser half goes, and only what is better than the worst that stayed is collected on: a later
// token of the same logit is behind it in the order.
template <typename T>
void FindBest(std::span<const T> logits, int64_t count, DrawScratch* scratch) {
  std::vector<int32_t>& candidates = scratch->candidates;
  const Better<T> better{logits.data()};
  const auto size = static_cast<int64_t>(logits.size());
  const int64_t room = count < size / 2 ? 2 * count : size;
  candidates.resize(room);
  std::iota(candidates.begin(), candidates.end(), 0);
  T worst = 0;
  const auto keep_best = [&] {
    if (count >= std::ssize(candidates)) return;
    std::nth_element(candidates.begin(), candidates.begin() + count - 1, candidates.end(), better);
    candidates.resize(count);
    worst = logits[candidates.back()];
  };
  keep_best();
  if (room == size) return;
  FindAll(
      logits, static_cast<size_t>(room), [&worst](T logit) { return logit > worst; },
      [&](int32_t token) {
        candidates.push_back(token);
        if (std::ssize(candidates) == room) keep_best();
      });
  keep_best();
}

// Which tokens are candidates: all, or those of DrawScratch::candidates, in id order.
enum class Candidates : uint8_t { kAll, kListed };

double TotalOfListed(std::span<const float> weights, const DrawScratch& scratch) {
  double total = 0;
  for (const int32_t token : scratch.candidates) total += static_cast<double>(weights[token]);
  return total;
}

// Keeps the candidates of at least this weight, in id order, and lists them.
void KeepHeavy(float least, Candidates candidates, std::span<const float> weights,
               DrawScratch* scratch) {
  const auto heavy = [least](float weight) { return weight >= least; };
  if (candidates == Candidates::kListed) {
    std::erase_if(scratch->candidates, [&](int32_t token) { return !heavy(weights[token]); });
    return;
  }
  scratch->candidates.clear();
  FindAll(weights, 0, heavy, [&](int32_t token) { scratch->candidates.push_back(token); });
}

// The run of best candidates whose weight reaches top_p of the whole ends before those of less than
// (1 - top_p) / candidates of the whole: all of them together weigh less than 1 - top_p. Half of
// that is safe from rounding.
float LeastInRun(double top_p, double total, int64_t candidates) {
  return static_cast<float>((1.0 - top_p) * total / static_cast<double>(candidates) / 2);
}

// Leaves of the listed candidates the shortest run of best ones that takes a sum from `run` to
// `target`, best first.
template <typename T>
void KeepRun(double run, double target, std::span<const T> logits, std::span<const float> weights,
             DrawScratch* scratch) {
  std::vector<int32_t>& listed = scratch->candidates;
  std::sort(listed.begin(), listed.end(), Better<T>{logits.data()});
  auto end = listed.begin();
  while (end != listed.end() && run < target) run += static_cast<double>(weights[*end++]);
  listed.erase(end, listed.end());
}

// Keeps the shortest run of best candidates whose weight reaches top_p of the whole, in id order.
template <typename T>
void KeepTopPOfListed(double top_p, std::span<const T> logits, std::span<const float> weights,
                      DrawScratch* scratch) {
  const double total = TotalOfListed(weights, *scratch);
  const float least = LeastInRun(top_p, total, std::ssize(scratch->candidates));
  KeepHeavy(least, Candidates::kListed, weights, scratch);
  KeepRun(0, top_p * total, logits, weights, scratch);
  std::sort(scratch->candidates.begin(), scratch->candidates.end());
}

// The same of all tokens, and lists them. A flat distribution has many thousands in the run, and
// sorting these would take longer than all else. So tokens are told apart by how far they are below
// the greatest, level by level, and only the level in which the run ends is sorted.
template <typename T>
void KeepTopPOfAll(double top_p, double temperature, T greatest, std::span<const T> logits,
                   std::span<const float> weights, DrawScratch* scratch) {
  constexpr int kLevels = 1024;          // what is lower is of the last one
  constexpr double kLevelsPerHalf = 32;  // the weight halves in so many
  std::vector<int32_t>& listed = scratch->candidates;
  const double total = Total(weights);
  const double target = top_p * total;
  const float least = LeastInRun(top_p, total, std::ssize(weights));
  const auto heavy = [least](float weight) { return weight >= least; };
  const auto scale = static_cast<T>(Scale(kLevelsPerHalf * std::numbers::log2e, temperature));
  const auto level_of = [&](int32_t token) {
    return static_cast<int>(std::min<T>((greatest - logits[token]) * scale, kLevels - 1));
  };
  std::array<double, kLevels> level_weights = {};
  FindAll(weights, 0, heavy, [&](int32_t token) {
    level_weights[level_of(token)] += static_cast<double>(weights[token]);
  });
  int last_level = 0;
  double before_level = 0;
  double run = 0;
  for (int level = 0; level < kLevels && run < target; ++level) {
    if (level_weights[level] == 0) continue;
    last_level = level;
    before_level = run;
    run += level_weights[level];
  }
  listed.clear();
  FindAll(weights, 0, heavy, [&](int32_t token) {
    if (level_of(token) == last_level) listed.push_back(token);
  });
  KeepRun(before_level, target, logits, weights, scratch);
  const int32_t last = listed.back();
  const Better<T> better{logits.data()};
  listed.clear();
  FindAll(weights, 0, heavy, [&](int32_t token) {
    if (!better(last, token)) listed.push_back(token);
  });
}

// ----------------------------------------------------------------------------------------- a draw

// Goes on from `sum` through tokens in id order to the one with which it passes the target:
// rounding may leave the target at the end of all, then it is the last that can be drawn.
template <typename TokenAt>
int32_t Walk(double sum, double target, size_t count, std::span<const float> weights,
             const TokenAt& token_at) {
  int32_t last = -1;
  for (size_t i = 0; i < count; ++i) {
    const int32_t token = token_at(i);
    if (weights[token] == 0) continue;
    sum += static_cast<double>(weights[token]);
    last = token;
    if (sum > target) break;
  }
  return last;
}

int32_t DrawFromListed(double uniform, std::span<const float> weights, const DrawScratch& scratch) {
  const double target = uniform * TotalOfListed(weights, scratch);
  return Walk(0, target, scratch.candidates.size(), weights,
              [&](size_t i) { return scratch.candidates[i]; });
}

// The block in which the sum passes the target is found first, then the token in it.
int32_t DrawFromAll(double uniform, std::span<const float> weights) {
  const double target = uniform * Total(weights);
  size_t block = 0;
  double before_block = 0;
  double sum = 0;
  for (size_t begin = 0; begin < weights.size() && sum <= target; begin += kBlock) {
    const double before = sum;
    sum += BlockTotal(Block(weights, begin));
    if (sum == before) continue;  // nothing in it can be drawn
    block = begin;
    before_block = before;
  }
  return Walk(before_block, target, Block(weights, block).size(), weights,
              [block](size_t i) { return static_cast<int32_t>(block + i); });
}

template <typename T>
int32_t Sample(const DrawInput& input, std::span<const T> logits, T greatest,
               DrawScratch* scratch) {
  const SamplingOptions& options = *input.options;
  const auto temperature = static_cast<double>(options.temperature);
  const std::span<const float> weights = Weigh(logits, greatest, temperature, scratch);
  Candidates candidates = Candidates::kAll;
  if (options.top_k > 0 && options.top_k < std::ssize(logits)) {
    FindBest(logits, options.top_k, scratch);
    std::sort(scratch->candidates.begin(), scratch->candidates.end());
    candidates = Candidates::kListed;
  }
  if (options.top_p < 1.0F) {
    const auto top_p = static_cast<double>(options.top_p);
    if (candidates == Candidates::kListed) {
      KeepTopPOfListed(top_p, logits, weights, scratch);
    } else {
      KeepTopPOfAll(top_p, temperature, greatest, logits, weights, scratch);
    }
    candidates = Candidates::kListed;
  }
  if (options.min_p > 0.0F) {
    // The best candidate's weight is 2^0 = 1.
    KeepHeavy(options.min_p, candidates, weights, scratch);
    candidates = Candidates::kListed;
  }
  const double uniform = RandomUniform(options.seed, static_cast<uint64_t>(input.stream),
                                       static_cast<uint64_t>(input.answer.size()));
  return candidates == Candidates::kAll ? DrawFromAll(uniform, weights)
                                        : DrawFromListed(uniform, weights, *scratch);
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
void FillLogprobs(std::span<const float> logits, float greatest, DrawScratch* scratch, Draw* draw) {
  if (draw->logprobs.empty()) return;
  const double log_total =
      static_cast<double>(greatest) + std::log(Total(Weigh(logits, greatest, 1.0, scratch)));
  const auto entry = [&](int32_t token) {
    return TokenLogprob{token, static_cast<float>(static_cast<double>(logits[token]) - log_total)};
  };
  draw->logprobs[0] = entry(draw->token);
  const auto best_count = static_cast<int64_t>(draw->logprobs.size()) - 1;
  if (best_count == 0) return;
  FindBest(logits, best_count, scratch);
  std::vector<int32_t>& best = scratch->candidates;
  std::sort(best.begin(), best.end(), Better<float>{logits.data()});
  for (int64_t i = 0; i < best_count; ++i) draw->logprobs[i + 1] = entry(best[i]);
}

}  // namespace

DrawScratch::DrawScratch(int64_t vocab_size, const Backend& path)
    : backend(&path), adjusted(vocab_size), weights(vocab_size), counts(vocab_size) {
  candidates.reserve(vocab_size);
}

int64_t DrawScratch::Bytes(int64_t vocab_size) {
  return vocab_size * static_cast<int64_t>(sizeof(double) + sizeof(float) + 2 * sizeof(int32_t));
}

int64_t DrawScratch::bytes() const {
  return static_cast<int64_t>(adjusted.capacity() * sizeof(double) +
                              weights.capacity() * sizeof(float) +
                              (candidates.capacity() + counts.capacity()) * sizeof(int32_t));
}

void ReserveLogprobs(const SamplingOptions& options, int64_t vocab_size, Draw* draw) {
  if (options.logprobs >= 0) draw->logprobs.resize(1 + std::min(options.logprobs, vocab_size));
}

void DrawToken(const DrawInput& input, DrawScratch* scratch, Draw* draw) noexcept {
  const ScopedFloatEnvironment environment;
  const SamplingOptions& options = *input.options;
  const int64_t best = scratch->backend->arg_max(input.logits.data(), std::ssize(input.logits));
  if (best < 0) {
    draw->error = DrawError::kNotANumber;
    return;
  }
  const float greatest = input.logits[best];
  if (greatest == -std::numeric_limits<float>::infinity()) {
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
  FillLogprobs(input.logits, greatest, scratch, draw);
}

}  // namespace quire
