// Recurrent layers as plain loops in double: what the kernels are measured against.
#ifndef QUIRE_KERNELS_REFERENCE_RECURRENCE_H_
#define QUIRE_KERNELS_REFERENCE_RECURRENCE_H_

#include <cstdint>
#include <vector>

#include "kernels/recurrence.h"

namespace quire::reference {

// Values and, beside each, the sum of the magnitudes of all that was added up in it: an error bound
// is a multiple of it.
struct Bounded {
  std::vector<double> values;
  std::vector<double> magnitudes;
};

// State and outputs of one sequence that goes through rows [0, row_count) from `state` on.
// o [row][head][value_dim]; empty when q is null.
struct MatrixResult {
  Bounded state;
  Bounded o;
};
MatrixResult AdvanceMatrix(const MatrixStateShape& shape, const Bounded& state, const float* inputs,
                           const float* q, double scale, int64_t row_count);

// y [row][channel] of one sequence; `before` holds the width - 1 inputs before its first row.
Bounded Convolve(const ConvolutionShape& shape, const float* before, const float* x,
                 const float* weight, const float* bias, bool silu, int64_t row_count);

}  // namespace quire::reference

#endif  // QUIRE_KERNELS_REFERENCE_RECURRENCE_H_
