// What random tests and tools/soak agree on. An ordinary run is round 0; a soak runs the same
// programs again and again, each time with the next round, and adds up their figures.
#ifndef QUIRE_BASE_TESTING_SOAK_H_
#define QUIRE_BASE_TESTING_SOAK_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace quire {

// What the seeds of an ordinary run come to, others may miss.
inline bool IsSoak() { return std::getenv("QUIRE_SOAK_ROUND") != nullptr; }

// The first of a million seeds that no other round draws from: `seed` itself in an ordinary run.
inline uint64_t SoakSeed(uint64_t seed) {
  const char* const round = std::getenv("QUIRE_SOAK_ROUND");
  return seed + (round == nullptr ? 0 : std::strtoull(round, nullptr, 10) * 1'000'000);
}

// How much of what tools/soak counts (its table has the names) this test case did.
inline void ReportFigure(const std::string& name, int64_t count) {
  testing::Test::RecordProperty(name, std::to_string(count));
}

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_SOAK_H_
