// What the disk tier does while its disk is sound; disk_tier_fault_test.cc has the rest.
#include "store/disk/disk_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/random.h"
#include "base/testing/threads_of_process.h"
#include "store/disk/disk_catalog.h"
#include "store/disk/disk_layout.h"
#include "store/testing/test_disk_tier.h"
#include "store/testing/test_events.h"
#include "store/tier/event_ring.h"

namespace quire {
namespace {

namespace fs = std::filesystem;

TEST_F(DiskTierTest, WhatWasPutComesBackAlsoAfterARestart) {
  const auto chain = TestChain(3);
  {
    const auto tier = Open();
    const auto statuses = tier->Write(WritesOf(chain), kNever);
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.ToString();
    for (const TestChunk& chunk : chain) EXPECT_TRUE(ReadBack(*tier, chunk).ok());
    EXPECT_EQ(tier->Knows(chain[2].id), 1);
    EXPECT_EQ(tier->Usage().chunks, 3);
  }
  const auto tier = Open();
  EXPECT_EQ(tier->Usage().chunks, 3);
  EXPECT_EQ(tier->Usage().bytes, 3 * chain[0].stored->header().total_bytes);
  for (const TestChunk& chunk : chain) EXPECT_TRUE(ReadBack(*tier, chunk).ok());
  EXPECT_EQ(directory.ChunkFiles().size(), 3u);
}

TEST_F(DiskTierTest, AClosedTierTellsWhatIsKnown) {
  const auto chain = TestChain(2);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  tier->Close();
  tier->Close();
  EXPECT_EQ(tier->Knows(chain[1].id), 1);
  EXPECT_EQ(tier->Usage().chunks, 2);
  EXPECT_TRUE(tier->Pin(chain[0].id.key, 1));
  EXPECT_EQ(ReadBack(*tier, chain[0]).code(), StatusCode::kClosed);
  EXPECT_EQ(tier->Prefix(Ids(chain), kNever).status().code(), StatusCode::kClosed);
  EXPECT_EQ(tier->List(kNever).status().code(), StatusCode::kClosed);
  for (const Status& status : tier->Write(WritesOf(chain), kNever))
    EXPECT_EQ(status.code(), StatusCode::kClosed);
}

// To look changes no byte, name or time in the folder, whatever is damaged or expired there.
TEST_F(DiskTierTest, LookingChangesNothing) {
  const auto chain = TestChain(3);
  const auto short_lived = TestChain(1, 5, {.expires_ms = clock->WallMs() + 1000});
  {
    const auto tier = Open();
    (void)tier->Write(WritesOf(chain), kNever);
    (void)tier->Write(WritesOf(short_lived), kNever);
  }
  clock->Advance(2'000'000'000);
  std::string damaged = ReadFileBytes(PathOf(chain[2]));
  damaged[static_cast<size_t>(chain[2].stored->header().sections[0].offset)] ^= 4;
  WriteFileBytes(PathOf(chain[2]), damaged);
  WriteFileBytes(directory.path() + "/tmp/of-a-dead-process", "rest");
  const auto contents = [&] {
    std::vector<std::pair<std::string, std::string>> found;
    for (const std::string& name : directory.Files())
      found.emplace_back(name, ReadFileBytes(directory.path() + "/" + name));
    return found;
  };
  const auto before = contents();
  {
    DiskTierSetup setup = MakeSetup();
    setup.disk.use = FolderUse::kLook;
    const auto tier = Open(std::move(setup));
    EXPECT_EQ(tier->List(kNever)->size(), 4u);
    EXPECT_EQ(*tier->Verify(kNever), 1);
    EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
    EXPECT_EQ(ReadBack(*tier, chain[2]).code(), StatusCode::kCorrupt);
    EXPECT_EQ(Put(*tier, TestChain(1, 9)[0]).code(), StatusCode::kIoError);
    EXPECT_FALSE(tier->Remove(chain[0].id.key, kNever).ok());
    EXPECT_FALSE(tier->SetExpiry(chain[0].id.key, 7, kNever).ok());
    EXPECT_FALSE(tier->SetPriority(chain[0].id.key, 7, kNever).ok());
    EXPECT_FALSE(tier->CollectGarbage(kNever).ok());
  }
  EXPECT_EQ(contents(), before);
}

TEST_F(DiskTierTest, AFolderThatIsNoStoreIsNotFound) {
  for (const FolderUse use : {FolderUse::kExisting, FolderUse::kLook}) {
    DiskTierSetup setup = MakeSetup();
    setup.disk.use = use;
    WriteFileBytes(directory.path() + "/lock", "of another program");
    const auto tier = DiskTier::Open(setup);
    EXPECT_EQ(tier.status().code(), StatusCode::kNotFound) << tier.status().ToString();
    EXPECT_NE(tier.status().ToString().find(directory.path()), std::string::npos);
    EXPECT_EQ(directory.Files(), std::vector<std::string>{"lock"});
    setup.disk.directory += "/absent";
    EXPECT_EQ(DiskTier::Open(setup).status().code(), StatusCode::kNotFound);
    EXPECT_FALSE(fs::exists(setup.disk.directory));
  }
  fs::remove(directory.path() + "/lock");
  (void)Open();
  DiskTierSetup setup = MakeSetup();
  setup.disk.use = FolderUse::kExisting;
  EXPECT_TRUE(Put(*Open(std::move(setup)), TestChain(1)[0]).ok());
}

// Example 22.
TEST_F(DiskTierTest, PrefixesOfAChain) {
  const auto chain = TestChain(3);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  const auto other = TestChain(3, 7);
  const auto salted = TestChain(3, 0, {}, "tenant");
  EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 3);
  std::vector<ChunkId> mixed = {chain[0].id, chain[1].id, other[2].id};
  EXPECT_EQ(*tier->Prefix(mixed, kNever), 2);
  EXPECT_EQ(*tier->Prefix(Ids(other), kNever), 0);
  EXPECT_EQ(*tier->Prefix(Ids(salted), kNever), 0);
}

// Example 23.
TEST_F(DiskTierTest, AGapEndsAPrefix) {
  const auto chain = TestChain(3);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  EXPECT_TRUE(*tier->Remove(chain[1].id.key, kNever));
  EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 1);
  EXPECT_TRUE(ReadBack(*tier, chain[2]).ok());
  EXPECT_FALSE(*tier->Remove(chain[1].id.key, kNever));
}

// Example 27.
TEST_F(DiskTierTest, APinnedChunkStays) {
  std::vector<TestChunk> chunks;
  for (int64_t seed = 0; seed < 4; ++seed) chunks.push_back(TestChain(1, seed)[0]);
  const auto tier = Open(MakeSetup(2 * chunks[0].stored->header().total_bytes));
  const auto& [a, b, c, d] = std::tie(chunks[0], chunks[1], chunks[2], chunks[3]);
  EXPECT_TRUE(Put(*tier, a).ok() && Put(*tier, b).ok());
  EXPECT_TRUE(tier->Pin(a.id.key, 1));
  EXPECT_TRUE(Put(*tier, c).ok());
  EXPECT_EQ(tier->Knows(b.id), -1);
  EXPECT_EQ(ReadBack(*tier, b).code(), StatusCode::kNotFound);
  EXPECT_TRUE(fs::exists(PathOf(a)));
  EXPECT_TRUE(tier->Pin(a.id.key, -1));
  EXPECT_TRUE(Put(*tier, d).ok());
  EXPECT_FALSE(fs::exists(PathOf(a)));
  EXPECT_TRUE(fs::exists(PathOf(c)));
  EXPECT_EQ(tier->Usage().evicted, 2);
}

TEST_F(DiskTierTest, AChainLosesItsEndFirst) {
  const auto chain = TestChain(3);
  const auto other = TestChain(1, 9);
  const auto tier = Open(MakeSetup(3 * chain[0].stored->header().total_bytes));
  (void)tier->Write(WritesOf(chain), kNever);
  EXPECT_TRUE(Put(*tier, other[0]).ok());
  EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 2);
}

