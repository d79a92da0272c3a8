#include "engine/traffic/store_traffic.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

// Limit of the exports after a step: 40 ms at the 1.7 GB/s that exporting and sealing do on one old
// core.
constexpr int64_t kStoreBytesPerStep = int64_t{64} << 20;

// A step that waits for a store and nothing else returns after this, so that others get in.
constexpr int64_t kWaitNs = 50 * int64_t{1'000'000};

// A request whose prefix was given up while the store brought what lies behind it is looked up
// again, at most this number of times; then it computes.
constexpr int64_t kLookupsMax = 2;

// The time of fewer tokens is that of reading the weights.
constexpr int64_t kSpeedTokensMin = 16;
// Weight of the newest step in the mean: the speed of the last ten or so.
constexpr double kSpeedWeight = 0.2;

// Takes a newer value into the mean.
void Mean(double now, double* mean) {
  *mean = *mean == 0 ? now : *mean + kSpeedWeight * (now - *mean);
}

// Whether the store is bringing what cannot be used yet.
bool IsComing(const Request& request) { return request.load != nullptr && !request.load->usable(); }

MissReason ReasonOf(StatusCode code) {
  if (code == StatusCode::kCorrupt) return MissReason::kCorrupt;
  if (code == StatusCode::kIncompatible) return MissReason::kIncompatible;
  if (code == StatusCode::kNotFound) return MissReason::kExpired;
  if (code == StatusCode::kTimeout) return MissReason::kTimeout;
  if (code == StatusCode::kCancelled) return MissReason::kCancelled;
  const bool no_room = code == StatusCode::kFull || code == StatusCode::kOutOfPages ||
                       code == StatusCode::kOutOfMemory;
  return no_room ? MissReason::kNoRoom : MissReason::kUnavailable;
}

}  // namespace

int64_t CachedTokens::total() const {
  int64_t sum = memory;
  for (const int64_t tokens : tiers) sum += tokens;
  return sum;
}

StoreTraffic::StoreTraffic(const Parts& parts)
    : model_(*parts.model),
      state_(parts.state),
      prefix_cache_(*parts.prefix_cache),
      requests_(*parts.requests),
      finder_(*parts.finder),
      sequences_(*parts.sequences),
      clock_(*parts.clock),
      prefill_chunk_(parts.prefill_chunk) {}

void StoreTraffic::Attach(std::unique_ptr<StoreLink> link) {
  QUIRE_CHECK(link_ == nullptr);
  link_ = std::move(link);
  prefix_cache_.before_eviction = [this](const PrefixCache::Retained& retained) {
    StoreRetained(retained);
  };
}

int64_t StoreTraffic::NextStop(int64_t length, int64_t prompt_tokens) const {
  return link_ == nullptr ? kNoLimit : link_->NextStop(length, prompt_tokens);
}

void StoreTraffic::Publish(EngineStats* stats) const noexcept {
  const auto is_loading = [](const auto& request) {
    return request->load != nullptr && !request->load->ended();
  };
  stats->loading =
      std::count_if(requests_.waiting().begin(), requests_.waiting().end(), is_loading);
  stats->loads = loads_;
  stats->loaded_tokens = loaded_tokens_;
  stats->misses = misses_;
  stats->load_seconds = load_seconds_;
  stats->layer_loads = layer_loads_;
  stats->overlap_seconds = overlap_seconds_;
  stats->prompt_tokens = prompt_tokens_;
  stats->cached_tokens = cached_tokens_;
  stats->recomputed_tokens = recomputed_tokens_;
  stats->compute_seconds_per_token = compute_seconds_per_token_;
  if (link_ == nullptr) return;
  stats->stored_chunks = link_->put_counts().chunks;
  stats->stored_bytes = link_->put_counts().bytes;
  stats->refused_chunks = link_->put_counts().refused;
}

void StoreTraffic::MeasureSpeed(int64_t tokens, int64_t ns) noexcept {
  if (tokens < kSpeedTokensMin) return;
  Mean(static_cast<double>(ns) * 1e-9 / static_cast<double>(tokens), &compute_seconds_per_token_);
}

// ---- Loading

