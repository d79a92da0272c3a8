// What goes wrong with the disk tier's files and its disk: damage, a disk that hangs, errors of
// every call, and a power cut. Nothing wrong is served, and nobody waits for ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/random.h"
#include "base/testing/fake_clock.h"
#include "base/testing/soak.h"
#include "store/disk/disk_tier.h"
#include "store/testing/test_disk_tier.h"

namespace quire {
namespace {

namespace fs = std::filesystem;

// A tier on a disk whose calls fail or hang as `files` is told.
class DiskTierFaultTest : public DiskTierTest {
 protected:
  std::unique_ptr<DiskTier> OpenFaulty(int64_t io_timeout_ms = DiskTierOptions().io_timeout_ms) {
    DiskTierSetup setup = MakeSetup();
    setup.disk.io_timeout_ms = io_timeout_ms;
    setup.files = files;
    return Open(std::move(setup));
  }

  std::shared_ptr<FaultyFileSystem> files =
      std::make_shared<FaultyFileSystem>(CreateMachineFileSystem(false));
};

// ---- Clean-up beside writers

// A clean-up that looks at a new file between its making and its lock takes it for a dead
// process's.
TEST_F(DiskTierFaultTest, AFileThatACleanUpTookIsMadeAgain) {
  const auto chain = TestChain(1);
  const auto tier = OpenFaulty();
  ASSERT_TRUE(Put(*tier, chain[0]).ok());
  const std::string temporary = directory.path() + "/tmp";
  int taken = 0;
  files->CallAt(-1, [&](std::string_view name) {
    if (name != "lock" || fs::is_empty(temporary) || taken++ > 0) return;
    for (const auto& entry : fs::directory_iterator(temporary)) fs::remove(entry.path());
  });
  EXPECT_TRUE(tier->SetExpiry(chain[0].id.key, int64_t{1} << 50, kNever).ok());
  EXPECT_GT(taken, 0);
  files->CallAt(-1, nullptr);
  EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
  EXPECT_EQ(tier->List(kNever)->front().expires_ms, int64_t{1} << 50);
}

// Two processes that make files in the same millisecond: a clean-up that removes the one's by name
// must never meet the other's.
TEST_F(DiskTierFaultTest, NamesOfNewFilesAreNeverUsedTwice) {
  const auto chain = TestChain(1);
  std::set<std::string> names;
  for (int process = 0; process < 2; ++process) {
    const auto tier = OpenFaulty();
    ASSERT_TRUE(Put(*tier, chain[0]).ok());
    files->CallAt(-1, [&](std::string_view name) {
      if (name != "rename") return;
      for (const auto& entry : fs::directory_iterator(directory.path() + "/tmp"))
        EXPECT_TRUE(names.insert(entry.path().filename()).second) << entry.path();
    });
    EXPECT_TRUE(tier->SetExpiry(chain[0].id.key, (int64_t{1} << 50) + process, kNever).ok());
    files->CallAt(-1, nullptr);
  }
  EXPECT_EQ(names.size(), 2u);
}

// What was removed since the clean-up saw its name stays away.
TEST_F(DiskTierFaultTest, ACleanUpMakesNoFile) {
  const auto tier = OpenFaulty();
  const std::string left = directory.path() + "/tmp/1-0";
  WriteFileBytes(left, "left over");
  files->CallAt(-1, [&](std::string_view name) {
    if (name == "open") fs::remove(left);
    if (name == "lock") {
      EXPECT_FALSE(fs::exists(left));
    }
  });
  EXPECT_EQ(*tier->CollectGarbage(kNever), 0);
  files->CallAt(-1, nullptr);
}

// A file system that grants no lock is told, and not asked for ever.
TEST_F(DiskTierFaultTest, ALockThatFailsIsAnError) {
  const auto chain = TestChain(1);
  const auto tier = OpenFaulty();
  ASSERT_TRUE(Put(*tier, chain[0]).ok());
  files->FailAt(0, -ENOLCK, true, "lock");
  EXPECT_EQ(tier->SetExpiry(chain[0].id.key, 7, kNever).code(), StatusCode::kIoError);
}

// ---- Damaged files

// Example 24.
TEST_F(DiskTierTest, ATruncatedFileIsAMissAndGone) {
  const auto chain = TestChain(2);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  fs::resize_file(PathOf(chain[0]), fs::file_size(PathOf(chain[0])) - 1);
  EXPECT_EQ(ReadBack(*tier, chain[0]).code(), StatusCode::kCorrupt);
  EXPECT_FALSE(fs::exists(PathOf(chain[0])));
  EXPECT_EQ(tier->Usage().corrupt, 1);
  EXPECT_EQ(ReadBack(*tier, chain[0]).code(), StatusCode::kNotFound);
  EXPECT_EQ(tier->Usage().corrupt, 1);
  EXPECT_TRUE(ReadBack(*tier, chain[1]).ok());
  EXPECT_TRUE(Put(*tier, chain[0]).ok());
  EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
}

// Example 25: a bit in every 64 bytes.
TEST_F(DiskTierTest, NoFlippedBitIsServed) {
  RandomSequence random(SoakSeed(1));
  int64_t flips = 0;
  for (const int64_t alignment : {64, 4096}) {
    const auto chain = TestChain(3, alignment, {.alignment = alignment});
    const auto tier = Open();
    (void)tier->Write(WritesOf(chain), kNever);
    const std::string sound = ReadFileBytes(PathOf(chain[1]));
    int64_t damaged = tier->Usage().corrupt;
    for (size_t at = 0; at < sound.size(); at += 64, ++flips) {
      std::string bytes = sound;
      bytes[at + static_cast<size_t>(random.Below(64))] ^= static_cast<char>(1 << random.Below(8));
      WriteFileBytes(PathOf(chain[1]), bytes);
      // Zeros between sections are covered by nothing and harmless: ReadBack compares.
      const Status status = ReadBack(*tier, chain[1]);
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kCorrupt ||
                  status.code() == StatusCode::kIncompatible)
          << status.ToString();
      if (status.code() == StatusCode::kCorrupt) ++damaged;
      ASSERT_EQ(tier->Usage().corrupt, damaged) << at;
    }
    EXPECT_GT(damaged, 5);
    EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
    EXPECT_TRUE(ReadBack(*tier, chain[2]).ok());
  }
  ReportFigure("flips", flips);
}

TEST_F(DiskTierTest, ExchangedAndZeroedFilesAreMisses) {
  const auto chain = TestChain(4);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  fs::rename(PathOf(chain[0]), directory.path() + "/aside");
  fs::rename(PathOf(chain[1]), PathOf(chain[0]));
  fs::rename(directory.path() + "/aside", PathOf(chain[1]));
  WriteFileBytes(PathOf(chain[2]), std::string(fs::file_size(PathOf(chain[2])), '\0'));
  for (size_t i = 0; i < 3; ++i)
    EXPECT_EQ(ReadBack(*tier, chain[i]).code(), StatusCode::kCorrupt) << i;
  EXPECT_TRUE(ReadBack(*tier, chain[3]).ok());
  EXPECT_EQ(tier->Usage().corrupt, 3);
  EXPECT_EQ(tier->Usage().chunks, 1);
}

TEST_F(DiskTierTest, DamageIsFoundByScanVerifyAndGet) {
  const auto chain = TestChain(3);
  {
    const auto tier = Open();
    (void)tier->Write(WritesOf(chain), kNever);
  }
  for (const auto& [i, at] : {std::pair<size_t, size_t>{0, 20}, {1, 0}}) {
    std::string bytes = ReadFileBytes(PathOf(chain[i]));
    bytes[at == 0 ? bytes.size() - 100 : at] ^= 4;
    WriteFileBytes(PathOf(chain[i]), bytes);
  }
  const auto tier = Open();
  EXPECT_EQ(tier->Usage().corrupt, 1);  // the scan reads headers
  EXPECT_EQ(*tier->Verify(kNever), 1);
  EXPECT_EQ(*tier->Verify(kNever), 0);
  EXPECT_EQ(tier->Get(chain[1].id.key, kNever).status().code(), StatusCode::kNotFound);
  const auto got = tier->Get(chain[2].id.key, kNever);
  ASSERT_TRUE(got.ok());
  EXPECT_TRUE(std::ranges::equal((*got)->bytes(), chain[2].stored->bytes()));
  EXPECT_EQ(tier->Usage().chunks, 1);
}

TEST_F(DiskTierTest, TheQuarantineIsBounded) {
  const auto chain = TestChain(40);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  for (const TestChunk& chunk : chain) WriteFileBytes(PathOf(chunk), "short");
  for (const TestChunk& chunk : chain)
    EXPECT_EQ(ReadBack(*tier, chunk).code(), StatusCode::kCorrupt);
  EXPECT_EQ(tier->Usage().corrupt, 40);
  EXPECT_EQ(directory.ChunkFiles().size(), 0u);
  EXPECT_EQ(directory.Files().size(), 16u + 1);  // and the lock
}

TEST_F(DiskTierTest, ADamagedFileIsNoDuplicate) {
  const auto chain = TestChain(1);
  {
    const auto tier = Open();
    EXPECT_TRUE(Put(*tier, chain[0]).ok());
  }
  std::string bytes = ReadFileBytes(PathOf(chain[0]));
  bytes[bytes.size() - 100] ^= 1;
  WriteFileBytes(PathOf(chain[0]), bytes);
  const auto tier = Open();
  EXPECT_TRUE(Put(*tier, chain[0]).ok());
  EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
  EXPECT_EQ(tier->Usage().deduplicated, 0);
}

// ---- A disk that hangs

TEST_F(DiskTierFaultTest, AStuckDiskHoldsNobody) {
  const auto chain = TestChain(1);
  const auto tier = OpenFaulty(100);
  EXPECT_TRUE(Put(*tier, chain[0]).ok());
  auto mutex = std::make_shared<std::mutex>();
  std::unique_lock<std::mutex> hold(*mutex);
  auto stuck = std::make_shared<std::atomic<bool>>(false);
  files->CallAt(-1, [mutex, stuck](std::string_view name) {
    if (name != "read") return;
    *stuck = true;
    stuck->notify_all();
    const std::lock_guard<std::mutex> wait(*mutex);
  });
  Status status;
  std::thread reader([&] { status = ReadBack(*tier, chain[0]); });
  stuck->wait(false);
  clock->AwaitWaiters(1);
  clock->Advance(99'000'000);
  clock->AwaitWaiters(1);
  clock->Advance(2'000'000);
  reader.join();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_FALSE(tier->Usage().available);
  // The other thread of the lane still answers, and what hung is forgotten when it comes back.
  EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 1);
  EXPECT_TRUE(tier->Usage().available);
  hold.unlock();
}

