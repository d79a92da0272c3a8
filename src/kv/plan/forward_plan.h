// ForwardPlan: one forward as arrays for the kernels: where new tokens go, what each sequence
// reads, what is read once for several.
//
// Size and time are O(sequences + blocks on their paths + new tokens), never O(pages): the plan
// refers to page tables of the block tree and copies none. Page arrays therefore stay where they
// are while the forward is open (BlockTree defers merges, appends happen at Begin only).
//
// Rows are in the order of the batch. Sequences are in *plan order*: depth first along the block
// tree, so that sequences that share a block are adjacent wherever they stand in the batch. Without
// sharing both orders are the same and nothing is spent on it.
#ifndef QUIRE_KV_PLAN_FORWARD_PLAN_H_
#define QUIRE_KV_PLAN_FORWARD_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/backend.h"
#include "kv/pages/block_tree.h"
#include "kv/pages/token_tree.h"

namespace quire {

class LayerSource;

// One sequence of the batch.
struct ForwardMember {
  // No aggregate: that would be cleared as a whole before its fields are set, which is slow.
  ForwardMember() noexcept;

  int64_t id = 0;
  int32_t sequence = 0;        // index in the sequence table
  BlockIndex last = kNoBlock;  // where it ends once the append is committed
  int64_t first_row = 0;
  AppendPlan append;  // imported tokens, then those of the rows
  bool long_factors = false;
  SequenceWindow window = {};
  int64_t imported = 0;
  int64_t first_import = 0;       // imported tokens of the members before it
  LayerSource* source = nullptr;  // of the imported tokens
  bool blends = false;            // its rows may grow fewer (query_plan.h)
  // Of a tree forward: the rows are the tree's last nodes, and the append gives the path a position
  // for each new level (it may be none).
  int64_t node_count = 0;           // rows; 0: not of a tree
  int64_t committed = 0;            // the sequence's length without the tree
  int64_t levels = 0;               // of the whole tree
  const TokenTree* tree = nullptr;  // once the nodes are added
  bool is_tree() const { return node_count > 0; }
  // A decode step: one token behind those that stay where they are.
  bool is_row() const {
    return append.count == 1 && !append.copies() && imported == 0 && !is_tree();
  }
  int64_t old_length() const { return append.length; }
  // Where its first row, or a root of its tree, stands.
  int64_t base() const { return is_tree() ? committed : append.length + imported; }
  int64_t row_count() const { return is_tree() ? node_count : append.count - imported; }
  int64_t position_end() const { return base() + (is_tree() ? levels : row_count()); }
  int64_t first_node() const {
    QUIRE_DCHECK(tree != nullptr && tree->size() >= node_count) << "its nodes are not added";
    return tree->size() - node_count;
  }
  bool appends() const { return append.count > 0; }
};

inline ForwardMember::ForwardMember() noexcept = default;

// What a batch needs, summed over its members.
struct BatchTotals {
  int64_t members = 0;
  int64_t rows = 0;
  int64_t imports = 0;
  int64_t path_blocks = 0;     // before the appends
  bool shares_blocks = false;  // two members have a block in common
  int64_t copying = 0;         // members that copy
  int64_t copied_tokens = 0;
  int64_t trees = 0;
  int64_t blending = 0;  // members whose rows may grow fewer
  // ForwardMember::is_row() of all.
  bool rows_only() const { return copying + imports + trees == 0 && rows == members; }
  // Where the positions end, of members with each set of RoPE factors; 0: there is none.
  int64_t short_end = 0;
  int64_t long_end = 0;
  bool has_sinks = false;
};

// Where consecutive tokens are stored.
struct TokenSlots {
  std::vector<AppendTarget> targets;
  std::vector<uint8_t> opens_tile;
};

// The part of the plan for one group of layers.
struct GroupPlan {
  TokenSlots rows;
  TokenSlots imports;  // members' imported tokens, in the order of the batch
  std::vector<PageRun> runs;
  std::vector<AttentionSequence> sequences;  // in plan order
  std::vector<TokenTreeView> trees;          // of those that are trees, in this order
  // Consolidation: tokens whose bytes move before the forward.
  std::vector<AppendTarget> copy_from;
  std::vector<AppendTarget> copy_to;
  std::vector<uint8_t> copy_opens_tile;
};

class ForwardPlan {
 public:
  // ---- Planning: StartBatch, fill these, then Reserve.
  std::vector<ForwardMember> members;      // in the order of the batch
  std::vector<GroupAppend> group_appends;  // [member][group]
  std::vector<int64_t> page_counts;        // [group]: pages that the batch takes
  std::vector<int32_t> node_depths;        // [row] of a tree forward

  // Room for `member_count` members, without any; all counts are 0. May throw std::bad_alloc.
  void StartBatch(size_t member_count, size_t group_count);