// What a put said of a chunk decides what goes first, in the process that wrote it and in the next.
TEST_F(DiskTierTest, WorthOutlivesARestartAndANewExpiry) {
  const auto a = TestChain(1, 1)[0], b = TestChain(1, 2)[0], c = TestChain(1, 3)[0];
  const auto d = TestChain(1, 4)[0], e = TestChain(1, 5)[0];
  auto setup = MakeSetup(3 * a.stored->header().total_bytes);
  for (const EvictionKind eviction : {EvictionKind::kLru, EvictionKind::kCost}) {
    for (const bool restarts : {false, true}) {
      SCOPED_TRACE(restarts);
      setup.eviction = eviction;
      const bool by_cost = eviction == EvictionKind::kCost;
      const auto put = [&](DiskTier& tier, const TestChunk& chunk, double seconds, int priority) {
        TierWrite write{.id = chunk.id, .chunk = chunk.stored.get()};
        if (by_cost) write.recompute_seconds = seconds;
        if (!by_cost) write.priority = priority;
        return tier.Write(std::span(&write, 1), kNever)[0];
      };
      auto tier = Open(setup);
      EXPECT_TRUE(put(*tier, a, 100, by_cost ? 50 : 5).ok());
      if (!by_cost) {
        EXPECT_TRUE(tier->SetPriority(a.id.key, 90, kNever).ok());
      }
      // A new file: before the others, so that age would take it first.
      EXPECT_TRUE(tier->SetExpiry(a.id.key, clock->WallMs() + 1'000'000, kNever).ok());
      EXPECT_TRUE(put(*tier, b, 0.1, 10).ok());
      EXPECT_TRUE(put(*tier, c, 2, 50).ok());
      if (restarts) {
        tier.reset();
        tier = Open(setup);
      }
      EXPECT_TRUE(put(*tier, d, 3, 60).ok());
      EXPECT_FALSE(fs::exists(PathOf(b)));
      EXPECT_TRUE(put(*tier, e, 4, 60).ok());
      EXPECT_FALSE(fs::exists(PathOf(c)));
      EXPECT_TRUE(fs::exists(PathOf(a)));
      for (const TestChunk& chunk : {a, d, e}) EXPECT_TRUE(*tier->Remove(chunk.id.key, kNever));
    }
  }
}

