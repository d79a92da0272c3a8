// Arrivals: the calls of KVTransfer that channels make for a reservation, from any thread. They are
// the same for a cache and for a composite state, and do not go through the state's gate.
#ifndef QUIRE_KV_TRANSFER_ARRIVALS_H_
#define QUIRE_KV_TRANSFER_ARRIVALS_H_

#include <cstdint>

#include "kv/transfer/pending_receives.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class Arrivals : public KVTransfer {
 public:
  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) final;
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part, uint32_t digest) final;
  Status FailReceive(uint64_t epoch, const Status& why) final;
  Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const final;
  Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const final;

 private:
  virtual PendingReceives& arriving() noexcept = 0;
  virtual const PendingReceives& arriving() const noexcept = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_ARRIVALS_H_
