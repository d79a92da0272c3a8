// QueryPlan: which rows of an open forward go on, and what attention reads for these.
//
// A plan's rows are its *append rows*; those that go on are its *query rows*. In an ordinary
// forward they are the same and this has nothing to do. In a forward that blends, layers choose:
//   Select   says for one member which rows go on
//   Apply    after the members of a layer have chosen: what is attended to is that of the rows left
//   Pack     the next layer begins, whose tensors have the rows left alone
// Between Apply and Pack tensors have the rows that came to the layer (its *input rows*).
//
// Each maximal run of consecutive query rows is an AttentionSequence over its member's pages, which
// may hold later positions as well: a row's view ends at its own position. What the plan shares
// between members is shared by their runs, and a member's own segments by its runs behind them.
//
// Invariants:
// - Query rows ascend, and are a subset of the input rows, which are one of the append rows.
// - Every member keeps a row.
// - A tile that the forward opens is opened by the first of its rows that a layer stores: moved
//   rows are stored before fresh ones, so that opening clears no value of this layer.
#ifndef QUIRE_KV_PLAN_QUERY_PLAN_H_
#define QUIRE_KV_PLAN_QUERY_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/backend.h"
#include "kv/plan/forward_plan.h"

namespace quire {

class QueryPlan {
 public:
  // A forward of the plan may begin whose rows stay. May throw std::bad_alloc.
  void ReserveRows(int64_t row_count);
  // The same for one whose rows may grow fewer. REQUIRES: plan.Reserve.
  void Reserve(const ForwardPlan& plan);
  // All rows go on. REQUIRES: Reserve; the plan is filled.
  void Open(const ForwardPlan& plan) noexcept;
  void Close() noexcept { is_open_ = false; }
  void Clear() noexcept { *this = QueryPlan(); }  // gives all memory back
  // Whether rows of the open forward may grow fewer. Without that, only AllRows may be called.
  bool is_open() const { return is_open_; }

  // Append rows 0, 1, ... of an ordinary forward.
  std::span<const int32_t> AllRows(int64_t count) const {
    QUIRE_DCHECK(count >= 0 && count <= std::ssize(all_rows_)) << "ReserveRows was left out";
    return std::span<const int32_t>(all_rows_).first(static_cast<size_t>(count));
  }

  // ---- The rows that go on.
  std::span<const int32_t> rows() const { return rows_; }            // append rows
  std::span<const int32_t> positions() const { return positions_; }  // [row]
  // Of a member of the plan, as append rows.
  std::span<const int32_t> RowsOf(const ForwardMember& member) const noexcept;
  bool GoesOn(int64_t append_row) const { return goes_on_[static_cast<size_t>(append_row)] != 0; }
  bool AllGoOn(const ForwardMember& member) const {
    return std::ssize(RowsOf(member)) == member.row_count();
  }

  // These rows of the member (counted from its first append row) go on, and no others of it.
  // REQUIRES: they ascend, are among those that went on, and there is one.
  void Select(const ForwardMember& member, std::span<const int32_t> rows) noexcept;
  void Apply(const ForwardPlan& plan) noexcept;
  void Pack(const ForwardPlan& plan) noexcept;
  bool is_packed() const { return is_packed_; }
  // Rows that a layer's tensors have at least.
  int64_t input_count() const { return input_count_; }

  // ---- What kernels read. Before any selection it is the plan's own.
  std::span<const AttentionSequence> sequences(int group) const {
    return groups_[static_cast<size_t>(group)].sequences;
  }
  std::span<const SharedSpan> shared() const { return shared_; }
  // Where the input rows are stored; [input row]. REQUIRES: is_packed.
  const TokenSlots& fresh(int group) const {
    QUIRE_DCHECK(is_packed_);
    return groups_[static_cast<size_t>(group)].fresh;
  }
  // [append row]: for those that do not go on, whether they open their tile. REQUIRES: is_packed.
  std::span<const uint8_t> moved_opens_tile(int group) const {
    QUIRE_DCHECK(is_packed_);
    return groups_[static_cast<size_t>(group)].moved_opens_tile;
  }

  // Bytes that Reserve takes for a forward of that size.
  static int64_t Bytes(int64_t row_count, int64_t member_count, int64_t group_count);
  // Sequences that such a forward has at most.
  static int64_t SequenceCountMax(int64_t row_count, int64_t member_count) {
    return member_count + (row_count + 1) / 2;
  }
  int64_t bytes() const;  // that are taken
  // Stable text, one line per fact.
  std::string ToString(const ForwardPlan& plan) const;

 private:
  struct Group {
    std::vector<AttentionSequence> sequences;
    TokenSlots fresh;
    std::vector<uint8_t> moved_opens_tile;
  };
  // Consecutive query rows of one member.
  struct Run {
    int32_t order = 0;  // of the member, in plan order
    int32_t first = 0;  // append row
    int32_t input = 0;  // the same row, counted among the input rows
    int32_t count = 0;
    int64_t private_segment = 0;
  };

  void FindRuns(const ForwardPlan& plan) noexcept;
  void ShareSegments(const ForwardPlan& plan) noexcept;
  void ShareOwnSegments(const ForwardPlan& plan, size_t begin, size_t end) noexcept;
  void FillSequences(const ForwardPlan& plan) noexcept;
  void FillSlots(const ForwardPlan& plan) noexcept;

  std::vector<int32_t> all_rows_;
  bool is_open_ = false;
  bool is_packed_ = true;
  int64_t input_count_ = 0;
  std::vector<int32_t> rows_;
  std::vector<int32_t> inputs_;  // [query row]: which of the input rows it is
  std::vector<int32_t> positions_;
  std::vector<uint8_t> goes_on_;   // [append row]
  std::vector<Run> runs_;          // in plan order
  std::vector<size_t> run_begin_;  // [plan order], and their number: of the member's runs
  std::vector<SharedSpan> shared_;
  std::vector<Group> groups_;
};

}  // namespace quire

#endif  // QUIRE_KV_PLAN_QUERY_PLAN_H_
