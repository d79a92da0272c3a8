// The engine behind quire/engine.h, over a model and a cache that are ready; tests hand in their
// own.
//
// A step: plan (admit, evict, preempt, fork, until the scheduler says "run"), forward, draw,
// EndForward, commit. All that can fail comes before EndForward; from there on results are only
// stored, into memory that is there.
#ifndef QUIRE_ENGINE_ENGINE_IMPL_H_
#define QUIRE_ENGINE_ENGINE_IMPL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/answer_drawer.h"
#include "engine/blending/blend_plan.h"
#include "engine/drafts/speculator.h"
#include "engine/prefill_traffic.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/prefix/sequence_state.h"
#include "engine/prompt_blender.h"
#include "engine/remote_traffic.h"
#include "engine/request/prefix_finder.h"
#include "engine/request/request.h"
#include "engine/request/request_queue.h"
#include "engine/request/scheduler.h"
#include "engine/request_limits.h"
#include "engine/sample_sequences.h"
#include "engine/store_traffic.h"
#include "quire/engine.h"

namespace quire {

// The most sequences that the prefix cache retains: as many as there are pages, since each holds,
// as a rule, one of its own. Where sequences do not fork anywhere, a prompt is compared with all of
// them, so they are 1024 there at most.
int64_t RetainedSequencesMax(int64_t pages_total, bool forks_anywhere);

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

// Fills what an output has about its whole request.
void NoteUsage(const Request& request, int64_t now_ns, StepOutput* output) noexcept;

class EngineImpl final : public Engine {
 public:
  struct Parts {
    std::unique_ptr<Model> model;
    // Both empty and for CacheSequencesMax sequences. Null without such layers; not both.
    std::shared_ptr<AttentionKVCache> cache;  // all layers with pages of `page_size`
    std::shared_ptr<RecurrentCache> recurrent = nullptr;
    std::shared_ptr<ParallelRunner> runner;
    const Backend* backend = nullptr;
    // Checked; page_size and max_tree_nodes are the numbers that hold, also where they are 0.
    EngineOptions options = {};
    int64_t state_bytes = 0;
    int64_t kv_bytes = 0;
    int64_t kv_bytes_per_token = 0;
    std::shared_ptr<Clock> clock = nullptr;                 // null = MachineTime()
    std::unique_ptr<ModelDrafter> model_drafter = nullptr;  // null without a draft model
  };
  explicit EngineImpl(Parts parts);

  const ModelInfo& model_info() const override { return reported_info_; }
  const std::string& kernel_path() const override { return kernel_path_; }
  Status CheckSubmit(std::span<const int32_t> prompt,
                     const SamplingOptions& options) const override;
  int64_t max_waiting() const override { return options_.max_waiting; }
  Result<int64_t> Submit(std::span<const int32_t> prompt, const SamplingOptions& options) override;
  Status Cancel(int64_t request_id) override;
  Status Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) override;
  Result<std::vector<StepOutput>> Step() override;
  bool Idle() const override {
    return idle_.load(std::memory_order_acquire) && !prefill_traffic_.is_asked();
  }
  Status Logits(std::span<const std::span<const int32_t>> prompts,
                std::span<float* const> logits) override;
  Result<int64_t> SaveSnapshot(const SnapshotContents& contents, const std::string& path) override;
  Result<SnapshotInfo> LoadSnapshot(const Passport& identity, const std::string& path,
                                    const SnapshotLoadOptions& options) override;
  Status AttachStore(std::shared_ptr<ChunkStore> store, const Passport& identity,
                     const StoreUseOptions& options) override;
  Status FlushStore(int64_t timeout_ms) override;
  Status AttachPrefillPeers(const Passport& identity, const PrefillPeerOptions& options) override;
  std::vector<PrefillPeerInfo> PrefillPeers() const override { return remote_traffic_.Infos(); }
  Result<std::string> ServePrefill(const Passport& identity,
                                   const TransferListenerOptions& options) override;
  Status LastPrefillRefusal() const override { return prefill_traffic_.last_refusal(); }
  void EndPrefill(bool at_once) noexcept override { prefill_traffic_.End(at_once); }
  void SetWake(std::function<void()> wake) override { prefill_traffic_.SetWake(std::move(wake)); }
  EngineStats Stats() const override;
  // How often a forward found fewer pages than the scheduler had counted on.
  int64_t short_counts() const { return short_counts_; }

  // For tests of the memory plan.
  const Model& model() const { return *model_; }
  const AttentionKVCache& cache() const { return *cache_; }
  const RecurrentCache* recurrent() const { return recurrent_.get(); }
  const SequenceState& state() const { return state_; }
  const ModelDrafter* model_drafter() const { return speculator_.model_drafter(); }
  int64_t step_bytes() const { return drawer_.bytes(); }  // of logits and draw scratch
  // For tests: what must hold between two calls; the first violation stops the process.
  void CheckInvariants() const;

 private:
  // `tokens` pending tokens of one sample in a forward, behind those that `layers` brings.
  struct Work {
    Request* request;
    Sample* sample;
    int64_t tokens;
    LayerwiseLoad* layers = nullptr;
    const DraftTree* guesses = nullptr;  // in a tree forward; null: none
    // The tokens are all that is left of a piece of a blended prompt, and some are moved.
    std::optional<BlendPlan::Found> piece = {};

