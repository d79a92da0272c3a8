// What processes that share a folder cost each other. Two tiers on one folder are as two processes.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chunk/chunk_layout.h"
#include "chunk/testing/test_chunk.h"
#include "store/testing/test_disk_tier.h"

namespace quire {
namespace {

namespace fs = std::filesystem;

// Chunks that hang on no other one.
std::vector<TestChunk> Chunks(int64_t count, int64_t first_seed = 0) {
  std::vector<TestChunk> chunks;
  for (int64_t i = 0; i < count; ++i) chunks.push_back(TestChain(1, first_seed + i)[0]);
  return chunks;
}

const int64_t kChunkBytes = TestChain(1)[0].stored->header().total_bytes;

class DiskSharingTest : public DiskTierTest {
 protected:
  // A tier of a folder of `files` chunks whose looks at files and folders are counted.
  std::unique_ptr<DiskTier> OpenCounting(int64_t file_count) {
    DiskTierSetup setup = MakeSetup(file_count * kChunkBytes);
    setup.files = files;
    files->CallAt(-1, [&](std::string_view name) {
      looks += name == "stat" || name == "open" || name == "list" ? 1 : 0;
    });
    return Open(std::move(setup));
  }

  std::atomic<int64_t> looks = 0;
  std::shared_ptr<FaultyFileSystem> files =
      std::make_shared<FaultyFileSystem>(CreateMachineFileSystem(false));
};

// Whatever the folder's size: the other process has put and evicted one chunk since the last put.
constexpr int64_t kLooksMax = 32;

TEST_F(DiskSharingTest, APutCostsWhatTheOtherProcessDid) {
  constexpr int64_t kFiles = 512, kPuts = 128;
  const auto theirs = Open(MakeSetup(kFiles * kChunkBytes));
  (void)theirs->Write(WritesOf(Chunks(kFiles)), kNever);
  ASSERT_EQ(std::ssize(directory.ChunkFiles()), kFiles);
  const auto mine = OpenCounting(kFiles);
  const auto more = Chunks(2 * kPuts, kFiles);
  looks = 0;
  for (size_t i = 0; i < more.size(); i += 2) {
    EXPECT_TRUE(Put(*theirs, more[i]).ok());
    EXPECT_TRUE(Put(*mine, more[i + 1]).ok());
    EXPECT_LE(std::ssize(directory.ChunkFiles()), kFiles);
  }
  EXPECT_LE(looks.load(), kPuts * kLooksMax);
  for (const TestChunk& chunk : more) EXPECT_TRUE(fs::exists(PathOf(chunk)));
}

// A few chunks of a process that has ended are no other one's, and are evicted all the same.
TEST_F(DiskSharingTest, WhatAnotherProcessHasLeftIsEvicted) {
  constexpr int64_t kFiles = 64;
  const auto mine = Open(MakeSetup(kFiles * kChunkBytes));
  (void)mine->Write(WritesOf(Chunks(kFiles)), kNever);
  const auto left = Chunks(kFiles / 16, kFiles);
  (void)Open(MakeSetup(kFiles * kChunkBytes))->Write(WritesOf(left), kNever);
  for (const TestChunk& chunk : left) EXPECT_TRUE(fs::exists(PathOf(chunk)));
  for (const TestChunk& chunk : Chunks(3 * kFiles, 2 * kFiles)) EXPECT_TRUE(Put(*mine, chunk).ok());
  for (const TestChunk& chunk : left) EXPECT_FALSE(fs::exists(PathOf(chunk)));
  EXPECT_EQ(std::ssize(directory.ChunkFiles()), kFiles);
}

// Files of a newer version count, and are not looked at again with every put.
TEST_F(DiskSharingTest, FilesThatCannotBeReadCostNoPut) {
  constexpr int64_t kFiles = 64, kPuts = 32;
  const auto chunks = Chunks(kFiles);
  (void)Open(MakeSetup(kFiles * kChunkBytes))->Write(WritesOf(chunks), kNever);
  const std::span<const TestChunk> newer = std::span(chunks).first(kFiles / 4);
  for (const TestChunk& chunk : newer) {
    const std::span<const std::byte> sound = chunk.stored->bytes();
    std::vector<std::byte> bytes(sound.begin(), sound.end());
    chunk_layout::Store(std::span(bytes), chunk_layout::kVersionAt,
                        static_cast<uint16_t>(chunk_layout::kVersion + 1));
    SealAgain(bytes);
    WriteFileBytes(PathOf(chunk), {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  const auto tier = OpenCounting(kFiles);
  looks = 0;
  for (const TestChunk& chunk : Chunks(kPuts, kFiles)) EXPECT_TRUE(Put(*tier, chunk).ok());
  EXPECT_LE(looks.load(), kPuts * kLooksMax);
  EXPECT_EQ(std::ssize(directory.ChunkFiles()), kFiles);
  for (const TestChunk& chunk : newer) EXPECT_TRUE(fs::exists(PathOf(chunk)));
}

// Chunks that another process has removed free nothing.
TEST_F(DiskSharingTest, AFullDiskLosesAChunkThatIsThere) {
  const auto chunks = Chunks(4);
  const auto theirs = Open();
  (void)theirs->Write(WritesOf(chunks), kNever);
  const auto mine = OpenCounting(1024);
  for (const size_t last : {2, 3}) mine->Touch(chunks[last].id.key);
  EXPECT_TRUE(*theirs->Remove(chunks[0].id.key, kNever));
  EXPECT_TRUE(*theirs->Remove(chunks[1].id.key, kNever));
  files->FailAt(0, -ENOSPC, false, "allocate");
  EXPECT_TRUE(Put(*mine, Chunks(1, 9)[0]).ok());
  EXPECT_EQ(mine->Usage().evicted, 1);
  EXPECT_EQ(directory.ChunkFiles().size(), 2u);
}

// ---- The sum of sizes

TEST_F(DiskSharingTest, ASumThatIsCountedHasNoChangeTwice) {
  const auto chunks = Chunks(3);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chunks), kNever);
  const std::string lock = directory.path() + "/lock";
  const auto sum = [&] {
    const std::string bytes = ReadFileBytes(lock);
    return disk_layout::ParseUsage(std::as_bytes(std::span(bytes))).value_or(-1);
  };
  EXPECT_EQ(sum(), 3 * kChunkBytes);
  WriteFileBytes(lock, "damaged");
  EXPECT_TRUE(*tier->Remove(chunks[0].id.key, kNever));
  EXPECT_EQ(sum(), 2 * kChunkBytes);
}

// A sum that could not be written is wrong, whatever stands there.
TEST_F(DiskSharingTest, ASumThatCouldNotBeWrittenIsCounted) {
  constexpr int64_t kFiles = 64;
  const auto tier = OpenCounting(kFiles);
  (void)tier->Write(WritesOf(Chunks(kFiles)), kNever);
  // The first write of a put is the chunk's, the second one the sum's.
  const auto more = Chunks(2, kFiles);
  EXPECT_TRUE(*tier->Remove(Chunks(1)[0].id.key, kNever));
  files->FailAt(1, -EIO, false, "write");
  EXPECT_TRUE(Put(*tier, more[0]).ok());
  EXPECT_TRUE(Put(*tier, more[1]).ok());
  EXPECT_EQ(std::ssize(directory.ChunkFiles()), kFiles);
}

// The chunk as another writer may lay it out: its header aligned for direct reads, its sections one
// after the other.
std::string Packed(const StoredChunk& chunk) {
  const ChunkHeader& header = chunk.header();
  const auto begin = chunk.bytes().begin();
  std::vector<std::byte> bytes(begin, begin + header.header_bytes);
  const auto pad_to = [&](int64_t unit) {
    bytes.resize(static_cast<size_t>(chunk_layout::RoundUp(std::ssize(bytes), unit)));
  };
  for (size_t s = 0; s < header.sections.size(); ++s) {
    pad_to(chunk_layout::kUnitBytes);
    const size_t entry = chunk_layout::kFixedBytes + s * chunk_layout::kEntryBytes;
    const int64_t units = (std::ssize(bytes) - header.header_bytes) / chunk_layout::kUnitBytes;
    chunk_layout::Store(std::span(bytes), entry + chunk_layout::kEntryOffsetAt,
                        static_cast<uint32_t>(units));
    const Section& section = header.sections[s];
    bytes.insert(bytes.end(), begin + section.offset, begin + section.offset + section.length);
  }
  pad_to(chunk_layout::kFileAlignment);
  SealAgain(bytes);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A new expiry makes a new file, in this writer's layout.
TEST_F(DiskSharingTest, ANewExpiryCountsTheBytesOfItsFile) {
  const auto chunk = TestChain(1, 1, {.alignment = 4096})[0];
  EXPECT_TRUE(Put(*Open(), chunk).ok());
  const std::string packed = Packed(*chunk.stored);
  WriteFileBytes(PathOf(chunk), packed);
  const auto mine = Open();
  const auto theirs = Open();
  for (const auto* tier : {&mine, &theirs}) EXPECT_EQ((*tier)->Usage().bytes, std::ssize(packed));
  EXPECT_TRUE(mine->SetExpiry(chunk.id.key, clock->WallMs() + 1'000'000, kNever).ok());
  const auto bytes = static_cast<int64_t>(fs::file_size(PathOf(chunk)));
  ASSERT_NE(bytes, std::ssize(packed));
  EXPECT_EQ(mine->Usage().bytes, bytes);
  EXPECT_TRUE(theirs->Get(chunk.id.key, kNever).ok());
  EXPECT_EQ(theirs->Usage().bytes, bytes);
}

}  // namespace
}  // namespace quire
