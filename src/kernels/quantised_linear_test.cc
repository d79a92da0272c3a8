#include "kernels/reference/quantised_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/quantised_weights.h"
#include "kernels/testing/nan_memory.h"
#include "kernels/testing/quantised_rows.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> RandomRows(WeightFormat format, int64_t n, int64_t k, uint64_t seed) {
  return RandomQuantisedRows(format, n, k, 4, seed);
}

struct Case {
  WeightFormat format = WeightFormat::kQ8_0;
  int64_t rows = 1;
  int64_t n = 1;
  int64_t k = 256;
  bool bias = false;
};

std::string Describe(const Case& c) {
  return std::string(WeightFormatName(c.format)) + " rows " + std::to_string(c.rows) + " n " +
         std::to_string(c.n) + " k " + std::to_string(c.k);
}

struct Data {
  explicit Data(const Case& c, uint64_t seed = 1)
      : weights(RandomRows(c.format, c.n, c.k, seed)), bias(static_cast<size_t>(c.n)) {
    RandomSequence random(seed + 1);
    for (int64_t i = 0; i < c.rows * c.k; ++i) {
      x.push_back(static_cast<float>(random.Uniform(-2, 2)));
    }
    for (float& b : bias) b = static_cast<float>(random.Uniform(-1, 1));
  }

  std::vector<std::byte> weights;
  std::vector<float> x;  // [row][k]
  std::vector<float> bias;
};

std::vector<float> RunKernel(const Backend& backend, const Case& c, const Data& data,
                             ParallelRunner& runner, const int32_t* input_order = nullptr) {
  const HostMemory packed = HostMemory::Allocate(PackedQuantisedBytes(c.format, c.n, c.k)).value();
  PackQuantised(c.format, data.weights.data(), c.n, c.k, 0, packed.data(), runner);
  const HostMemory scratch = NaNMemory(backend.quantised_scratch_bytes(c.rows, c.k));
  std::vector<float> y(static_cast<size_t>(c.rows * c.n), kNaN);
  const QuantisedLinear w{.format = c.format,
                          .n = c.n,
                          .k = c.k,
                          .data = packed.data(),
                          .bias = c.bias ? data.bias.data() : nullptr,
                          .input_order = input_order};
  const QuantisedLinearArgs args{.parts = {&w, 1},
                                 .row_count = c.rows,
                                 .x = data.x.data(),
                                 .x_stride = c.k,
                                 .y = y.data(),
                                 .y_stride = c.n,
                                 .scratch = scratch.data()};
  backend.quantised_linear(args, runner);
  return y;
}

std::vector<float> RunKernel(const Backend& backend, const Case& c, const Data& data,
                             const int32_t* input_order = nullptr) {
  const auto pool = CreateThreadPool(1).value();
  return RunKernel(backend, c, data, *pool, input_order);
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<float> Expected(const Case& c, const Data& data) {
  return reference::QuantisedLinear(c.format, data.x.data(), data.weights.data(),
                                    c.bias ? data.bias.data() : nullptr, c.rows, c.n, c.k);
}

class QuantisedLinearTest : public testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }

  void CheckBits(const Case& c) {
    const Data data(c);
    EXPECT_TRUE(SameBits(Expected(c, data), RunKernel(backend(), c, data))) << Describe(c);
  }
};

