#include "engine/traffic/prefill_traffic.h"

#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/guard.h"
#include "engine/remote/remote_peers.h"

namespace quire {
namespace {

// More are taken by the next step, so that others get in.
constexpr int64_t kJobsOfAStep = 64;
// One peer has this part of the rows that are on their way: some that take them slowly leave room
// for others.
constexpr int64_t kPeerPart = 4;
// A step that waits for room and nothing else returns after this.
constexpr int64_t kAwaitRoomNs = 5 * kNsPerMs;

Status Ending() {
  return Status(StatusCode::kUnavailable,
                "the process is ending and begins no prompt any more; compute it elsewhere");
}

}  // namespace

void PrefillBell::Ring() noexcept {
  is_rung_.store(true, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
  if (wake_) wake_();
}

bool PrefillBell::Await(Clock& clock, int64_t until_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  return WaitUntil(clock, changed_, lock, until_ns, [this] { return is_rung(); });
}

void PrefillBell::SetWake(std::function<void()> wake) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wake_ = std::move(wake);
}

PrefillTraffic::~PrefillTraffic() = default;

Result<std::string> PrefillTraffic::Serve(const SequenceStates& states, const Passport& identity,
                                          TransferListenerOptions options) {
  if (server_ != nullptr) {
    return Status(StatusCode::kBadState, "Engine::ServePrefill: it serves at " +
                                             server_->endpoint() + "; an engine has one endpoint");
  }
  if (sending_bytes_ < kPeerPart * bytes_per_token_) {
    return Status(StatusCode::kBadArgument,
                  "EngineOptions::sending_bytes is " + std::to_string(sending_bytes_) +
                      "; an engine that serves prefill needs " +
                      std::to_string(kPeerPart * bytes_per_token_) + ", four tokens of its KV");
  }
  QUIRE_ASSIGN_OR_RETURN(options.peer.passport, CachePassport(states, identity, false));
  options.peer.send_bytes = std::max(sending_bytes_ / kPeerPart, states_.largest);
  QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<PrefillServer> server,
                         PrefillServer::Start(options, [bell = bell_] { bell->Ring(); }));
  QUIRE_RETURN_IF_ERROR(state_.transfer()->SetLayerSink(server->channel()));
  std::string endpoint = server->endpoint();
  lease_ns_ = options.peer.lease.count();
  const std::lock_guard<std::mutex> lock(serve_mutex_);
  server_ = std::move(server);
  return endpoint;
}

Status PrefillTraffic::CheckNotOwn(std::span<const std::string> peers) const {
  for (const std::string& peer : peers) {
    if (server_ == nullptr || !IsSameAddress(peer, server_->endpoint())) continue;
    return Status(StatusCode::kBadArgument,
                  "Engine::AttachPrefillPeers: the engine itself serves at " + peer +
                      ", and does not ask itself; leave that address out");
  }
  return {};
}

Status PrefillTraffic::last_refusal() const {
  const std::lock_guard<std::mutex> lock(serve_mutex_);
  return server_ == nullptr ? Status() : server_->last_refusal();
}

void PrefillTraffic::End(bool at_once) noexcept {
  const std::lock_guard<std::mutex> lock(serve_mutex_);
  if (server_ != nullptr) server_->End(at_once);
}

Status PrefillTraffic::TakeJobs(double seconds_per_token, const RequestEnder& end,
                                const JobAdder& add) {
  if (server_ == nullptr) return {};
  bell_->Clear();
  if (server_->is_ending()) prefix_cache_.EndLeases();
  prefix_cache_.EndOverdueLeases();
  for (Request* const broken : FindBroken())
    end(broken, FinishReason::kCancelled, "the prompt cannot be sent any more");
  for (int64_t taken = 0;; ++taken) {
    auto job = std::make_shared<PrefillJob>();
    Result<bool> any = server_->Take(job.get());
    if (!any.ok() || taken == kJobsOfAStep) bell_->Ring();  // the next step goes on
    QUIRE_RETURN_IF_ERROR(any.status());
    if (!*any) break;
    const Status added = GuardEntry([&] { return server_->is_ending() ? Ending() : add(job); });
    if (!added.ok()) Refuse(job.get(), added);
    if (taken == kJobsOfAStep) break;
  }
  TellLoad(seconds_per_token);
  return {};
}

bool PrefillTraffic::AwaitRoom(Clock* clock) {
  if (!WaitsForRoom()) return false;
  return bell_->Await(*clock, clock->SteadyNs() + kAwaitRoomNs) && !WaitsForRoom();
}

