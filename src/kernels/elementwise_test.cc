#include "kernels/reference/elementwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/testing/host_float_environment.h"
#include "kernels/backend.h"
#include "kernels/testing/random_floats.h"

namespace quire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kDims[] = {1, 15, 16, 17, 31, 32, 33, 100, 4097};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class ElementwiseTest : public testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }

  std::vector<float> RmsNorm(const Backend& path, const std::vector<float>& x,
                             const std::vector<float>& w, float offset) {
    std::vector<float> y(x.size());
    const int64_t dim = static_cast<int64_t>(w.size());
    path.rms_norm(x.data(), w.data(), offset, 1e-5F, static_cast<int64_t>(x.size()) / dim, dim,
                  y.data(), *pool_);
    return y;
  }
  std::vector<float> GatedMul(const Backend& path, Activation activation,
                              const std::vector<float>& gate_up, int64_t dim) {
    std::vector<float> y(gate_up.size() / 2);
    path.gated_mul(activation, gate_up.data(), static_cast<int64_t>(y.size()) / dim, dim, y.data(),
                   *pool_);
    return y;
  }
  // activation(gate) * 1 for each gate.
  std::vector<float> Activated(Activation activation, const std::vector<float>& gate) {
    std::vector<float> gate_up = gate;
    gate_up.insert(gate_up.end(), gate.size(), 1.0F);
    return GatedMul(backend(), activation, gate_up, static_cast<int64_t>(gate.size()));
  }
  std::vector<float> SiluMul(const Backend& path, const std::vector<float>& gate_up, int64_t dim) {
    return GatedMul(path, Activation::kSilu, gate_up, dim);
  }
  std::vector<float> GeluTanhMul(const Backend& path, const std::vector<float>& gate_up,
                                 int64_t dim) {
    return GatedMul(path, Activation::kGeluTanh, gate_up, dim);
  }
  std::vector<float> SoftCap(const Backend& path, const std::vector<float>& x, float cap,
                             int64_t dim) {
    std::vector<float> y(x.size());
    path.soft_cap(x.data(), cap, static_cast<int64_t>(x.size()) / dim, dim, y.data(), *pool_);
    return y;
  }
  std::vector<float> Exp2Scaled(const Backend& path, const std::vector<float>& x, float greatest,
                                float scale_log2) {
    std::vector<float> y(x.size());
    path.exp2_scaled(x.data(), static_cast<int64_t>(x.size()), greatest, scale_log2, y.data());
    return y;
  }
  std::vector<float> Silu(const std::vector<float>& gate) {
    return Activated(Activation::kSilu, gate);
  }

  const Backend& scalar_ = *FindBackend("scalar").value();
  const std::shared_ptr<ParallelRunner> pool_ = CreateThreadPool(2).value();
};

TEST_P(ElementwiseTest, RmsNormAgreesWithTheReference) {
  for (const int64_t dim : kDims) {
    for (const float offset : {0.0F, 1.0F}) {
      const std::vector<float> x = RandomFloats(5 * dim, 1, -3, 3);
      const std::vector<float> w = RandomFloats(dim, 2, -3, 3);
      const std::vector<float> y = RmsNorm(backend(), x, w, offset);
      const std::vector<double> expected =
          reference::RmsNorm(x.data(), w.data(), offset, 1e-5F, 5, dim);
      // The sum is a chain of dim / 32 and a tree; what follows is some six roundings.
      const double bound = (static_cast<double>(dim) / 64 + 8) * 0x1p-24;
      for (size_t i = 0; i < y.size(); ++i) {
        const double weight_rounding = std::abs(w[i % static_cast<size_t>(dim)]) + offset;
        ASSERT_NEAR(y[i], expected[i], bound * (std::abs(expected[i]) + 3 * weight_rounding))
            << dim;
      }
    }
  }
}

TEST_P(ElementwiseTest, RmsNormMayWriteOverItsInput) {
  std::vector<float> x = RandomFloats(3 * 40, 3, -3, 3);
  const std::vector<float> w = RandomFloats(40, 4, -3, 3);
  const std::vector<float> y = RmsNorm(backend(), x, w, 0);
  backend().rms_norm(x.data(), w.data(), 0, 1e-5F, 3, 40, x.data(), *pool_);
  EXPECT_TRUE(SameBits(x, y));
}

