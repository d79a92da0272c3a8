// StateHistory: which sequences a recurrent state has, where each one's states are held, and what a
// forward adds to them. It knows slots by number; their bytes belong to its owner.
//
// A sequence is its records, ascending by position; the last one is at its length (a sequence of
// length 0 has none: its state is the initial one). With a checkpoint interval it also has input
// blocks: the inputs of interval tokens each, block b those of positions [b * interval, (b + 1) *
// interval), contiguous from input_start to its length. Every multiple of the interval behind
// input_start has a record, and so has input_start itself unless it is 0: any position from there
// on is reached by replaying fewer tokens than the interval from the record before it.
//
// Slots and blocks are shared by counting. A slot is written only by the forward that took it. A
// block is written behind its sequences' ends, and only where one sequence holds it; a forward of a
// sequence whose last block is shared writes into a copy.
#ifndef QUIRE_KV_RECURRENT_STATE_HISTORY_H_
#define QUIRE_KV_RECURRENT_STATE_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv/control/control_call.h"
#include "kv/control/sequence_control.h"
#include "kv/pages/slot_pool.h"
#include "kv/pages/token_tree.h"
#include "quire/recurrent_state.h"
#include "quire/status.h"

namespace quire {

// Which records a sequence keeps when a forward ends.
struct KeepPolicy {
  int64_t history = 1;  // newest records that end a forward
  int64_t interval =
      0;                // tokens between checkpoints, with inputs; 0: checkpoints as they are added
  int64_t recent = 0;   // newest checkpoints
  int64_t thinned = 0;  // older checkpoints, the denser the nearer to the end
};

struct StateRecord {
  int64_t position = 0;  // tokens before it
  int32_t slot = -1;
  bool ends_forward = false;
  bool checkpoint = false;
};

struct InputBlock {
  int64_t index = 0;
  int32_t slot = -1;
};

// The nodes of a sequence's uncommitted tree. Each has a slot of its own and, with a checkpoint
// interval, its inputs in block node / interval, as if nodes were positions.
struct StateTree {
  std::vector<int32_t> parents{};  // [node]; -1: a root
  std::vector<int32_t> depths{};   // [node]
  std::vector<int32_t> slots{};    // [node]
  std::vector<int32_t> blocks{};

  int64_t size() const { return static_cast<int64_t>(parents.size()); }
};

// The states and inputs of one sequence, by its index in the table.
struct StateTrack {
  int64_t length = 0;
  int64_t input_start = 0;
  std::vector<StateRecord> records{};
  std::vector<InputBlock> blocks{};
  StateTree tree{};
};

// One sequence of the open forward. Of a commit of trees, as if it were a forward of the accepted
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

  // It loads so many tokens: the first of `pending` is the state behind them. What the sequence
  // held before goes when the forward ends, as by an import: `kept` and `blocks` begin there.
  int64_t imported = 0;
  LayerSource* source = nullptr;

  bool is_tree = false;         // rows are the tree's last nodes; nothing is pending
  std::vector<int32_t> path{};  // of a commit: the node of each row

  int64_t end() const { return base + row_count; }
};

// Inputs of positions [from.position, position), to be run onto the state of `from`.
struct ReplayPlan {
  bool needed = false;
  int32_t from_slot = -1;  // -1: the initial state
  int64_t from = 0;
  int64_t position = 0;
  int32_t to_slot = -1;
  int32_t block = -1;  // which holds them all
};

struct StateHistoryOptions {
  int64_t max_num_sequences = 0;
  int64_t max_retained_slots = 0;
  int64_t slot_count = 0;      // 0: so many that every forward finds room
  int64_t max_tree_size = 0;   // nodes of a sequence
  int64_t max_tree_slots = 0;  // nodes of all sequences; slots and blocks beside the others
  int64_t max_rows = 0;        // of a forward, where checkpoints have an interval
  int64_t max_loads = 0;       // members of a forward that load
  KeepPolicy keep;
};

class StateHistory {
 public:
  static int64_t SlotCount(const StateHistoryOptions& options);
  // So many that every forward finds room.
  static int64_t BlockCount(const StateHistoryOptions& options);

