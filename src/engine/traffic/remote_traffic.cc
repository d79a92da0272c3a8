#include "engine/traffic/remote_traffic.h"

#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "engine/loading/store_link.h"
#include "engine/remote/fnv_hash.h"
#include "quire/kv_export.h"

namespace quire {
namespace {

// A step that waits for peers and nothing else returns after this, so that others get in.
constexpr int64_t kAwaitNs = 5 * kNsPerMs;
// How long is waited for one of several prompts before the others are looked at.
constexpr int64_t kAwaitEachNs = kNsPerMs;

// The beginning of a prompt says which peer has seen it: a system prompt or a document is longer.
constexpr size_t kKeyTokens = 256;

uint64_t KeyOf(const PrefixSpace& space, std::span<const int32_t> tokens) {
  FnvHash hash;
  hash.Add(space.salt);
  for (const int32_t token : tokens.first(std::min(tokens.size(), kKeyTokens)))
    hash.Add(uint64_t{static_cast<uint32_t>(token)});
  return hash.value();
}

}  // namespace

RemoteTraffic::RemoteTraffic(const Parts& parts)
    : state_(parts.state),
      requests_(*parts.requests),
      finder_(*parts.finder),
      clock_(*parts.clock),
      bytes_per_token_(parts.bytes_per_token),
      staging_bytes_(parts.staging_bytes > 0 ? parts.staging_bytes : StagingUse::kLimitDefault) {}

Status RemoteTraffic::Attach(const SequenceStates& states, const Passport& identity,
                             const PrefillPeerOptions& options,
                             const std::shared_ptr<Clock>& clock) {
  if (peers_ != nullptr) {
    return Status(
        StatusCode::kBadState,
        "Engine::AttachPrefillPeers: peers are attached; an engine has them for its life");
  }
  QUIRE_ASSIGN_OR_RETURN(const Passport passport, CachePassport(states, identity, false));
  QUIRE_RETURN_IF_ERROR(state_.transfer()->SetStagingLimit(staging_bytes_));
  PrefillPeerOptions fitting = options;  // parts are as large as the window lets them be
  fitting.peer.window_bytes = std::min(options.peer.window_bytes, staging_bytes_);
  QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<RemotePeers> peers,
                         RemotePeers::Create(fitting, passport, state_.transfer(), clock));
  const std::lock_guard<std::mutex> lock(attach_mutex_);
  options_ = options;
  peers_ = std::move(peers);
  return {};
}

std::vector<PrefillPeerInfo> RemoteTraffic::Infos() const {
  const std::lock_guard<std::mutex> lock(attach_mutex_);
  return peers_ == nullptr ? std::vector<PrefillPeerInfo>() : peers_->Infos();
}

Status RemoteTraffic::CheckPeer(const std::string& address) const {
  if (address.empty()) return {};
  const std::lock_guard<std::mutex> lock(attach_mutex_);
  const bool is_known = peers_ != nullptr && std::ranges::count(options_.addresses, address) > 0;
  if (is_known) return {};
  return Status(StatusCode::kBadArgument,
                "SamplingOptions::prefill_peer is '" + address +
                    "', which is no address of an attached peer (PrefillPeerOptions::addresses)",
                {"prefill_peer", RefusalReason::kUnknownPeer});
}

Status RemoteTraffic::CheckNotOwn(const std::string& listen) const {
  const auto is_own = [&](const std::string& address) { return IsSameAddress(address, listen); };
  if (peers_ == nullptr || std::ranges::none_of(options_.addresses, is_own)) return {};
  return Status(StatusCode::kBadArgument,
                "Engine::ServePrefill: " + listen +
                    " is among the engine's own peers (PrefillPeerOptions::addresses), and an "
                    "engine does not ask itself; serve elsewhere, or leave that peer out");
}

size_t RemoteTraffic::admissible(size_t others) const {
  return peers_ == nullptr ? others : std::max(others, static_cast<size_t>(kLoadsMax));
}

int64_t RemoteTraffic::receiving() const {
  return std::ranges::count_if(requests_.running(),
                               [](const auto& request) { return request->remote != nullptr; });
}

int64_t RemoteTraffic::TokensToCome(const Request& request, const Sample& sample) {
  const bool is_its = request.remote != nullptr && sample.has_sequence() &&
                      request.remote->sequence_id() == sample.sequence_id;
  return is_its ? request.remote->count() : 0;
}

void RemoteTraffic::GiveUp(Request* request, const Sample& sample) noexcept {
  if (TokensToCome(*request, sample) > 0) request->remote = nullptr;
}

// ---- Requests that wait

void RemoteTraffic::HoldBack(bool keeps) const {
  if (peers_ == nullptr) return;
  const bool any = receiving() > 0;
  const size_t count = std::min(requests_.waiting().size(), admissible(1));
  for (size_t i = 0; i < count; ++i) {
    Request* const request = requests_.waiting()[i].get();
    if (!keeps) request->held_back = false;
    if (any && !request->held_back) request->held_back = IsPrefixComing(*request);
  }
}

