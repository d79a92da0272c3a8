// The side of a Handover that keeps the entry: the buffer of this process, or the connection to one
// of another.
#ifndef QUIRE_BUFFERS_HANDOVER_LEDGER_H_
#define QUIRE_BUFFERS_HANDOVER_LEDGER_H_

#include <cstdint>

#include "quire/lookup_buffer.h"

namespace quire {

// Each id ends with exactly one of the two calls.
class Handover::Ledger {
 public:
  virtual ~Ledger() = default;
  virtual LookupEntry Complete(int64_t id) noexcept = 0;
  virtual void Fail(int64_t id) noexcept = 0;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_HANDOVER_LEDGER_H_
