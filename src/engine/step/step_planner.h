// The first half of a step: which samples compute how many tokens. It carries out what the
// scheduler decides: admits, evicts, preempts, restarts, forks, until that says "run".
//
// Invariant: every decision is carried out whole before the next one is asked for, so an error
// between two leaves a state from which the next step goes on.
#ifndef QUIRE_ENGINE_STEP_STEP_PLANNER_H_
#define QUIRE_ENGINE_STEP_STEP_PLANNER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/request/request_limits.h"
#include "engine/request/scheduler.h"
#include "engine/step/answer_reporter.h"
#include "engine/step/prompt_blender.h"
#include "engine/step/step_batch.h"
#include "engine/step/step_pace.h"
#include "engine/traffic/kv_traffic.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/engine.h"

namespace quire {

class StepPlanner {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    const EngineOptions& options;
    const RequestLimits& limits;
    Clock& clock;
    SequenceHolders& holders;
    PromptBlender& blender;
    KVTraffic& traffic;
    AnswerReporter& answers;
  };
  explicit StepPlanner(const Owners& owners)
      : owners_(owners), options_(owners.options), holders_(owners.holders) {}

  // What the next forward computes; empty if there is nothing to compute now.
  Result<StepBatch> Plan(bool may_admit);
  // A step of this size took `ns`; prompts of the next ones are cut by it.
  void NotePace(const StepSize& size, int64_t ns) noexcept { pace_.Note(size, ns); }
  // A forward found too few pages, against the scheduler's count: gives up some.
  void MakeRoom();

  // How often a forward found fewer pages than the scheduler had counted on.
  int64_t short_counts() const { return short_counts_; }
  void Publish(EngineStats* stats) const noexcept { stats->preemptions = preemptions_; }

 private:
  int64_t StandingRequests(const StepBatch& works) const;
  Status GiveSequences();
  int64_t PendingNow(const Request& request, const Sample& sample, int64_t length) const;
  Result<std::vector<bool>> WhichOpenPages(std::span<const int64_t> sequence_ids) const;
  Result<std::vector<RunnableSample>> ViewRunning(StepBatch* works);
  std::optional<WaitingHead> ViewHead();
  Result<bool> AdmitHead();
  void PreemptYoungest();
  void RestartOrFail();

  const Owners owners_;
  const EngineOptions& options_;
  SequenceHolders& holders_;
  StepPace pace_;
  int64_t preemptions_ = 0, short_counts_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_STEP_PLANNER_H_
