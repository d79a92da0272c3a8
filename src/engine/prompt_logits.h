// Engine::Logits: prompts through the model beside the requests that run.
//
// Invariant: its sequences live only as long as the call, and take pages that no request in work
// holds; retained KV gives way to them.
#ifndef QUIRE_ENGINE_PROMPT_LOGITS_H_
#define QUIRE_ENGINE_PROMPT_LOGITS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine_facts.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/model.h"

namespace quire {

class PromptLogits {
 public:
  // All must outlive it.
  PromptLogits(const EngineFacts& facts, const ModelState& caches, SequenceHolders* holders)
      : facts_(facts), caches_(caches), holders_(*holders) {}

  // As Engine::Logits.
  Status Compute(std::span<const std::span<const int32_t>> prompts, std::span<float* const> logits);

 private:
  Status ShrinkToFreePages(std::vector<int64_t>* sequence_ids, std::vector<int64_t>* lengths);

  const EngineFacts& facts_;
  const ModelState caches_;
  SequenceHolders& holders_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PROMPT_LOGITS_H_
