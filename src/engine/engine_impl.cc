#include "engine/engine_impl.h"

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "base/random.h"
#include "engine/description.h"
#include "engine/prompt_logits.h"
#include "engine/retained_snapshots.h"
#include "kernels/backend.h"

namespace quire {
namespace {

ModelInfo WithLayersOf(const AttentionKVCache* cache, ModelInfo info) {
  if (cache != nullptr) info.layers = cache->options().layers;
  return info;
}

EngineStats SizesOf(const EngineImpl::Parts& parts, const EngineCaches& caches) {
  EngineStats sizes;
  if (caches.attention() != nullptr) sizes.pages_total = caches.pages_total();
  sizes.state_bytes = parts.state_bytes;
  sizes.kv_bytes = parts.kv_bytes;
  sizes.kv_bytes_per_token = parts.kv_bytes_per_token;
  sizes.weight_bytes = parts.model->info().weight_bytes;
  sizes.page_size = parts.options.page_size;
  return sizes;
}

// A router gives few requests at a time to two servers, and prompts that nobody asks for any more
// are not to fill the cache for the time of a lease.
PrefixCache::LeaseLimits LeaseLimitsOf(int64_t pages_total) {
  return {.leases = 256, .pages = pages_total / 2};
}

std::string RandomKey() {
  std::string key(size_t{32}, '\0');
  FillRandom(std::as_writable_bytes(std::span(key)));
  return key;
}

// Takes the model.
EngineFacts MakeFacts(EngineImpl::Parts* parts, const EngineCaches& caches) {
  const Model* const model = parts->model.get();
  const EngineStats sizes = SizesOf(*parts, caches);
  const AttentionKVCache* const attention = caches.attention();
  return {.model = std::move(parts->model),
          .reported_info = WithLayersOf(attention, model->info()),
          .kernel_path = std::string(parts->backend->name),
          .numa = parts->numa,
          .options = parts->options,
          .limits = {.model = model,
                     .has_attention = attention != nullptr,
                     .max_pop = attention == nullptr ? 0 : attention->options().max_pop,
                     .max_num_sequences = parts->options.max_num_sequences,
                     .page_size = parts->options.page_size,
                     .pages_total = caches.pages_total()},
          .sizes = sizes,
          .salt_key = RandomKey()};
}

}  // namespace

EngineImpl::EngineImpl(Parts parts)
    : clock_(parts.clock ? parts.clock : MachineTime()),
      caches_(std::move(parts.cache), std::move(parts.recurrent)),
      facts_(MakeFacts(&parts, caches_)),
      holders_(caches_.state(), facts_.options,
               {.sequences =
                    RetainedSequencesMax(caches_.pages_total(), caches_.state().forks_anywhere()),
                .tokens = RetainedTokensMax(caches_.pages_total(), facts_.options.page_size)},
               std::move(parts.model_drafter), clock_),
      traffic_({.model = facts_.model.get(),
                .holders = &holders_,
                .clock = clock_.get(),
                .bytes_per_token = facts_.sizes.kv_bytes_per_token,
                .staging_bytes = facts_.options.staging_bytes,
                .sending_bytes = facts_.options.sending_bytes,
                .prefill_chunk = facts_.options.prefill_chunk}),
      blender_({.state = caches_.state(),
                .prefix_cache = &holders_.prefix_cache,
                .requests = &holders_.requests,
                .finder = &holders_.finder,
                .limits = &facts_.limits,
                .store = &traffic_.store,
                .clock = clock_.get(),
                .piece_max = facts_.options.blend_piece}),
      intake_({facts_, *clock_, holders_, blender_, traffic_}),
      drawer_(facts_.model.get(), *parts.backend, std::move(parts.runner),
              StepLogitRowsMax(facts_.options.max_num_sequences, facts_.options.prefill_chunk,
                               facts_.options.max_tree_nodes)),
      answers_({.model = *facts_.model,
                .clock = *clock_,
                .holders = holders_,
                .blender = blender_,
                .traffic = traffic_,
                .retains = facts_.options.prefix_cache}),
      planner_({.options = facts_.options,
                .limits = facts_.limits,
                .clock = *clock_,
                .holders = holders_,
                .blender = blender_,
                .traffic = traffic_,
                .answers = answers_}),
      trees_({.model = *facts_.model,
              .caches = caches_.for_model(),
              .clock = *clock_,
              .holders = holders_,
              .drawer = drawer_,
              .answers = answers_,
              .counter = counter_,
              .page_size = facts_.options.page_size}),
      batches_({.model = *facts_.model,
                .caches = caches_.for_model(),
                .clock = *clock_,
                .holders = holders_,
                .blender = blender_,
                .traffic = traffic_,
                .drawer = drawer_,
                .answers = answers_,
                .counter = counter_}) {
  holders_.prefix_cache.SetLeaseLimits(LeaseLimitsOf(caches_.pages_total()));
  Publish();
}

template <typename F>
auto EngineImpl::Enter(std::string_view call, F&& body) -> decltype(body()) {
  if (entered_.exchange(true, std::memory_order_acquire)) {
    return GuardEntry([&]() -> decltype(body()) {
      return Status(StatusCode::kBadState,
                    "Engine::" + std::string(call) +
                        ": another thread is inside the engine; call it from one thread at a time");
    });
  }
  auto result = GuardEntry(std::forward<F>(body));
  Publish();
  entered_.store(false, std::memory_order_release);
  return result;
}

void EngineImpl::Publish() noexcept {
  EngineStats stats = facts_.sizes;
  if (caches_.attention() != nullptr) stats.pages_free = caches_.state().pages_free();
  QUIRE_DCHECK(stats.pages_free >= 0 && stats.pages_free <= stats.pages_total);
  stats.pages_in_use = stats.pages_total - stats.pages_free;
  holders_.Publish(&stats);
  traffic_.Publish(&stats);
  blender_.Publish(&stats);
  answers_.Publish(&stats);
  counter_.Publish(&stats);
  planner_.Publish(&stats);
  published_.Set(stats, holders_.requests.empty() && answers_.empty());
}

Result<EngineDescription> EngineImpl::Describe() {
  return Enter("Describe", [&] {
    const EngineDescriber describer({.cache = caches_.attention(),
                                     .requests = &holders_.requests,
                                     .prefix_cache = &holders_.prefix_cache,
                                     .clock = clock_.get(),
                                     .salt_key = facts_.salt_key});
    return describer.Describe(published_.stats());
  });
}

Status EngineImpl::SetKeptPart(const std::string& cache_salt, int64_t pages) {
  return Enter("SetKeptPart", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(facts_.RequirePrefixCache("SetKeptPart"));
    if (pages < 0) {
      return Status(
          StatusCode::kBadArgument,
          "Engine::SetKeptPart: pages is " + std::to_string(pages) + "; it must be at least 0");
    }
    holders_.prefix_cache.SetPart(cache_salt, pages);
    return {};
  });
}

