// Weights as float8 codes: the bits are those of the numbers that the codes stand for, stored.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/float8_weights.h"
#include "kernels/testing/nan_memory.h"
#include "tensor/float8.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

// [n][k] codes with all kinds of scales, and the numbers that they stand for.
struct Float8Matrix {
  int64_t n, k;
  Float8Scales layout;
  std::vector<uint8_t> codes = {};
  std::vector<float> scales = {};
  std::vector<float> numbers = {};
};

// `exponent`: the greatest of the scales', which lie within eight powers of two.
Float8Matrix RandomMatrix(int64_t n, int64_t k, int64_t segment_inputs, bool of_outputs,
                          int exponent = -9) {
  Float8Matrix m{.n = n, .k = k, .layout = {nullptr, segment_inputs, of_outputs}};
  RandomSequence random(static_cast<uint64_t>(n * 7919 + k + segment_inputs));
  const int64_t count = Float8ScaleCount(m.layout, n, k);
  for (int64_t i = 0; i < count; ++i) {
    const double scale = std::ldexp(random.Uniform(0.5, 1), exponent - static_cast<int>(i % 8));
    // Also numbers of few bits: there products lie in the middle of two bfloat16 numbers.
    const double coarse = std::ldexp(std::floor(std::ldexp(scale, 8 - exponent)), exponent - 8);
    m.scales.push_back(static_cast<float>(i % 3 == 0 && coarse > 0 ? coarse : scale));
  }
  const int64_t segments = Float8Segments(m.layout, k);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      // Each code that is a number stands somewhere, subnormal ones often.
      auto code = static_cast<uint8_t>(random.Below(256));
      if (random.Below(4) == 0) code &= 0x87;
      if ((code & 0x7F) == 0x7F) code = 0x80;
      const int64_t segment = row / kOutputBlock * segments + i / segment_inputs;
      const int64_t at = of_outputs ? segment * kOutputBlock + row % kOutputBlock : segment;
      m.codes.push_back(code);
      m.numbers.push_back(F8E4M3ToF32(code) * m.scales[static_cast<size_t>(at)]);
    }
  }
  return m;
}

struct Call {
  DType dtype;
  DType x_rounding;
  int64_t rows;
  bool accumulate = false;
};

std::string Described(const Float8Matrix& m, const Call& call) {
  return std::string(DTypeName(call.dtype)) + " x " + std::string(DTypeName(call.x_rounding)) +
         " rows " + std::to_string(call.rows) + " n " + std::to_string(m.n) + " k " +
         std::to_string(m.k) + " segments of " + std::to_string(m.layout.segment_inputs) +
         (m.layout.of_outputs ? " of outputs" : "");
}

std::vector<float> Outputs(const Backend& backend, const PackedLinear& w, const Call& call,
                           ParallelRunner& runner, double x_size = 1) {
  RandomSequence random(3);
  std::vector<float> x(static_cast<size_t>(call.rows * (w.k + 3)));
  for (float& value : x) value = static_cast<float>(random.Uniform(-x_size, x_size));
  std::vector<float> y(static_cast<size_t>(call.rows * (w.n + 5)), 0.25F);
  const HostMemory scratch =
      NaNMemory(backend.linear_scratch_bytes(call.rows, w.n, w.k, runner.worker_count()));
  backend.linear({.w = w,
                  .row_count = call.rows,
                  .x = x.data(),
                  .x_stride = w.k + 3,
                  .x_rounding = call.x_rounding,
                  .y = y.data(),
                  .y_stride = w.n + 5,
                  .accumulate = call.accumulate,
                  .scratch = scratch.data()},
                 runner);
  return y;
}

void ExpectBitsOfTheNumbers(const Backend& backend, const Float8Matrix& m, const Call& call,
                            int threads = 1, double x_size = 1) {
  const auto runner = CreateThreadPool(threads).value();
  std::vector<float> bias(static_cast<size_t>(m.n));
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = 0.1F * static_cast<float>(i % 7);
  PackedLinear w{.dtype = call.dtype, .n = m.n, .k = m.k, .bias = bias.data()};
  const HostMemory dense = NaNMemory(backend.packed_linear_bytes(call.dtype, m.n, m.k));
  backend.pack_linear(m.numbers.data(), DType::kF32, m.n, m.k, call.dtype, dense.data(), *runner);
  w.data = dense.data();
  const std::vector<float> expected = Outputs(backend, w, call, *runner, x_size);

  std::vector<const uint8_t*> rows;
  for (int64_t row = 0; row < m.n; ++row) rows.push_back(m.codes.data() + row * m.k);
  const HostMemory packed = HostMemory::Allocate(PackedFloat8Bytes(m.n, m.k)).value();
  auto* const codes = reinterpret_cast<uint8_t*>(packed.data());
  ASSERT_EQ(PackFloat8(rows, m.k, codes, *runner), -1);
  w.data = packed.data();
  w.float8 = m.layout;
  w.float8.data = m.scales.data();
  const std::vector<float> y = Outputs(backend, w, call, *runner, x_size);
  EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0)
      << backend.name << ": " << Described(m, call);
}

