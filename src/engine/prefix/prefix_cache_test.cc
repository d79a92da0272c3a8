// The prefix cache over the real cache. The oracle is a list of the retained texts that
// is searched through.
#include "engine/prefix/prefix_cache.h"

#include <gtest/gtest.h>

#include <iterator>
#include <numeric>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/random.h"
#include "base/testing/fake_clock.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

constexpr int64_t kDim = 4;  // of the one head of the one layer

struct Fixture {
  explicit Fixture(int64_t pages = 1000, int64_t page_size = 4, int64_t sequences_max = 50,
                   int64_t window = 0)
      : owned(MakeCache(pages, page_size, window)),
        kv(*owned),
        prefixes(&kv, page_size, {.sequences = sequences_max, .tokens = 1 << 20}, clock) {}

  static std::unique_ptr<AttentionKVCache> MakeCache(int64_t pages, int64_t page_size,
                                                     int64_t window) {
    AttentionKVCacheOptions options;
    options.layers = {{.num_qo_heads = 1,
                       .num_kv_heads = 1,
                       .qk_head_dim = kDim,
                       .v_head_dim = kDim,
                       .window = window}};
    options.max_num_sequences = 100;
    options.token_capacity = (pages - 1) * page_size;
    options.max_pop = 0;
    options.prefill_chunk_size = 100;
    options.page_size = page_size;
    options.runner = CreateThreadPool(1).value();
    return *AttentionKVCache::Create(options);
  }

  // A sequence of `length` tokens, the first `shared` of them those of `parent`.
  int64_t MakeSequence(int64_t length, int64_t parent = -1, int64_t shared = 0) {
    const int64_t id = next_id++;
    EXPECT_TRUE((shared == 0 ? kv.AddSequence(id) : kv.ForkSequence(parent, id, shared)).ok());
    const int64_t more = length - shared;
    if (more == 0) return id;
    const Status begun = kv.BeginForward({&id, 1}, {&more, 1});
    EXPECT_TRUE(begun.ok()) << begun.ToString();
    std::vector<float> values(more * 3 * kDim);
    const TensorView qkv(values.data(), DType::kF32, {more, 3, kDim});
    std::vector<float> outputs(more * kDim);
    const TensorView o(outputs.data(), DType::kF32, {more, 1, kDim});
    EXPECT_TRUE(kv.AttentionWithFusedQKV(0, qkv, o, 1).ok());
    EXPECT_TRUE(kv.EndForward().ok());
    return id;
  }
  int64_t Retain(const Tokens& tokens) {
    const int64_t id = MakeSequence(static_cast<int64_t>(tokens.size()));
    prefixes.Retain(id, tokens);
    prefixes.CheckInvariants();
    return id;
  }

  const std::shared_ptr<FakeClock> clock = std::make_shared<FakeClock>();
  std::unique_ptr<AttentionKVCache> owned;
  AttentionKVCache& kv;
  PrefixCache prefixes;
  int64_t next_id = 0;
};

TEST(PrefixCache, CommonPrefixStopsAtTheFirstDifferenceOrEnd) {
  EXPECT_EQ(CommonPrefix(Tokens{1, 2, 3}, Tokens{1, 2, 4}), 2);
  EXPECT_EQ(CommonPrefix(Tokens{1, 2, 3}, Tokens{1, 2}), 2);
  EXPECT_EQ(CommonPrefix(Tokens{1, 2}, Tokens{1, 2, 3}), 2);
  EXPECT_EQ(CommonPrefix(Tokens{}, Tokens{1}), 0);
}

TEST(PrefixCache, FindsTheLongestMatchOfMany) {
  Fixture fixture;
  const int64_t a = fixture.Retain({1, 2, 3, 4, 5});
  const int64_t b = fixture.Retain({1, 2, 9, 9});
  const int64_t c = fixture.Retain({7});
  const auto expect = [&](const Tokens& tokens, int64_t id, int64_t length) {
    const PrefixMatch match = fixture.prefixes.Find(tokens);
    EXPECT_EQ(match.length, length);
    EXPECT_EQ(match.sequence_id, id);
  };
  expect({1, 2, 3, 4, 8}, a, 4);
  expect({1, 2, 3, 4, 5, 6}, a, 5);
  expect({1, 2, 9}, b, 3);
  expect({7, 7, 7}, c, 1);
  expect({8}, -1, 0);
  expect({}, -1, 0);
  EXPECT_EQ(fixture.prefixes.Find(Tokens{1, 2}).length, 2);
}

