#include "store/redis_cluster.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/checksum.h"
#include "base/clock.h"
#include "store/circuit_breaker.h"
#include "store/redis_connection.h"

namespace quire {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
// Of replies that were asked for and have not come. It keeps a server busy while one is received,
// and bounds what the server must hold for us.
constexpr int64_t kAheadBytes = int64_t{4} << 20;
constexpr size_t kSpansPerSend = 64;
// Receptions from one server before the others have their turn.
constexpr int kReceptionsMax = 16;
constexpr size_t kSpareConnectionsMax = 8;  // per server: about as many as there are workers
// A map that was found wrong is asked for at most this often: a storm of MOVED, or a master that is
// down until its replica takes over, must not become a storm of ours.
constexpr int64_t kRefreshNs = 100 * kNsPerMs;
// 16384 slots in ranges of one each, with a handful of replicas, are the longest reply there can
// be.
constexpr RespExpectation kMapExpectation = {.bytes_max = 4 << 20, .items_max = 1 << 18};
constexpr size_t kNodesMax = 1000;     // what Redis Cluster is made for
constexpr int64_t kCancelPollMs = 20;  // how soon a cancelled op is noticed when nothing comes
constexpr uint16_t kNoNode = 0xFFFF;

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

// One server.
struct RedisCluster::Node {
  Node(RedisAddress where, uint64_t seed) : address(std::move(where)), breaker(seed) {}

  std::unique_ptr<RedisConnection> TakeSpare() {
    const std::lock_guard<std::mutex> guard(mutex);
    while (!spares.empty()) {
      std::unique_ptr<RedisConnection> spare = std::move(spares.back());
      spares.pop_back();
      if (!spare->IsStale()) return spare;
    }
    return nullptr;
  }
  void PutBack(std::unique_ptr<RedisConnection> connection) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (spares.size() < kSpareConnectionsMax) spares.push_back(std::move(connection));
  }
  // After a failure: the others were connected to the same process.
  void DropSpares() {
    const std::lock_guard<std::mutex> guard(mutex);
    spares.clear();
  }

  const RedisAddress address;
  CircuitBreaker breaker;
  std::mutex mutex;
  std::vector<std::unique_ptr<RedisConnection>> spares;
};

// Who has which slot. Never changed once others see it.
struct RedisCluster::Map {
  bool is_cluster = false;
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<uint16_t> node_of_slot = std::vector<uint16_t>(kRedisSlotCount, kNoNode);

  std::shared_ptr<Node> at(int slot) const {
    const uint16_t index = node_of_slot[static_cast<size_t>(slot)];
    return index == kNoNode ? nullptr : nodes[index];
  }
  uint16_t IndexOf(const std::shared_ptr<Node>& node) {
    const auto at = std::find(nodes.begin(), nodes.end(), node);
    const auto index = static_cast<uint16_t>(at - nodes.begin());
    if (at == nodes.end()) nodes.push_back(node);
    return index;
  }
};

struct RedisCluster::Assignment {
  RedisOp* op;
  size_t index;  // in Execute's ops
  std::shared_ptr<Node> node;
  bool asking;  // the server takes it only behind ASKING
};

// What one connection has to do in a round.
struct RedisCluster::Lane {
  enum class State : uint8_t { kConnecting, kOpen, kOver };

  // Requests that were sent and whose replies come in order.
  struct Step {
    const RedisRequest* prefix = nullptr;  // ASKING
    const RedisRequest* request = nullptr;
    Assignment* assignment = nullptr;  // null: the greeting
    int64_t prefix_replies = 0;
    int64_t replies = 0;  // that have not come
    std::string error = {};
    size_t bytes() const { return (prefix != nullptr ? prefix->bytes() : 0) + request->bytes(); }
    int64_t reply_bytes() const { return assignment != nullptr ? assignment->op->reply_bytes : 0; }
  };

  std::shared_ptr<Node> node;
  std::unique_ptr<RedisConnection> connection;
  State state = State::kConnecting;
  bool reused = false;
  bool outage = false;  // it answers, but serves nobody
  std::vector<Step> steps;
  size_t sending = 0, sent_bytes = 0;  // step, and bytes of it
  size_t receiving = 0;
  int64_t ahead_bytes = 0;
  size_t placed = 0;
  int64_t started_ns = 0;
  int64_t alive_ns = 0;  // last sign of life

