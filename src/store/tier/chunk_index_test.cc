#include "store/tier/chunk_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "store/tier/eviction_policy.h"

namespace quire {
namespace {

ChunkKey KeyOf(int64_t number) {
  ChunkKey key;
  key.digest.bytes[0] = static_cast<uint8_t>(number * 7);
  for (size_t i = 0; i < 8; ++i)
    key.digest.bytes[i + 1] = static_cast<uint8_t>(static_cast<uint64_t>(number) >> (8 * i));
  return key;
}

constexpr int64_t kRootNumber = int64_t{1} << 40;
ChunkKey RootOf(int64_t root) { return KeyOf(kRootNumber + root); }

// Chunk `number` of a root, behind chunk `previous` of it; -1 = the first of its chain.
IndexedChunk ChunkOf(int64_t number, int64_t previous = -1, int64_t bytes = 10, int64_t root = 0) {
  IndexedChunk chunk;
  chunk.id.root = RootOf(root);
  chunk.id.key = KeyOf(number);
  chunk.context = previous < 0 ? chunk.id.root : KeyOf(previous);
  chunk.bytes = bytes;
  chunk.tokens = 16;
  return chunk;
}

std::vector<ChunkKey> KeysOf(const std::vector<int64_t>& numbers) {
  std::vector<ChunkKey> keys;
  for (const int64_t number : numbers) keys.push_back(KeyOf(number));
  return keys;
}

std::optional<std::vector<ChunkKey>> VictimKeys(const ChunkIndex& index, int64_t bytes,
                                                int64_t root = 0, int64_t unknown = 0) {
  const auto victims = index.Victims(RootOf(root), bytes, unknown);
  if (!victims) return std::nullopt;
  std::vector<ChunkKey> keys;
  for (const ChunkId& id : *victims) keys.push_back(id.key);
  return keys;
}

// As an owner does it. False if there is no room.
bool InsertWithRoom(ChunkIndex* index, const IndexedChunk& chunk) {
  const auto victims = index->Victims(chunk.id.root, chunk.bytes);
  if (!victims) return false;
  for (const ChunkId& id : *victims) EXPECT_TRUE(index->Erase(id));
  index->Insert(chunk);
  return true;
}

TEST(ChunkIndex, TheLeastRecentlyUsedGoesFirst) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 30);
  for (const int64_t i : {1, 2, 3}) index->Insert(ChunkOf(i));
  index->Use(ChunkOf(1).id);
  EXPECT_EQ(VictimKeys(*index, 20), KeysOf({2, 3}));
  EXPECT_EQ(VictimKeys(*index, 30), KeysOf({2, 3, 1}));
  EXPECT_EQ(VictimKeys(*index, 31), std::nullopt);
  EXPECT_EQ(index->size(), 3);
}

// As in a folder that other processes use.
TEST(ChunkIndex, WhatIsNotKnownTakesRoom) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 30);
  for (const int64_t i : {1, 2}) index->Insert(ChunkOf(i));
  EXPECT_EQ(VictimKeys(*index, 10), KeysOf({}));
  EXPECT_EQ(VictimKeys(*index, 10, 0, 10), KeysOf({1}));
  EXPECT_EQ(VictimKeys(*index, 10, 0, 21), std::nullopt);
  EXPECT_EQ(VictimKeys(*index, 20, 0, -10), KeysOf({}));
  // A quota is of what is known.
  index->SetQuota(RootOf(0), {.bytes_max = 20});
  EXPECT_EQ(VictimKeys(*index, 10, 0, -10), KeysOf({1}));
}

TEST(ChunkIndex, ASizeMayChange) {
  for (const EvictionKind kind : {EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost}) {
    const auto index = ChunkIndex::Create(kind, 30);
    for (const int64_t i : {1, 2}) index->Insert(ChunkOf(i));
    index->SetBytes(ChunkOf(1).id, 25);
    index->SetBytes(ChunkOf(3).id, 25);
    EXPECT_EQ(index->bytes(), 35);
    EXPECT_EQ(index->bytes_of(RootOf(0)), 35);
    EXPECT_EQ(VictimKeys(*index, 0), KeysOf({1}));
    EXPECT_EQ(index->CheckInvariants(), "");
    EXPECT_TRUE(index->Erase(ChunkOf(1).id));
    EXPECT_EQ(index->bytes(), 10);
    EXPECT_EQ(index->CheckInvariants(), "");
  }
}

