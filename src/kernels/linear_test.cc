#include "kernels/reference/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/testing/host_float_environment.h"
#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/linear_layout.h"
#include "kernels/testing/nan_memory.h"
#include "kernels/testing/random_floats.h"
#include "tensor/half.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

constexpr DType kWeightTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Rounded(std::vector<float> values, DType dtype) {
  std::vector<float> bits(values.size());
  const int64_t count = static_cast<int64_t>(values.size());
  ConvertElements(values.data(), DType::kF32, bits.data(), dtype, count);
  ConvertElements(bits.data(), dtype, values.data(), DType::kF32, count);
  return values;
}

struct Case {
  DType dtype = DType::kF32;
  DType x_rounding = DType::kF32;
  int64_t rows = 1;
  int64_t n = 1;
  int64_t k = 1;
  bool bias = false;
  bool accumulate = false;
};

// Rows as weights of `dtype` meet them in a model.
DType BF16Only(DType dtype) { return dtype == DType::kBF16 ? dtype : DType::kF32; }

std::string Describe(const Case& c) {
  return std::string(DTypeName(c.dtype)) + " x " + std::string(DTypeName(c.x_rounding)) + " rows " +
         std::to_string(c.rows) + " n " + std::to_string(c.n) + " k " + std::to_string(c.k) +
         (c.bias ? " bias" : "") + (c.accumulate ? " accumulate" : "");
}

// Inputs of one case. Rows of x and y are further apart than they are long, with NaN between them.
struct Data {
  explicit Data(const Case& c)
      : x_stride(c.k + 3),
        y_stride(c.n + 5),
        weights(Rounded(RandomFloats(c.n * c.k, 1), c.dtype)),
        bias(RandomFloats(c.n, 2)),
        x(static_cast<size_t>(c.rows * x_stride), kNaN),
        y(static_cast<size_t>(c.rows * y_stride), kNaN) {
    const std::vector<float> dense = RandomFloats(c.rows * c.k, 3);
    const std::vector<float> old_y = RandomFloats(c.rows * c.n, 4);
    for (int64_t r = 0; r < c.rows; ++r) {
      std::copy_n(dense.begin() + r * c.k, c.k, x.begin() + r * x_stride);
      if (c.accumulate) std::copy_n(old_y.begin() + r * c.n, c.n, y.begin() + r * y_stride);
    }
  }

  int64_t x_stride;
  int64_t y_stride;
  std::vector<float> weights;
  std::vector<float> bias;
  std::vector<float> x;
  std::vector<float> y;  // before the call
};

// y after the call, with its gaps.
std::vector<float> RunLinear(const Backend& backend, const Case& c, const Data& data,
                             ParallelRunner& runner) {
  const HostMemory packed = NaNMemory(backend.packed_linear_bytes(c.dtype, c.n, c.k));
  backend.pack_linear(data.weights.data(), DType::kF32, c.n, c.k, c.dtype, packed.data(), runner);
  const HostMemory scratch =
      NaNMemory(backend.linear_scratch_bytes(c.rows, c.n, c.k, runner.worker_count()));
  std::vector<float> y = data.y;
  LinearArgs args;
  args.w = {c.dtype, c.n, c.k, packed.data(), c.bias ? data.bias.data() : nullptr};
  args.row_count = c.rows;
  args.x = data.x.data();
  args.x_stride = data.x_stride;
  args.x_rounding = c.x_rounding;
  args.y = y.data();
  args.y_stride = data.y_stride;
  args.accumulate = c.accumulate;
  args.scratch = scratch.data();
  backend.linear(args, runner);
  return y;
}

std::vector<float> RunLinear(const Backend& backend, const Case& c, const Data& data) {
  return RunLinear(backend, c, data, *CreateThreadPool(1).value());
}

std::vector<float> RunLinear(const Backend& backend, const Case& c) {
  return RunLinear(backend, c, Data(c));
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Longest chain of roundings times half an ulp, twice over for the second-order terms.
double RelativeBound(int64_t k) {
  const int64_t chain = std::min(k, InputBlockSize(k)) + k / InputBlockSize(k) + 3;
  return 2 * static_cast<double>(chain) * 0x1p-24;
}

void CheckAgainstReference(const Backend& backend, const Case& c) {
  SCOPED_TRACE(std::string(backend.name) + ": " + Describe(c));
  const Data data(c);
  std::vector<float> x;
  for (int64_t r = 0; r < c.rows; ++r) {
    x.insert(x.end(), data.x.begin() + r * data.x_stride, data.x.begin() + r * data.x_stride + c.k);
  }
  const auto expected = reference::Linear(Rounded(x, c.x_rounding).data(), data.weights.data(),
                                          c.bias ? data.bias.data() : nullptr, c.rows, c.n, c.k);
  const std::vector<float> y = RunLinear(backend, c, data);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < data.y_stride; ++i) {
      const size_t at = static_cast<size_t>(r * data.y_stride + i);
      if (i >= c.n) {
        ASSERT_TRUE(std::isnan(y[at])) << "wrote behind row " << r;
        continue;
      }
      const size_t dense = static_cast<size_t>(r * c.n + i);
      const double old = c.accumulate ? data.y[at] : 0.0;
      const double magnitude = expected.magnitude[dense] + std::abs(old);
      ASSERT_NEAR(y[at], expected.y[dense] + old, magnitude * RelativeBound(c.k)) << r << ' ' << i;
    }
  }
}

