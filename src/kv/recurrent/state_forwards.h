// StateForwards: the forwards of a StateHistory and its commits of token trees: which members and
// rows they have, what they take from the pools, and what tracks hold when they end. Each call
// comes in two halves: Plan checks and reserves, Commit changes.
//
// Invariants:
// - Between Plan and Commit or Drop no other call has been made on the history. A commit takes
// slots
//   that Plan has counted and memory that it has reserved, so it cannot fail.
// - The batch has members while a forward is open, and from the Plan of one, or of a commit of
//   trees, until its end; otherwise none.
#ifndef QUIRE_KV_RECURRENT_STATE_FORWARDS_H_
#define QUIRE_KV_RECURRENT_STATE_FORWARDS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kv/control/control_call.h"
#include "kv/control/sequence_control.h"
#include "kv/pages/slot_pool.h"
#include "kv/recurrent/state_batch.h"
#include "kv/recurrent/state_history_options.h"
#include "kv/recurrent/state_tracks.h"
#include "quire/status.h"

namespace quire {

// OutOfPages: the call needs more slots of the pool than are free.
Status NoFreeSlots(const ControlCall& call, const char* what, int64_t needed, const SlotPool& pool);

class StateForwards {
 public:
  // All must outlive it.
  StateForwards(const StateHistoryOptions& options, SequenceControl& control, StateTracks& tracks);

  // The members and rows of the open forward; after a planned kBegin, those that its commit will
  // open.
  const StateBatch& batch() const { return batch_; }
  StateBatch& batch() { return batch_; }
  std::span<const StateMember> members() const { return batch_.members(); }

  static bool Takes(ControlCall::Kind kind) {
    return kind == ControlCall::Kind::kBegin || kind == ControlCall::Kind::kBeginTree ||
           kind == ControlCall::Kind::kEnd || kind == ControlCall::Kind::kAbort ||
           kind == ControlCall::Kind::kCommitTree;
  }
  // REQUIRES: it takes the call; what this refers to stays until Commit. After Plan of a commit of
  // trees its blocks are taken, so that the owner can copy inputs there before the commit.
  Status Plan(const ControlCall& call);
  // REQUIRES: a Plan that worked.
  void Commit() noexcept;
  void Drop() noexcept;

  // An abort, if a forward is open; then all memory goes back.
  void Clear() noexcept;
  int64_t memory_bytes() const;

 private:
  Status PlanBegin(const ControlCall& call);
  Status PlanMember(const ControlCall& call, size_t i, const LayerLoad* load);
  Status StartLoad(const ControlCall& call, const LayerLoad& load, StateMember& member);
  Status PlanBeginTree(const ControlCall& call);
  Status PlanTreeMember(const ControlCall& call, size_t i, std::span<const int64_t> parents);
  Status PlanEnd(const ControlCall& call);
  Status PlanCommitTree(const ControlCall& call);
  Status PlanLeaf(const ControlCall& call, size_t i);
  Result<int32_t> CheckMember(const ControlCall& call, int64_t seq_id, int64_t row_count);
  Status CheckRoomForBatch() const;
  Status CheckRoomForInputs() const;
  Status CheckRoomForNodes() const;
  void CommitBegin() noexcept;
  void CommitBeginTree() noexcept;
  void CommitEnd() noexcept;
  void CommitAbort() noexcept;
  void CommitTrees() noexcept;

  const StateHistoryOptions& options_;
  SequenceControl& control_;
  StateTracks& tracks_;
  StateBatch batch_;
  ControlCall call_;                  // that is planned
  std::vector<int32_t> tree_depths_;  // of a planned kBeginTree: [row]
  StateTrack loaded_;                 // what the member that is planned goes on from
};

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_STATE_FORWARDS_H_