// Tokens [0, end of the map): what stands before the map is computed, or found, and not sent.
Result<SamplingOptions> PrefillTraffic::OptionsOf(const PrefillJob& job) {
  const auto tokens = static_cast<int64_t>(job.job.tokens.size());
  const ReceiveMap& map = job.map;
  if (map.first_position < 0 || map.count < 1 || tokens - map.count != map.first_position) {
    return Status(StatusCode::kBadArgument,
                  "a job of " + std::to_string(tokens) + " tokens, and a map of " +
                      std::to_string(map.count) + " from position " +
                      std::to_string(map.first_position) + " on; a map ends where its job does");
  }
  return SamplingOptions{.max_tokens = 0,
                         .cache_salt = job.job.salt,  // tenants take turns
                         .window = job.job.window,
                         .sinks = job.job.sinks};
}

PrefixSpace PrefillTraffic::SpaceOf(const TransferJob& job) {
  return {.salt = job.salt, .long_rope = job.long_rope};
}

void PrefillTraffic::Refuse(PrefillJob* job, const Status& why) noexcept {
  if (std::exchange(job->is_refused, true)) return;
  ++losses_;
  // What broke the prompt off may be known to its connection alone.
  const Status ended = GuardEntry([&] { return job->peer->SendStatus(job->map.epoch); });
  timeouts_ += ended.code() == StatusCode::kTimeout || why.code() == StatusCode::kTimeout;
  // A peer that is gone needs no word.
  static_cast<void>(GuardEntry([&] { return job->peer->Refuse(job->map.epoch, why); }));
}

std::vector<Request*> PrefillTraffic::FindBroken() const {
  const auto is_broken = [&](const auto& request) {
    const PrefillJob* const job = request->job.get();
    if (job == nullptr) return false;
    if (job->is_refused || !job->peer->SendStatus(job->map.epoch).ok()) return true;
    if (job->marked_sequence < 0) return false;
    const Result<SendProgress> progress = state_.transfer()->GetSendProgress(job->marked_sequence);
    return !progress.ok() || !progress->failure.ok();
  };
  std::vector<Request*> broken;
  for (const auto& request : requests_.running())
    if (is_broken(request)) broken.push_back(request.get());
  for (const auto& request : requests_.waiting())
    if (is_broken(request)) broken.push_back(request.get());
  return broken;
}

// What the sequence has and has not sent goes with the next forward, too, and at its end the
// states. A connection that takes less than all that at a time is to be empty first.
int64_t PrefillTraffic::WantedBytes(const Request& request) const {
  const PrefillJob* const job = request.job.get();
  if (job == nullptr || job->is_refused || job->marked_sequence < 0) return 0;
  const Result<SendProgress> progress = state_.transfer()->GetSendProgress(job->marked_sequence);
  if (!progress.ok()) return 0;  // FindBroken ends it
  const int64_t sent_end = progress->begin + progress->sent;
  const int64_t stored = std::max<int64_t>(0, request.leader()->computed - sent_end);
  return std::min((stored + prefill_chunk_) * bytes_per_token_ + states_.all, job->window);
}

void PrefillTraffic::BeginPlan() {
  if (server_ != nullptr) room_left_ = sending_bytes_ - server_->sending_bytes();
}

bool PrefillTraffic::GrantRoom(const Request& request) {
  const int64_t wanted = WantedBytes(request);
  if (wanted == 0) return true;
  if (request.job->peer->send_room() < wanted) return false;
  const bool has_room = wanted <= room_left_;
  // Those behind it do not take what it waits for.
  room_left_ = has_room ? room_left_ - wanted : 0;
  return has_room;
}

bool PrefillTraffic::WaitsForRoom() const {
  if (server_ == nullptr) return false;
  const int64_t room = sending_bytes_ - server_->sending_bytes();
  return std::ranges::any_of(requests_.running(), [&](const auto& request) {
    const int64_t wanted = WantedBytes(*request);
    return wanted > 0 && wanted > std::min(room, request->job->peer->send_room());
  });
}

void PrefillTraffic::TellLoad(double seconds_per_token) noexcept {
  TransferLoad load{.ns_per_token = static_cast<int64_t>(seconds_per_token * 1e9)};
  const auto add = [&](const auto& request) {
    if (const Sample* const leader = request->leader())
      load.queued_tokens += request->remote != nullptr ? 0 : leader->pending() - 1;
  };
  std::ranges::for_each(requests_.running(), add);
  std::ranges::for_each(requests_.waiting(), add);
  server_->TellLoad(load);
  server_->ForgetEnded();
}

// ---- Hooks

Status PrefillTraffic::MarkAt(PrefillJob* job, int64_t sequence_id) {
  QUIRE_RETURN_IF_ERROR(state_.transfer()->DisaggMarkSend(sequence_id, job->map.first_position,
                                                          std::span(&job->map, 1), job->connection,
                                                          /*rank=*/0, job->sent));
  QUIRE_CHECK(job->marked_sequence < 0) << "two sequences of one job are marked";
  job->marked_sequence = sequence_id;
  return {};
}

