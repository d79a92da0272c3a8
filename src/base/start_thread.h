// A thread of Quire that may not come to be.
#ifndef QUIRE_BASE_START_THREAD_H_
#define QUIRE_BASE_START_THREAD_H_

#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/blocked_signals.h"
#include "quire/status.h"

namespace quire {

inline Status NoThread(const char* what, const std::system_error& error) {
  return Status(StatusCode::kUnavailable,
                std::string("the system gives no thread for ") + what + ": " + error.what() +
                    "; raise the limit of processes (ulimit -u, pids.max), or let fewer run");
}

// Starts `run` as a thread that takes no signals. Unavailable when the system has none to give;
// `what` names the thread then.
template <typename F>
Status StartThread(const char* what, std::thread* thread, F&& run) {
  const ScopedBlockedSignals blocked;
  try {
    *thread = std::thread(std::forward<F>(run));
  } catch (const std::system_error& error) {
    return NoThread(what, error);
  }
  return Status();
}

// The same for an object with threads of its own, which `make` makes: what it returns, or why not.
template <typename F>
Result<std::invoke_result_t<F>> ThreadOrStatus(const char* what, F&& make) {
  const ScopedBlockedSignals blocked;
  try {
    return std::forward<F>(make)();
  } catch (const std::system_error& error) {
    return NoThread(what, error);
  }
}

}  // namespace quire

#endif  // QUIRE_BASE_START_THREAD_H_
