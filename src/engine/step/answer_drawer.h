// Draws the next tokens of samples from the logits of a forward. Memory is taken by Prepare, so
// that what is drawn can be stored without failing.
#ifndef QUIRE_ENGINE_STEP_ANSWER_DRAWER_H_
#define QUIRE_ENGINE_STEP_ANSWER_DRAWER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/drafts/draft.h"
#include "engine/request/request.h"
#include "engine/sampling/sampler.h"
#include "quire/engine.h"
#include "quire/seams.h"

namespace quire {

// What is drawn for a sample from the forward's logits, and what is said about it: a token from row
// `row`, and as long as the guess behind it is right, one more from the guess's row.
struct Drawn {
  Request* request;
  Sample* sample;
  int64_t row;                         // in a tree forward that of the root, then of its guesses
  const DraftTree* guesses = nullptr;  // null: none
  std::vector<Draw> draws = {};        // room for all that there can be
  int64_t count = 0;                   // of `draws`, in use
  int64_t last_node = 0;               // of the tree, from which was drawn last; 0: the root
  Status filter_status = {};           // of DrawError::kFilterFailed
  StepOutput output = {};
};

class AnswerDrawer {
 public:
  // `model` outlives this.
  AnswerDrawer(const Model* model, const Backend& backend, std::shared_ptr<ParallelRunner> runner,
               int64_t rows_max);

  // Room for the logits of a forward: [row_count, vocab_size], valid until the next call.
  float* Logits(int64_t row_count);
  Result<Drawn> Prepare(Request* request, Sample* sample, int64_t row, int64_t draws_max) const;
  // From the logits of the forward that ran last; in parallel.
  void DrawAll(std::vector<Drawn>* draws);
  // For one thread, between draws.
  DrawScratch* scratch() { return &scratch_[0]; }
  int64_t bytes() const;  // of logits and scratch, taken now

 private:
  void DrawNext(Drawn* drawn, DrawScratch* scratch) const noexcept;
  void DrawPath(Drawn* drawn, DrawScratch* scratch) const noexcept;

  const Model& model_;
  const std::shared_ptr<ParallelRunner> runner_;
  std::vector<float> logits_;         // [rows of the forward, vocab_size]
  std::vector<DrawScratch> scratch_;  // one per worker
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_ANSWER_DRAWER_H_