TEST_P(QuantisedLinearTest, BitsAreThoseOfTheReferenceForEverySizeAroundTheTiles) {
  for (const WeightFormat format : kWeightFormats) {
    const int64_t block = BlockInputs(format);
    for (const int64_t n : {1, 15, 16, 17, 33}) {
      CheckBits({.format = format, .rows = 3, .n = n, .k = 256, .bias = true});
    }
    for (const int64_t k : {block, 2 * block, 3 * block, 5 * block}) {
      CheckBits({.format = format, .rows = 2, .n = 17, .k = k});
      CheckBits({.format = format, .rows = 18, .n = 17, .k = k});
    }
    for (const int64_t rows : {1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 20, 21, 28, 33, 49}) {
      CheckBits({.format = format, .rows = rows, .n = 19, .k = 512, .bias = true});
    }
  }
  // Runs of 8 groups that end in a part of one.
  CheckBits({.format = WeightFormat::kI4ZWide, .rows = 13, .n = 33, .k = 896});
  CheckBits({.format = WeightFormat::kI4ZWide, .rows = 32, .n = 33, .k = 896});
  // More rows than the tile unit's passes over a strip take at a time.
  CheckBits({.format = WeightFormat::kQ5_1, .rows = 265, .n = 17, .k = 288, .bias = true});
  CheckBits({.format = WeightFormat::kQ6_K, .rows = 130, .n = 17, .k = 512});
  // Rows so long that few of them stay in L2 together.
  CheckBits({.format = WeightFormat::kQ4_0, .rows = 30, .n = 17, .k = 65536});
}

// Codes and activations of the greatest magnitude: no sum saturates.
TEST_P(QuantisedLinearTest, ExtremeCodesDoNotSaturate) {
  for (const WeightFormat format : kWeightFormats) {
    for (const int fill : {0x00, 0x7F, 0x80, 0xFF}) {
      const Case c{.format = format, .rows = 18, .n = 17, .k = 256};
      Data data(c);
      for (std::byte& byte : data.weights) byte = static_cast<std::byte>(fill);
      SetScales(format, 1000, data.weights, [] { return 1.0F; });
      for (size_t i = 0; i < data.x.size(); ++i) {
        data.x[i] = i / 256 % 2 == 0 || i % 2 == 0 ? 3.0F : -3.0F;
      }
      EXPECT_TRUE(SameBits(Expected(c, data), RunKernel(backend(), c, data)))
          << Describe(c) << fill;
      Case few = c;
      few.rows = 2;
      EXPECT_TRUE(SameBits(Expected(few, data), RunKernel(backend(), few, data)))
          << Describe(few) << fill;
    }
  }
}

// What the quantised rows cost: half a step of their group's scale per input.
TEST_P(QuantisedLinearTest, OutputsAreNearThoseOfTheStoredWeights) {
  for (const WeightFormat format : kWeightFormats) {
    const Case c{.format = format, .rows = 3, .n = 20, .k = 512};
    const Data data(c);
    const std::vector<float> y = RunKernel(backend(), c, data);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t output = 0; output < c.n; ++output) {
        double sum = 0;
        double bound = 0;
        for (int64_t i = 0; i < c.k; ++i) {
          const std::byte* const row = data.weights.data() + output * StoredRowBytes(format, c.k);
          const double w = reference::StoredWeight(format, row, i);
          sum += w * data.x[static_cast<size_t>(r * c.k + i)];
          bound += std::abs(w) * (1.0001 / 127);
        }
        EXPECT_NEAR(y[static_cast<size_t>(r * c.n + output)], sum, bound) << Describe(c);
      }
    }
  }
}

TEST_P(QuantisedLinearTest, ARowsResultDoesNotDependOnTheOtherRowsOrTheThreads) {
  for (const WeightFormat format : kWeightFormats) {
    const Case all{.format = format, .rows = 40, .n = 70, .k = 1024, .bias = true};
    const Data data(all);
    const std::vector<float> y = RunKernel(backend(), all, data);
    for (const int64_t rows : {1, 2, 5, 13}) {
      Case some = all;
      some.rows = rows;
      Data part = data;
      part.x.erase(part.x.begin(), part.x.end() - rows * all.k);
      const std::vector<float> alone = RunKernel(backend(), some, part);
      EXPECT_EQ(0, std::memcmp(alone.data(), y.data() + (all.rows - rows) * all.n,
                               alone.size() * sizeof(float)))
          << Describe(some);
    }
    for (const int threads : {2, 5}) {
      EXPECT_TRUE(SameBits(y, RunKernel(backend(), all, data, *CreateThreadPool(threads).value())));
    }
  }
}