StoreTraffic::Start StoreTraffic::FindStart(const Request& request) const {
  const Sample& leader = *request.leader();
  const PrefixMatch match = finder_.Find(request, leader);
  Start start{.from = match, .end = match.length};
  const PrefixLoad* const load = request.load.get();
  if (load == nullptr || load->begin() > match.length) return start;
  if (match.approximate_from < match.length) return start;  // chunks go on behind exact tokens
  const int64_t common = CommonPrefix(leader.tokens, load->tokens());
  int64_t end = 0;
  for (const PrefixLoad::Chunk& chunk : load->chunks()) {
    if (chunk.end <= common) end = chunk.end;
  }
  if (end <= match.length) return start;
  PrefixMatch border = finder_.Find(request, leader, link_->chunk_tokens());
  if (load->begin() > border.length) return start;
  border.known = match.known;
  return {.from = border, .end = end};
}

// A prompt is asked for up to three times, and hashed once. Its samples have other answers.
Result<std::span<const ChunkKey>> StoreTraffic::KeysOf(Request* request, int64_t size,
                                                       bool tail) const {
  if (request->prompt_keys.empty() || request->answer_begun()) {
    const std::span<const int32_t> tokens = request->leader()->tokens;
    QUIRE_ASSIGN_OR_RETURN(
        request->prompt_keys,
        link_->KeysOf(request->space, tokens.first(static_cast<size_t>(size)), tail));
  }
  return std::span<const ChunkKey>(request->prompt_keys);
}

int64_t StoreTraffic::KnownTokens(Request* request) const {
  if (link_ == nullptr || request->has_window()) return 0;
  const int64_t size = LoadableTokens(*request->leader());
  const auto keys = KeysOf(request, size, /*tail=*/true);
  return keys.ok() ? std::min(size, link_->Known(request->space, *keys)) : 0;
}

// `request` is about to wait. If others are ahead of it, the store brings its chunks into RAM in
// the meantime, so that its load waits for no disk and no network.
void StoreTraffic::Prefetch(Request* request) const {
  const bool is_next = requests_.running().empty() && requests_.waiting().empty();
  if (link_ == nullptr || is_next || request->has_window()) return;
  const auto has_prefetch = [](const auto& other) { return other->prefetch != nullptr; };
  if (std::ranges::count_if(requests_.waiting(), has_prefetch) >= kPrefetchesMax) return;
  const Sample& leader = *request->leader();
  const PrefixMatch match = finder_.Find(*request, leader);
  if (finder_.IsBeingComputed(*request, leader, match.length)) return;
  const int64_t size = LoadableTokens(leader);
  if (!link_->HasMore(size, match.length, /*tail=*/true)) return;
  const PrefixMatch border = finder_.Find(*request, leader, link_->chunk_tokens());
  const auto keys = KeysOf(request, size, /*tail=*/true);
  if (!keys.ok()) return;
  request->prefetch =
      link_->Prefetch({.space = &request->space,
                       .tokens = std::span(leader.tokens).first(static_cast<size_t>(size)),
                       .held = border.length,
                       .tail = true,
                       .keys = *keys},
                      compute_seconds_per_token_);
}

void StoreTraffic::StartLoads() {
  if (link_ == nullptr) return;
  PollLoads(loading_count());
  std::vector<Lookup> lookups;
  for (size_t i = 0; i < loading_count(); ++i) {
    Request* const request = requests_.waiting()[i].get();
    if (IsComing(*request)) TakeLayers(request, LayersThere(*request), false);
    // Documents of one prompt are asked for in one call, as long as none waits for what another one
    // brings: their anchor is shorter than a chunk.
    const bool comes_with_others =
        request->learns_for != Request::kNobody &&
        request->document_begin < std::min(link_->chunk_tokens(), request->prompt_tokens);
    const bool joins = comes_with_others && !lookups.empty() &&
                       lookups.front().request->learns_for == request->learns_for;
    if (!joins) BeginLoads(&lookups);
    request->held_back = PlanLoad(request, &lookups);
    if (!comes_with_others) BeginLoads(&lookups);
  }
  BeginLoads(&lookups);
}

