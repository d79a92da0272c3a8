#include "store/disk/disk_catalog.h"

#include <utility>

#include "store/tier/event_ring.h"

namespace quire {

using Guard = std::lock_guard<std::mutex>;

DiskCatalog::DiskCatalog(EvictionKind eviction, int64_t bytes_max)
    : index_(ChunkIndex::Create(eviction, bytes_max)) {}

void DiskCatalog::EndScan() {
  const Guard guard(mutex_);
  scanned_ = true;
  for (const ChunkId& id : std::exchange(used_during_scan_, {})) index_->Use(id);
}

void DiskCatalog::Insert(const IndexedChunk& chunk) {
  const Guard guard(mutex_);
  if (index_->Find(chunk.id) == nullptr) index_->Insert(chunk);
}

std::optional<IndexedChunk> DiskCatalog::Find(const ChunkId& id) const {
  const Guard guard(mutex_);
  const IndexedChunk* const found = index_->Find(id);
  if (found == nullptr) return std::nullopt;
  return *found;
}

std::optional<ChunkId> DiskCatalog::FindKey(const ChunkKey& key) const {
  const Guard guard(mutex_);
  const IndexedChunk* const found = index_->FindKey(key);
  if (found == nullptr) return std::nullopt;
  return found->id;
}

void DiskCatalog::Use(const ChunkId& id) {
  const Guard guard(mutex_);
  index_->Use(id);
  if (!scanned_) used_during_scan_.push_back(id);
}

bool DiskCatalog::Pin(const ChunkKey& key, int change) {
  const Guard guard(mutex_);
  const IndexedChunk* const found = index_->FindKey(key);
  return found != nullptr && index_->Pin(found->id, change);
}

void DiskCatalog::SetExpiry(const ChunkId& id, int64_t expires_ms) {
  const Guard guard(mutex_);
  index_->SetExpiry(id, expires_ms);
}

void DiskCatalog::SetPriority(const ChunkId& id, int priority) {
  const Guard guard(mutex_);
  index_->SetPriority(id, priority);
}

void DiskCatalog::SetBytes(const ChunkId& id, int64_t bytes) {
  const Guard guard(mutex_);
  index_->SetBytes(id, bytes);
}

bool DiskCatalog::Erase(const ChunkId& id) {
  const Guard guard(mutex_);
  verified_.erase(id);
  synced_.erase(id);
  return index_->Erase(id);
}

void DiskCatalog::SetQuota(const ChunkKey& root, const ChunkQuota& quota) {
  const Guard guard(mutex_);
  index_->SetQuota(root, quota);
}

std::optional<std::vector<ChunkId>> DiskCatalog::Victims(const ChunkKey& root, int64_t bytes,
                                                         int64_t used) const {
  const Guard guard(mutex_);
  return index_->Victims(root, bytes, used - index_->bytes());
}

// As if the limit were what is in use now. The root is nobody's, so that no quota of one salt
// decides.
std::optional<std::vector<ChunkId>> DiskCatalog::VictimsToFree(int64_t bytes) const {
  const Guard guard(mutex_);
  return index_->Victims(ChunkKey{}, index_->bytes_max() - index_->bytes() + bytes);
}

std::vector<ChunkKey> DiskCatalog::OverQuota() const {
  const Guard guard(mutex_);
  return index_->OverQuota();
}

std::vector<ChunkId> DiskCatalog::Expired(int64_t now_ms) const {
  const Guard guard(mutex_);
  return index_->Expired(now_ms);
}

std::vector<IndexedChunk> DiskCatalog::All() const {
  const Guard guard(mutex_);
  return index_->All();
}

int64_t DiskCatalog::bytes() const {
  const Guard guard(mutex_);
  return index_->bytes();
}

int64_t DiskCatalog::bytes_max() const {
  const Guard guard(mutex_);
  return index_->bytes_max();
}

DiskCatalog::Seen DiskCatalog::seen(const ChunkId& id) const {
  const Guard guard(mutex_);
  return {verified_.contains(id), synced_.contains(id)};
}

void DiskCatalog::SetSeen(const ChunkId& id, Seen seen) {
  const Guard guard(mutex_);
  if (index_->Find(id) == nullptr) return;  // so that the sets are no larger than the index
  if (seen.verified) verified_.insert(id);
  if (seen.synced) synced_.insert(id);
}

void DiskCatalog::Tell(ChunkEvent::Kind kind, const ChunkKey& key) {
  const Guard guard(mutex_);
  if (kind == ChunkEvent::Kind::kEvicted) ++counts_.evicted;
  if (kind == ChunkEvent::Kind::kExpired) ++counts_.expired;
  if (kind == ChunkEvent::Kind::kCorrupt) ++counts_.corrupt;
  if (events_.size() == EventRing::kEventsMax) {
    events_.pop_front();
    ++counts_.events_dropped;
  }
  events_.push_back({kind, TierKind::kDisk, key});
}

void DiskCatalog::CountDuplicate() {
  const Guard guard(mutex_);
  ++counts_.deduplicated;
}

TierUsage DiskCatalog::Usage() const {
  const Guard guard(mutex_);
  TierUsage usage = counts_;
  usage.chunks = index_->size();
  usage.bytes = index_->bytes();
  usage.bytes_max = index_->bytes_max();
  return usage;
}

void DiskCatalog::TakeEvents(std::vector<ChunkEvent>* events) {
  const Guard guard(mutex_);
  events->insert(events->end(), events_.begin(), events_.end());
  events_.clear();
}

}  // namespace quire
