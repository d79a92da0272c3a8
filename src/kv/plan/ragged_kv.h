// Keys and values that a caller gives for the new tokens of a forward, laid out as pages, so that
// the kernels of paged attention read them (SelfAttention). The tokens of a sequence stand at the
// positions 0, 1, ... of pages of its own, new nodes of a tree at their depths: what a row sees
// does not depend on the rest of the batch.
#ifndef QUIRE_KV_PLAN_RAGGED_KV_H_
#define QUIRE_KV_PLAN_RAGGED_KV_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kv/plan/forward_plan.h"

namespace quire {

class RaggedKV {
 public:
  // Memory for these and their page tables. May throw std::bad_alloc. `layout` is without a page
  // size. With `poison`, pages are NaN at first.
  // REQUIRES: the forward is open.
  void Prepare(KVLayout layout, const ForwardPlan& plan, bool poison);

  const KVPages& pages() const { return pages_; }
  std::span<const AppendTarget> targets() const { return targets_; }   // [row]
  std::span<const uint8_t> opens_tile() const { return opens_tile_; }  // [row]
  std::span<AttentionSequence> sequences() { return sequences_; }      // [member]

 private:
  const TokenTreeView* AddTree(const ForwardMember& member, const ForwardPlan& plan,
                               int64_t first_page);
  void ReservePages(int64_t page_count, bool poison);

  KVPages pages_;
  std::unique_ptr<std::byte[]> memory_;
  size_t memory_bytes_ = 0;
  std::vector<uint8_t> v_nonfinite_;
  std::vector<AppendTarget> targets_;
  std::vector<uint8_t> opens_tile_;
  std::vector<PageEntry> entries_;  // [page]
  std::vector<PageRun> runs_;       // [member]; trees have none
  std::vector<TokenTreeView> trees_;
  std::vector<int32_t> parents_, depths_;  // of nodes, [row]
  std::vector<int32_t> page_numbers_;      // 0, 1, ..
  std::vector<AttentionSequence> sequences_;
};

}  // namespace quire

#endif  // QUIRE_KV_PLAN_RAGGED_KV_H_
