#include "engine/step/step_counter.h"

#include <algorithm>

#include "base/check.h"

namespace quire {

void StepCounter::NoteWork(Request* request, Sample* sample, int64_t tokens) noexcept {
  QUIRE_CHECK(tokens >= 0);
  QUIRE_CHECK(sample->last_step < steps_) << "a sample is in a forward twice";
  sample->computed += tokens;
  sample->last_step = steps_;
  request->NoteStep(steps_);
  computed_tokens_ += tokens;
}

void StepCounter::NoteTime(int64_t ns) noexcept {
  const double seconds = static_cast<double>(ns) * 1e-9;
  const auto bound =
      std::lower_bound(kStepSecondsBounds.begin(), kStepSecondsBounds.end(), seconds);
  ++step_counts_[static_cast<size_t>(bound - kStepSecondsBounds.begin())];
  step_seconds_ += seconds;
}

void StepCounter::Publish(EngineStats* stats) const noexcept {
  stats->steps = steps_;
  stats->computed_tokens = computed_tokens_;
  stats->step_counts = step_counts_;
  stats->step_seconds = step_seconds_;
}

}  // namespace quire