// What the store is to be asked for, unless it was asked. True if the request is to be held back.
bool StoreTraffic::PlanLoad(Request* request, std::vector<Lookup>* lookups) const {
  if (request->has_window()) return false;
  const bool has_load = request->load != nullptr;
  if (has_load && !request->load->usable()) return true;
  if (!has_load && request->looked_up) return false;
  const Sample& leader = *request->leader();
  const PrefixMatch match = finder_.Find(*request, leader);
  if (match.approximate_from < match.length) return false;
  const PrefixMatch border = finder_.Find(*request, leader, link_->chunk_tokens());
  if (has_load && request->load->begin() > border.length) {
    request->load = nullptr;
    request->looked_up = request->lookups >= kLookupsMax;
  }
  if (request->looked_up) return false;
  if (IsPrefixBeingLoaded(*request, match.length)) return true;
  if (finder_.IsBeingComputed(*request, leader, match.length)) return false;
  const bool tail = !request->answer_begun();
  const int64_t size = LoadableTokens(leader);
  if (!link_->HasMore(size, match.length, tail)) return false;
  lookups->push_back({.request = request, .border = border, .size = size, .tail = tail});
  return true;
}

Result<std::vector<std::unique_ptr<PrefixLoad>>> StoreTraffic::LoadsOf(
    std::span<const Lookup> lookups) {
  std::vector<StoreLink::Wish> wishes;
  for (const Lookup& lookup : lookups) {
    const std::span<const int32_t> tokens = lookup.request->leader()->tokens;
    QUIRE_ASSIGN_OR_RETURN(const std::span<const ChunkKey> keys,
                           KeysOf(lookup.request, lookup.size, lookup.tail));
    wishes.push_back({.space = &lookup.request->space,
                      .tokens = tokens.first(static_cast<size_t>(lookup.size)),
                      .held = lookup.border.length,
                      .tail = lookup.tail,
                      .keys = keys});
  }
  return link_->StartLoads(wishes, compute_seconds_per_token_);
}

// In one call; there is none left then.
void StoreTraffic::BeginLoads(std::vector<Lookup>* lookups) {
  if (lookups->empty()) return;
  auto loads = LoadsOf(*lookups);
  for (size_t i = 0; i < lookups->size(); ++i) {
    Request* const request = (*lookups)[i].request;
    request->looked_up = true;
    if (request->asked_ns == Request::kNotYet) request->asked_ns = clock_.SteadyNs();
    ++request->lookups;
    QUIRE_CHECK(request->lookups <= kLookupsMax) << "request " << request->id;
    request->prefetch = nullptr;  // the load shares what it reads
    if (!loads.ok()) {
      request->miss = ReasonOf(loads.status().code());
      ++misses_[static_cast<size_t>(request->miss)];
      request->held_back = false;
      continue;
    }
    prefix_cache_.Touch((*lookups)[i].border.sequence_id);
    request->load = std::move((*loads)[i]);
  }
  lookups->clear();
}

// The tokens of which chunks are of use. Where a sequence cannot be cut anywhere, its last token is
// none of them: it is computed, for the logits behind it.
int64_t StoreTraffic::LoadableTokens(const Sample& leader) const {
  return link_->PromptEnd(static_cast<int64_t>(leader.tokens.size()));
}

// Whether the store is bringing more of this one's beginning for a request that comes in before it.
bool StoreTraffic::IsPrefixBeingLoaded(const Request& request, int64_t matched) const {
  const std::vector<int32_t>& tokens = request.leader()->tokens;
  for (const auto& other : requests_.waiting()) {
    if (other.get() == &request) return false;
    if (other->load == nullptr || !other->space.shares_exact(request.space)) continue;
    const PrefixLoad& load = *other->load;
    int64_t common = CommonPrefix(tokens, load.tokens());
    if (load.usable()) common = std::min(common, load.end());
    // Documents behind one anchor come at once: each has chunks of its own behind the common ones,
    // and so has their prompt.
    const bool has_documents = request.learns_for != Request::kNobody || request.blend != nullptr;
    if (has_documents) common -= common % link_->chunk_tokens();
    if (common - matched >= kLoadTokensMin) return true;
  }
  return false;
}

void StoreTraffic::PollLoads(size_t count) {
  for (size_t i = 0; i < count; ++i) PollLoad(requests_.waiting()[i].get());
}

void StoreTraffic::PollLoad(Request* request) {
  if (request->load == nullptr || request->load->ended()) return;
  request->load->Poll(link_->now_ns());
  if (!request->load->ended()) return;
  CountLoad(request, request->load->miss(), request->load->seconds());
}

