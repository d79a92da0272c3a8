// CacheQueries: what a paged cache answers about its sequences and pages, outside of layers and
// plans: lengths, windows, counts.
//
// Invariant: a query changes nothing. It waits until the call that is inside the gate has ended, so
// it sees each control call as a whole or not at all. Two do not wait, as they read what any thread
// may read at any time: page_counts, which are those of the last call that changed them, and
// pages_allocated, which never changes.
#ifndef QUIRE_KV_CACHE_CACHE_QUERIES_H_
#define QUIRE_KV_CACHE_CACHE_QUERIES_H_

#include <cstdint>
#include <span>

#include "kv/cache/counting_gate.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/control/control_call.h"
#include "kv/pages/block_queries.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

class CacheQueries : public ControlledState<AttentionKVCache>, public BlockQueries {
 public:
  const AttentionKVCacheOptions& options() const final { return kv_.options; }

  // ---- A sequence.
  bool HasSequence(int64_t seq_id) const final;
  Result<int64_t> GetSequenceLength(int64_t seq_id) const final;
  Result<int64_t> HeldTokens(int64_t seq_id) const final;
  Result<int64_t> GetTreeSize(int64_t seq_id) const final;
  Result<TokenRange> SlidRange(int64_t seq_id) const final;
  Result<WindowSettings> GetWindows(int64_t seq_id) const final;
  bool CanFork(int64_t seq_id, int64_t position) const final;
  Result<bool> UsesLongRope(int64_t seq_id) const final;

  // ---- All of them, and their pages.
  bool Empty() const final { return sequence_count() == 0; }
  int64_t sequence_count() const final;
  int64_t retained_sequence_count() const final;
  int64_t GetTotalSequenceLength() const final;
  int64_t GetDistinctTokenCount() const final;
  int64_t GetNumAvailablePages() const final;
  PageCounts page_counts() const final { return gate_.counts(); }
  int64_t pages_in_use() const final;
  int64_t pages_allocated() const final;
  Result<SeenBlocks> DescribeBlocks(std::span<const int64_t> seq_ids,
                                    int64_t blocks_max) const final;

 protected:
  // All must outlive it; nothing is read before the first query.
  CacheQueries(const CountingGate& gate, const PagedSequences& kv, const WindowBook& windows)
      : gate_(gate), kv_(kv), windows_(windows) {}

 private:
  const CountingGate& gate_;
  const PagedSequences& kv_;
  const WindowBook& windows_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_CACHE_QUERIES_H_