TEST(ChunkIndex, AChainGoesFromItsEnd) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 50);
  index->Insert(ChunkOf(1));
  index->Insert(ChunkOf(2, 1));
  index->Insert(ChunkOf(3, 2));
  index->Insert(ChunkOf(4, 1));
  index->Insert(ChunkOf(9));
  index->Use(ChunkOf(3, 2).id);  // the oldest, but 1 and 2 carry it
  EXPECT_EQ(VictimKeys(*index, 10), KeysOf({4}));
  EXPECT_EQ(VictimKeys(*index, 50), KeysOf({4, 9, 3, 2, 1}));
}

TEST(ChunkIndex, AParentThatComesLaterCarriesItsChildren) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 100);
  index->Insert(ChunkOf(2, 1));
  index->Insert(ChunkOf(1));
  EXPECT_EQ(VictimKeys(*index, 90), KeysOf({2}));
  EXPECT_TRUE(index->Erase(ChunkOf(1).id));  // removed by name, not as a victim
  index->Insert(ChunkOf(1));
  EXPECT_EQ(VictimKeys(*index, 90), KeysOf({2}));
  EXPECT_EQ(index->CheckInvariants(), "");
}

TEST(ChunkIndex, PinsKeepAChunkAndWhatItHangsOn) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 30);
  index->Insert(ChunkOf(1));
  index->Insert(ChunkOf(2, 1));
  index->Insert(ChunkOf(3));
  EXPECT_TRUE(index->Pin(ChunkOf(2).id, 1));
  EXPECT_TRUE(index->Pin(ChunkOf(2).id, 1));
  EXPECT_EQ(VictimKeys(*index, 10), KeysOf({3}));
  EXPECT_EQ(VictimKeys(*index, 20), std::nullopt);
  EXPECT_TRUE(index->Pin(ChunkOf(2).id, -1));
  EXPECT_EQ(VictimKeys(*index, 20), std::nullopt);
  EXPECT_TRUE(index->Pin(ChunkOf(2).id, -1));
  EXPECT_FALSE(index->Pin(ChunkOf(2).id, -1));
  EXPECT_EQ(VictimKeys(*index, 20), KeysOf({2, 1}));
  EXPECT_FALSE(index->Pin(ChunkOf(7).id, 1));
}

TEST(ChunkIndex, ThePinnedOneStaysAndUnpinningIsNoUse) {  // example 27
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 20);
  index->Insert(ChunkOf(1));
  index->Insert(ChunkOf(2));
  index->Pin(ChunkOf(1).id, 1);
  EXPECT_TRUE(InsertWithRoom(index.get(), ChunkOf(3)));
  EXPECT_EQ(index->FindKey(KeyOf(2)), nullptr);
  index->Pin(ChunkOf(1).id, -1);
  EXPECT_EQ(VictimKeys(*index, 10), KeysOf({1}));
}

TEST(ChunkIndex, LowPrioritiesGoFirst) {
  for (const EvictionKind kind : {EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost}) {
    const auto index = ChunkIndex::Create(kind, 40);
    const std::vector<int> priorities = {50, 90, 10, 50};
    for (size_t i = 0; i < priorities.size(); ++i) {
      IndexedChunk chunk = ChunkOf(static_cast<int64_t>(i));
      chunk.priority = priorities[i];
      index->Insert(chunk);
    }
    EXPECT_EQ(VictimKeys(*index, 40), KeysOf({2, 0, 3, 1}));
  }
}

