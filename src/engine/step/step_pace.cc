#include "engine/step/step_pace.h"

#include <cmath>

#include "base/check.h"

namespace quire {

StepSize SizeOf(const StepBatch& batch) {
  StepSize size;
  bool has_loads = false;
  for (const StepWork& work : batch) {
    size.tokens += work.cost();
    size.is_telling |= !work.decodes();
    has_loads |= work.layers != nullptr;
  }
  size.is_telling &= !has_loads;
  return size;
}

void StepPace::Note(const StepSize& size, int64_t ns) noexcept {
  if (!size.is_telling) return;
  QUIRE_DCHECK(size.tokens > 0 && ns >= 0);
  const double now = static_cast<double>(ns) * 1e-9 / static_cast<double>(size.tokens);
  if (mean_ == 0) {
    mean_ = now;
    return;
  }
  const double distance = now - mean_;
  mean_ += kWeight * distance;
  deviation_ += kWeight * (std::abs(distance) - deviation_);
}

}  // namespace quire
