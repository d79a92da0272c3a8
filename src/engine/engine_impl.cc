#include "engine/engine_impl.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "kernels/backend.h"

namespace quire {

int64_t LogitsSequencesMax(int64_t max_num_sequences) {
  return std::min<int64_t>(max_num_sequences, 16);
}

int64_t CacheSequencesMax(int64_t max_num_sequences) {
  return max_num_sequences + LogitsSequencesMax(max_num_sequences);
}

int64_t StepSamplesMax(int64_t max_num_sequences, int64_t prefill_chunk) {
  return std::min(max_num_sequences, prefill_chunk);
}

int64_t StepLogitRowsMax(int64_t max_num_sequences, int64_t prefill_chunk, int64_t max_tree_nodes) {
  return std::max(StepSamplesMax(max_num_sequences, prefill_chunk),
                  std::min(max_tree_nodes, prefill_chunk));
}

int64_t RetainedSequencesMax(int64_t pages_total, bool forks_anywhere) {
  return forks_anywhere ? std::max<int64_t>(pages_total, 1) : 1024;
}

namespace {

ModelInfo WithLayersOf(const AttentionKVCache* cache, ModelInfo info) {
  if (cache != nullptr) info.layers = cache->options().layers;
  return info;
}

void CountStep(int64_t ns, EngineStats* stats) noexcept {
  const double seconds = static_cast<double>(ns) * 1e-9;
  const auto bound =
      std::lower_bound(kStepSecondsBounds.begin(), kStepSecondsBounds.end(), seconds);
  ++stats->step_counts[static_cast<size_t>(bound - kStepSecondsBounds.begin())];
  stats->step_seconds += seconds;
}

}  // namespace

EngineImpl::EngineImpl(Parts parts)
    : model_(std::move(parts.model)),
      cache_(parts.cache),
      recurrent_(parts.recurrent),
      composite_(JoinStates(parts.cache, parts.recurrent)),
      reported_info_(WithLayersOf(cache_.get(), model_->info())),
      state_(composite_ != nullptr ? SequenceState(composite_.get()) : SequenceState(cache_.get())),
      states_(composite_ != nullptr ? SequenceStates(*composite_) : SequenceStates(*cache_)),
      kernel_path_(parts.backend->name),
      options_(std::move(parts.options)),
      pages_total_(state_.pages_free()),
      clock_(parts.clock ? parts.clock : MachineTime()),
      limits_({.model = model_.get(),
               .has_attention = state_.attention() != nullptr,
               .max_pop = cache_ == nullptr ? 0 : cache_->options().max_pop,
               .max_num_sequences = options_.max_num_sequences,
               .page_size = options_.page_size,
               .pages_total = pages_total_}),
      speculator_(std::move(parts.model_drafter), options_.max_tree_nodes, options_.prefill_chunk),
      prefix_cache_(state_, options_.page_size,
                    RetainedSequencesMax(pages_total_, state_.forks_anywhere()), clock_),
      finder_(&requests_, &prefix_cache_, state_, options_.prefix_cache, options_.page_size),
      sequences_(state_, &prefix_cache_, &speculator_),
      blender_({.state = state_,
                .prefix_cache = &prefix_cache_,
                .requests = &requests_,
                .finder = &finder_,
                .limits = &limits_,
                .clock = clock_.get(),
                .piece_max = options_.blend_piece}),
      store_traffic_({.model = model_.get(),
                      .state = state_,
                      .prefix_cache = &prefix_cache_,
                      .requests = &requests_,
                      .finder = &finder_,
                      .sequences = &sequences_,
                      .prefill_chunk = options_.prefill_chunk}),
      remote_traffic_({.state = state_,
                       .requests = &requests_,
                       .finder = &finder_,
                       .clock = clock_.get(),
                       .bytes_per_token = parts.kv_bytes_per_token}),
      prefill_traffic_({.state = state_,
                        .requests = &requests_,
                        .sequences = &sequences_,
                        .bytes_per_token = parts.kv_bytes_per_token,
                        .prefill_chunk = options_.prefill_chunk}),
      drawer_(model_.get(), *parts.backend, std::move(parts.runner),
              StepLogitRowsMax(options_.max_num_sequences, options_.prefill_chunk,
                               options_.max_tree_nodes)) {
  if (cache_ != nullptr) counters_.pages_total = pages_total_;
  counters_.state_bytes = parts.state_bytes;
  counters_.kv_bytes = parts.kv_bytes;
  counters_.kv_bytes_per_token = parts.kv_bytes_per_token;
  counters_.weight_bytes = model_->info().weight_bytes;
  counters_.page_size = options_.page_size;
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
  if (cache_ != nullptr) counters_.pages_free = state_.pages_free();
  counters_.pages_in_use = counters_.pages_total - counters_.pages_free;
  const StateSlotCounts slots = state_.slot_counts();
  counters_.states_total = slots.total;
  counters_.states_free = slots.free;
  counters_.retained_states = slots.retained;
  counters_.retained_sequences = prefix_cache_.sequence_count();
  counters_.retained_tokens = prefix_cache_.token_count();
  counters_.retained_pages = state_.retained_pages();
  counters_.waiting = static_cast<int64_t>(requests_.waiting().size());
  counters_.running = static_cast<int64_t>(requests_.running().size());
  store_traffic_.Publish(&counters_);
  remote_traffic_.Publish(&counters_);
  prefill_traffic_.Publish(&counters_);
  speculator_.Publish(&counters_);
  idle_.store(requests_.empty() && due_.empty(), std::memory_order_release);
  const std::lock_guard<std::mutex> lock(published_mutex_);
  published_ = counters_;
}

EngineStats EngineImpl::Stats() const {
  const std::lock_guard<std::mutex> lock(published_mutex_);
  return published_;
}

// Reads what never changes while the engine lives.
Status EngineImpl::CheckSubmit(std::span<const int32_t> prompt,
                               const SamplingOptions& options) const {
  return GuardEntry([&]() -> Status {
    const int64_t vocab_size = model_->info().vocab_size;
    QUIRE_RETURN_IF_ERROR(CheckTokens("Engine::Submit: prompt", prompt, vocab_size));
    QUIRE_RETURN_IF_ERROR(CheckSamplingOptions(options, vocab_size));
    QUIRE_RETURN_IF_ERROR(speculator_.CheckCanSpeculate(options));
    QUIRE_RETURN_IF_ERROR(remote_traffic_.CheckPeer(options.prefill_peer));
    if (options.blend && !options_.prefix_cache) {
      return Status(StatusCode::kBadArgument,
                    "SamplingOptions::blend: this engine keeps no KV between requests, so no "
                    "document is known (EngineOptions::prefix_cache)");
    }
    QUIRE_RETURN_IF_ERROR(CheckBlend(model_->info(), static_cast<int64_t>(prompt.size()), options,
                                     options_.blend_piece));
    return limits_.CheckFits(static_cast<int64_t>(prompt.size()), options);
  });
}

Result<int64_t> EngineImpl::Submit(std::span<const int32_t> prompt,
                                   const SamplingOptions& options) {
  return Enter("Submit", [&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckSubmit(prompt, options));
    if (requests_.waiting_in_turn() >= options_.max_waiting) {
      return Status(StatusCode::kFull,
                    "Engine::Submit: " + std::to_string(requests_.waiting().size()) +
                        " requests wait (EngineOptions::max_waiting); "
                        "step the engine and submit again");
    }
    auto request = std::make_unique<Request>(next_request_id_, prompt, options);
    request->speculation = options.speculation.value_or(options_.speculation);
    if (!options.predicted_tokens.empty()) request->speculation.draft = DraftKind::kNGram;
    request->submitted_ns = clock_->SteadyNs();
    // Settled before the first token is computed, because stored keys cannot be turned again. So
    // which factors positions use depends on the request alone.
    request->space = {
        .salt = options.cache_salt,
        .long_rope = NeedsLongRope(model_->info(), SpanMax(request->prompt_tokens, options))};
    if (options.blend) blender_.Plan(request.get(), prompt);
    store_traffic_.Prefetch(request.get());
    if (request->blend == nullptr) {
      requests_.Add(std::move(request));
    } else {
      blender_.Add(std::move(request));
    }
    return next_request_id_++;
  });
}

