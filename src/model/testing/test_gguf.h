// For tests: folders whose weights are a GGUF file of random blocks.
#ifndef QUIRE_MODEL_TESTING_TEST_GGUF_H_
#define QUIRE_MODEL_TESTING_TEST_GGUF_H_

#include <span>

#include "kernels/quantised_weights.h"
#include "model/testing/test_model.h"

namespace quire {

// config.json and model.gguf, of a model of the llama architecture. Matrices have the formats one
// after the other, so that parts of one fused matrix have different ones. Random codes, and scales
// such that activations stay near 1. REQUIRES: widths of `model` are multiples of 256.
void WriteGgufModel(const TestFolder& folder, const TestModel& model,
                    std::span<const WeightFormat> formats);

}  // namespace quire

#endif  // QUIRE_MODEL_TESTING_TEST_GGUF_H_