TEST(ChunkIndex, AQuotaIsMadeRoomForFromItsOwnSalt) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 100);
  index->SetQuota(RootOf(1), {.bytes_max = 20});
  index->Insert(ChunkOf(1, -1, 10, 0));
  index->Insert(ChunkOf(2, -1, 10, 1));
  index->Insert(ChunkOf(3, -1, 10, 1));
  EXPECT_EQ(VictimKeys(*index, 10, 1), KeysOf({2}));
  EXPECT_EQ(VictimKeys(*index, 21, 1), std::nullopt);
  EXPECT_EQ(VictimKeys(*index, 21, 0), KeysOf({}));
}

TEST(ChunkIndex, OtherSaltsNeverEvictBelowAGuaranteedShare) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 50);
  index->SetQuota(RootOf(1), {.bytes_guaranteed = 20});
  for (const int64_t i : {1, 2, 3}) index->Insert(ChunkOf(i, -1, 10, 1));
  for (const int64_t i : {4, 5}) index->Insert(ChunkOf(i, -1, 10, 2));
  EXPECT_EQ(VictimKeys(*index, 30, 3), KeysOf({1, 4, 5}));
  EXPECT_EQ(VictimKeys(*index, 40, 3), std::nullopt);
  EXPECT_EQ(VictimKeys(*index, 30, 1), KeysOf({1, 2, 3}));  // its own may go
  EXPECT_EQ(index->quota(RootOf(1)).bytes_guaranteed, 20);
  EXPECT_EQ(index->bytes_of(RootOf(1)), 30);
}

TEST(ChunkIndex, OneScanDoesNotEmptyS3Fifo) {
  constexpr int64_t kHot = 50;
  const auto kept = [](EvictionKind kind) {
    const auto index = ChunkIndex::Create(kind, 1000);
    for (int64_t i = 0; i < kHot; ++i) EXPECT_TRUE(InsertWithRoom(index.get(), ChunkOf(i)));
    for (int use = 0; use < 2; ++use)
      for (int64_t i = 0; i < kHot; ++i) index->Use(ChunkOf(i).id);
    for (int64_t i = 0; i < 1000; ++i) EXPECT_TRUE(InsertWithRoom(index.get(), ChunkOf(1000 + i)));
    int64_t count = 0;
    for (int64_t i = 0; i < kHot; ++i) count += index->FindKey(KeyOf(i)) != nullptr;
    return count;
  };
  EXPECT_EQ(kept(EvictionKind::kS3Fifo), kHot);
  EXPECT_EQ(kept(EvictionKind::kLru), 0);
}

TEST(ChunkIndex, S3FifoTakesInWhoComesBackSoon) {
  const auto index = ChunkIndex::Create(EvictionKind::kS3Fifo, 100);
  for (int64_t i = 0; i < 11; ++i) EXPECT_TRUE(InsertWithRoom(index.get(), ChunkOf(i)));
  ASSERT_EQ(index->FindKey(KeyOf(0)), nullptr);
  EXPECT_TRUE(InsertWithRoom(index.get(), ChunkOf(0)));  // to the main queue
  for (int64_t i = 20; i < 40; ++i) EXPECT_TRUE(InsertWithRoom(index.get(), ChunkOf(i)));
  EXPECT_NE(index->FindKey(KeyOf(0)), nullptr);
  EXPECT_EQ(index->CheckInvariants(), "");
}

TEST(ChunkIndex, S3FifoForgetsOldUses) {
  const auto index = ChunkIndex::Create(EvictionKind::kS3Fifo, 40);
  index->Insert(ChunkOf(0));
  for (int use = 0; use < 5; ++use) index->Use(ChunkOf(0).id);
  // Each newcomer is used twice and fills the main queue, so that the hand goes round.
  for (int64_t i = 1; i < 40; ++i) {
    ASSERT_TRUE(InsertWithRoom(index.get(), ChunkOf(i)));
    for (int use = 0; use < 3; ++use) index->Use(ChunkOf(i).id);
  }
  EXPECT_EQ(index->FindKey(KeyOf(0)), nullptr);
}