void CheckAccumulating(const Backend& backend, int64_t rows) {
  const Case c{.format = WeightFormat::kQ4_0, .rows = rows, .n = 21, .k = 128, .bias = true};
  const Data data(c);
  const auto pool = CreateThreadPool(1).value();
  const HostMemory packed = HostMemory::Allocate(PackedQuantisedBytes(c.format, c.n, c.k)).value();
  PackQuantised(c.format, data.weights.data(), c.n, c.k, 0, packed.data(), *pool);
  const HostMemory scratch = NaNMemory(backend.quantised_scratch_bytes(c.rows, c.k));
  constexpr int64_t kStride = 30;
  std::vector<float> y(static_cast<size_t>(c.rows * kStride), 0.25F);
  const QuantisedLinear w{
      .format = c.format, .n = c.n, .k = c.k, .data = packed.data(), .bias = data.bias.data()};
  backend.quantised_linear({.parts = {&w, 1},
                            .row_count = c.rows,
                            .x = data.x.data(),
                            .x_stride = c.k,
                            .y = y.data(),
                            .y_stride = kStride,
                            .accumulate = true,
                            .scratch = scratch.data()},
                           *pool);
  const std::vector<float> alone = RunKernel(backend, c, data);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < kStride; ++i) {
      const float added = i < c.n ? alone[static_cast<size_t>(r * c.n + i)] : 0.0F;
      EXPECT_EQ(y[static_cast<size_t>(r * kStride + i)], 0.25F + added);
    }
  }
}

// Also where the last tile of rows begins inside the one before.
TEST_P(QuantisedLinearTest, AccumulatesTheFinishedOutputOnce) {
  for (const int64_t rows : {3, 17, 27}) CheckAccumulating(backend(), rows);
}

// Matrices that share a row: each output is what it is alone.
TEST_P(QuantisedLinearTest, SeveralPartsGiveTheBitsOfEach) {
  constexpr int64_t kK = 512;
  constexpr int64_t kStride = 150;
  const Case cases[] = {{.format = WeightFormat::kQ4_K, .n = 40, .k = kK, .bias = true},
                        {.format = WeightFormat::kQ6_K, .n = 17, .k = kK},
                        {.format = WeightFormat::kQ8_0, .n = 1, .k = kK, .bias = true},
                        {.format = WeightFormat::kQ4_K, .n = 65, .k = kK}};
  for (const int64_t rows : {1, 6, 40}) {
    std::vector<Data> data;
    std::vector<HostMemory> packed;
    std::vector<QuantisedLinear> parts;
    for (size_t i = 0; i < std::size(cases); ++i) {
      Case c = cases[i];
      c.rows = rows;
      data.emplace_back(c, i + 1);
      packed.push_back(HostMemory::Allocate(PackedQuantisedBytes(c.format, c.n, kK)).value());
      PackQuantised(c.format, data[i].weights.data(), c.n, kK, 0, packed[i].data(),
                    *CreateThreadPool(1).value());
    }
    for (size_t i = 0; i < std::size(cases); ++i) {
      data[i].x = data[0].x;
      parts.push_back({.format = cases[i].format,
                       .n = cases[i].n,
                       .k = kK,
                       .data = packed[i].data(),
                       .bias = cases[i].bias ? data[i].bias.data() : nullptr});
    }
    const HostMemory scratch = NaNMemory(backend().quantised_scratch_bytes(rows, kK));
    for (const int threads : {1, 3}) {
      std::vector<float> y(static_cast<size_t>(rows * kStride), 0.25F);
      backend().quantised_linear({.parts = parts,
                                  .row_count = rows,
                                  .x = data[0].x.data(),
                                  .x_stride = kK,
                                  .y = y.data(),
                                  .y_stride = kStride,
                                  .scratch = scratch.data()},
                                 *CreateThreadPool(threads).value());
      int64_t first = 0;
      for (size_t i = 0; i < std::size(cases); ++i) {
        Case c = cases[i];
        c.rows = rows;
        const std::vector<float> alone = RunKernel(backend(), c, data[i]);
        for (int64_t r = 0; r < rows; ++r) {
          EXPECT_EQ(0, std::memcmp(alone.data() + r * c.n, y.data() + r * kStride + first,
                                   static_cast<size_t>(c.n) * sizeof(float)))
              << Describe(c) << ' ' << threads;
        }
        first += c.n;
      }
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = first; i < kStride; ++i) {
          EXPECT_EQ(y[static_cast<size_t>(r * kStride + i)], 0.25F);
        }
      }
    }
  }
}

