// DocumentIndex: the worked example of sub-sequence search, its rules one by one, random walks
// against a naive model that compares tokens alone, bounds, and refused allocations.
#include "engine/blending/document_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "base/guard.h"
#include "base/random.h"
#include "base/testing/refuse_each.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

// Where in the prompt, and from where in which chain.
struct Part {
  int64_t begin, end, from;
  Tokens chain;
  bool operator==(const Part&) const = default;
};
void PrintTo(const Part& part, std::ostream* out) {
  *out << "[" << part.begin << ", " << part.end << ") from " << part.from << " of "
       << part.chain.size();
}

std::vector<Part> Search(DocumentIndex* index, const Tokens& prompt,
                         DocumentSearch search = DocumentSearch::kAnywhere,
                         const std::string& salt = "") {
  std::vector<Part> parts;
  for (const FoundDocument& found : index->Find(salt, prompt, search).documents) {
    parts.push_back({found.begin, found.end, found.from, *found.chain});
    EXPECT_TRUE(std::equal(prompt.begin() + found.begin, prompt.begin() + found.end,
                           found.chain->begin() + found.from))
        << "every token is that of the document";
    EXPECT_GE(found.from, found.anchor_tokens);
    EXPECT_EQ(found.chain_end() - found.from, found.end - found.begin);
  }
  return parts;
}

Tokens Joined(std::initializer_list<Tokens> all) {
  Tokens joined;
  for (const Tokens& tokens : all) joined.insert(joined.end(), tokens.begin(), tokens.end());
  return joined;
}

// Example 23.
TEST(DocumentIndex, PartsAreFoundAtEveryOffset) {
  DocumentIndex index(4);
  const Tokens stored = {1, 2, 3, 4, 5, 6, 7, 8};
  index.Add("", stored, 0);
  EXPECT_EQ(Search(&index, {9, 5, 6, 7, 8, 1, 2, 3, 4}),
            (std::vector<Part>{{1, 5, 4, stored}, {5, 9, 0, stored}}));
}

TEST(DocumentIndex, DocumentsAreFoundWholeRepeatedAndBehindAMiss) {
  DocumentIndex index(4);
  const Tokens anchor = {70, 71};
  const Tokens a = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Tokens b = {21, 22, 23, 24, 25};
  const Tokens chain_a = Joined({anchor, a});
  const Tokens chain_b = Joined({anchor, b});
  index.Add("", chain_a, 2);
  index.Add("", chain_b, 2);
  const Tokens prompt = Joined({anchor, {50, 51}, b, a, {52}, a, b});
  EXPECT_EQ(
      Search(&index, prompt, DocumentSearch::kAnchored),
      (std::vector<Part>{
          {4, 9, 2, chain_b}, {9, 24, 2, chain_a}, {25, 40, 2, chain_a}, {40, 45, 2, chain_b}}));
  // Token 6 is another one: the search goes on behind it, from the first equal token on.
  Tokens changed = Joined({anchor, {50}, a});
  changed[3 + 5] = 99;
  EXPECT_EQ(Search(&index, changed), (std::vector<Part>{{3, 8, 2, chain_a}, {9, 18, 8, chain_a}}));
  // Fewer equal tokens than a chunk are none.
  EXPECT_EQ(Search(&index, {1, 2, 3, 50, 23, 24, 25}), std::vector<Part>{});
  EXPECT_EQ(Search(&index, {}), std::vector<Part>{});
}

TEST(DocumentIndex, TheLongestOfSeveralIsTaken) {
  DocumentIndex index(4);
  const Tokens shorter = {1, 2, 3, 4, 5};
  const Tokens longer = {1, 2, 3, 4, 5, 6, 7};
  index.Add("", shorter, 0);
  index.Add("", longer, 0);
  EXPECT_EQ(Search(&index, {9, 1, 2, 3, 4, 5, 6, 9}), (std::vector<Part>{{1, 7, 0, longer}}));
  EXPECT_EQ(Search(&index, {9, 1, 2, 3, 4, 5, 9}), (std::vector<Part>{{1, 6, 0, shorter}}));
}

TEST(DocumentIndex, WhatAPromptBeginsWithIsNoPart) {
  DocumentIndex index(4);
  const Tokens chain = {70, 71, 1, 2, 3, 4, 5};
  index.Add("", chain, 2);
  const Tokens prompt = Joined({chain, {1, 2, 3, 4, 5}});
  EXPECT_EQ(Search(&index, prompt), (std::vector<Part>{{7, 12, 2, chain}}));
  const auto own_end = [&](const Tokens& tokens) {
    return index.Find("", tokens, DocumentSearch::kAnywhere).own_end;
  };
  EXPECT_EQ(own_end(prompt), 7);
  EXPECT_EQ(own_end({70, 71, 1, 2, 3, 4, 9}), 0) << "not to its end";
  EXPECT_EQ(own_end({70, 72, 1, 2, 3, 4, 5}), 0) << "behind other tokens";
  // At the same place behind other tokens it is one.
  EXPECT_EQ(Search(&index, {70, 72, 1, 2, 3, 4, 5}), (std::vector<Part>{{2, 7, 2, chain}}));
}

