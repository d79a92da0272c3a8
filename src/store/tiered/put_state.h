// PutState: what became of a put, for the thread that waits and the tiers that report.
#ifndef QUIRE_STORE_TIERED_PUT_STATE_H_
#define QUIRE_STORE_TIERED_PUT_STATE_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "quire/chunk_store.h"

namespace quire {

class PutState final : public ChunkPut {
 public:
  // Done once each of `reports` tiers has called Report.
  PutState(std::shared_ptr<Clock> clock, int reports)
      : clock_(std::move(clock)), reports_(reports) {}

  bool done() const override {
    const std::lock_guard lock(mutex_);
    return reports_ == 0;
  }
  bool Wait(int64_t until_ns) override {
    std::unique_lock lock(mutex_);
    return WaitUntil(*clock_, changed_, lock, until_ns, [&] { return reports_ == 0; });
  }
  Status status() const override {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  void Report(const Status& status) noexcept {
    const std::lock_guard lock(mutex_);
    if (!status.ok()) status_ = status;
    --reports_;
    changed_.notify_all();
  }

 private:
  const std::shared_ptr<Clock> clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int reports_;
  Status status_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_PUT_STATE_H_
