// Guesses by a smaller model with the same tokens.
//
// The drafter keeps a sequence for each sample, in states of its own, in step with what the sample
// has: guesses that were wrong are dropped, what was drawn instead is fed. It draws as the sample
// does, with the same random numbers: the more its logits are the large model's, the more often it
// draws the same token, at any temperature. Beside each draw stand the tokens with the best logits.
// A sample with a window has it here too.
//
// A sequence holds the sample's first `synced` tokens, then `chain`: guesses, as uncommitted nodes
// of a token tree, each behind the one before. So taking them back costs nothing where a sequence
// cannot be cut, and a window slides over what was drawn alone.
//
// Either vocabulary may be larger than the other: guesses are of those that both have, and a text
// with a token that the smaller model has not gets none from there on.
#ifndef QUIRE_ENGINE_DRAFTS_MODEL_DRAFT_H_
#define QUIRE_ENGINE_DRAFTS_MODEL_DRAFT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/drafts/draft.h"
#include "engine/prefix/engine_states.h"
#include "quire/model.h"

namespace quire {

class ModelDrafter final : public Drafter {
 public:
  struct Parts {
    std::unique_ptr<Model> model;
    // Both empty, for as many sequences as there are samples at a time and as many nodes of trees
    // as are guessed in a step. Null without such layers.
    std::shared_ptr<AttentionKVCache> cache;
    std::shared_ptr<RecurrentCache> recurrent = nullptr;
    int64_t prefill_chunk = 0;  // most tokens of a forward, and fed at once to catch up
    int64_t rows_max = 0;       // of logits, in a forward
    int64_t vocab_size = 0;     // of the model that draws the tokens
  };
  explicit ModelDrafter(Parts parts);

  Status Propose(std::span<const DraftJob> jobs, DrawScratch* scratch) override;
  void Forget(int64_t* state) noexcept override;
  int64_t state_count() const override { return static_cast<int64_t>(held_.size()); }
  void CheckInvariants() const override;

  // For tests of the memory plan.
  const Model& model() const { return *model_; }
  const AttentionKVCache* cache() const { return cache_.get(); }
  const RecurrentCache* recurrent() const { return recurrent_.get(); }
  int64_t logits_bytes() const { return static_cast<int64_t>(logits_.capacity() * sizeof(float)); }
  // Tokens that were run: for tests of how much is computed.
  int64_t tokens_run() const { return tokens_run_; }

 private:
  struct Held {
    int64_t sequence_id = -1;  // -1: none, its room was given up
    int64_t request_id = 0;
    int64_t synced = 0;
    std::vector<int32_t> chain;
    int64_t last_use = 0;
    bool unknown_token = false;  // the text has one that this model has not

    int64_t length() const { return synced + static_cast<int64_t>(chain.size()); }
  };
  // A job under way.
  struct Course {
    const DraftJob* job;
    Held* held;
    int64_t tokens = 0;  // of this forward
    int64_t row = -1;    // of logits behind its last token; -1: it is not at its end yet
    int64_t parent = kDraftRoot;
  };

  // Tokens of the sample, or guesses, which become nodes.
  enum class Feeds : uint8_t { kTokens, kGuesses };

  bool HasPosition(const DraftJob& job, int64_t position) const;
  bool KnowsTokens(const DraftJob& job, Held* held) const;
  Result<Held*> Align(const DraftJob& job);
  Status KeepGuesses(Held* held, int64_t count);
  Status Begin(const DraftJob& job, Held* held);
  void Drop(Held* held) noexcept;
  bool FreeOne(std::span<const Course> courses) noexcept;
  Result<int64_t> PagesFor(std::span<const Course> courses, Feeds feeds) const;
  Status FitPages(std::vector<Course>* courses, Feeds feeds);
  Status Forward(std::vector<Course>* courses, Feeds feeds);
  bool Guess(Course* course, DrawScratch* scratch);

  const std::unique_ptr<Model> model_;
  const std::shared_ptr<AttentionKVCache> cache_;
  const std::shared_ptr<RecurrentCache> recurrent_;
  const std::unique_ptr<CompositeState> composite_;
  const EngineStates state_;
  const int64_t prefill_chunk_;
  const int64_t vocab_size_;      // that both have
  std::map<int64_t, Held> held_;  // by the job's state
  int64_t next_state_ = 0;
  int64_t next_sequence_id_ = 0;
  int64_t use_ = 0;
  int64_t tokens_run_ = 0;
  std::vector<float> logits_;  // [rows of the forward, vocab_size]
  Draw draw_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_DRAFTS_MODEL_DRAFT_H_
