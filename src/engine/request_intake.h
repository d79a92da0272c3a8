// What comes to an engine as a request: the caller's, and those of peers that want a prompt
// computed.
//
// Invariant: a request that is queued here passed Check, so it can be computed when nothing else is
// there; its id is higher than those before.
#ifndef QUIRE_ENGINE_REQUEST_INTAKE_H_
#define QUIRE_ENGINE_REQUEST_INTAKE_H_

#include <cstdint>
#include <memory>
#include <span>

#include "engine/engine_facts.h"
#include "engine/remote/prefill_server.h"
#include "engine/step/prompt_blender.h"
#include "engine/traffic/kv_traffic.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/engine.h"

namespace quire {

class RequestIntake {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    const EngineFacts& facts;
    const Clock& clock;
    SequenceHolders& holders;
    PromptBlender& blender;
    KVTraffic& traffic;
  };
  explicit RequestIntake(const Owners& owners)
      : owners_(owners), options_(owners.facts.options), requests_(owners.holders.requests) {}

  // As Engine::CheckSubmit, from any thread.
  Status Check(std::span<const int32_t> prompt, const SamplingOptions& options) const;
  // As Engine::Submit. Throws std::bad_alloc, and nothing has changed then.
  Result<int64_t> Submit(std::span<const int32_t> prompt, const SamplingOptions& options);
  // Makes a request of what a peer asks for. Errors are those of Check; Full.
  Status AddJob(const std::shared_ptr<PrefillJob>& job);

 private:
  const Owners owners_;
  const EngineOptions& options_;
  RequestQueue& requests_;
  int64_t next_id_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REQUEST_INTAKE_H_
