// Quantised weights whose rows stay numbers: the bits are those of the numbers that the weights
// stand for, stored.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/quantised_weights.h"
#include "kernels/testing/nan_memory.h"
#include "kernels/testing/quantised_rows.h"
#include "tensor/half.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

struct Case {
  WeightFormat format = WeightFormat::kQ8_0;
  int64_t rows = 1;
  int64_t n = 1;
  int64_t k = 256;
  DType weights = DType::kBF16;
  DType x_rounding = DType::kBF16;
  bool is_ordered = false;
  bool accumulate = false;
  int threads = 1;
};

std::string Described(const Case& c) {
  return std::string(WeightFormatName(c.format)) + " as " + std::string(DTypeName(c.weights)) +
         " x " + std::string(DTypeName(c.x_rounding)) + " rows " + std::to_string(c.rows) + " n " +
         std::to_string(c.n) + " k " + std::to_string(c.k) + (c.is_ordered ? " ordered" : "");
}

// A random permutation.
std::vector<int32_t> OrderOf(int64_t k) {
  std::vector<int32_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  RandomSequence random(static_cast<uint64_t>(k));
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  return order;
}

// Rows of x, k + 3 apart.
std::vector<float> InputsOf(const Case& c) {
  RandomSequence random(3);
  std::vector<float> x(static_cast<size_t>(c.rows * (c.k + 3)));
  for (float& value : x) value = static_cast<float>(random.Uniform(-2, 2));
  return x;
}

// The rows as weights take them that lie in another order.
std::vector<float> Ordered(const Case& c, const std::vector<float>& x,
                           const std::vector<int32_t>& order) {
  std::vector<float> ordered = x;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.k; ++i) {
      ordered[static_cast<size_t>(row * (c.k + 3) + i)] =
          x[static_cast<size_t>(row * (c.k + 3) + order[static_cast<size_t>(i)])];
    }
  }
  return ordered;
}

std::vector<float> Outputs(const Backend& backend, const PackedLinear& w, const Case& c,
                           const std::vector<float>& x, ParallelRunner& runner) {
  std::vector<float> y(static_cast<size_t>(c.rows * (c.n + 5)), 0.25F);
  const HostMemory scratch =
      NaNMemory(backend.linear_scratch_bytes(c.rows, c.n, c.k, runner.worker_count()));
  backend.linear({.w = w,
                  .row_count = c.rows,
                  .x = x.data(),
                  .x_stride = c.k + 3,
                  .x_rounding = c.x_rounding,
                  .y = y.data(),
                  .y_stride = c.n + 5,
                  .accumulate = c.accumulate,
                  .scratch = scratch.data()},
                 runner);
  return y;
}

std::vector<float> NumbersOf(const Case& c, const std::vector<std::byte>& rows) {
  std::vector<float> numbers(static_cast<size_t>(c.n * c.k));
  for (int64_t r = 0; r < c.n; ++r) {
    DequantiseRow(c.format, rows.data() + r * StoredRowBytes(c.format, c.k), c.k,
                  numbers.data() + r * c.k);
  }
  return numbers;
}

// Kinds 0 to 4 are finite, 5 is infinite and 6 is NaN, where the scale has such.
void SetScale(WeightFormat format, int64_t kind, std::byte* scale) {
  constexpr uint16_t kHalves[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x7BFF, 0x7C00, 0x7E01};
  constexpr uint32_t kWords[] = {0,          0x80000000, 0x00000001, 0x80000001,
                                 0x7A000001, 0x7F800000, 0x7FC00001};
  constexpr uint8_t kPowers[] = {0, 1, 2, 127, 200, 254, 255};
  if (LayoutOf(format).scales == BlockScales::kWord) {
    std::memcpy(scale, kWords + kind, sizeof(kWords[0]));
  } else if (LayoutOf(format).scales == BlockScales::kPowerOfTwo) {
    std::memcpy(scale, kPowers + kind, sizeof(kPowers[0]));
  } else {
    std::memcpy(scale, kHalves + kind, sizeof(kHalves[0]));
  }
}

class WidenedLinearTest : public testing::TestWithParam<const Backend*> {
 protected:
  static const Backend& backend() { return *GetParam(); }

  void ExpectBitsOfTheNumbers(const Case& c) { ExpectBitsOfTheNumbers(c, RowsOf(c)); }

  static std::vector<std::byte> RowsOf(const Case& c) {
    return RandomQuantisedRows(c.format, c.n, c.k, 4, static_cast<uint64_t>(c.n + c.k));
  }