bool RemoteTraffic::IsPrefixComing(const Request& request) const {
  if (!finder_.ForksAnywhere(request)) return false;
  const std::vector<int32_t>& tokens = request.leader()->tokens;
  int64_t matched = -1;
  for (const auto& other : requests_.running()) {
    if (other->remote == nullptr || other->space != request.space) continue;
    const int64_t end = other->remote->first() + other->remote->count();
    const int64_t common = std::min(CommonPrefix(tokens, other->leader()->tokens), end);
    if (matched < 0) matched = finder_.Find(request, *request.leader()).length;
    if (common - matched >= kLoadTokensMin) return true;
  }
  return false;
}

bool RemoteTraffic::Start(Request* request, double here_seconds_per_token) {
  if (peers_ == nullptr || request->layers != nullptr || !request->has_outputs()) return true;
  if (request->blend != nullptr || !request->leader()->has_sequence()) return true;
  const int64_t count = request->leader()->pending() - 1;  // the last one is computed here
  const bool is_told =
      options_.when == RemotePrefill::kAlways || !request->options.prefill_peer.empty();
  const int64_t least = is_told ? 1 : kLoadTokensMin;
  if (count < least) return true;
  const std::optional<RemotePeers::Chosen> chosen =
      peers_->Choose(AskFor(*request, count, here_seconds_per_token), options_.when);
  if (!chosen) return true;
  std::erase_if(asked_, [&](const Asked& asked) {
    const Request* const other = requests_.Find(asked.request_id);
    return other == nullptr || other->remote == nullptr;
  });
  asked_.reserve(asked_.size() + 1);
  const int64_t start_ns = clock_.SteadyNs();
  Result<std::unique_ptr<RemoteReceive>> receive = Ask(*request, *chosen, count);
  if (!receive.ok()) return NotAsked(*request, chosen->index, receive.status());
  request->predicted_here_seconds = chosen->prediction.here_seconds;
  request->predicted_remote_seconds = chosen->prediction.remote_seconds;
  request->remote = *std::move(receive);
  QUIRE_CHECK(TokensToCome(*request, *request->leader()) == count);
  asked_.push_back({.request_id = request->id,
                    .peer = chosen->index,
                    .start_ns = start_ns,
                    .busy_seconds = chosen->busy_seconds});
  return true;
}

// Here it comes behind the prompts in work.
PromptAsk RemoteTraffic::AskFor(const Request& request, int64_t count,
                                double here_seconds_per_token) const {
  int64_t ahead = 0;
  for (const auto& other : requests_.running()) {
    if (other->remote != nullptr) continue;
    for (const Sample& sample : other->samples)
      ahead += sample.finished() || !sample.has_sequence() ? 0 : sample.pending() - 1;
  }
  return {.key = KeyOf(request.space, request.leader()->tokens),
          .tokens = count,
          .bytes = count * bytes_per_token_,
          .peer = request.options.prefill_peer,
          .here_seconds = here_seconds_per_token * static_cast<double>(ahead + count),
          .here_seconds_per_token = here_seconds_per_token};
}

Result<std::unique_ptr<RemoteReceive>> RemoteTraffic::Ask(const Request& request,
                                                          const RemotePeers::Chosen& chosen,
                                                          int64_t count) const {
  const Sample& leader = *request.leader();
  TransferJob job;
  job.id = static_cast<uint64_t>(request.id) + 1;
  job.tokens.assign(leader.tokens.begin(), leader.tokens.end() - 1);
  job.salt = request.space.salt;
  job.window = request.options.window;
  job.sinks = request.options.sinks;
  job.long_rope = request.space.long_rope;
  job.deadline_ns = options_.timeout_ms * kNsPerMs;
  return RemoteReceive::Start(state_.transfer(), chosen.peer, leader.sequence_id, count, job);
}

bool RemoteTraffic::NotAsked(const Request& request, size_t peer, const Status& why) {
  if (why.code() == StatusCode::kOutOfPages) {
    // A window that slides needs fewer pages than all that is to come; and with nobody to wait for,
    // it is computed piece by piece.
    return request.has_window() || requests_.running().empty();
  }
  ++losses_;
  // A salt that the connection does not carry, or more than a message: the prompt's fault.
  const bool is_of_prompt =
      why.code() == StatusCode::kBadArgument || why.code() == StatusCode::kTooLarge;
  try {
    if (is_of_prompt) {
      peers_->NoteError(peer, why);
    } else {
      peers_->Report(peer, {.status = why});
    }
  } catch (const std::bad_alloc&) {  // the peer's figures lack this prompt
  }
  return true;
}

// ---- Requests in work

const RemoteTraffic::Asked& RemoteTraffic::AskedOf(const Request& request) const {
  const auto asked = std::ranges::find(asked_, request.id, &Asked::request_id);
  QUIRE_CHECK(asked != asked_.end()) << "request " << request.id << " receives what nobody sends";
  return *asked;
}

