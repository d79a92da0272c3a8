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

}  // namespace

EngineImpl::EngineImpl(Parts parts)
    : model_(std::move(parts.model)),
      cache_(parts.cache),
      recurrent_(parts.recurrent),
      composite_(JoinStates(parts.cache, parts.recurrent)),
      reported_info_(WithLayersOf(cache_.get(), model_->info())),
      state_(composite_ != nullptr ? SequenceState(composite_.get()) : SequenceState(cache_.get())),
      runner_(std::move(parts.runner)),
      kernel_path_(parts.backend->name),
      options_(std::move(parts.options)),
      pages_total_(state_.pages_free()),
      clock_(parts.clock ? parts.clock : MachineTime()),
      model_drafter_(std::move(parts.model_drafter)),
      prefix_cache_(state_, options_.page_size,
                    RetainedSequencesMax(pages_total_, state_.forks_anywhere())) {
  logits_.reserve(StepLogitRowsMax(options_.max_num_sequences, options_.prefill_chunk,
                                   options_.max_tree_nodes) *
                  model_->info().vocab_size);
  draw_scratch_.reserve(runner_->worker_count());
  for (int i = 0; i < runner_->worker_count(); ++i) {
    draw_scratch_.emplace_back(model_->info().vocab_size, *parts.backend);
  }
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
  counters_.waiting = static_cast<int64_t>(waiting_.size());
  counters_.running = static_cast<int64_t>(running_.size());
  counters_.loading = std::count_if(waiting_.begin(), waiting_.end(), [](const auto& request) {
    return request->load != nullptr && !request->load->ended();
  });
  if (store_ != nullptr) {
    counters_.stored_chunks = store_->put_counts().chunks;
    counters_.stored_bytes = store_->put_counts().bytes;
    counters_.refused_chunks = store_->put_counts().refused;
  }
  idle_.store(waiting_.empty() && running_.empty() && due_.empty(), std::memory_order_release);
  const std::lock_guard<std::mutex> lock(published_mutex_);
  published_ = counters_;
}

EngineStats EngineImpl::Stats() const {
  const std::lock_guard<std::mutex> lock(published_mutex_);
  return published_;
}

int64_t EngineImpl::step_bytes() const {
  auto bytes = static_cast<int64_t>(logits_.capacity() * sizeof(float));
  for (const DrawScratch& scratch : draw_scratch_) bytes += scratch.bytes();
  return bytes;
}

SequenceStates EngineImpl::states() const {
  return composite_ != nullptr ? SequenceStates(*composite_) : SequenceStates(*cache_);
}

Status EngineImpl::CheckFits(int64_t prompt_tokens, const SamplingOptions& options) const {
  std::ostringstream message;
  const int64_t positions = model_->info().max_position_embeddings;
  if (options.n > options_.max_num_sequences) {
    message << "SamplingOptions::n is " << options.n << "; the engine works on at most "
            << options_.max_num_sequences
            << " samples at a time (EngineOptions::max_num_sequences)";
    return Status(StatusCode::kTooLarge, message.str());
  }
  if (options.window != 0) {
    QUIRE_RETURN_IF_ERROR(CheckWindow(prompt_tokens, options));
  } else if (prompt_tokens > positions || options.max_tokens > positions - prompt_tokens) {
    message << "Engine::Submit: a prompt of " << prompt_tokens << " tokens and max_tokens "
            << options.max_tokens << " do not fit the model's " << positions
            << " positions; shorten the prompt or lower max_tokens";
    return Status(StatusCode::kTooLarge, message.str());
  }
  int64_t pages = PagesForRequest(prompt_tokens, options.max_tokens, options.n, options_.page_size);
  if (options.window != 0) {
    pages = std::min(pages, options.n * PagesOfWindow(options));
  }
  if (pages > pages_total_) {
    message << "Engine::Submit: " << options.n << " sample(s) of " << prompt_tokens
            << " prompt tokens and max_tokens " << options.max_tokens << " need " << pages
            << " pages of " << options_.page_size << " tokens, the cache has " << pages_total_
            << "; raise EngineOptions::kv_bytes or lower max_tokens or n";
    return Status(StatusCode::kTooLarge, message.str());
  }
  return {};
}

