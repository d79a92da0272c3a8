// For tests: the llama family in plain loops of double, from the tensors themselves. No cache, no
// batch, no fused weights.
#ifndef QUIRE_MODEL_TESTING_LLAMA_REFERENCE_H_
#define QUIRE_MODEL_TESTING_LLAMA_REFERENCE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "model/testing/test_model.h"

namespace quire {

// How queries and keys are turned: pairs (i, i + n) of the first 2 n dimensions by position *
// inv_freq[i].
struct ReferenceRope {
  std::vector<double> inv_freq;
  double amplitude = 1.0;
};

// Without scaling, over the whole head.
ReferenceRope PlainRope(int64_t head_dim, double theta);

// Logits of every token, [tokens, vocab_size]. An independent reading of what `model` means; biases
// and norms are used where the tensors have them.
std::vector<double> ReferenceLogits(const TestModel& model, std::span<const TestTensor> tensors,
                                    const ReferenceRope& rope, std::span<const int32_t> tokens);

}  // namespace quire

#endif  // QUIRE_MODEL_TESTING_LLAMA_REFERENCE_H_
