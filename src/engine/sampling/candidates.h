// Which tokens can be drawn: top_k, top_p and min_p.
#ifndef QUIRE_ENGINE_SAMPLING_CANDIDATES_H_
#define QUIRE_ENGINE_SAMPLING_CANDIDATES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/engine.h"

namespace quire {

// The total order of candidates.
template <typename T>
struct Better {
  const T* logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

// The `count` best tokens, in any order. REQUIRES, here and below: `listed` has a capacity of all
// tokens. T is the type of logits, float or double.
template <typename T>
void FindBest(std::span<const T> logits, int64_t count, std::vector<int32_t>* listed);

// Which tokens are candidates: all, or those that are listed, in id order.
enum class Candidates : uint8_t { kAll, kListed };

// Candidates of logits and their weights; the `greatest` logit has weight 1.
template <typename T>
Candidates FindCandidates(const SamplingOptions& options, std::span<const T> logits, T greatest,
                          std::span<const float> weights, std::vector<int32_t>* listed);

}  // namespace quire

#endif  // QUIRE_ENGINE_SAMPLING_CANDIDATES_H_