Status EngineImpl::CheckCanSpeculate(const std::optional<Speculation>& speculation) const {
  if (!speculation || speculation->draft == DraftKind::kNone) return {};
  if (options_.max_tree_nodes < 2) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::speculation: this engine has no room for guesses; give it "
                  "EngineOptions::max_tree_nodes of at least 2, or a speculation of its own");
  }
  if (speculation->draft == DraftKind::kModel && model_drafter_ == nullptr) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::speculation: draft is kModel and this engine has no draft "
                  "model; give EngineOptions::draft_model_directory, or take kNGram");
  }
  return {};
}

Status EngineImpl::CheckWindow(int64_t prompt_tokens, const SamplingOptions& options) const {
  std::ostringstream message;
  const int64_t positions = model_->info().max_position_embeddings;
  if (state_.attention() == nullptr) {
    message << "SamplingOptions::window is " << options.window << "; "
            << model_->info().architecture
            << " has no attention layers that could have one, and its states do not grow with the "
               "text: leave it 0";
    return Status(StatusCode::kBadArgument, message.str());
  }
  if (options.window > positions) {
    message << "SamplingOptions::window is " << options.window << "; the model has " << positions
            << " positions, so that is the most";
    return Status(StatusCode::kBadArgument, message.str());
  }
  constexpr int64_t kMost = SamplingOptions::kEndlessTokensMax;
  if (prompt_tokens > kMost || options.max_tokens > kMost - prompt_tokens) {
    message << "Engine::Submit: a prompt of " << prompt_tokens << " tokens and max_tokens "
            << options.max_tokens << " are more than " << kMost
            << ", the most with a window; lower max_tokens";
    return Status(StatusCode::kTooLarge, message.str());
  }
  return {};
}

// With the tokens that the cache keeps for pops.
int64_t EngineImpl::PagesOfWindow(const SamplingOptions& options) const {
  const int64_t max_pop = cache_ == nullptr ? 0 : cache_->options().max_pop;
  return PagesForWindow(options.window + max_pop, options.sinks, options_.page_size);
}

bool EngineImpl::ForksAnywhere(const Request& request) const {
  return state_.forks_anywhere() && !request.has_window();
}

int64_t EngineImpl::SequencesFree() const {
  int64_t used = 0;
  for (const auto& request : running_) used += request->unfinished_count();
  return options_.max_num_sequences - used;
}

Request* EngineImpl::FindRequest(int64_t request_id) const {
  const auto has_id = [&](const auto& request) { return request->id == request_id; };
  const auto running = std::find_if(running_.begin(), running_.end(), has_id);
  if (running != running_.end()) return running->get();
  const auto waiting = std::find_if(waiting_.begin(), waiting_.end(), has_id);
  return waiting == waiting_.end() ? nullptr : waiting->get();
}

// Reads what never changes while the engine lives.
Status EngineImpl::CheckSubmit(std::span<const int32_t> prompt,
                               const SamplingOptions& options) const {
  return GuardEntry([&]() -> Status {
    const int64_t vocab_size = model_->info().vocab_size;
    QUIRE_RETURN_IF_ERROR(CheckTokens("Engine::Submit: prompt", prompt, vocab_size));
    QUIRE_RETURN_IF_ERROR(CheckSamplingOptions(options, vocab_size));
    QUIRE_RETURN_IF_ERROR(CheckCanSpeculate(options.speculation));
    return CheckFits(static_cast<int64_t>(prompt.size()), options);
  });
}

Result<int64_t> EngineImpl::Submit(std::span<const int32_t> prompt,
                                   const SamplingOptions& options) {
  return Enter("Submit", [&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckSubmit(prompt, options));
    if (static_cast<int64_t>(waiting_.size()) >= options_.max_waiting) {
      return Status(StatusCode::kFull, "Engine::Submit: " + std::to_string(waiting_.size()) +
                                           " requests wait (EngineOptions::max_waiting); "
                                           "step the engine and submit again");
    }
    auto request = std::make_unique<Request>(next_request_id_, prompt, options);
    request->speculation = options.speculation.value_or(options_.speculation);
    request->submitted_ns = clock_->SteadyNs();
    // Settled before the first token is computed, because stored keys cannot be turned again. So
    // which factors positions use depends on the request alone.
    request->space = {
        .salt = options.cache_salt,
        .long_rope = NeedsLongRope(model_->info(), SpanMax(request->prompt_tokens, options))};
    Prefetch(request.get());
    Queue(std::move(request));
    return next_request_id_++;
  });
}