TEST(PrefixCache, KeepsNoPrefixOfAnother) {
  Fixture fixture;
  const int64_t shorter = fixture.Retain({1, 2, 3});
  const int64_t longer = fixture.Retain({1, 2, 3, 4});
  EXPECT_FALSE(fixture.kv.HasSequence(shorter));
  const int64_t again = fixture.Retain({1, 2});
  EXPECT_FALSE(fixture.kv.HasSequence(again));
  const int64_t same = fixture.Retain({1, 2, 3, 4});
  EXPECT_FALSE(fixture.kv.HasSequence(same));
  EXPECT_TRUE(fixture.kv.HasSequence(longer));
  EXPECT_EQ(fixture.prefixes.sequence_count(), 1);
  EXPECT_EQ(fixture.prefixes.token_count(), 4);
  EXPECT_EQ(fixture.prefixes.page_count_max(), 1);
}

// A window of six tokens, pages of four.
TEST(PrefixCache, FindsTheLongestPrefixThatHasNotSlid) {
  Fixture fixture(1000, 4, 50, 6);
  Tokens text(40);
  std::iota(text.begin(), text.end(), 0);
  const auto first = [&](int64_t length) { return Tokens(text.begin(), text.begin() + length); };
  const int64_t shorter = fixture.Retain(first(10));
  const int64_t longer = fixture.Retain(first(30));
  EXPECT_TRUE(fixture.kv.HasSequence(shorter)) << "a prefix of another, but not to be had there";
  const auto expect = [&](const Tokens& tokens, int64_t id, int64_t length) {
    const PrefixMatch match = fixture.prefixes.Find(tokens);
    EXPECT_EQ(match.sequence_id, id) << tokens.size();
    EXPECT_EQ(match.length, length) << tokens.size();
  };
  expect(text, longer, 30);
  expect(first(20), shorter, 10);  // `longer` has slid past 20
  expect(first(3), -1, 0);         // and both past 3
  const int64_t same = fixture.Retain(first(30));
  EXPECT_FALSE(fixture.kv.HasSequence(same));
}

TEST(PrefixCache, GivesUpWindowedSequencesThatCannotBeCut) {
  Fixture fixture(12, 4, 50, 6);
  fixture.Retain(Tokens(30, 1));
  const int64_t kept = fixture.Retain(Tokens(5, 2));
  fixture.prefixes.Evict(10);
  fixture.prefixes.CheckInvariants();
  EXPECT_EQ(fixture.prefixes.sequence_count(), 1);
  EXPECT_TRUE(fixture.kv.HasSequence(kept));
}

TEST(PrefixCache, AnEmptySequenceIsRemoved) {
  Fixture fixture;
  fixture.Retain({});
  EXPECT_TRUE(fixture.kv.Empty());
  EXPECT_TRUE(fixture.prefixes.empty());
}

TEST(PrefixCache, EvictsTheTailOfTheLeastRecentlyUsed) {
  Fixture fixture(7);
  const int64_t a = fixture.Retain(Tokens(10, 1));  // 3 pages
  const int64_t b = fixture.Retain(Tokens(12, 2));  // 3 pages
  fixture.prefixes.Evict(1);
  EXPECT_EQ(fixture.prefixes.token_count(), 22) << "one page is free as it is";
  fixture.prefixes.Evict(2);
  EXPECT_EQ(*fixture.kv.GetSequenceLength(a), 8);
  fixture.prefixes.CheckInvariants();
  fixture.prefixes.Touch(a);
  fixture.prefixes.Evict(4);
  EXPECT_EQ(*fixture.kv.GetSequenceLength(b), 4);
  EXPECT_EQ(*fixture.kv.GetSequenceLength(a), 8);
  fixture.prefixes.Evict(6);
  EXPECT_FALSE(fixture.kv.HasSequence(b));
  EXPECT_EQ(*fixture.kv.GetSequenceLength(a), 4);
  fixture.prefixes.Evict(100);
  EXPECT_TRUE(fixture.kv.Empty());
  EXPECT_TRUE(fixture.prefixes.empty());
}

