#include "engine/prompt_logits.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "engine/prefix/open_forward.h"

namespace quire {
namespace {

// A prompt under way.
struct Pass {
  std::span<const int32_t> tokens;
  float* logits;
  int64_t sequence_id = kNoSequence;
  int64_t computed = 0;
  int64_t taken = 0;  // in the forward that is being made
};

// Removes the sequences of all passes when it goes.
class Passes {
 public:
  explicit Passes(KVState* state) : state_(state) {}
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;
  ~Passes() {
    for (Pass& pass : all) Remove(&pass);
  }
  void Remove(Pass* pass) noexcept {
    if (pass->sequence_id == kNoSequence) return;
    const Status status = state_->RemoveSequence(pass->sequence_id);
    QUIRE_CHECK(status.ok()) << status.ToString();
    pass->sequence_id = kNoSequence;
  }

  std::vector<Pass> all;

 private:
  KVState* state_;
};

// The passes of one forward: prompts in order, each as far as the chunk goes. So only the last one
// is left unfinished.
std::vector<Pass*> NextBatch(std::vector<Pass>* passes, int64_t chunk, int64_t sequences_max) {
  std::vector<Pass*> batch;
  for (Pass& pass : *passes) {
    const int64_t left = static_cast<int64_t>(pass.tokens.size()) - pass.computed;
    if (left == 0) continue;
    if (chunk == 0 || static_cast<int64_t>(batch.size()) == sequences_max) break;
    pass.taken = std::min(left, chunk);
    QUIRE_CHECK(pass.taken >= 1);
    chunk -= pass.taken;
    batch.push_back(&pass);
  }
  return batch;
}

Status CheckLogitsArguments(std::span<const std::span<const int32_t>> prompts,
                            std::span<float* const> logits, const RequestLimits& limits) {
  std::ostringstream message;
  if (prompts.size() != logits.size()) {
    message << "Engine::Logits: " << prompts.size() << " prompts and " << logits.size()
            << " buffers for logits; give one for each";
    return Status(StatusCode::kBadArgument, message.str());
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string what = "Engine::Logits: prompts[" + std::to_string(i) + "]";
    QUIRE_RETURN_IF_ERROR(CheckTokens(what, prompts[i], limits.model->info().vocab_size));
    if (logits[i] == nullptr) {
      return Status(StatusCode::kBadArgument, what + " has a null buffer for its logits");
    }
    const auto length = static_cast<int64_t>(prompts[i].size());
    const int64_t length_max = limits.length_max();
    if (length <= length_max) continue;
    message << what << " has " << length << " tokens; model and cache hold at most " << length_max;
    return Status(StatusCode::kTooLarge, message.str());
  }
  return {};
}

}  // namespace

Status PromptLogits::Compute(std::span<const std::span<const int32_t>> prompts,
                             std::span<float* const> logits) {
  QUIRE_RETURN_IF_ERROR(CheckLogitsArguments(prompts, logits, facts_.limits));
  Passes passes(&holders_.state.kv());
  for (size_t i = 0; i < prompts.size(); ++i) {
    passes.all.push_back({.tokens = prompts[i], .logits = logits[i]});
  }
  const int64_t vocab_size = facts_.model->info().vocab_size;
  std::vector<float> together;  // of several prompts in one forward: more rows than a step has
  for (;;) {
    std::vector<Pass*> batch = NextBatch(&passes.all, facts_.options.prefill_chunk,
                                         LogitsSequencesMax(facts_.options.max_num_sequences));
    if (batch.empty()) return {};
    std::vector<int64_t> sequence_ids;
    std::vector<int64_t> lengths;
    for (Pass* pass : batch) {
      if (pass->sequence_id == kNoSequence) {
        const bool long_rope =
            NeedsLongRope(facts_.model->info(), static_cast<int64_t>(pass->tokens.size()));
        const int64_t sequence_id = holders_.sequences.NewId();
        QUIRE_RETURN_IF_ERROR(holders_.state.AddSequence(sequence_id, long_rope));
        pass->sequence_id = sequence_id;
      }
      sequence_ids.push_back(pass->sequence_id);
      lengths.push_back(pass->taken);
    }
    QUIRE_RETURN_IF_ERROR(ShrinkToFreePages(&sequence_ids, &lengths));
    QUIRE_CHECK(sequence_ids.size() == lengths.size());
    QUIRE_CHECK(!sequence_ids.empty()) << "a forward of nothing";
    batch.resize(sequence_ids.size());

    std::vector<int32_t> token_ids;
    for (const Pass* pass : batch) {
      QUIRE_DCHECK(pass->computed + pass->taken <= std::ssize(pass->tokens));
      const auto first = pass->tokens.begin() + pass->computed;
      token_ids.insert(token_ids.end(), first, first + pass->taken);
    }
    std::vector<int64_t> rows(token_ids.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    float* const alone = batch.front()->logits + batch.front()->computed * vocab_size;
    if (batch.size() > 1) together.resize(rows.size() * vocab_size);
    float* const target = batch.size() > 1 ? together.data() : alone;

    QUIRE_RETURN_IF_ERROR(holders_.state.kv().BeginForward(sequence_ids, lengths));
    OpenForward forward(&holders_.state.kv());
    QUIRE_RETURN_IF_ERROR(facts_.model->Forward(caches_, token_ids, rows, target));
    QUIRE_RETURN_IF_ERROR(forward.End());

    const float* row = target;
    for (Pass* pass : batch) {
      const int64_t count = pass->taken * vocab_size;
      if (batch.size() > 1) std::copy_n(row, count, pass->logits + pass->computed * vocab_size);
      row += count;
      pass->computed += pass->taken;
      if (pass->computed == static_cast<int64_t>(pass->tokens.size())) passes.Remove(pass);
    }
  }
}

// Gives up retained KV for the batch, then the batch's last sequences.
Status PromptLogits::ShrinkToFreePages(std::vector<int64_t>* sequence_ids,
                                       std::vector<int64_t>* lengths) {
  for (;;) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t needed,
                           holders_.state.PagesNeeded(*sequence_ids, *lengths));
    if (needed <= holders_.state.pages_free()) return {};
    holders_.prefix_cache.Evict(needed);
    if (needed <= holders_.state.pages_free()) return {};
    if (sequence_ids->size() == 1) {
      std::ostringstream message;
      message << "Engine::Logits: " << needed << " pages are needed and "
              << holders_.state.pages_free() << " free; " << holders_.requests.running().size()
              << " requests run, call again when they have finished";
      return Status(StatusCode::kOutOfPages, message.str());
    }
    sequence_ids->pop_back();
    lengths->pop_back();
  }
}

}  // namespace quire
