// Random walks of a store over RAM, a disk and a Redis that fail at each edge: chunks are put,
// brought back, promoted, evicted, damaged, removed and expire, and after each step what came back
// is what was put, by key, and what is gone for certain does not come back. At quiet points each
// tier's accounts are those of what lies in it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/testing/fake_clock.h"
#include "base/testing/soak.h"
#include "store/disk/disk_layout.h"
#include "store/disk/disk_tier.h"
#include "store/testing/fake_tier.h"
#include "store/testing/test_disk.h"
#include "store/tiered/tiered_store.h"

namespace quire {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kForEver = std::numeric_limits<int64_t>::max();
constexpr int64_t kChains = 6;  // of each salt
constexpr int64_t kLength = 5;
constexpr std::array<const char*, 2> kSalts = {"", "tenant"};
const std::string kFolder = "/data/kv";

// One prefix chain of one salt, and what is known of its chunks.
struct Chain {
  KeySpace keys;
  std::vector<TestChunk> chunks;
  std::vector<int32_t> tokens;
  std::vector<ChunkKey> chunk_keys;
  std::vector<bool> may_be_there;  // was put, and no removal since was certain
};

// The same key and sections; a header has another expiry once SetTtl was called.
bool IsSame(const StoredChunk& got, const StoredChunk& wanted) {
  if (got.header().key != wanted.header().key || got.bytes().size() != wanted.bytes().size())
    return false;
  return std::ranges::all_of(wanted.header().sections, [&](const Section& section) {
    const auto begin = static_cast<size_t>(section.offset);
    const auto count = static_cast<size_t>(section.length);
    return std::ranges::equal(got.bytes().subspan(begin, count),
                              wanted.bytes().subspan(begin, count));
  });
}

class StoreWalk {
 public:
  // `key_bits`: of FakeTier.
  explicit StoreWalk(uint64_t seed, int key_bits = 0) : random_(seed) {
    for (const char* salt : kSalts) {
      for (int64_t i = 0; i < kChains; ++i) {
        Chain chain = {TestKeys(salt), TestChain(kLength, i, {}, salt), {}, {}, {}};
        for (const TestChunk& chunk : chain.chunks) {
          chain.tokens.insert(chain.tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
          chain.chunk_keys.push_back(chunk.id.key);
        }
        chain.may_be_there.assign(kLength, false);
        chains_.push_back(std::move(chain));
      }
    }
    const int64_t bytes = chains_[0].chunks[0].stored->header().total_bytes;
    options_.ram.bytes_max = (4 + random_.Below(12)) * bytes;
    options_.write_policy = std::array{WritePolicy::kThrough, WritePolicy::kSelective,
                                       WritePolicy::kBack}[static_cast<size_t>(random_.Below(3))];
    options_.eviction = std::array{EvictionKind::kLru, EvictionKind::kS3Fifo,
                                   EvictionKind::kCost}[static_cast<size_t>(random_.Below(3))];
    options_.promote = random_.Below(4) != 0;
    options_.clock = clock_;
    disk_bytes_max_ = (8 + random_.Below(24)) * bytes;
    Open(std::make_unique<FakeTier>(TierKind::kRedis, clock_, key_bits));
  }

  void Run(int steps) {
    for (step_ = 0; step_ < steps && !testing::Test::HasFailure(); ++step_) {
      SCOPED_TRACE("step " + std::to_string(step_));
      Step();
    }
    Heal();
    CheckAccounts();
    Close();
  }

  // Chunks that went from one place to another: read from a slow tier, written to it, evicted.
  int64_t moves() const { return moves_; }
  int64_t hits() const { return hits_; }
  int64_t faults() const { return faults_; }
  int64_t damaged() const { return damaged_; }
  int64_t collisions() const { return collisions_; }

 private:
  Chain& AnyChain() { return chains_[static_cast<size_t>(random_.Below(std::ssize(chains_)))]; }
  std::span<const ChunkKey> SomeKeys(const Chain& chain) {
    const int64_t first = random_.Below(kLength);
    const int64_t count = 1 + random_.Below(kLength - first);
    return std::span(chain.chunk_keys)
        .subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }

  void Open(std::unique_ptr<FakeTier> redis);
  // What Redis holds outlives the store.
  std::unique_ptr<FakeTier> Close() {
    for (const Pinned& pinned : pinned_) store_->Unpin(pinned.keys);
    pinned_.clear();
    Count();
    store_->Close();
    collisions_ += redis_->calls().collisions;
    EXPECT_EQ(store_->Statistics().pins, 0);
    EXPECT_EQ(redis_->pins(), 0);
    auto redis = redis_->Copy();
    redis_ = nullptr;
    store_.reset();
    return redis;
  }
  void Count() {
    const ChunkStoreStatistics statistics = store_->Statistics();
    for (const TierStatistics& tier : statistics.tiers) moves_ += tier.evicted;
    for (const TierKind tier : kSlowTiers)
      moves_ += statistics.tiers[At(tier)].hits + statistics.tiers[At(tier)].writes;
  }
  void Break() {
    ++faults_;
    is_sound_ = false;
    switch (random_.Below(5)) {
      case 0: {
        const std::array<int, 4> errors = {-EIO, -ENOSPC, -EINTR, 1};
        const auto kind = static_cast<size_t>(random_.Below(4));
        const bool stays = kind < 2 && random_.Below(2) == 0;  // the others are tried again
        files_->FailAt(random_.Below(12), errors[kind], stays);
        break;
      }
      case 1:
        redis_->Change([](auto& script) { script.read = Status(StatusCode::kUnavailable, "x"); });
        break;
      case 2:
        redis_->Change([](auto& script) { script.write = Status(StatusCode::kFull, "x"); });
        break;
      case 3:
        redis_->Change([](auto& script) {
          script.prefix = Status(StatusCode::kTimeout, "x");
          script.knows = false;
        });
        break;
      default:
        redis_->Change([&](auto& script) {
          const Chain& chain = AnyChain();
          script.damaged.insert(chain.chunk_keys[static_cast<size_t>(random_.Below(kLength))]);
        });
    }
  }
  void Heal() {
    files_->FailAt(-1, 0);
    redis_->Change([](auto& script) { script = {}; });
    clock_->Advance(60'000 * kMs);  // breakers close, forgotten pins end
    is_sound_ = true;
  }
  // A bit of a file changes where it lies.
  void FlipOnDisk() {
    const Chain& chain = AnyChain();
    const TestChunk& chunk = chain.chunks[static_cast<size_t>(random_.Below(kLength))];
    const int file = disk_->Open(disk_layout::ChunkPath(kFolder, chunk.id), OpenMode::kRead);
    if (file < 0) return;
    std::byte byte{};
    const int64_t at = random_.Below(chunk.stored->header().total_bytes);
    if (disk_->Read(file, std::span(&byte, 1), at) == 1) {
      byte ^= static_cast<std::byte>(1 << random_.Below(8));
      EXPECT_EQ(disk_->Write(file, std::span(&byte, 1), at), 1);
      ++damaged_;
    }
    disk_->Close(file);
  }

  void Put(Chain& chain) {
    const int64_t count = 1 + random_.Below(kLength);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const auto bytes = chain.chunks[i].stored->bytes();
      ChunkBuffer sealed(static_cast<int64_t>(bytes.size()));
      std::memcpy(sealed.bytes().data(), bytes.data(), bytes.size());
      const auto put = store_->Put(chain.keys, std::move(sealed),
                                   {.recompute_seconds = random_.Uniform(),
                                    .priority = static_cast<int>(random_.Below(101))});
      ASSERT_TRUE(put.ok()) << put.status().ToString();
      chain.may_be_there[i] = true;
      (*put)->Wait(kForEver);
    }
  }
  void Fetch(const Chain& chain) {
    const FetchRequest request = {.keys = &chain.keys, .tokens = chain.tokens, .chunk_tokens = 4};
    const auto fetch = random_.Below(4) == 0 ? store_->Prefetch(request) : store_->Fetch(request);
    ASSERT_TRUE(fetch.ok()) << fetch.status().ToString();
    if (random_.Below(8) == 0) (*fetch)->Cancel();
    (*fetch)->Wait(kForEver);
    for (int64_t i = 0; i < (*fetch)->ready(); ++i, ++hits_) {
      const TestChunk& wanted = chain.chunks[static_cast<size_t>(i)];
      EXPECT_TRUE(IsSame(*(*fetch)->chunk(i), *wanted.stored)) << "wrong bytes, chunk " << i;
      EXPECT_TRUE(chain.may_be_there[static_cast<size_t>(i)]) << "it was removed, chunk " << i;
    }
  }
  void Remove(Chain& chain) {
    const auto keys = SomeKeys(chain);
    const auto removed = store_->Remove(keys);
    if (!is_sound_ || !removed.ok()) return;
    const auto first = static_cast<size_t>(keys.data() - chain.chunk_keys.data());
    std::fill_n(chain.may_be_there.begin() + static_cast<std::ptrdiff_t>(first), keys.size(),
                false);
  }
  void Clear(const Chain& of) {
    const auto cleared = store_->Clear(of.keys);
    if (!is_sound_ || !cleared.ok()) return;
    for (Chain& chain : chains_)
      if (chain.keys.root() == of.keys.root()) chain.may_be_there.assign(kLength, false);
  }
  void Step();
  void CheckAccounts();

  RandomSequence random_;
  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const std::shared_ptr<PowerFileSystem> disk_ = std::make_shared<PowerFileSystem>();
  const std::shared_ptr<FaultyFileSystem> files_ = std::make_shared<FaultyFileSystem>(disk_);
  ChunkStoreOptions options_;
  int64_t disk_bytes_max_ = 0;
  FakeTier* redis_ = nullptr;  // the store's
  std::unique_ptr<ChunkStore> store_;
  std::vector<Chain> chains_;
  struct Pinned {
    const Chain* chain;
    std::span<const ChunkKey> keys;
  };
  std::vector<Pinned> pinned_;
  bool is_sound_ = true;  // no fault since the last Heal
  int step_ = 0;
  int64_t moves_ = 0, hits_ = 0, faults_ = 0, damaged_ = 0, collisions_ = 0;
};

void StoreWalk::Open(std::unique_ptr<FakeTier> redis) {
  DiskTierSetup setup;
  setup.disk.directory = kFolder;
  setup.disk.bytes_max = disk_bytes_max_;
  setup.eviction = options_.eviction;
  setup.clock = clock_;
  setup.files = files_;
  auto disk = DiskTier::Open(setup);
  ASSERT_TRUE(disk.ok()) << disk.status().ToString();
  ASSERT_TRUE((*disk)->AwaitScan(kForEver).ok());
  SlowTiers slow;
  slow[At(TierKind::kDisk)] = *std::move(disk);
  redis_ = redis.get();
  slow[At(TierKind::kRedis)] = std::move(redis);
  auto store = TieredStore::Create(options_, std::move(slow));
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  store_ = *std::move(store);
  ASSERT_TRUE(store_->AddPassport(TestPassport()).ok());
}

void StoreWalk::Step() {
  Chain& chain = AnyChain();
  switch (random_.Below(24)) {
    case 0:
      return Remove(chain);
    case 1:
      return Break();
    case 2:
      return Heal();
    case 3:
      return FlipOnDisk();
    case 4: {
      const auto keys = SomeKeys(chain);
      store_->Pin(keys);
      pinned_.push_back({&chain, keys});
      if (random_.Below(2) != 0) return;
      const auto any = pinned_.begin() + random_.Below(std::ssize(pinned_));
      store_->Unpin(any->keys);
      pinned_.erase(any);
      return;
    }
    case 5:
      return store_->Touch(SomeKeys(chain));
    case 6:
      static_cast<void>(store_->SetTtl(SomeKeys(chain), random_.Below(3) * 1000));
      return clock_->Advance(random_.Below(1500) * kMs);
    case 7:
      if (random_.Below(8) == 0) Clear(chain);
      return;
    case 8:
      static_cast<void>(store_->Verify(kSlowTiers[static_cast<size_t>(random_.Below(2))]));
      static_cast<void>(store_->CollectGarbage(TierKind::kDisk));
      return;
    case 9:  // the next process: what was in RAM alone is lost
      if (random_.Below(3) != 0) return;
      Heal();
      return Open(Close());
    case 10:
      Heal();
      return CheckAccounts();
    case 11:
    case 12:
    case 13:
    case 14:
    case 15:
      return Put(chain);
    default:
      return Fetch(chain);
  }
}

// What a tier says that it holds is what lies in it, once what is under way has come to its end.
void StoreWalk::CheckAccounts() {
  // A breaker that has just closed to a probe may still refuse: such a write is dropped, and told.
  EXPECT_NE(store_->Flush(kForEver).code(), StatusCode::kTimeout);
  for (const TierKind tier : {TierKind::kRam, TierKind::kDisk}) {
    SCOPED_TRACE(TierName(tier));
    bool agrees = false;
    std::string difference;
    for (int tries = 0; tries < 1000 && !agrees; ++tries) {
      const auto listings = store_->List(tier);  // looks, and so finds what was damaged
      const TierStatistics own = store_->Statistics().tiers[At(tier)];
      ASSERT_TRUE(listings.ok()) << listings.status().ToString();
      std::set<ChunkKey> keys;
      int64_t bytes = 0;
      for (const ChunkListing& listing : *listings) {
        bytes += listing.bytes;
        EXPECT_TRUE(keys.insert(listing.key).second) << "listed twice";
      }
      EXPECT_LE(own.bytes, own.bytes_max);
      agrees = own.chunks == std::ssize(*listings) && own.bytes == bytes;
      difference = std::to_string(own.chunks) + " chunks, " + std::to_string(own.bytes) +
                   " bytes of " + std::to_string(keys.size()) + ", " + std::to_string(bytes);
    }
    EXPECT_TRUE(agrees) << difference;
  }
  for (const Chain& chain : chains_) Fetch(chain);
}

TEST(StoreWalk, NothingWrongComesBackAndAccountsAreRight) {
  int64_t moves = 0, hits = 0, faults = 0, damaged = 0;
  for (uint64_t seed = 0; seed < 40 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(SoakSeed(seed)));
    StoreWalk walk(SoakSeed(seed));
    walk.Run(400);
    moves += walk.moves();
    hits += walk.hits();
    faults += walk.faults();
    damaged += walk.damaged();
  }
  ReportFigure("moves", moves);
  EXPECT_GT(moves, 5000);
  EXPECT_GT(hits, 5000);
  EXPECT_GT(faults, 200);
  EXPECT_GT(damaged, 50);
}

// R12: a tier that finds chunks by five bits of their keys, and by no salt, gives the chunk of
// another text or tenant most of the time, as twelve bits do in a store of a hundred thousand
// chunks. No such chunk is served: each that comes back is what was put under its own key.
TEST(StoreWalk, AChunkOfACollidingKeyIsNotServed) {
  int64_t collisions = 0, hits = 0;
  for (uint64_t seed = 0; seed < 40 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(SoakSeed(seed)));
    StoreWalk walk(SoakSeed(seed), /*key_bits=*/5);
    walk.Run(400);
    collisions += walk.collisions();
    hits += walk.hits();
  }
  ReportFigure("collisions", collisions);
  EXPECT_GT(collisions, 1000);  // else the rest would prove nothing
  EXPECT_GT(hits, 3000);
}

}  // namespace
}  // namespace quire