// Salt "a" has a part of 3 pages of 12.
TEST(PrefixCache, GivesUpTheKVOfAPartLast) {
  Fixture fixture(12);
  const auto retain = [&](int64_t tokens, int32_t first, const std::string& salt) {
    const int64_t id = fixture.MakeSequence(tokens);
    fixture.prefixes.Retain(id, Tokens(static_cast<size_t>(tokens), first), {.salt = salt});
    return id;
  };
  const int64_t before = retain(8, 1, "a");  // 2 pages, of before the part was set
  fixture.prefixes.SetPart("a", 3);
  const int64_t within = retain(4, 2, "a");  // 1 page
  const int64_t other = retain(16, 3, "b");  // 4 pages; 5 are free
  fixture.prefixes.CheckInvariants();
  fixture.prefixes.Evict(7);
  EXPECT_EQ(*fixture.kv.GetSequenceLength(other), 8) << "though it was used last";
  fixture.prefixes.Evict(9);
  EXPECT_FALSE(fixture.kv.HasSequence(other));
  EXPECT_TRUE(fixture.kv.HasSequence(before));
  EXPECT_TRUE(fixture.kv.HasSequence(within));
  fixture.prefixes.CheckInvariants();

  // Beyond its part a salt gives what is beyond, its oldest first, and not more.
  const int64_t beyond = retain(12, 4, "a");  // 3 pages: 6 of "a"
  const int64_t last = retain(8, 5, "b");     // 2 pages; 4 are free
  fixture.prefixes.Evict(6);
  EXPECT_FALSE(fixture.kv.HasSequence(before));
  EXPECT_TRUE(fixture.kv.HasSequence(within));
  fixture.prefixes.Evict(9);
  EXPECT_FALSE(fixture.kv.HasSequence(within));
  EXPECT_EQ(*fixture.kv.GetSequenceLength(beyond), 12);
  EXPECT_FALSE(fixture.kv.HasSequence(last));
  fixture.prefixes.CheckInvariants();

  fixture.prefixes.Evict(100);  // nothing else is left
  EXPECT_TRUE(fixture.kv.Empty());
  fixture.prefixes.CheckInvariants();
  fixture.prefixes.SetPart("a", 0);
  const int64_t plain = retain(8, 6, "a");
  const int64_t newer = retain(8, 7, "b");
  fixture.prefixes.Evict(10);
  EXPECT_FALSE(fixture.kv.HasSequence(plain));
  EXPECT_TRUE(fixture.kv.HasSequence(newer));
}

TEST(PrefixCache, GivesUpWhatHasALeaseBehindAllOthers) {
  Fixture fixture;
  PrefixCache& prefixes = fixture.prefixes;
  prefixes.SetLeaseLimits({.leases = 2, .pages = 100});
  const int64_t leased = fixture.Retain(Tokens(8, 1));
  const int64_t later = fixture.Retain(Tokens(8, 2));
  prefixes.AddLease(Tokens(8, 1), {}, kNever);
  prefixes.AddLease(Tokens(8, 2), {}, kNever);
  const int64_t plain = fixture.Retain(Tokens(8, 3));
  prefixes.CheckInvariants();
  EXPECT_EQ(prefixes.lease_count(), 2);
  EXPECT_EQ(prefixes.leased_pages(), 4);
  const int64_t free = fixture.kv.GetNumAvailablePages();
  prefixes.Touch(leased);
  prefixes.Evict(free + 2);
  EXPECT_FALSE(fixture.kv.HasSequence(plain));
  EXPECT_EQ(prefixes.lease_count(), 2);
  prefixes.Evict(free + 3);
  prefixes.CheckInvariants();
  EXPECT_EQ(*fixture.kv.GetSequenceLength(leased), 4) << "the oldest lease, whatever was used";
  EXPECT_EQ(*fixture.kv.GetSequenceLength(later), 8);
  EXPECT_EQ(prefixes.lease_count(), 1);
  prefixes.Evict(free + 6);
  EXPECT_TRUE(fixture.kv.Empty()) << "no lease keeps pages from others";
  EXPECT_EQ(prefixes.lease_counts().given_up, 2);
}

