// Merging attention results: every path against doubles and against each other.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Side {
  std::vector<float> o;  // [row][head][dim]
  std::vector<float> lse;
};

class MergeCase {
 public:
  MergeCase(int64_t rows, int heads, int dim) : rows_(rows), heads_(heads), dim_(dim) {}

  void Merge(const Backend& backend, ParallelRunner& runner, Side* first, const Side& second) {
    const int64_t row = static_cast<int64_t>(heads_) * dim_;
    backend.merge_attention({.row_count = rows_,
                             .head_count = heads_,
                             .dim = dim_,
                             .o = {first->o.data(), DType::kF32, row, dim_},
                             .lse = first->lse.data(),
                             .lse_row_stride = heads_,
                             .other_o = {second.o.data(), DType::kF32, row, dim_},
                             .other_lse = second.lse.data(),
                             .other_lse_row_stride = heads_},
                            runner);
  }

 private:
  int64_t rows_;
  int heads_;
  int dim_;
};

ParallelRunner& Serial() {
  static const std::shared_ptr<ParallelRunner> runner = CreateThreadPool(1).value();
  return *runner;
}

// The examples of the specification.
TEST(Merge, GivesTheWorkedExamples) {
  for (const Backend* backend : Backends()) {
    Side a{{1, 1}, {0, 1}};
    MergeCase(2, 1, 1).Merge(*backend, Serial(), &a, {{3, 5}, {0, -1}});
    EXPECT_EQ(a.o[0], 2);
    EXPECT_EQ(a.lse[0], 1);
    EXPECT_NEAR(a.o[1], 1.8, 1e-6);
    EXPECT_NEAR(a.lse[1], 1.3219281, 1e-6);
  }
}

// An empty side is not read: its output is NaN here.
TEST(Merge, IsTotalOnEmptySets) {
  for (const Backend* backend : Backends()) {
    Side a{{0.1F, 0.2F, kNaN, kNaN, kNaN, kNaN}, {5, -kInfinity, -kInfinity}};
    const Side b{{kNaN, kNaN, 0.3F, 0.7F, kNaN, kNaN}, {-kInfinity, -7, -kInfinity}};
    MergeCase(3, 1, 2).Merge(*backend, Serial(), &a, b);
    EXPECT_EQ(a.o, (std::vector<float>{0.1F, 0.2F, 0.3F, 0.7F, 0, 0}));
    EXPECT_EQ(a.lse, (std::vector<float>{5, -7, -kInfinity}));
  }
}

TEST(Merge, ANaNStaysANaN) {
  for (const Backend* backend : Backends()) {
    Side a{{1, 1, kNaN}, {kNaN, 0, 0}};
    MergeCase(3, 1, 1).Merge(*backend, Serial(), &a, {{1, 1, 1}, {0, kNaN, 0}});
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(a.o[static_cast<size_t>(i)])) << i;
    EXPECT_TRUE(std::isnan(a.lse[0]) && std::isnan(a.lse[1]));
    EXPECT_EQ(a.lse[2], 1);
  }
}

TEST(Merge, EveryPathMatchesDoubles) {
  const std::shared_ptr<ParallelRunner> pool = CreateThreadPool(3).value();
  for (const int dim : {1, 17, 256, 300}) {
    RandomSequence random(static_cast<uint64_t>(dim));
    const int64_t rows = 19;
    const int heads = 3;
    const size_t n = static_cast<size_t>(rows * heads);
    const auto draw = [&] {
      Side side;
      for (size_t i = 0; i < n; ++i) {
        side.lse.push_back(static_cast<float>(random.Uniform(-40, 40)));
        for (int d = 0; d < dim; ++d) side.o.push_back(static_cast<float>(random.Normal()));
      }
      return side;
    };
    const Side first = draw();
    const Side second = draw();
    Side expected;
    for (const Backend* backend : Backends()) {
      Side got = first;
      MergeCase(rows, heads, dim).Merge(*backend, *pool, &got, second);
      for (size_t i = 0; i < n; ++i) {
        const double a = static_cast<double>(first.lse[i]);
        const double b = static_cast<double>(second.lse[i]);
        const double lse = std::max(a, b) + std::log2(1 + std::exp2(-std::fabs(a - b)));
        ASSERT_NEAR(static_cast<double>(got.lse[i]), lse, 1e-5);
        for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
          const size_t at = i * static_cast<size_t>(dim) + d;
          const double o = std::exp2(a - lse) * static_cast<double>(first.o[at]) +
                           std::exp2(b - lse) * static_cast<double>(second.o[at]);
          ASSERT_NEAR(static_cast<double>(got.o[at]), o, 4e-6) << dim << " " << at;
        }
      }
      if (expected.o.empty()) expected = got;
      EXPECT_EQ(std::memcmp(got.o.data(), expected.o.data(), got.o.size() * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(got.lse.data(), expected.lse.data(), n * sizeof(float)), 0);
    }
  }
}

}  // namespace
}  // namespace quire
