// For tests: the calls of a cache on a bare block tree, with tokens in place of keys and values.
#ifndef QUIRE_KV_TESTING_BLOCK_TREE_DRIVER_H_
#define QUIRE_KV_TESTING_BLOCK_TREE_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kv/pages/block_tree.h"
#include "kv/pages/sequence_table.h"
#include "kv/plan/forward_plan.h"

namespace quire {

// Every sequence is kept twice: in the tree, where a token is a number in a slot, and as a plain
// list. Check() compares the two and the invariants; it returns what is wrong, or "".
class BlockTreeDriver {
 public:
  struct Pages {
    int64_t page_size;
    int64_t page_count;
  };
  explicit BlockTreeDriver(const std::vector<Pages>& groups);

  void Add(int64_t id);
  void Fork(int64_t parent, int64_t child, int64_t position);
  void Pop(int64_t id, int64_t n);
  void Remove(int64_t id);
  struct Item {
    int64_t id;
    int64_t count;
  };
  // False, and nothing has changed, if pages are missing.
  bool Begin(const std::vector<Item>& batch);
  void End();
  void Abort();
  void Append(int64_t id, int64_t count);  // Begin and End
  void Clear();

  // Slots of the sequence's tokens as page * page_size + slot.
  std::vector<int64_t> Slots(int64_t id, int group = 0) const;
  int64_t Length(int64_t id) const;
  int64_t PathLength(int64_t id) const;
  int64_t free_pages(int group = 0) const { return tree_.pool(group).free_count(); }
  std::string PlanText() const { return plan_.ToString(tree_); }
  // All that can be observed, but for the order of free pages.
  std::string Snapshot() const;
  std::string Check() const;

  const BlockTree& tree() const { return tree_; }
  const ForwardPlan& plan() const { return plan_; }
  const std::map<int64_t, std::vector<int64_t>>& lists() const { return lists_; }
  bool in_forward() const { return in_forward_; }
  bool InBatch(int64_t id) const;

 private:
  Sequence& sequence(int64_t id) { return table_[table_.Find(id)]; }
  const Sequence& sequence(int64_t id) const { return table_[table_.Find(id)]; }
  void MoveBytes();
  std::string CheckTokens() const;
  std::string CheckPlan() const;
  std::string CheckRows(int group, const ForwardMember& member,
                        const AttentionSequence& view) const;
  std::string CheckShared(int group, const SharedSpan& span) const;

  BlockTree tree_;
  SequenceTable table_;
  ForwardPlan plan_;
  std::map<int64_t, std::vector<int64_t>> lists_;
  std::vector<std::vector<int64_t>> slots_;  // [group][page * page_size + slot]: the token there
  std::vector<std::vector<bool>>
      tiles_;  // [group][page * tiles + tile]: opened since the page was taken
  int64_t next_token_ = 1;
  bool in_forward_ = false;
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_BLOCK_TREE_DRIVER_H_
