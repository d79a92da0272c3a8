// RedisOp: commands for one server, and what becomes of them; RedisObserver: is told of that.
#ifndef QUIRE_STORE_REDIS_REDIS_OP_H_
#define QUIRE_STORE_REDIS_REDIS_OP_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "quire/status.h"
#include "store/redis/redis_slots.h"
#include "store/redis/resp.h"

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

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_OP_H_
