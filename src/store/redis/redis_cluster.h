// RedisCluster: commands to the servers that have their keys: one Redis, or the masters of a Redis
// Cluster. It knows which server has which slot, and asks again when that was wrong.
#ifndef QUIRE_STORE_REDIS_REDIS_CLUSTER_H_
#define QUIRE_STORE_REDIS_REDIS_CLUSTER_H_

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
#include "store/redis/redis_op.h"
#include "store/redis/redis_round.h"

namespace quire {

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
  struct Map;

  RedisCluster(const RedisTierOptions& options, std::shared_ptr<const TlsContext> tls,
               std::vector<RedisAddress> seeds, std::shared_ptr<Clock> clock);
  std::shared_ptr<RedisNode> NodeAt(const RedisAddress& address);
  std::shared_ptr<const Map> CurrentMap() const;
  // The map, asked for again if there is none or it was found wrong.
  Result<std::shared_ptr<const Map>> EnsureMap(int64_t deadline_ns);
  Status Refresh(int64_t deadline_ns);
  std::vector<std::shared_ptr<RedisNode>> RefreshCandidates();
  Result<std::shared_ptr<const Map>> AskForMap(const std::shared_ptr<RedisNode>& node,
                                               int64_t deadline_ns);
  void MarkStale();
  void NoteMoved(const std::vector<RedisRedirection>& moved);
  std::vector<RedisAssignment> Assign(std::span<RedisOp> ops, const std::vector<size_t>& which,
                                      const std::map<size_t, RedisAddress>& asked, const Map& map,
                                      RedisObserver* observer);

  const RedisClient client_;
  const std::vector<RedisAddress> seeds_;

  mutable std::mutex mutex_;  // guards what follows; held for no I/O
  std::map<RedisAddress, std::shared_ptr<RedisNode>> nodes_;
  std::shared_ptr<const Map> map_;
  bool stale_ = false;
  bool refreshing_ = false;
  int64_t refreshed_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_CLUSTER_H_
