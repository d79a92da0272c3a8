// The lookup buffer of this process, with queries that wait without a thread: what a server of many
// consumers needs.
#ifndef QUIRE_BUFFERS_LOCAL_LOOKUP_BUFFER_H_
#define QUIRE_BUFFERS_LOCAL_LOOKUP_BUFFER_H_

#include <functional>
#include <memory>
#include <optional>

#include "quire/lookup_buffer.h"

namespace quire {

// A query that waits. One thread at a time.
class PendingTake {
 public:
  virtual ~PendingTake() = default;  // an entry that came and was not polled goes back
  // nullopt while nothing matches; Closed. REQUIRES: it returned no entry before.
  virtual Result<std::optional<Handover>> Poll() = 0;
};

class LocalLookupBuffer : public LookupBuffer {
 public:
  static Result<std::unique_ptr<LocalLookupBuffer>> Create(const LookupBufferOptions& options);

  // Waits as Take does, in the same order. `wake` is called when Poll has something to tell, on
  // any thread and with the buffer's lock held: it must not throw, block or call the buffer.
  virtual Result<std::unique_ptr<PendingTake>> StartTake(const LookupQuery& query,
                                                         std::function<void()> wake) = 0;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_LOCAL_LOOKUP_BUFFER_H_