class LinearTest : public testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }
};

TEST_P(LinearTest, AgreesWithTheReferenceForEverySizeAroundTheBlocks) {
  for (const DType dtype : kWeightTypes) {
    for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 65}) {
      for (const int64_t k : {1, 2, 3, 16, 33}) {
        CheckAgainstReference(backend(), {.dtype = dtype, .rows = 3, .n = n, .k = k, .bias = true});
      }
    }
    for (const int64_t k : {511, 512, 513, 1023, 1024, 1025, 2049}) {
      CheckAgainstReference(backend(), {.dtype = dtype, .rows = 2, .n = 33, .k = k});
    }
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 25, 37, 121}) {
      CheckAgainstReference(backend(),
                            {.dtype = dtype, .rows = rows, .n = 35, .k = 67, .bias = true});
      CheckAgainstReference(backend(), {.dtype = dtype,
                                        .x_rounding = DType::kBF16,
                                        .rows = rows,
                                        .n = 35,
                                        .k = 67,
                                        .bias = true});
    }
  }
  // So long rows that outputs go in groups.
  CheckAgainstReference(backend(),
                        {.dtype = DType::kBF16, .rows = 16, .n = 70, .k = 8201, .bias = true});
  CheckAgainstReference(
      backend(),
      {.dtype = DType::kBF16, .x_rounding = DType::kBF16, .rows = 40, .n = 35, .k = 2119});
  // Rows of several tasks.
  CheckAgainstReference(backend(), {.dtype = DType::kBF16,
                                    .x_rounding = DType::kBF16,
                                    .rows = 270,
                                    .n = 290,
                                    .k = 1131,
                                    .bias = true});
}

TEST_P(LinearTest, RoundsRowsWhenAsked) {
  for (const DType dtype : kWeightTypes) {
    for (const int64_t k : {1, 2, 7, 64, 1027}) {
      CheckAgainstReference(
          backend(),
          {.dtype = dtype, .x_rounding = DType::kBF16, .rows = 5, .n = 40, .k = k, .bias = true});
    }
  }
}

TEST_P(LinearTest, AccumulatesTheFinishedOutputOnce) {
  for (const bool bias : {false, true}) {
    Case c{.rows = 14, .n = 37, .k = 1100, .bias = bias, .accumulate = true};
    CheckAgainstReference(backend(), c);
    const Data data(c);
    const std::vector<float> y = RunLinear(backend(), c, data);
    c.accumulate = false;
    const std::vector<float> alone = RunLinear(backend(), c, data);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t i = 0; i < c.n; ++i) {
        const size_t at = static_cast<size_t>(r * data.y_stride + i);
        ASSERT_EQ(y[at], data.y[at] + alone[at]);
      }
    }
  }
}

TEST_P(LinearTest, NoRowsChangeNothing) {
  const Case c{.rows = 0, .n = 8, .k = 8};
  EXPECT_TRUE(RunLinear(backend(), c).empty());
}

// The sum of each block of inputs is rounded on its own: with single chains the small terms would
// be lost.
TEST_P(LinearTest, InputsAreCutIntoBlocksOf512Or1024) {
  for (const DType dtype : kWeightTypes) {
    for (const auto& [k, block] : {std::pair<int64_t, int64_t>{1024, 512}, {2048, 1024}}) {
      // 2^24, then ones: added singly to 2^24 each one is lost; a block of its own keeps them.
      std::vector<float> weights(static_cast<size_t>(k), 1.0F);
      std::vector<float> x(static_cast<size_t>(k), 1.0F);
      x[0] = 0x1p24F;
      const auto pool = CreateThreadPool(1).value();
      const HostMemory packed = NaNMemory(backend().packed_linear_bytes(dtype, 1, k));
      backend().pack_linear(weights.data(), DType::kF32, 1, k, dtype, packed.data(), *pool);
      const HostMemory scratch = NaNMemory(backend().linear_scratch_bytes(1, 1, k, 1));
      float y = kNaN;
      LinearArgs args;
      args.w = {dtype, 1, k, packed.data(), nullptr};
      args.row_count = 1;
      args.x = x.data();
      args.x_stride = k;
      args.y = &y;
      args.y_stride = 1;
      args.scratch = scratch.data();
      backend().linear(args, *pool);
      EXPECT_EQ(y, 0x1p24F + static_cast<float>(block)) << DTypeName(dtype) << ' ' << k;
    }
  }
}

