// BlockQueries: which tokens share which pages, to be shown to people. Callers of AttentionKVCache
// need none of it, so it is an interface of its own beside that one.
#ifndef QUIRE_KV_PAGES_BLOCK_QUERIES_H_
#define QUIRE_KV_PAGES_BLOCK_QUERIES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kv/pages/block_tree.h"
#include "kv/pages/layer_groups.h"
#include "kv/pages/sequence_table.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

// A range of tokens that the same sequences see.
struct SeenBlock {
  int64_t parent = -1;  // index of the block before it; -1: it begins its path, or what comes
                        // before was left out
  TokenRange tokens;    // positions; places for the nodes of an uncommitted tree, and for tokens
                        // that are still to come, count
  int64_t pages = 0;    // that begin in it, of all groups: the sum over all blocks is what is held
  int64_t bytes = 0;    // of these pages
};

struct SeenBlocks {
  std::vector<SeenBlock> blocks;  // parents come before their children
  std::vector<int64_t> ends;      // [sequence] the block in which it ends; -1: it has no tokens, is
                                  // not there, or its block was left out
  bool cut = false;               // blocks were left out
  int64_t visited = 0;  // blocks that were looked at: at most blocks_max and one for each sequence
};

class BlockQueries {
 public:
  virtual ~BlockQueries() = default;
  // The blocks of these sequences, those of the first ones first, at most blocks_max. A path that
  // is too long is described from its end. As a query of KVState.
  virtual Result<SeenBlocks> DescribeBlocks(std::span<const int64_t> seq_ids,
                                            int64_t blocks_max) const = 0;
};

// [group] of the tree. May throw std::bad_alloc.
SeenBlocks DescribeBlocksOf(const BlockTree& tree, const SequenceTable& sequences,
                            std::span<const LayerGroup> groups, std::span<const int64_t> seq_ids,
                            int64_t blocks_max);

}  // namespace quire

#endif  // QUIRE_KV_PAGES_BLOCK_QUERIES_H_
