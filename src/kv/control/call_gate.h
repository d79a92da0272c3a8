// CallGate: which calls may be inside a state at the same time. There is one call at most. Queries
// of other threads may come at any time; they wait for calls that change what they read.
#ifndef QUIRE_KV_CONTROL_CALL_GATE_H_
#define QUIRE_KV_CONTROL_CALL_GATE_H_

#include <atomic>
#include <mutex>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "quire/status.h"

namespace quire {

class CallGate {
 public:
  // Runs the body of a call. BadState if another call is inside; std::bad_alloc becomes
  // OutOfMemory.
  template <typename F>
  std::invoke_result_t<F> Enter(const char* call, F&& body) const {
    return GuardEntry([&]() -> std::invoke_result_t<F> {
      if (busy_.exchange(true, std::memory_order_acquire)) return Busy(call);
      struct Leave {
        std::atomic<bool>& busy;
        ~Leave() { busy.store(false, std::memory_order_release); }
      } leave{busy_};
      return body();
    });
  }
  // The same for a call that changes what queries read: they wait until it returns.
  template <typename F>
  std::invoke_result_t<F> EnterAlone(const char* call, F&& body) const {
    return Enter(call, [&]() -> std::invoke_result_t<F> {
      const std::lock_guard lock(asking_);
      return body();
    });
  }
  // A call in two halves: it is inside, as in EnterAlone, from an Open that worked until Close,
  // which the same thread calls.
  Status Open(const char* call) const {
    if (busy_.exchange(true, std::memory_order_acquire)) return Busy(call);
    asking_.lock();
    return Status();
  }
  void Close() const noexcept {
    QUIRE_DCHECK(busy_.load(std::memory_order_relaxed)) << "no call is inside";
    asking_.unlock();
    busy_.store(false, std::memory_order_release);
  }
  // Runs the body of a query. Calls of Enter go on meanwhile.
  template <typename F>
  std::invoke_result_t<F> Ask(F&& body) const {
    return GuardEntry([&]() -> std::invoke_result_t<F> {
      const std::lock_guard lock(asking_);
      return body();
    });
  }
  // The same for a query that neither fails nor allocates, and for a part of a call: what
  // EnterAlone holds, until the lock is destroyed.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> Lock() const {
    return std::unique_lock(asking_);
  }

 private:
  static Status Busy(const char* call);

  mutable std::atomic<bool> busy_ = false;  // a call is inside
  // Recursive: what a call calls, for example a LayerSink, may ask.
  mutable std::recursive_mutex asking_;
};

}  // namespace quire

#endif  // QUIRE_KV_CONTROL_CALL_GATE_H_
