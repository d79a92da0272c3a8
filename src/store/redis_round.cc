#include "store/redis_round.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace quire {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr size_t kSpansPerSend = 64;
// Receptions from one server before the others have their turn.
constexpr int kReceptionsMax = 16;
constexpr int64_t kCancelPollMs = 20;  // how soon a cancelled op is noticed when nothing comes

int64_t Sum(int64_t moment_ns, int64_t span_ns) {
  return moment_ns > kNever - span_ns ? kNever : moment_ns + span_ns;
}

RedisRequest AskingRequest() {
  RedisRequest asking;
  asking.Add({"ASKING"});
  return asking;
}

RedisRequest HelloOf(const RedisTierOptions& options) {
  RedisRequest hello;
  if (options.password.empty()) return hello;
  if (options.username.empty()) {
    hello.Add({"AUTH", options.password});
  } else {
    hello.Add({"AUTH", options.username, options.password});
  }
  return hello;
}

// What an error of the server means to who asked.
StatusCode CodeOf(std::string_view error) {
  if (error.starts_with("OOM ")) return StatusCode::kFull;
  if (error.starts_with("WRONGTYPE ")) return StatusCode::kCorrupt;
  for (const std::string_view name :
       {"LOADING ", "CLUSTERDOWN ", "TRYAGAIN ", "READONLY ", "MASTERDOWN ", "MOVED ", "ASK ",
        "NOAUTH ", "NOPERM ", "BUSY ", "NOREPLICAS ", "MISCONF "}) {
    if (error.starts_with(name)) return StatusCode::kUnavailable;
  }
  return StatusCode::kIoError;
}

// Whether the server serves nobody, as against this one command.
bool IsOutage(std::string_view error) {
  return error.starts_with("LOADING ") || error.starts_with("CLUSTERDOWN ") ||
         error.starts_with("MASTERDOWN ") || error.starts_with("NOAUTH ");
}

// Whether somebody else may have the slots now.
bool IsWrongServer(std::string_view error) {
  return error.starts_with("CLUSTERDOWN ") || error.starts_with("READONLY ") ||
         error.starts_with("MASTERDOWN ");
}

}  // namespace

RedisClient::RedisClient(const RedisTierOptions& tier_options,
                         std::shared_ptr<const TlsContext> tls_context,
                         std::shared_ptr<Clock> steady)
    : options(tier_options),
      tls(std::move(tls_context)),
      clock(std::move(steady)),
      hello(HelloOf(options)),
      asking(AskingRequest()),
      resolver(clock) {}

Status RedisRound::At(const Lane& lane, const Status& status) const {
  return Status(status.code(),
                "Redis " + lane.node->address.ToString() + ": " + std::string(status.message()));
}

void RedisRound::End(RedisAssignment& assignment, Status status) {
  if (assignment.op == nullptr) return;
  assignment.op->status = std::move(status);
  assignment.op = nullptr;
  if (observer_ != nullptr) observer_->OnDone(assignment.index);
}

void RedisRound::PlanSteps(Lane& lane, std::span<RedisAssignment* const> assignments) {
  if (!lane.reused && client_.hello.command_count() > 0) {
    lane.steps.push_back({.request = &client_.hello, .replies = client_.hello.command_count()});
  }
  for (RedisAssignment* assignment : assignments) {
    lane.steps.push_back({.prefix = assignment->asking ? &client_.asking : nullptr,
                          .request = &assignment->op->request,
                          .assignment = assignment,
                          .prefix_replies = assignment->asking ? 1 : 0,
                          .replies = assignment->op->request.command_count()});
    assignment->op->replies.clear();
  }
}

void RedisRound::OpenLane(const std::shared_ptr<RedisNode>& node,
                          std::span<RedisAssignment* const> assignments) {
  Lane lane;
  lane.node = node;
  lane.alive_ns = clock_.SteadyNs();
  if (auto call = node->breaker.Admit(deadline_ns_)) {
    lane.call.emplace(*std::move(call));
  } else {
    const Status status(StatusCode::kUnavailable,
                        "Redis " + node->address.ToString() +
                            ": it failed again and again; calls end at once until it answers");
    for (RedisAssignment* assignment : assignments) End(*assignment, status);
    return;
  }
  lane.connection = node->TakeSpare();
  lane.reused = lane.connection != nullptr;
  lane.state = lane.reused ? Lane::State::kOpen : Lane::State::kConnecting;
  PlanSteps(lane, assignments);
  lanes_.push_back(std::move(lane));
  if (lanes_.back().reused) return;
  RedisAddress address = node->address;
  if (address.port != 0) {
    const int64_t until_ns = std::min(
        deadline_ns_, Sum(clock_.SteadyNs(), client_.options.connect_timeout_ms * kNsPerMs));
    Result<std::string> number = client_.resolver.Resolve(address.host, until_ns);
    if (!number.ok()) return Fail(lanes_.back(), number.status());
    address.host = *std::move(number);
  }
  Result<std::unique_ptr<RedisConnection>> connection =
      RedisConnection::Start(address, client_.tls, node->address.host);
  if (!connection.ok()) return Fail(lanes_.back(), connection.status());
  lanes_.back().connection = *std::move(connection);
}

