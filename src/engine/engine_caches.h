// The caches of an engine's model, and what they are together: one state of each sequence.
#ifndef QUIRE_ENGINE_ENGINE_CACHES_H_
#define QUIRE_ENGINE_ENGINE_CACHES_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "engine/prefix/engine_states.h"
#include "quire/attention_kv_cache.h"
#include "quire/composite_state.h"
#include "quire/kv_export.h"
#include "quire/model.h"
#include "quire/recurrent_cache.h"

namespace quire {

class EngineCaches {
 public:
  // Null without such layers; not both. REQUIRES: both are empty.
  EngineCaches(std::shared_ptr<AttentionKVCache> attention,
               std::shared_ptr<RecurrentCache> recurrent)
      : attention_(std::move(attention)),
        recurrent_(std::move(recurrent)),
        composite_(JoinStates(attention_, recurrent_)),
        state_(composite_ != nullptr ? EngineStates(composite_.get())
                                     : EngineStates(attention_.get())),
        states_(composite_ != nullptr ? SequenceStates(*composite_) : SequenceStates(*attention_)),
        pages_total_(state_.pages_free()) {}

  const AttentionKVCache* attention() const { return attention_.get(); }
  const RecurrentCache* recurrent() const { return recurrent_.get(); }
  // As a forward of the model takes them.
  ModelState for_model() const { return {attention_.get(), recurrent_.get()}; }
  const EngineStates& state() const { return state_; }
  const SequenceStates& states() const { return states_; }  // for chunks and snapshots
  int64_t pages_total() const { return pages_total_; }

 private:
  const std::shared_ptr<AttentionKVCache> attention_;
  const std::shared_ptr<RecurrentCache> recurrent_;
  const std::unique_ptr<CompositeState> composite_;  // null without recurrent layers
  const EngineStates state_;
  const SequenceStates states_;
  const int64_t pages_total_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_ENGINE_CACHES_H_
