// What random tests and tools/soak agree on. An ordinary run is round 0; a soak runs the same
// programs again and again, each time with the next round, and adds up their figures.
#ifndef QUIRE_BASE_TESTING_SOAK_H_
#define QUIRE_BASE_TESTING_SOAK_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace quire {

inline bool IsSoak() { return std::getenv("QUIRE_SOAK_ROUND") != nullptr; }

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define QUIRE_SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QUIRE_SANITIZED 1
#endif

// How many of its rounds a random test has. Under a sanitizer a round takes ten times as long: a
// quarter of them, except in a soak.
inline int64_t RoundsOf(int64_t rounds) {
#if defined(QUIRE_SANITIZED)
  if (!IsSoak()) return (rounds + 3) / 4;
#endif
  return rounds;
}
// What all rounds of an ordinary run come to, others may miss.
inline bool IsOrdinaryRun() { return !IsSoak() && RoundsOf(4) == 4; }

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