Status EngineImpl::Cancel(int64_t request_id) {
  return Enter("Cancel", [&]() -> Status {
    Request* const request = requests_.Find(request_id);
    if (request == nullptr) {
      return Status(StatusCode::kUnknownSequence,
                    "Engine::Cancel: request " + std::to_string(request_id) +
                        " is not there; it has finished or was never submitted");
    }
    EndRequest(request, FinishReason::kCancelled, "");
    return {};
  });
}

Status EngineImpl::Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) {
  return Enter("Stop", [&] { return StopSample(request_id, sample, answer_tokens); });
}

Result<std::vector<StepOutput>> EngineImpl::Step() {
  return Enter("Step", [&]() -> Result<std::vector<StepOutput>> {
    const int64_t steps = counters_.steps;
    const int64_t start_ns = clock_->SteadyNs();
    QUIRE_RETURN_IF_ERROR(RunStep());
    if (counters_.steps > steps) CountStep(clock_->SteadyNs() - start_ns, &counters_);
    return std::exchange(due_, {});
  });
}

Status EngineImpl::Logits(std::span<const std::span<const int32_t>> prompts,
                          std::span<float* const> logits) {
  return Enter("Logits", [&] { return ComputeLogits(prompts, logits); });
}

Result<int64_t> EngineImpl::SaveSnapshot(const SnapshotContents& contents,
                                         const std::string& path) {
  return Enter("SaveSnapshot", [&] { return SaveRetained(contents, path); });
}

