#include "base/clock.h"

#include <chrono>

namespace quire {
namespace {

class MachineClock final : public Clock {
 public:
  int64_t WallMs() const noexcept override {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
  int64_t SteadyNs() const noexcept override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void Wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
            int64_t until_ns) override {
    if (until_ns == kNever) {
      changed.wait(lock);
    } else {
      changed.wait_until(lock,
                         std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until_ns)));
    }
  }
};

}  // namespace

std::shared_ptr<Clock> MachineTime() { return std::make_shared<MachineClock>(); }

}  // namespace quire