// The part that a salt keeps goes behind leases, those of the salt itself as well.
TEST(PrefixCache, ALeaseTakesNothingFromAPart) {
  Fixture fixture;
  PrefixCache& prefixes = fixture.prefixes;
  prefixes.SetLeaseLimits({.leases = 5, .pages = 100});
  const auto retain = [&](int32_t first, const std::string& salt) {
    const int64_t id = fixture.MakeSequence(8);
    prefixes.Retain(id, Tokens(8, first), {.salt = salt});
    return id;
  };
  prefixes.SetPart("a", 4);
  const int64_t kept = retain(1, "a"), kept_and_leased = retain(2, "a"), leased = retain(3, "b");
  prefixes.AddLease(Tokens(8, 2), {.salt = "a"}, kNever);
  prefixes.AddLease(Tokens(8, 3), {.salt = "b"}, kNever);
  prefixes.CheckInvariants();
  prefixes.Evict(fixture.kv.GetNumAvailablePages() + 2);
  prefixes.CheckInvariants();
  EXPECT_TRUE(fixture.kv.HasSequence(kept));
  EXPECT_TRUE(fixture.kv.HasSequence(kept_and_leased));
  EXPECT_FALSE(fixture.kv.HasSequence(leased));
  EXPECT_EQ(prefixes.lease_count(), 0);
}

