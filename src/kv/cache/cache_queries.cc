#include "kv/cache/cache_queries.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/sliding_window.h"

namespace quire {

// ---------------------------------------------------------------------- a sequence

bool CacheQueries::HasSequence(int64_t seq_id) const {
  const auto lock = gate_.Lock();
  return kv_.control.table().Find(seq_id) != SequenceTable::kAbsent;
}

Result<int64_t> CacheQueries::GetSequenceLength(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetSequenceLength", seq_id));
    return kv_.LengthOf(index);
  });
}

Result<int64_t> CacheQueries::HeldTokens(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("HeldTokens", seq_id));
    const Sequence& sequence = kv_.control[index];
    return CountHeldTokens(kv_.tree, sequence.last) - sequence.reserved + kv_.trees.SizeOf(index);
  });
}

Result<int64_t> CacheQueries::GetTreeSize(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetTreeSize", seq_id));
    return kv_.trees.SizeOf(index);
  });
}

Result<TokenRange> CacheQueries::SlidRange(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<TokenRange> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("SlidRange", seq_id));
    const Sequence& sequence = kv_.control[index];
    if (sequence.slid == 0) return TokenRange();
    QUIRE_DCHECK(sequence.window.sinks + sequence.slid <= kv_.CommittedLength(sequence))
        << "sequence " << seq_id << " has slid past its end";
    return TokenRange{sequence.window.sinks, sequence.window.sinks + sequence.slid};
  });
}

Result<WindowSettings> CacheQueries::GetWindows(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<WindowSettings> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetWindows", seq_id));
    return windows_.Of(kv_.control[index]);
  });
}

bool CacheQueries::CanFork(int64_t seq_id, int64_t position) const {
  const auto lock = gate_.Lock();
  const int32_t index = kv_.control.table().Find(seq_id);
  if (index == SequenceTable::kAbsent || position < 0) return false;
  return windows_.CanEnd(kv_.control[index], position);
}

Result<bool> CacheQueries::UsesLongRope(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<bool> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("UsesLongRope", seq_id));
    return kv_.control[index].long_factors;
  });
}

// ---------------------------------------------------------------------- all of them

int64_t CacheQueries::sequence_count() const {
  const auto lock = gate_.Lock();
  return kv_.control.table().count();
}

int64_t CacheQueries::retained_sequence_count() const {
  const auto lock = gate_.Lock();
  return kv_.control.table().retained_count();
}

int64_t CacheQueries::GetTotalSequenceLength() const {
  const auto lock = gate_.Lock();
  int64_t total = 0;
  for (const Sequence& sequence : kv_.control.table().entries())
    total += kv_.CommittedLength(sequence) + sequence.pending;
  return total + kv_.trees.node_count();
}

int64_t CacheQueries::GetDistinctTokenCount() const {
  const auto lock = gate_.Lock();
  QUIRE_DCHECK(kv_.trees.level_count() <= kv_.tree.distinct_token_count())
      << "levels of trees are positions of the block tree";
  return kv_.tree.distinct_token_count() - kv_.trees.level_count() + kv_.trees.node_count();
}

int64_t CacheQueries::GetNumAvailablePages() const {
  const auto lock = gate_.Lock();
  int64_t least = kv_.tree.pool(0).free_count();
  for (int g = 1; g < kv_.tree.group_count(); ++g)
    least = std::min(least, kv_.tree.pool(g).free_count());
  return least;
}

int64_t CacheQueries::pages_in_use() const {
  const auto lock = gate_.Lock();
  int64_t total = 0;
  for (int g = 0; g < kv_.tree.group_count(); ++g) total += kv_.tree.pool(g).used_count();
  QUIRE_DCHECK(total >= 0 && total <= pages_allocated());
  return total;
}

int64_t CacheQueries::pages_allocated() const {
  int64_t total = 0;
  for (int g = 0; g < kv_.tree.group_count(); ++g) total += kv_.tree.pool(g).page_count();
  return total;
}

Result<SeenBlocks> CacheQueries::DescribeBlocks(std::span<const int64_t> seq_ids,
                                                int64_t blocks_max) const {
  return gate_.Ask([&]() -> Result<SeenBlocks> {
    return DescribeBlocksOf(kv_.tree, kv_.control.table(), kv_.groups, seq_ids, blocks_max);
  });
}

}  // namespace quire
