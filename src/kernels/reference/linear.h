// Linear layers as plain loops in double: what the kernels are measured against.
#ifndef QUIRE_KERNELS_REFERENCE_LINEAR_H_
#define QUIRE_KERNELS_REFERENCE_LINEAR_H_

#include <cstdint>
#include <vector>

namespace quire::reference {

struct LinearResult {
  std::vector<double> y;  // [row][n]
  std::vector<double>
      magnitude;  // [row][n]: sum of |x w| and |bias|, the scale of the rounding error
};

// y = x W^T + bias; x [row_count][k], w [n][k], bias [n] or null.
LinearResult Linear(const float* x, const float* w, const float* bias, int64_t row_count, int64_t n,
                    int64_t k);

}  // namespace quire::reference

#endif  // QUIRE_KERNELS_REFERENCE_LINEAR_H_