// On a file system without records chunks are worth what all are, and as good.
TEST_F(DiskTierTest, AFileSystemWithoutRecordsCostsNoChunk) {
  const auto chain = TestChain(2);
  const auto files = std::make_shared<FaultyFileSystem>(CreateMachineFileSystem(false));
  auto setup = MakeSetup();
  setup.files = files;
  for (const std::string name : {"set_record", "get_record"}) {
    files->FailAt(0, -EOPNOTSUPP, true, name);
    const auto tier = Open(setup);
    (void)tier->Write(WritesOf(chain), kNever);
    EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 2);
    for (const TestChunk& chunk : chain) EXPECT_TRUE(ReadBack(*tier, chunk).ok());
    if (name == "set_record") {
      EXPECT_EQ(tier->SetPriority(chain[0].id.key, 90, kNever).code(), StatusCode::kIoError);
    }
  }
}

TEST_F(DiskTierTest, AQuotaOfOneSaltIsItsOwn) {
  const auto chain = TestChain(2, 0, {}, "a");
  const auto more = TestChain(1, 5, {}, "a");
  const auto others = TestChain(3, 0, {}, "b");
  const auto tier = Open();
  const int64_t bytes = chain[0].stored->header().total_bytes;
  tier->SetQuota(chain[0].id.root, {.bytes_max = 2 * bytes});
  (void)tier->Write(WritesOf(chain), kNever);
  (void)tier->Write(WritesOf(others), kNever);
  EXPECT_TRUE(Put(*tier, more[0]).ok());
  EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 1);
  EXPECT_EQ(*tier->Prefix(Ids(others), kNever), 3);
}

