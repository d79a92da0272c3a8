// Speculation of an engine's samples: what may be guessed, by which drafter, and how many guesses
// the next draft of a sample has.
//
// Invariant: a drafter holds a state for each sample whose draft_state is not kNoDraftState, and no
// other.
#ifndef QUIRE_ENGINE_DRAFTS_SPECULATOR_H_
#define QUIRE_ENGINE_DRAFTS_SPECULATOR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/drafts/draft.h"
#include "engine/drafts/model_draft.h"
#include "engine/drafts/ngram_draft.h"
#include "engine/request/request.h"
#include "quire/engine.h"

namespace quire {

class Speculator {
 public:
  // A sample of a batch; null where it has to decode plainly.
  struct Candidate {
    Request* request = nullptr;
    Sample* sample = nullptr;
  };

  // `nodes_max`: of the token trees in one forward. `model_drafter`: null without a draft model.
  Speculator(std::unique_ptr<ModelDrafter> model_drafter, int64_t max_tree_nodes,
             int64_t prefill_chunk);

  // The most nodes of the trees in one forward, roots included.
  int64_t nodes_max() const { return nodes_max_; }
  const ModelDrafter* model_drafter() const { return model_drafter_.get(); }
  // BadArgument: there is no room for guesses, or no draft model.
  Status CheckCanSpeculate(const SamplingOptions& options) const;
  // Jobs of the first candidates for which there is room: an equal part of the nodes that are left
  // for each. guesses[i] gets those of candidates[i].
  std::vector<DraftJob> MakeJobs(std::span<const Candidate> candidates,
                                 std::vector<DraftTree>* guesses) const;
  Status Guess(std::span<const DraftJob> jobs, DrawScratch* scratch, Clock* clock);
  // After a forward that drew `drawn` of at most `draws_max` tokens; guesses: null if there were
  // none. A sample whose drafts are right in all their length gets longer ones, up to what was
  // asked for; one whose drafts begin wrong gets shorter ones.
  void Note(const Candidate& candidate, const DraftTree* guesses, int64_t drawn,
            int64_t draws_max) noexcept;
  void Forget(const Request& request, Sample* sample) noexcept;
  // Samples for which a drafter holds something.
  int64_t state_count() const;
  // For tests: the first violation stops the process.
  void CheckInvariants() const;
  void Publish(EngineStats* stats) const noexcept;

 private:
  const std::unique_ptr<ModelDrafter> model_drafter_;
  NGramDrafter ngram_drafter_;
  const int64_t max_tree_nodes_;
  const int64_t nodes_max_;
  int64_t drafted_tokens_ = 0, accepted_tokens_ = 0, decode_forwards_ = 0;
  double seconds_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_DRAFTS_SPECULATOR_H_