// ---- Layer by layer

// Layers come in the order of a chunk: attention layers, then the states of recurrent ones.
int64_t StoreTraffic::ChunkLayerCount() const {
  return std::ssize(model_.info().layers) + std::ssize(model_.info().recurrent_layers);
}

// Without which a forward would wait at its begin. Hybrid models begin with a recurrent layer.
int64_t StoreTraffic::FirstLayerNeeded() const {
  return model_.info().recurrent_layers.empty() ? 0 : std::ssize(model_.info().layers);
}

// The layers of the request's load that are there so far.
int64_t StoreTraffic::LayersThere(const Request& request) const {
  return request.load->LayersThere(ChunkLayerCount(), link_->now_ns());
}

// Whether a forward that begins now finds each layer of the load when it comes to it, as the pace
// of the layers so far, of which `there` are there, and the measured speed of prompts tell. One
// that waited inside would hold up everybody. `alone`: it holds up only requests that come
// meanwhile, so it may begin while the speed is not known, and wait as long as it computes: layers
// come several at a time, and what is computed between two of these times is done earlier.
bool StoreTraffic::KeepsPace(const Request& request, int64_t there, bool alone) const {
  // Loaded layers are in no forward's rows, so they would not be sent.
  if (request.job != nullptr) return false;
  if (there <= FirstLayerNeeded()) return false;
  const PrefixLoad& load = *request.load;
  const int64_t behind = static_cast<int64_t>(request.leader()->tokens.size()) - load.found_end();
  return IsInTime(load, there, std::clamp(behind, int64_t{1}, prefill_chunk_), alone);
}

// Whether the layers behind the first `there` come while `tokens` tokens are computed and those of
// the load are copied, which is most of a forward with few tokens.
bool StoreTraffic::IsInTime(const PrefixLoad& load, int64_t there, int64_t tokens,
                            bool alone) const {
  const int64_t count = ChunkLayerCount();
  const double speed = compute_seconds_per_token_;
  if (speed == 0) return alone || there == count;
  const auto loaded = static_cast<double>(load.found_end() - load.begin());
  const double forward = speed * static_cast<double>(tokens) + import_seconds_per_token_ * loaded;
  const double elapsed = static_cast<double>(link_->now_ns() - load.start_ns()) * 1e-9;
  const double rest = elapsed * static_cast<double>(count - there) / static_cast<double>(there);
  return rest <= (alone ? 2 * forward : forward);
}

// The prompt that may be computed while the document comes that the request learns for it; null if
// there is none, or it waits too far behind.
Request* StoreTraffic::PromptOf(const Request& learner) const {
  if (learner.learns_for == Request::kNobody || learner.is_idle) return nullptr;
  if (learner.comes_whole) return nullptr;
  const auto& waiting = requests_.waiting();
  const auto end = waiting.begin() + static_cast<ptrdiff_t>(loading_count());
  const auto prompt = std::find_if(
      waiting.begin(), end, [&](const auto& request) { return request->id == learner.learns_for; });
  return prompt == end ? nullptr : prompt->get();
}

// The same for all documents that are learnt for the prompt, and its first piece: it begins with a
// piece, all that is still to be learnt is on its way in whole, and the layers are there in which
// rows are selected. The piece has more rows up to there, so later layers have more time than this
// takes for granted.
bool StoreTraffic::DocumentsKeepPace(const Request& prompt, bool alone) const {
  BlendPlan::Found piece;
  if (IsComing(prompt) || !prompt.blend->FindPiece(FindStart(prompt).end, &piece)) return false;
  const int64_t selecting = prompt.blend->options().check_layers.back() + 1;
  return std::ranges::all_of(prompt.learners, [&](int64_t id) {
    const Request* const learner = requests_.Find(id);
    if (learner == nullptr) return true;
    if (learner->comes_whole || !IsComing(*learner)) return false;
    const PrefixLoad& load = *learner->load;
    const int64_t there = LayersThere(*learner);
    const bool is_whole =
        load.begin() <= learner->document_begin && load.found_end() == learner->prompt_tokens;
    return is_whole && there >= selecting && IsInTime(load, there, piece.cost, alone);
  });
}