TEST(ChunkIndex, CostTakesWhatSavesLeastPerByte) {
  const auto index = ChunkIndex::Create(EvictionKind::kCost, 1000);
  const auto insert = [&](int64_t number, double seconds, int64_t bytes) {
    IndexedChunk chunk = ChunkOf(number, -1, bytes);
    chunk.recompute_seconds = seconds;
    index->Insert(chunk);
  };
  insert(1, 4.0, 100);
  insert(2, 1.0, 10);
  insert(3, 3.0, 100);
  insert(4, 5.0, 100);
  EXPECT_EQ(VictimKeys(*index, 1000), KeysOf({3, 1, 4, 2}));
  index->Erase(ChunkOf(3).id);  // evicted: what is used now counts on top of it
  index->Use(ChunkOf(1).id);
  EXPECT_EQ(VictimKeys(*index, 1000), KeysOf({4, 1, 2}));
}

TEST(ChunkIndex, CostGrowsWithThePositionIfNobodyKnowsIt) {
  IndexedChunk early = ChunkOf(1);
  early.first_token = 0;
  IndexedChunk late = ChunkOf(2);
  late.first_token = 8192;
  EXPECT_DOUBLE_EQ(RecomputeSeconds(late), 2 * RecomputeSeconds(early));
  late.recompute_seconds = 3;
  EXPECT_DOUBLE_EQ(RecomputeSeconds(late), 3);
}

TEST(ChunkIndex, ExpiredOnesInOrderButNoPinnedOnes) {
  const auto index = ChunkIndex::Create(EvictionKind::kLru, 100);
  for (const int64_t i : {1, 2, 3, 4}) index->Insert(ChunkOf(i));
  index->SetExpiry(ChunkOf(1).id, 50);
  index->SetExpiry(ChunkOf(2).id, 40);
  index->SetExpiry(ChunkOf(3).id, 60);
  index->Pin(ChunkOf(1).id, 1);
  EXPECT_EQ(index->Expired(39).size(), 0u);
  ASSERT_EQ(index->Expired(60).size(), 2u);
  EXPECT_EQ(index->Expired(60)[0].key, KeyOf(2));
  index->SetExpiry(ChunkOf(2).id, 0);
  EXPECT_EQ(index->Expired(1000).size(), 1u);
}

// ---- Against a model that looks at every chunk for every question

class NaiveIndex {
 public:
  NaiveIndex(EvictionKind kind, int64_t bytes_max)
      : kind_(kind), policy_(EvictionPolicy::Create(kind)), bytes_max_(bytes_max) {}

  struct Entry {
    IndexedChunk chunk;
    Standing standing;
    int64_t pins = 0;
  };

  void Insert(const IndexedChunk& chunk) {
    const auto at = std::find(ghosts_.begin(), ghosts_.end(), chunk.id);
    const bool remembered = at != ghosts_.end();
    if (remembered) ghosts_.erase(at);
    entries_.push_back({chunk, policy_->Enter(chunk, ++stamp_, remembered)});
  }
  Entry* Find(const ChunkId& id) {
    for (Entry& entry : entries_)
      if (entry.chunk.id == id) return &entry;
    return nullptr;
  }
  void Use(const ChunkId& id) {
    if (Entry* entry = Find(id)) policy_->Use(entry->chunk, ++stamp_, &entry->standing);
  }
  bool Erase(const ChunkId& id) {
    const Entry* entry = Find(id);
    if (entry == nullptr) return false;
    const Entry* next = First(entries_, id.root, entry->standing.lane);
    const bool remember = next == entry && policy_->Evicted(entry->standing);
    entries_.erase(entries_.begin() + (entry - entries_.data()));
    if (remember) ghosts_.push_back(id);
    while (ghosts_.size() > entries_.size()) ghosts_.erase(ghosts_.begin());
    return true;
  }
  void SetQuota(const ChunkKey& root, const ChunkQuota& quota) { quotas_[root] = quota; }

