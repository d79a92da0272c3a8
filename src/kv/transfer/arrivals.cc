#include "kv/transfer/arrivals.h"

#include "base/guard.h"

namespace quire {

Result<ReceiveView> Arrivals::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  return GuardEntry([&] { return arriving().View(epoch, layer, part); });
}

Status Arrivals::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part, uint32_t digest) {
  return GuardEntry([&] { return arriving().Complete(epoch, layer, part, digest); });
}

Status Arrivals::FailReceive(uint64_t epoch, const Status& why) {
  return GuardEntry([&] { return arriving().Fail(epoch, why); });
}

Result<ReceiveProgress> Arrivals::GetReceiveProgress(uint64_t epoch) const {
  return GuardEntry([&] { return arriving().Progress(epoch); });
}

Status Arrivals::WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const {
  return GuardEntry([&] { return arriving().Wait(epoch, n, clock, until_ns); });
}

}  // namespace quire
