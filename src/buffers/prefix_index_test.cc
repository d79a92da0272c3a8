#include "buffers/prefix_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/random.h"

namespace quire {
namespace {

using Id = PrefixIndex::Id;

std::shared_ptr<const MaskedTokens> Sequence(std::vector<uint64_t> values, uint16_t type = 0) {
  return std::make_shared<const MaskedTokens>(
      MaskedTokens{.type = type, .values = std::move(values)});
}

// The definition, by looking at everything.
struct NaiveIndex {
  std::map<Id, std::shared_ptr<const MaskedTokens>> sequences;

  static size_t MatchLength(const MaskedTokens& a, const MaskedTokens& b) {
    const size_t length = std::min(a.values.size(), b.values.size());
    const bool equal = a.type == b.type &&
                       std::equal(a.values.begin(), a.values.begin() + length, b.values.begin());
    return equal ? length : 0;
  }
  std::optional<Id> FindOldest(const MaskedTokens& query) const {
    for (const auto& [id, tokens] : sequences) {
      if (MatchLength(*tokens, query) > 0) return id;
    }
    return std::nullopt;
  }
  std::optional<Id> FindLongest(const MaskedTokens& query) const {
    std::optional<Id> best;
    size_t length = 0;
    for (const auto& [id, tokens] : sequences) {
      if (MatchLength(*tokens, query) <= length) continue;
      length = MatchLength(*tokens, query);
      best = id;
    }
    return best;
  }
};

TEST(PrefixIndex, MatchesInBothDirections) {
  PrefixIndex index;
  index.Insert(Sequence({5, 6, 7, 8}), 1);
  index.Insert(Sequence({5, 6}), 2);
  EXPECT_EQ(index.FindOldest({0, {5}}), 1);
  EXPECT_EQ(index.FindOldest({0, {5, 6, 9}}), 2);
  EXPECT_EQ(index.FindLongest({0, {5, 6, 7, 8, 9}}), 1);
  EXPECT_EQ(index.FindOldest({0, {6}}), std::nullopt);
  EXPECT_EQ(index.FindOldest({0, {}}), std::nullopt);
  EXPECT_EQ(index.FindOldest({1, {5}}), std::nullopt) << "another type";
}

TEST(PrefixIndex, AgreesWithTheDefinitionOnRandomWalks) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    RandomSequence random(seed);
    PrefixIndex index;
    NaiveIndex naive;
    Id next_id = 0;
    // Few different tokens make long common beginnings, many make wide nodes.
    const int64_t alphabet = seed % 2 == 0 ? 2 : 5;
    const auto draw = [&] {
      std::vector<uint64_t> values(static_cast<size_t>(1 + random.Below(7)));
      for (uint64_t& value : values) value = static_cast<uint64_t>(random.Below(alphabet));
      return Sequence(std::move(values), static_cast<uint16_t>(random.Below(2)));
    };
    std::vector<std::pair<Id, std::shared_ptr<const MaskedTokens>>> erased;
    for (int step = 0; step < 400; ++step) {
      const int64_t action = random.Below(5);
      if (action < 2 || naive.sequences.empty()) {
        const auto tokens = draw();
        index.Insert(tokens, next_id);
        naive.sequences.emplace(next_id++, tokens);
      } else if (action == 2) {
        auto place = naive.sequences.begin();
        std::advance(place, random.Below(static_cast<int64_t>(naive.sequences.size())));
        index.Erase(*place->second, place->first);
        erased.emplace_back(*place);
        naive.sequences.erase(place);
      } else if (action == 3 && !erased.empty()) {  // put back, with its old id
        index.Insert(erased.back().second, erased.back().first);
        naive.sequences.insert(erased.back());
        erased.pop_back();
      }
      ASSERT_NO_FATAL_FAILURE(index.CheckInvariants());
      for (int query = 0; query < 3; ++query) {
        const auto tokens = draw();
        ASSERT_EQ(index.FindOldest(*tokens), naive.FindOldest(*tokens)) << seed << " " << step;
        ASSERT_EQ(index.FindLongest(*tokens), naive.FindLongest(*tokens)) << seed << " " << step;
      }
    }
    for (const auto& [id, tokens] : naive.sequences) index.Erase(*tokens, id);
    EXPECT_TRUE(index.empty());
  }
}

TEST(PrefixIndex, DoesNotKeepErasedSequences) {
  PrefixIndex index;
  auto longest = Sequence({1, 2, 3, 4, 5, 6, 7, 8});
  const std::weak_ptr<const MaskedTokens> watched = longest;
  index.Insert(longest, 1);
  index.Insert(Sequence({1, 2, 9}), 2);
  index.Insert(Sequence({1, 2, 7}), 3);
  index.Erase(*longest, 1);
  longest = nullptr;
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(index.FindOldest({0, {1, 2}}), 2);
}

}  // namespace
}  // namespace quire
