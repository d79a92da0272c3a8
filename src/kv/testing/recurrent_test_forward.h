// For the tests of recurrent states: inputs that are a function of the token, forwards made of
// them, and the same layers as plain loops in double.
#ifndef QUIRE_KV_TESTING_RECURRENT_TEST_FORWARD_H_
#define QUIRE_KV_TESTING_RECURRENT_TEST_FORWARD_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "quire/recurrent_cache.h"

namespace quire {

// The outputs of each layer, row after row; NaN where nothing was written.
using RecurrentOutputs = std::vector<std::vector<float>>;

// Small layers, one of each kind, with dimensions that fill no vector evenly.
std::vector<RecurrentLayerSpec> AllRecurrentKinds();

int64_t OutputSize(const RecurrentLayerSpec& spec);

// Layer calls of an open forward of these tokens, in the order of the batch.
Status RunRecurrentLayer(RecurrentCache& cache, int64_t layer, std::span<const uint64_t> tokens,
                         std::vector<float>* outputs, DType dtype = DType::kF32);
Status RunRecurrentLayers(RecurrentCache& cache, std::span<const uint64_t> tokens,
                          RecurrentOutputs* outputs, DType dtype = DType::kF32);

// Begin, all layers and End. tokens[i] are appended to ids[i].
Status RunRecurrentForward(RecurrentCache& cache, std::span<const int64_t> ids,
                           const std::vector<std::vector<uint64_t>>& tokens,
                           RecurrentOutputs* outputs = nullptr, DType dtype = DType::kF32);

// The current states of a sequence, of all layers one after the other.
std::vector<float> StatesOf(RecurrentCache& cache, int64_t seq_id);

// What the layers give for a sequence of these tokens, with inputs of float32.
RecurrentOutputs NaiveOutputs(const std::vector<RecurrentLayerSpec>& layers,
                              std::span<const uint64_t> tokens);

}  // namespace quire

#endif  // QUIRE_KV_TESTING_RECURRENT_TEST_FORWARD_H_
