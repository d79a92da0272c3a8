// PageCounts of a block tree, counted block by block.
//
// A page is held by consecutive blocks of one path, so whoever sees it goes through the uppermost
// of them. Hence a page belongs to the kind of the block in which its first token lies, and all
// pages that begin in one block are of one kind: nothing has to look at pages.
#ifndef QUIRE_KV_PAGE_COUNTS_H_
#define QUIRE_KV_PAGE_COUNTS_H_

#include <span>

#include "kv/block_tree.h"
#include "kv/forward_plan.h"
#include "kv/sequence_table.h"
#include "quire/attention_kv_cache.h"

namespace quire {

// `batch`: members of the open forward, if any. O(sequences + blocks).
PageCounts CountPages(const BlockTree& tree, const SequenceTable& sequences,
                      std::span<const ForwardMember> batch) noexcept;

}  // namespace quire

#endif  // QUIRE_KV_PAGE_COUNTS_H_
