// What one step runs: the works of a batch, in the order of their rows.
#ifndef QUIRE_ENGINE_STEP_STEP_BATCH_H_
#define QUIRE_ENGINE_STEP_STEP_BATCH_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/blending/blend_plan.h"
#include "engine/drafts/draft.h"
#include "engine/loading/layerwise_load.h"
#include "engine/request/request.h"

namespace quire {

// `tokens` pending tokens of one sample in a forward, behind those that `layers` brings.
struct StepWork {
  Request* request;
  Sample* sample;
  int64_t tokens;
  LayerwiseLoad* layers = nullptr;
  const DraftTree* guesses = nullptr;  // in a tree forward; null: none
  // The tokens are all that is left of a piece of a blended prompt, and some are moved.
  std::optional<BlendPlan::Found> piece = {};

  int64_t loaded() const { return layers == nullptr ? 0 : layers->tokens(); }
  int64_t cost() const { return piece ? piece->cost : tokens; }
  bool ends_pending() const { return loaded() + tokens == sample->pending(); }
  // One more token of an answer, of which nothing is loaded.
  bool decodes() const {
    return layers == nullptr && tokens == 1 && ends_pending() && request->answer_begun();
  }
};

using StepBatch = std::vector<StepWork>;

// Works that are run as token trees, and what is guessed for them.
struct TreeBatch {
  StepBatch works;
  std::vector<DraftTree> guesses;
};

// Pages that the tokens which are still to be loaded will take.
int64_t PagesOfLoads(const StepBatch& batch, int64_t page_size);

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_STEP_BATCH_H_