TEST_F(DiskTierTest, APutOverItsQuotaCostsOthersNothing) {
  const auto chain = TestChain(1, 0, {}, "a");
  const auto others = TestChain(3, 0, {}, "b");
  const auto tier = Open();
  (void)tier->Write(WritesOf(others), kNever);
  tier->SetQuota(chain[0].id.root, {.bytes_max = 1});
  const Status refused = Put(*tier, chain[0]);
  EXPECT_EQ(refused.code(), StatusCode::kFull);
  EXPECT_NE(refused.message().find("quota"), std::string_view::npos) << refused.message();
  EXPECT_EQ(*tier->Prefix(Ids(others), kNever), 3);
  EXPECT_EQ(tier->Usage().evicted, 0);
}

TEST_F(DiskTierTest, FullOfPinnedChunksRefuses) {
  const auto chain = TestChain(1);
  const auto other = TestChain(1, 3);
  const auto tier = Open(MakeSetup(chain[0].stored->header().total_bytes));
  EXPECT_TRUE(Put(*tier, chain[0]).ok());
  tier->Pin(chain[0].id.key, 1);
  EXPECT_EQ(Put(*tier, other[0]).code(), StatusCode::kFull);
  EXPECT_TRUE(ReadBack(*tier, chain[0]).ok());
  EXPECT_EQ(directory.ChunkFiles().size(), 1u);
}

// Example 28.
TEST_F(DiskTierTest, AChunkExpires) {
  const auto chain = TestChain(2, 0, {.expires_ms = clock->WallMs() + 50});
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  clock->Advance(10'000'000);
  EXPECT_TRUE(ReadBack(*tier, chain[0], clock->WallMs()).ok());
  clock->Advance(90'000'000);
  EXPECT_EQ(*tier->Prefix(Ids(chain), kNever), 0);
  EXPECT_EQ(ReadBack(*tier, chain[0], clock->WallMs()).code(), StatusCode::kNotFound);
  EXPECT_EQ(*tier->CollectGarbage(kNever), chain[1].stored->header().total_bytes);
  EXPECT_EQ(tier->Usage().expired, 2);
  EXPECT_EQ(tier->Usage().bytes, 0);
  EXPECT_TRUE(directory.ChunkFiles().empty());
}