TEST(DocumentIndex, OtherAnchorsAndOtherSaltsAreNotFound) {
  DocumentIndex index(4);
  const Tokens chain = {70, 71, 1, 2, 3, 4, 5};
  index.Add("one", chain, 2);
  const Tokens behind = {70, 71, 60, 1, 2, 3, 4, 5};
  const Tokens elsewhere = {70, 72, 60, 1, 2, 3, 4, 5};
  EXPECT_EQ(Search(&index, behind, DocumentSearch::kAnchored, "one").size(), 1U);
  EXPECT_EQ(Search(&index, elsewhere, DocumentSearch::kAnchored, "one").size(), 0U);
  EXPECT_EQ(Search(&index, elsewhere, DocumentSearch::kAnywhere, "one").size(), 1U);
  for (const char* salt : {"", "two", "on"}) {
    EXPECT_EQ(Search(&index, behind, DocumentSearch::kAnywhere, salt).size(), 0U) << salt;
  }
}

TEST(DocumentIndex, WhatWasUsedLongestAgoGivesWay) {
  DocumentIndex index(4, 15);
  const Tokens a = {1, 2, 3, 4, 5}, b = {11, 12, 13, 14, 15}, c = {21, 22, 23, 24, 25},
               d = {31, 32, 33, 34, 35};
  index.Add("", a, 0);
  index.Add("", b, 0);
  index.Add("", a, 0);
  EXPECT_EQ(index.document_count(), 2) << "one that is known is not kept twice";
  index.Add("", c, 0);
  EXPECT_EQ(index.token_count(), 15);
  EXPECT_EQ(Search(&index, Joined({{9}, b})).size(), 1U);
  index.Add("", d, 0);
  EXPECT_EQ(Search(&index, Joined({{9}, a})).size(), 0U) << "b was found since";
  EXPECT_EQ(Search(&index, Joined({{9}, b, c})).size(), 2U);
  EXPECT_EQ(index.place_count(), 3);
  index.Add("", Tokens(16, 7), 0);
  EXPECT_EQ(index.document_count(), 3) << "longer than all that is kept";
  index.Add("", Tokens{1, 2, 3, 70, 71}, 2);
  EXPECT_EQ(index.document_count(), 3) << "not a whole chunk";
}

// Every chunk of these has the same hash.
TEST(DocumentIndex, EqualChunksHaveFewPlaces) {
  DocumentIndex index(4);
  for (int32_t end = 0; end < 30; ++end) index.Add("", Joined({Tokens(40, 5), {end + 100}}), 0);
  EXPECT_EQ(index.place_count(), DocumentIndex::kPlacesMax);
  // The last eight chunks of the last document.
  EXPECT_EQ(Search(&index, Joined({{9}, Tokens(60, 5)})).front(),
            (Part{1, 33, 8, Joined({Tokens(40, 5), {129}})}));
}

// One tenant's documents push out no place and no document of another that has its share or less.
TEST(DocumentIndex, SaltsDoNotPushOutEachOthersDocuments) {
  DocumentIndex index(4, 60);
  const Tokens a = {1, 2, 3, 4, 5}, b = {11, 12, 13, 14, 15};
  index.Add("small", a, 0);
  index.Add("small", b, 0);
  for (int32_t end = 0; end < 30; ++end) {
    index.Add("large", Joined({a, {end + 100}}), 0);  // chunks of one hash
    index.Add("large", Tokens(4, end + 200), 0);
  }
  EXPECT_EQ(index.salt_count(), 2);
  EXPECT_EQ(index.token_count(), 60) << "what one salt has no use for, the other one takes";
  const Tokens prompt = Joined({{9}, a, b});
  EXPECT_EQ(Search(&index, prompt, DocumentSearch::kAnywhere, "small").size(), 2U);
  // A salt that comes later gets its share, of the one that has more.
  index.Add("late", Tokens(20, 7), 0);
  EXPECT_EQ(Search(&index, Joined({{9}, Tokens(20, 7)}), DocumentSearch::kAnywhere, "late").size(),
            1U);
  EXPECT_EQ(Search(&index, prompt, DocumentSearch::kAnywhere, "small").size(), 2U);
  const int64_t documents = index.document_count();
  index.Add("later", Tokens(16, 7), 0);
  EXPECT_EQ(index.document_count(), documents) << "more than a fourth part, and it does not fit";
  EXPECT_EQ(index.salt_count(), 3);
}