Result<int64_t> EngineImpl::Submit(std::span<const int32_t> prompt,
                                   const SamplingOptions& options) {
  return Enter("Submit", [&] { return intake_.Submit(prompt, options); });
}

Status EngineImpl::RunStep() {
  const RequestEnder end = [this](Request* request, FinishReason reason, const std::string& why) {
    answers_.End(request, reason, why);
  };
  QUIRE_RETURN_IF_ERROR(
      traffic_.prefill.TakeJobs(traffic_.store.compute_seconds_per_token(), end,
                                [this](const auto& job) { return intake_.AddJob(job); }));
  for (bool may_admit = true;;) {
    traffic_.remote.Poll(end);
    QUIRE_ASSIGN_OR_RETURN(StepBatch batch, planner_.Plan(may_admit));
    if (batch.empty()) {
      if (!may_admit) return {};
      if (!traffic_.Await()) return {};
      continue;
    }
    const StepSize size = SizeOf(batch);
    const int64_t start_ns = clock_->SteadyNs();
    bool plan_anew = false;
    TreeBatch trees;
    QUIRE_RETURN_IF_ERROR(trees_.Plan(&batch, &trees, &plan_anew));
    if (plan_anew) continue;
    trees_.Run(trees, &batch);
    const Status status = batch.empty() ? Status() : batches_.Run(batch, &plan_anew);
    if (plan_anew) continue;
    if (status.ok()) {
      planner_.NotePace(size, clock_->SteadyNs() - start_ns);
      traffic_.NoteComputed();
    }
    if (status.code() != StatusCode::kOutOfPages) return status;
    planner_.MakeRoom();
    may_admit = false;
  }
}