  bool all_sent() const { return sending == steps.size(); }
  bool finished() const { return receiving == steps.size(); }
  bool may_send() const {
    return !all_sent() && (sent_bytes > 0 || sending == receiving || ahead_bytes < kAheadBytes);
  }
};

// One pass: every op goes to one server and comes to an end, or is told to go elsewhere.
class RedisCluster::Round {
 public:
  Round(RedisCluster& cluster, int64_t deadline_ns, RedisObserver* observer, bool may_retry)
      : cluster_(cluster),
        clock_(*cluster.clock_),
        deadline_ns_(deadline_ns),
        observer_(observer),
        may_retry_(may_retry) {}
  ~Round() {
    // Only when memory ran out under way.
    for (Lane& lane : lanes_) {
      if (lane.state != Lane::State::kOver) lane.node->breaker.Abandoned();
    }
  }

  void Run(std::span<Assignment> assignments);

  // Ops that are worth another pass, and where ASK sent them.
  std::vector<size_t> again;
  std::map<size_t, RedisAddress> asked;
  std::vector<RedisRedirection> moved;

 private:
  void OpenLane(const std::shared_ptr<Node>& node, std::span<Assignment* const> assignments);
  void PlanSteps(Lane& lane, std::span<Assignment* const> assignments);
  void End(Assignment& assignment, Status status);
  void Fail(Lane& lane, const Status& status);
  void Finish(Lane& lane);
  void AbandonIfCancelled(Lane& lane);
  int64_t PatienceNs(const Lane& lane) const;
  void Wait();
  void Send(Lane& lane);
  Status SendSome(Lane& lane, bool* is_full);
  bool SkipCancelled(Lane& lane);
  void Receive(Lane& lane);
  Status TakeReplies(Lane& lane);
  Status TakeReply(Lane& lane, RespValue reply);
  void Conclude(Lane& lane, Lane::Step& step);
  Status At(const Lane& lane, const Status& status) const;

  RedisCluster& cluster_;
  Clock& clock_;
  const int64_t deadline_ns_;
  RedisObserver* const observer_;
  const bool may_retry_;
  std::vector<Lane> lanes_;
  std::vector<std::span<const std::byte>> spans_;
};

// ---- A round

Status RedisCluster::Round::At(const Lane& lane, const Status& status) const {
  return Status(status.code(),
                "Redis " + lane.node->address.ToString() + ": " + std::string(status.message()));
}

void RedisCluster::Round::End(Assignment& assignment, Status status) {
  if (assignment.op == nullptr) return;
  assignment.op->status = std::move(status);
  assignment.op = nullptr;
  if (observer_ != nullptr) observer_->OnDone(assignment.index);
}

void RedisCluster::Round::PlanSteps(Lane& lane, std::span<Assignment* const> assignments) {
  if (!lane.reused && cluster_.hello_.command_count() > 0) {
    lane.steps.push_back({.request = &cluster_.hello_, .replies = cluster_.hello_.command_count()});
  }
  for (Assignment* assignment : assignments) {
    lane.steps.push_back({.prefix = assignment->asking ? &cluster_.asking_ : nullptr,
                          .request = &assignment->op->request,
                          .assignment = assignment,
                          .prefix_replies = assignment->asking ? 1 : 0,
                          .replies = assignment->op->request.command_count()});
    assignment->op->replies.clear();
  }
}

void RedisCluster::Round::OpenLane(const std::shared_ptr<Node>& node,
                                   std::span<Assignment* const> assignments) {
  Lane lane;
  lane.node = node;
  lane.started_ns = lane.alive_ns = clock_.SteadyNs();
  if (!node->breaker.Admit(lane.started_ns)) {
    const Status status(StatusCode::kUnavailable,
                        "Redis " + node->address.ToString() +
                            ": it failed again and again; calls end at once until it answers");
    for (Assignment* assignment : assignments) End(*assignment, status);
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
        deadline_ns_, Sum(clock_.SteadyNs(), cluster_.options_.connect_timeout_ms * kNsPerMs));
    Result<std::string> number = cluster_.resolver_.Resolve(address.host, until_ns);
    if (!number.ok()) return Fail(lanes_.back(), number.status());
    address.host = *std::move(number);
  }
  Result<std::unique_ptr<RedisConnection>> connection = RedisConnection::Start(address);
  if (!connection.ok()) return Fail(lanes_.back(), connection.status());
  lanes_.back().connection = *std::move(connection);
}