// Not the oldest of all: to look for it took one document after the other of salts that have their
// share, for each that was added.
TEST(DocumentIndex, TheLargestSaltGivesWayFirst) {
  DocumentIndex index(4, 60);
  const auto document = [](int32_t first) {
    return Tokens{first, first + 1, first + 2, first + 3, first + 4};
  };
  for (int32_t i = 0; i < 5; ++i) index.Add("old", document(100 + 10 * i), 0);
  for (int32_t i = 0; i < 7; ++i) index.Add("young", document(200 + 10 * i), 0);
  index.Add("new", document(1), 0);
  const auto knows = [&](const std::string& salt, int32_t first) {
    return Search(&index, Joined({{9}, document(first)}), DocumentSearch::kAnywhere, salt).size();
  };
  EXPECT_EQ(knows("old", 100), 1U);
  EXPECT_EQ(knows("young", 200), 0U);
  EXPECT_EQ(knows("young", 210), 1U);
  EXPECT_EQ(knows("new", 1), 1U);
}

TEST(DocumentIndex, WhatAPromptBeginsWithWasUsedToo) {
  DocumentIndex index(4, 15);
  const Tokens a = {1, 2, 3, 4, 5}, b = {11, 12, 13, 14, 15}, c = {21, 22, 23, 24, 25},
               d = {31, 32, 33, 34, 35};
  for (const Tokens& document : {a, b, c}) index.Add("", document, 0);
  EXPECT_EQ(Search(&index, Joined({a, {9}})).size(), 0U) << "it is no part";
  index.Add("", d, 0);
  EXPECT_EQ(Search(&index, Joined({{9}, a})).size(), 1U);
  EXPECT_EQ(Search(&index, Joined({{9}, b})).size(), 0U);
}

// The same by comparing tokens: for each chunk the places that came last, for each offset all.
class NaiveIndex {
 public:
  NaiveIndex(int64_t chunk, int64_t tokens_max) : chunk_(chunk), tokens_max_(tokens_max) {}

  void Add(const std::string& salt, const Tokens& chain, int64_t anchor) {
    if (std::ssize(chain) - anchor < chunk_) return;
    const Document added{salt, chain, anchor};
    const auto known = std::find(documents_.begin(), documents_.end(), added);
    if (known != documents_.end()) return Use(added);
    while (Count() + std::ssize(chain) > tokens_max_) {
      std::map<std::string, int64_t> held{{salt, std::ssize(chain)}};
      for (const Document& document : documents_) {
        held[document.salt] += std::ssize(document.chain);
      }
      if (std::ssize(chain) > tokens_max_ / std::ssize(held)) return;
      std::string largest = salt;
      for (const auto& [name, tokens] : held) {
        const bool has_as_many = name != salt && largest != salt && tokens == held[largest];
        if (tokens > held[largest] || has_as_many) largest = name;
      }
      const auto oldest =
          std::find_if(documents_.begin(), documents_.end(),
                       [&](const Document& document) { return document.salt == largest; });
      for (auto& [chunk, places] : places_) {
        std::erase_if(places, [&](const auto& at) { return at.first == *oldest; });
      }
      documents_.erase(oldest);
    }
    documents_.push_back(added);
    for (int64_t from = anchor; from + chunk_ <= std::ssize(chain); from += chunk_) {
      auto& places = places_[{salt, {chain.begin() + from, chain.begin() + from + chunk_}}];
      places.emplace_back(added, from);
      if (std::ssize(places) > DocumentIndex::kPlacesMax) places.erase(places.begin());
    }
  }

  std::vector<Part> Find(const std::string& salt, const Tokens& prompt, DocumentSearch search) {
    std::vector<Part> parts;
    int64_t free_from = 0;
    for (int64_t at = 0; at + chunk_ <= std::ssize(prompt); ++at) {
      Part best{0, 0, 0, {}};
      Document source;
      for (const auto& [document, place] :
           places_[{salt, {prompt.begin() + at, prompt.begin() + at + chunk_}}]) {
        const Tokens& chain = document.chain;
        const bool is_behind_it =
            std::ssize(prompt) >= document.anchor &&
            std::equal(chain.begin(), chain.begin() + document.anchor, prompt.begin());
        if (search == DocumentSearch::kAnchored && !is_behind_it) continue;
        int64_t begin = at, from = place, end = at;
        while (begin > free_from && from > document.anchor &&
               prompt[begin - 1] == chain[from - 1]) {
          --begin, --from;
        }
        while (end < std::ssize(prompt) && place + end - at < std::ssize(chain) &&
               prompt[end] == chain[place + end - at]) {
          ++end;
        }
        if (end - begin > best.end - best.begin)
          best = {begin, end, from, chain}, source = document;
      }
      if (best.end == 0) continue;
      const bool is_beginning =
          best.begin == best.from &&
          std::equal(prompt.begin(), prompt.begin() + best.end, best.chain.begin());
      Use(source);
      if (!is_beginning) parts.push_back(best);
      free_from = best.end;
      at = best.end - 1;
    }
    return parts;
  }

