// Checks every invariant of the block tree, the page pools and the sequences (head of block_tree.h)
// from scratch.
#ifndef QUIRE_KV_KV_INVARIANTS_H_
#define QUIRE_KV_KV_INVARIANTS_H_

#include <span>

#include "kv/block_tree.h"
#include "kv/forward_plan.h"
#include "kv/sequence_table.h"
#include "quire/status.h"

namespace quire {

// Internal with the first violation. `batch`: members of the open forward, if any. Takes time in
// the order of all pages and tokens; for tests and fuzzers.
Status CheckKVInvariants(const BlockTree& tree, const SequenceTable& sequences,
                         std::span<const ForwardMember> batch, const TokenTrees* trees = nullptr);

}  // namespace quire

#endif  // QUIRE_KV_KV_INVARIANTS_H_
