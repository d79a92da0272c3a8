#include "store/circuit_breaker.h"

#include <algorithm>

#include "base/random.h"

namespace quire {

bool CircuitBreaker::Admit(int64_t now_ns) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!open_) return true;
  if (probing_ || now_ns < probe_at_ns_) return false;
  probing_ = true;
  return true;
}

void CircuitBreaker::Note(bool late) {
  bool& slot = late_[static_cast<size_t>(late_at_)];
  late_count_ += static_cast<int>(late) - static_cast<int>(slot);
  slot = late;
  late_at_ = (late_at_ + 1) % kWindow;
  noted_ = std::min(noted_ + 1, kWindow);
}

void CircuitBreaker::Open(int64_t now_ns) {
  // Twice as long each time that a probe fails, and from 1/2 to 1 of that.
  back_off_ns_ = open_ ? std::min(back_off_ns_ * 2, kBackOffMaxNs) : 2 * kBackOffMinNs;
  const double share = 0.5 + 0.5 * RandomUniform(seed_, 0, draws_++);
  probe_at_ns_ = now_ns + static_cast<int64_t>(static_cast<double>(back_off_ns_) * share);
  open_ = true;
  probing_ = false;
  failures_ = 0;
  late_.fill(false);
  late_at_ = late_count_ = noted_ = 0;
}

void CircuitBreaker::Succeeded(int64_t now_ns, bool late) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (open_ && late) return Open(now_ns);
  open_ = probing_ = false;
  failures_ = 0;
  Note(late);
  if (noted_ == kWindow && late_count_ > kLateMax) Open(now_ns);
}

void CircuitBreaker::Failed(int64_t now_ns, bool late) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Note(late);
  const bool too_late = noted_ == kWindow && late_count_ > kLateMax;
  // While open only the probe's failure counts: calls from before it opened say nothing new.
  if (open_ ? probing_ : ++failures_ >= kFailuresMax || too_late) Open(now_ns);
}

void CircuitBreaker::Abandoned() {
  const std::lock_guard<std::mutex> guard(mutex_);
  probing_ = false;
}

bool CircuitBreaker::available(int64_t now_ns) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return !open_ || (!probing_ && now_ns >= probe_at_ns_);
}

bool CircuitBreaker::open() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return open_;
}

bool CircuitBreaker::suspect() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return open_ || failures_ > 0;
}

}  // namespace quire
