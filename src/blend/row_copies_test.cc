// Rows that are gathered and scattered, and the positions of a batch.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "quire/blend.h"

namespace quire {
namespace {

void ExpectRefused(const Status& status, std::string_view part) {
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find(part), std::string_view::npos) << status.message();
}

TEST(RowCopies, GatherAndScatterAreEachOthersInverse) {
  for (const int axis : {0, 1}) {
    std::vector<uint16_t> all(5 * 2 * 3);
    std::iota(all.begin(), all.end(), uint16_t{0x7C00});  // NaN among them: bits are copied
    const std::vector<uint16_t> before = all;
    const auto view = [axis](std::vector<uint16_t>& x, int64_t tokens) {
      return axis == 0 ? TensorView(x.data(), DType::kF16, {tokens, 2, 3})
                       : TensorView(x.data(), DType::kF16, {2, tokens, 3});
    };
    std::vector<uint16_t> some(2 * 2 * 3);
    const std::vector<int64_t> rows = {1, 4};
    ASSERT_TRUE(GatherRows(view(all, 5), axis, rows, view(some, 2)).ok());
    for (size_t i = 0; i < 2; ++i) {
      for (size_t head = 0; head < 2; ++head) {
        for (size_t c = 0; c < 3; ++c) {
          const auto row = static_cast<size_t>(rows[i]);
          const size_t to = axis == 0 ? (i * 2 + head) * 3 + c : (head * 2 + i) * 3 + c;
          const size_t from = axis == 0 ? (row * 2 + head) * 3 + c : (head * 5 + row) * 3 + c;
          EXPECT_EQ(some[to], before[from]);
          all[from] = 0;
        }
      }
    }
    ASSERT_TRUE(ScatterRows(view(some, 2), axis, rows, view(all, 5)).ok());
    EXPECT_EQ(all, before);
  }
}

TEST(RowCopies, WhatDoesNotFitIsRefusedAndNothingIsWritten) {
  std::vector<float> memory(64, 1.0F);
  const auto at = [&](size_t offset, std::initializer_list<int64_t> shape) {
    return TensorView(memory.data() + offset, DType::kF32, shape);
  };
  const std::vector<int64_t> rows = {0, 2};
  const auto refuse = [&](const TensorView& some, const std::vector<int64_t>& to,
                          const TensorView& all, std::string_view part) {
    ExpectRefused(ScatterRows(some, 0, to, all), part);
    ExpectRefused(GatherRows(all, 0, to, some), part);
  };
  refuse(at(32, {3, 4}), rows, at(0, {4, 4}), "2 rows of float32 [4, 4] are not");
  refuse(at(32, {2, 3}), rows, at(0, {4, 4}), "are not float32 [2, 3]");
  refuse(TensorView(memory.data() + 32, DType::kF16, {2, 4}), rows, at(0, {4, 4}), "float16");
  refuse(at(32, {2, 4}), {2, 2}, at(0, {4, 4}), "rows[1] is 2");
  refuse(at(32, {2, 4}), {-1, 2}, at(0, {4, 4}), "rows[0] is -1");
  refuse(at(32, {2, 4}), {0, 4}, at(0, {4, 4}), "below 4");
  refuse(at(12, {2, 4}), rows, at(0, {4, 4}), "share memory");
  EXPECT_EQ(memory, std::vector<float>(64, 1.0F));
  EXPECT_TRUE(ScatterRows(at(32, {0, 4}), 0, {}, at(0, {4, 4})).ok());
}

TEST(Positions, GoOnBehindTheContextOfEachRequest) {
  // A prompt behind 10 cached tokens, a decode row, a request without rows, a prompt.
  const std::vector<int32_t> query_start_loc = {0, 5, 6, 6, 8};
  const std::vector<int64_t> contexts = {10, 321, 7, 0};
  std::vector<int64_t> positions(8);
  ASSERT_TRUE(FillPositions(query_start_loc, contexts, positions).ok());
  EXPECT_EQ(positions, (std::vector<int64_t>{10, 11, 12, 13, 14, 321, 0, 1}));
  std::vector<int64_t> untouched = {9, 9, 9, 9, 9, 9, 9, 9};
  const std::vector<int64_t> three = {1, 2, 3};
  ExpectRefused(FillPositions(query_start_loc, three, untouched), "3 context lengths");
  const std::vector<int64_t> negative = {0, 0, 0, -1};
  ExpectRefused(FillPositions(query_start_loc, negative, untouched), "of request 3 is -1");
  ExpectRefused(FillPositions(query_start_loc, contexts, std::span(untouched).first(7)),
                "ends with 8");
  EXPECT_EQ(untouched, std::vector<int64_t>(8, 9));
}

}  // namespace
}  // namespace quire
