#include "store/redis/redis_round.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "net/socket.h"

namespace quire {
namespace {

constexpr size_t kSpansPerSend = 64;
// Receptions from one server before the others have their turn.
constexpr int kReceptionsMax = 16;
constexpr int64_t kCancelPollMs = 20;  // how soon a cancelled op is noticed when nothing comes

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

// What an error of the server means to the caller.
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

Status RedisRound::At(const Exchange& exchange, const Status& status) const {
  return Status(status.code(), "Redis " + exchange.node->address.ToString() + ": " +
                                   std::string(status.message()));
}

void RedisRound::End(RedisAssignment& assignment, Status status) {
  if (assignment.op == nullptr) return;
  assignment.op->status = std::move(status);
  assignment.op = nullptr;
  if (observer_ != nullptr) observer_->OnDone(assignment.index);
}

void RedisRound::PlanSteps(Exchange& exchange, std::span<RedisAssignment* const> assignments) {
  if (!exchange.reused && client_.hello.command_count() > 0) {
    exchange.steps.push_back({.request = &client_.hello, .replies = client_.hello.command_count()});
  }
  for (RedisAssignment* assignment : assignments) {
    exchange.steps.push_back({.prefix = assignment->asking ? &client_.asking : nullptr,
                              .request = &assignment->op->request,
                              .assignment = assignment,
                              .prefix_replies = assignment->asking ? 1 : 0,
                              .replies = assignment->op->request.command_count()});
    assignment->op->replies.clear();
  }
}

void RedisRound::OpenExchange(const std::shared_ptr<RedisNode>& node,
                              std::span<RedisAssignment* const> assignments) {
  Exchange exchange;
  exchange.node = node;
  exchange.alive_ns = clock_.SteadyNs();
  if (auto call = node->breaker.Admit(deadline_ns_)) {
    exchange.call.emplace(*std::move(call));
  } else {
    const Status status(StatusCode::kUnavailable,
                        "Redis " + node->address.ToString() +
                            ": it failed again and again; calls end at once until it answers");
    for (RedisAssignment* assignment : assignments) End(*assignment, status);
    return;
  }
  exchange.connection = node->TakeSpare();
  exchange.reused = exchange.connection != nullptr;
  exchange.state = exchange.reused ? Exchange::State::kOpen : Exchange::State::kConnecting;
  PlanSteps(exchange, assignments);
  exchanges_.push_back(std::move(exchange));
  if (exchanges_.back().reused) return;
  RedisAddress address = node->address;
  if (address.port != 0) {
    const int64_t until_ns =
        std::min(deadline_ns_,
                 MomentAfter(clock_.SteadyNs(), client_.options.connect_timeout_ms * kNsPerMs));
    Result<std::string> number = client_.resolver.Resolve(address.host, until_ns);
    if (!number.ok()) return Fail(exchanges_.back(), number.status());
    address.host = *std::move(number);
  }
  Result<std::unique_ptr<RedisConnection>> connection =
      RedisConnection::Start(address, client_.tls, node->address.host);
  if (!connection.ok()) return Fail(exchanges_.back(), connection.status());
  exchanges_.back().connection = *std::move(connection);
}

void RedisRound::Fail(Exchange& exchange, const Status& status) {
  const bool is_late = status.code() == StatusCode::kTimeout;
  exchange.connection.reset();
  exchange.state = Exchange::State::kOver;
  exchange.node->DropSpares();
  map_is_wrong = true;
  // A spare connection may have been to a process that is gone; in a cluster another server may
  // have taken over.
  const bool may_retry = may_retry_ && !is_late;
  // What makes no sense is no damage to what is stored.
  const Status why =
      At(exchange, status.code() == StatusCode::kCorrupt
                       ? Status(StatusCode::kUnavailable, std::string(status.message()))
                       : status);
  exchange.call->Report(why);
  exchange.call.reset();
  for (size_t i = exchange.receiving; i < exchange.steps.size(); ++i) {
    RedisAssignment* assignment = exchange.steps[i].assignment;
    if (assignment == nullptr || assignment->op == nullptr) continue;
    // Bytes that the observer knows of never change.
    const bool is_clean = i > exchange.receiving || exchange.placed == 0;
    if (may_retry && is_clean) {
      again.push_back(assignment->index);
      assignment->op->status = why;
    } else {
      End(*assignment, why);
    }
  }
}

void RedisRound::Finish(Exchange& exchange) {
  const bool is_open = exchange.state == Exchange::State::kOpen;
  exchange.state = Exchange::State::kOver;
  // Else all its ops were cancelled before it was connected, which says nothing.
  if (is_open) {
    exchange.call->Report(exchange.outage ? Status(StatusCode::kUnavailable, "serves nobody")
                                          : Status());
  }
  exchange.call.reset();
  if (is_open && exchange.connection->reader().idle())
    exchange.node->PutBack(std::move(exchange.connection));
  exchange.connection.reset();
}

// Nobody waits for what is under way: no reason to wait for it either.
void RedisRound::AbandonIfCancelled(Exchange& exchange) {
  if (observer_ == nullptr) return;
  for (size_t i = exchange.receiving; i < exchange.steps.size(); ++i) {
    const RedisAssignment* assignment = exchange.steps[i].assignment;
    if (assignment != nullptr && assignment->op != nullptr &&
        !observer_->Cancelled(assignment->index))
      return;
  }
  exchange.connection.reset();
  exchange.state = Exchange::State::kOver;
  exchange.call.reset();
  for (size_t i = exchange.receiving; i < exchange.steps.size(); ++i) {
    if (exchange.steps[i].assignment != nullptr)
      End(*exchange.steps[i].assignment,
          Status(StatusCode::kCancelled, "Redis: nobody waits for it"));
  }
}

// Until when the exchange may go on without a sign of life.
int64_t RedisRound::PatienceNs(const Exchange& exchange) const {
  const int64_t limit_ms = exchange.state == Exchange::State::kConnecting
                               ? client_.options.connect_timeout_ms
                               : client_.options.io_timeout_ms;
  return std::min(deadline_ns_, MomentAfter(exchange.alive_ns, limit_ms * kNsPerMs));
}

const char* RedisRound::WhatIsLate(const Exchange& exchange) const {
  if (exchange.state == Exchange::State::kOpen) return "no answer before the deadline";
  // A server without TLS waits for the end of what it takes for a command.
  return client_.tls == nullptr ? "connecting takes too long"
                                : "connecting takes too long; is this the server's port for TLS?";
}

bool RedisRound::SkipCancelled(Exchange& exchange) {
  Exchange::Step& step = exchange.steps[exchange.sending];
  if (observer_ == nullptr || exchange.sent_bytes > 0 || step.assignment == nullptr) return false;
  if (!observer_->Cancelled(step.assignment->index)) return false;
  End(*step.assignment, Status(StatusCode::kCancelled, "Redis: nobody waits for it"));
  exchange.steps.erase(exchange.steps.begin() + static_cast<ptrdiff_t>(exchange.sending));
  return true;
}

Status RedisRound::SendSome(Exchange& exchange, bool* is_full) {
  Exchange::Step& step = exchange.steps[exchange.sending];
  const size_t prefix_bytes = step.prefix != nullptr ? step.prefix->bytes() : 0;
  spans_.clear();
  if (exchange.sent_bytes < prefix_bytes) step.prefix->Gather(exchange.sent_bytes, 1, &spans_);
  step.request->Gather(exchange.sent_bytes - std::min(exchange.sent_bytes, prefix_bytes),
                       kSpansPerSend - 1, &spans_);
  QUIRE_ASSIGN_OR_RETURN(const size_t sent, exchange.connection->Send(spans_));
  *is_full = sent == 0;
  if (sent == 0) return Status();
  if (exchange.sent_bytes == 0) exchange.ahead_bytes += step.reply_bytes();
  exchange.sent_bytes += sent;
  exchange.alive_ns = clock_.SteadyNs();
  if (exchange.sent_bytes == step.bytes()) {
    exchange.sent_bytes = 0;
    ++exchange.sending;
  }
  return Status();
}

void RedisRound::Send(Exchange& exchange) {
  Status status = exchange.connection->Flush();
  for (bool is_full = false; status.ok() && !is_full && exchange.may_send();) {
    if (!SkipCancelled(exchange)) status = SendSome(exchange, &is_full);
  }
  if (!status.ok()) Fail(exchange, status);
}

void RedisRound::Conclude(Exchange& exchange, Exchange::Step& step) {
  RedisAssignment& assignment = *step.assignment;
  const std::string& error = step.error;
  if (error.empty()) {
    return End(assignment, Status());
  }
  const Status status = At(exchange, Status(CodeOf(error), PrintableError(error)));
  exchange.outage = exchange.outage || IsOutage(error);
  if (IsWrongServer(error)) map_is_wrong = true;
  const std::optional<RedisRedirection> redirection =
      ParseRedirection(error, exchange.node->address);
  if (redirection && !redirection->ask) moved.push_back(*redirection);
  // READONLY: it was a master until a moment ago.
  const bool elsewhere = redirection || IsWrongServer(error) || error.starts_with("TRYAGAIN ");
  if (!may_retry_ || !elsewhere) return End(assignment, status);
  if (redirection && redirection->ask) asked[assignment.index] = redirection->to;
  assignment.op->status = status;
  assignment.op = nullptr;
  again.push_back(assignment.index);
}

Status RedisRound::TakeReply(Exchange& exchange, RespValue reply) {
  Exchange::Step& step = exchange.steps[exchange.receiving];
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
  if (exchange.receiving == exchange.sending)
    return Status(StatusCode::kCorrupt, "it answers what was not asked");
  exchange.ahead_bytes -= step.reply_bytes();
  exchange.placed = 0;
  ++exchange.receiving;
  if (step.assignment != nullptr) Conclude(exchange, step);
  return Status();
}

Status RedisRound::TakeReplies(Exchange& exchange) {
  static constexpr RespExpectation kGreeting;
  RespReader& reader = exchange.connection->reader();
  while (!exchange.finished()) {
    Exchange::Step& step = exchange.steps[exchange.receiving];
    const bool has_op = step.assignment != nullptr && step.prefix_replies == 0;
    const RespExpectation& expected = has_op ? step.assignment->op->expected : kGreeting;
    QUIRE_ASSIGN_OR_RETURN(const bool is_complete, reader.Next(expected));
    const size_t placed = is_complete && has_op ? expected.place.size() : reader.placed();
    if (!is_complete) {
      if (placed > exchange.placed) {
        exchange.placed = placed;
        if (observer_ != nullptr) observer_->OnPlaced(step.assignment->index, placed);
      }
      return Status();
    }
    RespValue reply = reader.Take();
    if (reply.in_place && observer_ != nullptr) observer_->OnPlaced(step.assignment->index, placed);
    QUIRE_RETURN_IF_ERROR(TakeReply(exchange, std::move(reply)));
  }
  if (!reader.idle()) return Status(StatusCode::kCorrupt, "it answers what was not asked");
  return Status();
}

void RedisRound::Receive(Exchange& exchange) {
  for (int i = 0; i < kReceptionsMax; ++i) {
    const Result<size_t> received = exchange.connection->Receive();
    if (!received.ok()) return Fail(exchange, received.status());
    if (*received == 0) return;
    exchange.alive_ns = clock_.SteadyNs();
    const Status status = TakeReplies(exchange);
    if (!status.ok()) return Fail(exchange, status);
    if (exchange.finished()) return Finish(exchange);
    if (exchange.may_send()) {
      Send(exchange);
      if (exchange.state == Exchange::State::kOver) return;
    }
  }
}

// Waits for sockets, and serves those that are ready.
void RedisRound::Wait() {
  std::vector<pollfd> polled;
  std::vector<Exchange*> exchanges;
  int64_t until_ns = kNever;
  for (Exchange& exchange : exchanges_) {
    if (exchange.state == Exchange::State::kOver) continue;
    const bool is_open = exchange.state == Exchange::State::kOpen;
    const bool wants_out = exchange.connection->wants_write() || (is_open && exchange.may_send());
    if (is_open && exchange.connection->has_buffered()) until_ns = 0;
    polled.push_back(
        {exchange.connection->fd(), static_cast<short>(POLLIN | (wants_out ? POLLOUT : 0)), 0});
    exchanges.push_back(&exchange);
    until_ns = std::min(until_ns, PatienceNs(exchange));
  }
  const int64_t wait_ns = std::max<int64_t>(until_ns - clock_.SteadyNs(), 0);
  int64_t wait_ms = std::min(wait_ns / kNsPerMs + 1, client_.options.io_timeout_ms);
  if (observer_ != nullptr) wait_ms = std::min(wait_ms, kCancelPollMs);
  if (wait_ns == 0) wait_ms = 0;
  const int ready = poll(polled.data(), polled.size(), static_cast<int>(wait_ms));
  for (size_t i = 0; i < polled.size(); ++i) {
    Exchange& exchange = *exchanges[i];
    const short events = ready > 0 ? polled[i].revents : short{0};
    if (events != 0 && exchange.state == Exchange::State::kConnecting) {
      const Result<bool> is_open = exchange.connection->Connect();
      if (!is_open.ok()) {
        Fail(exchange, is_open.status());
        continue;
      }
      if (*is_open) {
        exchange.state = Exchange::State::kOpen;
        exchange.alive_ns = clock_.SteadyNs();
      }
    }
    // With TLS a reception, too, may wait for the socket to take something.
    const bool may_receive = (events & (POLLIN | POLLERR | POLLHUP)) != 0 ||
                             (events != 0 && exchange.connection->wants_write()) ||
                             exchange.connection->has_buffered();
    if (exchange.state == Exchange::State::kOpen && may_receive) Receive(exchange);
    if (exchange.state == Exchange::State::kOpen && (events & POLLOUT) != 0) Send(exchange);
    if (exchange.state == Exchange::State::kOver) continue;
    if (clock_.SteadyNs() >= PatienceNs(exchange)) {
      Fail(exchange, Status(StatusCode::kTimeout, WhatIsLate(exchange)));
    } else {
      AbandonIfCancelled(exchange);
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
  exchanges_.reserve(order.size());
  for (const std::shared_ptr<RedisNode>& node : order) OpenExchange(node, by_node[node]);
  for (Exchange& exchange : exchanges_) {
    if (exchange.state == Exchange::State::kOpen) Send(exchange);
  }
  const auto is_over = [](const Exchange& exchange) {
    return exchange.state == Exchange::State::kOver;
  };
  while (!std::all_of(exchanges_.begin(), exchanges_.end(), is_over)) {
    Wait();
    for (Exchange& exchange : exchanges_) {
      if (!is_over(exchange) && exchange.finished()) Finish(exchange);
    }
  }
}

}  // namespace quire
