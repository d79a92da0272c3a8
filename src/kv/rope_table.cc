#include "kv/rope_table.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/float_environment.h"
#include "kv/reserve.h"

namespace quire {
namespace {

// Rows are made this many at a time, so that most forwards of a decode make none: 256 rows of 64
// pairs take about half a millisecond on one core, 2 microseconds per token.
constexpr int64_t kRowsPerStep = 256;

}  // namespace

void RopeTable::ComputeRow(int64_t position, float* cos, float* sin) const noexcept {
  const ScopedFloatEnvironment environment;
  for (size_t i = 0; i < frequencies_.inv_freq.size(); ++i) {
    const double angle = static_cast<double>(position) * frequencies_.inv_freq[i];
    cos[i] = static_cast<float>(std::cos(angle) * frequencies_.amplitude);
    sin[i] = static_cast<float>(std::sin(angle) * frequencies_.amplitude);
  }
}

void RopeTable::Grow(int64_t position_count, ParallelRunner& runner) {
  if (position_count <= position_count_) return;
  const int64_t rows = (position_count + kRowsPerStep - 1) / kRowsPerStep * kRowsPerStep;
  const size_t size = static_cast<size_t>(rows * pair_count());
  for (std::vector<float>* table : {&cos_, &sin_}) {
    ReserveGrowing(*table, size);
    table->resize(size);
  }
  const int64_t first = position_count_;
  runner.ParallelFor(rows - first, [&](int64_t i, int) {
    const int64_t at = (first + i) * pair_count();
    ComputeRow(first + i, cos_.data() + at, sin_.data() + at);
  });
  position_count_ = rows;
}

void RopeRows::Reserve(int64_t row_count, int64_t pair_count) {
  const auto size = static_cast<size_t>(row_count * pair_count);
  if (cos_.size() < size) cos_.resize(size);
  if (sin_.size() < size) sin_.resize(size);
}

RotaryAngles RopeRows::Compute(const RopeTable& table, int64_t position) noexcept {
  const int64_t pairs = table.pair_count();
  QUIRE_CHECK(size_ + static_cast<size_t>(pairs) <= std::min(cos_.size(), sin_.size()))
      << "no room for the angles of position " << position;
  float* const cos = cos_.data() + size_;
  float* const sin = sin_.data() + size_;
  size_ += static_cast<size_t>(pairs);
  table.ComputeRow(position, cos, sin);
  return {cos, sin};
}

}  // namespace quire
