// Counts what the forwards of steps compute, and how long steps take.
//
// Invariant: a sample's last_step is the number of the forward that was given its tokens last, so
// it is never more than steps().
#ifndef QUIRE_ENGINE_STEP_STEP_COUNTER_H_
#define QUIRE_ENGINE_STEP_STEP_COUNTER_H_

#include <array>
#include <cstdint>

#include "engine/request/request.h"
#include "quire/engine.h"

namespace quire {

class StepCounter {
 public:
  int64_t steps() const { return steps_; }
  // A forward has ended; the works that are noted from now on were in it.
  void NoteForward() noexcept { ++steps_; }
  // `tokens` of the sample were computed, and are in its sequence.
  void NoteWork(Request* request, Sample* sample, int64_t tokens) noexcept;
  // A call of Step that computed something took this long.
  void NoteTime(int64_t ns) noexcept;
  void Publish(EngineStats* stats) const noexcept;

 private:
  int64_t steps_ = 0, computed_tokens_ = 0;
  std::array<int64_t, kStepSecondsBounds.size() + 1> step_counts_ = {};
  double step_seconds_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_STEP_COUNTER_H_
