// What never changes while an engine lives, so that any thread may read it at any time; and the
// sizes that follow from its options.
#ifndef QUIRE_ENGINE_ENGINE_FACTS_H_
#define QUIRE_ENGINE_ENGINE_FACTS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "engine/request/request_limits.h"
#include "quire/chunk.h"
#include "quire/engine.h"
#include "quire/model.h"
#include "quire/status.h"

namespace quire {

// The most sequences that the prefix cache retains: as many as there are pages, since each holds,
// as a rule, one of its own. Where sequences do not fork anywhere, a prompt is compared with all of
// them, so they are 1024 there at most.
int64_t RetainedSequencesMax(int64_t pages_total, bool forks_anywhere);

// The most tokens of all of them: their texts are kept beside the pages, in memory that no plan has
// counted. Where sequences share most of their pages these are many times what the pages hold; 16
// times are 64 bytes for each token of the cache, whose KV takes thousands. At most 1 GiB.
int64_t RetainedTokensMax(int64_t pages_total, int64_t page_size);

// Prompts that one forward of Logits computes at most: enough to fill its rows, unless they are
// short, and few enough for each to have recurrent states kept ready for it.
int64_t LogitsSequencesMax(int64_t max_num_sequences);

// Sequences that the cache of an engine must have room for: those of samples and those of Logits.
// Retained ones do not count.
int64_t CacheSequencesMax(int64_t max_num_sequences);

// Samples that one step computes at most: each has at least one of its tokens, and at most one row
// of logits.
int64_t StepSamplesMax(int64_t max_num_sequences, int64_t prefill_chunk);

// Rows of logits in one forward.
int64_t StepLogitRowsMax(int64_t max_num_sequences, int64_t prefill_chunk, int64_t max_tree_nodes);

struct EngineFacts {
  // `identity`, whose numerics are what the model's numbers depend on beside the cache's: nothing
  // with the defaults of dtype and activations.
  Passport WithNumerics(const Passport& identity) const;
  // BadState for a call that needs EngineOptions::prefix_cache, without one.
  Status RequirePrefixCache(const char* call) const;

  const std::unique_ptr<Model> model;
  const ModelInfo reported_info;  // the model's, with the layers of the cache
  const std::string kernel_path;
  const std::string numa;  // Engine::numa
  // Checked; page_size and max_tree_nodes are the numbers that hold, also where they are 0.
  const EngineOptions options;
  const RequestLimits limits;
  const EngineStats sizes;     // the fields that are known from the beginning; the others are 0
  const std::string salt_key;  // random: of the digests that descriptions have of salts
};

}  // namespace quire

#endif  // QUIRE_ENGINE_ENGINE_FACTS_H_