// Makes the request's load usable if forwards find its layers in time, of which `there` are there;
// with it those of the other documents of its prompt.
bool StoreTraffic::TakeLayers(Request* request, int64_t there, bool alone) {
  QUIRE_CHECK(IsComing(*request));
  Request* const prompt = PromptOf(*request);
  if (prompt == nullptr) {
    const bool takes = KeepsPace(*request, there, alone);
    if (takes) request->load->TakeLayers();
    return takes;
  }
  // What the prompt loads itself is its beginning.
  if (IsComing(*prompt)) TakeLayers(prompt, LayersThere(*prompt), alone);
  if (!DocumentsKeepPace(*prompt, alone)) return false;
  for (const int64_t id : prompt->learners) {
    if (Request* const learner = requests_.Find(id)) learner->load->TakeLayers();
  }
  return true;
}

// Waits for the first load, if there is one. True if it is usable: there is something to decide.
bool StoreTraffic::AwaitLoad() {
  const auto loads = [](const auto& request) { return IsComing(*request); };
  const auto first = std::find_if(requests_.waiting().begin(), requests_.waiting().end(), loads);
  if (first == requests_.waiting().end()) return false;
  Request* const request = first->get();
  const auto place = static_cast<size_t>(first - requests_.waiting().begin());
  const int64_t until_ns = link_->now_ns() + kWaitNs;
  for (;;) {
    PollLoads(std::max(loading_count(), place + 1));  // its prompt's, too
    if (request->load->ended()) break;
    // Looked at once: a layer that comes between deciding and waiting ends the wait.
    const int64_t there = LayersThere(*request);
    if (TakeLayers(request, there, true)) break;
    if (link_->now_ns() >= until_ns) return false;
    request->load->AwaitLayer(std::max(there, FirstLayerNeeded()), until_ns);
  }
  // Others that came as far share its forward.
  for (const auto& other : requests_.waiting()) {
    if (loads(other)) TakeLayers(other.get(), LayersThere(*other), true);
  }
  return true;
}

// A load that has not ended is taken by the request's first forward, a layer at a time. Null if it
// has, or brings nothing. The prompt's last token is computed, for the logits behind it.
std::unique_ptr<LayerwiseLoad> StoreTraffic::MakeLayerwise(Request* request, const Start& start) {
  if (request->load == nullptr || request->load->ended()) return nullptr;
  const int64_t size = static_cast<int64_t>(request->leader()->tokens.size());
  const int64_t end = std::min(start.end, size - 1);
  if (end <= start.from.length) return nullptr;
  return std::make_unique<LayerwiseLoad>(link_.get(), request->space, std::move(request->load),
                                         start.from.length, end);
}

// What the sample's next forward loads, if it does. It was asked for by the leader of that time:
// one that leads since can take it if it goes on from there with the same tokens, and has more.
LayerwiseLoad* StoreTraffic::LayersOf(const Request& request, const Sample& sample) {
  LayerwiseLoad* const layers = request.layers.get();
  if (layers == nullptr || &sample != request.leader()) return nullptr;
  const bool goes_on = sample.computed == layers->begin() &&
                       std::ssize(sample.tokens) > layers->end() &&
                       CommonPrefix(sample.tokens, layers->load().tokens()) >= layers->end();
  return goes_on ? layers : nullptr;
}

void StoreTraffic::CountLoad(Request* request, MissReason miss, double seconds) noexcept {
  request->miss = miss;
  request->load_seconds += seconds;
  ++loads_;
  ++misses_[static_cast<size_t>(miss)];
  load_seconds_ += seconds;
}

void StoreTraffic::CountLoaded(Request* request, TierKind tier, int64_t tokens) noexcept {
  const auto at = static_cast<size_t>(tier);
  loaded_tokens_[at] += tokens;
  if (!request->counts_cached) return;
  request->cached.tiers[at] += tokens;
  if (request->admitted_before) cached_tokens_ += tokens;
}

