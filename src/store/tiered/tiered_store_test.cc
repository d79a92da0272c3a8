#include "store/tiered/tiered_store.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/fake_clock.h"
#include "store/testing/test_chain.h"

namespace quire {
namespace {

// A store with RAM for `chunks` test chunks on a clock that stands.
class MemoryStore : public testing::Test {
 protected:
  void Open(int64_t chunks, ChunkStoreOptions options = {}) {
    options.ram.bytes_max = chunks * TestChunkBytes();
    options.clock = clock_;
    Result<std::unique_ptr<ChunkStore>> store = ChunkStore::Open(std::move(options));
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
    ASSERT_TRUE(store_->AddPassport(TestPassport()).ok());
  }
  Status Put(const std::vector<int32_t>& tokens, int64_t i, const TestChunkOptions& options = {}) {
    const auto put = store_->Put(keys_, TestChunk(keys_, tokens, i, options), {});
    if (!put.ok()) return put.status();
    EXPECT_TRUE((*put)->done());
    return (*put)->status();
  }
  void PutChain(const std::vector<int32_t>& tokens) {
    for (int64_t i = 0; i < static_cast<int64_t>(tokens.size()) / kTestBlock; ++i)
      ASSERT_TRUE(Put(tokens, i).ok());
  }
  std::shared_ptr<ChunkFetch> Fetch(const KeySpace& keys, const std::vector<int32_t>& tokens) {
    const auto fetch = store_->Fetch({.keys = &keys, .tokens = tokens, .chunk_tokens = kTestBlock});
    EXPECT_TRUE(fetch.ok()) << fetch.status().ToString();
    EXPECT_TRUE((*fetch)->done());
    return *fetch;
  }
  int64_t Hits(const std::vector<int32_t>& tokens) { return Fetch(keys_, tokens)->ready(); }
  // The first chunk's key.
  std::vector<ChunkKey> KeyOf(const std::vector<int32_t>& tokens) const {
    return keys_.Chain(tokens, kTestBlock).value();
  }

  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const KeySpace keys_ = TestKeys();
  std::unique_ptr<ChunkStore> store_;
};

TEST_F(MemoryStore, AHitIsWhatWasPutForThatPassportSaltAndPrefix) {  // example 22
  Open(16);
  ASSERT_TRUE(store_->AddPassport(TestPassport(DType::kBF16)).ok());
  const std::vector<int32_t> tokens = TokensFrom(1, 12);
  PutChain(tokens);
  const auto fetch = Fetch(keys_, tokens);
  ASSERT_EQ(fetch->ready(), 3);
  const std::vector<ChunkKey> chain = keys_.Chain(tokens, kTestBlock).value();
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(IsTestChunk(*fetch->chunk(i), chain[static_cast<size_t>(i)]));
    EXPECT_EQ(fetch->tier(i), TierKind::kRam);
    EXPECT_TRUE(fetch->chunk(i)
                    ->View({.key = chain[static_cast<size_t>(i)],
                            .fingerprint = keys_.fingerprint(),
                            .now_ms = clock_->WallMs()},
                           ChunkLimits::Of(TestPassport()))
                    ->CheckAll()
                    .ok());
  }
  EXPECT_EQ(fetch->miss(), MissReason::kNone);
  std::vector<int32_t> forked = tokens;
  forked[8] = 99;
  EXPECT_EQ(Hits(forked), 2);
  EXPECT_EQ(Fetch(keys_, forked)->miss(), MissReason::kNotStored);
  EXPECT_EQ(Hits(TokensFrom(9, 8)), 0);
  EXPECT_EQ(Fetch(TestKeys("other"), tokens)->ready(), 0);
  EXPECT_EQ(Fetch(TestKeys("", DType::kBF16), tokens)->ready(), 0);
  EXPECT_EQ(store_->Statistics().fetched_tokens, 12 + 8 + 8);
}

TEST_F(MemoryStore, ATailIsFoundOnlyIfAskedFor) {
  Open(16);
  const std::vector<int32_t> tokens = TokensFrom(1, 6);
  ASSERT_TRUE(Put(tokens, 0).ok());
  ASSERT_TRUE(Put(tokens, 1).ok());
  EXPECT_EQ(Hits(tokens), 1);
  const auto fetch =
      store_->Fetch({.keys = &keys_, .tokens = tokens, .chunk_tokens = kTestBlock, .tail = true});
  EXPECT_EQ((*fetch)->ready(), 2);
  const auto rest = store_->Fetch({.keys = &keys_,
                                   .tokens = tokens,
                                   .chunk_tokens = kTestBlock,
                                   .tail = true,
                                   .first_chunk = 1});
  ASSERT_EQ((*rest)->ready(), 1);
  EXPECT_EQ((*rest)->chunk(0)->header().tokens, TokensFrom(5, 2));
}

TEST_F(MemoryStore, ExtrasTellChunksOfTheSameTokensApart) {
  Open(16);
  const std::vector<int32_t> tokens = TokensFrom(1, 12);
  const std::vector<std::string> image{"", "image a"}, other{"", "image b"};
  for (int64_t i = 0; i < 3; ++i) {
    const std::string_view extras = i == 1 ? std::string_view(image[1]) : std::string_view();
    const auto put =
        store_->Put(keys_, TestChunk(keys_, tokens, i, {.extras = image}), {.extras = extras});
    ASSERT_TRUE(put.ok()) << put.status().ToString();
    ASSERT_TRUE((*put)->status().ok());
  }
  const auto hits = [&](const std::vector<std::string>& extras) {
    const auto fetch = store_->Fetch(
        {.keys = &keys_, .tokens = tokens, .chunk_tokens = kTestBlock, .extras = extras});
    return (*fetch)->ready();
  };
  EXPECT_EQ(hits(image), 3);
  EXPECT_EQ(hits(other), 1);
  EXPECT_EQ(hits({}), 1);
  // The chunk is refused under extras that its key was not made with.
  for (const std::string_view wrong : {"", "image b"}) {
    const auto put =
        store_->Put(keys_, TestChunk(keys_, tokens, 1, {.extras = image}), {.extras = wrong});
    EXPECT_EQ(put.status().code(), StatusCode::kBadArgument);
  }
  const std::vector<std::string> too_many(4, "x");
  EXPECT_EQ(
      store_
          ->Fetch(
              {.keys = &keys_, .tokens = tokens, .chunk_tokens = kTestBlock, .extras = too_many})
          .status()
          .code(),
      StatusCode::kBadArgument);
}

TEST_F(MemoryStore, AGapEndsThePrefix) {  // example 23
  Open(16);
  const std::vector<int32_t> tokens = TokensFrom(1, 12);
  PutChain(tokens);
  const std::vector<ChunkKey> chain = KeyOf(tokens);
  EXPECT_EQ(store_->KnownPrefix(keys_, chain), 3);
  const Result<int64_t> removed = store_->Remove(std::span(chain).subspan(1, 1));
  ASSERT_TRUE(removed.ok());
  EXPECT_EQ(*removed, 1);
  EXPECT_EQ(Hits(tokens), 1);
  EXPECT_EQ(store_->KnownPrefix(keys_, chain), 1);
  EXPECT_EQ(store_->Wanted(keys_, chain), (std::vector<bool>{false, true, false}));
}

TEST_F(MemoryStore, ThePinnedOneStaysAndUnpinningIsNoUse) {  // example 27
  Open(2);
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4), c = TokensFrom(300, 4),
             d = TokensFrom(400, 4);
  PutChain(a);
  PutChain(b);
  EXPECT_EQ(store_->Pin(KeyOf(a)), 1);
  PutChain(c);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(a)), 1);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(b)), 0);
  store_->Unpin(KeyOf(a));
  PutChain(d);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(a)), 0);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(c)), 1);
  EXPECT_EQ(store_->Statistics().tiers[0].evicted, 2);
}

