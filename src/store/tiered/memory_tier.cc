#include "store/tiered/memory_tier.h"

#include <algorithm>
#include <utility>

namespace quire {
namespace {

IndexedChunk IndexedOf(const KeptChunk& kept) {
  const ChunkHeader& header = kept.chunk->header();
  return {.id = kept.id,
          .context = header.contextual ? kept.id.root : ChunkKey{header.context},
          .bytes = static_cast<int64_t>(kept.chunk->bytes().size()),
          .tokens = static_cast<int64_t>(header.tokens.size()),
          .first_token = header.first_position == kNotRotated ? -1 : int64_t{header.first_position},
          .created_ms = header.created_ms,
          .expires_ms = header.expires_ms,
          .recompute_seconds = kept.worth.recompute_seconds,
          .priority = kept.worth.priority};
}

bool IsExpired(const IndexedChunk& chunk, int64_t now_ms) {
  return chunk.expires_ms != 0 && chunk.expires_ms <= now_ms;
}

}  // namespace

int64_t ExpiryBeside(const StoredChunk& chunk, int64_t expires_ms) {
  const int64_t own = chunk.header().expires_ms;
  return own != 0 && (expires_ms == 0 || own <= expires_ms) ? 0 : expires_ms;
}

Status CheckSections(const StoredChunk& chunk) {
  const ChunkHeader& header = chunk.header();
  for (size_t s = 0; s < header.sections.size(); ++s) {
    const Section& section = header.sections[s];
    const auto bytes = chunk.bytes().subspan(static_cast<size_t>(section.offset),
                                             static_cast<size_t>(section.length));
    QUIRE_RETURN_IF_ERROR(CheckSection(header, static_cast<int64_t>(s), bytes));
  }
  return {};
}

MemoryTier::MemoryTier(EvictionKind eviction, int64_t bytes_max, EventRing* events, PinBoard* pins)
    : events_(events), pins_(pins), index_(ChunkIndex::Create(eviction, bytes_max)) {
  statistics_.present = true;
  statistics_.bytes_max = bytes_max;
}

std::optional<KeptChunk> MemoryTier::Take(const ChunkId& id, int64_t now_ms,
                                          MissReason* miss) noexcept {
  Records::node_type expired;  // freed after the lock
  const std::lock_guard lock(mutex_);
  const auto at = records_.find(id);
  *miss = MissReason::kNotStored;
  if (at != records_.end() && IsExpired(*index_->Find(id), now_ms)) {
    *miss = MissReason::kExpired;
    expired = EraseLocked(id, ChunkEvent::Kind::kExpired);
  }
  if (*miss == MissReason::kExpired || at == records_.end()) {
    ++statistics_.misses;
    return std::nullopt;
  }
  index_->Use(id);
  index_->Pin(id, 1);
  ++statistics_.hits;
  statistics_.bytes_read += static_cast<int64_t>(at->second.chunk->bytes().size());
  *miss = MissReason::kNone;
  return KeptLocked(*at);
}

KeptChunk MemoryTier::KeptLocked(const Records::value_type& entry) const noexcept {
  const auto& [id, record] = entry;
  return {id, record.chunk, record.worth,
          ExpiryBeside(*record.chunk, index_->Find(id)->expires_ms)};
}

bool MemoryTier::Has(const ChunkId& id, int64_t now_ms) const noexcept {
  const std::lock_guard lock(mutex_);
  const IndexedChunk* chunk = index_->Find(id);
  return chunk != nullptr && !IsExpired(*chunk, now_ms);
}

// A chunk is not made room for by the one that it hangs on.
std::optional<std::vector<ChunkId>> MemoryTier::PlanRoomLocked(const IndexedChunk& chunk) {
  const ChunkId context{chunk.id.fingerprint, chunk.id.root, chunk.context};
  const bool pinned = index_->Pin(context, 1);
  const auto unpin = [&]() noexcept {
    if (pinned) index_->Pin(context, -1);
  };
  try {
    auto victims = index_->Victims(chunk.id.root, chunk.bytes);
    unpin();
    return victims;
  } catch (...) {
    unpin();
    throw;
  }
}

MemoryTier::Outcome MemoryTier::Insert(const KeptChunk& kept, bool unwritten, int64_t now_ms,
                                       std::vector<KeptChunk>* evicted) {
  const IndexedChunk chunk = IndexedOf(kept);
  std::vector<Records::node_type> gone;  // freed after the lock
  const std::lock_guard lock(mutex_);
  if (records_.contains(kept.id)) {
    ++statistics_.deduplicated;
    return Outcome::kThere;
  }
  if (index_->bytes() + chunk.bytes > index_->bytes_max()) {
    const std::vector<ChunkId> expired = index_->Expired(now_ms);
    gone.reserve(expired.size());
    for (const ChunkId& id : expired) gone.push_back(EraseLocked(id, ChunkEvent::Kind::kExpired));
  }
  const std::optional<std::vector<ChunkId>> victims = PlanRoomLocked(chunk);
  if (!victims) {
    ++statistics_.dropped_writes;
    return Outcome::kNoRoom;
  }
  gone.reserve(gone.size() + victims->size());
  const size_t evicted_before = evicted->size();
  const auto at = records_.emplace(kept.id, Record{kept.chunk, kept.worth, unwritten}).first;
  try {
    for (const ChunkId& id : *victims) {
      const auto victim = records_.find(id);
      if (victim->second.unwritten) evicted->push_back(KeptLocked(*victim));
    }
    index_->Insert(chunk);
  } catch (...) {
    evicted->resize(evicted_before);
    records_.erase(at);
    throw;
  }
  for (const ChunkId& id : *victims) gone.push_back(EraseLocked(id, ChunkEvent::Kind::kEvicted));
  ++statistics_.writes;
  statistics_.bytes_written += chunk.bytes;
  events_->Add({ChunkEvent::Kind::kStored, TierKind::kRam, kept.id.key});
  return Outcome::kStored;
}

std::vector<ChunkId> MemoryTier::Unwritten() const {
  const std::lock_guard lock(mutex_);
  std::vector<ChunkId> unwritten;
  for (const auto& [id, record] : records_)
    if (record.unwritten) unwritten.push_back(id);
  return unwritten;
}

std::optional<KeptChunk> MemoryTier::TakeUnwritten(const ChunkId& id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = records_.find(id);
  if (at == records_.end() || !at->second.unwritten) return std::nullopt;
  at->second.unwritten = false;
  return KeptLocked(*at);
}

void MemoryTier::MarkUnwritten(const ChunkId& id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = records_.find(id);
  if (at != records_.end()) at->second.unwritten = true;
}

MemoryTier::Records::node_type MemoryTier::EraseLocked(const ChunkId& id,
                                                       ChunkEvent::Kind why) noexcept {
  index_->Erase(id);
  pins_->Forget(id.key, TierKind::kRam);
  switch (why) {
    case ChunkEvent::Kind::kEvicted:
      ++statistics_.evicted;
      break;
    case ChunkEvent::Kind::kExpired:
      ++statistics_.expired;
      break;
    case ChunkEvent::Kind::kCorrupt:
      ++statistics_.corrupt;
      break;
    case ChunkEvent::Kind::kStored:
    case ChunkEvent::Kind::kRemoved:
      break;
  }
  events_->Add({why, TierKind::kRam, id.key});
  return records_.extract(id);
}

bool MemoryTier::Pin(const ChunkKey& key, int change) noexcept {
  const std::lock_guard lock(mutex_);
  const IndexedChunk* const chunk = index_->FindKey(key);
  return chunk != nullptr && index_->Pin(chunk->id, change);
}

bool MemoryTier::Touch(const ChunkKey& key) noexcept {
  const std::lock_guard lock(mutex_);
  const IndexedChunk* const chunk = index_->FindKey(key);
  if (chunk == nullptr) return false;
  index_->Use(chunk->id);
  return true;
}

bool MemoryTier::SetExpiry(const ChunkKey& key, int64_t expires_ms) noexcept {
  const std::lock_guard lock(mutex_);
  const IndexedChunk* const chunk = index_->FindKey(key);
  if (chunk == nullptr) return false;
  const StoredChunk& stored = *records_.find(chunk->id)->second.chunk;
  const int64_t set_ms = ExpiryBeside(stored, expires_ms);
  index_->SetExpiry(chunk->id, set_ms != 0 ? set_ms : stored.header().expires_ms);
  return true;
}

bool MemoryTier::SetPriority(const ChunkKey& key, int priority) noexcept {
  const std::lock_guard lock(mutex_);
  const IndexedChunk* const chunk = index_->FindKey(key);
  if (chunk == nullptr) return false;
  index_->SetPriority(chunk->id, priority);
  records_.find(chunk->id)->second.worth.priority = priority;  // with which RAM gives it up
  return true;
}

bool MemoryTier::Remove(const ChunkKey& key, ChunkEvent::Kind why) noexcept {
  Records::node_type gone;  // freed after the lock
  const std::lock_guard lock(mutex_);
  const IndexedChunk* const chunk = index_->FindKey(key);
  if (chunk == nullptr) return false;
  const ChunkId id = chunk->id;
  gone = EraseLocked(id, why);
  return true;
}

void MemoryTier::SetQuota(const ChunkKey& root, const ChunkQuota& quota) {
  const std::lock_guard lock(mutex_);
  index_->SetQuota(root, quota);
}

int64_t MemoryTier::Clear(const Digest& fingerprint, const ChunkKey& root) {
  std::vector<Records::node_type> gone;
  const std::lock_guard lock(mutex_);
  std::vector<ChunkId> ids;
  for (auto at = records_.lower_bound({fingerprint, root, {}});
       at != records_.end() && at->first.fingerprint == fingerprint && at->first.root == root; ++at)
    ids.push_back(at->first);
  gone.reserve(ids.size());
  for (const ChunkId& id : ids) gone.push_back(EraseLocked(id, ChunkEvent::Kind::kRemoved));
  return static_cast<int64_t>(ids.size());
}

int64_t MemoryTier::CollectGarbage(int64_t now_ms, std::vector<KeptChunk>* evicted) {
  std::vector<Records::node_type> gone;
  const std::lock_guard lock(mutex_);
  const int64_t before = index_->bytes();
  const auto erase_all = [&](const std::vector<ChunkId>& ids, ChunkEvent::Kind why) {
    gone.reserve(gone.size() + ids.size());
    const bool is_eviction = why == ChunkEvent::Kind::kEvicted;
    if (is_eviction) evicted->reserve(evicted->size() + ids.size());
    for (const ChunkId& id : ids) {
      const auto victim = records_.find(id);
      if (is_eviction && victim->second.unwritten) evicted->push_back(KeptLocked(*victim));
      gone.push_back(EraseLocked(id, why));
    }
  };
  erase_all(index_->Expired(now_ms), ChunkEvent::Kind::kExpired);
  // A quota that came after the chunks is met as far as pins let it.
  for (const ChunkKey& root : index_->OverQuota())
    if (const auto victims = index_->Victims(root, 0))
      erase_all(*victims, ChunkEvent::Kind::kEvicted);
  return before - index_->bytes();
}

std::vector<ChunkListing> MemoryTier::List() const {
  const std::lock_guard lock(mutex_);
  std::vector<ChunkListing> listings;
  for (const IndexedChunk& chunk : index_->All())
    listings.push_back({.tier = TierKind::kRam,
                        .key = chunk.id.key,
                        .fingerprint = chunk.id.fingerprint,
                        .tokens = chunk.tokens,
                        .first_token = chunk.first_token,
                        .bytes = chunk.bytes,
                        .created_ms = chunk.created_ms,
                        .expires_ms = chunk.expires_ms});
  return listings;
}

std::shared_ptr<const StoredChunk> MemoryTier::Get(const ChunkKey& key) const {
  const std::lock_guard lock(mutex_);
  const IndexedChunk* chunk = index_->FindKey(key);
  return chunk == nullptr ? nullptr : records_.find(chunk->id)->second.chunk;
}

int64_t MemoryTier::Verify() {
  std::vector<KeptChunk> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& entry : records_) all.push_back(KeptLocked(entry));
  }
  int64_t damaged = 0;
  for (const KeptChunk& kept : all) {
    if (!CheckSections(*kept.chunk).ok() && Remove(kept.id.key, ChunkEvent::Kind::kCorrupt))
      ++damaged;
  }
  return damaged;
}

TierStatistics MemoryTier::Statistics() const {
  const std::lock_guard lock(mutex_);
  TierStatistics statistics = statistics_;
  statistics.chunks = index_->size();
  statistics.bytes = index_->bytes();
  return statistics;
}

}  // namespace quire
