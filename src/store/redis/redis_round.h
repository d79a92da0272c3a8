// RedisRound: one pass of ops over connections to several servers at once: pipelined, each op comes
// to an end or is told to go elsewhere.
#ifndef QUIRE_STORE_REDIS_REDIS_ROUND_H_
#define QUIRE_STORE_REDIS_REDIS_ROUND_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "net/host_resolver.h"
#include "quire/chunk_store.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "store/redis/redis_node.h"
#include "store/redis/redis_op.h"

namespace quire {

// What all rounds of one client have in common.
struct RedisClient {
  RedisClient(const RedisTierOptions& tier_options, std::shared_ptr<const TlsContext> tls_context,
              std::shared_ptr<Clock> steady);

  const RedisTierOptions options;
  const std::shared_ptr<const TlsContext> tls;  // null: none
  const std::shared_ptr<Clock> clock;
  const RedisRequest hello;   // what a connection begins with; empty without a password
  const RedisRequest asking;  // goes before what ASK sent to a server
  mutable HostResolver resolver;
};

struct RedisAssignment {
  RedisOp* op;
  size_t index;  // in all ops
  std::shared_ptr<RedisNode> node;
  bool asking;  // the server takes it only behind ASKING
};

// From one thread, once.
class RedisRound {
 public:
  // `may_retry`: ops may be told to go elsewhere.
  RedisRound(const RedisClient& client, int64_t deadline_ns, RedisObserver* observer,
             bool may_retry)
      : client_(client),
        clock_(*client.clock),
        deadline_ns_(deadline_ns),
        observer_(observer),
        may_retry_(may_retry) {}

  void Run(std::span<RedisAssignment> assignments);

  // Ops that are worth another pass, and where ASK sent them.
  std::vector<size_t> again;
  std::map<size_t, RedisAddress> asked;
  std::vector<RedisRedirection> moved;
  bool map_is_wrong = false;  // a server is gone, or is not the one that has the slots

 private:
  // Bytes of replies that were asked for and have not come. They keep a server busy while one is
  // received; the limit bounds what the server must hold for us.
  static constexpr int64_t kAheadBytes = int64_t{4} << 20;

  // What one connection has to do.
  struct Exchange {
    enum class State : uint8_t { kConnecting, kOpen, kOver };

    // Requests that were sent and whose replies come in order.
    struct Step {
      const RedisRequest* prefix = nullptr;  // ASKING
      const RedisRequest* request = nullptr;
      RedisAssignment* assignment = nullptr;  // null: the greeting
      int64_t prefix_replies = 0;
      int64_t replies = 0;  // that have not come
      std::string error = {};
      size_t bytes() const { return (prefix != nullptr ? prefix->bytes() : 0) + request->bytes(); }
      int64_t reply_bytes() const {
        return assignment != nullptr ? assignment->op->reply_bytes : 0;
      }
    };

    std::shared_ptr<RedisNode> node;
    std::optional<CircuitBreaker::Call> call;  // until it is over
    std::unique_ptr<RedisConnection> connection;
    State state = State::kConnecting;
    bool reused = false;
    bool outage = false;  // it answers, but serves nobody
    std::vector<Step> steps;
    size_t sending = 0, sent_bytes = 0;  // step, and bytes of it
    size_t receiving = 0;
    int64_t ahead_bytes = 0;
    size_t placed = 0;
    int64_t alive_ns = 0;  // last sign of life

    bool all_sent() const { return sending == steps.size(); }
    bool finished() const { return receiving == steps.size(); }
    bool may_send() const {
      return !all_sent() && (sent_bytes > 0 || sending == receiving || ahead_bytes < kAheadBytes);
    }
  };

  void OpenExchange(const std::shared_ptr<RedisNode>& node,
                    std::span<RedisAssignment* const> assignments);
  void PlanSteps(Exchange& exchange, std::span<RedisAssignment* const> assignments);
  void End(RedisAssignment& assignment, Status status);
  void Fail(Exchange& exchange, const Status& status);
  void Finish(Exchange& exchange);
  void AbandonIfCancelled(Exchange& exchange);
  int64_t PatienceNs(const Exchange& exchange) const;
  const char* WhatIsLate(const Exchange& exchange) const;
  void Wait();
  void Send(Exchange& exchange);
  Status SendSome(Exchange& exchange, bool* is_full);
  bool SkipCancelled(Exchange& exchange);
  void Receive(Exchange& exchange);
  Status TakeReplies(Exchange& exchange);
  Status TakeReply(Exchange& exchange, RespValue reply);
  void Conclude(Exchange& exchange, Exchange::Step& step);
  Status At(const Exchange& exchange, const Status& status) const;

  const RedisClient& client_;
  Clock& clock_;
  const int64_t deadline_ns_;
  RedisObserver* const observer_;
  const bool may_retry_;
  std::vector<Exchange> exchanges_;
  std::vector<std::span<const std::byte>> spans_;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_ROUND_H_
