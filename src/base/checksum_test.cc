#include "base/checksum.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/copied_checksum.h"
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

// All sizes around the stripes, from and to places that are aligned in no common way; nothing
// beside the copy is written.
TEST(Crc32c, ACopyIsExactAndHasTheSumOfItsBytes) {
  const std::string bytes = RandomBytes(120016);
  for (const size_t size : {0, 1, 7, 8, 9, 1023, 3071, 3072, 3079, 6145, 9216, 12288, 49151, 49152,
                            49160, 64513, 120000}) {
    for (const size_t offset : {0, 1, 8, 13}) {
      for (const size_t place : {0, 3, 8}) {
        std::string copy(size + 16, '*');
        const uint32_t sum = CopyCrc32c(copy.data() + place, bytes.data() + offset, size, 0xABC);
        ASSERT_EQ(sum, Crc32cPortable(bytes.data() + offset, size, 0xABC)) << size;
        std::string due(size + 16, '*');
        due.replace(place, size, bytes, offset, size);
        ASSERT_TRUE(copy == due) << size << " bytes from " << offset << " to " << place;
      }
    }
  }
}

// Memory of which two views are mapped: what is written through one is read through the other.
class TwoViews {
 public:
  explicit TwoViews(size_t size) : size_(size) {
    const int fd = ::memfd_create("checksum test", MFD_CLOEXEC);
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(size)), 0);
    for (void*& view : views_) {
      view = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      EXPECT_NE(view, MAP_FAILED);
    }
    ::close(fd);
  }
  ~TwoViews() {
    for (void* const view : views_) ::munmap(view, size_);
  }
  void* operator[](size_t i) const { return views_[i]; }

 private:
  const size_t size_;
  void* views_[2] = {};
};

// The bytes change all the time while they are copied, as a hostile peer's do: the sum is that of
// the copy.
TEST(Crc32c, ACopyOfBytesThatOthersWriteHasTheSumOfTheCopy) {
  constexpr size_t kSize = 160'000;
  const TwoViews shared(kSize);
  std::atomic<bool> is_over = false, has_begun = false;
  std::thread writer([&] {
    for (int value = 1; !is_over; ++value) {
      std::memset(shared[0], value, kSize);
      has_begun = true;
    }
  });
  while (!has_begun) std::this_thread::yield();
  std::vector<unsigned char> copy(kSize);
  for (int round = 0; round < 200; ++round) {
    const uint32_t sum = CopyCrc32c(copy.data(), shared[1], kSize);
    EXPECT_EQ(sum, Crc32c(copy.data(), kSize)) << round;
  }
  is_over = true;
  writer.join();
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
