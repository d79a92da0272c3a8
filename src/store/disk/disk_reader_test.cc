// Chunks that are larger than a huge page: a part of their memory can have huge pages, and a part
// cannot.
#include "store/disk/disk_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/huge_pages.h"
#include "store/testing/test_disk_tier.h"

namespace quire {
namespace {

// What came last is done first.
class LastFirstQueue final : public FileQueue {
 public:
  LastFirstQueue(FileSystem& files, size_t depth) : files_(files), depth_(depth) {}
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override { waiting_.push_back(transfer); }
  FileTransferDone Next() override {
    const FileTransfer transfer = waiting_.back();
    waiting_.pop_back();
    return RunTransfer(files_, transfer);
  }

 private:
  FileSystem& files_;
  const size_t depth_;
  std::vector<FileTransfer> waiting_;
};

// Passes for one that reads past the page cache, and notes where it reads to.
class NotedReads final : public FaultyFileSystem {
 public:
  using FaultyFileSystem::FaultyFileSystem;
  int SetDirect(int) override { return 0; }
  int64_t Read(int file, std::span<std::byte> to, int64_t offset) override {
    const std::lock_guard<std::mutex> guard(mutex_);
    reads_.push_back(to);
    return FaultyFileSystem::Read(file, to, offset);
  }
  std::unique_ptr<FileQueue> CreateQueue(size_t depth) override {
    if (last_first) return std::make_unique<LastFirstQueue>(*this, depth);
    return FaultyFileSystem::CreateQueue(depth);
  }
  std::vector<std::span<std::byte>> Take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(reads_, {});
  }

  bool last_first = false;  // before the first read

 private:
  std::mutex mutex_;
  std::vector<std::span<std::byte>> reads_;
};

class DiskReaderTest : public DiskTierTest {
 protected:
  std::unique_ptr<DiskTier> OpenNoted() {
    DiskTierSetup setup = MakeSetup();
    setup.files = files;
    return Open(std::move(setup));
  }
  void Damage(int64_t offset) {
    std::string bytes = ReadFileBytes(PathOf(chunk));
    bytes[static_cast<size_t>(offset)] ^= 1;
    WriteFileBytes(PathOf(chunk), bytes);
  }

  std::shared_ptr<NotedReads> files =
      std::make_shared<NotedReads>(CreateMachineFileSystem(/*use_uring=*/false));
  // Four sections of a MiB and a half, which end in the middle of a block: one of them lies across
  // each border of the huge pages, wherever the memory begins.
  const TestChunk chunk = TestChain(1, 0, {.width = (3 << 16) + 1, .alignment = 4096})[0];
};

bool Holds(std::span<const std::byte> outer, std::span<const std::byte> inner) {
  return inner.data() >= outer.data() && inner.data() + inner.size() <= outer.data() + outer.size();
}

// A disk is slower by half to small pages, so what they hold comes from buffers of huge ones.
TEST_F(DiskReaderTest, TheDiskWritesToHugePagesAlone) {
  const auto tier = OpenNoted();
  ASSERT_TRUE(Put(*tier, chunk).ok());
  files->Take();
  TestSink sink(1);
  tier->Read(ReadsOf({&chunk, 1}, 1), kNever, sink);
  ASSERT_TRUE(sink.statuses[0].ok()) << sink.statuses[0].ToString();
  EXPECT_TRUE(std::ranges::equal(std::as_const(sink.buffers[0]).bytes(), chunk.stored->bytes()));
  const std::span<std::byte> memory = sink.buffers[0].bytes();
  const std::span<std::byte> huge = HugePagesOf(memory);
  ASSERT_FALSE(huge.empty());
  size_t in_place = 0;
  for (const std::span<std::byte> read : files->Take()) {
    if (Holds(memory, read)) {
      EXPECT_TRUE(Holds(huge, read));
      in_place += read.size();
    } else {  // a buffer, of which two are one huge page
      EXPECT_EQ(reinterpret_cast<uintptr_t>(read.data()) % FileTransfers::kBytesMax, 0);
    }
  }
  EXPECT_EQ(in_place, huge.size());
}

TEST_F(DiskReaderTest, WhatLiesBetweenSectionsIsClearedWhicheverPieceIsLast) {
  for (const bool last_first : {false, true}) {
    files->last_first = last_first;
    const auto tier = OpenNoted();
    ASSERT_TRUE(Put(*tier, chunk).ok());
    for (const Section& section : chunk.stored->header().sections)
      Damage(section.offset + section.length);
    EXPECT_TRUE(ReadBack(*tier, chunk).ok());  // compares every byte
    ASSERT_TRUE(tier->Remove(chunk.id.key, kNever).ok());
  }
}

TEST_F(DiskReaderTest, DamageIsFoundOnBothSidesOfEachBorder) {
  for (const bool last_first : {false, true}) {
    files->last_first = last_first;
    const auto tier = OpenNoted();
    // Each MiB has a byte that is wrong, in turn.
    const Section& last = chunk.stored->header().sections.back();
    for (int64_t at = chunk.stored->header().sections[0].offset; at < last.offset + last.length;
         at += int64_t{1} << 20) {
      ASSERT_TRUE(Put(*tier, chunk).ok());
      Damage(at);
      EXPECT_EQ(ReadBack(*tier, chunk).code(), StatusCode::kCorrupt) << "byte " << at;
    }
  }
}

}  // namespace
}  // namespace quire
