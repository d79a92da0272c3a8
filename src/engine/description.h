// EngineDescriber: what holds which KV, and which requests wait, to be shown to people.
//
// What it costs does not grow with the cache: at most kDescribedMax blocks, sequences and requests
// are looked at, and one block more for each sequence. No token is read.
#ifndef QUIRE_ENGINE_DESCRIPTION_H_
#define QUIRE_ENGINE_DESCRIPTION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/prefix/prefix_cache.h"
#include "engine/request/request_queue.h"
#include "kv/pages/block_queries.h"
#include "quire/attention_kv_cache.h"
#include "quire/engine.h"
#include "quire/seams.h"

namespace quire {

class EngineDescriber {
 public:
  // All outlive it.
  struct Parts {
    const AttentionKVCache* cache;  // null without attention layers: then there are no blocks
    const RequestQueue* requests;
    const PrefixCache* prefix_cache;
    const Clock* clock;
    std::string_view salt_key;
  };
  explicit EngineDescriber(const Parts& parts);

  // May throw std::bad_alloc. REQUIRES: between two steps.
  Result<EngineDescription> Describe(const EngineStats& stats) const;

 private:
  // Sequences that are described, with what the block tree is asked for.
  struct Holders {
    std::vector<int64_t> ids;
    std::vector<int64_t> stored;  // [sequence] first tokens that the chunk store has
  };
  std::string DigestOf(const std::string& salt) const;
  Holders AddSequences(EngineDescription* description) const;
  void AddWaiting(EngineDescription* description) const;
  Status AddBlocks(const Holders& holders, EngineDescription* description) const;

  const BlockQueries* const blocks_;
  const RequestQueue& requests_;
  const PrefixCache& prefix_cache_;
  const Clock& clock_;
  const std::string_view salt_key_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_DESCRIPTION_H_