TEST(PrefixCache, ALeaseEndsOnce) {
  Fixture fixture;
  PrefixCache& prefixes = fixture.prefixes;
  prefixes.SetLeaseLimits({.leases = 5, .pages = 6});
  const Tokens text = {1, 2, 3, 4, 5};
  const auto first = [&](size_t count) { return std::span(text).first(count); };
  prefixes.AddLease(text, {}, kNever);
  EXPECT_EQ(prefixes.lease_count(), 0) << "nothing is retained";
  fixture.Retain(text);
  prefixes.AddLease(Tokens{1, 2, 3, 4, 5, 6}, {}, kNever);
  EXPECT_EQ(prefixes.lease_count(), 0) << "not to the end";
  prefixes.AddLease(text, {}, kNever);
  prefixes.AddLease(text, {}, 0);
  EXPECT_EQ(prefixes.leased_pages(), 2) << "two leases of one sequence";
  prefixes.EndLease(first(3), {}, 0);
  prefixes.EndLease(text, {.salt = "other"}, 0);
  prefixes.EndLease(Tokens{1, 2, 3, 9}, {}, 0);
  EXPECT_EQ(prefixes.lease_count(), 2) << "nobody has asked for these tokens";
  prefixes.EndLease(first(4), {}, 0);
  EXPECT_EQ(prefixes.lease_counts().used, 1);
  EXPECT_EQ(prefixes.lease_count(), 1);
  prefixes.EndOverdueLeases();
  EXPECT_EQ(prefixes.lease_counts().overdue, 1);
  EXPECT_EQ(prefixes.lease_count(), 0);

  prefixes.AddLease(text, {}, kNever);
  fixture.Retain({1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(prefixes.leased_pages(), 3) << "of the longer text that has taken its place";
  fixture.Retain(Tokens(17, 3));
  prefixes.AddLease(Tokens(17, 3), {}, kNever);
  EXPECT_EQ(prefixes.lease_count(), 1) << "the older one made room";
  EXPECT_EQ(prefixes.leased_pages(), 5);
  EXPECT_EQ(prefixes.lease_counts().given_up, 1);
  prefixes.CheckInvariants();
  prefixes.EndLeases();
  EXPECT_EQ(prefixes.lease_counts().given_up, 2);
  prefixes.CheckInvariants();
}

// A peer that asks before the lease begins does not ask again: such a lease would live for nothing.
TEST(PrefixCache, ALeaseOfWhatWasAskedForBeforeIsUsedAtOnce) {
  constexpr int64_t kUntil = 1000;
  Fixture fixture;
  PrefixCache& prefixes = fixture.prefixes;
  prefixes.SetLeaseLimits({.leases = 2, .pages = 100});
  const Tokens text = {1, 2, 3, 4, 5};
  fixture.Retain(text);
  const std::span<const int32_t> but_the_last = std::span(text).first(4);
  const auto lease_lives = [&](const PrefixSpace& space = {}) {
    const int64_t before = prefixes.lease_counts().used;
    prefixes.AddLease(text, space, kNever);
    const bool lives = prefixes.lease_count() == 1;
    EXPECT_EQ(prefixes.lease_counts().used, before + (lives ? 0 : 1));
    prefixes.EndLeases();
    prefixes.CheckInvariants();
    return lives;
  };
  for (const std::span<const int32_t> asked : {but_the_last, std::span<const int32_t>(text)}) {
    prefixes.EndLease(asked, {}, kUntil);
    EXPECT_FALSE(lease_lives());
    EXPECT_TRUE(lease_lives()) << "each that asks ends one";
  }
  prefixes.EndLease(text, {.salt = "other"}, kUntil);
  prefixes.EndLease(std::span(text).first(3), {}, kUntil);
  EXPECT_TRUE(lease_lives()) << "others have asked, or for other tokens";
  prefixes.EndLease(Tokens{1, 2, 3, 9}, {}, kUntil);
  EXPECT_TRUE(lease_lives());
  prefixes.EndLease(but_the_last, {}, kUntil);
  fixture.clock->Advance(kUntil);
  EXPECT_TRUE(lease_lives()) << "too long ago";
  for (const int32_t other : {6, 7}) prefixes.EndLease(Tokens{other}, {}, kNever);
  prefixes.EndLease(but_the_last, {}, kNever);
  EXPECT_FALSE(lease_lives()) << "the oldest one made room";
  prefixes.EndLease(but_the_last, {}, kNever);
  for (const int32_t other : {6, 7}) prefixes.EndLease(Tokens{other}, {}, kNever);
  EXPECT_TRUE(lease_lives()) << "it was the oldest";
}

// Parts and leases come, change and go; CheckInvariants finds the next victim by looking at all.
TEST(PrefixCache, GivesUpTheOldestBeyondItsPartWhateverParts) {
  RandomSequence random(11);
  Fixture fixture(60);
  fixture.prefixes.SetLeaseLimits({.leases = 3, .pages = 12});
  const std::string salts[] = {"", "a", "b", "c"};
  Tokens leased;
  std::string leased_salt;
  for (int step = 0; step < 1500; ++step) {
    const std::string& salt = salts[random.Below(4)];
    const size_t length = 1 + random.Below(30);
    const Tokens text(length, static_cast<int32_t>(random.Below(6)));
    switch (random.Below(8)) {
      case 0:
        fixture.prefixes.SetPart(salt, static_cast<int64_t>(random.Below(3)) * 6);
        break;
      case 1:
        fixture.prefixes.Touch(static_cast<int64_t>(random.Below(fixture.next_id + 1)));
        break;
      case 2:
        fixture.prefixes.Evict(static_cast<int64_t>(random.Below(60)));
        break;
      case 3:
        fixture.prefixes.EndLease(leased, {.salt = leased_salt}, 0);
        break;
      case 4:
        fixture.prefixes.EndOverdueLeases();
        break;
      default:
        fixture.prefixes.Evict(8);
        const int64_t id = fixture.MakeSequence(std::ssize(text));
        fixture.prefixes.Retain(id, text, {.salt = salt});
        if (random.Below(2) == 0) break;
        fixture.prefixes.AddLease(text, {.salt = salt}, random.Below(2) == 0 ? 0 : kNever);
        leased = text;
        leased_salt = salt;
    }
    fixture.prefixes.CheckInvariants();
  }
  const PrefixCache::LeaseCounts& ended = fixture.prefixes.lease_counts();
  EXPECT_GT(ended.used, 10);
  EXPECT_GT(ended.overdue, 10);
  EXPECT_GT(ended.given_up, 10);
  fixture.prefixes.Evict(100);
  EXPECT_TRUE(fixture.kv.Empty());
}

TEST(PrefixCache, DoesNotCutWherePagesAreSharedAndNothingIsWon) {
  Fixture fixture(6);
  const int64_t running = fixture.MakeSequence(8);  // 2 pages, held by the fork too
  const int64_t fork = fixture.MakeSequence(8, running, 8);
  fixture.prefixes.Retain(fork, Tokens(8, 1));
  const int64_t other = fixture.Retain(Tokens(8, 2));  // 2 pages
  fixture.prefixes.Evict(3);
  EXPECT_FALSE(fixture.kv.HasSequence(fork));
  EXPECT_EQ(*fixture.kv.GetSequenceLength(other), 4);
  EXPECT_EQ(fixture.kv.GetNumAvailablePages(), 3);
}

TEST(PrefixCache, ATextThatIsCutToAPrefixOfItsNeighbourGoes) {
  for (const int32_t next : {0, 9}) {
    Fixture fixture(7);
    fixture.Retain({1, 1, 1, 1, 5, 5});
    const int64_t kept = fixture.Retain({1, 1, 1, 1, next, 5, 5, 5});
    fixture.prefixes.Evict(4);
    fixture.prefixes.CheckInvariants();
    EXPECT_EQ(fixture.prefixes.sequence_count(), 1);
    EXPECT_TRUE(fixture.kv.HasSequence(kept));
  }
}

TEST(PrefixCache, RetainsNoMoreSequencesThanItMay) {
  Fixture fixture(1000, 4, 3);
  for (int32_t i = 0; i < 10; ++i) {
    fixture.Retain({i});
    EXPECT_LE(fixture.prefixes.sequence_count(), 3);
  }
  EXPECT_EQ(fixture.prefixes.Find(Tokens{6}).length, 0);
  EXPECT_EQ(fixture.prefixes.Find(Tokens{7}).length, 1);
}

TEST(PrefixCache, RandomWalkAgreesWithAList) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomSequence random(seed);
    Fixture fixture(60, 1 + random.Below(5), 1000);
    std::vector<std::pair<int64_t, Tokens>> all;  // everything that was retained, gone or not
    const auto random_text = [&] {
      Tokens tokens(random.Below(13));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random.Below(2));
      return tokens;
    };
    for (int step = 0; step < 300; ++step) {
      if (random.Below(3) == 0) {
        fixture.prefixes.Evict(random.Below(61));
      } else {
        fixture.prefixes.Evict(15);
        const Tokens tokens = random_text();
        all.emplace_back(fixture.Retain(tokens), tokens);
      }
      fixture.prefixes.CheckInvariants();
      const Tokens query = random_text();
      int64_t longest = 0;
      for (const auto& [id, tokens] : all) {
        const Result<int64_t> held = fixture.kv.GetSequenceLength(id);
        if (held.ok()) longest = std::max(longest, std::min(*held, CommonPrefix(query, tokens)));
      }
      const PrefixMatch match = fixture.prefixes.Find(query);
      ASSERT_EQ(match.length, longest);
      if (longest > 0) {
        ASSERT_TRUE(fixture.kv.HasSequence(match.sequence_id));
      }
    }
  }
}