TEST_P(LinearTest, ARowsResultDoesNotDependOnTheOtherRows) {
  for (const DType dtype : kWeightTypes) {
    for (const DType rounding : {DType::kF32, DType::kBF16}) {
      const Case all{
          .dtype = dtype, .x_rounding = rounding, .rows = 130, .n = 70, .k = 1301, .bias = true};
      const Data data(all);
      const std::vector<float> y = RunLinear(backend(), all, data);
      for (const int64_t rows : {1, 2, 5, 8, 13, 16, 17, 64}) {
        Case some = all;
        some.rows = rows;
        Data part = data;
        const int64_t first = 130 - rows;
        part.x.erase(part.x.begin(), part.x.begin() + first * data.x_stride);
        part.y.resize(static_cast<size_t>(rows * data.y_stride));
        const std::vector<float> y_part = RunLinear(backend(), some, part);
        ASSERT_EQ(0, std::memcmp(y_part.data(), y.data() + first * data.y_stride,
                                 y_part.size() * sizeof(float)))
            << Describe(some);
      }
    }
  }
}

TEST_P(LinearTest, BitsDoNotDependOnTheNumberOfThreads) {
  for (const DType rounding : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : {1, 9, 16, 125, 300}) {
      const Case c{.dtype = DType::kBF16,
                   .x_rounding = rounding,
                   .rows = rows,
                   .n = 300,
                   .k = 1300,
                   .bias = true};
      const Data data(c);
      const std::vector<float> y = RunLinear(backend(), c, data);
      for (const int threads : {2, 3, 7}) {
        EXPECT_TRUE(SameBits(y, RunLinear(backend(), c, data, *CreateThreadPool(threads).value())))
            << Describe(c);
      }
    }
  }
}

// Calls every task in the calling thread as it is: a host's runner need not care for the float
// environment.
class PlainRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }
};

TEST_P(LinearTest, TheCallersFloatEnvironmentDoesNotMatter) {
  for (const DType dtype : kWeightTypes) {
    for (const int64_t rows : {1, 40}) {
      const Case c{.dtype = dtype,
                   .x_rounding = BF16Only(dtype),
                   .rows = rows,
                   .n = 33,
                   .k = 30,
                   .bias = true};
      Data data(c);
      for (float& x : data.x) x *= 0x1p-130F;  // subnormal
      for (float& b : data.bias) b *= 0x1p-130F;
      PlainRunner runner;
      const std::vector<float> y = RunLinear(backend(), c, data, runner);
      {
        const HostFloatEnvironment host(kFlushSubnormals | kRoundTowardZero);
        const std::vector<float> flushed = RunLinear(backend(), c, data, runner);
        EXPECT_TRUE(host.IsInForce());
        EXPECT_TRUE(SameBits(y, flushed)) << Describe(c);
      }
      EXPECT_NE(y[0], 0);
    }
  }
}

// NaN in one row, or in the weights of one output, stays there.
TEST_P(LinearTest, NaNStaysInItsRowAndOutput) {
  for (const DType dtype : kWeightTypes) {
    const Case c{.dtype = dtype, .x_rounding = BF16Only(dtype), .rows = 15, .n = 40, .k = 21};
    Data data(c);
    data.x[static_cast<size_t>(4 * data.x_stride + 20)] = kNaN;
    data.weights[7 * 21 + 3] = kNaN;
    const std::vector<float> y = RunLinear(backend(), c, data);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t i = 0; i < c.n; ++i) {
        ASSERT_EQ(std::isnan(y[static_cast<size_t>(r * data.y_stride + i)]), r == 4 || i == 7);
      }
    }
  }
}