TEST_F(DiskTierFaultTest, ADeadlineThatPassedIsATimeout) {
  const auto chain = TestChain(1);
  const auto tier = OpenFaulty();
  auto mutex = std::make_shared<std::mutex>();
  std::unique_lock<std::mutex> hold(*mutex);
  files->CallAt(-1, [mutex](std::string_view name) {
    if (name == "write") const std::lock_guard<std::mutex> wait(*mutex);
  });
  std::vector<Status> statuses;
  std::thread writer(
      [&] { statuses = tier->Write(WritesOf(chain), clock->SteadyNs() + 1'000'000); });
  clock->AwaitWaiters(1);
  clock->Advance(1'000'000);
  writer.join();
  EXPECT_EQ(statuses[0].code(), StatusCode::kTimeout);
  hold.unlock();
}

TEST_F(DiskTierFaultTest, WhatWasPutBeforeTheDeadlineIsStored) {
  const auto chain = TestChain(3);
  const auto tier = OpenFaulty();
  auto mutex = std::make_shared<std::mutex>();
  std::unique_lock<std::mutex> hold(*mutex);
  auto files_made = std::make_shared<std::atomic<int>>(0);
  files->CallAt(-1, [mutex, files_made](std::string_view name) {
    if (name != "allocate" || files_made->fetch_add(1) != 1) return;
    files_made->notify_all();
    const std::lock_guard<std::mutex> wait(*mutex);
  });
  std::vector<Status> statuses;
  std::thread writer(
      [&] { statuses = tier->Write(WritesOf(chain), clock->SteadyNs() + 1'000'000); });
  while (*files_made < 2) files_made->wait(*files_made);
  clock->AwaitWaiters(1);
  clock->Advance(1'000'000);
  writer.join();
  EXPECT_TRUE(statuses[0].ok()) << statuses[0].ToString();
  EXPECT_EQ(statuses[1].code(), StatusCode::kTimeout);
  EXPECT_EQ(statuses[2].code(), StatusCode::kTimeout);
  hold.unlock();
}