// Random texts, with windows and without, are cut at each of their tokens.
TEST(PrefixCache, AFamilyFindsWhatIsFoundOneByOne) {
  for (const int64_t window : {0, 3}) {
    RandomSequence random(static_cast<uint64_t>(window));
    Fixture fixture(1000, 2, 90, window);
    const auto random_text = [&] {
      Tokens tokens(static_cast<size_t>(1 + random.Below(12)));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random.Below(2));
      return tokens;
    };
    int64_t found = 0;
    for (int i = 0; i < 60; ++i) fixture.Retain(random_text());
    for (int i = 0; i < 200; ++i) {
      const Tokens text = random_text();
      const int64_t longest = fixture.prefixes.Find(text).length;
      for (size_t cut = 0; cut < text.size(); ++cut) {
        const PrefixCache::Family family =
            fixture.prefixes.FamilyOf(std::span(text).first(cut), {});
        const PrefixMatch match = family.Find(std::span(text).subspan(cut));
        const bool goes_on = longest > static_cast<int64_t>(cut);
        ASSERT_EQ(match.length, goes_on ? longest : 0) << "window " << window << " cut " << cut;
        ASSERT_EQ(fixture.kv.HasSequence(match.sequence_id), goes_on);
        found += goes_on ? 1 : 0;
      }
    }
    EXPECT_GT(found, 200);
    EXPECT_EQ(fixture.prefixes.FamilyOf(Tokens{0}, {.salt = "other"}).Find(Tokens{1}).length, 0);
  }
}

