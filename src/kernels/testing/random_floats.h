// Inputs of kernels.
#ifndef QUIRE_KERNELS_TESTING_RANDOM_FLOATS_H_
#define QUIRE_KERNELS_TESTING_RANDOM_FLOATS_H_

#include <cstdint>
#include <vector>

#include "base/random.h"

namespace quire {

// The same on every machine: they come out of integers and exact products, and no function of the C
// library has a part in them.
inline std::vector<float> RandomFloats(int64_t count, uint64_t seed, double low = -1,
                                       double high = 1) {
  RandomSequence random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.Uniform(low, high));
  return values;
}

}  // namespace quire

#endif  // QUIRE_KERNELS_TESTING_RANDOM_FLOATS_H_
