// Operations row by row as plain loops in double: what the kernels are measured against.
#ifndef QUIRE_KERNELS_REFERENCE_ELEMENTWISE_H_
#define QUIRE_KERNELS_REFERENCE_ELEMENTWISE_H_

#include <cstdint>
#include <vector>

namespace quire::reference {

std::vector<double> RmsNorm(const float* x, const float* w, double weight_offset, double eps,
                            int64_t row_count, int64_t dim);
std::vector<double> SiluMul(const float* gate_up, int64_t row_count, int64_t dim);
std::vector<double> GeluTanhMul(const float* gate_up, int64_t row_count, int64_t dim);
std::vector<double> SoftCap(const float* x, double cap, int64_t count);
int64_t ArgMax(const float* x, int64_t count);
std::vector<double> Exp2Scaled(const float* x, int64_t count, double greatest, double scale_log2);

}  // namespace quire::reference

#endif  // QUIRE_KERNELS_REFERENCE_ELEMENTWISE_H_