Result<SnapshotInfo> EngineImpl::LoadSnapshot(const Passport& identity, const std::string& path,
                                              const SnapshotLoadOptions& options) {
  return Enter("LoadSnapshot", [&] { return LoadRetained(identity, path, options); });
}

Status EngineImpl::AttachStore(std::shared_ptr<ChunkStore> store, const Passport& identity,
                               const StoreUseOptions& options) {
  return Enter("AttachStore", [&]() -> Status {
    if (store_traffic_.is_attached()) {
      return Status(StatusCode::kBadState,
                    "Engine::AttachStore: a store is attached; an engine has one for its life");
    }
    const bool long_rope = HasLongSet(model_->info().rope.scaling);
    QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<StoreLink> link,
                           StoreLink::Create(std::move(store), states_, !state_.forks_anywhere(),
                                             identity, options, long_rope));
    store_traffic_.Attach(std::move(link));
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
    return store_traffic_.StoreAll(timeout_ms * 1'000'000);
  });
}

Status EngineImpl::AttachPrefillPeers(const Passport& identity, const PrefillPeerOptions& options) {
  return Enter("AttachPrefillPeers",
               [&] { return remote_traffic_.Attach(states_, identity, options, clock_); });
}

Result<std::string> EngineImpl::ServePrefill(const Passport& identity,
                                             const TransferListenerOptions& options) {
  return Enter("ServePrefill", [&] { return prefill_traffic_.Serve(states_, identity, options); });
}

Status EngineImpl::AddJob(const std::shared_ptr<PrefillJob>& job) {
  QUIRE_ASSIGN_OR_RETURN(const SamplingOptions options, PrefillTraffic::OptionsOf(*job));
  QUIRE_RETURN_IF_ERROR(CheckSubmit(job->job.tokens, options));
  if (static_cast<int64_t>(requests_.waiting().size()) >= options_.max_waiting) {
    return Status(StatusCode::kFull, std::to_string(requests_.waiting().size()) +
                                         " requests wait (EngineOptions::max_waiting)");
  }
  auto request = std::make_unique<Request>(next_request_id_, job->job.tokens, options);
  request->submitted_ns = clock_->SteadyNs();
  request->space = PrefillTraffic::SpaceOf(job->job);
  request->job = job;
  store_traffic_.Prefetch(request.get());
  requests_.Add(std::move(request));
  ++next_request_id_;
  return {};
}

void EngineImpl::CheckInvariants() const {
  prefix_cache_.CheckInvariants();
  int64_t sequences = prefix_cache_.sequence_count();
  int64_t samples = 0;
  int64_t drafts = 0;
  for (const auto& request : requests_.running()) {
    for (const Sample& sample : request->samples) {
      QUIRE_CHECK(sample.finished() ? !sample.has_sequence() : sample.pending() >= 1);
      samples += sample.finished() ? 0 : 1;
      drafts += sample.draft_state == kNoDraftState ? 0 : 1;
      QUIRE_CHECK(sample.draft_state == kNoDraftState || sample.has_sequence());
      if (!sample.has_sequence()) continue;
      ++sequences;
      const Result<int64_t> length = state_.GetSequenceLength(sample.sequence_id);
      QUIRE_CHECK(length.ok()) << length.status().ToString();
      // Tokens that are to come are in the lengths of attention.
      const int64_t to_come = RemoteTraffic::TokensToCome(*request, sample);
      const int64_t expected = sample.computed + (state_.is_recurrent() ? 0 : to_come);
      QUIRE_CHECK(*length == expected) << "sequence " << sample.sequence_id;
    }
  }
  QUIRE_CHECK(samples <= options_.max_num_sequences);
  QUIRE_CHECK(state_.sequence_count() == sequences) << "a sequence that nobody holds";
  for (const auto& request : requests_.waiting()) {
    for (const Sample& sample : request->samples) {
      QUIRE_CHECK(!sample.has_sequence());
      QUIRE_CHECK(sample.draft_state == kNoDraftState);
    }
    QUIRE_CHECK(request->load == nullptr || store_traffic_.is_attached());
    QUIRE_CHECK(request->layers == nullptr) << "request " << request->id << " waits with layers";
    QUIRE_CHECK(request->remote == nullptr) << "request " << request->id << " waits and receives";
  }
  for (const auto& request : requests_.running()) {
    QUIRE_CHECK(request->load == nullptr) << "request " << request->id << " loads while it runs";
  }
  const Status status = state_.CheckInvariants();
  QUIRE_CHECK(status.ok()) << status.ToString();
  speculator_.CheckInvariants();
  QUIRE_CHECK(speculator_.state_count() == drafts) << "a draft of a sample that is gone";
}

}  // namespace quire
