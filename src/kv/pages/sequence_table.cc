#include "kv/pages/sequence_table.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

constexpr size_t kBucketCountMin = 16;

}  // namespace

void SequenceTable::PutIntoBucket(int32_t index) noexcept {
  const int64_t id = (*this)[index].id;
  size_t bucket = HomeBucket(id);
  while (buckets_[bucket].index != kAbsent) bucket = NextBucket(bucket);
  buckets_[bucket] = {.id = id, .index = index};
}

void SequenceTable::Rehash(size_t bucket_count) {
  QUIRE_DCHECK((bucket_count & (bucket_count - 1)) == 0) << "bucket numbers are masked";
  QUIRE_DCHECK(2 * static_cast<size_t>(count_) <= bucket_count);
  std::vector<Bucket> buckets(bucket_count);
  buckets_.swap(buckets);
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].id >= 0) PutIntoBucket(static_cast<int32_t>(i));
  }
}

// Room for `wanted` sequences.
void SequenceTable::Grow(size_t wanted) {
  if (2 * wanted > buckets_.size()) Rehash(std::max(kBucketCountMin, 2 * buckets_.size()));
  if (!free_.empty()) return;
  const size_t size = std::max(wanted, 2 * sequences_.size());
  free_.reserve(size);
  const size_t old_size = sequences_.size();
  sequences_.resize(size);
  for (size_t i = size; i-- > old_size;) free_.push_back(static_cast<int32_t>(i));
}

int32_t SequenceTable::Insert(int64_t id) noexcept {
  QUIRE_CHECK(!free_.empty()) << "no room was reserved for sequence " << id;
  QUIRE_DCHECK(id >= 0);
  QUIRE_DCHECK(Find(id) == kAbsent) << "there is a sequence " << id;
  const int32_t index = free_.back();
  free_.pop_back();
  (*this)[index] = Sequence{.id = id};
  PutIntoBucket(index);
  ++count_;
  QUIRE_DCHECK(2 * static_cast<size_t>(count_) <= buckets_.size());
  return index;
}

void SequenceTable::Erase(int32_t index) noexcept {
  QUIRE_DCHECK((*this)[index].id >= 0) << "entry " << index << " is free";
  size_t hole = HomeBucket((*this)[index].id);
  while (buckets_[hole].index != index) hole = NextBucket(hole);
  // A follower moves into the hole unless its home lies cyclically behind the hole: then probing
  // still finds it.
  for (size_t next = NextBucket(hole); buckets_[next].index != kAbsent; next = NextBucket(next)) {
    const size_t home = HomeBucket(buckets_[next].id);
    const size_t mask = buckets_.size() - 1;
    if (((next - home) & mask) < ((next - hole) & mask)) continue;
    buckets_[hole] = buckets_[next];
    hole = next;
  }
  buckets_[hole] = {};
  SetRetained(index, false);
  (*this)[index] = Sequence{};
  QUIRE_DCHECK(free_.size() < free_.capacity()) << "ReserveOne has made room";
  free_.push_back(index);
  --count_;
  QUIRE_DCHECK(count_ >= retained_count_);
}

void SequenceTable::SetRetained(int32_t index, bool retained) noexcept {
  QUIRE_DCHECK((*this)[index].id >= 0) << "entry " << index << " is free";
  retained_count_ += retained - (*this)[index].retained;
  (*this)[index].retained = retained;
}

void SequenceTable::Clear() noexcept {
  FreeAll(buckets_);
  FreeAll(sequences_);
  FreeAll(free_);
  count_ = 0;
  retained_count_ = 0;
}

std::vector<int32_t> SequenceTable::SortedById() const {
  std::vector<int32_t> indices;
  indices.reserve(static_cast<size_t>(count_));
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].id >= 0) indices.push_back(static_cast<int32_t>(i));
  }
  std::sort(indices.begin(), indices.end(),
            [this](int32_t a, int32_t b) { return (*this)[a].id < (*this)[b].id; });
  return indices;
}

}  // namespace quire