Status EngineImpl::Cancel(int64_t request_id) {
  return Enter("Cancel", [&]() -> Status {
    Request* const request = holders_.requests.FindAsked(request_id);
    if (request == nullptr) {
      return Status(StatusCode::kUnknownSequence,
                    "Engine::Cancel: request " + std::to_string(request_id) +
                        " is not there; it has finished or was never submitted");
    }
    answers_.End(request, FinishReason::kCancelled, "");
    return {};
  });
}

Status EngineImpl::Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) {
  return Enter("Stop", [&] { return answers_.Stop(request_id, sample, answer_tokens); });
}

Result<std::vector<StepOutput>> EngineImpl::Step() {
  return Enter("Step", [&]() -> Result<std::vector<StepOutput>> {
    const int64_t steps = counter_.steps();
    const int64_t start_ns = clock_->SteadyNs();
    QUIRE_RETURN_IF_ERROR(RunStep());
    if (counter_.steps() > steps) counter_.NoteTime(clock_->SteadyNs() - start_ns);
    return answers_.Take();
  });
}

Status EngineImpl::Logits(std::span<const std::span<const int32_t>> prompts,
                          std::span<float* const> logits) {
  return Enter("Logits", [&] {
    return PromptLogits(facts_, caches_.for_model(), &holders_).Compute(prompts, logits);
  });
}

Result<int64_t> EngineImpl::SaveSnapshot(const SnapshotContents& contents,
                                         const std::string& path) {
  return Enter("SaveSnapshot", [&] {
    return RetainedSnapshots(facts_, caches_.states(), &holders_).Save(contents, path);
  });
}

Result<SnapshotInfo> EngineImpl::LoadSnapshot(const Passport& identity, const std::string& path,
                                              const SnapshotLoadOptions& options) {
  return Enter("LoadSnapshot", [&] {
    return RetainedSnapshots(facts_, caches_.states(), &holders_).Load(identity, path, options);
  });
}

Status EngineImpl::AttachStore(std::shared_ptr<ChunkStore> store, const Passport& identity,
                               const StoreUseOptions& options) {
  return Enter("AttachStore", [&]() -> Status {
    if (traffic_.store.is_attached()) {
      return Status(StatusCode::kBadState,
                    "Engine::AttachStore: a store is attached; an engine has one for its life");
    }
    const bool long_rope = HasLongSet(facts_.model->info().rope.scaling);
    QUIRE_ASSIGN_OR_RETURN(
        std::unique_ptr<StoreLink> link,
        StoreLink::Create(std::move(store), caches_.states(), !caches_.state().forks_anywhere(),
                          facts_.WithNumerics(identity), options, long_rope));
    traffic_.store.Attach(std::move(link));
    return {};
  });
}

Status EngineImpl::FlushStore(int64_t timeout_ms) {
  return Enter("FlushStore", [&]() -> Status {
    constexpr int64_t kTimeoutMsMax = 365 * 24 * 3600 * int64_t{1000};
    if (timeout_ms < 0 || timeout_ms > kTimeoutMsMax) {
      return Status(StatusCode::kBadArgument, "Engine::FlushStore: timeout_ms is " +
                                                  std::to_string(timeout_ms) +
                                                  "; it must be at least 0 and at most a year");
    }
    return traffic_.store.StoreAll(timeout_ms * 1'000'000);
  });
}

Status EngineImpl::AttachPrefillPeers(const Passport& identity, const PrefillPeerOptions& options) {
  return Enter("AttachPrefillPeers", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(traffic_.prefill.CheckNotOwn(options.addresses));
    return traffic_.remote.Attach(caches_.states(), facts_.WithNumerics(identity), options, clock_);
  });
}

Result<std::string> EngineImpl::ServePrefill(const Passport& identity,
                                             const TransferListenerOptions& options) {
  return Enter("ServePrefill", [&]() -> Result<std::string> {
    QUIRE_RETURN_IF_ERROR(traffic_.remote.CheckNotOwn(options.endpoint));
    return traffic_.prefill.Serve(caches_.states(), facts_.WithNumerics(identity), options);
  });
}

void EngineImpl::CheckInvariants() const {
  holders_.CheckInvariants();
  traffic_.CheckInvariants();
}

}  // namespace quire
