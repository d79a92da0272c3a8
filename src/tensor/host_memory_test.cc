#include "tensor/host_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "tensor/machine_memory.h"

namespace quire {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

TEST(HostMemory, IsZeroedAlignedAndWritable) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, kHuge - 1, kHuge, 2 * kHuge + 5}) {
    const auto memory = HostMemory::Allocate(bytes);
    ASSERT_TRUE(memory.ok()) << memory.status().ToString();
    EXPECT_GE(memory->size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % (bytes >= kHuge ? kHuge : 4096), 0u);
    char* const first = memory->as<char>();
    char* const last = first + memory->size() - 1;
    EXPECT_EQ(*first, 0);
    EXPECT_EQ(*last, 0);
    *first = *last = 1;
  }
}

TEST(HostMemory, ZeroBytesAreAnEmptyObject) {
  const auto memory = HostMemory::Allocate(0);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(memory->size(), 0u);
}

TEST(HostMemory, FailureIsAValueThatNamesTheSize) {
  for (const size_t bytes : {size_t{1} << 60, std::numeric_limits<size_t>::max()}) {
    const auto memory = HostMemory::Allocate(bytes);
    ASSERT_EQ(memory.status().code(), StatusCode::kOutOfMemory);
    EXPECT_NE(memory.status().message().find(std::to_string(bytes)), std::string::npos);
  }
}

TEST(HostMemory, MoreThanTheMachineHasIsRefusedWithBothSizes) {
  const auto machine = static_cast<double>(MachineMemoryBytes());
  const auto memory = HostMemory::Allocate(static_cast<size_t>(MachineMemoryBytes()) + kHuge);
  ASSERT_EQ(memory.status().code(), StatusCode::kOutOfMemory);
  const std::string message(memory.status().message());
  EXPECT_NE(message.find(GiBText(machine + kHuge)), std::string::npos) << message;
  EXPECT_NE(message.find(GiBText(machine)), std::string::npos) << message;
}

TEST(HostMemory, MovesOwnership) {
  HostMemory a = HostMemory::Allocate(4096).value();
  std::byte* const data = a.data();
  HostMemory b = std::move(a);
  EXPECT_EQ(b.data(), data);
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
  a.data()[0] = std::byte{1};
}

TEST(MappedFile, ShowsTheBytes) {
  const std::string path = testing::TempDir() + "quire_mapped_file_test";
  std::ofstream(path) << "quire";
  const auto file = MappedFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const auto bytes = file->bytes();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), "quire");
  std::ofstream(path, std::ios::trunc).flush();
  EXPECT_TRUE(MappedFile::Open(path)->bytes().empty());
  std::remove(path.c_str());
}

TEST(MappedFile, ErrorsNameThePath) {
  const auto missing = MappedFile::Open("/nonexistent/quire");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("/nonexistent/quire"), std::string::npos);
  EXPECT_EQ(MappedFile::Open(testing::TempDir()).status().code(), StatusCode::kIoError);
}

}  // namespace
}  // namespace quire