// Requests come in by turns of their salts, those of one salt in their order: each has the turn
// after the last one of its salt, and of those in work. So a salt with many requests that wait
// holds up another one by one request, and a request that waits is overtaken by one of each other
// salt at most in a turn.
void EngineImpl::Queue(std::unique_ptr<Request> request) {
  if (last_turns_.size() > 2 * waiting_.size() + 64) {
    std::erase_if(last_turns_, [this](const auto& entry) { return entry.second <= turn_; });
  }
  int64_t& last = last_turns_.try_emplace(request->space.salt, 0).first->second;
  const int64_t turn = std::max(last, turn_) + 1;
  request->turn = turn;
  auto place = waiting_.end();
  while (place != waiting_.begin() && (*std::prev(place))->turn > turn) --place;
  waiting_.insert(place, std::move(request));
  last = turn;
}

Status EngineImpl::Cancel(int64_t request_id) {
  return Enter("Cancel", [&]() -> Status {
    Request* const request = FindRequest(request_id);
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
    QUIRE_RETURN_IF_ERROR(RunStep());
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
    if (store_ != nullptr) {
      return Status(StatusCode::kBadState,
                    "Engine::AttachStore: a store is attached; an engine has one for its life");
    }
    const bool long_rope = HasLongSet(model_->info().rope.scaling);
    QUIRE_ASSIGN_OR_RETURN(
        store_, StoreLink::Create(std::move(store), states(), !state_.forks_anywhere(), identity,
                                  options, long_rope));
    prefix_cache_.before_eviction = [this](const PrefixCache::Retained& retained) {
      StoreRetained(retained);
    };
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
    if (store_ == nullptr) return {};
    return StoreAll(store_->now_ns() + timeout_ms * 1'000'000);
  });
}

void EngineImpl::CheckInvariants() const {
  prefix_cache_.CheckInvariants();
  int64_t sequences = prefix_cache_.sequence_count();
  int64_t samples = 0;
  int64_t drafts = 0;
  for (const auto& request : running_) {
    for (const Sample& sample : request->samples) {
      QUIRE_CHECK(sample.finished() ? !sample.has_sequence() : sample.pending() >= 1);
      samples += sample.finished() ? 0 : 1;
      drafts += sample.draft_state == kNoDraftState ? 0 : 1;
      QUIRE_CHECK(sample.draft_state == kNoDraftState || sample.has_sequence());
      if (!sample.has_sequence()) continue;
      ++sequences;
      const Result<int64_t> length = state_.GetSequenceLength(sample.sequence_id);
      QUIRE_CHECK(length.ok()) << length.status().ToString();
      QUIRE_CHECK(*length == sample.computed) << "sequence " << sample.sequence_id;
    }
  }
  QUIRE_CHECK(samples <= options_.max_num_sequences);
  QUIRE_CHECK(state_.sequence_count() == sequences) << "a sequence that nobody holds";
  for (const auto& request : waiting_) {
    for (const Sample& sample : request->samples) {
      QUIRE_CHECK(!sample.has_sequence());
      QUIRE_CHECK(sample.draft_state == kNoDraftState);
    }
    QUIRE_CHECK(request->load == nullptr || store_ != nullptr);
    QUIRE_CHECK(request->layers == nullptr) << "request " << request->id << " waits with layers";
  }
  for (const auto& request : running_) {
    QUIRE_CHECK(request->load == nullptr) << "request " << request->id << " loads while it runs";
  }
  const Status status = state_.CheckInvariants();
  QUIRE_CHECK(status.ok()) << status.ToString();
  int64_t held = ngram_drafter_.state_count();
  if (model_drafter_ != nullptr) {
    model_drafter_->CheckInvariants();
    held += model_drafter_->state_count();
  }
  QUIRE_CHECK(held == drafts) << "a draft of a sample that is gone";
}

}  // namespace quire
