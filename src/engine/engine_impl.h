// EngineImpl: the engine behind quire/engine.h, over a model and a cache that are ready; tests hand
// in their own. It lets one thread in at a time, turns std::bad_alloc into OutOfMemory, and gives
// each call to the owner of its rules:
//   what never changes   EngineFacts, EngineCaches
//   a request comes in   RequestIntake
//   sequences            SequenceHolders: samples of requests, the prefix cache
//   KV from elsewhere    KVTraffic: the chunk store, peers; documents in prompts: PromptBlender
//   a step               StepPlanner (which samples), TreeRunner (guesses), BatchRunner (the rest),
//                        AnswerDrawer (tokens), AnswerReporter (outputs, ends), StepCounter
//   a call beside steps  PromptLogits, RetainedSnapshots
// What is kept here is the order of a step's parts, and what other threads are told
// (PublishedStats).
//
// A step: plan (admit, evict, preempt, fork, until the scheduler says "run"), forward, draw,
// EndForward, commit. All that can fail comes before EndForward; from there on results are only
// stored, into memory that is there.
#ifndef QUIRE_ENGINE_ENGINE_IMPL_H_
#define QUIRE_ENGINE_ENGINE_IMPL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine_caches.h"
#include "engine/engine_facts.h"
#include "engine/published_stats.h"
#include "engine/request_intake.h"
#include "engine/step/answer_drawer.h"
#include "engine/step/answer_reporter.h"
#include "engine/step/batch_runner.h"
#include "engine/step/prompt_blender.h"
#include "engine/step/step_counter.h"
#include "engine/step/step_planner.h"
#include "engine/step/tree_runner.h"
#include "engine/traffic/kv_traffic.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/engine.h"

namespace quire {

class EngineImpl final : public Engine {
 public:
  struct Parts {
    std::unique_ptr<Model> model;
    // Both empty and for CacheSequencesMax sequences. Null without such layers; not both.
    std::shared_ptr<AttentionKVCache> cache;  // all layers with pages of `page_size`
    std::shared_ptr<RecurrentCache> recurrent = nullptr;
    std::shared_ptr<ParallelRunner> runner;
    const Backend* backend = nullptr;
    std::string numa = {};  // Engine::numa
    // Checked; page_size and max_tree_nodes are the numbers that hold, also where they are 0.
    EngineOptions options = {};
    int64_t state_bytes = 0;
    int64_t kv_bytes = 0;
    int64_t kv_bytes_per_token = 0;
    std::shared_ptr<Clock> clock = nullptr;                 // null = MachineTime()
    std::unique_ptr<ModelDrafter> model_drafter = nullptr;  // null without a draft model
  };
  explicit EngineImpl(Parts parts);

  const ModelInfo& model_info() const override { return facts_.reported_info; }
  const std::string& kernel_path() const override { return facts_.kernel_path; }
  const std::string& numa() const override { return facts_.numa; }
  Status CheckSubmit(std::span<const int32_t> prompt,
                     const SamplingOptions& options) const override {
    return intake_.Check(prompt, options);
  }
  int64_t max_waiting() const override { return facts_.options.max_waiting; }
  Result<int64_t> Submit(std::span<const int32_t> prompt, const SamplingOptions& options) override;
  Status Cancel(int64_t request_id) override;
  Status Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) override;
  Result<std::vector<StepOutput>> Step() override;
  bool Idle() const override { return published_.idle() && !traffic_.prefill.is_asked(); }
  Status Logits(std::span<const std::span<const int32_t>> prompts,
                std::span<float* const> logits) override;
  Result<int64_t> SaveSnapshot(const SnapshotContents& contents, const std::string& path) override;
  Result<SnapshotInfo> LoadSnapshot(const Passport& identity, const std::string& path,
                                    const SnapshotLoadOptions& options) override;
  Status AttachStore(std::shared_ptr<ChunkStore> store, const Passport& identity,
                     const StoreUseOptions& options) override;
  Status FlushStore(int64_t timeout_ms) override;
  Status AttachPrefillPeers(const Passport& identity, const PrefillPeerOptions& options) override;
  std::vector<PrefillPeerInfo> PrefillPeers() const override { return traffic_.remote.Infos(); }
  Result<std::string> ServePrefill(const Passport& identity,
                                   const TransferListenerOptions& options) override;
  Status LastPrefillRefusal() const override { return traffic_.prefill.last_refusal(); }
  void EndPrefill(bool at_once) noexcept override { traffic_.prefill.End(at_once); }
  void SetWake(std::function<void()> wake) override { traffic_.prefill.SetWake(std::move(wake)); }
  EngineStats Stats() const override { return published_.stats(); }
  Result<EngineDescription> Describe() override;
  Status SetKeptPart(const std::string& cache_salt, int64_t pages) override;
  // How often a forward found fewer pages than the scheduler had counted on.
  int64_t short_counts() const { return planner_.short_counts(); }

  // For tests of the memory plan.
  const Model& model() const { return *facts_.model; }
  const AttentionKVCache& cache() const { return *caches_.attention(); }
  const EngineCaches& caches() const { return caches_; }
  const ModelDrafter* model_drafter() const { return holders_.speculator.model_drafter(); }
  int64_t step_bytes() const { return drawer_.bytes(); }  // of logits and draw scratch
  // For tests: what must hold between two calls; the first violation stops the process.
  void CheckInvariants() const;

 private:
  // Excludes a second thread, turns bad_alloc into OutOfMemory and refreshes what Stats and Idle
  // tell.
  template <typename F>
  auto Enter(std::string_view call, F&& body) -> decltype(body());
  void Publish() noexcept;
  Status RunStep();

  const std::shared_ptr<Clock> clock_;
  const EngineCaches caches_;
  const EngineFacts facts_;
  SequenceHolders holders_;
  KVTraffic traffic_;
  PromptBlender blender_;
  RequestIntake intake_;
  AnswerDrawer drawer_;
  AnswerReporter answers_;
  StepCounter counter_;
  StepPlanner planner_;
  TreeRunner trees_;
  BatchRunner batches_;
  std::atomic<bool> entered_ = false;
  PublishedStats published_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_ENGINE_IMPL_H_
