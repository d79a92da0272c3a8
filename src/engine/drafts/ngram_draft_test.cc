#include "engine/drafts/ngram_draft.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/random.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;
using Places = std::vector<int64_t>;

Places Find(const Tokens& text, int64_t count) {
  NGramIndex index;
  index.Extend(text);
  return index.FindContinuations(text, count);
}

TEST(NGramIndex, FindsWhereTheTextEndedLikeThisBefore) {
  //                     0  1  2  3  4  5  6  7  8  9
  EXPECT_EQ(Find({5, 6, 7, 8, 9, 1, 5, 6, 7}, 4), (Places{3}));
  EXPECT_EQ(Find({5, 6, 7, 8}, 4), Places());
  EXPECT_EQ(Find({6, 1, 6}, 4), Places()) << "one token in common foretells nothing";
  EXPECT_EQ(Find({}, 4), Places());
  EXPECT_EQ(Find({3}, 4), Places());
}

TEST(NGramIndex, TheLongestAgreementComesFirstThenTheLatest) {
  const Tokens text = {1, 2, 3, 4, 9, 8, 3, 4, 7, 8, 3, 4, 6, 1, 2, 3, 4};
  // Behind 1 2 3 4, and behind 3 4 twice, of which the later comes first.
  EXPECT_EQ(Find(text, 8), (Places{4, 12, 8}));
  EXPECT_EQ(Find(text, 1), (Places{4}));
}

TEST(NGramIndex, PiecesMakeTheSameIndexAsTheWhole) {
  RandomSequence random(3);
  Tokens text;
  NGramIndex index;
  int64_t found = 0;
  for (int i = 0; i < 300; ++i) {
    for (int64_t more = random.Below(4); more > 0; --more) {
      text.push_back(static_cast<int32_t>(random.Below(4)));
    }
    index.Extend(text);
    const Places places = index.FindContinuations(text, 3);
    EXPECT_EQ(places, Find(text, 3)) << i;
    for (const int64_t place : places) {
      ASSERT_GE(place, NGramIndex::kLeast);
      ASSERT_LT(place, std::ssize(text));
      EXPECT_TRUE(std::equal(text.end() - 2, text.end(), text.begin() + place - 2));
    }
    found += std::ssize(places);
  }
  EXPECT_GT(found, 500);
}

DraftTree Propose(Tokens text, int64_t guesses, int64_t levels, int64_t branches,
                  const SamplingOptions& options = {}) {
  NGramDrafter drafter;
  int64_t state = kNoDraftState;
  DraftTree tree;
  const DraftJob job{.tokens = &text,
                     .prompt_tokens = 1,
                     .options = &options,
                     .guesses_max = guesses,
                     .levels_max = levels,
                     .branches = branches,
                     .state = &state,
                     .tree = &tree};
  EXPECT_TRUE(drafter.Propose({&job, 1}, nullptr).ok());
  EXPECT_EQ(drafter.state_count(), 1);
  drafter.Forget(&state);
  EXPECT_EQ(drafter.state_count(), 0);
  EXPECT_EQ(state, kNoDraftState);
  EXPECT_LE(tree.size(), guesses);
  EXPECT_LE(tree.levels(), levels);
  return tree;
}

TEST(NGramDrafter, FollowsSeveralPlacesAsBranches) {
  const Tokens text = {1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2};
  const DraftTree tree = Propose(text, 4, 4, 2);
  EXPECT_EQ(tree.tokens, (Tokens{5, 6, 3, 4}));
  EXPECT_EQ(tree.parents, (Places{kDraftRoot, 0, kDraftRoot, 2}));
  EXPECT_EQ(Propose(text, 4, 4, 1).tokens, (Tokens{5, 6, 0, 1}));
  EXPECT_EQ(Propose(text, 9, 1, 2).tokens, (Tokens{5, 3}));
  EXPECT_EQ(Propose({1, 2, 3, 4}, 9, 9, 2).size(), 0);
}

