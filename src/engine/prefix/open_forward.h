// A forward that is aborted unless it is ended: whichever way a step is left, the cache is IDLE
// behind it.
#ifndef QUIRE_ENGINE_PREFIX_OPEN_FORWARD_H_
#define QUIRE_ENGINE_PREFIX_OPEN_FORWARD_H_

#include "base/check.h"
#include "quire/kv_state.h"

namespace quire {

// Made right after BeginForward.
class OpenForward {
 public:
  explicit OpenForward(KVState* state) : state_(state) {}
  OpenForward(const OpenForward&) = delete;
  OpenForward& operator=(const OpenForward&) = delete;
  ~OpenForward() {
    if (state_ == nullptr) return;
    const Status status = state_->AbortForward();
    QUIRE_CHECK(status.ok()) << status.ToString();
  }

  Status End() {
    QUIRE_RETURN_IF_ERROR(state_->EndForward());
    state_ = nullptr;
    return {};
  }

 private:
  KVState* state_;  // null when ended
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PREFIX_OPEN_FORWARD_H_