void RedisRound::Fail(Lane& lane, const Status& status) {
  const bool is_late = status.code() == StatusCode::kTimeout;
  lane.connection.reset();
  lane.state = Lane::State::kOver;
  lane.node->DropSpares();
  map_is_wrong = true;
  // A spare connection may have been to a process that is gone; in a cluster another server may
  // have taken over.
  const bool may_retry = may_retry_ && !is_late;
  // What makes no sense is no damage to what is stored.
  const Status why = At(lane, status.code() == StatusCode::kCorrupt
                                  ? Status(StatusCode::kUnavailable, std::string(status.message()))
                                  : status);
  lane.call->Report(why);
  lane.call.reset();
  for (size_t i = lane.receiving; i < lane.steps.size(); ++i) {
    RedisAssignment* assignment = lane.steps[i].assignment;
    if (assignment == nullptr || assignment->op == nullptr) continue;
    // Bytes that the observer knows of never change.
    const bool is_clean = i > lane.receiving || lane.placed == 0;
    if (may_retry && is_clean) {
      again.push_back(assignment->index);
      assignment->op->status = why;
    } else {
      End(*assignment, why);
    }
  }
}

void RedisRound::Finish(Lane& lane) {
  const bool is_open = lane.state == Lane::State::kOpen;
  lane.state = Lane::State::kOver;
  // Else all its ops were cancelled before it was connected, which says nothing.
  if (is_open) {
    lane.call->Report(lane.outage ? Status(StatusCode::kUnavailable, "serves nobody") : Status());
  }
  lane.call.reset();
  if (is_open && lane.connection->reader().idle()) lane.node->PutBack(std::move(lane.connection));
  lane.connection.reset();
}

// Nobody waits for what is under way: no reason to wait for it either.
void RedisRound::AbandonIfCancelled(Lane& lane) {
  if (observer_ == nullptr) return;
  for (size_t i = lane.receiving; i < lane.steps.size(); ++i) {
    const RedisAssignment* assignment = lane.steps[i].assignment;
    if (assignment != nullptr && assignment->op != nullptr &&
        !observer_->Cancelled(assignment->index))
      return;
  }
  lane.connection.reset();
  lane.state = Lane::State::kOver;
  lane.call.reset();
  for (size_t i = lane.receiving; i < lane.steps.size(); ++i) {
    if (lane.steps[i].assignment != nullptr)
      End(*lane.steps[i].assignment, Status(StatusCode::kCancelled, "Redis: nobody waits for it"));
  }
}

// Until when the lane may go on without a sign of life.
int64_t RedisRound::PatienceNs(const Lane& lane) const {
  const int64_t limit_ms = lane.state == Lane::State::kConnecting
                               ? client_.options.connect_timeout_ms
                               : client_.options.io_timeout_ms;
  return std::min(deadline_ns_, Sum(lane.alive_ns, limit_ms * kNsPerMs));
}

const char* RedisRound::WhatIsLate(const Lane& lane) const {
  if (lane.state == Lane::State::kOpen) return "no answer before the deadline";
  // A server without TLS waits for the end of what it takes for a command.
  return client_.tls == nullptr ? "connecting takes too long"
                                : "connecting takes too long; is this the server's port for TLS?";
}

bool RedisRound::SkipCancelled(Lane& lane) {
  Lane::Step& step = lane.steps[lane.sending];
  if (observer_ == nullptr || lane.sent_bytes > 0 || step.assignment == nullptr) return false;
  if (!observer_->Cancelled(step.assignment->index)) return false;
  End(*step.assignment, Status(StatusCode::kCancelled, "Redis: nobody waits for it"));
  lane.steps.erase(lane.steps.begin() + static_cast<ptrdiff_t>(lane.sending));
  return true;
}

