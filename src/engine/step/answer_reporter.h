// What requests answer and how they end: drawn tokens go to their samples, what no stop sequence
// can take back is given out, and samples and requests end with an output.
//
// Invariants:
// - Each sample of a request with outputs ends once, with one output that has its finish reason.
// - Tokens that were given out are never taken back, but for those behind a Stop by the caller.
// - A sample that has ended holds nothing: its sequence went to the next leader, to the prefix
//   cache, or is gone.
// Results are stored in memory that was taken before: when the request was admitted, when the draws
// were prepared, and by Reserve.
#ifndef QUIRE_ENGINE_STEP_ANSWER_REPORTER_H_
#define QUIRE_ENGINE_STEP_ANSWER_REPORTER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/request/request.h"
#include "engine/step/answer_drawer.h"
#include "engine/step/prompt_blender.h"
#include "engine/traffic/kv_traffic.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/engine.h"

namespace quire {

class AnswerReporter {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    const Model& model;
    Clock& clock;
    SequenceHolders& holders;
    PromptBlender& blender;
    KVTraffic& traffic;
    bool retains;  // EngineOptions::prefix_cache
  };
  explicit AnswerReporter(const Owners& owners) : owners_(owners) {}

  // Room for the outputs of this number of draws. Throws std::bad_alloc.
  void Reserve(size_t count) { due_.reserve(due_.size() + count); }
  // The forward of these draws has ended. REQUIRES: Reserve for them.
  void Commit(std::vector<Drawn>* draws) noexcept;
  // Ends a request, wherever it is, with an output for each unfinished sample, and with it those
  // that learn for it. Throws std::bad_alloc; a request whose outputs found no room is there yet.
  void End(Request* request, FinishReason reason, const std::string& error);
  // As Engine::Stop.
  Status Stop(int64_t request_id, int64_t sample_index, int64_t answer_tokens);

  // Whether there is nothing to report.
  bool empty() const { return due_.empty(); }
  // What has not been taken yet.
  std::vector<StepOutput> Take();
  void Publish(EngineStats* stats) const noexcept;

 private:
  void CountBlend(Request* request) noexcept;
  void ApplyDraw(Drawn* drawn, Draw* draw) noexcept;
  void Report(int64_t answer_length, Drawn* drawn) noexcept;
  void Finish(Request* request, Sample* sample, FinishReason reason, StepOutput* output) noexcept;
  void ReleaseSequence(Request* request, Sample* sample) noexcept;
  void Forget(Request* request, FinishReason reason, const std::string& error);

  const Owners owners_;
  std::vector<StepOutput> due_;  // what the next step reports
  int64_t tokens_ = 0;           // EngineStats::completion_tokens
  int64_t blend_exact_tokens_ = 0, blend_kept_tokens_ = 0, blend_computed_tokens_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_ANSWER_REPORTER_H_