  std::optional<std::vector<ChunkId>> Victims(const ChunkKey& root, int64_t bytes) {
    if (bytes > bytes_max_) return std::nullopt;
    std::vector<Entry> left = entries_;
    std::vector<ChunkId> victims;
    const auto take = [&](const Entry* first, const Entry* second) {
      const Entry* victim = Choose(left, first, second);
      if (victim == nullptr) return false;
      victims.push_back(victim->chunk.id);
      left.erase(left.begin() + (victim - left.data()));
      return true;
    };
    while (quotas_[root].bytes_max > 0 && BytesOf(left, root) + bytes > quotas_[root].bytes_max)
      if (!take(First(left, root, kProbation), First(left, root, kMain))) return std::nullopt;
    while (BytesOf(left, std::nullopt) + bytes > bytes_max_)
      if (!take(FirstOfAll(left, root, kProbation), FirstOfAll(left, root, kMain)))
        return std::nullopt;
    return victims;
  }

  std::vector<Entry>& entries() { return entries_; }
  static int64_t BytesOf(const std::vector<Entry>& entries, const std::optional<ChunkKey>& root) {
    int64_t bytes = 0;
    for (const Entry& entry : entries)
      if (!root || entry.chunk.id.root == *root) bytes += entry.chunk.bytes;
    return bytes;
  }

 private:
  static bool IsFree(const std::vector<Entry>& entries, const Entry& entry) {
    if (entry.pins > 0) return false;
    return std::none_of(entries.begin(), entries.end(), [&](const Entry& other) {
      return other.chunk.id.root == entry.chunk.id.root &&
             other.chunk.context == entry.chunk.id.key && other.chunk.id != entry.chunk.id;
    });
  }
  // LRU is written out again; the other policies' standings are compared.
  bool IsBefore(const Entry& a, const Entry& b) const {
    if (a.chunk.priority != b.chunk.priority) return a.chunk.priority < b.chunk.priority;
    if (kind_ != EvictionKind::kLru && a.standing.value != b.standing.value)
      return a.standing.value < b.standing.value;
    return a.standing.order < b.standing.order;
  }
  const Entry* First(const std::vector<Entry>& entries, const ChunkKey& root, int lane) const {
    const Entry* first = nullptr;
    for (const Entry& entry : entries) {
      if (entry.chunk.id.root != root || entry.standing.lane != lane) continue;
      if (IsFree(entries, entry) && (first == nullptr || IsBefore(entry, *first))) first = &entry;
    }
    return first;
  }
  const Entry* FirstOfAll(const std::vector<Entry>& entries, const ChunkKey& mine, int lane) {
    const Entry* first = nullptr;
    for (int64_t r = 0; r < 4; ++r) {
      const ChunkKey root = RootOf(r);
      const Entry* entry = First(entries, root, lane);
      if (entry == nullptr) continue;
      const int64_t rest = BytesOf(entries, root) - entry->chunk.bytes;
      if (root != mine && rest < quotas_[root].bytes_guaranteed) continue;
      if (first == nullptr || IsBefore(*entry, *first)) first = entry;
    }
    return first;
  }
  const Entry* Choose(const std::vector<Entry>& entries, const Entry* probation,
                      const Entry* main) const {
    if (probation == nullptr || main == nullptr) return probation != nullptr ? probation : main;
    if (probation->chunk.priority != main->chunk.priority)
      return probation->chunk.priority < main->chunk.priority ? probation : main;
    int64_t bytes = 0;
    for (const Entry& entry : entries)
      if (entry.standing.lane == kProbation) bytes += entry.chunk.bytes;
    return policy_->PreferredLane(bytes, bytes_max_) == kProbation ? probation : main;
  }

  const EvictionKind kind_;
  const std::unique_ptr<EvictionPolicy> policy_;
  const int64_t bytes_max_;
  uint64_t stamp_ = 0;
  std::vector<Entry> entries_;
  std::vector<ChunkId> ghosts_;
  std::map<ChunkKey, ChunkQuota> quotas_;
};

class ChunkIndexWalk : public testing::TestWithParam<EvictionKind> {};