// Weights whose inputs stand in another order, as quantisers leave them that sort by activations.
TEST_P(QuantisedLinearTest, InputsAreTakenInTheOrderOfTheWeights) {
  const Case c{.format = WeightFormat::kI4Z, .rows = 5, .n = 21, .k = 160, .bias = true};
  const Data data(c);
  Data shuffled = data;
  std::vector<int32_t> order;
  for (int64_t i = 0; i < c.k; ++i) order.push_back(static_cast<int32_t>(i * 7 % c.k));
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < c.k; ++i) {
      const auto from = static_cast<size_t>(order[static_cast<size_t>(i)]);
      shuffled.x[static_cast<size_t>(r * c.k) + from] = data.x[static_cast<size_t>(r * c.k + i)];
    }
  }
  EXPECT_TRUE(SameBits(Expected(c, data), RunKernel(backend(), c, shuffled, order.data())));
}

TEST_P(QuantisedLinearTest, NoRowsChangeNothing) {
  const Case c{.rows = 0, .n = 8};
  EXPECT_TRUE(RunKernel(backend(), c, Data(c)).empty());
}

// A group that holds an infinity or NaN makes its row NaN, and only that; tiny groups count as
// zeros.
TEST_P(QuantisedLinearTest, HostileRowsStayRows) {
  for (const WeightFormat format : kWeightFormats) {
    const Case c{.format = format, .rows = 22, .n = 18, .k = 256};
    Data data(c);
    data.x[256 + 40] = kNaN;
    data.x[2 * 256 + 255] = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < c.k; ++i) {
      data.x[static_cast<size_t>(3 * c.k + i)] = 0x1p-140F;
      data.x[static_cast<size_t>(4 * c.k + i)] = 1e30F;
    }
    const std::vector<float> y = RunKernel(backend(), c, data);
    const std::vector<float> expected = Expected(c, data);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t i = 0; i < c.n; ++i) {
        const auto at = static_cast<size_t>(r * c.n + i);
        EXPECT_EQ(std::isnan(y[at]), std::isnan(expected[at]));
        EXPECT_EQ(std::isnan(y[at]), r == 1 || r == 2)
            << Describe(c) << ' ' << r << ' ' << expected[at];
        EXPECT_TRUE(r != 3 || y[at] == 0);
        EXPECT_TRUE(std::isnan(y[at]) || y[at] == expected[at]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, QuantisedLinearTest,
                         testing::ValuesIn(Backends().begin(), Backends().end()),
                         [](const auto& param) { return std::string(param.param->name); });

#if QUIRE_SIMD && !QUIRE_EMULATE_AVX512
// The path avx512 as CPUs without VNNI run it, which this CPU would not choose.
std::vector<const Backend*> WithoutVnni() {
  for (const Backend* const backend : Backends()) {
    if (backend == &kAvx512VnniBackend) return {&kAvx512Backend};
  }
  return {};
}

INSTANTIATE_TEST_SUITE_P(WithoutVnni, QuantisedLinearTest, testing::ValuesIn(WithoutVnni()),
                         [](const auto& param) { return std::string(param.param->name); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(QuantisedLinearTest);
#endif

TEST(QuantisedWeights, StoredRowsAreTheReferencesNumbers) {
  for (const WeightFormat format : kWeightFormats) {
    const std::vector<std::byte> row = RandomRows(format, 1, 1024, 3);
    std::vector<float> values(1024);
    DequantiseRow(format, row.data(), 1024, values.data());
    for (int64_t i = 0; i < 1024; ++i) {
      const double expected = reference::StoredWeight(format, row.data(), i);
      EXPECT_NEAR(values[static_cast<size_t>(i)], expected, 2e-6 * (1 + std::abs(expected)))
          << WeightFormatName(format) << ' ' << i;
    }
  }
}

// The two least of the scale's 256 bytes are subnormal numbers, the last is not a number.
TEST(QuantisedWeights, PowersOfTwoAreScalesToTheLast) {
  for (int exponent = 0; exponent < 256; ++exponent) {
    std::vector<std::byte> row(17, std::byte{0x11});
    row[0] = static_cast<std::byte>(exponent);
    std::vector<float> values(32);
    DequantiseRow(WeightFormat::kMXFP4, row.data(), 32, values.data());
    if (exponent == 255) {
      EXPECT_TRUE(std::isnan(values[0]));
    } else {
      EXPECT_EQ(values[0], std::ldexp(1.0F, exponent - 128)) << exponent;
    }
  }
}

TEST(QuantisedWeights, TablesAreTheReferences) {
  for (const WeightFormat format : {WeightFormat::kIQ4_NL, WeightFormat::kMXFP4}) {
    std::vector<std::byte> row(static_cast<size_t>(BlockBytes(format)), std::byte{0});
    SetScales(format, 127, row, [] { return 1.0F; });
    for (int code = 0; code < 16; ++code) {
      row.back() = static_cast<std::byte>(code);
      float values[32];
      DequantiseRow(format, row.data(), 32, values);
      EXPECT_EQ(values[15], reference::StoredWeight(format, row.data(), 15)) << code;
    }
  }
}

TEST(QuantisedWeights, PackingLosesNoBit) {
  const auto pool = CreateThreadPool(2).value();
  constexpr int64_t kN = 37;
  constexpr int64_t kK = 768;
  for (const WeightFormat format : kWeightFormats) {
    const std::vector<std::byte> rows = RandomRows(format, kN, kK, 9);
    const HostMemory packed = HostMemory::Allocate(PackedQuantisedBytes(format, kN, kK)).value();
    PackQuantised(format, rows.data(), kN, kK, 0, packed.data(), *pool);
    std::vector<float> stored(kK);
    std::vector<float> read(kK);
    for (int64_t row = 0; row < kN; ++row) {
      DequantiseRow(format, rows.data() + row * StoredRowBytes(format, kK), kK, stored.data());
      ReadPackedQuantisedRow(format, packed.data(), kK, row, read.data());
      EXPECT_TRUE(SameBits(stored, read)) << WeightFormatName(format) << ' ' << row;
    }
  }
}

// Heads of 6 rows that lie as 0, 3, 1, 4, 2, 5.
TEST(QuantisedWeights, RotaryHeadsArePackedInTheOrderOfHalves) {
  const auto pool = CreateThreadPool(1).value();
  constexpr int64_t kN = 18;
  constexpr int64_t kK = 64;
  const std::vector<std::byte> rows = RandomRows(WeightFormat::kQ8_0, kN, kK, 9);
  const HostMemory packed =
      HostMemory::Allocate(PackedQuantisedBytes(WeightFormat::kQ8_0, kN, kK)).value();
  PackQuantised(WeightFormat::kQ8_0, rows.data(), kN, kK, 6, packed.data(), *pool);
  constexpr int64_t kStored[] = {0, 2, 4, 1, 3, 5};
  std::vector<float> stored(kK);
  std::vector<float> read(kK);
  for (int64_t row = 0; row < kN; ++row) {
    const int64_t from = row / 6 * 6 + kStored[row % 6];
    EXPECT_EQ(StoredRowOf(row, 6), from);
    DequantiseRow(WeightFormat::kQ8_0, rows.data() + from * StoredRowBytes(WeightFormat::kQ8_0, kK),
                  kK, stored.data());
    ReadPackedQuantisedRow(WeightFormat::kQ8_0, packed.data(), kK, row, read.data());
    EXPECT_TRUE(SameBits(stored, read)) << row;
  }
}

}  // namespace
}  // namespace quire
