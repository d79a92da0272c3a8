// StateBatch: the members of a forward of a StateHistory, or of a commit of trees: which rows each
// has, where the state before and after a row is, and what each member will hold when it ends.
//
// Invariants:
// - Slots and blocks that a member holds already are not negative.
// - members() are those that have been planned, in the order of their rows; row_count() is the sum
//   of theirs.
// - The pending records of a member ascend by position; those of a plain member end at its end().
//   Between the commit that opens a forward and its end each has a slot.
// - Blocks from first_new_block on are the member's own: they were taken for this batch.
#ifndef QUIRE_KV_RECURRENT_STATE_BATCH_H_
#define QUIRE_KV_RECURRENT_STATE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "kv/recurrent/state_tracks.h"
#include "quire/attention_kv_cache.h"

namespace quire {

// One sequence of the open forward; in a commit of trees, as if it were a forward of the accepted
// tokens.
struct StateMember {
  int32_t index = 0;
  int64_t base = 0;  // its length before the forward, with what it loads
  int64_t row_count = 0;
  int64_t first_row = 0;
  int32_t current = -1;                // slot of its state before the forward; -1: the initial one
  std::vector<StateRecord> pending{};  // ascending; the last is the end of the forward
  std::vector<int64_t> kept{};         // checkpoints that stay when it ends, ascending
  int64_t input_start = 0;             // when it ends
  std::vector<InputBlock> blocks{};    // when it ends; those from first_new_block on are taken
  size_t first_new_block = 0;
  int32_t copied_block = -1;  // the shared block with whose inputs the first new one begins

  // Number of tokens loaded from a store; the first of `pending` is the state after the last of
  // them. What the sequence held before goes when the forward ends, as by an import: `kept` and
  // `blocks` begin there.
  int64_t imported = 0;
  LayerSource* source = nullptr;

  bool is_tree = false;         // rows are the tree's last nodes; nothing is pending
  std::vector<int32_t> path{};  // of a commit: the node of each row

  int64_t end() const { return base + row_count; }
};

class StateBatch {
 public:
  // Must outlive it.
  StateBatch(const KeepPolicy& keep, StateTracks& tracks) : keep_(keep), tracks_(tracks) {}

  std::span<const StateMember> members() const { return {members_.data(), count_}; }
  std::span<StateMember> members() { return {members_.data(), count_}; }
  int64_t row_count() const { return row_count_; }

  // ---- Planning. May throw std::bad_alloc.
  // No member yet; there is room for this number of them. What is planned goes with the return
  // value, unless it is kept.
  class Planned;
  [[nodiscard]] Planned Start(size_t member_count);
  // The next member, without records and blocks; it counts from Add on.
  StateMember& Next(int32_t index, int64_t row_count);
  void Add(const StateMember& member) noexcept;
  void Drop() noexcept { count_ = 0; }
  // Where the inputs have a checkpoint interval, the checkpoints of the forward and what of all of
  // them stays; and the blocks for its inputs. `from`: what the member goes on from.
  void PlanCheckpoints(const StateTrack& from, StateMember& member) const;
  void PlanBlocks(const StateTrack& from, StateMember& member) const;
  // Where the caller adds checkpoints: what of all of them stays.
  void PlanKept(StateMember& member) const;
  // Slots for states and blocks for inputs that opening the forward may take in all.
  int64_t SlotsNeeded() const;
  int64_t BlocksNeeded() const;

  // ---- Commits.
  void TakeSlots() noexcept;
  void TakeBlocks() noexcept;
  // In the reverse order, so that slots come back to the free list as they left it.
  void ReleaseSlots(const StateMember& member) noexcept;
  void ReleaseBlocks(const StateMember& member) noexcept;
  // The track is that of a sequence whose forward has ended.
  void End(StateMember& member) noexcept;
  void Clear() noexcept;

  // ---- Rows of the open forward.
  bool is_tree() const { return count_ > 0 && members_[0].is_tree; }  // then all members are
  int64_t NodeOfRow(const StateMember& member, int64_t row) const {
    QUIRE_DCHECK(member.is_tree && row >= member.first_row);
    return tracks_[member.index].tree.size() - member.row_count + row - member.first_row;
  }
  // The slot for the state behind a row, -1 if none was added; and for the state before it, -1 for
  // the initial one (`is_known` is false if none was added for the row before).
  int32_t SlotOfRow(int64_t row) const;
  int32_t SlotBeforeRow(int64_t row, bool* is_known) const;
  // The member and position behind a row.
  struct RowPlace {
    size_t member;
    int64_t position;
  };
  RowPlace FindRow(int64_t row) const;
  // Checkpoints that may still be added to the member in this forward.
  int64_t CheckpointRoom(size_t member) const;
  // REQUIRES: CheckpointRoom, no slot there yet. Allocates nothing.
  int32_t AddCheckpoint(const RowPlace& place) noexcept;

  int64_t memory_bytes() const;

 private:
  // The slot for the state at `position` of a member, or -1 if none was added there.
  int32_t PendingSlot(const RowPlace& place) const;

  const KeepPolicy keep_;
  StateTracks& tracks_;
  std::vector<StateMember> members_;  // those behind count_ keep their capacity
  size_t count_ = 0;
  int64_t row_count_ = 0;
};

class StateBatch::Planned {
 public:
  explicit Planned(StateBatch& batch) : batch_(&batch) {}
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;
  ~Planned() {
    if (batch_ != nullptr) batch_->Drop();
  }
  void Keep() { batch_ = nullptr; }

 private:
  StateBatch* batch_;
};

// Leaves at most `limit` of the ascending positions out of those before `now`: again and again the
// one goes whose gap is smallest against its distance from the end, so that distances grow
// geometrically. Exposed for tests.
void ThinPositions(std::vector<int64_t>& positions, int64_t limit, int64_t now);

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_STATE_BATCH_H_
