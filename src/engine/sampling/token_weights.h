// Weights of tokens, by id: their sums, and the token at which a sum passes a random part of the
// whole. A sum is in double, in an order that is a function of the tokens alone.
#ifndef QUIRE_ENGINE_SAMPLING_TOKEN_WEIGHTS_H_
#define QUIRE_ENGINE_SAMPLING_TOKEN_WEIGHTS_H_

#include <cstdint>
#include <span>

namespace quire {

// What the distance of a logit from the greatest is multiplied by to be counted in steps of which
// a factor e has `steps`.
float LogitScale(double steps, double temperature);

// The sum of all tokens: block by block (token_weights.cc).
double TotalWeight(std::span<const float> weights);
// The sum of the listed tokens, one after the other.
double TotalWeight(std::span<const float> weights, std::span<const int32_t> listed);

// The token for a random number in [0, 1). REQUIRES: one weight is above 0.
int32_t DrawFromAll(double uniform, std::span<const float> weights);
// `listed`: ascending.
int32_t DrawFromListed(double uniform, std::span<const float> weights,
                       std::span<const int32_t> listed);

}  // namespace quire

#endif  // QUIRE_ENGINE_SAMPLING_TOKEN_WEIGHTS_H_
