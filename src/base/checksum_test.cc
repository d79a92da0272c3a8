#include "base/checksum.h"

#include <gtest/gtest.h>

#include <string>

#include "base/random.h"

namespace quire {
namespace {

std::string RandomBytes(size_t size) {
  RandomSequence random(size);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random.Bits());
  return bytes;
}

// Values of the reference implementation.
TEST(Hash64, KnownValues) {
  EXPECT_EQ(Hash64(""), 0xEF46DB3751D8E999u);
  EXPECT_EQ(Hash64("a"), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(Hash64("abc"), 0x44BC2CF5AD770999u);
  EXPECT_EQ(Hash64("Call me Ishmael. Some years ago--never mind how long precisely-"),
            0x02A2E85470D6FD96u);
}

TEST(Hash64, EveryByteAndTheSeedMatter) {
  for (const size_t size : {1, 3, 4, 7, 8, 31, 32, 33, 64, 100}) {
    std::string bytes = RandomBytes(size);
    const uint64_t hash = Hash64(bytes);
    EXPECT_NE(Hash64(bytes, 1), hash);
    for (size_t i = 0; i < size; ++i) {
      bytes[i] = static_cast<char>(bytes[i] ^ 1);
      EXPECT_NE(Hash64(bytes), hash) << size << ' ' << i;
      bytes[i] = static_cast<char>(bytes[i] ^ 1);
    }
  }
}

// RFC 3720, B.4.
TEST(Crc32c, KnownValues) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xFF').data(), 32), 0x62A8AB43u);
}

TEST(Crc32c, PortableFormAgreesAtEverySizeAndAlignment) {
  const std::string bytes = RandomBytes(80);
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t size = 0; begin + size <= bytes.size(); ++size) {
      ASSERT_EQ(Crc32c(bytes.data() + begin, size), Crc32cPortable(bytes.data() + begin, size));
    }
  }
}

// Long inputs are summed in three stripes, of three lengths.
TEST(Crc32c, PortableFormAgreesOnLongInputs) {
  const std::string bytes = RandomBytes(120000);
  for (const size_t size :
       {1024,  3071,  3072,  3073,  3079,  3080,  6143,  6144,  6151,  9216,  10000,
        12287, 12288, 15360, 15361, 49151, 49152, 64512, 64513, 98304, 120000}) {
    for (const uint32_t before : {0u, 0xDEADBEEFu}) {
      ASSERT_EQ(Crc32c(bytes.data(), size, before), Crc32cPortable(bytes.data(), size, before))
          << size;
    }
  }
}

TEST(Crc32c, PartsAddUp) {
  const std::string bytes = RandomBytes(50);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t first = Crc32c(bytes.data(), cut);
    EXPECT_EQ(Crc32c(bytes.data() + cut, bytes.size() - cut, first), Crc32c(bytes.data(), 50));
  }
}

}  // namespace
}  // namespace quire
