// CircuitBreaker: keeps calls away from a server that does not answer, so that an outage costs one
// call now and then its deadline, and all others nothing.
#ifndef QUIRE_STORE_CIRCUIT_BREAKER_H_
#define QUIRE_STORE_CIRCUIT_BREAKER_H_

#include <array>
#include <cstdint>
#include <mutex>

namespace quire {

// All calls from any thread. Moments are those of a Clock's SteadyNs.
class CircuitBreaker {
 public:
  // `seed`: of the jitter, so that many clients do not come back in one moment.
  explicit CircuitBreaker(uint64_t seed) : seed_(seed) {}

  // Whether a call may go out now. While open one call is let through when the back-off is over:
  // the probe; what is reported of it decides. Each call that was let through reports once.
  bool Admit(int64_t now_ns);
  // The server answered. `late`: after the call's deadline.
  void Succeeded(int64_t now_ns, bool late);
  // It did not, or not sense.
  void Failed(int64_t now_ns, bool late);
  // The call ended for a reason that says nothing about the server.
  void Abandoned();

  // Whether a call would be let through. For statistics and for choosing among servers.
  bool available(int64_t now_ns) const;
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

  void Note(bool late);
  void Open(int64_t now_ns);

  mutable std::mutex mutex_;
  const uint64_t seed_;
  uint64_t draws_ = 0;
  int failures_ = 0;  // in a row
  std::array<bool, kWindow> late_{};
  int late_at_ = 0, late_count_ = 0, noted_ = 0;
  bool open_ = false;
  bool probing_ = false;
  int64_t back_off_ns_ = 0;
  int64_t probe_at_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_CIRCUIT_BREAKER_H_