void StoreTraffic::CommitLayers(Request* request, Sample* sample) noexcept {
  LayerwiseLoad& layers = *request->layers;
  QUIRE_CHECK(sample->computed == layers.begin()) << "layers were taken at another position";
  QUIRE_CHECK(layers.failure() == StatusCode::kOk) << "a forward ended without one of its layers";
  CountLoad(request, layers.load().miss(),
            static_cast<double>(layers.last_ns() - layers.load().start_ns()) * 1e-9);
  ++layer_loads_;
  overlap_seconds_ += static_cast<double>(layers.overlap_ns()) * 1e-9;
  for (const PrefixLoad::Chunk& chunk : layers.load().chunks()) {
    CountLoaded(request, chunk.tier, layers.TokensOf(chunk));
  }
  sample->computed = layers.end();
  request->layers = nullptr;
}

bool StoreTraffic::DropFailedLayers(Request* request) noexcept {
  if (request->layers == nullptr || request->layers->failure() == StatusCode::kOk) return false;
  const auto layers = std::exchange(request->layers, nullptr);
  PrefixLoad& load = layers->load();
  const MissReason why = ReasonOf(layers->failure());
  load.End(link_->now_ns());
  CountLoad(request, why, load.seconds());
  // What fails here is a part of the miss that was counted.
  static_cast<void>(TakeChunks(request, load, load.end()));
  return true;
}

// ---- Whole chunks

// Behind what was forked. A chunk that cannot be taken is as good as one that is not there.
void StoreTraffic::ImportChunks(Request* request, const Start& start) noexcept {
  request->counts_cached = !request->admitted_before;
  if (request->counts_cached) request->cached.memory = request->leader()->computed;
  const bool is_there = request->load != nullptr && request->load->ended();
  if (!is_there || start.end == start.from.length) return;
  const Status status = TakeChunks(request, *request->load, start.end);
  if (status.ok()) return;
  request->miss = ReasonOf(status.code());
  ++misses_[static_cast<size_t>(request->miss)];
}

// The load's chunks up to `end` behind the leader's tokens, as far as they can be taken; why it
// ends before.
Status StoreTraffic::TakeChunks(Request* request, const PrefixLoad& load, int64_t end) noexcept {
  Sample& leader = *request->leader();
  const int64_t size = static_cast<int64_t>(leader.tokens.size());
  std::span<const PrefixLoad::Chunk> rest = load.chunks();
  while (!rest.empty() && rest.front().begin < leader.computed) rest = rest.subspan(1);
  while (!rest.empty() && rest.back().end > end) rest = rest.first(rest.size() - 1);
  Status status;
  // Where a sequence can end anywhere, each chunk is taken for itself. Else all are taken at once,
  // or all but the last ones: what stands behind the last one that is sound is computed.
  size_t count = state_.forks_anywhere() ? 1 : rest.size();
  while (!rest.empty() && count > 0) {
    const auto taken = rest.first(count);
    const int64_t start_ns = clock_.SteadyNs();
    const Status imported = link_->Import(leader.sequence_id, request->space, load.tokens(), taken);
    const auto seconds = static_cast<double>(clock_.SteadyNs() - start_ns) * 1e-9;
    if (status.ok()) status = imported;
    if (!imported.ok()) {
      --count;
      continue;
    }
    for (const PrefixLoad::Chunk& chunk : taken) {
      // The last token is computed, for the logits behind it.
      CountLoaded(request, chunk.tier, std::min(chunk.end, size - 1) - chunk.begin);
    }
    QUIRE_CHECK(taken.back().end > leader.computed);
    const auto tokens = static_cast<double>(taken.back().end - leader.computed);
    Mean(seconds / tokens, &import_seconds_per_token_);
    leader.computed = taken.back().end;
    rest = rest.subspan(count);
    if (!state_.forks_anywhere()) break;
  }
  if (leader.pending() > 0) return status;
  if (state_.kv().PopN(leader.sequence_id, 1).ok()) {
    --leader.computed;
    return status;
  }
  if (request->counts_cached) {
    if (request->admitted_before) cached_tokens_ -= request->cached.total();
    request->cached = {};
  }
  sequences_.RemoveAll(request);  // the allocator refused; removing needs no memory
  return status;
}

// The end of its waiting. `known`: its first tokens that were in memory, whether or not a sequence
// could be forked behind them.
void StoreTraffic::NoteStart(Request* request, int64_t known) noexcept {
  if (!request->admitted_before) {
    const int64_t on_their_way = request->layers == nullptr ? 0 : request->layers->tokens();
    request->recomputed = std::max<int64_t>(0, known - request->cached.total() - on_their_way);
    recomputed_tokens_ += request->recomputed;
    prompt_tokens_ += request->prompt_tokens;
    cached_tokens_ += request->cached.total();
    request->admitted_before = true;
  }
  ForgetLoad(request);
}

