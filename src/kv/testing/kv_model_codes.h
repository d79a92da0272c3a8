// What the oracle's numbers become when they are stored: rounded, or codes with a scale per head.
#ifndef QUIRE_KV_TESTING_KV_MODEL_CODES_H_
#define QUIRE_KV_TESTING_KV_MODEL_CODES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/tensor.h"

namespace quire {

// The scale of a head's numbers: the largest of them is the largest code; 16 significant bits.
// REQUIRES: IsQuantised(dtype).
float CodeScale(std::span<const float> head, DType dtype);

// Appends the numbers of one token and head as a cache of `dtype` gives them back.
void AppendStored(const std::vector<float>& head, DType dtype, std::vector<float>* to);

// The element at this offset as a number.
float LoadElement(const TensorView& view, int64_t offset);
// Appends token `row` of stored rows [token][head][dim]; scales are read where there are such.
void LoadRow(const TensorView& rows, const TensorView& scales, int64_t row, std::vector<float>* to);

}  // namespace quire

#endif  // QUIRE_KV_TESTING_KV_MODEL_CODES_H_