 private:
  struct Document {
    std::string salt;
    Tokens chain;
    int64_t anchor = 0;
    bool operator==(const Document&) const = default;
  };

  int64_t Count() const {
    int64_t count = 0;
    for (const Document& document : documents_) count += std::ssize(document.chain);
    return count;
  }
  void Use(Document document) {
    documents_.erase(std::find(documents_.begin(), documents_.end(), document));
    documents_.push_back(std::move(document));
  }

  const int64_t chunk_, tokens_max_;
  std::deque<Document> documents_;  // least recently used first
  // By the salt and a chunk's tokens.
  std::map<std::pair<std::string, Tokens>, std::vector<std::pair<Document, int64_t>>> places_;
};

Tokens RandomText(RandomSequence* random, int64_t count, int64_t vocabulary) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int32_t>(random->Below(vocabulary)));
  }
  return tokens;
}

// Few different tokens, so that chunks repeat; prompts are made of parts of documents.
TEST(DocumentIndex, RandomWalksAreAsComparingTokensSays) {
  int64_t found = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    RandomSequence random(seed);
    const int64_t chunk = 1 + random.Below(6);
    const int64_t vocabulary = 2 + random.Below(4);
    const int64_t tokens_max = 20 + random.Below(200);
    DocumentIndex index(chunk, tokens_max);
    NaiveIndex naive(chunk, tokens_max);
    std::vector<Tokens> chains;
    for (int step = 0; step < 60; ++step) {
      const std::string salt(static_cast<size_t>(random.Below(3)), 's');
      if (chains.empty() || random.Below(2) == 0) {
        Tokens chain = RandomText(&random, random.Below(30), vocabulary);
        if (!chains.empty() && random.Below(3) == 0) {
          chain = chains[static_cast<size_t>(random.Below(std::ssize(chains)))];
        }
        const int64_t anchor = std::min<int64_t>(random.Below(4), std::ssize(chain));
        index.Add(salt, chain, anchor);
        naive.Add(salt, chain, anchor);
        chains.push_back(std::move(chain));
        continue;
      }
      Tokens prompt;
      for (int64_t parts = 1 + random.Below(4); parts > 0; --parts) {
        const Tokens& chain = chains[static_cast<size_t>(random.Below(std::ssize(chains)))];
        const int64_t begin = random.Below(std::ssize(chain) + 1);
        const int64_t end = begin + random.Below(std::ssize(chain) - begin + 1);
        prompt.insert(prompt.end(), chain.begin() + begin, chain.begin() + end);
        if (random.Below(2) == 0) prompt.push_back(static_cast<int32_t>(random.Below(vocabulary)));
      }
      const auto search =
          random.Below(2) == 0 ? DocumentSearch::kAnchored : DocumentSearch::kAnywhere;
      const std::vector<Part> parts = Search(&index, prompt, search, salt);
      ASSERT_EQ(parts, naive.Find(salt, prompt, search)) << "step " << step;
      ASSERT_LE(index.token_count(), tokens_max);
      found += std::ssize(parts);
    }
  }
  EXPECT_GT(found, 5000);
}

TEST(DocumentIndex, RefusedAllocationsLeaveItWhole) {
  const Tokens a = {1, 2, 3, 4, 5, 6, 7, 8}, b = {11, 12, 13, 14, 15, 16, 17, 18};
  DocumentIndex index(4, 16);
  index.Add("", a, 0);
  RefuseEach("add", StatusCode::kOk, [&] {
    EXPECT_EQ(index.document_count(), 1);
    EXPECT_EQ(index.place_count(), 2);
    return GuardEntry([&]() -> Status {
      index.Add("", b, 0);
      return {};
    });
  });
  EXPECT_EQ(index.place_count(), 4);
  DocumentIndex two(4, 32);
  two.Add("", a, 0);
  RefuseEach("add to a new salt", StatusCode::kOk, [&] {
    EXPECT_EQ(two.salt_count(), 1);
    EXPECT_EQ(two.token_count(), 8);
    return GuardEntry([&]() -> Status {
      two.Add("other", b, 0);
      return {};
    });
  });
  EXPECT_EQ(two.salt_count(), 2);
  const Tokens prompt = Joined({{9}, b, a});
  RefuseEach("find", StatusCode::kOk, [&] {
    return GuardEntry([&]() -> Status {
      EXPECT_EQ(index.Find("", prompt, DocumentSearch::kAnchored).documents.size(), 2U);
      return {};
    });
  });
}

}  // namespace
}  // namespace quire
