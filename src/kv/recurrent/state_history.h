// StateHistory: which sequences a recurrent state has and where each one's states are held. What
// forwards and commits of trees add to them is StateForwards' business. Both know slots by number;
// their bytes belong to its owner.
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
#include "kv/recurrent/state_batch.h"
#include "kv/recurrent/state_forwards.h"
#include "kv/recurrent/state_history_options.h"
#include "kv/recurrent/state_tracks.h"
#include "quire/recurrent_state.h"
#include "quire/status.h"

namespace quire {

// Inputs of positions [from.position, position), to be run onto the state of `from`.
struct ReplayPlan {
  bool needed = false;
  int32_t from_slot = -1;  // -1: the initial state
  int64_t from = 0;
  int64_t position = 0;
  int32_t to_slot = -1;
  int32_t block = -1;  // which holds them all
};

class StateHistory {
 public:
  explicit StateHistory(const StateHistoryOptions& options);

  SlotPool& slots() { return tracks_.slots(); }
  SlotPool& blocks() { return tracks_.blocks(); }
  const SlotPool& slots() const { return tracks_.slots(); }
  const SlotPool& blocks() const { return tracks_.blocks(); }
  const SequenceTable& table() const { return control_.table(); }
  const StateTrack& track(int32_t index) const { return tracks_[index]; }

  bool in_forward() const { return control_.in_forward(); }
  // The members and rows of the open or planned forward (StateForwards::batch).
  const StateBatch& batch() const { return forwards_.batch(); }
  StateBatch& batch() { return forwards_.batch(); }
  int64_t row_count() const { return batch().row_count(); }
  std::span<const StateMember> members() const { return batch().members(); }

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

  int64_t retained_slot_count() const { return tracks_.retained_slot_count(); }
  void AppendFacts(std::vector<int64_t>& facts) const;  // for digests
  // Of what grows with sequences and forwards: the pools have their size from the beginning.
  int64_t memory_bytes() const;
  Status CheckInvariants() const;

 private:
  Status PlanAdd(const ControlCall& call);
  Status PlanRemove(const ControlCall& call);
  Status PlanFork(const ControlCall& call);
  Status PlanPop(const ControlCall& call);
  Status PlanCut(const ControlCall& call, const StateTrack& track, int64_t position);
  Status PlanRetain(const ControlCall& call);
  Status PlanImport(const ControlCall& call);
  Status RequireCommitted(const ControlCall& call, int32_t index) const;

  void ReserveSequence();
  void CommitFork() noexcept;
  void CommitPop() noexcept;
  void CommitRetain() noexcept;
  void CommitImport() noexcept;
  void ClearAll() noexcept;
  // Cuts a track, of which the records and blocks behind the cut are no longer held, to position_.
  void FinishCut(StateTrack& track) noexcept;
  void ReleaseTrack(int32_t index) noexcept;

  Status CheckRetainedRoom(const ControlCall& call, const StateTrack& track) const;

  const StateHistoryOptions options_;
  SequenceControl control_;
  StateTracks tracks_;
  StateForwards forwards_;

  // What Plan has found, for Commit.
  ControlCall::Kind kind_ = ControlCall::Kind::kClear;
  ControlCall call_;  // if it is not of forwards_
  int32_t index_ = -1;
  int64_t position_ = 0;
  StateCut cut_;
  StateTrack child_;  // of a fork
  ReplayPlan replay_;
  int32_t import_slot_ = -1;
};

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_STATE_HISTORY_H_
