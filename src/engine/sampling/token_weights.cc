#include "engine/sampling/token_weights.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace quire {
namespace {

// Weights of all tokens are added in blocks: within one token i of it goes to sum i mod 16, so that
// the processor adds several at a time, then the sums are added over a tree; blocks one after the
// other.
constexpr int64_t kBlock = 128;
constexpr int64_t kSums = 16;

double BlockTotal(std::span<const float> weights) {
  QUIRE_DCHECK(std::ssize(weights) <= kBlock);
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
  QUIRE_DCHECK(last >= 0) << "every token has the weight 0";
  return last;
}

}  // namespace

float LogitScale(double steps, double temperature) {
  QUIRE_DCHECK(steps > 0 && temperature > 0);
  // With the least temperatures it would be infinite, and 0 times that is no number.
  return static_cast<float>(
      std::min<double>(steps / temperature, std::numeric_limits<float>::max()));
}

double TotalWeight(std::span<const float> weights) {
  double total = 0;
  for (size_t begin = 0; begin < weights.size(); begin += kBlock) {
    total += BlockTotal(Block(weights, begin));
  }
  return total;
}

double TotalWeight(std::span<const float> weights, std::span<const int32_t> listed) {
  double total = 0;
  for (const int32_t token : listed) total += static_cast<double>(weights[token]);
  return total;
}

// The block in which the sum passes the target is found first, then the token in it.
int32_t DrawFromAll(double uniform, std::span<const float> weights) {
  QUIRE_DCHECK(uniform >= 0 && uniform < 1);
  const double target = uniform * TotalWeight(weights);
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

int32_t DrawFromListed(double uniform, std::span<const float> weights,
                       std::span<const int32_t> listed) {
  QUIRE_DCHECK(uniform >= 0 && uniform < 1);
  const double target = uniform * TotalWeight(weights, listed);
  return Walk(0, target, listed.size(), weights, [&](size_t i) { return listed[i]; });
}

}  // namespace quire