// ---- Errors

TEST_F(DiskTierFaultTest, AnIoErrorIsAMissAndRemovesNothing) {
  const auto chain = TestChain(2);
  const auto tier = OpenFaulty();
  (void)tier->Write(WritesOf(chain), kNever);
  files->FailAt(0, -EIO, true, "read");
  EXPECT_EQ(ReadBack(*tier, chain[0]).code(), StatusCode::kIoError);
  files->FailAt(-1, 0);
  EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
  EXPECT_EQ(tier->Usage().corrupt, 0);
}

// "None is damaged" would be a lie.
TEST_F(DiskTierFaultTest, VerifyTellsOfFilesThatCannotBeRead) {
  const auto chain = TestChain(3);
  const auto tier = OpenFaulty();
  (void)tier->Write(WritesOf(chain), kNever);
  std::string bytes = ReadFileBytes(PathOf(chain[2]));
  bytes[bytes.size() - 100] ^= 4;
  WriteFileBytes(PathOf(chain[2]), bytes);
  files->FailAt(0, -EIO, false, "read");
  const Status told = tier->Verify(kNever).status();
  EXPECT_EQ(told.code(), StatusCode::kIoError);
  EXPECT_NE(told.message().find("1 of 3 chunk files cannot be read"), std::string_view::npos)
      << told.ToString();
  EXPECT_EQ(tier->Usage().chunks + tier->Usage().corrupt, 3);
  files->FailAt(-1, 0);
  EXPECT_TRUE(tier->Verify(kNever).ok());
  EXPECT_EQ(tier->Usage().corrupt, 1);
  EXPECT_EQ(tier->Usage().chunks, 2);
}

