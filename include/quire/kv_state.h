// KVState: what every kind of state between two tokens can do. The methods and their meaning are
// those of the interface of the same name in TVM's runtime (relax.vm.KVState), with checked
// arguments and all-or-nothing calls.
#ifndef QUIRE_KV_STATE_H_
#define QUIRE_KV_STATE_H_

#include <cstdint>
#include <span>

#include "quire/status.h"

namespace quire {

// A set of sequences, each with the state of the tokens it has seen.
//
// Order of calls: AddSequence (or ForkSequence), then forwards: BeginForward, the calls of the
// derived class for every layer, EndForward. Between BeginForward and EndForward the object is in
// the state FORWARD, else IDLE.
//
// Every call works or returns an error and has changed nothing. Calls that are legal in FORWARD for
// sequences outside the batch: RemoveSequence, PopN, ForkSequence (of a parent outside the batch).
// AddSequence and the counters are always legal. Control calls come from one thread at a time; a
// second one meanwhile gets BadState.
class KVState {
 public:
  virtual ~KVState() = default;

  // Drops all sequences; in FORWARD it aborts the forward first. Storage is not zeroed.
  virtual Status Clear() = 0;

  // Adds an empty sequence.
  // REQUIRES: seq_id >= 0, not present, fewer than max_num_sequences present.
  virtual Status AddSequence(int64_t seq_id) = 0;

  // Frees what no other sequence shares. In FORWARD: BadState for a member of the batch.
  virtual Status RemoveSequence(int64_t seq_id) = 0;

  // The child's first fork_pos tokens are the parent's; from there the two evolve independently.
  // -1 = all tokens. Copies no KV.
  // REQUIRES: child absent, -1 <= fork_pos <= length of the parent, fewer than max_num_sequences
  // present.
  virtual Status ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos = -1) = 0;

  // Drops the last n tokens. Copies no KV; sequences that share the tokens keep them.
  // REQUIRES: 0 <= n <= length.
  virtual Status PopN(int64_t seq_id, int64_t n) = 0;

  // Plans a forward of append_lengths[i] new tokens for seq_ids[i] and reserves all that it needs.
  // OutOfPages, OutOfMemory: nothing changed.
  // REQUIRES: IDLE; equal sizes, not empty; ids known and distinct; lengths >= 1, their sum at most
  // prefill_chunk_size.
  virtual Status BeginForward(std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths) = 0;

  // Ends the forward; the new tokens count from now on. BadState, and still FORWARD, if a layer was
  // not run.
  virtual Status EndForward() = 0;

  // FORWARD -> IDLE; the batch's sequences are as before BeginForward.
  virtual Status AbortForward() = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_STATE_H_
