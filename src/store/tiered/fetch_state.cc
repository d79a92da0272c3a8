#include "store/tiered/fetch_state.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "base/guard.h"

namespace quire {

FetchState::FetchState(std::shared_ptr<StoreParts> parts, const FetchRequest& request,
                       std::span<const ChunkKey> chain, bool to_memory)
    : parts_(std::move(parts)),
      fingerprint_(request.keys->fingerprint()),
      approximate_(request.keys->approximate()),
      tokens_(request.tokens.begin(), request.tokens.end()),
      chunk_tokens_(request.chunk_tokens),
      first_chunk_(request.first_chunk),
      deadline_ns_(request.deadline_ns == 0 ? kNever : request.deadline_ns),
      compute_seconds_per_token_(request.compute_seconds_per_token),
      priority_(request.priority),
      to_memory_(to_memory) {
  for (size_t i = static_cast<size_t>(first_chunk_); i < chain.size(); ++i)
    ids_.push_back({fingerprint_, request.keys->root(), chain[i]});
  slots_.resize(ids_.size());
}

std::span<const int32_t> FetchState::tokens(int64_t i) const {
  const size_t begin = static_cast<size_t>((first_chunk_ + i) * chunk_tokens_);
  return std::span(tokens_).subspan(
      begin, std::min(static_cast<size_t>(chunk_tokens_), tokens_.size() - begin));
}

ChunkExpectation FetchState::Expect(int64_t i) const {
  return {.key = id(i).key,
          .fingerprint = fingerprint_,
          .now_ms = parts_->clock->WallMs(),
          .approximate = approximate_,
          .tokens = tokens(i),
          .mac_key = parts_->options.mac_key};
}

bool FetchState::Found(int64_t i, Slot* found) noexcept {
  if (located_) return false;
  slot(i) = std::move(*found);
  end_ = found_ = i + 1;
  Advance();
  return true;
}

void FetchState::Located(MissReason why) noexcept {
  if (located_) return;
  located_ = true;
  miss_ = why;
  Advance();
}

void FetchState::Failed(int64_t i, MissReason why) noexcept {
  if (i >= end_ || i < ready_) return;
  end_ = i;
  located_ = true;  // nothing behind it is of use
  miss_ = why;
  LeaveLoads();
  Advance();
}

void FetchState::Complete(int64_t i, std::shared_ptr<const StoredChunk> chunk) noexcept {
  slot(i).chunk = std::move(chunk);
  Advance();
}

void FetchState::End(MissReason why) noexcept {
  if (done()) return;
  end_ = ready_;
  located_ = true;
  miss_ = why;
  Advance();
}

void FetchState::EndIfLate() noexcept {
  if (!done() && parts_->clock->SteadyNs() >= deadline_ns_) End(MissReason::kTimeout);
}

void FetchState::Advance() noexcept {
  while (ready_ < end_ && slot(ready_).chunk != nullptr) ++ready_;
  if (done() && !counted_) {
    counted_ = true;
    parts_->open_fetches.erase(this);
    LeaveLoads();
    ++parts_->misses[static_cast<size_t>(miss_)];
    for (int64_t i = 0; i < ready_; ++i)
      parts_->fetched_tokens += static_cast<int64_t>(tokens(i).size());
  }
  WakeThoseWhoMayGoOn();
}

bool FetchState::MayGoOn(Waiter& waiter) const noexcept {
  if (!waiter.layer) return done();
  // A chunk that has this layer keeps it, also when the rest of it does not come any more.
  const auto has_layer = [&](const Slot& slot) {
    return slot.chunk != nullptr || (slot.load != nullptr && slot.load->HasLayers(*waiter.layer));
  };
  while (waiter.there < found_ && has_layer(slot(waiter.there))) ++waiter.there;
  return located_ && (waiter.there == found_ || end_ <= waiter.there);
}

void FetchState::WakeThoseWhoMayGoOn() noexcept {
  for (Waiter* waiter = waiters_; waiter != nullptr; waiter = waiter->next)
    if (MayGoOn(*waiter)) return changed_.notify_all();
}

bool FetchState::WaitAs(Waiter& waiter, std::unique_lock<std::mutex>& lock, int64_t until_ns) {
  waiter.next = std::exchange(waiters_, &waiter);
  const auto leave = [&]() noexcept {
    Waiter** at = &waiters_;
    while (*at != &waiter) at = &(*at)->next;
    *at = waiter.next;
  };
  try {
    const bool in_time =
        WaitUntil(*parts_->clock, changed_, lock, std::min(until_ns, deadline_ns_), [&] {
          EndIfLate();
          return MayGoOn(waiter);
        });
    leave();
    return in_time;
  } catch (...) {
    leave();  // a host's clock may take memory to wait
    throw;
  }
}

bool FetchState::WaitDone(std::unique_lock<std::mutex>& lock, int64_t until_ns) {
  Waiter waiter;
  return WaitAs(waiter, lock, until_ns);
}

bool FetchState::WaitLayer(std::unique_lock<std::mutex>& lock, int64_t layer, int64_t until_ns,
                           int64_t* there) {
  Waiter waiter{.layer = layer};
  const bool in_time = WaitAs(waiter, lock, until_ns);
  *there = waiter.there;
  return in_time;
}

// What will not be used is not waited for. Others may still want it.
void FetchState::LeaveLoads() noexcept {
  for (int64_t i = end_; i < found_; ++i) {
    if (slot(i).load == nullptr || slot(i).chunk != nullptr) continue;
    std::erase_if(slot(i).load->waiters,
                  [&](const ChunkLoad::Waiter& waiter) { return waiter.fetch.get() == this; });
  }
}

void FetchState::ReleasePins() noexcept {
  for (Slot& each : slots_)
    if (const auto pin = parts_->pins.Release(std::exchange(each.pin, 0))) parts_->Unpin(*pin);
}

// ---------------------------------------------------------------------- the handle

template <typename F>
auto FetchHandle::Look(F&& f) const {
  const std::lock_guard lock(state_->parts().fetch_mutex);
  state_->EndIfLate();
  return f(*state_);
}

FetchHandle::~FetchHandle() {
  Cancel();
  state_->ReleasePins();
}

bool FetchHandle::located() const {
  return Look([](const FetchState& state) { return state.located(); });
}

int64_t FetchHandle::found() const {
  return Look([](const FetchState& state) { return state.found(); });
}

int64_t FetchHandle::ready() const {
  return Look([](const FetchState& state) { return state.ready(); });
}

bool FetchHandle::done() const {
  return Look([](const FetchState& state) { return state.done(); });
}

MissReason FetchHandle::miss() const {
  return Look([](const FetchState& state) { return state.miss(); });
}

bool FetchHandle::Wait(int64_t until_ns) {
  std::unique_lock lock(state_->parts().fetch_mutex);
  return state_->WaitDone(lock, until_ns);
}

namespace {

Status LayerError(MissReason why, int64_t layer, int64_t chunk) {
  StatusCode code = StatusCode::kUnavailable;
  switch (why) {
    case MissReason::kTimeout:
      code = StatusCode::kTimeout;
      break;
    case MissReason::kCorrupt:
      code = StatusCode::kCorrupt;
      break;
    case MissReason::kIncompatible:
      code = StatusCode::kIncompatible;
      break;
    case MissReason::kCancelled:
      code = StatusCode::kCancelled;
      break;
    case MissReason::kNoRoom:
      code = StatusCode::kFull;
      break;
    case MissReason::kNotStored:
    case MissReason::kExpired:
      code = StatusCode::kNotFound;
      break;
    case MissReason::kNone:
    case MissReason::kNotWorth:
    case MissReason::kUnavailable:
      break;
  }
  return Status(code, "ChunkFetch::WaitLayer: layer " + std::to_string(layer) + " of chunk " +
                          std::to_string(chunk) + " will not come (" +
                          std::string(MissReasonName(why)) + "); compute from there");
}

}  // namespace

Status FetchHandle::WaitLayer(int64_t layer, int64_t until_ns) {
  std::unique_lock lock(state_->parts().fetch_mutex);
  int64_t there = 0;
  const bool over = state_->WaitLayer(lock, layer, until_ns, &there);
  if (over && there == state_->found()) return {};
  return GuardEntry(
      [&] { return LayerError(over ? state_->miss() : MissReason::kTimeout, layer, there); });
}

std::shared_ptr<const StoredChunk> FetchHandle::chunk(int64_t i) const {
  const std::lock_guard lock(state_->parts().fetch_mutex);
  const FetchState::Slot& slot = state_->slot(i);
  return slot.chunk != nullptr ? slot.chunk : slot.load->chunk;
}

TierKind FetchHandle::tier(int64_t i) const {
  const std::lock_guard lock(state_->parts().fetch_mutex);
  return state_->slot(i).tier;
}

void FetchHandle::Cancel() noexcept {
  const std::lock_guard lock(state_->parts().fetch_mutex);
  state_->End(MissReason::kCancelled);
}

}  // namespace quire