    int64_t loaded() const { return layers == nullptr ? 0 : layers->tokens(); }
    int64_t cost() const { return piece ? piece->cost : tokens; }
    bool ends_pending() const { return loaded() + tokens == sample->pending(); }
  };
  using Batch = std::vector<Work>;
  // Works that are run as token trees, and what is guessed for them.
  struct TreeBatch {
    Batch works;
    std::vector<DraftTree> guesses;
  };

  // Excludes a second thread, turns bad_alloc into OutOfMemory and refreshes what Stats and Idle
  // tell.
  template <typename F>
  auto Enter(std::string_view call, F&& body) -> decltype(body());
  void Publish() noexcept;

  // step_plan.cc: which samples compute how many tokens.
  Result<Batch> PlanBatch(bool may_admit);
  Status GiveSequences();
  int64_t PendingNow(const Request& request, const Sample& sample, int64_t length) const;
  Result<std::vector<bool>> WhichOpenPages(std::span<const int64_t> sequence_ids) const;
  Result<std::vector<RunnableSample>> ViewRunning(Batch* works);
  int64_t PagesOfLoads(const Batch& works) const;
  std::optional<WaitingHead> ViewHead();
  Result<bool> AdmitHead();
  void PreemptYoungest();
  void RestartOrFail();
  void MakeRoom();

  // Makes a request of what a peer asks for.
  Status AddJob(const std::shared_ptr<PrefillJob>& job);

  // step_forward.cc: computing it.
  Status RunStep();
  Status RunBatch(const Batch& batch, bool* plan_anew);
  Status Attempt(const Batch& batch);
  Status Forward(const Batch& batch);
  Result<std::vector<Drawn>> PrepareDraws(const Batch& batch) const;
  void Commit(const Batch& batch, std::vector<Drawn>* draws) noexcept;
  void CommitDraws(std::vector<Drawn>* draws) noexcept;

  // step_drafts.cc: several tokens of a sample in one forward.
  Status PlanTrees(Batch* batch, TreeBatch* trees, bool* plan_anew);
  Result<bool> TreesFit(const Batch& trees, const Batch& plain);
  Status JoinTrees(Batch* batch, TreeBatch* trees);
  void RunTrees(const TreeBatch& trees, Batch* batch);
  Status AttemptTrees(const TreeBatch& trees);

  // step_finish.cc: what a drawn token does to its sample, and the end of samples and requests.
  void ApplyDraw(Drawn* drawn, Draw* draw) noexcept;
  void Report(int64_t answer_length, Drawn* drawn) noexcept;
  void FinishSample(Request* request, Sample* sample, FinishReason reason,
                    StepOutput* output) noexcept;
  void ReleaseSequence(Request* request, Sample* sample) noexcept;
  Status StopSample(int64_t request_id, int64_t sample_index, int64_t answer_tokens);
  void EndRequest(Request* request, FinishReason reason, const std::string& error);

  // step_logits.cc
  Status ShrinkToFreePages(std::vector<int64_t>* sequence_ids, std::vector<int64_t>* lengths);
  Status ComputeLogits(std::span<const std::span<const int32_t>> prompts,
                       std::span<float* const> logits);

  // engine_snapshot.cc
  Result<int64_t> SaveRetained(const SnapshotContents& contents, const std::string& path);
  Result<SnapshotInfo> LoadRetained(const Passport& identity, const std::string& path,
                                    const SnapshotLoadOptions& options);

  const std::unique_ptr<Model> model_;
  const std::shared_ptr<AttentionKVCache> cache_;    // null without attention layers
  const std::shared_ptr<RecurrentCache> recurrent_;  // null without recurrent layers
  const std::unique_ptr<CompositeState> composite_;  // null without recurrent layers
  const ModelInfo reported_info_;                    // the model's, with the layers of the cache
  const SequenceState state_;
  const SequenceStates states_;  // for chunks and snapshots
  const std::string kernel_path_;
  const EngineOptions options_;
  const int64_t pages_total_;
  const std::shared_ptr<Clock> clock_;
  const RequestLimits limits_;
  Speculator speculator_;
  PrefixCache prefix_cache_;
  RequestQueue requests_;
  const PrefixFinder finder_;
  SampleSequences sequences_;
  PromptBlender blender_;
  StoreTraffic store_traffic_;
  RemoteTraffic remote_traffic_;
  PrefillTraffic prefill_traffic_;
  AnswerDrawer drawer_;
  std::vector<StepOutput> due_;  // ends that the next step reports: cancelled and failed requests
  int64_t next_request_id_ = 0;

  std::atomic<bool> entered_ = false;
  std::atomic<bool> idle_ = true;
  EngineStats counters_;  // of the thread that is inside
  int64_t short_counts_ = 0;
  mutable std::mutex published_mutex_;
  EngineStats published_;  // guarded by published_mutex_
};

}  // namespace quire

#endif  // QUIRE_ENGINE_ENGINE_IMPL_H_
