#include "base/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace quire {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr int kRounds = 10;
constexpr uint64_t kMultiplier0 = 0xD2511F53;
constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;

uint32_t Low(uint64_t x) { return static_cast<uint32_t>(x); }
uint32_t High(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {High(product1) ^ counter[1] ^ key[0], Low(product1),
               High(product0) ^ counter[3] ^ key[1], Low(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t counter) {
  const auto words =
      Philox4x32({Low(counter), High(counter), Low(stream), High(stream)}, {Low(seed), High(seed)});
  return words[0] | uint64_t{words[1]} << 32;
}

double RandomUniform(uint64_t seed, uint64_t stream, uint64_t counter) {
  return static_cast<double>(RandomBits(seed, stream, counter) >> 11) * 0x1p-53;
}

int64_t RandomSequence::Below(int64_t bound) {
  QUIRE_CHECK(bound > 0) << "RandomSequence::Below(" << bound << ')';
  return static_cast<int64_t>(Wide{Bits()} * static_cast<uint64_t>(bound) >> 64);
}

double RandomSequence::Normal() {
  // Box-Muller; 1 - u lies in (0, 1], so the logarithm is finite.
  const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
  return radius * std::cos(2 * std::numbers::pi * Uniform());
}

void FillRandom(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::getrandom(bytes.data(), bytes.size(), 0);
    QUIRE_CHECK(count > 0 || errno == EINTR) << "the system gives no random numbers";
    if (count > 0) bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

}  // namespace quire
