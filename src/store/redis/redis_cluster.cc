#include "store/redis/redis_cluster.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "net/socket.h"

namespace quire {
namespace {

// A map that was found wrong is asked for at most this often: a storm of MOVED, or a master that is
// down until its replica takes over, must not become a storm of ours.
constexpr int64_t kRefreshNs = 100 * kNsPerMs;
// 16384 slots in ranges of one each, with a handful of replicas, are the longest reply there can
// be.
constexpr RespExpectation kMapExpectation = {.bytes_max = 4 << 20, .items_max = 1 << 18};
constexpr size_t kNodesMax = 1000;  // what Redis Cluster is made for
constexpr uint16_t kNoNode = 0xFFFF;

Status CheckTls(const RedisTierOptions& options, const std::vector<RedisAddress>& seeds) {
  const auto bad = [](const std::string& what) { return Status(StatusCode::kBadArgument, what); };
  const std::pair<const char*, const std::string*> texts[] = {
      {"tls_ca_file", &options.tls_ca_file},
      {"tls_cert_file", &options.tls_cert_file},
      {"tls_key_file", &options.tls_key_file},
      {"tls_server_name", &options.tls_server_name}};
  for (const auto& [name, text] : texts) {
    if (!options.tls && !text->empty())
      return bad("redis." + std::string(name) + " is \"" + *text + "\" and redis.tls is off");
  }
  if (!options.tls && !options.tls_verify) return bad("redis.tls_verify and redis.tls are off");
  for (const RedisAddress& seed : seeds) {
    if (options.tls && seed.port == 0)
      return bad("redis.tls is on, and " + seed.ToString() + " is a socket without TLS");
  }
  return Status();
}

}  // namespace

// The node of each slot. Never changed once others see it.
struct RedisCluster::Map {
  bool is_cluster = false;
  std::vector<std::shared_ptr<RedisNode>> nodes;
  std::vector<uint16_t> node_of_slot = std::vector<uint16_t>(kRedisSlotCount, kNoNode);

  std::shared_ptr<RedisNode> at(int slot) const {
    const uint16_t index = node_of_slot[static_cast<size_t>(slot)];
    return index == kNoNode ? nullptr : nodes[index];
  }
  uint16_t IndexOf(const std::shared_ptr<RedisNode>& node) {
    const auto at = std::find(nodes.begin(), nodes.end(), node);
    const auto index = static_cast<uint16_t>(at - nodes.begin());
    if (at == nodes.end()) nodes.push_back(node);
    return index;
  }
};

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
  QUIRE_RETURN_IF_ERROR(CheckTls(options, seeds));
  std::shared_ptr<const TlsContext> tls;
  if (options.tls) {
    QUIRE_ASSIGN_OR_RETURN(tls, TlsContext::Create({.prefix = "redis.tls",
                                                    .verify = options.tls_verify,
                                                    .ca_file = options.tls_ca_file,
                                                    .cert_file = options.tls_cert_file,
                                                    .key_file = options.tls_key_file,
                                                    .server_name = options.tls_server_name}));
  }
  return std::unique_ptr<RedisCluster>(
      new RedisCluster(options, std::move(tls), std::move(seeds), std::move(clock)));
}

RedisCluster::RedisCluster(const RedisTierOptions& options, std::shared_ptr<const TlsContext> tls,
                           std::vector<RedisAddress> seeds, std::shared_ptr<Clock> clock)
    : client_(options, std::move(tls), std::move(clock)), seeds_(std::move(seeds)) {}

RedisCluster::~RedisCluster() = default;

std::shared_ptr<RedisNode> RedisCluster::NodeAt(const RedisAddress& address) {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::shared_ptr<RedisNode>& node = nodes_[address];
  if (node == nullptr) node = std::make_shared<RedisNode>(address, client_.clock);
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

// The servers to ask for a map: those that are thought to be well first.
std::vector<std::shared_ptr<RedisNode>> RedisCluster::RefreshCandidates() {
  std::vector<std::shared_ptr<RedisNode>> candidates;
  const std::shared_ptr<const Map> map = CurrentMap();
  if (map != nullptr && map->is_cluster) candidates = map->nodes;
  for (const RedisAddress& seed : seeds_) {
    const std::shared_ptr<RedisNode> node = NodeAt(seed);
    if (std::find(candidates.begin(), candidates.end(), node) == candidates.end())
      candidates.push_back(node);
  }
  std::stable_partition(candidates.begin(), candidates.end(),
                        [](const auto& node) { return !node->breaker.suspect(); });
  return candidates;
}

Result<std::shared_ptr<const RedisCluster::Map>> RedisCluster::AskForMap(
    const std::shared_ptr<RedisNode>& node, int64_t deadline_ns) {
  RedisOp op;
  op.request.Add({"CLUSTER", "SLOTS"});
  op.expected = kMapExpectation;
  RedisAssignment assignment{&op, 0, node, false};
  RedisRound round(client_, deadline_ns, nullptr, /*may_retry=*/false);
  round.Run(std::span(&assignment, 1));
  if (round.map_is_wrong) MarkStale();
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
  for (const std::shared_ptr<RedisNode>& node : RefreshCandidates()) {
    const int64_t now_ns = client_.clock->SteadyNs();
    if (now_ns >= deadline_ns) break;
    // One that hangs leaves time for the next one.
    const int64_t patience_ns =
        std::min(client_.options.connect_timeout_ms * kNsPerMs, (deadline_ns - now_ns) / 2 + 1);
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
    const int64_t now_ns = client_.clock->SteadyNs();
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

std::vector<RedisAssignment> RedisCluster::Assign(std::span<RedisOp> ops,
                                                  const std::vector<size_t>& which,
                                                  const std::map<size_t, RedisAddress>& asked,
                                                  const Map& map, RedisObserver* observer) {
  std::vector<RedisAssignment> assignments;
  assignments.reserve(which.size());
  for (const size_t i : which) {
    RedisOp& op = ops[i];
    const auto ask = asked.find(i);
    std::shared_ptr<RedisNode> node = map.at(op.slot);
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
  // At most one retry: after two redirections, computing is the better choice.
  for (const bool may_retry : {true, false}) {
    if (which.empty()) return;
    if (client_.clock->SteadyNs() >= deadline_ns)
      return end_all(Status(StatusCode::kTimeout, "Redis: the deadline has passed"));
    const Result<std::shared_ptr<const Map>> map = EnsureMap(deadline_ns);
    if (!map.ok()) return end_all(map.status());
    std::vector<RedisAssignment> assignments = Assign(ops, which, asked, **map, observer);
    RedisRound round(client_, deadline_ns, observer, may_retry);
    round.Run(assignments);
    NoteMoved(round.moved);
    if (round.map_is_wrong) MarkStale();
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
  const std::lock_guard<std::mutex> guard(mutex_);
  if (nodes_.empty()) return true;
  return std::any_of(nodes_.begin(), nodes_.end(),
                     [&](const auto& entry) { return entry.second->breaker.available(); });
}

}  // namespace quire