TEST_F(MemoryStore, APriorityDecidesWhoGoesAndCanBeChanged) {
  Open(2, {.priority = 60});
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4), c = TokensFrom(300, 4),
             d = TokensFrom(400, 4);
  PutChain(a);
  PutChain(b);
  EXPECT_EQ(*store_->SetPriority(KeyOf(a), 61), 1);
  PutChain(c);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(a)), 1) << "b was used later and is worth less";
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(b)), 0);
  EXPECT_EQ(*store_->SetPriority(KeyOf(b), 1), 0);
  EXPECT_EQ(*store_->SetPriority(KeyOf(a), 59), 1);
  PutChain(d);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(a)), 0);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(c)), 1);
  for (const int wrong : {-1, 101}) {
    EXPECT_EQ(store_->SetPriority(KeyOf(c), wrong).status().code(), StatusCode::kBadArgument);
  }
}

TEST_F(MemoryStore, PinsAreCountedAndEndByThemselves) {
  Open(1, {.pin_timeout_ms = 1000});
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4);
  PutChain(a);
  EXPECT_EQ(store_->Pin(KeyOf(a)), 1);
  EXPECT_EQ(store_->Pin(KeyOf(a)), 1);
  store_->Unpin(KeyOf(a));
  EXPECT_EQ(Put(b, 0).code(), StatusCode::kFull);
  EXPECT_EQ(store_->Statistics().pins, 1);
  clock_->Advance(1'000'000'000);
  EXPECT_TRUE(Put(b, 0).ok());
  EXPECT_EQ(store_->Statistics().pins, 0);
  EXPECT_EQ(store_->Statistics().forced_unpins, 1);
  store_->Unpin(KeyOf(a));  // its pin is over; nothing happens
}

