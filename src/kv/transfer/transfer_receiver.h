// TransferReceiver: the one receiver of a state, whatever parts the state has. It knows which
// tokens are reserved and what of them has come (PendingReceives); each part knows what a
// reservation is there: pages of an attention cache (KVReceiver), nothing before the commit for
// recurrent states (StateTransfer). A cache alone is a state of one part.
//
// Invariant: the parts have taken up a reservation exactly while PendingReceives has it. Every call
// makes or ends it in all parts or in none: it comes in two halves, of which the second cannot
// fail.
#ifndef QUIRE_KV_TRANSFER_TRANSFER_RECEIVER_H_
#define QUIRE_KV_TRANSFER_TRANSFER_RECEIVER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/transfer/pending_receives.h"
#include "quire/kv_transfer.h"
#include "quire/status.h"

namespace quire {

class TransferReceiver;

// A part's layers and slots of a reservation.
struct ReceiveShare {
  uint64_t epoch = 0;
  int64_t seq_id = -1;
  int64_t first_position = 0;
  int64_t count = 0;
  std::span<PendingReceives::Layer> layers{};
  std::span<TokenSlots> slots{};  // [group]
};

// What a part says of a reservation that it has planned.
struct ReservePlan {
  int64_t first_position = 0;
  uint64_t layout = 0;    // equal iff the stored bytes mean the same, heads and pages aside
  int64_t page_size = 0;  // of the part's only group; 0: it has none or several
  int64_t slot_runs = 0;  // at most, in that group
};

// A part of a state that receives. Its calls come in two halves: what can fail, fails in Plan...,
// and one Commit... or Drop follows a Plan... that worked, with no other call in between.
class ReceivingPart {
 public:
  // Groups are numbered from 0; all layers have rows, or all have states.
  virtual std::vector<TransferLayer> receive_layers() = 0;
  virtual size_t receive_groups() const = 0;
  // Whose reservations the part has from now on; null: its own. REQUIRES: it has none.
  virtual void SetReceiver(TransferReceiver* receiver) noexcept = 0;

  // Room for `count` tokens of the sequence, which has no reservation.
  virtual Result<ReservePlan> PlanReserve(const char* call, int64_t seq_id, int64_t count) = 0;
  // Fills in the slots.
  virtual void CommitReserve(const ReceiveShare& share) noexcept = 0;
  // The first n of the reserved tokens, which have come, are to stay; 0: none.
  virtual Status PlanTake(const char* call, const ReceiveShare& share, int64_t n) = 0;
  virtual void CommitTake() noexcept = 0;
  virtual void DropPlanned() noexcept = 0;

 protected:
  ~ReceivingPart() = default;
};

class TransferReceiver {
 public:
  // In the order of layers: parts whose layers have rows come first. They outlive it, and have no
  // sequences.
  explicit TransferReceiver(std::span<ReceivingPart* const> parts);
  TransferReceiver(const TransferReceiver&) = delete;
  TransferReceiver& operator=(const TransferReceiver&) = delete;

  // Reserves `count` tokens of the sequence. BadState if it has a reservation; else as the parts.
  Result<ReceiveMap> Prepare(const char* call, int64_t seq_id, int64_t count);
  // The first n tokens become committed ones, the others go. Errors as PendingReceives::Take, and
  // as the parts.
  Status Commit(const char* call, uint64_t epoch, int64_t n);
  Status Cancel(const char* call, uint64_t epoch) { return Commit(call, epoch, 0); }

  // Whether a part receives states, which come last.
  bool has_states() const {
    return !receives_.layers().empty() && receives_.layers().back().is_state();
  }
  // What channels call, from any thread; and what ends reservations with their sequences.
  PendingReceives& receives() { return receives_; }
  const PendingReceives& receives() const { return receives_; }

 private:
  // A part as Plan... and Commit... of PlannedHalves see it.
  struct Receiving {
    ReceivingPart* part = nullptr;
    size_t first_layer = 0;
    size_t layer_count = 0;
    size_t first_group = 0;
    size_t group_count = 0;

    void Drop() const noexcept { part->DropPlanned(); }
  };
  static std::vector<Receiving> PlanOrder(std::span<ReceivingPart* const> parts);
  static std::vector<TransferLayer> LayersOf(std::span<ReceivingPart* const> parts);
  static ReceiveShare ShareOf(PendingReceives::Receive& receive, const Receiving& of);

  // States first: what they refuse needs no pages to be counted.
  std::vector<Receiving> parts_;
  std::vector<Receiving*> planned_;  // the same
  size_t group_count_ = 0;
  PendingReceives receives_;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_TRANSFER_RECEIVER_H_
