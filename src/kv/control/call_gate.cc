#include "kv/control/call_gate.h"

#include <string>

namespace quire {

Status CallGate::Busy(const char* call) {
  return Status(StatusCode::kBadState, std::string(call) +
                                           ": another call on this state is running; make calls "
                                           "from one thread at a time");
}

}  // namespace quire
