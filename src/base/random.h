// Counter-based random numbers: each is a function of (seed, stream, counter), so that a draw does
// not depend on how many were made before it or on which thread made them.
#ifndef QUIRE_BASE_RANDOM_H_
#define QUIRE_BASE_RANDOM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace quire {

// Philox4x32 with 10 rounds (Salmon et al., 2011).
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// 64 uniform bits. The value for each triple is fixed for ever: sampled tokens depend on it.
uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t counter);

// Uniform in [0, 1): a multiple of 2^-53.
double RandomUniform(uint64_t seed, uint64_t stream, uint64_t counter);

// From the operating system: bytes that no other process gets or guesses.
void FillRandom(std::span<std::byte> bytes);

// The numbers of one stream one after the other, for callers that draw in a fixed order (tests,
// test models).
class RandomSequence {
 public:
  explicit RandomSequence(uint64_t seed, uint64_t stream = 0) : seed_(seed), stream_(stream) {}

  uint64_t Bits() { return RandomBits(seed_, stream_, counter_++); }
  double Uniform() { return RandomUniform(seed_, stream_, counter_++); }
  double Uniform(double low, double high) { return low + (high - low) * Uniform(); }
  // In [0, bound). REQUIRES: bound > 0. The bias is below bound / 2^64.
  int64_t Below(int64_t bound);
  // Mean 0, variance 1.
  double Normal();

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t counter_ = 0;
};

}  // namespace quire

#endif  // QUIRE_BASE_RANDOM_H_
