// Checks every invariant of the block tree, the page pools and the sequences (head of block_tree.h)
// from scratch.
#ifndef QUIRE_KV_CACHE_KV_INVARIANTS_H_
#define QUIRE_KV_CACHE_KV_INVARIANTS_H_

#include <span>

#include "kv/pages/block_tree.h"
#include "kv/pages/sequence_table.h"
#include "kv/plan/forward_plan.h"
#include "quire/status.h"

namespace quire {

// Internal with the first violation. `batch`: members of the open forward, if any. `layer_windows`
// [group] and `max_pop` are read if the tree tracks what windows hide. Takes time in the order of
// all pages and tokens; for tests and fuzzers.
Status CheckKVInvariants(const BlockTree& tree, const SequenceTable& sequences,
                         std::span<const ForwardMember> batch, const TokenTrees* trees = nullptr,
                         std::span<const int64_t> layer_windows = {}, int64_t max_pop = 0);

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_INVARIANTS_H_