TEST_P(ElementwiseTest, SiluIsAccurateOverTheWholeRange) {
  std::vector<float> gate;
  for (double g = -87; g <= 130; g += 0.01) gate.push_back(static_cast<float>(g));
  const std::vector<float> y = Silu(gate);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    const double expected = g / (1 + std::exp(-g));
    ASSERT_NEAR(y[i], expected, 4 * 0x1p-24 * std::abs(expected) + 1e-45) << g;
  }
}

TEST_P(ElementwiseTest, SiluOfExtremes) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> y = Silu({0.0F, max, -max, kInfinity, -200.0F, -90.0F, 1e-40F, NAN});
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], max);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], kInfinity);
  EXPECT_EQ(y[4], 0);
  EXPECT_LE(y[5], 0);
  EXPECT_GT(y[5], -1e-35F);
  EXPECT_GT(y[6], 0);
  EXPECT_TRUE(std::isnan(y[7]));
}

TEST_P(ElementwiseTest, SiluMulAgreesWithTheReference) {
  for (const int64_t dim : kDims) {
    const std::vector<float> gate_up = RandomFloats(2 * 5 * dim, 5, -20, 20);
    const std::vector<float> y = SiluMul(backend(), gate_up, dim);
    const std::vector<double> expected = reference::SiluMul(gate_up.data(), 5, dim);
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], expected[i], 5 * 0x1p-24 * std::abs(expected[i]));
    }
  }
}

TEST_P(ElementwiseTest, GeluTanhMulAgreesWithTheReference) {
  for (const int64_t dim : kDims) {
    const std::vector<float> gate_up = RandomFloats(2 * 5 * dim, 13, -9, 9);
    const std::vector<float> y = GeluTanhMul(backend(), gate_up, dim);
    const std::vector<double> expected = reference::GeluTanhMul(gate_up.data(), 5, dim);
    for (size_t i = 0; i < y.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / dim;
      const double g = gate_up[static_cast<size_t>(row * dim) + i];
      // The exponent has three roundings, of its own size each.
      const double exponent = std::abs(1.6 * g + 0.0714 * g * g * g);
      ASSERT_NEAR(y[i], expected[i],
                  (8 + 3 * exponent) * 0x1p-24 * std::abs(expected[i]) + 0x1p-126)
          << g;
    }
  }
}

TEST_P(ElementwiseTest, GeluTanhOfExtremes) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> gate = {0.0F, max, -max, kInfinity, -50.0F, 1e-40F, NAN, 1e15F};
  std::vector<float> gate_up = gate;
  gate_up.insert(gate_up.end(), gate.size(), 1.0F);
  const std::vector<float> y = GeluTanhMul(backend(), gate_up, static_cast<int64_t>(gate.size()));
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], max);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], kInfinity);
  EXPECT_EQ(y[4], 0);
  EXPECT_GT(y[5], 0);
  EXPECT_TRUE(std::isnan(y[6]));
  EXPECT_EQ(y[7], 1e15F);
}

TEST_P(ElementwiseTest, GeluIsAccurateOverTheWholeRange) {
  std::vector<float> gate;
  for (double g = -13; g <= 40; g += 0.0013) gate.push_back(static_cast<float>(g));
  const std::vector<float> y = Activated(Activation::kGelu, gate);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    const double expected = g * std::erfc(-g / std::numbers::sqrt2) / 2;
    ASSERT_NEAR(y[i], expected, 12 * 0x1p-24 * std::abs(expected) + 0x1p-126) << g;
  }
}

TEST_P(ElementwiseTest, QuickGeluIsAccurateOverTheWholeRange) {
  std::vector<float> gate;
  for (double g = -50; g <= 130; g += 0.01) gate.push_back(static_cast<float>(g));
  const std::vector<float> y = Activated(Activation::kQuickGelu, gate);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    const double expected = g / (1 + std::exp(-1.702 * g));
    // The exponent has two roundings, of its own size each.
    const double bound = (5 + 2 * std::abs(1.702 * g)) * 0x1p-24;
    ASSERT_NEAR(y[i], expected, bound * std::abs(expected) + 1e-45) << g;
  }
}