Status RedisRound::SendSome(Lane& lane, bool* is_full) {
  Lane::Step& step = lane.steps[lane.sending];
  const size_t prefix_bytes = step.prefix != nullptr ? step.prefix->bytes() : 0;
  spans_.clear();
  if (lane.sent_bytes < prefix_bytes) step.prefix->Gather(lane.sent_bytes, 1, &spans_);
  step.request->Gather(lane.sent_bytes - std::min(lane.sent_bytes, prefix_bytes), kSpansPerSend - 1,
                       &spans_);
  QUIRE_ASSIGN_OR_RETURN(const size_t sent, lane.connection->Send(spans_));
  *is_full = sent == 0;
  if (sent == 0) return Status();
  if (lane.sent_bytes == 0) lane.ahead_bytes += step.reply_bytes();
  lane.sent_bytes += sent;
  lane.alive_ns = clock_.SteadyNs();
  if (lane.sent_bytes == step.bytes()) {
    lane.sent_bytes = 0;
    ++lane.sending;
  }
  return Status();
}

void RedisRound::Send(Lane& lane) {
  Status status = lane.connection->Flush();
  for (bool is_full = false; status.ok() && !is_full && lane.may_send();) {
    if (!SkipCancelled(lane)) status = SendSome(lane, &is_full);
  }
  if (!status.ok()) Fail(lane, status);
}

void RedisRound::Conclude(Lane& lane, Lane::Step& step) {
  RedisAssignment& assignment = *step.assignment;
  const std::string& error = step.error;
  if (error.empty()) {
    return End(assignment, Status());
  }
  const Status status = At(lane, Status(CodeOf(error), PrintableError(error)));
  lane.outage = lane.outage || IsOutage(error);
  if (IsWrongServer(error)) map_is_wrong = true;
  const std::optional<RedisRedirection> redirection = ParseRedirection(error, lane.node->address);
  if (redirection && !redirection->ask) moved.push_back(*redirection);
  // READONLY: it was a master until a moment ago.
  const bool elsewhere = redirection || IsWrongServer(error) || error.starts_with("TRYAGAIN ");
  if (!may_retry_ || !elsewhere) return End(assignment, status);
  if (redirection && redirection->ask) asked[assignment.index] = redirection->to;
  assignment.op->status = status;
  assignment.op = nullptr;
  again.push_back(assignment.index);
}

Status RedisRound::TakeReply(Lane& lane, RespValue reply) {
  Lane::Step& step = lane.steps[lane.receiving];
  if (step.prefix_replies > 0) {
    --step.prefix_replies;
    return Status();
  }
  if (reply.type == RespType::kError) {
    if (step.assignment == nullptr) {
      // Only the error's name: what follows may quote the command, and so the password.
      const std::string_view name = std::string_view(reply.text).substr(0, reply.text.find(' '));
      return Status(StatusCode::kUnavailable,
                    "it refuses user name or password (" + PrintableError(name) + ")");
    }
    if (step.error.empty()) step.error = reply.text.empty() ? "ERR" : reply.text;
  }
  if (step.assignment != nullptr) step.assignment->op->replies.push_back(std::move(reply));
  if (--step.replies > 0) return Status();
  if (lane.receiving == lane.sending)
    return Status(StatusCode::kCorrupt, "it answers what was not asked");
  lane.ahead_bytes -= step.reply_bytes();
  lane.placed = 0;
  ++lane.receiving;
  if (step.assignment != nullptr) Conclude(lane, step);
  return Status();
}

Status RedisRound::TakeReplies(Lane& lane) {
  static constexpr RespExpectation kGreeting;
  RespReader& reader = lane.connection->reader();
  while (!lane.finished()) {
    Lane::Step& step = lane.steps[lane.receiving];
    const bool has_op = step.assignment != nullptr && step.prefix_replies == 0;
    const RespExpectation& expected = has_op ? step.assignment->op->expected : kGreeting;
    QUIRE_ASSIGN_OR_RETURN(const bool is_complete, reader.Next(expected));
    const size_t placed = is_complete && has_op ? expected.place.size() : reader.placed();
    if (!is_complete) {
      if (placed > lane.placed) {
        lane.placed = placed;
        if (observer_ != nullptr) observer_->OnPlaced(step.assignment->index, placed);
      }
      return Status();
    }
    RespValue reply = reader.Take();
    if (reply.in_place && observer_ != nullptr) observer_->OnPlaced(step.assignment->index, placed);
    QUIRE_RETURN_IF_ERROR(TakeReply(lane, std::move(reply)));
  }
  if (!reader.idle()) return Status(StatusCode::kCorrupt, "it answers what was not asked");
  return Status();
}

