// CircuitBreaker: keeps calls away from what does not answer (a tier of the store, one server of a
// Redis Cluster), so that an outage costs one call now and then its deadline, and all others
// nothing.
#ifndef QUIRE_NET_CIRCUIT_BREAKER_H_
#define QUIRE_NET_CIRCUIT_BREAKER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// All calls from any thread.
class CircuitBreaker {
 public:
  // A call that was let through. What it reports first counts; one that ends without a report says
  // nothing. REQUIRES: it ends before the breaker.
  class Call {
   public:
    Call(Call&& other) noexcept
        : breaker_(std::exchange(other.breaker_, nullptr)),
          begin_ns_(other.begin_ns_),
          deadline_ns_(other.deadline_ns_),
          probe_(other.probe_) {}
    Call& operator=(Call&&) = delete;
    ~Call() { End(Outcome::kUnknown, false, 0); }
    // How the call ended. Unavailable, and Timeout of a call that had time enough, are failures of
    // the peer; Cancelled, OutOfMemory and Timeout of a call without time say nothing about it;
    // anything else is an answer, if a little late.
    void Report(const Status& status) noexcept;

   private:
    friend class CircuitBreaker;
    enum class Outcome : uint8_t { kAnswered, kFailed, kUnknown };
    static Outcome OutcomeOf(const Status& status, bool was_patient);
    void End(Outcome outcome, bool late, int64_t now_ns) noexcept;
    Call(CircuitBreaker* breaker, int64_t begin_ns, int64_t deadline_ns, uint64_t probe)
        : breaker_(breaker), begin_ns_(begin_ns), deadline_ns_(deadline_ns), probe_(probe) {}

    CircuitBreaker* breaker_;
    const int64_t begin_ns_;
    const int64_t deadline_ns_;
    const uint64_t probe_;  // 0: none
  };

  // `name`: part of the seed of the jitter, so that many clients do not come back in one moment.
  CircuitBreaker(std::shared_ptr<Clock> clock, std::string_view name);

  // Nothing while calls are kept away. While open one call is let through when the back-off is
  // over: the probe, which decides. Moments are the clock's SteadyNs.
  std::optional<Call> Admit(int64_t deadline_ns);

  // Whether a call would be let through. For statistics and for choosing among servers.
  bool available() const;
  bool open() const;
  // Open, or its last call failed.
  bool suspect() const;

 private:
  // Three failures in a row are no accident; one is what a restart looks like.
  static constexpr int kFailuresMax = 3;
  // p99: more than one call in a hundred late, seen over enough calls.
  static constexpr int kWindow = 200;
  static constexpr int kLateMax = kWindow / 100;
  static constexpr int64_t kBackOffMinNs = 100'000'000;
  static constexpr int64_t kBackOffMaxNs = 10'000'000'000;
  // What a lookup may take. A caller in a greater hurry than that tells nothing.
  static constexpr int64_t kPatienceNs = 20'000'000;

  void Answered(bool is_probe, bool late, int64_t now_ns);
  void Failed(bool is_probe, bool late, int64_t now_ns);
  void Note(bool late);
  bool IsOftenLate() const { return noted_ == kWindow && late_count_ > kLateMax; }
  void Open(int64_t now_ns);

  const std::shared_ptr<Clock> clock_;
  const uint64_t seed_;
  mutable std::mutex mutex_;
  uint64_t draws_ = 0;
  int failures_ = 0;  // in a row
  std::array<bool, kWindow> late_{};
  int late_at_ = 0, late_count_ = 0, noted_ = 0;
  bool open_ = false;
  uint64_t probe_count_ = 0;  // the last probe's number
  uint64_t probing_ = 0;      // that of the one under way; 0: none
  int64_t back_off_ns_ = 0;
  int64_t probe_at_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_NET_CIRCUIT_BREAKER_H_