TEST_P(ElementwiseTest, ReluAndItsSquareAreExact) {
  const std::vector<float> gate = {-3.0F, -1e-40F, 0.0F, 1e-40F, 0.3F, 7.0F, kInfinity, -kInfinity};
  const std::vector<float> relu = Activated(Activation::kRelu, gate);
  const std::vector<float> relu2 = Activated(Activation::kRelu2, gate);
  for (size_t i = 0; i < gate.size(); ++i) {
    EXPECT_EQ(relu[i], std::max(gate[i], 0.0F));
    EXPECT_EQ(relu2[i], relu[i] * relu[i]);
  }
}

TEST_P(ElementwiseTest, ActivationsOfExtremes) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> gate = {0.0F, max, -max, kInfinity, 1e-40F, NAN, -100.0F};
  for (const Activation activation : {Activation::kGelu, Activation::kQuickGelu}) {
    const std::vector<float> y = Activated(activation, gate);
    EXPECT_EQ(y[0], 0);
    EXPECT_EQ(y[1], max);
    EXPECT_EQ(y[2], 0);
    EXPECT_EQ(y[3], kInfinity);
    EXPECT_GT(y[4], 0);
    EXPECT_TRUE(std::isnan(y[5]));
    EXPECT_EQ(y[6], 0);
  }
  for (const Activation activation : {Activation::kRelu, Activation::kRelu2})
    EXPECT_TRUE(std::isnan(Activated(activation, gate)[5]));
}

TEST_P(ElementwiseTest, ActivationsHaveTheSameBitsOnEveryPathAndAtEveryPlace) {
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu,
        Activation::kRelu, Activation::kRelu2}) {
    for (const int64_t dim : kDims) {
      const std::vector<float> gate_up = RandomFloats(2 * 3 * dim, 21, -12, 12);
      const std::vector<float> y = GatedMul(backend(), activation, gate_up, dim);
      EXPECT_TRUE(SameBits(y, GatedMul(scalar_, activation, gate_up, dim))) << dim;
      const float gate = gate_up[static_cast<size_t>(dim - 1)];
      const float up = gate_up[static_cast<size_t>(2 * dim - 1)];
      EXPECT_EQ(y[static_cast<size_t>(dim - 1)], GatedMul(backend(), activation, {gate, up}, 1)[0]);
    }
  }
}

TEST_P(ElementwiseTest, SoftCapIsAccurateOverTheWholeRange) {
  for (const float cap : {0.5F, 30.0F, 1000.0F}) {
    std::vector<float> x;
    for (double t = -12; t <= 12; t += 0.0007) x.push_back(static_cast<float>(t) * cap);
    const std::vector<float> y = SoftCap(backend(), x, cap, static_cast<int64_t>(x.size()));
    const std::vector<double> expected =
        reference::SoftCap(x.data(), cap, static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], expected[i], 12 * 0x1p-24 * std::abs(expected[i])) << x[i];
    }
  }
}

TEST_P(ElementwiseTest, SoftCapOfExtremes) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> y =
      SoftCap(backend(), {0.0F, max, -max, kInfinity, -kInfinity, NAN}, 30, 6);
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 30);
  EXPECT_EQ(y[2], -30);
  EXPECT_EQ(y[3], 30);
  EXPECT_EQ(y[4], -30);
  EXPECT_TRUE(std::isnan(y[5]));
}

TEST_P(ElementwiseTest, GatherWidensTheChosenRows) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t dim : kDims) {
      const std::vector<float> table = RandomFloats(4 * dim, 6, -3, 3);
      std::vector<float> stored(table.size());
      std::vector<float> wide(table.size());
      ConvertElements(table.data(), DType::kF32, stored.data(), dtype, 4 * dim);
      ConvertElements(stored.data(), dtype, wide.data(), DType::kF32, 4 * dim);
      const std::vector<int32_t> ids = {3, 0, 0, 2, 1};
      std::vector<float> y(ids.size() * static_cast<size_t>(dim));
      backend().gather_rows(stored.data(), dtype, ids.data(), 5, dim, y.data(), *pool_);
      for (size_t r = 0; r < ids.size(); ++r) {
        ASSERT_EQ(0,
                  std::memcmp(y.data() + r * static_cast<size_t>(dim), wide.data() + ids[r] * dim,
                              static_cast<size_t>(dim) * sizeof(float)));
      }
    }
  }
}