void StoreTraffic::ForgetLoad(Request* request) noexcept {
  request->load = nullptr;
  request->prefetch = nullptr;
  request->looked_up = false;
  request->held_back = false;
  request->lookups = 0;
}

// ---- Storing

void StoreTraffic::StoreComputed() noexcept {
  if (link_ == nullptr) return;
  // What cannot be had later is put now.
  int64_t bytes_left = state_.forks_anywhere() ? kStoreBytesPerStep : kNoLimit;
  for (const auto& request : requests_.running()) {
    for (Sample& sample : request->samples) {
      if (!sample.has_sequence() || bytes_left <= 0) continue;
      bytes_left -= StoreSample(*request, &sample, sample.computed, bytes_left);
    }
  }
}

// Chunks are functions of their tokens: those of a forward that is given up are as good. (States of
// recurrent layers are there when it has ended.)
void StoreTraffic::StoreSeen(const Request& request, Sample* sample, int64_t computed) noexcept {
  if (link_ == nullptr || !state_.has_windows() || state_.is_recurrent()) return;
  StoreSample(request, sample, computed, kNoLimit);
}

void StoreTraffic::StoreWhole(const Request& request, Sample* sample) noexcept {
  StoreSample(request, sample, sample->computed, kNoLimit);
}

// `computed`: tokens that its sequence holds.
int64_t StoreTraffic::StoreSample(const Request& request, Sample* sample, int64_t computed,
                                  int64_t bytes_max) noexcept {
  if (link_ == nullptr || request.has_window()) return 0;
  // A chunk is what any request would compute.
  QUIRE_CHECK(sample->has_sequence());
  computed = std::min(computed, sample->approximate_from);
  const auto put = [&](int64_t length, bool tail, int64_t most) {
    const auto tokens = std::span<const int32_t>(sample->tokens).first(static_cast<size_t>(length));
    return link_->Export(sample->sequence_id, request.space, tokens, tail, most,
                         compute_seconds_per_token_, &sample->stored);
  };
  int64_t prompt_end = link_->PromptEnd(request.prompt_tokens);
  // The beginning of other prompts: anchor and document.
  if (sample->approximate_from < prompt_end) {
    const int64_t own_end = request.blend->own_end();
    prompt_end = own_end > 0 ? link_->PromptEnd(own_end) : request.blend->begin();
  }
  const bool has_prompt = computed >= prompt_end;
  const int64_t bytes = has_prompt ? put(prompt_end, true, bytes_max) : 0;
  if (bytes >= bytes_max) return bytes;
  return bytes + put(computed, false, bytes_max - bytes);
}

void StoreTraffic::StoreRetained(const PrefixCache::Retained& retained) noexcept {
  const int64_t length = static_cast<int64_t>(retained.tokens.size());
  if (!retained.space.is_exact()) return;
  if (length - retained.stored < link_->chunk_tokens()) return;
  StoredPrefix stored;  // the keys begin at the first token; what is there is not wanted
  link_->Export(retained.sequence_id, retained.space, retained.tokens, false, kNoLimit,
                compute_seconds_per_token_, &stored);
  retained.stored = stored.tokens;
}

// What the store refused before is offered again, twice: the second time its queue is empty.
Status StoreTraffic::StoreAll(int64_t timeout_ns) {
  if (link_ == nullptr) return {};
  const int64_t until_ns = link_->now_ns() + timeout_ns;
  for (const bool is_last : {false, true}) {
    const int64_t refused = link_->put_counts().refused;
    for (const auto& request : requests_.running()) {
      for (Sample& sample : request->samples) {
        if (!sample.has_sequence()) continue;
        sample.stored = {};
        StoreSample(*request, &sample, sample.computed, kNoLimit);
      }
    }
    prefix_cache_.ForEach([this](const PrefixCache::Retained& retained) {
      retained.stored = 0;
      StoreRetained(retained);
    });
    const Status status = link_->store().Flush(until_ns);
    if (!status.ok() || is_last || link_->put_counts().refused == refused) return status;
  }
  return {};
}

}  // namespace quire