// Blended prompts have thousands of documents behind one anchor, which may be long.
TEST(PrefixCache, ABeginningIsComparedOnceForAllThatGoesOn) {
  constexpr int64_t kBeginning = 90, kTexts = 40;
  Fixture fixture;
  const Tokens beginning(kBeginning, 5);
  std::vector<Tokens> rests;
  for (int32_t i = 0; i < kTexts; ++i) {
    const Tokens& rest = rests.emplace_back(Tokens{i, 1, 2, 3});
    Tokens text = beginning;
    text.insert(text.end(), rest.begin(), rest.end());
    fixture.Retain(text);
  }
  const PrefixCache::Family family = fixture.prefixes.FamilyOf(beginning, {});
  for (const Tokens& rest : rests) EXPECT_EQ(family.Find(rest).length, kBeginning + 4);
  EXPECT_LT(family.compared(), kTexts * 30) << "a binary search among texts of four tokens";
}

TEST(PrefixCache, SpacesShareNothing) {
  Fixture fixture;
  const PrefixSpace spaces[] = {{}, {.salt = "a"}, {.salt = "b"}, {.salt = "a", .long_rope = true}};
  std::vector<int64_t> ids;
  for (const PrefixSpace& space : spaces) {
    ids.push_back(fixture.MakeSequence(6));
    fixture.prefixes.Retain(ids.back(), {1, 2, 3, 4, 5, 6}, space);
    fixture.prefixes.CheckInvariants();
  }
  EXPECT_EQ(fixture.prefixes.sequence_count(), 4);
  for (size_t i = 0; i < ids.size(); ++i) {
    const PrefixMatch match = fixture.prefixes.Find(Tokens{1, 2, 3}, spaces[i]);
    EXPECT_EQ(match.sequence_id, ids[i]);
    EXPECT_EQ(match.length, 3);
  }
  EXPECT_EQ(fixture.prefixes.Find(Tokens{1, 2, 3}, {.salt = "c"}).length, 0);
  EXPECT_EQ(fixture.prefixes.Find(Tokens{1, 2, 3}, {.salt = "b", .long_rope = true}).length, 0);
  fixture.prefixes.Evict(1000);
  EXPECT_TRUE(fixture.prefixes.empty());
  fixture.prefixes.CheckInvariants();
}

TEST(PrefixCache, TellsBeforeItGivesUp) {
  Fixture fixture(8, 4, 2);
  std::vector<std::pair<int64_t, int64_t>> told;  // sequence, tokens it had
  fixture.prefixes.before_eviction = [&](const PrefixCache::Retained& retained) {
    EXPECT_EQ(*fixture.kv.GetSequenceLength(retained.sequence_id),
              static_cast<int64_t>(retained.tokens.size()));
    told.emplace_back(retained.sequence_id, static_cast<int64_t>(retained.tokens.size()));
    retained.stored = static_cast<int64_t>(retained.tokens.size());
  };
  const int64_t first = fixture.Retain(Tokens(10, 1));
  fixture.prefixes.Evict(6);  // of 8 pages; it holds 3
  EXPECT_EQ(told, (std::vector<std::pair<int64_t, int64_t>>{{first, 10}}));
  fixture.prefixes.CheckInvariants();  // what is stored is cut along
  fixture.Retain({2});
  fixture.Retain({3});  // one sequence too many
  EXPECT_EQ(told.size(), 2U);
  int64_t seen = 0;
  fixture.prefixes.ForEach([&](const PrefixCache::Retained& retained) {
    EXPECT_EQ(retained.stored, 0);
    ++seen;
  });
  EXPECT_EQ(seen, 2);
}

}  // namespace
}  // namespace quire