TEST_P(ElementwiseTest, ArgMaxIsThatOfTheReference) {
  RandomSequence random(14);
  for (const int64_t count : {1, 15, 16, 17, 33, 1023, 1024, 1025, 5000}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<float> x = RandomFloats(count, random.Bits(), -3, 3);
      const bool with_ties = random.Below(2) == 0;
      for (float& value : x) {
        if (with_ties) value = std::round(value);
        if (random.Below(20) == 0) value = -kInfinity;
      }
      ASSERT_EQ(backend().arg_max(x.data(), count), reference::ArgMax(x.data(), count)) << count;
      const float bad = random.Below(2) == 0 ? NAN : kInfinity;
      x[static_cast<size_t>(random.Below(count))] = bad;
      x[static_cast<size_t>(random.Below(count))] = bad;
      ASSERT_EQ(backend().arg_max(x.data(), count), -1) << count;
    }
  }
}

TEST_P(ElementwiseTest, ArgMaxOfEqualOnesIsTheFirst) {
  const auto arg_max = [&](const std::vector<float>& x) {
    return backend().arg_max(x.data(), static_cast<int64_t>(x.size()));
  };
  EXPECT_EQ(arg_max({-0.0F, 0.0F}), 0);
  EXPECT_EQ(arg_max({-1.0F, 0.0F, -0.0F}), 1);
  EXPECT_EQ(arg_max(std::vector<float>(3000, -kInfinity)), 0);
  std::vector<float> x(3000, -1.0F);  // of several blocks
  x[1500] = x[1600] = x[2999] = -0.5F;
  EXPECT_EQ(arg_max(x), 1500);
}

TEST_P(ElementwiseTest, Exp2ScaledIsAccurateOverTheWholeRange) {
  for (const float scale : {0.01F, 1.0F, 1.442695F, 40.0F}) {
    std::vector<float> x;
    for (double e = -125; e <= 0; e += 0.0371) x.push_back(static_cast<float>(5 + e / scale));
    x.push_back(5);
    const auto count = static_cast<int64_t>(x.size());
    const std::vector<float> y = Exp2Scaled(backend(), x, 5, scale);
    const std::vector<double> expected = reference::Exp2Scaled(x.data(), count, 5, scale);
    for (size_t i = 0; i < y.size(); ++i) {
      // Difference and product are rounded, to parts of the exponent.
      const double exponent = std::abs(std::log2(expected[i]));
      ASSERT_NEAR(y[i], expected[i], (3 + 1.5 * exponent) * 0x1p-24 * expected[i]) << x[i];
    }
    EXPECT_EQ(y.back(), 1);
    backend().exp2_scaled(x.data(), count, 5, scale, x.data());
    EXPECT_TRUE(SameBits(x, y)) << "over its input";
  }
}

TEST_P(ElementwiseTest, Exp2ScaledOfExtremes) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> x = {max, -max, -kInfinity, 0.0F};
  const std::vector<float> none = {1, 0, 0, 0};
  EXPECT_EQ(Exp2Scaled(backend(), x, max, 1), none);
  EXPECT_EQ(Exp2Scaled(backend(), x, max, max), none);
  EXPECT_EQ(Exp2Scaled(backend(), {-10, -137, -136}, -10, 1),
            (std::vector<float>{1, 0, 0x1p-126F}));
}