TEST_P(LinearTest, PacksEveryWeightFromEveryTypeWhereTheLayoutSays) {
  const auto pool = CreateThreadPool(1).value();
  constexpr int64_t kN = 37;
  constexpr int64_t kK = 131;
  for (const DType from : kWeightTypes) {
    for (const DType to : kWeightTypes) {
      const std::vector<float> values = Rounded(RandomFloats(kN * kK, 5), from);
      std::vector<float> source(values.size());
      ConvertElements(values.data(), DType::kF32, source.data(), from, kN * kK);
      const size_t bytes = backend().packed_linear_bytes(to, kN, kK);
      ASSERT_EQ(bytes, static_cast<size_t>(OutputBlocks(kN) * PackedBlockElements(to, kK) *
                                           DTypeBytes(to)));
      const HostMemory packed = NaNMemory(bytes);
      backend().pack_linear(source.data(), from, kN, kK, to, packed.data(), *pool);
      std::vector<float> wide(bytes / static_cast<size_t>(DTypeBytes(to)));
      ConvertElements(packed.data(), to, wide.data(), DType::kF32,
                      static_cast<int64_t>(wide.size()));
      const std::vector<float> expected = Rounded(values, to);
      double left_over = 0;
      for (const float w : wide) left_over += std::abs(w);
      for (int64_t n = 0; n < kN; ++n) {
        for (int64_t k = 0; k < kK; ++k) {
          const int64_t at =
              n / kOutputBlock * PackedBlockElements(to, kK) + PackedOffset(to, n, k);
          ASSERT_EQ(wide[static_cast<size_t>(at)], expected[static_cast<size_t>(n * kK + k)]);
          left_over -= std::abs(wide[static_cast<size_t>(at)]);
        }
      }
      EXPECT_NEAR(left_over, 0, 1e-9) << "padding is not zero";
    }
  }
}

#if QUIRE_EMULATED_AMX
// What the tile unit computes and what its emulation does, which stands for it on other machines.
TEST(LinearTiles, TheEmulationGivesTheBitsOfTheTiles) {
  const Backend& tiles = *Backends().front();
  if (tiles.name != "avx512_amx") GTEST_SKIP() << "this CPU has no tiles";
  for (const int64_t rows : {1, 3, 4, 5, 16, 17, 40, 300}) {
    for (const int64_t k : {1, 30, 64, 67, 1061, 2113}) {
      Case c{.dtype = DType::kBF16, .x_rounding = DType::kBF16, .rows = rows, .n = 45, .k = k};
      EXPECT_TRUE(SameBits(RunLinear(tiles, c), RunLinear(kEmulatedAmxBackend, c))) << Describe(c);
    }
  }
}
#endif

// Numbers whose products are denormal: a row's bits are the same by tiles and, alone, by fma.
TEST_P(LinearTest, DenormalsAreTreatedAlikeForFewRowsAndMany) {
  const Case all{.dtype = DType::kBF16, .x_rounding = DType::kBF16, .rows = 40, .n = 33, .k = 77};
  Data data(all);
  RandomSequence random(6);
  for (float& x : data.x) x *= std::ldexp(1.0F, -63 - static_cast<int>(random.Bits() % 4));
  for (float& w : data.weights) w *= std::ldexp(1.0F, -61 - static_cast<int>(random.Bits() % 4));
  data.weights = Rounded(data.weights, DType::kBF16);
  const std::vector<float> y = RunLinear(backend(), all, data);
  for (int64_t row = 0; row < all.rows; ++row) {
    Case one = all;
    one.rows = 1;
    Data part = data;
    part.x.erase(part.x.begin(), part.x.begin() + row * data.x_stride);
    part.y.resize(static_cast<size_t>(data.y_stride));
    const std::vector<float> alone = RunLinear(backend(), one, part);
    ASSERT_EQ(0, std::memcmp(alone.data(), y.data() + row * data.y_stride,
                             static_cast<size_t>(all.n) * sizeof(float)))
        << row;
  }
}

// Paths without an order of their own for pairs of bfloat16 compute the same chains.
TEST_P(LinearTest, BitsAreThoseOfTheScalarPath) {
  const Backend& scalar = *FindBackend("scalar").value();
  for (const DType dtype : kWeightTypes) {
    for (const DType rounding : {DType::kF32, DType::kBF16}) {
      const bool in_pairs = dtype == DType::kBF16 && rounding == DType::kBF16;
      const bool has_own_order = backend().name == "avx512_bf16" || backend().name == "avx512_amx";
      if (in_pairs && has_own_order) continue;
      for (const int64_t rows : {1, 5, 15, 40}) {
        const Case c{
            .dtype = dtype, .x_rounding = rounding, .rows = rows, .n = 45, .k = 1061, .bias = true};
        EXPECT_TRUE(SameBits(RunLinear(scalar, c), RunLinear(backend(), c))) << Describe(c);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, LinearTest, testing::ValuesIn(Backends().begin(), Backends().end()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace quire
