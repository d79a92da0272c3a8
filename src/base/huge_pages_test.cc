#include "base/huge_pages.h"

#include <gtest/gtest.h>

namespace quire {
namespace {

// Addresses alone: nothing is read there.
std::span<std::byte> At(uintptr_t begin, size_t size) {
  return {reinterpret_cast<std::byte*>(begin), size};
}

TEST(HugePages, AreWholeOnesWithinTheBytes) {
  constexpr uintptr_t kBegin = 5 * kHugePageBytes;
  const auto expect = [](std::span<std::byte> bytes, uintptr_t begin, size_t pages) {
    const std::span<std::byte> huge = HugePagesOf(bytes);
    EXPECT_EQ(huge.size(), pages * kHugePageBytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(huge.data()), begin);
  };
  expect(At(kBegin, kHugePageBytes), kBegin, 1);
  expect(At(kBegin, 2 * kHugePageBytes - 1), kBegin, 1);
  expect(At(kBegin, kHugePageBytes - 1), 0, 0);
  expect(At(kBegin - 1, kHugePageBytes), 0, 0);
  expect(At(kBegin - 1, kHugePageBytes + 1), kBegin, 1);
  expect(At(kBegin + 1, 3 * kHugePageBytes), kBegin + kHugePageBytes, 2);
  expect({}, 0, 0);
}

}  // namespace
}  // namespace quire
