// Keys of a document move to other positions, and are compared with fresh ones: one layer with 8
// heads of 128 numbers, on one core.
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "base/random.h"
#include "bench_case.h"
#include "quire/blend.h"

namespace quire::bench {
namespace {

constexpr int64_t kHeads = 8;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kMove = 512;  // tokens before the document

class BlendCase : public BenchCase {
 public:
  BlendCase(DType dtype, int64_t tokens)
      : dtype_(dtype),
        shape_{tokens, kHeads, kHeadDim},
        keys_(static_cast<size_t>(tokens * kHeads * kHeadDim * DTypeBytes(dtype))),
        moved_(keys_.size()),
        old_positions_(static_cast<size_t>(tokens)),
        new_positions_(old_positions_.size()),
        kinds_(old_positions_.size(), kRowMoved),
        deviations_(old_positions_.size()) {
    // Bytes from 0x30 to 0x3F make ordinary numbers in every format: one of 0 would be the first of
    // a subnormal number, and those take a CPU a hundred times as long.
    RandomSequence random(5);
    for (std::byte& byte : keys_) byte = static_cast<std::byte>(0x30 + random.Below(0x10));
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
      inv_freq_.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / kHeadDim));
    }
    std::iota(old_positions_.begin(), old_positions_.end(), 0);
    std::iota(new_positions_.begin(), new_positions_.end(), kMove);
  }

  nlohmann::json Run(const RunLimits& limits) override {
    nlohmann::json samples = nlohmann::json::object();
    const TensorView keys(keys_.data(), dtype_, shape_);
    const TensorView moved(moved_.data(), dtype_, shape_);
    const KeyMoves moves{.old_positions = old_positions_, .new_positions = new_positions_};
    const KeyRotation rotation{.inv_freq = inv_freq_};
    const double begin = Now();
    for (int64_t i = 0; i < limits.min_calls || Now() - begin < limits.seconds; ++i) {
      const double start = Now();
      Require(ShiftKeys(keys, 0, moves, rotation, moved));
      const double middle = Now();
      Require(ComputeDeviations(DeviationMetric::kKL2, 0, {.k = keys}, {.k = moved}, std::nullopt,
                                kinds_, deviations_));
      samples["move"].push_back(middle - start);
      samples["compare"].push_back(Now() - middle);
    }
    return samples;
  }

 private:
  const DType dtype_;
  const std::array<int64_t, 3> shape_;
  std::vector<std::byte> keys_;
  std::vector<std::byte> moved_;
  std::vector<int64_t> old_positions_;
  std::vector<int64_t> new_positions_;
  std::vector<uint8_t> kinds_;
  std::vector<float> deviations_;
  std::vector<double> inv_freq_;
};

}  // namespace

std::unique_ptr<BenchCase> MakeBlendCase(const JsonValue& request) {
  return std::make_unique<BlendCase>(Require(ParseDType(Require(request.GetString("dtype")))),
                                     Require(request.GetInt("tokens", 1)));
}

}  // namespace quire::bench