Status PrefillTraffic::Mark(Request* request) {
  PrefillJob* const job = request->job.get();
  Sample* const leader = request->leader();
  if (job->is_refused || job->marked_sequence == leader->sequence_id) return {};
  Status marked = MarkAt(job, leader->sequence_id);
  if (!marked.ok() && leader->computed > 0) {
    // A window has slid past rows of what was found.
    request->restarted = true;
    sequences_.Remove(*request, leader);
    QUIRE_RETURN_IF_ERROR(sequences_.Give(*request, leader, {}));
    marked = MarkAt(job, leader->sequence_id);
  }
  if (!marked.ok()) {
    if (marked.code() == StatusCode::kOutOfMemory) return marked;
    Refuse(job, marked);  // FindBroken ends it
  }
  return {};
}

void PrefillTraffic::Detach(PrefillJob* job) noexcept {
  if (job->marked_sequence < 0) return;
  const Result<int64_t> sent = state_.transfer()->DisaggDetachSend(job->marked_sequence);
  job->marked_sequence = -1;
  if (sent.ok()) {
    QUIRE_CHECK(*sent >= job->sent) << "rows that the peer has were taken back";
    QUIRE_CHECK(*sent <= job->map.count);
    job->sent = *sent;
  } else {
    Refuse(job, sent.status());
  }
}

void PrefillTraffic::NotePreempted(Request* request) noexcept {
  if (request->job != nullptr) Detach(request->job.get());
}

void PrefillTraffic::NoteEnd(Request* request) noexcept {
  PrefillJob* const job = request->job.get();
  if (job == nullptr) return;
  Detach(job);
  tokens_ += job->sent;
  if (job->is_refused) return;
  if (job->sent == job->map.count) {
    ++prompts_;
    const auto asked = std::span<const int32_t>(job->job.tokens);
    // A held prompt with recurrent layers ends before the job's last token (CutHeld).
    prefix_cache_.EndLease(state_.is_recurrent() ? asked.first(asked.size() - 1) : asked,
                           request->space, MomentAfter(clock_.SteadyNs(), lease_ns_));
  } else {
    Refuse(job, GuardEntry([] {
             return Status(StatusCode::kInternal, "rows of the prompt were not sent");
           }));
  }
}

void PrefillTraffic::NoteFailure(Request* request, const std::string& why) noexcept {
  if (request->job == nullptr) return;
  Detach(request->job.get());
  tokens_ += request->job->sent;
  // Without memory for the reason the peer is told that.
  Refuse(request->job.get(), GuardEntry([&] { return Status(StatusCode::kUnavailable, why); }));
}

bool PrefillTraffic::IsHeld(const Request& request) const {
  return request.options.held_for_peer && request.space.is_exact() && server_ != nullptr &&
         !server_->is_ending();
}

// Without effect where the position is not reached, as where the prompt itself went on behind it:
// then nothing is held.
void PrefillTraffic::CutHeld(const Request& request, Sample* sample) const noexcept {
  const int64_t end = request.HeldEnd();
  if (!state_.is_recurrent() || !IsHeld(request) || !request.is_for_peer()) return;
  if (end <= 0 || end >= sample->computed) return;
  if (state_.ForkStart(sample->sequence_id, end) != end) return;
  if (state_.kv().PopN(sample->sequence_id, sample->computed - end).ok()) sample->computed = end;
}

void PrefillTraffic::Hold(const Request& request, std::span<const int32_t> prompt) noexcept {
  if (!IsHeld(request)) return;
  if (state_.is_recurrent()) {
    prompt = prompt.first(static_cast<size_t>(std::max<int64_t>(0, request.HeldEnd())));
  }
  prefix_cache_.AddLease(prompt, request.space, MomentAfter(clock_.SteadyNs(), lease_ns_));
}

void PrefillTraffic::Publish(EngineStats* stats) noexcept {
  stats->served_prompts = prompts_;
  stats->served_tokens = tokens_;
  stats->served_losses = losses_;
  stats->served_timeouts = timeouts_;
  stats->held_prompts = prefix_cache_.lease_count();
  stats->held_pages = prefix_cache_.leased_pages();
  stats->held_used = prefix_cache_.lease_counts().used;
  stats->held_overdue = prefix_cache_.lease_counts().overdue;
  stats->held_given_up = prefix_cache_.lease_counts().given_up;
  if (server_ == nullptr) return;
  stats->served_peers = server_->connection_count();
  stats->sending_bytes = server_->sending_bytes();
  const auto is_job = [](const auto& request) { return request->job != nullptr; };
  stats->served_waiting = std::ranges::count_if(requests_.running(), is_job) +
                          std::ranges::count_if(requests_.waiting(), is_job);
  // What was computed and has not arrived would be lost with the process.
  if (server_->is_ending())
    stats->served_waiting = std::max(stats->served_waiting, server_->open_count());
  TellLoad(stats->compute_seconds_per_token);
}

}  // namespace quire