void RedisRound::Receive(Lane& lane) {
  for (int i = 0; i < kReceptionsMax; ++i) {
    const Result<size_t> received = lane.connection->Receive();
    if (!received.ok()) return Fail(lane, received.status());
    if (*received == 0) return;
    lane.alive_ns = clock_.SteadyNs();
    const Status status = TakeReplies(lane);
    if (!status.ok()) return Fail(lane, status);
    if (lane.finished()) return Finish(lane);
    if (lane.may_send()) {
      Send(lane);
      if (lane.state == Lane::State::kOver) return;
    }
  }
}

// Waits for sockets, and serves those that are ready.
void RedisRound::Wait() {
  std::vector<pollfd> polled;
  std::vector<Lane*> lanes;
  int64_t until_ns = kNever;
  for (Lane& lane : lanes_) {
    if (lane.state == Lane::State::kOver) continue;
    const bool is_open = lane.state == Lane::State::kOpen;
    const bool wants_out = lane.connection->wants_write() || (is_open && lane.may_send());
    if (is_open && lane.connection->has_buffered()) until_ns = 0;
    polled.push_back(
        {lane.connection->fd(), static_cast<short>(POLLIN | (wants_out ? POLLOUT : 0)), 0});
    lanes.push_back(&lane);
    until_ns = std::min(until_ns, PatienceNs(lane));
  }
  const int64_t wait_ns = std::max<int64_t>(until_ns - clock_.SteadyNs(), 0);
  int64_t wait_ms = std::min(wait_ns / kNsPerMs + 1, client_.options.io_timeout_ms);
  if (observer_ != nullptr) wait_ms = std::min(wait_ms, kCancelPollMs);
  if (wait_ns == 0) wait_ms = 0;
  const int ready = poll(polled.data(), polled.size(), static_cast<int>(wait_ms));
  for (size_t i = 0; i < polled.size(); ++i) {
    Lane& lane = *lanes[i];
    const short events = ready > 0 ? polled[i].revents : short{0};
    if (events != 0 && lane.state == Lane::State::kConnecting) {
      const Result<bool> is_open = lane.connection->Connect();
      if (!is_open.ok()) {
        Fail(lane, is_open.status());
        continue;
      }
      if (*is_open) {
        lane.state = Lane::State::kOpen;
        lane.alive_ns = clock_.SteadyNs();
      }
    }
    // With TLS a reception, too, may wait for the socket to take something.
    const bool may_receive = (events & (POLLIN | POLLERR | POLLHUP)) != 0 ||
                             (events != 0 && lane.connection->wants_write()) ||
                             lane.connection->has_buffered();
    if (lane.state == Lane::State::kOpen && may_receive) Receive(lane);
    if (lane.state == Lane::State::kOpen && (events & POLLOUT) != 0) Send(lane);
    if (lane.state == Lane::State::kOver) continue;
    if (clock_.SteadyNs() >= PatienceNs(lane)) {
      Fail(lane, Status(StatusCode::kTimeout, WhatIsLate(lane)));
    } else {
      AbandonIfCancelled(lane);
    }
  }
}

void RedisRound::Run(std::span<RedisAssignment> assignments) {
  std::map<std::shared_ptr<RedisNode>, std::vector<RedisAssignment*>> by_node;
  std::vector<std::shared_ptr<RedisNode>> order;
  for (RedisAssignment& assignment : assignments) {
    std::vector<RedisAssignment*>& list = by_node[assignment.node];
    if (list.empty()) order.push_back(assignment.node);
    list.push_back(&assignment);
  }
  lanes_.reserve(order.size());
  for (const std::shared_ptr<RedisNode>& node : order) OpenLane(node, by_node[node]);
  for (Lane& lane : lanes_) {
    if (lane.state == Lane::State::kOpen) Send(lane);
  }
  const auto is_over = [](const Lane& lane) { return lane.state == Lane::State::kOver; };
  while (!std::all_of(lanes_.begin(), lanes_.end(), is_over)) {
    Wait();
    for (Lane& lane : lanes_) {
      if (!is_over(lane) && lane.finished()) Finish(lane);
    }
  }
}

}  // namespace quire
