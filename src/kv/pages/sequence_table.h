// SequenceTable: ids to sequences, in a flat table with stable indices and a hash from id to index.
#ifndef QUIRE_KV_PAGES_SEQUENCE_TABLE_H_
#define QUIRE_KV_PAGES_SEQUENCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "kernels/backend.h"
#include "kv/pages/block_tree.h"

namespace quire {

// A window of AttentionKVCacheOptions::tvm_window_span, which acts when a forward ends.
struct KeptSpan {
  int64_t tokens = kNoWindow;
  int64_t sinks = 0;
};

// A sequence is a path of blocks: the block in which it ends says all but what stands here. What
// planning reads comes first, in a line of the processor's cache.
struct Sequence {
  int64_t id = -1;  // -1: this entry of the table is free
  BlockIndex last = kNoBlock;
  bool long_factors = false;  // RopeScaling::kLongRope
  bool retained = false;      // set through the table, which counts them
  // Number of the last planning that named it: finds duplicates and members of the batch.
  mutable uint64_t batch = 0;
  // Positions at the end of its path without tokens: for the levels of its uncommitted tree
  // (token_tree.h), or for tokens that it receives. 0: it has neither.
  int64_t reserved = 0;
  SequenceWindow window = {};
  int64_t pending = 0;   // of `reserved`, for tokens that it receives (pending_receives.h)
  uint64_t receive = 0;  // their epoch
  KeptSpan span = {};
  int64_t slid = 0;  // positions behind the sinks that a next query does not see, as of the last
                     // forward
};

// Not a std::unordered_map: that allocates per insertion, so that a commit could fail, and follows
// a pointer per look-up. Open addressing with linear probing, at most half full; removal shifts the
// followers back, so there are no tombstones.
class SequenceTable {
 public:
  static constexpr int32_t kAbsent = -1;

  int64_t count() const { return count_; }
  int64_t retained_count() const { return retained_count_; }
  // The index of the sequence, or kAbsent. It stays the same until the sequence is erased.
  int32_t Find(int64_t id) const {
    if (buckets_.empty()) return kAbsent;
    size_t bucket = HomeBucket(id);
    while (buckets_[bucket].index != kAbsent && buckets_[bucket].id != id)
      bucket = NextBucket(bucket);
    return buckets_[bucket].index;
  }
  // Tells the processor that what planning reads is about to be used.
  void Prefetch(int32_t index) const {
    const char* const entry = reinterpret_cast<const char*>(&(*this)[index]);
    __builtin_prefetch(entry, 1);
    __builtin_prefetch(entry + offsetof(Sequence, pending), 1);
  }
  Sequence& operator[](int32_t index) {
    QUIRE_DCHECK(index >= 0 && index < std::ssize(sequences_)) << "no entry " << index;
    return sequences_[static_cast<size_t>(index)];
  }
  const Sequence& operator[](int32_t index) const {
    QUIRE_DCHECK(index >= 0 && index < std::ssize(sequences_)) << "no entry " << index;
    return sequences_[static_cast<size_t>(index)];
  }

  // Makes the next Insert succeed. May throw std::bad_alloc; then nothing has changed.
  void ReserveOne() {
    const size_t wanted = static_cast<size_t>(count_) + 1;
    if (free_.empty() || 2 * wanted > buckets_.size()) Grow(wanted);
  }
  // REQUIRES: ReserveOne() since the last Insert; id >= 0 and absent.
  int32_t Insert(int64_t id) noexcept;
  void Erase(int32_t index) noexcept;
  void SetRetained(int32_t index, bool retained) noexcept;
  void Clear() noexcept;

  // All entries, free ones (id -1) included.
  const std::vector<Sequence>& entries() const { return sequences_; }
  // Indices in the order of ids.
  std::vector<int32_t> SortedById() const;

 private:
  // The id is here too: a look-up reads no sequence.
  struct Bucket {
    int64_t id = -1;
    int32_t index = kAbsent;  // into sequences_
  };

  // Multiplication by 2^64 / golden ratio spreads consecutive ids over the high bits (Knuth,
  // TAOCP 6.4).
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  size_t HomeBucket(int64_t id) const {
    const uint64_t mixed = static_cast<uint64_t>(id) * kGolden;
    return static_cast<size_t>(mixed >> 32) & (buckets_.size() - 1);
  }
  size_t NextBucket(size_t bucket) const { return (bucket + 1) & (buckets_.size() - 1); }
  void Grow(size_t wanted);
  void PutIntoBucket(int32_t index) noexcept;
  void Rehash(size_t bucket_count);

  std::vector<Sequence> sequences_;
  std::vector<int32_t> free_;    // capacity is that of sequences_
  std::vector<Bucket> buckets_;  // the size is a power of two or 0
  int64_t count_ = 0;
  int64_t retained_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_SEQUENCE_TABLE_H_