// Uses are kept apart until the scan is over: a scan that never ended would let them add up.
TEST_F(DiskTierFaultTest, AScanWithoutMemoryEnds) {
  const auto chain = TestChain(1);
  (void)Open()->Write(WritesOf(chain), kNever);
  std::atomic<int> lists = 0;
  files->CallAt(-1, [&](std::string_view name) {
    if (name == "list" && lists++ == 1) throw std::bad_alloc();  // the first one is of tmp
  });
  DiskTierSetup setup = MakeSetup();
  setup.files = files;
  const auto tier = DiskTier::Open(setup);
  ASSERT_TRUE(tier.ok());
  EXPECT_TRUE((*tier)->AwaitScan(kNever).ok());
  EXPECT_EQ((*tier)->Knows(chain[0].id), -1);
  EXPECT_TRUE(ReadBack(**tier, chain[0]).ok());
}

// "There is none" would be a lie: the folder could not be looked through.
TEST_F(DiskTierFaultTest, AnIoErrorWhileAKeyIsLookedForIsTold) {
  const auto chain = TestChain(2);
  const auto tier = OpenFaulty();
  (void)tier->Write(WritesOf(std::span(chain).first(1)), kNever);
  for (const int64_t at : {0, 1}) {  // the directory, a passport's folder
    files->FailAt(at, -EIO, true, "list");
    EXPECT_EQ(tier->Get(chain[1].id.key, kNever).status().code(), StatusCode::kIoError);
    files->FailAt(-1, 0);
  }
  EXPECT_EQ(tier->Get(chain[1].id.key, kNever).status().code(), StatusCode::kNotFound);
}

TEST_F(DiskTierFaultTest, AFullDiskEvictsAndTriesOnceMore) {
  const auto old = TestChain(2);
  const auto chain = TestChain(2, 5);
  const auto tier = OpenFaulty();
  (void)tier->Write(WritesOf(old), kNever);
  files->FailAt(0, -ENOSPC, false, "allocate");
  EXPECT_TRUE(Put(*tier, chain[0]).ok());
  EXPECT_EQ(tier->Usage().evicted, 1);
  files->FailAt(0, -ENOSPC, true, "write");
  EXPECT_EQ(Put(*tier, chain[1]).code(), StatusCode::kFull);
  EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
}

TEST_F(DiskTierFaultTest, ALimitOnFilesCostsNoChunk) {
  const auto old = TestChain(2);
  const auto chain = TestChain(1, 5);
  const auto tier = OpenFaulty();
  (void)tier->Write(WritesOf(old), kNever);
  files->FailAt(0, -EFBIG, true, "write");
  EXPECT_EQ(Put(*tier, chain[0]).code(), StatusCode::kTooLarge);
  EXPECT_EQ(tier->Usage().evicted, 0);
}

