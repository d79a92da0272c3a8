#include "net/circuit_breaker.h"

#include <algorithm>

#include "base/checksum.h"
#include "base/random.h"

namespace quire {

CircuitBreaker::CircuitBreaker(std::shared_ptr<Clock> clock, std::string_view name)
    : clock_(std::move(clock)), seed_(Hash64(name, static_cast<uint64_t>(clock_->SteadyNs()))) {}

std::optional<CircuitBreaker::Call> CircuitBreaker::Admit(int64_t deadline_ns) {
  const int64_t now_ns = clock_->SteadyNs();
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!open_) return Call(this, now_ns, deadline_ns, 0);
  if (probing_ != 0 || now_ns < probe_at_ns_) return std::nullopt;
  probing_ = ++probe_count_;
  return Call(this, now_ns, deadline_ns, probing_);
}

CircuitBreaker::Call::Outcome CircuitBreaker::Call::OutcomeOf(const Status& status,
                                                              bool was_patient) {
  const StatusCode code = status.code();
  if (code == StatusCode::kUnavailable) return Outcome::kFailed;
  if (code == StatusCode::kTimeout) return was_patient ? Outcome::kFailed : Outcome::kUnknown;
  const bool is_ours = code == StatusCode::kCancelled || code == StatusCode::kOutOfMemory;
  return is_ours ? Outcome::kUnknown : Outcome::kAnswered;
}

void CircuitBreaker::Call::Report(const Status& status) noexcept {
  if (breaker_ == nullptr) return;
  const int64_t now_ns = breaker_->clock_->SteadyNs();
  // A call that was abandoned before its deadline counts too.
  const bool was_patient = now_ns - begin_ns_ >= kPatienceNs || now_ns < deadline_ns_;
  const bool late = was_patient && (now_ns > deadline_ns_ || status.code() == StatusCode::kTimeout);
  End(OutcomeOf(status, was_patient), late, now_ns);
}

void CircuitBreaker::Call::End(Outcome outcome, bool late, int64_t now_ns) noexcept {
  CircuitBreaker* const breaker = std::exchange(breaker_, nullptr);
  if (breaker == nullptr) return;
  const std::lock_guard<std::mutex> guard(breaker->mutex_);
  const bool is_probe = probe_ != 0 && probe_ == breaker->probing_;
  if (is_probe) breaker->probing_ = 0;
  if (outcome == Outcome::kAnswered) breaker->Answered(is_probe, late, now_ns);
  if (outcome == Outcome::kFailed) breaker->Failed(is_probe, late, now_ns);
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
  failures_ = 0;
  late_.fill(false);
  late_at_ = late_count_ = noted_ = 0;
}

void CircuitBreaker::Answered(bool is_probe, bool late, int64_t now_ns) {
  // A call that was let through before it opened shows that the peer is back, unless it was late.
  if (open_ && late) {
    if (is_probe) Open(now_ns);
    return;
  }
  open_ = false;
  probing_ = 0;
  failures_ = 0;
  Note(late);
  if (IsOftenLate()) Open(now_ns);
}

void CircuitBreaker::Failed(bool is_probe, bool late, int64_t now_ns) {
  // While open only the probe's failure counts: calls from before it opened say nothing new.
  if (open_) {
    if (is_probe) Open(now_ns);
    return;
  }
  Note(late);
  if (++failures_ >= kFailuresMax || IsOftenLate()) Open(now_ns);
}

bool CircuitBreaker::available() const {
  const int64_t now_ns = clock_->SteadyNs();
  const std::lock_guard<std::mutex> guard(mutex_);
  return !open_ || (probing_ == 0 && now_ns >= probe_at_ns_);
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