void RedisCluster::Round::Fail(Lane& lane, const Status& status) {
  const bool is_late = status.code() == StatusCode::kTimeout;
  lane.connection.reset();
  lane.state = Lane::State::kOver;
  lane.node->DropSpares();
  lane.node->breaker.Failed(clock_.SteadyNs(), is_late);
  cluster_.MarkStale();
  // A spare connection may have been to a process that is gone; in a cluster another server may
  // have taken over.
  const bool may_retry = may_retry_ && !is_late;
  // What makes no sense is no damage to what is stored.
  const Status why = At(lane, status.code() == StatusCode::kCorrupt
                                  ? Status(StatusCode::kUnavailable, std::string(status.message()))
                                  : status);
  for (size_t i = lane.receiving; i < lane.steps.size(); ++i) {
    Assignment* assignment = lane.steps[i].assignment;
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

void RedisCluster::Round::Finish(Lane& lane) {
  const bool is_open = lane.state == Lane::State::kOpen;
  lane.state = Lane::State::kOver;
  const int64_t now_ns = clock_.SteadyNs();
  if (!is_open) {
    lane.node->breaker.Abandoned();  // all its ops were cancelled before it was connected
  } else if (lane.outage) {
    lane.node->breaker.Failed(now_ns, false);
  } else {
    lane.node->breaker.Succeeded(now_ns, now_ns > deadline_ns_);
  }
  if (is_open && lane.connection->reader().idle()) lane.node->PutBack(std::move(lane.connection));
  lane.connection.reset();
}

// Nobody waits for what is under way: no reason to wait for it either.
void RedisCluster::Round::AbandonIfCancelled(Lane& lane) {
  if (observer_ == nullptr) return;
  for (size_t i = lane.receiving; i < lane.steps.size(); ++i) {
    const Assignment* assignment = lane.steps[i].assignment;
    if (assignment != nullptr && assignment->op != nullptr &&
        !observer_->Cancelled(assignment->index))
      return;
  }
  lane.connection.reset();
  lane.state = Lane::State::kOver;
  lane.node->breaker.Abandoned();
  for (size_t i = lane.receiving; i < lane.steps.size(); ++i) {
    if (lane.steps[i].assignment != nullptr)
      End(*lane.steps[i].assignment, Status(StatusCode::kCancelled, "Redis: nobody waits for it"));
  }
}

// Until when the lane may go on without a sign of life.
int64_t RedisCluster::Round::PatienceNs(const Lane& lane) const {
  const int64_t limit_ms = lane.state == Lane::State::kConnecting
                               ? cluster_.options_.connect_timeout_ms
                               : cluster_.options_.io_timeout_ms;
  return std::min(deadline_ns_, Sum(lane.alive_ns, limit_ms * kNsPerMs));
}

bool RedisCluster::Round::SkipCancelled(Lane& lane) {
  Lane::Step& step = lane.steps[lane.sending];
  if (observer_ == nullptr || lane.sent_bytes > 0 || step.assignment == nullptr) return false;
  if (!observer_->Cancelled(step.assignment->index)) return false;
  End(*step.assignment, Status(StatusCode::kCancelled, "Redis: nobody waits for it"));
  lane.steps.erase(lane.steps.begin() + static_cast<ptrdiff_t>(lane.sending));
  return true;
}

Status RedisCluster::Round::SendSome(Lane& lane, bool* is_full) {
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

void RedisCluster::Round::Send(Lane& lane) {
  bool is_full = false;
  while (!is_full && lane.may_send()) {
    if (SkipCancelled(lane)) continue;
    const Status status = SendSome(lane, &is_full);
    if (!status.ok()) return Fail(lane, status);
  }
}

void RedisCluster::Round::Conclude(Lane& lane, Lane::Step& step) {
  Assignment& assignment = *step.assignment;
  const std::string& error = step.error;
  if (error.empty()) {
    return End(assignment, Status());
  }
  const Status status = At(lane, Status(CodeOf(error), PrintableError(error)));
  lane.outage = lane.outage || IsOutage(error);
  if (IsWrongServer(error)) cluster_.MarkStale();
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

Status RedisCluster::Round::TakeReply(Lane& lane, RespValue reply) {
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

Status RedisCluster::Round::TakeReplies(Lane& lane) {
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

void RedisCluster::Round::Receive(Lane& lane) {
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
void RedisCluster::Round::Wait() {
  std::vector<pollfd> polled;
  std::vector<Lane*> lanes;
  int64_t until_ns = kNever;
  for (Lane& lane : lanes_) {
    if (lane.state == Lane::State::kOver) continue;
    const bool wants_out = lane.state == Lane::State::kConnecting || lane.may_send();
    polled.push_back(
        {lane.connection->fd(), static_cast<short>(POLLIN | (wants_out ? POLLOUT : 0)), 0});
    lanes.push_back(&lane);
    until_ns = std::min(until_ns, PatienceNs(lane));
  }
  const int64_t wait_ns = std::max<int64_t>(until_ns - clock_.SteadyNs(), 0);
  int64_t wait_ms = std::min(wait_ns / kNsPerMs + 1, cluster_.options_.io_timeout_ms);
  if (observer_ != nullptr) wait_ms = std::min(wait_ms, kCancelPollMs);
  if (wait_ns == 0) wait_ms = 0;
  const int ready = poll(polled.data(), polled.size(), static_cast<int>(wait_ms));
  for (size_t i = 0; i < polled.size(); ++i) {
    Lane& lane = *lanes[i];
    const short events = ready > 0 ? polled[i].revents : short{0};
    if (events != 0 && lane.state == Lane::State::kConnecting) {
      const Status status = lane.connection->FinishConnect();
      if (!status.ok()) {
        Fail(lane, status);
        continue;
      }
      lane.state = Lane::State::kOpen;
      lane.alive_ns = clock_.SteadyNs();
    }
    if ((events & (POLLIN | POLLERR | POLLHUP)) != 0) Receive(lane);
    if (lane.state == Lane::State::kOpen && (events & POLLOUT) != 0) Send(lane);
    if (lane.state == Lane::State::kOver) continue;
    if (clock_.SteadyNs() >= PatienceNs(lane)) {
      Fail(lane, Status(StatusCode::kTimeout, lane.state == Lane::State::kConnecting
                                                  ? "connecting takes too long"
                                                  : "no answer before the deadline"));
    } else {
      AbandonIfCancelled(lane);
    }
  }
}

void RedisCluster::Round::Run(std::span<Assignment> assignments) {
  std::map<std::shared_ptr<Node>, std::vector<Assignment*>> by_node;
  std::vector<std::shared_ptr<Node>> order;
  for (Assignment& assignment : assignments) {
    std::vector<Assignment*>& list = by_node[assignment.node];
    if (list.empty()) order.push_back(assignment.node);
    list.push_back(&assignment);
  }
  lanes_.reserve(order.size());
  for (const std::shared_ptr<Node>& node : order) OpenLane(node, by_node[node]);
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

// ---- The cluster

Result<std::unique_ptr<RedisCluster>> RedisCluster::Create(const RedisTierOptions& options,
                                                           std::shared_ptr<Clock> clock) {
  const auto refuse = [](const std::string& what, int64_t value) {
    return Status(StatusCode::kBadArgument, "redis." + what + " is " + std::to_string(value));
  };
  if (options.connect_timeout_ms < 1)
    return refuse("connect_timeout_ms", options.connect_timeout_ms);
  if (options.io_timeout_ms < 1) return refuse("io_timeout_ms", options.io_timeout_ms);
  if (options.ttl_ms < 0) return refuse("ttl_ms", options.ttl_ms);
  if (options.replicas < 0) return refuse("replicas", options.replicas);
  if (!options.username.empty() && options.password.empty()) {
    return Status(StatusCode::kBadArgument,
                  "redis.username is \"" + options.username + "\" and redis.password is empty");
  }
  QUIRE_ASSIGN_OR_RETURN(std::vector<RedisAddress> seeds, ParseRedisEndpoints(options.endpoints));
  return std::unique_ptr<RedisCluster>(
      new RedisCluster(options, std::move(seeds), std::move(clock)));
}

RedisCluster::RedisCluster(const RedisTierOptions& options, std::vector<RedisAddress> seeds,
                           std::shared_ptr<Clock> clock)
    : options_(options),
      seeds_(std::move(seeds)),
      clock_(std::move(clock)),
      hello_(HelloOf(options)),
      asking_(AskingRequest()),
      resolver_(clock_) {}

RedisCluster::~RedisCluster() = default;

std::shared_ptr<RedisCluster::Node> RedisCluster::NodeAt(const RedisAddress& address) {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::shared_ptr<Node>& node = nodes_[address];
  if (node == nullptr) {
    const uint64_t seed = Hash64(address.ToString(), static_cast<uint64_t>(clock_->SteadyNs()));
    node = std::make_shared<Node>(address, seed);
  }
  return node;
}

std::shared_ptr<const RedisCluster::Map> RedisCluster::CurrentMap() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return map_;
}

void RedisCluster::MarkStale() {
  const std::lock_guard<std::mutex> guard(mutex_);
  stale_ = true;
}

void RedisCluster::NoteMoved(const std::vector<RedisRedirection>& moved) {
  if (moved.empty()) return;
  const std::lock_guard<std::mutex> guard(mutex_);
  // Also if all are known: where one slot went others went.
  stale_ = true;
  if (map_ == nullptr) return;
  const auto map = std::make_shared<Map>(*map_);
  for (const RedisRedirection& redirection : moved) {
    // A server that CLUSTER SLOTS does not name is not followed: one lying server could send our
    // password anywhere.
    const auto at = nodes_.find(redirection.to);
    if (at == nodes_.end()) continue;
    map->node_of_slot[static_cast<size_t>(redirection.slot)] = map->IndexOf(at->second);
  }
  map_ = map;
}

// Whom to ask for a map: servers that are thought to be well first.
std::vector<std::shared_ptr<RedisCluster::Node>> RedisCluster::RefreshCandidates() {
  std::vector<std::shared_ptr<Node>> candidates;
  const std::shared_ptr<const Map> map = CurrentMap();
  if (map != nullptr && map->is_cluster) candidates = map->nodes;
  for (const RedisAddress& seed : seeds_) {
    const std::shared_ptr<Node> node = NodeAt(seed);
    if (std::find(candidates.begin(), candidates.end(), node) == candidates.end())
      candidates.push_back(node);
  }
  std::stable_partition(candidates.begin(), candidates.end(),
                        [](const auto& node) { return !node->breaker.suspect(); });
  return candidates;
}

Result<std::shared_ptr<const RedisCluster::Map>> RedisCluster::AskForMap(
    const std::shared_ptr<Node>& node, int64_t deadline_ns) {
  RedisOp op;
  op.request.Add({"CLUSTER", "SLOTS"});
  op.expected = kMapExpectation;
  Assignment assignment{&op, 0, node, false};
  Round round(*this, deadline_ns, nullptr, /*may_retry=*/false);
  round.Run(std::span(&assignment, 1));
  const auto map = std::make_shared<Map>();
  if (op.status.code() == StatusCode::kIoError) {
    // "ERR This instance has cluster support disabled": one server has all.
    map->nodes = {node};
    std::fill(map->node_of_slot.begin(), map->node_of_slot.end(), uint16_t{0});
    return std::shared_ptr<const Map>(map);
  }
  QUIRE_RETURN_IF_ERROR(op.status);
  QUIRE_ASSIGN_OR_RETURN(const std::vector<RedisSlotRange> ranges,
                         ParseClusterSlots(op.replies.front(), node->address));
  map->is_cluster = true;
  for (const RedisSlotRange& range : ranges) {
    const uint16_t index = map->IndexOf(NodeAt(range.master));
    if (map->nodes.size() > kNodesMax) {
      return Status(StatusCode::kCorrupt, "Redis " + node->address.ToString() +
                                              ": its cluster has more than " +
                                              std::to_string(kNodesMax) + " masters");
    }
    const auto begin = map->node_of_slot.begin();
    std::fill(begin + range.first, begin + range.last + 1, index);
  }
  return std::shared_ptr<const Map>(map);
}

Status RedisCluster::Refresh(int64_t deadline_ns) {
  Status last(StatusCode::kUnavailable, "Redis: no server to ask");
  for (const std::shared_ptr<Node>& node : RefreshCandidates()) {
    const int64_t now_ns = clock_->SteadyNs();
    if (now_ns >= deadline_ns) break;
    // One that hangs leaves time for the next one.
    const int64_t patience_ns =
        std::min(options_.connect_timeout_ms * kNsPerMs, (deadline_ns - now_ns + 1) / 2);
    Result<std::shared_ptr<const Map>> map = AskForMap(node, now_ns + patience_ns);
    if (map.ok()) {
      const std::lock_guard<std::mutex> guard(mutex_);
      map_ = *std::move(map);
      stale_ = false;
      // Servers that left take their connections with them.
      std::erase_if(nodes_, [&](const auto& entry) {
        const auto& nodes = map_->nodes;
        return std::find(nodes.begin(), nodes.end(), entry.second) == nodes.end() &&
               std::find(seeds_.begin(), seeds_.end(), entry.first) == seeds_.end();
      });
      return Status();
    }
    last = map.status();
  }
  return last;
}

Result<std::shared_ptr<const RedisCluster::Map>> RedisCluster::EnsureMap(int64_t deadline_ns) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int64_t now_ns = clock_->SteadyNs();
    const bool is_due = stale_ && !refreshing_ && now_ns - refreshed_ns_ >= kRefreshNs;
    if (map_ != nullptr && !is_due) return map_;
    refreshing_ = true;
    refreshed_ns_ = now_ns;
  }
  // Also when memory runs out.
  struct Ended {
    ~Ended() {
      const std::lock_guard<std::mutex> guard(cluster.mutex_);
      cluster.refreshing_ = false;
    }
    RedisCluster& cluster;
  } ended{*this};
  const Status status = Refresh(deadline_ns);
  const std::lock_guard<std::mutex> guard(mutex_);
  // An old map is better than none: most of it is right.
  if (map_ == nullptr) return status;
  return map_;
}

std::vector<RedisCluster::Assignment> RedisCluster::Assign(
    std::span<RedisOp> ops, const std::vector<size_t>& which,
    const std::map<size_t, RedisAddress>& asked, const Map& map, RedisObserver* observer) {
  std::vector<Assignment> assignments;
  assignments.reserve(which.size());
  for (const size_t i : which) {
    RedisOp& op = ops[i];
    const auto ask = asked.find(i);
    std::shared_ptr<Node> node = map.at(op.slot);
    if (op.node) node = NodeAt(*op.node);
    // As with MOVED, only to servers that a map has named.
    if (ask != asked.end()) {
      const std::lock_guard<std::mutex> guard(mutex_);
      const auto at = nodes_.find(ask->second);
      node = at == nodes_.end() ? nullptr : at->second;
    }
    if (node != nullptr) {
      assignments.push_back({&op, i, std::move(node), ask != asked.end()});
      continue;
    }
    op.status = Status(StatusCode::kUnavailable,
                       "Redis: no known server has slot " + std::to_string(op.slot));
    MarkStale();
    if (observer != nullptr) observer->OnDone(i);
  }
  return assignments;
}

void RedisCluster::Execute(std::span<RedisOp> ops, int64_t deadline_ns, RedisObserver* observer) {
  std::vector<size_t> which(ops.size());
  for (size_t i = 0; i < which.size(); ++i) which[i] = i;
  std::map<size_t, RedisAddress> asked;
  const auto end_all = [&](const Status& status) {
    for (const size_t i : which) {
      ops[i].status = status;
      if (observer != nullptr) observer->OnDone(i);
    }
  };
  // Once more at most: who was redirected twice had better compute.
  for (const bool may_retry : {true, false}) {
    if (which.empty()) return;
    if (clock_->SteadyNs() >= deadline_ns)
      return end_all(Status(StatusCode::kTimeout, "Redis: the deadline has passed"));
    const Result<std::shared_ptr<const Map>> map = EnsureMap(deadline_ns);
    if (!map.ok()) return end_all(map.status());
    std::vector<Assignment> assignments = Assign(ops, which, asked, **map, observer);
    Round round(*this, deadline_ns, observer, may_retry);
    round.Run(assignments);
    NoteMoved(round.moved);
    which = std::move(round.again);
    // In the order in which they were given, layer by layer.
    std::sort(which.begin(), which.end());
    asked = std::move(round.asked);
  }
}

Result<std::vector<RedisAddress>> RedisCluster::Masters(int64_t deadline_ns) {
  QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<const Map> map, EnsureMap(deadline_ns));
  std::vector<RedisAddress> addresses;
  for (size_t i = 0; i < map->nodes.size(); ++i) {
    const auto& slots = map->node_of_slot;
    if (std::find(slots.begin(), slots.end(), static_cast<uint16_t>(i)) != slots.end())
      addresses.push_back(map->nodes[i]->address);
  }
  return addresses;
}

bool RedisCluster::available() const {
  const int64_t now_ns = clock_->SteadyNs();
  const std::lock_guard<std::mutex> guard(mutex_);
  if (nodes_.empty()) return true;
  return std::any_of(nodes_.begin(), nodes_.end(),
                     [&](const auto& entry) { return entry.second->breaker.available(now_ns); });
}

}  // namespace quire
