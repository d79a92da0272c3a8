// The second half of a step: one forward of the planned batch, the draws behind it, and the commit.
//
// Invariant: all that can fail comes before the forward's end; from there on results are only
// stored, into memory that is there. A forward that fails leaves caches and samples as they were.
#ifndef QUIRE_ENGINE_STEP_BATCH_RUNNER_H_
#define QUIRE_ENGINE_STEP_BATCH_RUNNER_H_

#include <vector>

#include "engine/step/answer_drawer.h"
#include "engine/step/answer_reporter.h"
#include "engine/step/prompt_blender.h"
#include "engine/step/step_batch.h"
#include "engine/step/step_counter.h"
#include "engine/traffic/kv_traffic.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/model.h"

namespace quire {

class BatchRunner {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    Model& model;
    ModelState caches;
    Clock& clock;
    SequenceHolders& holders;
    PromptBlender& blender;
    KVTraffic& traffic;
    AnswerDrawer& drawer;
    AnswerReporter& answers;
    StepCounter& counter;
  };
  explicit BatchRunner(const Owners& owners) : owners_(owners) {}

  // A batch that fails is tried again with its first request alone, which ends if that fails, too:
  // what is wrong with one request must not end others, and a step always gets somewhere.
  // OutOfPages: nothing was run. `plan_anew`: nothing was run, and requests whose layers did not
  // come will compute them. REQUIRES: a batch that is not empty.
  Status Run(const StepBatch& batch, bool* plan_anew);

 private:
  Status Attempt(const StepBatch& batch);
  Status Forward(const StepBatch& batch);
  Result<std::vector<Drawn>> PrepareDraws(const StepBatch& batch) const;
  void Commit(const StepBatch& batch, std::vector<Drawn>* draws) noexcept;

  const Owners owners_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_BATCH_RUNNER_H_
