// RedisCluster: commands to the servers that have their keys: one Redis, or the masters of a Redis
// Cluster. Pipelined, all servers at once, with a circuit breaker and spare connections for each.
#ifndef QUIRE_STORE_REDIS_CLUSTER_H_
#define QUIRE_STORE_REDIS_CLUSTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "quire/chunk_store.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "store/host_resolver.h"
#include "store/redis_slots.h"
#include "store/resp.h"

namespace quire {

// Commands that go to one server one behind the other, and what became of them.
struct RedisOp {
  int slot = 0;
  std::optional<RedisAddress> node{};  // goes there, whatever the slot
  RedisRequest request{};
  RespExpectation expected{};  // of each reply; place: REQUIRES one command
  int64_t reply_bytes = 0;     // about; limits how many are asked for ahead

  // Out. Ok: no command gave an error, and `replies` has one for each. Full: the server's memory
  // is; Corrupt: the key is of another type; Timeout, Unavailable (also for replies that make no
  // sense), Cancelled; IoError: any other error of the server, in the message.
  Status status{};
  std::vector<RespValue> replies{};
};

// Hears of the ops of one Execute, from the thread that called it.
class RedisObserver {
 public:
  virtual ~RedisObserver() = default;
  // The first `count` bytes of op i's place have come. They never come again.
  virtual void OnPlaced(size_t i, size_t count) = 0;
  // Op i is over: its status and reply stand. Once per op.
  virtual void OnDone(size_t i) = 0;
  // Asked before an op goes out: true: it ends as Cancelled.
  virtual bool Cancelled(size_t i) = 0;
};

// All calls from any thread. No call waits beyond its deadline, or longer than the options'
// time-out for a sign of life.
class RedisCluster {
 public:
  // BadArgument for an option.
  static Result<std::unique_ptr<RedisCluster>> Create(const RedisTierOptions& options,
                                                      std::shared_ptr<Clock> clock);
  ~RedisCluster();

  // Ops on one server keep their order, except those that are redirected: they go out once more
  // behind the others. Returns when all are over.
  void Execute(std::span<RedisOp> ops, int64_t deadline_ns, RedisObserver* observer = nullptr);
  // The servers that have slots.
  Result<std::vector<RedisAddress>> Masters(int64_t deadline_ns);
  // Whether some server may be asked now: false while all breakers are open.
  bool available() const;

 private:
  struct Node;
  struct Map;
  struct Assignment;
  struct Lane;
  class Round;

  RedisCluster(const RedisTierOptions& options, std::vector<RedisAddress> seeds,
               std::shared_ptr<Clock> clock);
  std::shared_ptr<Node> NodeAt(const RedisAddress& address);
  std::shared_ptr<const Map> CurrentMap() const;
  // The map, asked for anew if there is none or it was found wrong.
  Result<std::shared_ptr<const Map>> EnsureMap(int64_t deadline_ns);
  Status Refresh(int64_t deadline_ns);
  std::vector<std::shared_ptr<Node>> RefreshCandidates();
  Result<std::shared_ptr<const Map>> AskForMap(const std::shared_ptr<Node>& node,
                                               int64_t deadline_ns);
  void MarkStale();
  void NoteMoved(const std::vector<RedisRedirection>& moved);
  std::vector<Assignment> Assign(std::span<RedisOp> ops, const std::vector<size_t>& which,
                                 const std::map<size_t, RedisAddress>& asked, const Map& map,
                                 RedisObserver* observer);

  const RedisTierOptions options_;
  const std::vector<RedisAddress> seeds_;
  const std::shared_ptr<Clock> clock_;
  const RedisRequest hello_;   // what a connection begins with; empty without a password
  const RedisRequest asking_;  // goes before what ASK sent to a server
  HostResolver resolver_;

  mutable std::mutex mutex_;  // guards what follows; held for no I/O
  std::map<RedisAddress, std::shared_ptr<Node>> nodes_;
  std::shared_ptr<const Map> map_;
  bool stale_ = false;
  bool refreshing_ = false;
  int64_t refreshed_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_CLUSTER_H_
