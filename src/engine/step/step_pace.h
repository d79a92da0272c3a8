// How long steps take that compute prompts, so that a prompt can be cut to a time: the mean of the
// newest ones, and how far they are from it. A machine that others use needs more room than a quiet
// one.
#ifndef QUIRE_ENGINE_STEP_STEP_PACE_H_
#define QUIRE_ENGINE_STEP_STEP_PACE_H_

#include <cstdint>

#include "engine/step/step_batch.h"

namespace quire {

// The tokens of a step as the scheduler counts them.
struct StepSize {
  int64_t tokens = 0;
  bool is_telling = false;  // of the time that prompts take: it has some, and waits for no store
};

StepSize SizeOf(const StepBatch& batch);

class StepPace {
 public:
  // A step of this size took `ns`, with all that it does beside its forwards.
  void Note(const StepSize& size, int64_t ns) noexcept;
  // What few steps exceed; 0: not measured yet.
  double seconds_per_token() const noexcept { return mean_ + kDeviations * deviation_; }

 private:
  // 1 % of normally distributed steps are above the mean by 2.9 times the mean distance from it;
  // those of real machines have a longer tail.
  static constexpr double kDeviations = 4;
  // Weight of the newest step: means are those of the last ten or so.
  static constexpr double kWeight = 0.2;

  double mean_ = 0;
  double deviation_ = 0;  // mean distance from the mean
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_STEP_PACE_H_
