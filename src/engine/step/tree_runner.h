// Speculation: samples that decode run their last token and guesses of what follows it as a token
// tree, in a forward of their own, and keep the guesses that are what is drawn there (draft.h).
//
// Invariants:
// - Guesses take what nobody else wants: pages behind those of the step's other tokens, never by
//   preempting.
// - Where a tree forward fails, its samples decode plainly in the same step.
#ifndef QUIRE_ENGINE_STEP_TREE_RUNNER_H_
#define QUIRE_ENGINE_STEP_TREE_RUNNER_H_

#include "engine/step/answer_drawer.h"
#include "engine/step/answer_reporter.h"
#include "engine/step/step_batch.h"
#include "engine/step/step_counter.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/model.h"

namespace quire {

class TreeRunner {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    Model& model;
    ModelState caches;
    Clock& clock;
    SequenceHolders& holders;
    AnswerDrawer& drawer;
    AnswerReporter& answers;
    StepCounter& counter;
    int64_t page_size;
  };
  explicit TreeRunner(const Owners& owners) : owners_(owners), holders_(owners.holders) {}

  // Moves the works for which something is guessed from the batch to the trees.
  //
  // `plan_anew`: the draft model failed, and the first request that asked it has ended with the
  // error.
  Status Plan(StepBatch* batch, TreeBatch* trees, bool* plan_anew);
  // Works whose tree forward fails go back to the batch: what is wrong shows there, or nothing is.
  void Run(const TreeBatch& trees, StepBatch* batch);

 private:
  Result<bool> Fit(const StepBatch& trees, const StepBatch& plain);
  Status Join(StepBatch* batch, TreeBatch* trees);
  Status Attempt(const TreeBatch& trees);

  const Owners owners_;
  SequenceHolders& holders_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_TREE_RUNNER_H_
