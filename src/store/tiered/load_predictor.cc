#include "store/tiered/load_predictor.h"

#include <algorithm>

namespace quire {
namespace {

// The newest read counts for a fifth: a tier that changed is known after some ten reads.
constexpr double kNewWeight = 0.2;
// A refused load costs what computing costs anyway; one in this number is let through, to show
// whether the tier got faster.
constexpr int64_t kRefusalsBetweenProbes = 32;
// Sizes that vary by less than a tenth say nothing about latency against bandwidth.
constexpr double kRelativeSpreadMin = 0.1;

}  // namespace

void LoadPredictor::Measured(int64_t bytes, double seconds) {
  const std::lock_guard lock(mutex_);
  if (loads_ > 0) {
    predicted_seconds_ += PredictLocked(bytes);
    measured_seconds_ += seconds;
  }
  const double weight = loads_ == 0 ? 1 : kNewWeight;
  const double size = static_cast<double>(bytes);
  const auto blend = [&](double* mean, double value) { *mean += weight * (value - *mean); };
  blend(&bytes_, size);
  blend(&seconds_, seconds);
  blend(&bytes_squared_, size * size);
  blend(&product_, size * seconds);
  ++loads_;
}

LoadPredictor::Line LoadPredictor::Fit() const {
  const double variance = bytes_squared_ - bytes_ * bytes_;
  const double through_zero = bytes_ > 0 ? seconds_ / bytes_ : 0;
  // All reads of one size: without latency, which is right for that size.
  if (variance < kRelativeSpreadMin * kRelativeSpreadMin * bytes_ * bytes_)
    return {0, through_zero};
  const double slope = std::clamp((product_ - bytes_ * seconds_) / variance, 0.0, through_zero);
  return {seconds_ - slope * bytes_, slope};
}

double LoadPredictor::PredictLocked(int64_t bytes) const {
  const Line line = Fit();
  return line.latency_seconds + line.seconds_per_byte * static_cast<double>(bytes);
}

double LoadPredictor::Predict(int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return PredictLocked(bytes);
}

bool LoadPredictor::IsWorthLocked(int64_t bytes, double compute_seconds) const {
  return compute_seconds <= 0 || loads_ == 0 || PredictLocked(bytes) < compute_seconds ||
         refused_in_a_row_ >= kRefusalsBetweenProbes;
}

bool LoadPredictor::IsWorth(int64_t bytes, double compute_seconds) const {
  const std::lock_guard lock(mutex_);
  return IsWorthLocked(bytes, compute_seconds);
}

bool LoadPredictor::Allow(int64_t bytes, double compute_seconds) {
  const std::lock_guard lock(mutex_);
  if (IsWorthLocked(bytes, compute_seconds)) {
    refused_in_a_row_ = 0;
    return true;
  }
  ++refused_in_a_row_;
  ++not_worth_;
  return false;
}

LoadPredictor::Summary LoadPredictor::Summarize() const {
  const std::lock_guard lock(mutex_);
  const Line line = Fit();
  return {.latency_seconds = line.latency_seconds,
          .bytes_per_second = line.seconds_per_byte > 0 ? 1 / line.seconds_per_byte : 0,
          .loads = loads_,
          .not_worth = not_worth_,
          .predicted_seconds = predicted_seconds_,
          .measured_seconds = measured_seconds_};
}

}  // namespace quire