TEST_F(DiskTierTest, ANewExpirySurvivesARestart) {
  for (const std::string key : {"", "secret"}) {
    const auto chain = TestChain(2, key.size(), {.alignment = 4096, .mac_key = key});
    auto setup = MakeSetup();
    setup.mac_key = key;
    const int64_t expires_ms = clock->WallMs() + 1000;
    {
      const auto tier = Open(setup);
      (void)tier->Write(WritesOf(chain), kNever);
      EXPECT_TRUE(tier->SetExpiry(chain[0].id.key, expires_ms, kNever).ok());
      EXPECT_TRUE(ReadBack(*tier, chain[0], expires_ms - 1, key).ok());
    }
    const auto tier = Open(setup);
    EXPECT_TRUE(ReadBack(*tier, chain[0], expires_ms - 1, key).ok());
    clock->Advance(2'000'000'000);
    EXPECT_EQ(ReadBack(*tier, chain[0], clock->WallMs(), key).code(), StatusCode::kNotFound);
    EXPECT_TRUE(ReadBack(*tier, chain[1], clock->WallMs(), key).ok());
    EXPECT_EQ(tier->SetExpiry(chain[0].id.key, 5, kNever).code(), StatusCode::kNotFound);
    EXPECT_TRUE(*tier->Remove(chain[1].id.key, kNever));
  }
}

TEST_F(DiskTierTest, WithAKeyOnlySignedChunksCount) {
  const TestChunkShape shape = {.mac_key = "secret"};
  const auto chain = TestChain(1, 0, shape);
  const auto unsigned_chain = TestChain(1);
  ASSERT_EQ(chain[0].id, unsigned_chain[0].id);
  {
    const auto open = Open();
    EXPECT_TRUE(Put(*open, unsigned_chain[0]).ok());
  }
  auto setup = MakeSetup();
  setup.mac_key = "secret";
  const auto tier = Open(setup);
  EXPECT_EQ(ReadBack(*tier, chain[0], 1, "secret").code(), StatusCode::kIncompatible);
  EXPECT_TRUE(Put(*tier, chain[0]).ok());
  EXPECT_TRUE(ReadBack(*tier, chain[0], 1, "secret").ok());
  // Correct checksums do not help a forger.
  EXPECT_EQ(ReadBack(*tier, chain[0], 1, "other").code(), StatusCode::kCorrupt);
  setup.mac_key = "";
  const auto keyless = Open(setup);
  EXPECT_TRUE(Put(*keyless, chain[0]).ok());
  EXPECT_EQ(keyless->SetExpiry(chain[0].id.key, 5, kNever).code(), StatusCode::kBadState);
}

// Example 34.
TEST_F(DiskTierTest, TwoPutsOfOneChunkWriteItOnce) {
  const auto chain = TestChain(8, 0, {.layers = 8, .width = 512});
  const auto tier = Open();
  const auto put = [&] {
    for (const Status& status : tier->Write(WritesOf(chain), kNever)) EXPECT_TRUE(status.ok());
  };
  std::thread first(put), second(put);
  first.join();
  second.join();
  EXPECT_EQ(tier->Usage().deduplicated, 8);
  const auto events = EventsOf(*tier);
  EXPECT_EQ(std::ranges::count(events, ChunkEvent::Kind::kStored), 8);
  EXPECT_EQ(directory.ChunkFiles().size(), 8u);
}

TEST_F(DiskTierTest, LayersComeInOrderOverAllChunks) {
  for (const bool use_uring : {true, false}) {
    // Some sections larger than a request, some chunks of several requests.
    for (const int64_t width : {8, 2000, 300'000}) {
      const auto chain =
          TestChain(3, width + use_uring, {.layers = 3, .width = width, .alignment = 4096});
      auto setup = MakeSetup();
      setup.disk.use_uring = use_uring;
      const auto tier = Open(setup);
      (void)tier->Write(WritesOf(chain), kNever);
      TestSink sink(3);
      tier->Read(ReadsOf(chain, 1), kNever, sink);
      ASSERT_EQ(sink.order.size(), 18u);
      for (size_t i = 0; i < 18; ++i) {
        const std::pair<size_t, int64_t> wanted(i % 6 / 2, static_cast<int64_t>(i / 6 * 2 + i % 2));
        EXPECT_EQ(sink.order[i], wanted);
      }
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(sink.statuses[i].ok());
        EXPECT_TRUE(std::ranges::equal(sink.buffers[i].bytes(), chain[i].stored->bytes()));
      }
    }
  }
}

TEST_F(DiskTierTest, ManyChunksOfABatchAndSomeAreMissing) {
  const auto chain = TestChain(300);
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  for (size_t i = 0; i < 300; i += 3) (void)tier->Remove(chain[i].id.key, kNever);
  TestSink sink(300);
  sink.cancelled = {1};
  tier->Read(ReadsOf(chain, 1), kNever, sink);
  for (size_t i = 0; i < 300; ++i) {
    ASSERT_EQ(sink.ends[i], 1);
    const StatusCode wanted = i == 1       ? StatusCode::kCancelled
                              : i % 3 == 0 ? StatusCode::kNotFound
                                           : StatusCode::kOk;
    EXPECT_EQ(sink.statuses[i].code(), wanted) << i;
  }
}

TEST_F(DiskTierTest, AnotherPassportIsRefusedAndADamagedOneReplaced) {
  const auto tier = Open();
  const std::string json = *TestPassport().ToJson();
  const Digest fingerprint = TestFingerprint();
  EXPECT_TRUE(tier->AddPassport(fingerprint, json).ok());
  EXPECT_TRUE(tier->AddPassport(fingerprint, json).ok());
  EXPECT_EQ(*tier->Passports(kNever), std::vector<std::string>{json});
  const std::string path = disk_layout::PassportFolder(directory.path(), fingerprint) + "/passport";
  const std::string sound = ReadFileBytes(path);
  WriteFileBytes(path, sound.substr(0, sound.size() - 1));
  EXPECT_TRUE(tier->Passports(kNever)->empty());
  EXPECT_TRUE(tier->AddPassport(fingerprint, json).ok());
  EXPECT_EQ(ReadFileBytes(path), sound);
  Passport other = TestPassport();
  other.revision = "r1";
  WriteFileBytes(path, disk_layout::EncodeManifest(*other.Fingerprint(), *other.ToJson()));
  const Status refused = tier->AddPassport(fingerprint, json);
  EXPECT_EQ(refused.code(), StatusCode::kIncompatible);
  EXPECT_NE(refused.message().find("revision"), std::string_view::npos) << refused.ToString();
}

TEST_F(DiskTierTest, ListClearAndGarbage) {
  const auto chain = TestChain(3, 0, {}, "a");
  const auto others = TestChain(2, 0, {}, "b");
  const auto tier = Open();
  (void)tier->Write(WritesOf(chain), kNever);
  (void)tier->Write(WritesOf(others), kNever);
  WriteFileBytes(directory.path() + "/tmp/1-0", "left over");
  const auto listings = tier->List(kNever);
  ASSERT_EQ(listings->size(), 5u);
  EXPECT_EQ(listings->front().tokens, 4);
  EXPECT_EQ(listings->front().fingerprint, TestFingerprint());
  EXPECT_EQ(*tier->Clear(chain[0].id.fingerprint, chain[0].id.root, kNever), 3);
  EXPECT_EQ(tier->List(kNever)->size(), 2u);
  EXPECT_EQ(*tier->CollectGarbage(kNever), 9);
  EXPECT_FALSE(fs::exists(directory.path() + "/tmp/1-0"));
}

// Every salt has folders of its own: those of salts that nobody uses any more do not add up.
TEST_F(DiskTierTest, FoldersOfChunksThatHaveGoneGo) {
  const auto gone = TestChain(3, 0, {}, "a");
  const auto kept = TestChain(2, 0, {}, "b");
  auto setup = MakeSetup();
  setup.disk.durability = Durability::kSync;
  const auto tier = Open(setup);
  (void)tier->Write(WritesOf(gone), kNever);
  (void)tier->Write(WritesOf(kept), kNever);
  const std::string root = fs::path(PathOf(gone[0])).parent_path().parent_path();
  EXPECT_EQ(*tier->Clear(gone[0].id.fingerprint, gone[0].id.root, kNever), 3);
  const auto collect = [&] {
    EXPECT_TRUE(tier->CollectGarbage(kNever).ok());
    return fs::exists(root);
  };
  // The folders' times are the machine's.
  const auto advance_to = [&](int64_t ms) {
    clock->Advance((MachineTime()->WallMs() + ms - clock->WallMs()) * kNsPerMs);
  };
  advance_to(0);
  EXPECT_TRUE(collect());
  EXPECT_FALSE(fs::is_empty(root)) << "somebody may be about to put something there";
  advance_to(2 * 3'600'000);
  EXPECT_TRUE(collect());
  EXPECT_TRUE(fs::is_empty(root));
  EXPECT_FALSE(collect());
  // What is used again is made again.
  EXPECT_TRUE(Put(*tier, gone[0]).ok());
  for (const TestChunk& chunk : {gone[0], kept[0], kept[1]})
    EXPECT_TRUE(ReadBack(*tier, chunk).ok());
}

// The host's handlers run on the host's threads.
TEST_F(DiskTierTest, ItsThreadsTakeNoSignals) {
  const int64_t before = ThreadsThatTakeSignals();
  auto setup = MakeSetup();
  setup.disk.use_uring = false;
  const auto tier = Open(setup);
  const auto chain = TestChain(1);
  ASSERT_TRUE(Put(*tier, chain[0]).ok());
  EXPECT_LE(ThreadsThatTakeSignals(), before);
}

TEST_F(DiskTierTest, AFileThatAnotherProcessDidNotSyncIsNotStoredYet) {
  const auto chain = TestChain(1);
  const auto theirs = Open();
  ASSERT_TRUE(Put(*theirs, chain[0]).ok());
  EXPECT_TRUE(theirs->IsStored(chain[0].id));
  auto setup = MakeSetup();
  setup.disk.durability = Durability::kSync;
  const auto mine = Open(setup);
  EXPECT_EQ(mine->Knows(chain[0].id), 1);
  EXPECT_FALSE(mine->IsStored(chain[0].id));
  EXPECT_TRUE(Put(*mine, chain[0]).ok());
  EXPECT_TRUE(mine->IsStored(chain[0].id));
}

TEST(DiskCatalog, CountsTheEventsThatItDrops) {
  DiskCatalog catalog(EvictionKind::kLru, 1);
  for (size_t i = 0; i < EventRing::kEventsMax + 5; ++i)
    catalog.Tell(ChunkEvent::Kind::kRemoved, ChunkKey{});
  EXPECT_EQ(catalog.Usage().events_dropped, 5);
  std::vector<ChunkEvent> events;
  catalog.TakeEvents(&events);
  EXPECT_EQ(events.size(), EventRing::kEventsMax);
}

TEST_F(DiskTierTest, WorthIsKnownWithoutReading) {
  const auto chain = TestChain(2);
  const auto tier = Open();
  EXPECT_EQ(tier->Worth(chain[0].id), std::nullopt);
  const TierWrite write{chain[0].id, chain[0].stored.get(), 1.5, 70};
  ASSERT_TRUE(tier->Write(std::span(&write, 1), kNever)[0].ok());
  EXPECT_EQ(tier->Worth(chain[0].id), (ChunkWorth{1.5, 70}));
}

// Two tiers on one folder are as two processes: they share nothing but the files.
TEST_F(DiskTierTest, AnotherProcessPutsAndRemoves) {
  const auto chain = TestChain(3);
  const int64_t bytes = chain[0].stored->header().total_bytes;
  const auto mine = Open(MakeSetup(3 * bytes));
  const auto theirs = Open(MakeSetup(3 * bytes));
  (void)theirs->Write(WritesOf(chain), kNever);
  EXPECT_EQ(mine->Knows(chain[0].id), -1);
  EXPECT_EQ(*mine->Prefix(Ids(chain), kNever), 3);
  EXPECT_EQ(mine->Knows(chain[0].id), 1);
  EXPECT_TRUE(Put(*mine, chain[0]).ok());
  EXPECT_EQ(mine->Usage().deduplicated, 1);
  EXPECT_TRUE(*theirs->Remove(chain[2].id.key, kNever));
  EXPECT_EQ(ReadBack(*mine, chain[2]).code(), StatusCode::kNotFound);
  EXPECT_EQ(mine->Knows(chain[2].id), -1);
  // Both together keep the quota.
  const auto more = TestChain(6, 4);
  for (size_t i = 0; i < 6; ++i) EXPECT_TRUE(Put(i % 2 == 0 ? *mine : *theirs, more[i]).ok());
  EXPECT_LE(directory.ChunkFiles().size(), 3u);
}

// The sum in the lock file tells a process of files that it has not seen.
TEST_F(DiskTierTest, TheQuotaCountsFilesThatOnlyAnotherProcessKnows) {
  const auto chain = TestChain(3);
  const int64_t bytes = chain[0].stored->header().total_bytes;
  const auto mine = Open(MakeSetup(3 * bytes));
  const auto theirs = Open(MakeSetup(3 * bytes));
  (void)theirs->Write(WritesOf(chain), kNever);
  EXPECT_EQ(mine->Usage().bytes, 0);
  for (const TestChunk& chunk : TestChain(2, 4)) {
    EXPECT_TRUE(Put(*mine, chunk).ok());
    EXPECT_EQ(directory.ChunkFiles().size(), 3u);
  }
}

TEST_F(DiskTierTest, AScanLearnsWhatOthersDid) {
  const auto chain = TestChain(3);
  const auto mine = Open();
  const auto theirs = Open();
  (void)mine->Write(WritesOf(TestChain(1, 8)), kNever);
  (void)theirs->Write(WritesOf(chain), kNever);
  (void)theirs->Remove(TestChain(1, 8)[0].id.key, kNever);
  EXPECT_EQ(mine->List(kNever)->size(), 3u);
}

TEST_F(DiskTierTest, UsableBeforeTheScanIsOver) {
  const auto chain = TestChain(2);
  {
    const auto tier = Open();
    EXPECT_TRUE(Put(*tier, chain[0]).ok());
  }
  auto setup = MakeSetup();
  auto files = std::make_shared<FaultyFileSystem>(CreateMachineFileSystem(false));
  setup.files = files;
  // The scan stands at its first listing of the folder until the test lets it go.
  std::mutex mutex;
  std::unique_lock<std::mutex> hold(mutex);
  std::atomic<int> lists = 0;
  files->CallAt(-1, [&](std::string_view name) {
    if (name == "list" && lists++ == 1) const std::lock_guard<std::mutex> wait(mutex);
  });
  auto tier = DiskTier::Open(setup);
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ((*tier)->Knows(chain[0].id), -1);
  EXPECT_EQ(*(*tier)->Prefix(Ids(chain), kNever), 1);
  EXPECT_TRUE(ReadBack(**tier, chain[0]).ok());
  EXPECT_TRUE(Put(**tier, chain[1]).ok());
  hold.unlock();
  EXPECT_TRUE((*tier)->AwaitScan(kNever).ok());
  EXPECT_EQ((*tier)->Usage().chunks, 2);
}

// ---- All at once

TEST_F(DiskTierTest, EverybodyAtOnce) {
  std::vector<std::vector<TestChunk>> chains;
  for (int64_t seed = 0; seed < 6; ++seed) chains.push_back(TestChain(4, seed));
  // Room for half of them, and two tiers on the folder.
  const int64_t bytes_max = 12 * chains[0][0].stored->header().total_bytes;
  const std::vector<std::unique_ptr<DiskTier>> tiers = [&] {
    std::vector<std::unique_ptr<DiskTier>> opened;
    for (int i = 0; i < 2; ++i) opened.push_back(std::move(*DiskTier::Open(MakeSetup(bytes_max))));
    return opened;
  }();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      RandomSequence random(t);
      DiskTier& tier = *tiers[t % 2];
      for (int round = 0; round < 40; ++round) {
        const auto& chain = chains[static_cast<size_t>(random.Below(6))];
        const TestChunk& chunk = chain[static_cast<size_t>(random.Below(4))];
        switch (random.Below(8)) {
          case 0:
            (void)tier.Remove(chunk.id.key, kNever);
            break;
          case 1:
            if (tier.Pin(chunk.id.key, 1)) tier.Pin(chunk.id.key, -1);
            break;
          case 2:
            (void)tier.SetExpiry(chunk.id.key, int64_t{1} << (50 + random.Below(3)), kNever);
            break;
          case 3:
            (void)tier.CollectGarbage(kNever);
            (void)tier.List(kNever);
            break;
          case 4:
            (void)tier.Write(WritesOf(chain), kNever);
            break;
          default: {
            TestSink sink(chain.size());
            tier.Read(ReadsOf(chain, 1), kNever, sink);
            for (size_t i = 0; i < chain.size(); ++i) {
              EXPECT_EQ(sink.ends[i], 1);
              const StatusCode code = sink.statuses[i].code();
              EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kNotFound)
                  << sink.statuses[i].ToString();
              EXPECT_TRUE(code != StatusCode::kOk || sink.headers[i].tokens == chain[i].tokens);
            }
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& tier : tiers) {
    EXPECT_EQ(tier->Usage().corrupt, 0);
    EXPECT_EQ(*tier->Verify(kNever), 0);
    EXPECT_EQ(tier->List(kNever)->size(), directory.ChunkFiles().size());
  }
  EXPECT_LE(directory.ChunkFiles().size(), 12u);
}

}  // namespace
}  // namespace quire