  explicit StateHistory(const StateHistoryOptions& options);

  SlotPool& slots() { return slots_; }
  SlotPool& blocks() { return blocks_; }
  const SlotPool& slots() const { return slots_; }
  const SlotPool& blocks() const { return blocks_; }
  const SequenceTable& table() const { return control_.table(); }
  const StateTrack& track(int32_t index) const { return TrackOf(index); }

  bool in_forward() const { return control_.in_forward(); }
  int64_t row_count() const { return row_count_; }
  // Of the open forward; after a planned kBegin, those that its commit will open.
  std::span<const StateMember> members() const { return {members_.data(), member_count_}; }

  // PlannedState's. An import makes a sequence longer whose earlier states it forgets: the one at
  // its new end, which the owner writes before the commit, is all that is held. After Plan of a
  // fork or pop, replay() says what has to be computed before the commit: to_slot is taken already.
  Status Plan(const ControlCall& call);
  // Returns the kind of the call that it has committed.
  ControlCall::Kind Commit() noexcept;
  void Drop() noexcept;
  const ReplayPlan& replay() const { return replay_; }
  // After Plan of an import: the slot, taken already, for its state.
  int32_t import_slot() const { return import_slot_; }
  // The slot of the state at exactly `position`, -1 for the initial one. NeedsReplay if none is
  // held.
  Result<int32_t> SlotAt(const char* call, int64_t seq_id, int64_t position) const;

  Status RequireForward(const char* call) const { return control_.RequireForward(call); }
  Result<int32_t> Find(const char* call, int64_t seq_id) const {
    return control_.Find(call, seq_id);
  }
  Result<int64_t> Length(const char* call, int64_t seq_id) const;  // with the open forward's tokens
  Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const;
  Result<int64_t> TreeSize(const char* call, int64_t seq_id) const;

  // In a tree forward all members are trees.
  bool in_tree_forward() const { return in_forward() && member_count_ > 0 && members_[0].is_tree; }
  int64_t NodeOfRow(const StateMember& member, int64_t row) const {
    return TrackOf(member.index).tree.size() - member.row_count + row - member.first_row;
  }
  const StateMember& MemberOfRow(int64_t row) const { return members_[FindRow(row).member]; }
  // The slot for the state behind a row, -1 if none was added; and for the state before it, -1 for
  // the initial one (`is_known` is false if none was added for the row before).
  int32_t SlotOfRow(int64_t row) const;
  int32_t SlotBeforeRow(int64_t row, bool* is_known) const;

  // The member and position behind a row of the open forward.
  struct RowPlace {
    size_t member;
    int64_t position;
  };
  RowPlace FindRow(int64_t row) const;
  // The slot for the state at `position` of a member, or -1 if none was added there.
  int32_t PendingSlot(const RowPlace& place) const;
  // Checkpoints that may still be added to the member in this forward.
  int64_t CheckpointRoom(size_t member) const;
  // REQUIRES: CheckpointRoom, no slot there yet. Allocates nothing.
  int32_t AddCheckpoint(const RowPlace& place) noexcept;

  int64_t retained_slot_count() const { return retained_slot_count_; }
  void AppendFacts(std::vector<int64_t>& facts) const;  // for digests
  // Of what grows with sequences and forwards: the pools have their size from the beginning.
  int64_t memory_bytes() const;
  Status CheckInvariants() const;

 private:
  // The part of a track up to a position.
  struct Cut {
    size_t record_count = 0;
    size_t block_count = 0;
    bool exact = false;  // the last of the records, or the initial state, is at the position
    bool replays = false;
  };

  const StateTrack& TrackOf(int32_t index) const { return tracks_[static_cast<size_t>(index)]; }
  StateTrack& TrackOf(int32_t index) { return tracks_[static_cast<size_t>(index)]; }
  Cut CutAt(const StateTrack& track, int64_t position) const;

