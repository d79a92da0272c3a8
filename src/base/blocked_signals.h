// Threads of Quire take no signals: the host's handlers run on the host's threads.
#ifndef QUIRE_BASE_BLOCKED_SIGNALS_H_
#define QUIRE_BASE_BLOCKED_SIGNALS_H_

#include <signal.h>

namespace quire {

// While it lives, new threads start with all signals blocked.
class ScopedBlockedSignals {
 public:
  ScopedBlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~ScopedBlockedSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  ScopedBlockedSignals(const ScopedBlockedSignals&) = delete;
  ScopedBlockedSignals& operator=(const ScopedBlockedSignals&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace quire

#endif  // QUIRE_BASE_BLOCKED_SIGNALS_H_