TEST_F(MemoryStore, WhatAFetchHasStaysUntilItIsGivenBack) {
  Open(1);
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4);
  PutChain(a);
  auto fetch = Fetch(keys_, a);
  EXPECT_EQ(Put(b, 0).code(), StatusCode::kFull);
  const std::shared_ptr<const StoredChunk> chunk = fetch->chunk(0);
  fetch.reset();
  EXPECT_TRUE(Put(b, 0).ok());
  EXPECT_TRUE(IsTestChunk(*chunk, KeyOf(a)[0]));  // gone from the store, not from its user
}

TEST_F(MemoryStore, AnExpiredChunkIsAMiss) {  // example 28
  Open(4);
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4);
  PutChain(a);
  ASSERT_TRUE(Put(b, 0, {.expires_ms = clock_->WallMs() + 50}).ok());
  EXPECT_EQ(*store_->SetTtl(KeyOf(a), 50), 1);
  EXPECT_EQ(*store_->SetTtl(KeyOf(TokensFrom(900, 4)), 50), 0);
  ASSERT_TRUE(store_->SetTtl(KeyOf(b), 1000).ok());  // its own expiry stays
  clock_->Advance(10'000'000);
  EXPECT_EQ(Hits(a), 1);
  EXPECT_EQ(Hits(b), 1);
  clock_->Advance(90'000'000);
  EXPECT_EQ(Hits(a), 0);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(b)), 0);
  EXPECT_GT(*store_->CollectGarbage(TierKind::kRam), 0);
  EXPECT_EQ(store_->Statistics().tiers[0].bytes, 0);
  EXPECT_EQ(store_->Statistics().tiers[0].expired, 2);
}

TEST_F(MemoryStore, AChunkMakesNoRoomAtTheCostOfItsPrefix) {
  Open(2);
  const std::vector<int32_t> tokens = TokensFrom(1, 16);
  EXPECT_TRUE(Put(tokens, 0).ok());
  EXPECT_TRUE(Put(tokens, 1).ok());
  EXPECT_EQ(Put(tokens, 2).code(), StatusCode::kFull);
  EXPECT_EQ(Hits(tokens), 2);
}

