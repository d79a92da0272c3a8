// All that hold sequences of the caches: the samples of requests, and the prefix cache.
//
// Invariants, between two calls of the engine:
// - The caches have no sequence that is not held, and none has two holders.
// - A sequence is as long as what its sample has computed, with the tokens that are to come.
// - Unfinished samples of requests in work have a pending token, those that wait no sequence, and a
//   finished one nothing. A drafter holds something only for samples with a sequence.
// - No more samples are in work than the caches have room for.
#ifndef QUIRE_ENGINE_TRAFFIC_SEQUENCE_HOLDERS_H_
#define QUIRE_ENGINE_TRAFFIC_SEQUENCE_HOLDERS_H_

#include <cstdint>
#include <memory>

#include "engine/drafts/model_draft.h"
#include "engine/drafts/speculator.h"
#include "engine/prefix/engine_states.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/request/prefix_finder.h"
#include "engine/request/request_queue.h"
#include "engine/traffic/sample_sequences.h"
#include "quire/engine.h"

namespace quire {

struct SequenceHolders {
  // What `state` views outlives the holders. model_drafter: null without a draft model.
  SequenceHolders(EngineStates states, const EngineOptions& options,
                  const PrefixCache::Limits& retained, std::unique_ptr<ModelDrafter> model_drafter,
                  std::shared_ptr<Clock> clock);
  SequenceHolders(const SequenceHolders&) = delete;
  SequenceHolders& operator=(const SequenceHolders&) = delete;

  // For tests: the first violation stops the process.
  void CheckInvariants() const;
  void Publish(EngineStats* stats) const noexcept;

  const EngineStates state;
  Speculator speculator;
  PrefixCache prefix_cache;
  RequestQueue requests;
  const PrefixFinder finder;
  SampleSequences sequences;

 private:
  void CheckWaiting() const;

  const int64_t samples_max_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TRAFFIC_SEQUENCE_HOLDERS_H_
