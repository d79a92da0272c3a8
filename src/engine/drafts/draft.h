// Guesses of the next tokens of a sample, as a tree; how they are made and verified.
//
// A draw is a function of (logits, history, options, seed, position), so a guess is right exactly
// if it is the token that is drawn at its parent. The engine runs the sample's last token and all
// guesses behind it as one token tree, draws at the root, goes on to the child that has the drawn
// token, and so on: what comes out is what plain decoding gives, bit for bit, whatever was guessed.
#ifndef QUIRE_ENGINE_DRAFTS_DRAFT_H_
#define QUIRE_ENGINE_DRAFTS_DRAFT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request/request.h"
#include "engine/sampling/sampler.h"
#include "quire/engine.h"
#include "quire/status.h"

namespace quire {

inline constexpr int64_t kDraftRoot = -1;  // the sample's last token, which is not drawn yet

// Guesses behind a sample's last token. Parents come before their children, siblings are distinct.
struct DraftTree {
  std::vector<int32_t> tokens;   // [guess]
  std::vector<int64_t> parents;  // [guess]: a guess, or kDraftRoot

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  // Guesses on the longest path.
  int64_t levels() const;
  // The child of `parent` with this token; kDraftRoot if there is none.
  int64_t FindChild(int64_t parent, int32_t token) const noexcept;
  // The child, which is made if it is not there.
  int64_t AddChild(int64_t parent, int32_t token);
  // Drops all but the first guesses.
  void Truncate(int64_t size) noexcept;
};

// A sample for which guesses are wanted.
struct DraftJob {
  // Prompt and answer. A drafter may append to it while it works, within its capacity.
  std::vector<int32_t>* tokens = nullptr;
  int64_t prompt_tokens = 0;
  int64_t request_id = 0;  // jobs of one request have one prompt
  int64_t stream = 0;
  const SamplingOptions* options = nullptr;
  int64_t guesses_max = 0;  // >= 1
  int64_t levels_max = 0;   // >= 1; this number of tokens fits into `tokens`
  int64_t branches = 1;
  // At the end of `tokens`; null: none. What it refuses is no guess. A drafter may leave it behind
  // its guesses: it is aligned again before tokens are drawn.
  AnswerFilter* filter = nullptr;
  int64_t* state = nullptr;   // the drafter's own, of this sample: kNoDraftState at first
  DraftTree* tree = nullptr;  // empty; gets the guesses
  DraftKind draft = DraftKind::kNone;
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Fills the trees of the jobs, or leaves some empty. After an error they are undefined.
  virtual Status Propose(std::span<const DraftJob> jobs, DrawScratch* scratch) = 0;
  // Frees what is held for a sample; `state` becomes kNoDraftState.
  virtual void Forget(int64_t* state) noexcept = 0;
  // Samples for which something is held.
  virtual int64_t state_count() const = 0;
  // The first violated invariant stops the process. For tests.
  virtual void CheckInvariants() const = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_DRAFTS_DRAFT_H_
