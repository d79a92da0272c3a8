// RecurrentState: what the states of recurrent layers have in common. Such a state cannot be cut at
// a position as attention KV can: it exists at the positions where it was kept.
#ifndef QUIRE_RECURRENT_STATE_H_
#define QUIRE_RECURRENT_STATE_H_

#include <cstdint>
#include <span>

#include "quire/kv_state.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// A state of all layers at one position takes a slot. Slots are shared by sequences and are never
// written again once their forward has ended. free + used == total, at all times.
struct StateSlotCounts {
  int64_t total = 0;
  int64_t free = 0;
  int64_t retained = 0;  // held by retained sequences, also when others hold them too

  bool operator==(const StateSlotCounts&) const = default;
};

// The calls of KVState, with this said more exactly:
//
// ForkSequence and PopN reach every position whose state is held or can be computed from what is
// held (the derived class says which); position 0 always, by the initial state. For any other they
// answer NeedsReplay and have changed nothing: the caller forks or pops to ReplayStart(...), whose
// state is held, and runs the tokens from there to the position again.
//
// BeginForward reserves all that EndForward needs: OutOfPages, and nothing changed, when there are
// too few free slots, which happens only where the options ask for few.
class RecurrentState : public KVState {
 public:
  // Retained: kept for its tokens alone (a prefix cache holds it). Such a sequence keeps its
  // current state and its checkpoints and nothing else, does not count against max_num_sequences
  // and cannot be in a batch. New sequences and forks are not retained. OutOfPages when retained
  // sequences would hold more than max_retained_slots slots; TooLarge for making one active again
  // when max_num_sequences are; BadState for a member of the batch.
  virtual Status SetRetained(int64_t seq_id, bool retained) = 0;

  // The largest position <= `position` that ForkSequence and PopN reach.
  // REQUIRES: 0 <= position <= length.
  virtual Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const = 0;

  // ---- States, bit for bit, out of one object and into another (quire/kv_export.h). Tensors are
  // as DebugGet writes them: a RecurrentCache has one per layer, an RNNState layer * states +
  // state. Those at a position at which they are held; NeedsReplay for any other. Also in FORWARD.
  virtual Status ExportState(int64_t tensor, int64_t seq_id, int64_t position,
                             const TensorView& o) = 0;
  // The sequence, of fewer tokens, has `position` of them and these states then, and no earlier
  // ones but the initial. OutOfPages without a free slot.
  // REQUIRES: IDLE; not retained; all tensors.
  virtual Status ImportState(int64_t seq_id, int64_t position,
                             std::span<const TensorView> states) = 0;

  // ---- Counters. Lengths include the tokens of an open forward.
  virtual bool HasSequence(int64_t seq_id) const = 0;
  virtual int64_t sequence_count() const = 0;  // retained ones included
  virtual int64_t retained_sequence_count() const = 0;
  virtual Result<int64_t> GetSequenceLength(int64_t seq_id) const = 0;
  virtual StateSlotCounts slot_counts() const = 0;
  // Mapped for all slots: the most that the object will ever take from the machine for states.
  virtual int64_t storage_bytes() const = 0;

  // Digest of all that can be observed: sequences, lengths, slots, what is set (not the states'
  // bytes). Equal before and after a failed call.
  virtual uint64_t StateDigest() const = 0;
  // Walks the whole state; Internal with the first violated invariant.
  virtual Status CheckInvariants() const = 0;
};

}  // namespace quire

#endif  // QUIRE_RECURRENT_STATE_H_
