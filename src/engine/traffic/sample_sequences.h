// Which sample holds which sequence of the caches.
//
// Invariant: a sequence belongs to one sample, to the prefix cache, or to the call that is running.
#ifndef QUIRE_ENGINE_TRAFFIC_SAMPLE_SEQUENCES_H_
#define QUIRE_ENGINE_TRAFFIC_SAMPLE_SEQUENCES_H_

#include <cstdint>

#include "engine/drafts/speculator.h"
#include "engine/prefix/engine_states.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/request/request.h"

namespace quire {

class SampleSequences {
 public:
  // What is pointed to, and what `state` views, outlives this.
  SampleSequences(EngineStates state, PrefixCache* prefix_cache, Speculator* speculator)
      : state_(state), prefix_cache_(*prefix_cache), speculator_(*speculator) {}

  // An id that no sequence has had.
  int64_t NewId() noexcept { return next_id_++; }
  // A new sequence, or a fork of what was found.
  Status Give(const Request& request, Sample* sample, const PrefixMatch& from);
  // The end of the sample's sequence, with what was drafted for it.
  void Remove(const Request& request, Sample* sample) noexcept;
  // Those of all samples, and what is loaded into them.
  void RemoveAll(Request* request) noexcept;
  // Gives the sequence to the prefix cache: what is approximate in it under the request's recipe,
  // its exact beginning for everybody. It is removed where nothing is to be `kept`, where a
  // window has slid in it, or without memory.
  void Retain(const Request& request, Sample* sample, bool kept) noexcept;

 private:
  void RetainExactBeginning(const Request& request, const Sample& sample, int64_t sequence_id,
                            int64_t exact, int64_t stored);

  const EngineStates state_;
  PrefixCache& prefix_cache_;
  Speculator& speculator_;
  int64_t next_id_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TRAFFIC_SAMPLE_SEQUENCES_H_
