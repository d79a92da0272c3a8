#include "engine/sampling/candidates.h"

#include <algorithm>
#include <array>
#include <numbers>
#include <numeric>

#include "base/check.h"
#include "engine/sampling/token_weights.h"

namespace quire {
namespace {

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

// Keeps the candidates of at least this weight, in id order, and lists them.
void KeepHeavy(float least, Candidates candidates, std::span<const float> weights,
               std::vector<int32_t>* listed) {
  const auto heavy = [least](float weight) { return weight >= least; };
  if (candidates == Candidates::kListed) {
    std::erase_if(*listed, [&](int32_t token) { return !heavy(weights[token]); });
    return;
  }
  listed->clear();
  FindAll(weights, 0, heavy, [&](int32_t token) { listed->push_back(token); });
}

// The run of best candidates whose weight reaches top_p of the whole ends before those of less than
// (1 - top_p) / candidates of the whole: all of them together weigh less than 1 - top_p. Half of
// that is safe from rounding.
float LeastInRun(double top_p, double total, int64_t candidates) {
  QUIRE_DCHECK(candidates > 0 && top_p < 1);
  return static_cast<float>((1.0 - top_p) * total / static_cast<double>(candidates) / 2);
}

// Leaves of the listed candidates the shortest run of best ones that takes a sum from `run` to
// `target`, best first.
template <typename T>
void KeepRun(double run, double target, std::span<const T> logits, std::span<const float> weights,
             std::vector<int32_t>* listed) {
  std::sort(listed->begin(), listed->end(), Better<T>{logits.data()});
  auto end = listed->begin();
  while (end != listed->end() && run < target) run += static_cast<double>(weights[*end++]);
  listed->erase(end, listed->end());
}

// Keeps the shortest run of best candidates whose weight reaches top_p of the whole, in id order.
template <typename T>
void KeepTopPOfListed(double top_p, std::span<const T> logits, std::span<const float> weights,
                      std::vector<int32_t>* listed) {
  const double total = TotalWeight(weights, *listed);
  const float least = LeastInRun(top_p, total, std::ssize(*listed));
  KeepHeavy(least, Candidates::kListed, weights, listed);
  KeepRun(0, top_p * total, logits, weights, listed);
  std::sort(listed->begin(), listed->end());
}

// The same of all tokens, and lists them. A flat distribution has many thousands in the run, and
// sorting these would take longer than all else. So tokens are told apart by how far they are below
// the greatest, level by level, and only the level in which the run ends is sorted.
template <typename T>
void KeepTopPOfAll(double top_p, double temperature, T greatest, std::span<const T> logits,
                   std::span<const float> weights, std::vector<int32_t>* listed) {
  constexpr int kLevels = 1024;          // what is lower is of the last one
  constexpr double kLevelsPerHalf = 32;  // levels in which the weight halves
  const double total = TotalWeight(weights);
  const double target = top_p * total;
  const float least = LeastInRun(top_p, total, std::ssize(weights));
  const auto heavy = [least](float weight) { return weight >= least; };
  const auto scale = static_cast<T>(LogitScale(kLevelsPerHalf * std::numbers::log2e, temperature));
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
  listed->clear();
  FindAll(weights, 0, heavy, [&](int32_t token) {
    if (level_of(token) == last_level) listed->push_back(token);
  });
  KeepRun(before_level, target, logits, weights, listed);
  QUIRE_DCHECK(!listed->empty()) << "the run ends in a level without tokens";
  const int32_t last = listed->back();
  const Better<T> better{logits.data()};
  listed->clear();
  FindAll(weights, 0, heavy, [&](int32_t token) {
    if (!better(last, token)) listed->push_back(token);
  });
}

}  // namespace

// Twice as many are collected, then the lesser half goes, and only what is better than the worst
// that stayed is collected on: a later token of the same logit is behind it in the order.
template <typename T>
void FindBest(std::span<const T> logits, int64_t count, std::vector<int32_t>* listed) {
  std::vector<int32_t>& candidates = *listed;
  const Better<T> better{logits.data()};
  const auto size = static_cast<int64_t>(logits.size());
  QUIRE_DCHECK(count > 0 && count <= size);
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

template <typename T>
Candidates FindCandidates(const SamplingOptions& options, std::span<const T> logits, T greatest,
                          std::span<const float> weights, std::vector<int32_t>* listed) {
  Candidates candidates = Candidates::kAll;
  if (options.top_k > 0 && options.top_k < std::ssize(logits)) {
    FindBest(logits, options.top_k, listed);
    std::sort(listed->begin(), listed->end());
    candidates = Candidates::kListed;
  }
  if (options.top_p < 1.0F) {
    const auto top_p = static_cast<double>(options.top_p);
    if (candidates == Candidates::kListed) {
      KeepTopPOfListed(top_p, logits, weights, listed);
    } else {
      const auto temperature = static_cast<double>(options.temperature);
      KeepTopPOfAll(top_p, temperature, greatest, logits, weights, listed);
    }
    candidates = Candidates::kListed;
  }
  if (options.min_p > 0.0F) {
    // The best candidate's weight is 2^0 = 1.
    KeepHeavy(options.min_p, candidates, weights, listed);
    candidates = Candidates::kListed;
  }
  QUIRE_DCHECK(candidates == Candidates::kAll || !listed->empty()) << "nothing can be drawn";
  return candidates;
}

template void FindBest(std::span<const float>, int64_t, std::vector<int32_t>*);
template Candidates FindCandidates(const SamplingOptions&, std::span<const float>, float,
                                   std::span<const float>, std::vector<int32_t>*);
template Candidates FindCandidates(const SamplingOptions&, std::span<const double>, double,
                                   std::span<const float>, std::vector<int32_t>*);

}  // namespace quire
