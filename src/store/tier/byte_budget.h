// ByteBudget: how many bytes may be out at a time.
#ifndef QUIRE_STORE_TIER_BYTE_BUDGET_H_
#define QUIRE_STORE_TIER_BYTE_BUDGET_H_

#include <atomic>
#include <cstdint>

namespace quire {

class ByteBudget {
 public:
  explicit ByteBudget(int64_t bytes_max) : bytes_max_(bytes_max) {}
  bool Take(int64_t bytes) noexcept {
    int64_t used = used_.load();
    do {
      if (bytes > bytes_max_ - used) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes));
    return true;
  }
  void Give(int64_t bytes) noexcept { used_ -= bytes; }
  int64_t used() const noexcept { return used_; }
  int64_t left() const noexcept { return bytes_max_ - used_; }

 private:
  const int64_t bytes_max_;
  std::atomic<int64_t> used_{0};
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_BYTE_BUDGET_H_
