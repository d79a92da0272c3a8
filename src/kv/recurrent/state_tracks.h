// StateTracks: what each sequence of a StateHistory holds: slots of states, blocks of inputs, and
// the nodes of its uncommitted tree; and which slots retained sequences hold.
//
// Invariants:
// - A slot's holders in the pool are the records, pending records and tree nodes that name it; so
//   for blocks of inputs.
// - The records of a track ascend by position, and the last one is at its length; with a checkpoint
//   interval its blocks are consecutive from input_start to its length (state_history.h).
// - retained_slot_count() is the number of slots that at least one retained sequence's records
// name;
//   node_count() that of all trees' nodes.
#ifndef QUIRE_KV_RECURRENT_STATE_TRACKS_H_
#define QUIRE_KV_RECURRENT_STATE_TRACKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "kv/pages/slot_pool.h"
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

  int64_t memory_bytes() const;
};

// What a track holds up to a position.
struct StateCut {
  size_t record_count = 0;
  size_t block_count = 0;
  bool exact = false;  // the last of the records, or the initial state, is at the position
  bool replays = false;
};

// What a track keeps when a forward of it ends.
struct KeptStates {
  int64_t length = 0;
  int64_t input_start = 0;
  const std::vector<StateRecord>& pending;  // records that the forward has added
  const std::vector<int64_t>& checkpoints;  // positions, ascending
  std::vector<InputBlock>& blocks;          // swapped with those that it had
};

// Blocks for the inputs of this number of nodes.
int64_t BlocksOfNodes(int64_t node_count, int64_t interval);

class StateTracks {
 public:
  StateTracks(const KeepPolicy& keep, int64_t slot_count, int64_t block_count)
      : keep_(keep),
        slots_(slot_count),
        blocks_(block_count),
        retained_holders_(static_cast<size_t>(slot_count), 0) {}

  SlotPool& slots() { return slots_; }
  SlotPool& blocks() { return blocks_; }
  const SlotPool& slots() const { return slots_; }
  const SlotPool& blocks() const { return blocks_; }
  const StateTrack& operator[](int32_t index) const {
    QUIRE_DCHECK(index >= 0 && index < std::ssize(tracks_)) << "no entry " << index;
    return tracks_[static_cast<size_t>(index)];
  }
  StateTrack& operator[](int32_t index) {
    QUIRE_DCHECK(index >= 0 && index < std::ssize(tracks_)) << "no entry " << index;
    return tracks_[static_cast<size_t>(index)];
  }
  int64_t node_count() const { return node_count_; }
  int64_t retained_slot_count() const { return retained_slot_count_; }
  // The number of slots that retained sequences would hold with this one.
  int64_t RetainedSlotsWith(const StateTrack& track) const;
  StateCut CutAt(const StateTrack& track, int64_t position) const;

  // Room for this number of entries of the table. May throw std::bad_alloc.
  void Reserve(size_t count) {
    if (tracks_.size() < count) tracks_.resize(count);
  }

  // ---- Commits: noexcept, and without memory.
  // A new sequence holds nothing.
  StateTrack& Start(int32_t index) noexcept;
  // The records and blocks of the cut, which the child then holds too.
  void CopyCut(const StateTrack& parent, const StateCut& cut, StateTrack* child) noexcept;
  // What lies behind the cut goes. `retained`: the sequence is.
  void Truncate(StateTrack& track, const StateCut& cut, bool retained) noexcept;
  void End(StateTrack& track, KeptStates kept) noexcept;
  // The sequence becomes retained and keeps what such a one does; or active again.
  void Retain(StateTrack& track) noexcept;
  void Activate(const StateTrack& track) noexcept;
  // All records and blocks go, those at the end first, so that slots come back to the free list as
  // they left it.
  void Release(StateTrack& track, bool retained) noexcept;
  // A node of the tree, with a slot; its block is taken with the first node that needs it.
  void AddNode(StateTree& tree, int32_t parent, int32_t depth) noexcept;
  // The tree keeps its first `size` nodes. The last taken go first.
  void DropNodes(StateTree& tree, int64_t size) noexcept;

  // Internal if the track of this sequence violates an invariant; counts its holds.
  Status CheckTrack(int64_t id, const StateTrack& track, std::vector<int32_t>& slot_holds,
                    std::vector<int32_t>& block_holds) const;
  // Whether the pools and counts agree with these holds. [slot], [block]
  Status CheckHolds(const std::vector<int32_t>& slot_holds, const std::vector<int32_t>& block_holds,
                    const std::vector<int32_t>& retained, int64_t nodes) const;
  // Gives all memory back but that of the pools. REQUIRES: no sequence holds anything.
  void Clear() noexcept;
  int64_t memory_bytes() const;

 private:
  // Retained sequences' holds are counted apart, by slot.
  void HoldRetained(int32_t slot) noexcept;
  void ReleaseRetained(int32_t slot) noexcept;
  void ReleaseRecord(const StateRecord& record, bool retained) noexcept;
  void KeepRecords(StateTrack& track, const KeptStates& kept) noexcept;
  void KeepBlocks(StateTrack& track, std::vector<InputBlock>& blocks) noexcept;

  const KeepPolicy keep_;
  SlotPool slots_;
  SlotPool blocks_;
  std::vector<StateTrack> tracks_;         // [index in the table]
  std::vector<int32_t> retained_holders_;  // [slot]
  int64_t retained_slot_count_ = 0;
  int64_t node_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_STATE_TRACKS_H_
