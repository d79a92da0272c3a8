// SelectTokens: the examples of its rules, random batches against a sort, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"
#include "blend/testing/blend_reference.h"
#include "quire/blend.h"

namespace quire {
namespace {

using Rows = std::vector<int64_t>;

struct OwnedBatch {
  std::vector<int32_t> query_start_loc;
  std::vector<uint8_t> kinds;
  std::vector<float> deviations;
  std::vector<BlendDocument> documents = {};

  SelectionBatch view() const { return {query_start_loc, kinds, deviations, documents}; }
};

BlendOptions Options(double ratio, bool force_last = false) {
  BlendOptions options;
  options.ratios = {ratio};
  options.force_last = force_last;
  return options;
}

TokenSelection Selected(const SelectionBatch& batch, const BlendOptions& options,
                        size_t check_index = 0) {
  Result<TokenSelection> selection = SelectTokens(batch, options, check_index);
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  EXPECT_EQ(selection->rows, SelectedRowsReference(batch, options, check_index));
  return *selection;
}

// blend.md, examples 2 and 3: rows 2 and 6 deviate.
TEST(SelectTokens, TakesTheMostDeviatingRowsAndTheLowerOfEqualOnes) {
  OwnedBatch batch{{0, 10}, std::vector<uint8_t>(10, 1), {0, 0, 1, 0, 0, 0, 1, 0, 0, 0}};
  const TokenSelection two = Selected(batch.view(), Options(0.2));
  EXPECT_EQ(two.rows, (Rows{2, 6}));
  EXPECT_EQ(two.query_start_loc, (std::vector<int32_t>{0, 2}));
  batch.kinds[3] = batch.kinds[7] = kRowInvalid;
  batch.deviations[3] = batch.deviations[7] = -std::numeric_limits<float>::infinity();
  const std::vector<std::pair<double, Rows>> expected = {{0.0, {3, 7}},
                                                         {0.1, {3, 7}},
                                                         {0.2, {2, 3, 7}},
                                                         {0.3, {2, 3, 6, 7}},
                                                         {0.5, {0, 1, 2, 3, 6, 7}},
                                                         {1.0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}};
  for (const auto& [ratio, rows] : expected) {
    EXPECT_EQ(Selected(batch.view(), Options(ratio)).rows, rows) << ratio;
  }
}

// blend.md, example 6.
TEST(SelectTokens, EachRequestHasABudgetAndItsLastRow) {
  const OwnedBatch batch{{0, 5, 8}, std::vector<uint8_t>(8, 1), {0, 1, 0, 0, 0, 0, 1, 0}};
  const TokenSelection without = Selected(batch.view(), Options(0.5));
  EXPECT_EQ(without.rows, (Rows{0, 1, 6}));
  EXPECT_EQ(without.query_start_loc, (std::vector<int32_t>{0, 2, 3}));
  const TokenSelection with = Selected(batch.view(), Options(0.5, true));
  EXPECT_EQ(with.rows, (Rows{0, 1, 4, 6, 7}));
  EXPECT_EQ(with.query_start_loc, (std::vector<int32_t>{0, 3, 5}));
}

// blend.md, example 7, and the exact rule of 3.3.
TEST(SelectTokens, BudgetsAreCutOff) {
  const auto counts = [](const std::vector<int32_t>& query_start_loc, double ratio) {
    const auto rows = static_cast<size_t>(query_start_loc.back());
    const OwnedBatch batch{query_start_loc, std::vector<uint8_t>(rows, 1),
                           std::vector<float>(rows, 0.0F)};
    return Selected(batch.view(), Options(ratio)).query_start_loc;
  };
  EXPECT_EQ(counts({0, 8, 14, 18}, 0.2), (std::vector<int32_t>{0, 1, 2, 2}));
  EXPECT_EQ(counts({0, 1, 2, 4}, 0.5), (std::vector<int32_t>{0, 0, 0, 1}));
  EXPECT_EQ(counts({0, 100}, 0.53), (std::vector<int32_t>{0, 53}));
  EXPECT_EQ(counts({0, 100}, 0.29), (std::vector<int32_t>{0, 29})) << "the product is below 29";
  EXPECT_EQ(counts({0, 0, 3, 3}, 1.0), (std::vector<int32_t>{0, 0, 3, 3}));
  EXPECT_EQ(counts({0}, 1.0), (std::vector<int32_t>{0}));
}

// blend.md, example 19.
TEST(SelectTokens, LaterLayersKeepAPartOfWhatIsLeft) {
  OwnedBatch batch{{0, 8}, std::vector<uint8_t>(8, 1), {8, 1, 7, 2, 6, 3, 5, 4}};
  BlendOptions options = Options(0.5);
  options.check_layers = {1, 3};
  options.ratios = {0.5, 0.25};
  const TokenSelection first = Selected(batch.view(), options, 0);
  EXPECT_EQ(first.rows, (Rows{0, 2, 4, 6}));
  batch.deviations = {1, 99, 2, 99, 3, 99, 4, 99};
  SelectionBatch later = batch.view();
  later.candidates = std::span<const int64_t>(first.rows);
  const TokenSelection second = Selected(later, options, 1);
  EXPECT_EQ(second.rows, (Rows{4, 6}));
  EXPECT_EQ(second.query_start_loc, (std::vector<int32_t>{0, 2}));
}

TEST(SelectTokens, ExactRowsAreInNoRatioAndOnlyTheLastIsRecomputed) {
  OwnedBatch batch{{0, 6}, {2, 2, 1, 1, 1, 2}, {9, 9, 1, 2, 3, 9}};
  EXPECT_EQ(Selected(batch.view(), Options(1.0)).rows, (Rows{2, 3, 4}));
  EXPECT_EQ(Selected(batch.view(), Options(0.34)).rows, (Rows{4}));
  EXPECT_EQ(Selected(batch.view(), Options(0.34, true)).rows, (Rows{4, 5}));
}

TEST(SelectTokens, LinkTokensAreThoseOfAllDocumentsButTheFirstOfARequest) {
  OwnedBatch batch{{0, 9, 13}, std::vector<uint8_t>(13, 1), std::vector<float>(13, 0.0F)};
  batch.documents = {{0, 0}, {0, 3}, {3, 1}, {5, 4}, {9, 2}, {11, 2}};
  batch.kinds[6] = kRowExact;
  BlendOptions options = Options(0.0);
  options.link_tokens = 2;
  EXPECT_EQ(Selected(batch.view(), options).rows, (Rows{3, 5, 11, 12}));
}

// They deviate most, and a ratio selects as many other rows as without them.
TEST(SelectTokens, LinkTokensAreBesideTheRatio) {
  OwnedBatch batch{{0, 12}, std::vector<uint8_t>(12, 1), {9, 1, 2, 3, 9, 9, 4, 5, 9, 8, 6, 7}};
  batch.documents = {{0, 4}, {4, 4}, {8, 4, 0.5}};
  BlendOptions options = Options(0.25);
  options.link_tokens = 2;
  // Two of 8 rows beside the links 4 and 5, two of the last document beside 8 and 9.
  EXPECT_EQ(Selected(batch.view(), options).rows, (Rows{0, 4, 5, 7, 8, 9, 10, 11}));
  options.ratios = {1.0};
  EXPECT_EQ(std::ssize(Selected(batch.view(), options).rows), 12);
}

TEST(SelectTokens, DocumentsMayHaveBudgetsOfTheirOwn) {
  OwnedBatch batch{{0, 8}, std::vector<uint8_t>(8, 1), {8, 7, 6, 5, 4, 3, 2, 1}};
  batch.documents = {{0, 4, 0.0}, {4, 2, 0.5}};
  EXPECT_EQ(Selected(batch.view(), Options(0.5)).rows, (Rows{4, 6}));
}

TEST(SelectTokens, ThresholdsStandAboveTheRatio) {
  OwnedBatch batch{{0, 4}, std::vector<uint8_t>(4, 1), {0.5F, 0.25F, 0.125F, 0.0F}};
  BlendOptions options = Options(1.0);
  options.thresholds = {0.25F};
  EXPECT_EQ(Selected(batch.view(), options).rows, (Rows{0, 1}));
}

TEST(SelectTokens, ShortRequestsAreComputed) {
  OwnedBatch batch{{0, 3, 7}, {1, 2, 1, 1, 1, 1, 1}, std::vector<float>(7, 0.0F)};
  BlendOptions options = Options(0.0);
  options.min_tokens = 4;
  EXPECT_EQ(Selected(batch.view(), options).rows, (Rows{0, 2}));
}

TEST(SelectTokens, WhatIsNoNumberIsRecomputedFirst) {
  OwnedBatch batch{{0, 4}, std::vector<uint8_t>(4, 1), {9, NAN, INFINITY, 9}};
  EXPECT_EQ(Selected(batch.view(), Options(0.25)).rows, (Rows{1}));
  EXPECT_EQ(Selected(batch.view(), Options(0.5)).rows, (Rows{1, 2}));
}

OwnedBatch RandomBatch(RandomSequence& random) {
  OwnedBatch batch{{0}, {}, {}};
  const int64_t requests = 1 + random.Below(4);
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t begin = batch.query_start_loc.back();
    const int64_t rows = random.Below(20);
    int64_t row = 0;
    while (row < rows && random.Below(4) != 0) {
      const int64_t count = random.Below(rows - row + 1);
      batch.documents.push_back({begin + row, count});
      if (random.Below(3) == 0) {
        batch.documents.back().ratio = 0.1 * static_cast<double>(random.Below(11));
      }
      row += count + random.Below(2);
    }
    for (int64_t i = 0; i < rows; ++i) {
      batch.kinds.push_back(static_cast<uint8_t>(std::min<int64_t>(random.Below(6), 2)));
      if (batch.kinds.back() == kRowExact && random.Below(2) == 0) batch.kinds.back() = kRowMoved;
      batch.deviations.push_back(static_cast<float>(random.Below(5)));
    }
    batch.query_start_loc.push_back(static_cast<int32_t>(begin + rows));
  }
  return batch;
}

// Request `index` of the batch, and its selection of all rows that the batch has in it.
OwnedBatch RequestOf(const OwnedBatch& batch, size_t index) {
  const int64_t begin = batch.query_start_loc[index];
  const int64_t end = batch.query_start_loc[index + 1];
  OwnedBatch one{{0, static_cast<int32_t>(end - begin)},
                 {batch.kinds.begin() + begin, batch.kinds.begin() + end},
                 {batch.deviations.begin() + begin, batch.deviations.begin() + end}};
  for (const BlendDocument& document : batch.documents) {
    if (document.row_count == 0 || document.first_row < begin || document.first_row >= end)
      continue;
    one.documents.push_back({document.first_row - begin, document.row_count, document.ratio});
  }
  return one;
}

// P7: a request's rows are those that it has alone.
TEST(SelectTokens, RowsDoNotDependOnOtherRequests) {
  RandomSequence random(7);
  for (int i = 0; i < 500; ++i) {
    const OwnedBatch batch = RandomBatch(random);
    BlendOptions options = Options(0.1 * static_cast<double>(random.Below(11)));
    options.force_last = random.Below(2) == 0;
    options.link_tokens = random.Below(3);
    options.min_tokens = random.Below(4) == 0 ? 8 : 0;
    const TokenSelection together = Selected(batch.view(), options);
    Rows apart;
    for (size_t request = 0; request + 1 < batch.query_start_loc.size(); ++request) {
      EXPECT_EQ(together.query_start_loc[request], std::ssize(apart));
      const OwnedBatch one = RequestOf(batch, request);
      for (const int64_t row : Selected(one.view(), options).rows) {
        apart.push_back(batch.query_start_loc[request] + row);
      }
    }
    ASSERT_EQ(together.rows, apart) << "batch " << i;
  }
}

// P8: a larger ratio adds rows.
TEST(SelectTokens, RandomBatchesAreAsTheReferenceSays) {
  RandomSequence random(22);
  for (int i = 0; i < 2000; ++i) {
    const OwnedBatch batch = RandomBatch(random);
    BlendOptions options;
    options.check_layers = {1, 2};
    options.force_last = random.Below(2) == 0;
    options.link_tokens = random.Below(3);
    options.min_tokens = random.Below(4) == 0 ? 8 : 0;
    if (random.Below(2) == 0) options.thresholds = {1.0F, 2.0F};
    const auto tenths = static_cast<double>(random.Below(10));
    options.ratios = {0.1 * tenths + 0.1, 0.1 * tenths};
    const TokenSelection more = Selected(batch.view(), options);
    SelectionBatch later = batch.view();
    later.candidates = std::span<const int64_t>(more.rows);
    const TokenSelection fewer = Selected(later, options, 1);
    ASSERT_TRUE(
        std::includes(more.rows.begin(), more.rows.end(), fewer.rows.begin(), fewer.rows.end()));
    BlendOptions smaller = options;
    smaller.ratios = {options.ratios[1], 0.0};
    const TokenSelection subset = Selected(batch.view(), smaller);
    ASSERT_TRUE(
        std::includes(more.rows.begin(), more.rows.end(), subset.rows.begin(), subset.rows.end()));
    ASSERT_FALSE(::testing::Test::HasFailure()) << "batch " << i;
  }
}

struct Refused {
  const char* part;
  OwnedBatch batch = {{0, 4}, {1, 1, 1, 1}, {0, 0, 0, 0}};
  BlendOptions options = {};
  size_t check_index = 0;
  std::optional<Rows> candidates = std::nullopt;
};

OwnedBatch WithDocuments(std::vector<BlendDocument> documents) {
  return {{0, 2, 4}, {1, 1, 1, 1}, {0, 0, 0, 0}, std::move(documents)};
}

TEST(SelectTokens, WhatIsNotAsDescribedIsRefused) {
  const std::vector<Refused> cases = {
      {.part = "begin with 0", .batch = {{}, {}, {}}},
      {.part = "begin with 0", .batch = {{1, 4}, {1, 1, 1, 1}, {0, 0, 0, 0}}},
      {.part = "falls at request 1", .batch = {{0, 4, 3}, {1, 1, 1}, {0, 0, 0}}},
      {.part = "ends with 5", .batch = {{0, 5}, {1, 1, 1, 1}, {0, 0, 0, 0}}},
      {.part = "3 deviations", .batch = {{0, 4}, {1, 1, 1, 1}, {0, 0, 0}}},
      {.part = "row 2 is of kind 3", .batch = {{0, 4}, {1, 1, 3, 1}, {0, 0, 0, 0}}},
      {.part = "document 1 begins at row 1", .batch = WithDocuments({{0, 2}, {1, 1}})},
      {.part = "document 0 begins at row -1", .batch = WithDocuments({{-1, 2}})},
      {.part = "within one request", .batch = WithDocuments({{1, 2}})},
      {.part = "within one request", .batch = WithDocuments({{0, -1}})},
      {.part = "within one request", .batch = WithDocuments({{3, INT64_MAX}})},
      {.part = "within one request", .batch = WithDocuments({{9, 0}})},
      {.part = "its ratio is 1.5", .batch = WithDocuments({{0, 1, 1.5}})},
      {.part = "its ratio is nan", .batch = WithDocuments({{0, 1, std::nan("")}})},
      {.part = "check layer of index 1", .check_index = 1},
      {.part = "rows[0] is 4", .candidates = Rows{4}},
      {.part = "row 3 is invalid",
       .batch = {{0, 4}, {1, 1, 1, 0}, {0, 0, 0, 0}},
       .candidates = Rows{0}},
  };
  for (const Refused& c : cases) {
    SCOPED_TRACE(c.part);
    SelectionBatch batch = c.batch.view();
    if (c.candidates) batch.candidates = std::span<const int64_t>(*c.candidates);
    const Status status = SelectTokens(batch, c.options, c.check_index).status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find(c.part), std::string_view::npos) << status.message();
  }
}