  Status PlanAdd(const ControlCall& call);
  Status PlanRemove(const ControlCall& call);
  Status PlanFork(const ControlCall& call);
  Status PlanPop(const ControlCall& call);
  Status PlanCut(const ControlCall& call, const StateTrack& track, int64_t position);
  Status PlanRetain(const ControlCall& call);
  Status PlanImport(const ControlCall& call);
  Status PlanBegin(const ControlCall& call);
  Status PlanMember(const ControlCall& call, size_t i, const LayerLoad* load);
  Status StartLoad(const ControlCall& call, const LayerLoad& load, StateMember& member);
  void PlanCheckpoints(const StateTrack& track, StateMember& member) const;
  void PlanBlocks(const StateTrack& track, StateMember& member) const;
  Status CheckRoomForBatch() const;
  void PlanEnd();
  void PlanKept(StateMember& member) const;
  Status RequireCommitted(const ControlCall& call, int32_t index) const;
  void StartBatch(size_t member_count);
  Status PlanBeginTree(const ControlCall& call);
  Status PlanTreeMember(const ControlCall& call, size_t i, std::span<const int64_t> parents);
  Status PlanCommitTree(const ControlCall& call);
  Status PlanLeaf(const ControlCall& call, size_t i);
  Status CheckRoomForNodes() const;
  void CommitBeginTree() noexcept;
  void CommitTrees() noexcept;
  void DropNodes(int32_t index, int64_t size) noexcept;
  void ReleasePlannedBlocks() noexcept;
  Result<int32_t> CheckMember(const ControlCall& call, int64_t seq_id, int64_t row_count);
  void StartMember(StateMember& member, int32_t index, int64_t row_count) const;

  void ReserveSequence();
  int32_t InsertSequence(int64_t seq_id) noexcept;
  void CommitFork() noexcept;
  void CommitPop() noexcept;
  void CommitRetain() noexcept;
  void CommitImport() noexcept;
  void CommitBegin() noexcept;
  void CommitEnd() noexcept;
  void CommitAbort() noexcept;
  void ClearAll() noexcept;
  void EndMember(StateMember& member) noexcept;
  void KeepRecords(StateTrack& track, const StateMember& member) noexcept;
  void KeepBlocks(StateTrack& track, StateMember& member) noexcept;
  // Cuts a track, of which the records and blocks behind the cut are no longer held, to position_.
  void FinishCut(StateTrack& track) noexcept;
  void ReleaseRecord(const StateRecord& record, bool retained) noexcept;
  void ReleaseTrack(int32_t index) noexcept;

  // Retained sequences' holds are counted apart, by slot.
  void HoldRetained(int32_t slot) noexcept;
  void ReleaseRetained(int32_t slot) noexcept;
  Status CheckRetainedRoom(const ControlCall& call, const StateTrack& track) const;
  Status CheckTrack(int32_t index, std::vector<int32_t>& slot_holds,
                    std::vector<int32_t>& block_holds) const;

  const StateHistoryOptions options_;
  SlotPool slots_;
  SlotPool blocks_;
  SequenceControl control_;
  std::vector<StateTrack> tracks_;         // [index in the table]
  std::vector<int32_t> retained_holders_;  // [slot]
  int64_t retained_slot_count_ = 0;

  std::vector<StateMember> members_;  // those behind member_count_ keep their capacity
  size_t member_count_ = 0;
  int64_t row_count_ = 0;
  int64_t tree_node_count_ = 0;       // of all trees
  std::vector<int32_t> tree_depths_;  // of a planned kBeginTree: [row]

  // What Plan has found, for Commit.
  ControlCall call_;
  int32_t index_ = -1;
  int64_t position_ = 0;
  Cut cut_;
  StateTrack child_;   // of a fork
  StateTrack loaded_;  // what the member that is planned goes on from
  ReplayPlan replay_;
  int32_t import_slot_ = -1;
};

// Leaves at most `limit` of the ascending positions out of those before `now`: again and again the
// one goes whose gap is smallest against its distance from the end, so that distances grow
// geometrically. Exposed for tests.
void ThinPositions(std::vector<int64_t>& positions, int64_t limit, int64_t now);

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_STATE_HISTORY_H_