// Places that agree are one branch, which gets all guesses.
TEST(NGramDrafter, ATextThatRepeatsItselfGoesOnDoingSo) {
  const Tokens text = {7, 8, 9, 7, 8, 9, 7, 8};
  for (const int64_t branches : {1, 2, 4}) {
    const DraftTree tree = Propose(text, 8, 8, branches);
    EXPECT_EQ(tree.tokens, (Tokens{9, 7, 8, 9, 7, 8, 9, 7})) << branches;
    EXPECT_EQ(tree.levels(), 8);
  }
}

TEST(NGramDrafter, APredictionIsFollowedFromTheFirstTokenOfTheAnswer) {
  const SamplingOptions options{.predicted_tokens = {20, 21, 22, 23, 24}};
  const auto guess = [&](const Tokens& text) { return Propose(text, 4, 4, 1, options).tokens; };
  EXPECT_EQ(guess({9, 20}), (Tokens{21, 22, 23, 24})) << "the prompt is 9";
  EXPECT_EQ(guess({9, 50, 22, 23}), (Tokens{24, 9, 50, 22})) << "parts of it were left out";
  EXPECT_EQ(guess({9, 50}), Tokens());
}

// What is known of a sample grows with it.
TEST(NGramDrafter, APredictionStaysWhileTheAnswerGrows) {
  const SamplingOptions options{.predicted_tokens = {20, 21, 22, 23, 24, 25, 26, 27}};
  NGramDrafter drafter;
  Tokens text = {1, 2, 3, 4, 5, 6};
  int64_t state = kNoDraftState;
  const auto guess = [&](int32_t drawn) {
    text.push_back(drawn);
    DraftTree tree;
    const DraftJob job{.tokens = &text,
                       .prompt_tokens = 6,
                       .options = &options,
                       .guesses_max = 2,
                       .levels_max = 2,
                       .state = &state,
                       .tree = &tree};
    EXPECT_TRUE(drafter.Propose({&job, 1}, nullptr).ok());
    return tree.tokens;
  };
  EXPECT_EQ(guess(20), (Tokens{21, 22}));
  EXPECT_EQ(guess(21), (Tokens{22, 23}));
  EXPECT_EQ(guess(7), Tokens()) << "something else";
  EXPECT_EQ(guess(24), Tokens());
  EXPECT_EQ(guess(25), (Tokens{26, 27}));
  EXPECT_EQ(guess(7), Tokens());
  EXPECT_EQ(guess(24), (Tokens{25, 7})) << "as the answer went on the last time";
  drafter.Forget(&state);
}

// The memory of an endless text grew without end.
TEST(NGramDrafter, ForgetsTheBeginningOfALongText) {
  Tokens text = {1, 2, 3, 4};
  for (int32_t i = 0; i < 1 << 18; ++i) text.push_back(100 + i);
  text.insert(text.end(), {5, 6, 7, 8, 1, 2});
  EXPECT_EQ(Propose(text, 2, 2, 1).tokens, Tokens());
  text.insert(text.end(), {5, 6});
  EXPECT_EQ(Propose(text, 2, 2, 1).tokens, (Tokens{7, 8}));
}

TEST(DraftTree, SiblingsAreMergedAndTheFrontIsWhole) {
  DraftTree tree;
  EXPECT_EQ(tree.levels(), 0);
  const int64_t a = tree.AddChild(kDraftRoot, 4);
  const int64_t b = tree.AddChild(a, 4);
  EXPECT_EQ(tree.AddChild(kDraftRoot, 4), a);
  EXPECT_EQ(tree.AddChild(a, 4), b);
  const int64_t c = tree.AddChild(kDraftRoot, 5);
  EXPECT_EQ(tree.size(), 3);
  EXPECT_EQ(tree.levels(), 2);
  EXPECT_EQ(tree.FindChild(kDraftRoot, 5), c);
  EXPECT_EQ(tree.FindChild(c, 5), kDraftRoot);
  tree.Truncate(9);
  EXPECT_EQ(tree.size(), 3);
  tree.Truncate(1);
  EXPECT_EQ(tree.size(), 1);
  EXPECT_EQ(tree.FindChild(a, 4), kDraftRoot);
}

}  // namespace
}  // namespace quire