TEST_P(ChunkIndexWalk, IsWhatTheNaiveModelIs) {
  constexpr int64_t kBytesMax = 300;
  constexpr int kOperations = 100'000;
  const auto index = ChunkIndex::Create(GetParam(), kBytesMax);
  NaiveIndex model(GetParam(), kBytesMax);
  RandomSequence random(7);
  int64_t evicted = 0, refused = 0;
  for (int operation = 0; operation < kOperations; ++operation) {
    const int64_t root = random.Below(4);
    const int64_t place = random.Below(20);
    // Chains that fork: chunk p hangs on chunk (p - 1) / 2 of its root.
    IndexedChunk chunk = ChunkOf(root * 100 + place, place == 0 ? -1 : root * 100 + (place - 1) / 2,
                                 1 + random.Below(25), root);
    chunk.priority = random.Below(8) == 0 ? 20 : 50;
    chunk.first_token = place * 16;
    const int64_t choice = random.Below(100);
    if (choice < 45) {
      if (model.Find(chunk.id) != nullptr) continue;
      const auto victims = index->Victims(chunk.id.root, chunk.bytes);
      ASSERT_EQ(victims, model.Victims(chunk.id.root, chunk.bytes)) << "operation " << operation;
      refused += !victims;
      if (!victims) continue;
      evicted += static_cast<int64_t>(victims->size());
      for (const ChunkId& id : *victims) {
        ASSERT_TRUE(index->Erase(id));
        model.Erase(id);
      }
      index->Insert(chunk);
      model.Insert(chunk);
    } else if (choice < 75) {
      index->Use(chunk.id);
      model.Use(chunk.id);
    } else if (choice < 90) {
      const int change = random.Below(3) == 0 ? 1 : -1;
      NaiveIndex::Entry* entry = model.Find(chunk.id);
      const bool can = entry != nullptr && entry->pins + change >= 0;
      ASSERT_EQ(index->Pin(chunk.id, change), can);
      if (can) entry->pins += change;
    } else if (choice < 94) {
      ASSERT_EQ(index->Erase(chunk.id), model.Erase(chunk.id));
    } else if (choice < 98) {
      const int64_t expiry = random.Below(50);
      index->SetExpiry(chunk.id, expiry);
      if (NaiveIndex::Entry* entry = model.Find(chunk.id)) entry->chunk.expires_ms = expiry;
    } else {
      const ChunkQuota quota = {.bytes_max = random.Below(2) * random.Below(200),
                                .bytes_guaranteed = random.Below(2) * random.Below(90)};
      index->SetQuota(chunk.id.root, quota);
      model.SetQuota(chunk.id.root, quota);
    }
    if (operation % 16 != 0) continue;
    ASSERT_EQ(index->CheckInvariants(), "") << "operation " << operation;
    ASSERT_EQ(index->size(), static_cast<int64_t>(model.entries().size()));
    ASSERT_EQ(index->bytes(), NaiveIndex::BytesOf(model.entries(), std::nullopt));
    ASSERT_LE(index->bytes(), kBytesMax);
    ASSERT_EQ(index->bytes_of(chunk.id.root), NaiveIndex::BytesOf(model.entries(), chunk.id.root));
    ASSERT_EQ(static_cast<int64_t>(index->All().size()), index->size());
    const size_t expired = static_cast<size_t>(std::count_if(
        model.entries().begin(), model.entries().end(), [](const NaiveIndex::Entry& entry) {
          return entry.pins == 0 && entry.chunk.expires_ms != 0 && entry.chunk.expires_ms <= 25;
        }));
    ASSERT_EQ(index->Expired(25).size(), expired);
  }
  EXPECT_GT(evicted, 1000);
  EXPECT_GT(refused, 100);
}

INSTANTIATE_TEST_SUITE_P(Policies, ChunkIndexWalk,
                         testing::Values(EvictionKind::kLru, EvictionKind::kS3Fifo,
                                         EvictionKind::kCost),
                         [](const testing::TestParamInfo<EvictionKind>& tested) {
                           return std::string(tested.param == EvictionKind::kLru      ? "Lru"
                                              : tested.param == EvictionKind::kS3Fifo ? "S3Fifo"
                                                                                      : "Cost");
                         });

}  // namespace
}  // namespace quire
