// RedisNode: one server, the circuit breaker in front of it and the connections to it that wait for
// their next use.
#ifndef QUIRE_STORE_REDIS_REDIS_NODE_H_
#define QUIRE_STORE_REDIS_REDIS_NODE_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "net/circuit_breaker.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_slots.h"

namespace quire {

// All calls from any thread.
class RedisNode {
 public:
  RedisNode(RedisAddress where, std::shared_ptr<Clock> clock)
      : address(std::move(where)), breaker(std::move(clock), address.ToString()) {}

  // A connection that was used before and still stands, or null.
  std::unique_ptr<RedisConnection> TakeSpare() {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (!spares_.empty()) {
      std::unique_ptr<RedisConnection> spare = std::move(spares_.back());
      spares_.pop_back();
      if (!spare->IsStale()) return spare;
    }
    return nullptr;
  }
  void PutBack(std::unique_ptr<RedisConnection> connection) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (spares_.size() < kSpareConnectionsMax) spares_.push_back(std::move(connection));
  }
  // After a failure: the others were connected to the same process.
  void DropSpares() {
    const std::lock_guard<std::mutex> guard(mutex_);
    spares_.clear();
  }

  const RedisAddress address;
  CircuitBreaker breaker;

 private:
  static constexpr size_t kSpareConnectionsMax = 8;  // about as many as there are workers

  std::mutex mutex_;
  std::vector<std::unique_ptr<RedisConnection>> spares_;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_NODE_H_