  void ClearArrays() noexcept;                      // all else, but the totals
  void Clear() noexcept { *this = ForwardPlan(); }  // gives all memory back
  // Memory for Fill, and the totals. May throw std::bad_alloc.
  // REQUIRES: tree.Reserve for all appends, which are not committed yet.
  void Reserve(const BlockTree& tree);
  const BatchTotals& totals() const { return totals_; }
  // ---- Commit.
  // REQUIRES: Reserve; no arrays; all appends are committed and members[i].last is set.
  void Fill(const BlockTree& tree) noexcept;

  // ---- The same batch once more, see forward_plan_repeat.cc.
  // Whether a forward of these is one token more for each member of this plan, in arrays as they
  // are. If so, page_counts are those that it takes.
  bool CanRepeat(std::span<const int64_t> ids, std::span<const int64_t> lengths,
                 const BlockTree& tree) noexcept;
  // Commits the appends and makes this their plan. REQUIRES: CanRepeat; pages available.
  void Repeat(BlockTree& tree) noexcept;
  // A sequence has changed in something that the tree does not know.
  void ForbidRepeat() noexcept { filled_at_ = 0; }
  // What differs from a plan that is made of the same members from the start, or "". For tests.
  std::string DifferenceFromNew(const BlockTree& tree) const;

  int64_t row_count() const { return row_count_; }
  int64_t import_count() const {
    return members.empty() ? 0 : members.back().first_import + members.back().imported;
  }
  std::span<const int32_t> positions() const { return positions_; }  // [row]
  // Of nodes: how many of their ancestors are from forwards before. [row]; empty without trees.
  std::span<const int32_t> old_levels() const { return old_levels_; }
  const GroupPlan& group(int group) const { return groups_[static_cast<size_t>(group)]; }
  // The same plan for a caller that adds pointers to its sequences (RopeMode::kInline).
  GroupPlan& group(int group) { return groups_[static_cast<size_t>(group)]; }
  std::span<const SharedSpan> shared() const { return shared_; }
  size_t shared_capacity() const { return shared_.capacity(); }  // what Fill may use
  std::span<const int32_t> order() const { return order_; }      // plan order -> member

  // Stable text, one line per fact.
  std::string ToString(const BlockTree& tree) const;

 private:
  // A block on the path of a member, in batches that share blocks.
  struct Node {
    BlockIndex block = kNoBlock;
    int32_t parent = -1;
    int32_t first_child = -1;
    int32_t last_child = -1;
    int32_t next_sibling = -1;
    int32_t member = -1;  // that ends in it
    int64_t member_count = 0;
    int64_t shared_end = 0;  // segments before it are in blocks of this path that two members share
    int32_t span = -1;       // the SharedSpan that ends with this block's segments
  };
  struct Mark {
    uint64_t pass = 0;
    int32_t node = -1;
  };

  void AddPath(const BlockTree& tree, BlockIndex last, BatchTotals& totals);
  int32_t OldLevels(const ForwardMember& member, int64_t i) const noexcept;
  void FillPositions() noexcept;
  void BuildNodes(const BlockTree& tree) noexcept;
  void AddChild(int32_t parent, int32_t child) noexcept;
  void OrderByTree(const BlockTree& tree) noexcept;
  void EnterNode(const BlockTree& tree, int32_t index) noexcept;
  int32_t NextNode(int32_t index) const noexcept;
  void FillSlot(const BlockTree& tree, int group, const ForwardMember& member,
                bool in_place) noexcept;
  void FillSlots(const BlockTree& tree, int group, const ForwardMember& member,
                 const GroupAppend& append) noexcept;
  void FillNodeSlots(const BlockTree& tree, int group, const ForwardMember& member) noexcept;
  const TokenTreeView* AddTreeView(int group, const ForwardMember& member) noexcept;
  void FillCopies(const BlockTree& tree, int group, const ForwardMember& member) noexcept;
  void FillSequences(const BlockTree& tree, int group) noexcept;
  static void FillRuns(const BlockTree& tree, int group, BlockIndex last,
                       std::vector<PageRun>& runs) noexcept;

  void RepeatSlots(PagePool& pool, int group) noexcept;
  void RepeatWithPages(BlockTree& tree, size_t member) noexcept;
  void RepeatSequences(int group) noexcept;

  // The tree's version when the arrays were filled; 0: there are none, or none to be repeated.
  uint64_t filled_at_ = 0;
  BatchTotals totals_;
  int64_t row_count_ = 0;
  std::vector<int32_t> positions_;
  std::vector<int32_t> old_levels_;
  std::vector<GroupPlan> groups_;
  std::vector<SharedSpan> shared_;
  std::vector<int32_t> order_;
  std::vector<int64_t> private_segments_;  // [plan order]

  std::vector<uint8_t> opens_page_;  // scratch of Repeat: in any group [member]

  // Scratch of Reserve and Fill.
  uint64_t pass_ = 0;
  std::vector<Mark> marks_;  // [block]
  std::vector<Node> nodes_;  // node 0 stands for no block: its children are the roots
};

}  // namespace quire

#endif  // QUIRE_KV_PLAN_FORWARD_PLAN_H_