// Each call fails in each way once, and nothing wrong, nothing lost that was acknowledged.
TEST_F(DiskTierTest, EveryCallMayFail) {
  for (const int error : {-EIO, -ENOSPC, -EINTR, 1}) {
    for (const Durability durability : {Durability::kOs, Durability::kSync}) {
      bool reached_end = false;
      for (int64_t at = 0; !reached_end; ++at) {
        auto files = std::make_shared<FaultyFileSystem>(std::make_shared<PowerFileSystem>());
        auto setup = MakeSetup();
        setup.disk.directory = "/a/b";
        setup.disk.durability = durability;
        setup.files = files;
        const auto chain = TestChain(3);
        std::vector<bool> acknowledged(3);
        files->FailAt(at, error);
        if (auto tier = DiskTier::Open(setup); tier.ok()) {
          (void)(*tier)->AwaitScan(kNever);
          (void)(*tier)->AddPassport(TestFingerprint(), *TestPassport().ToJson());
          for (size_t i = 0; i < 3; ++i) acknowledged[i] = Put(**tier, chain[i]).ok();
          for (size_t i = 0; i < 3; ++i) (void)ReadBack(**tier, chain[i]);
          (void)(*tier)->SetExpiry(chain[2].id.key, clock->WallMs() + 1000, kNever);
          (void)(*tier)->Verify(kNever);
          (void)(*tier)->CollectGarbage(kNever);
        } else {
          EXPECT_NE(error, -EINTR) << tier.status().ToString();
        }
        reached_end = files->calls() <= at;
        files->FailAt(-1, 0);
        auto tier = DiskTier::Open(setup);
        ASSERT_TRUE(tier.ok());
        ASSERT_TRUE((*tier)->AwaitScan(kNever).ok());
        for (size_t i = 0; i < 3; ++i) {
          // A full disk may cost other chunks: they were evicted.
          const bool stays = acknowledged[i] && error != -ENOSPC;
          const Status status = ReadBack(**tier, chain[i]);
          EXPECT_TRUE(status.ok() || !stays) << at << ": " << status.ToString();
          const bool is_harmless = error == -EINTR || error == 1;
          EXPECT_TRUE(acknowledged[i] || !is_harmless) << at << " with " << error;
        }
        EXPECT_EQ((*tier)->Usage().corrupt, 0);
        ASSERT_FALSE(HasFailure()) << "call " << at << ", error " << error;
      }
    }
  }
}

// ---- Power

TEST(DiskTierPower, WhatWasSyncedSurvives) {
  int64_t cuts = 0;
  for (const Durability durability : {Durability::kSync, Durability::kOs}) {
    int64_t losses = 0;
    bool reached_end = false;
    for (int64_t at = 0; !reached_end; ++at) {
      for (uint64_t seed = 0; seed < 4; ++seed) {
        auto files = std::make_shared<PowerFileSystem>();
        DiskTierSetup setup;
        setup.disk.directory = "/data/kv";
        setup.disk.bytes_max = int64_t{1} << 30;
        setup.disk.durability = durability;
        setup.files = files;
        setup.clock = std::make_shared<FakeClock>();
        const auto chain = TestChain(3);
        std::vector<bool> acknowledged(3);
        files->CutAt(at);
        if (auto tier = DiskTier::Open(setup); tier.ok()) {
          (void)(*tier)->AwaitScan(kNever);
          (void)(*tier)->AddPassport(TestFingerprint(), *TestPassport().ToJson());
          for (size_t i = 0; i < 3; ++i) acknowledged[i] = Put(**tier, chain[i]).ok();
          (void)(*tier)->SetExpiry(chain[1].id.key, setup.clock->WallMs() + 1000, kNever);
        }
        reached_end = !files->is_cut();
        files->Restart(SoakSeed(seed * 1000 + static_cast<uint64_t>(at)));
        ++cuts;
        auto tier = DiskTier::Open(setup);
        ASSERT_TRUE(tier.ok()) << tier.status().ToString();
        for (size_t i = 0; i < 3; ++i) {
          const Status status = ReadBack(**tier, chain[i]);
          if (acknowledged[i] && durability == Durability::kSync) {
            EXPECT_TRUE(status.ok()) << at << ": " << status.ToString();
          }
          losses += acknowledged[i] && !status.ok() ? 1 : 0;
          // It can be put again, and is there then.
          EXPECT_TRUE(Put(**tier, chain[i]).ok());
          EXPECT_TRUE(ReadBack(**tier, chain[i]).ok());
        }
        ASSERT_FALSE(HasFailure()) << "call " << at << ", seed " << seed;
      }
    }
    // The simulation takes something when nobody syncs, or it would prove nothing.
    EXPECT_EQ(losses > 0, durability == Durability::kOs);
  }
  ReportFigure("cuts", cuts);
}

}  // namespace
}  // namespace quire