TEST_P(ElementwiseTest, BitsAreThoseOfTheScalarPath) {
  for (const int64_t dim : kDims) {
    const std::vector<float> x = RandomFloats(6 * dim, 7, -3, 3);
    const std::vector<float> w = RandomFloats(dim, 8, -3, 3);
    EXPECT_TRUE(SameBits(RmsNorm(backend(), x, w, 1), RmsNorm(scalar_, x, w, 1))) << dim;
    const std::vector<float> gate_up = RandomFloats(6 * dim, 9, -100, 100);
    EXPECT_TRUE(SameBits(SiluMul(backend(), gate_up, dim), SiluMul(scalar_, gate_up, dim))) << dim;
    EXPECT_TRUE(SameBits(GeluTanhMul(backend(), gate_up, dim), GeluTanhMul(scalar_, gate_up, dim)))
        << dim;
    EXPECT_TRUE(SameBits(SoftCap(backend(), x, 2, dim), SoftCap(scalar_, x, 2, dim))) << dim;
    EXPECT_TRUE(SameBits(Exp2Scaled(backend(), x, 3, 9), Exp2Scaled(scalar_, x, 3, 9))) << dim;
  }
}

TEST_P(ElementwiseTest, ARowsResultDoesNotDependOnTheOtherRows) {
  constexpr int64_t kDim = 333;
  constexpr int64_t kRows = 200;  // several tasks
  const std::vector<float> x = RandomFloats(kRows * 2 * kDim, 10, -3, 3);
  const std::vector<float> w = RandomFloats(kDim, 11, -3, 3);
  const std::vector<float> normed = RmsNorm(backend(), x, w, 0);
  const std::vector<float> gated = SiluMul(backend(), x, kDim);
  const std::vector<float> gelu = GeluTanhMul(backend(), x, kDim);
  const std::vector<float> capped = SoftCap(backend(), x, 2, kDim);
  for (const int64_t row : {int64_t{0}, int64_t{77}, kRows - 1}) {
    const std::vector<float> norm_row(x.begin() + row * kDim, x.begin() + (row + 1) * kDim);
    const std::vector<float> norm = RmsNorm(backend(), norm_row, w, 0);
    EXPECT_EQ(0, std::memcmp(norm.data(), normed.data() + row * kDim, kDim * sizeof(float)));
    const std::vector<float> gate_row(x.begin() + row * 2 * kDim, x.begin() + (row + 1) * 2 * kDim);
    const std::vector<float> gate = SiluMul(backend(), gate_row, kDim);
    EXPECT_EQ(0, std::memcmp(gate.data(), gated.data() + row * kDim, kDim * sizeof(float)));
    const std::vector<float> gelu_row = GeluTanhMul(backend(), gate_row, kDim);
    EXPECT_EQ(0, std::memcmp(gelu_row.data(), gelu.data() + row * kDim, kDim * sizeof(float)));
    const std::vector<float> cap_row = SoftCap(backend(), norm_row, 2, kDim);
    EXPECT_EQ(0, std::memcmp(cap_row.data(), capped.data() + row * kDim, kDim * sizeof(float)));
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

TEST_P(ElementwiseTest, TheCallersFloatEnvironmentDoesNotMatter) {
  PlainRunner runner;
  const std::vector<float> x = RandomFloats(80, 12, -1e-39, 1e-39);
  const std::vector<float> w(40, 1.0F);
  const auto all = [&] {
    std::vector<float> y(80 + 40 + 40 + 80 + 80);
    backend().rms_norm(x.data(), w.data(), 0, 1e-38F, 2, 40, y.data(), runner);
    backend().gated_mul(Activation::kSilu, x.data(), 1, 40, y.data() + 80, runner);
    backend().gated_mul(Activation::kGeluTanh, x.data(), 1, 40, y.data() + 120, runner);
    backend().soft_cap(x.data(), 3, 2, 40, y.data() + 160, runner);
    const float greatest = x[static_cast<size_t>(backend().arg_max(x.data(), 80))];
    backend().exp2_scaled(x.data(), 80, greatest, 1e38F, y.data() + 240);
    return y;
  };
  const std::vector<float> y = all();
  EXPECT_NE(y[0], 0);
  const HostFloatEnvironment host(kFlushSubnormals | kRoundTowardZero);
  EXPECT_TRUE(SameBits(y, all()));
}

INSTANTIATE_TEST_SUITE_P(Paths, ElementwiseTest,
                         testing::ValuesIn(Backends().begin(), Backends().end()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace quire
