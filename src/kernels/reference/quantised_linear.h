// Linear layers with quantised weights as plain loops over the stored rows: the arithmetic of
// docs/exactness.md, step by step. The kernels give these bits.
#ifndef QUIRE_KERNELS_REFERENCE_QUANTISED_LINEAR_H_
#define QUIRE_KERNELS_REFERENCE_QUANTISED_LINEAR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/quantised_weights.h"

namespace quire::reference {

// Weight of input i in a stored row, as double, without any rounding.
double StoredWeight(WeightFormat format, const std::byte* row, int64_t i);

// y = x W^T + bias; x [row_count][k], rows [n] as stored, bias [n] or null.
std::vector<float> QuantisedLinear(WeightFormat format, const float* x, const std::byte* rows,
                                   const float* bias, int64_t row_count, int64_t n, int64_t k);

}  // namespace quire::reference

#endif  // QUIRE_KERNELS_REFERENCE_QUANTISED_LINEAR_H_