TEST_F(MemoryStore, PutRefusesWhatIsNotOfTheKeySpace) {
  Open(4);
  const std::vector<int32_t> tokens = TokensFrom(1, 4);
  const auto code = [&](const KeySpace& keys, ChunkBuffer chunk, const PutOptions& options = {}) {
    return store_->Put(keys, std::move(chunk), options).status().code();
  };
  EXPECT_EQ(code(TestKeys("other"), TestChunk(keys_, tokens, 0)), StatusCode::kBadArgument);
  EXPECT_EQ(code(TestKeys("", DType::kBF16), TestChunk(keys_, tokens, 0)),
            StatusCode::kBadArgument);  // not added
  ASSERT_TRUE(store_->AddPassport(TestPassport(DType::kBF16)).ok());
  EXPECT_EQ(code(TestKeys("", DType::kBF16), TestChunk(keys_, tokens, 0)),
            StatusCode::kIncompatible);
  EXPECT_EQ(code(keys_, ChunkBuffer(100)), StatusCode::kCorrupt);
  EXPECT_EQ(code(keys_, TestChunk(keys_, tokens, 0), {.priority = 101}), StatusCode::kBadArgument);
  // One that costs for ever would stay for ever, and so would all that come after it.
  for (const double wrong :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(code(keys_, TestChunk(keys_, tokens, 0), {.recompute_seconds = wrong}),
              StatusCode::kBadArgument);
  }
  ChunkBuffer damaged = TestChunk(keys_, tokens, 0);
  damaged.bytes()[20] ^= std::byte{1};
  EXPECT_EQ(code(keys_, std::move(damaged)), StatusCode::kCorrupt);
  EXPECT_EQ(code(keys_, TestChunk(keys_, tokens, 0, {.expires_ms = 5})), StatusCode::kNotFound);
  EXPECT_EQ(store_->Statistics().tiers[0].chunks, 0);
}

TEST(ChunkStoreOpen, AKeyThatCanBeGuessedIsRefused) {
  for (const size_t size : {size_t{1}, size_t{15}}) {
    const auto store =
        ChunkStore::Open({.ram = {.bytes_max = 1 << 20}, .mac_key = std::string(size, 'k')});
    EXPECT_EQ(store.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(store.status().ToString().find("at least 16"), std::string::npos);
  }
  for (const size_t size : {size_t{0}, size_t{16}}) {
    EXPECT_TRUE(
        ChunkStore::Open({.ram = {.bytes_max = 1 << 20}, .mac_key = std::string(size, 'k')}).ok());
  }
}

TEST_F(MemoryStore, AStoreWithAKeyTakesSignedChunksOnly) {
  Open(4, {.mac_key = "a secret of 20 b"});
  const std::vector<int32_t> tokens = TokensFrom(1, 4);
  EXPECT_EQ(Put(tokens, 0).code(), StatusCode::kIncompatible);
  EXPECT_EQ(Put(tokens, 0, {.mac_key = "a wrong key of 20"}).code(), StatusCode::kCorrupt);
  EXPECT_TRUE(Put(tokens, 0, {.mac_key = "a secret of 20 b"}).ok());
  EXPECT_EQ(Hits(tokens), 1);
}

TEST_F(MemoryStore, DamageInRamIsFoundByVerify) {
  Open(4);
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4);
  PutChain(a);
  ChunkBuffer damaged = TestChunk(keys_, b, 0);
  damaged.bytes()[damaged.bytes().size() - 70] ^= std::byte{1};
  ASSERT_TRUE(store_->Put(keys_, std::move(damaged), {}).ok());
  EXPECT_EQ(store_->Get(TierKind::kRam, KeyOf(b)[0]).status().code(), StatusCode::kCorrupt);
  EXPECT_TRUE(store_->Get(TierKind::kRam, KeyOf(a)[0]).ok());
  EXPECT_EQ(*store_->Verify(TierKind::kRam), 1);
  EXPECT_EQ(store_->Get(TierKind::kRam, KeyOf(b)[0]).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Hits(b), 0);
  EXPECT_EQ(Hits(a), 1);
  EXPECT_EQ(store_->Statistics().tiers[0].corrupt, 1);
}