class Float8LinearTest : public testing::TestWithParam<const Backend*> {
 protected:
  void Expect(const Float8Matrix& m, int64_t rows, int threads = 1) const {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const DType rounding : {DType::kF32, DType::kBF16}) {
        ExpectBitsOfTheNumbers(*GetParam(), m, {dtype, rounding, rows}, threads);
      }
    }
  }
};

TEST_P(Float8LinearTest, EveryNumberOfRows) {
  for (const bool of_outputs : {false, true}) {
    const Float8Matrix m = RandomMatrix(75, 1301, 128, of_outputs);
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 25, 40, 130})
      Expect(m, rows);
  }
}

TEST_P(Float8LinearTest, EverySizeAroundTheBlocks) {
  for (const int64_t n : {1, 16, 31, 32, 33, 65}) {
    for (const int64_t k : {1, 2, 3, 31, 64, 127, 128, 129, 512, 513, 1024, 1025, 2049}) {
      Expect(RandomMatrix(n, k, k, n % 2 == 0), 2);
      Expect(RandomMatrix(n, k, 128, n % 2 != 0), 7);
    }
  }
}

// Also such as end between the two inputs of a pair.
TEST_P(Float8LinearTest, SegmentsOfAnySize) {
  for (const int64_t segment : {1, 2, 3, 5, 16, 31, 32, 48, 100, 127, 128, 129, 700, 5000}) {
    for (const bool of_outputs : {false, true}) {
      const Float8Matrix m = RandomMatrix(70, 1131, segment, of_outputs);
      for (const int64_t rows : {1, 20}) Expect(m, rows);
    }
  }
}

// Numbers that are subnormal as float32 or bfloat16, and those that overflow when rounded.
TEST_P(Float8LinearTest, ScalesAtTheEndsOfTheirRange) {
  for (const int exponent : {-140, -132, -120, 110}) {
    const Float8Matrix m = RandomMatrix(40, 200, 64, true, exponent);
    for (const int64_t rows : {1, 5, 20}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        ExpectBitsOfTheNumbers(*GetParam(), m, {dtype, dtype, rows}, 1, 0x1p-10);
      }
    }
  }
  Float8Matrix m = RandomMatrix(40, 200, 64, false);
  for (float& scale : m.scales) scale = kFloat8ScaleMax;
  for (size_t i = 0; i < m.codes.size(); ++i) {
    m.numbers[i] = F8E4M3ToF32(m.codes[i]) * kFloat8ScaleMax;
    ASSERT_TRUE(std::isfinite(m.numbers[i]));
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ExpectBitsOfTheNumbers(*GetParam(), m, {dtype, dtype, 3}, 1, 0x1p-20);
  }
}

TEST_P(Float8LinearTest, AnyNumberOfThreads) {
  const Float8Matrix m = RandomMatrix(200, 600, 128, false);
  for (const int threads : {2, 5}) {
    for (const int64_t rows : {1, 9, 130}) Expect(m, rows, threads);
  }
}

TEST_P(Float8LinearTest, AccumulatesTheFinishedOutput) {
  const Float8Matrix m = RandomMatrix(37, 1100, 128, true);
  for (const int64_t rows : {1, 14}) {
    ExpectBitsOfTheNumbers(*GetParam(), m, {DType::kBF16, DType::kBF16, rows, true});
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, Float8LinearTest,
                         testing::ValuesIn(Backends().begin(), Backends().end()),
                         [](const auto& param) { return std::string(param.param->name); });

// ---- packing

TEST(PackFloat8, EveryCodeStandsWhereTheLayoutSays) {
  const auto runner = CreateThreadPool(2).value();
  const Float8Matrix m = RandomMatrix(70, 33, 33, false);
  std::vector<const uint8_t*> rows;
  for (int64_t row = 0; row < m.n; ++row) rows.push_back(m.codes.data() + row * m.k);
  std::vector<uint8_t> packed(PackedFloat8Bytes(m.n, m.k));
  ASSERT_EQ(packed.size(), 3u * 34 * 32);
  ASSERT_EQ(PackFloat8(rows, m.k, packed.data(), *runner), -1);
  for (int64_t row = 0; row < 96; ++row) {
    for (int64_t i = 0; i < 34; ++i) {
      const int64_t at = row / 32 * 34 * 32 + PackedOffset(DType::kBF16, row, i);
      const bool is_there = row < m.n && i < m.k;
      ASSERT_EQ(packed[static_cast<size_t>(at)],
                is_there ? m.codes[static_cast<size_t>(row * m.k + i)] : 0);
    }
  }
}

TEST(PackFloat8, NamesTheFirstRowThatHasNoNumber) {
  const auto runner = CreateThreadPool(3).value();
  Float8Matrix m = RandomMatrix(200, 20, 20, false);
  std::vector<const uint8_t*> rows;
  for (int64_t row = 0; row < m.n; ++row) rows.push_back(m.codes.data() + row * m.k);
  m.codes[199 * 20] = 0x7F;
  m.codes[150 * 20 + 19] = 0x7F;
  m.codes[151 * 20 + 3] = 0xFF;
  std::vector<uint8_t> packed(PackedFloat8Bytes(m.n, m.k));
  EXPECT_EQ(PackFloat8(rows, m.k, packed.data(), *runner), 150);
}

}  // namespace
}  // namespace quire
