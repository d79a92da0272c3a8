#include "store/tiered/pin_board.h"

#include <algorithm>

namespace quire {

PinBoard::Ticket PinBoard::Add(const PinnedChunk& pin, bool named, int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  const Ticket ticket = last_ + 1;
  const int64_t deadline = MomentAfter(now_ns, timeout_ns_);
  const auto at = by_chunk_.emplace(pin.key, ticket);
  try {
    records_.emplace_hint(records_.end(), ticket, Record{pin, named, deadline});
  } catch (...) {
    by_chunk_.erase(at);
    throw;
  }
  return last_ = ticket;
}

std::optional<PinnedChunk> PinBoard::ReleaseLocked(std::map<Ticket, Record>::iterator at) noexcept {
  if (at == records_.end()) return std::nullopt;
  const PinnedChunk pin = at->second.pin;
  const auto [first, last] = by_chunk_.equal_range(pin.key);
  by_chunk_.erase(
      std::find_if(first, last, [&](const auto& entry) { return entry.second == at->first; }));
  records_.erase(at);
  return pin;
}

std::optional<PinnedChunk> PinBoard::Release(Ticket ticket) noexcept {
  const std::lock_guard lock(mutex_);
  return ReleaseLocked(records_.find(ticket));
}

std::optional<PinnedChunk> PinBoard::ReleaseNamed(const ChunkKey& key) noexcept {
  const std::lock_guard lock(mutex_);
  const auto [first, last] = by_chunk_.equal_range(key);
  for (auto at = first; at != last; ++at) {
    const auto record = records_.find(at->second);
    if (record->second.named) return ReleaseLocked(record);
  }
  return std::nullopt;
}

std::optional<PinnedChunk> PinBoard::ReleaseExpired(int64_t now_ns) noexcept {
  const std::lock_guard lock(mutex_);
  if (records_.empty() || records_.begin()->second.deadline_ns > now_ns) return std::nullopt;
  ++forced_;
  return ReleaseLocked(records_.begin());
}

void PinBoard::Forget(const ChunkKey& key, TierKind tier) noexcept {
  const std::lock_guard lock(mutex_);
  const auto [first, last] = by_chunk_.equal_range(key);
  for (auto at = first; at != last; ++at)
    records_.find(at->second)->second.pin.tiers &=
        static_cast<uint8_t>(~(1u << static_cast<unsigned>(tier)));
}

int64_t PinBoard::size() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(records_.size());
}

int64_t PinBoard::forced() const {
  const std::lock_guard lock(mutex_);
  return forced_;
}

int64_t PinBoard::next_deadline() const {
  const std::lock_guard lock(mutex_);
  return records_.empty() ? kNever : records_.begin()->second.deadline_ns;
}

}  // namespace quire
