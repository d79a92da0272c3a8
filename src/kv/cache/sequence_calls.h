// SequenceCalls: the calls of a paged cache that change sequences outside of a forward: add,
// remove, fork, pop, retain, import, and the commit of token trees. Each comes in two halves: Plan
// checks and reserves, Commit changes.
//
// Invariant: between Plan and Commit no other call has been made on the cache, so that what Plan
// has found and reserved is still there.
#ifndef QUIRE_KV_CACHE_SEQUENCE_CALLS_H_
#define QUIRE_KV_CACHE_SEQUENCE_CALLS_H_

#include <cstdint>

#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_receiver.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/tree_forward.h"
#include "kv/cache/window_book.h"
#include "kv/control/control_call.h"
#include "kv/plan/forward_plan.h"
#include "kv/plan/rope_angles.h"
#include "quire/status.h"

namespace quire {

class SequenceCalls {
 public:
  // What it works on; all must outlive it.
  struct Owners {
    PagedSequences& kv;
    ForwardPlan& plan;  // of the last forward
    RopeAngles& ropes;
    WindowBook& windows;
    TreeForward& trees;
    KVImporter& importer;
    KVSender& sender;
    KVReceiver& receiver;
  };
  explicit SequenceCalls(const Owners& owners);

  // REQUIRES: the call is of one of these kinds; what it refers to stays until Commit.
  Status Plan(const ControlCall& call);
  // REQUIRES: a Plan of this call that worked.
  void Commit(const ControlCall& call) noexcept;

 private:
  Status PlanAdd(const ControlCall& call);
  Status PlanFork(const ControlCall& call);
  Status PlanPop(const ControlCall& call);
  Status PlanRetain(const ControlCall& call);
  Status PlanImport(const ControlCall& call);
  Status PlanCommitTrees(const ControlCall& call);
  void CommitAdd(const ControlCall& call) noexcept;
  void CommitRemove(const ControlCall& call) noexcept;
  void CommitFork(const ControlCall& call) noexcept;
  void CommitPop(const ControlCall& call) noexcept;
  void CommitRetain(const ControlCall& call) noexcept;
  void CommitTrees(const ControlCall& call) noexcept;
  // The sequence that the call names, outside of the batch.
  Status FindSequence(const ControlCall& call);
  // After tokens are gone.
  void FreeUnseen() noexcept;

  PagedSequences& kv_;
  const Owners owners_;
  // What the planned call refers to.
  int32_t index_ = -1;    // the sequence that it names
  int64_t position_ = 0;  // kFork: where; kPop: the length afterwards
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_SEQUENCE_CALLS_H_