TEST_F(MemoryStore, EventsAndListingsTellWhatHappened) {
  Open(1);
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4);
  PutChain(a);
  PutChain(b);
  ASSERT_TRUE(store_->Remove(KeyOf(b)).ok());
  const std::vector<ChunkEvent> events = store_->TakeEvents();
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].kind, ChunkEvent::Kind::kStored);
  EXPECT_EQ(events[0].key, KeyOf(a)[0]);
  EXPECT_EQ(events[1].kind, ChunkEvent::Kind::kEvicted);
  EXPECT_EQ(events[3].kind, ChunkEvent::Kind::kRemoved);
  EXPECT_TRUE(store_->TakeEvents().empty());
  PutChain(a);
  const auto listings = store_->List(TierKind::kRam);
  ASSERT_EQ(listings->size(), 1u);
  EXPECT_EQ((*listings)[0].key, KeyOf(a)[0]);
  EXPECT_EQ((*listings)[0].tokens, kTestBlock);
  EXPECT_EQ((*listings)[0].bytes, TestChunkBytes());
  EXPECT_EQ(*store_->Clear(TestKeys("other")), 0);
  EXPECT_EQ(*store_->Clear(keys_), 1);
}

TEST_F(MemoryStore, QuotasHoldPerSalt) {
  Open(4);
  ASSERT_TRUE(store_->SetQuota(keys_, {.bytes_max = 2 * TestChunkBytes()}).ok());
  for (const int32_t first : {100, 200, 300}) PutChain(TokensFrom(first, 4));
  EXPECT_EQ(Hits(TokensFrom(100, 4)), 0);
  EXPECT_EQ(Hits(TokensFrom(300, 4)), 1);
  ASSERT_TRUE(store_->SetQuota(keys_, {.bytes_max = TestChunkBytes()}).ok());
  EXPECT_EQ(*store_->CollectGarbage(TierKind::kRam), TestChunkBytes());
  EXPECT_EQ(store_->SetQuota(keys_, {.bytes_max = 1, .bytes_guaranteed = 2}).code(),
            StatusCode::kBadArgument);
}

TEST_F(MemoryStore, AClosedStoreAnswersClosed) {
  Open(4);
  const std::vector<int32_t> tokens = TokensFrom(1, 4);
  PutChain(tokens);
  const auto fetch = Fetch(keys_, tokens);
  store_->Close();
  store_->Close();
  EXPECT_EQ(Put(tokens, 0).code(), StatusCode::kClosed);
  EXPECT_EQ(store_->Flush(0).code(), StatusCode::kClosed);
  EXPECT_EQ(store_->KnownPrefix(keys_, KeyOf(tokens)), 0);
  EXPECT_EQ(store_->Pin(KeyOf(tokens)), 0);
  EXPECT_EQ(store_->List(TierKind::kRam).status().code(), StatusCode::kClosed);
  store_.reset();
  EXPECT_TRUE(IsTestChunk(*fetch->chunk(0), KeyOf(tokens)[0]));
}

// There is always a move in a busy store: a remover that waits for all of them waits for ever.
TEST(Removals, MovesThatBeganSinceAreNotWaitedFor) {
  Removals removals;
  auto before = std::make_unique<Removals::Move>(removals);
  const Removals::Scope scope(removals, {});
  const Removals::Move since = removals.BeginMove();
  std::thread remover([&] { scope.AwaitMoves(); });
  before.reset();
  remover.join();
  scope.AwaitMoves();
}

TEST(ChunkStoreOpen, OptionsAreChecked) {
  const auto code = [](const ChunkStoreOptions& options) {
    return ChunkStore::Open(options).status().code();
  };
  EXPECT_EQ(code({}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.ram = {.bytes_max = -1}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.ram = {.bytes_max = 1}, .admit_after = 0}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.ram = {.bytes_max = 1}, .pin_timeout_ms = 0}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.ram = {.bytes_max = 1}, .queue_bytes_max = 0}), StatusCode::kBadArgument);
  const auto refused = ChunkStore::Open({.ram = {.bytes_max = 1}, .fetch_bytes_max = -5});
  EXPECT_NE(refused.status().message().find("fetch_bytes_max is -5"), std::string_view::npos);
}

}  // namespace
}  // namespace quire
