// PagedSequences: the sequences of a paged cache and where their tokens lie: which sequences there
// are (SequenceControl), on which pages (BlockTree, and TokenTrees for what no commit has
// accepted), and the bytes of these pages (PageStorage). The owners of a cache's rules work on one.
//
// Invariants:
// - The path of a sequence ends with `reserved` positions without tokens. They are for the levels
//   of its uncommitted tree or for pending tokens, never for both; without them `reserved` is 0.
//   What comes before them is the committed length.
// - Only the owner of a rule moves a sequence's end: it calls BlockTree::Unhide before and
//   WindowBook::UpdateHidden or SlideTo after.
#ifndef QUIRE_KV_CACHE_PAGED_SEQUENCES_H_
#define QUIRE_KV_CACHE_PAGED_SEQUENCES_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/check.h"
#include "kv/control/sequence_control.h"
#include "kv/pages/block_tree.h"
#include "kv/pages/layer_groups.h"
#include "kv/pages/page_storage.h"
#include "kv/pages/token_tree.h"
#include "kv/transfer/pending_receives.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

struct PagedSequences {
  // REQUIRES: `groups` and `storage` are made of the options, which name a runner.
  PagedSequences(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
                 std::unique_ptr<PageStorage> storage);
  PagedSequences(const PagedSequences&) = delete;
  PagedSequences& operator=(const PagedSequences&) = delete;

  // No sequences any more.
  void Clear() noexcept;

  // ---- Lengths in tokens.
  int64_t CommittedLength(const Sequence& sequence) const {
    QUIRE_DCHECK(sequence.reserved >= 0 && sequence.reserved <= tree.End(sequence.last));
    return tree.End(sequence.last) - sequence.reserved;
  }
  // With the nodes of its uncommitted tree and pending tokens.
  int64_t LengthOf(int32_t index) const {
    return CommittedLength(control[index]) + trees.SizeOf(index) + control[index].pending;
  }
  int group_of(int64_t layer) const { return layer_groups[static_cast<size_t>(layer)]; }

  // ---- Checks for a call with this name.
  // BadState if the sequence has pending tokens.
  Status RequireReceived(const char* call, int32_t index) const;
  // BadState if it has pending tokens or a tree.
  Status RequireCommitted(const char* call, int32_t index) const;
  // BadArgument if windows have let go of some of its tokens in [start, end) of the group.
  Status CheckHeld(const char* call, const Sequence& sequence, int group, int64_t start,
                   int64_t end) const;
  // OutOfPages unless this number of pages is free in each group. [group] Those that are free then
  // may be taken: nobody writes to them.
  Status CheckPages(const char* call, std::span<const int64_t> page_counts) const;

  // Slots of the positions from `start` on, of the path that ends in `last`.
  void FillSlots(BlockIndex last, int group, int64_t start,
                 std::span<AppendTarget> slots) const noexcept;
  // The layout with this set of RoPE factors: equal for equal stored bytes of two caches.
  uint64_t TransferLayout(bool long_factors) const;

  const AttentionKVCacheOptions options;
  const std::vector<LayerGroup> groups;
  const std::vector<int> layer_groups;  // [layer] -> index in groups
  const std::unique_ptr<PageStorage> storage;
  const PendingReceives* receives = nullptr;  // of the receiver that writes to pages; null: none
  SequenceControl control;
  BlockTree tree;
  TokenTrees trees;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_PAGED_SEQUENCES_H_