// Without memory nothing is known of it, which the next step changes.
RemoteTraffic::Standing RemoteTraffic::StandingOf(const Request& request) const {
  const int64_t count = request.remote->count();
  const Result<RemoteReceive::Progress> progress = request.remote->Poll();
  if (!progress.ok()) {
    return {.is_over = progress.status().code() != StatusCode::kOutOfMemory,
            .failure = progress.status()};
  }
  QUIRE_CHECK(progress->complete >= 0);
  QUIRE_CHECK(progress->complete <= count) << "a peer sent tokens that nobody asked for";
  Standing standing{.complete = progress->complete, .failure = progress->failure};
  if (standing.complete == count) standing.failure = {};
  const int64_t late_ns = clock_.SteadyNs() - AskedOf(request).start_ns;
  if (standing.complete < count && late_ns >= options_.timeout_ms * kNsPerMs) {
    standing.failure = Status(StatusCode::kTimeout,
                              std::to_string(standing.complete) + " of " + std::to_string(count) +
                                  " tokens came within " + std::to_string(options_.timeout_ms) +
                                  " ms (PrefillPeerOptions::timeout_ms)");
  }
  standing.is_over = standing.complete == count || !standing.failure.ok();
  return standing;
}

void RemoteTraffic::Poll(const RequestEnder& end) {
  std::vector<std::pair<Request*, Standing>> over;  // one that ends leaves the queue
  for (const auto& request : requests_.running()) {
    if (request->remote == nullptr) continue;
    Standing standing = StandingOf(*request);
    if (standing.is_over) over.emplace_back(request.get(), std::move(standing));
  }
  for (const auto& [request, standing] : over) {
    Finish(request, standing);
    if (standing.failure.ok() || options_.on_loss == OnPeerLoss::kRecompute) continue;
    end(request, FinishReason::kError,
        "a peer did not finish the prompt, and on_loss is fail: " + standing.failure.ToString());
  }
}

void RemoteTraffic::Finish(Request* request, const Standing& standing) noexcept {
  const Asked asked = AskedOf(*request);
  std::erase_if(asked_, [&](const Asked& other) { return other.request_id == request->id; });
  Sample& leader = *request->leader();
  QUIRE_CHECK(leader.sequence_id == request->remote->sequence_id());
  const int64_t count = request->remote->count();
  int64_t complete = standing.complete;
  Status failure = standing.failure;
  // The peer counts it as late, too.
  if (failure.code() == StatusCode::kTimeout) request->remote->TellEnd(failure);
  if (complete > 0) {
    const Status taken = request->remote->Finish(complete);
    if (!taken.ok()) {
      complete = 0;
      failure = taken;
    }
  }
  request->remote = nullptr;
  leader.computed += complete;
  QUIRE_CHECK(leader.pending() >= 1) << "the last token has to be computed";
  const int64_t bytes = complete * bytes_per_token_;
  const double seconds = static_cast<double>(clock_.SteadyNs() - asked.start_ns) * 1e-9;
  request->remote_tokens += complete;
  request->remote_seconds += seconds;
  tokens_ += complete;
  bytes_ += bytes;
  if (complete < count) {
    ++losses_;
    timeouts_ += failure.code() == StatusCode::kTimeout;
  }
  try {
    peers_->Report(asked.peer, {.status = failure,
                                .tokens = complete,
                                .bytes = bytes,
                                .seconds = seconds,
                                .busy_seconds = asked.busy_seconds});
  } catch (const std::bad_alloc&) {  // the peer's figures lack this prompt
  }
}

bool RemoteTraffic::Await() const {
  const int64_t until_ns = clock_.SteadyNs() + kAwaitNs;
  const bool is_one = receiving() == 1;
  for (bool any = true; any;) {
    any = false;
    for (const auto& request : requests_.running()) {
      if (request->remote == nullptr) continue;
      if (StandingOf(*request).is_over) return true;
      const int64_t now_ns = clock_.SteadyNs();
      if (now_ns >= until_ns) return false;
      request->remote->Await(clock_, is_one ? until_ns : std::min(until_ns, now_ns + kAwaitEachNs));
      any = true;
    }
  }
  return false;
}

void RemoteTraffic::NoteComputed() noexcept {
  if (peers_ == nullptr) return;
  const int64_t now_ns = clock_.SteadyNs();
  if (receiving() > 0 && looked_ns_ > 0)
    overlap_seconds_ += static_cast<double>(now_ns - looked_ns_) * 1e-9;
  looked_ns_ = now_ns;
}

void RemoteTraffic::Publish(EngineStats* stats) const noexcept {
  stats->remote_tokens = tokens_;
  stats->remote_bytes = bytes_;
  stats->remote_waiting = receiving();
  stats->remote_losses = losses_;
  stats->remote_timeouts = timeouts_;
  stats->remote_overlap_seconds = overlap_seconds_;
  if (peers_ == nullptr) return;
  const StagingUse staging = state_.transfer()->staging();
  stats->staging_bytes = staging.held;
  stats->staging_bytes_largest = staging.largest;
}

}  // namespace quire