TEST(BlendOptions, OnlyASchedulesOfTheModelIsAccepted) {
  EXPECT_TRUE(CheckBlendOptions({}, 2).ok());
  const auto refuse = [](const BlendOptions& options, std::string_view part) {
    const Status status = CheckBlendOptions(options, 4);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find(part), std::string_view::npos) << status.message();
  };
  refuse({.check_layers = {}, .ratios = {}}, "at least one layer");
  refuse({.check_layers = {1, 2}}, "2 check_layers, 1 ratios");
  refuse({.thresholds = {0, 0}}, "2 thresholds");
  refuse({.check_layers = {4}}, "check_layers: 4");
  refuse({.check_layers = {-1}}, "check_layers: -1");
  refuse({.check_layers = {2, 2}, .ratios = {0.5, 0.5}}, "check_layers: 2");
  refuse({.check_layers = {1, 2}, .ratios = {0.2, 0.3}}, "not above the one before");
  refuse({.ratios = {1.01}}, "ratios: 1.01");
  refuse({.ratios = {-0.1}}, "ratios: -0.1");
  refuse({.ratios = {std::nan("")}}, "ratios: nan");
  refuse({.thresholds = {-1.0F}}, "thresholds: -1");
  refuse({.thresholds = {std::nanf("")}}, "thresholds: nan");
  refuse({.link_tokens = -1}, "link_tokens is -1");
  refuse({.min_tokens = -1}, "min_tokens -1");
}

}  // namespace
}  // namespace quire