  void ExpectBitsOfTheNumbers(const Case& c, const std::vector<std::byte>& rows) {
    const auto runner = CreateThreadPool(c.threads).value();
    std::vector<float> bias(static_cast<size_t>(c.n));
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = 0.1F * static_cast<float>(i % 7);
    const std::vector<float> numbers = NumbersOf(c, rows);
    PackedLinear w{.dtype = c.weights, .n = c.n, .k = c.k, .bias = bias.data()};
    const HostMemory stored = NaNMemory(backend().packed_linear_bytes(c.weights, c.n, c.k));
    backend().pack_linear(numbers.data(), DType::kF32, c.n, c.k, c.weights, stored.data(), *runner);
    w.data = stored.data();
    const std::vector<int32_t> order = OrderOf(c.k);
    const std::vector<float> x = InputsOf(c);
    const std::vector<float> expected =
        Outputs(backend(), w, c, c.is_ordered ? Ordered(c, x, order) : x, *runner);

    const HostMemory strips =
        HostMemory::Allocate(PackedQuantisedBytes(c.format, c.n, c.k)).value();
    PackQuantised(c.format, rows.data(), c.n, c.k, 0, strips.data(), *runner);
    w.data = strips.data();
    w.blocks = c.format;
    if (c.is_ordered) w.input_order = order.data();
    const std::vector<float> y = Outputs(backend(), w, c, x, *runner);
    EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0)
        << backend().name << ": " << Described(c);
  }
};

TEST_P(WidenedLinearTest, EveryFormatInEveryType) {
  for (const WeightFormat format : kWeightFormats) {
    const int64_t block = BlockInputs(format);
    for (const DType weights : {DType::kF32, DType::kBF16}) {
      for (const DType rounding : {DType::kF32, DType::kBF16}) {
        for (const int64_t rows : {1, 3, 17}) {
          ExpectBitsOfTheNumbers({.format = format,
                                  .rows = rows,
                                  .n = 49,
                                  .k = 5 * block,
                                  .weights = weights,
                                  .x_rounding = rounding});
        }
      }
    }
  }
}

TEST_P(WidenedLinearTest, EveryNumberOfRows) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 25, 40, 130}) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      ExpectBitsOfTheNumbers({.format = WeightFormat::kQ4_K,
                              .rows = rows,
                              .n = 75,
                              .k = 1280,
                              .weights = type,
                              .x_rounding = type});
    }
  }
}

// Around strips, blocks of outputs, parts and blocks of inputs.
TEST_P(WidenedLinearTest, EverySizeAroundTheBlocks) {
  for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 48, 65}) {
    for (const int64_t k : {32, 64, 96, 128, 160, 256, 512, 544, 1024, 1056, 2080}) {
      ExpectBitsOfTheNumbers({.format = WeightFormat::kQ5_1, .rows = 2, .n = n, .k = k});
      ExpectBitsOfTheNumbers({.format = WeightFormat::kQ8_0, .rows = 7, .n = n, .k = k});
    }
    for (const int64_t k : {128, 384, 896, 1152}) {
      ExpectBitsOfTheNumbers({.format = WeightFormat::kI4ZWide, .rows = 6, .n = n, .k = k});
    }
  }
}

TEST_P(WidenedLinearTest, InputsInAnotherOrder) {
  for (const int64_t rows : {1, 5, 33}) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      ExpectBitsOfTheNumbers({.format = WeightFormat::kI4Z,
                              .rows = rows,
                              .n = 40,
                              .k = 1184,
                              .weights = type,
                              .x_rounding = type,
                              .is_ordered = true});
    }
  }
}

TEST_P(WidenedLinearTest, ThreadsAndSumsThatAreAdded) {
  for (const int threads : {1, 2, 5}) {
    ExpectBitsOfTheNumbers({.format = WeightFormat::kQ6_K,
                            .rows = 37,
                            .n = 515,
                            .k = 768,
                            .accumulate = true,
                            .threads = threads});
  }
}

// Scales at the ends of their range, subnormal numbers among them, and such as are no numbers.
TEST_P(WidenedLinearTest, ScalesOfEveryKind) {
  for (const WeightFormat format : {WeightFormat::kQ8_0, WeightFormat::kQ4_1, WeightFormat::kMXFP4,
                                    WeightFormat::kI8G, WeightFormat::kQ6_K}) {
    const Case c{.format = format, .rows = 2, .n = 20, .k = 512};
    std::vector<std::byte> rows = RowsOf(c);
    const int64_t block_bytes = BlockBytes(format);
    const int64_t scale_at = format == WeightFormat::kQ6_K ? block_bytes - 2 : 0;
    for (int64_t block = 0; block < std::ssize(rows) / block_bytes; ++block) {
      // An output that is infinite or NaN tells little: most blocks have others.
      const int64_t kind = block % 97 == 0 ? 5 + block / 97 % 2 : block % 5;
      SetScale(format, kind, rows.data() + block * block_bytes + scale_at);
    }
    for (const DType type : {DType::kF32, DType::kBF16}) {
      Case typed = c;
      typed.weights = typed.x_rounding = type;
      ExpectBitsOfTheNumbers(typed, rows);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, WidenedLinearTest,
                         testing::ValuesIn(Backends().begin(), Backends().end()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace quire
