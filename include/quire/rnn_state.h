// RNNState: states of recurrent layers whose update the caller computes. After TVM's interface of
// the same name (relax.vm.RNNState).
//
// One forward, in calls:
//   BeginForward(ids, lengths);
//   for every layer and state:
//     Get(layer, state, o);     // the states before the forward
//     Set(layer, state, data);  // the states after all tokens of the forward
//   EndForward();
#ifndef QUIRE_RNN_STATE_H_
#define QUIRE_RNN_STATE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "quire/recurrent_state.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

struct RNNStateSpec {
  std::vector<int64_t> shape;  // of one sequence's state, at most TensorView::kMaxRank - 1 long
  DType dtype = DType::kF32;
  // The state before the first token, the same for every layer and sequence: contiguous, of this
  // shape and dtype, read in Create. Without data: zeros.
  TensorView initial{};
};

struct RNNStateOptions {
  int64_t num_layers = 0;
  std::vector<RNNStateSpec> states;  // each layer has all of them
  int64_t max_num_sequences = 0;     // that are not retained
  // Newest states, one per forward, that PopN and ForkSequence can return to, the current one
  // included.
  int64_t max_history = 1;
  // States inside a forward (SetAt) that each sequence keeps, and the most that one forward may add
  // to one sequence. When there are more, the older ones are thinned: what remains lies the denser
  // the nearer it is to the end.
  int64_t max_checkpoints = 0;
  int64_t max_tree_size = 256;  // uncommitted nodes of one sequence (BeginTreeForward)
  // Uncommitted nodes of all sequences together: each has a state, in a slot that is there for such
  // states alone. BeginTreeForward is OutOfPages when there would be more.
  int64_t max_tree_slots = 0;
  int64_t max_retained_slots = 0;   // see SetRetained
  bool poison_freed_slots = false;  // tests: free slots are filled with NaN
  // As in TVM, for its drop-in (docs/tvm.md): with max_history 1, Get gives what was Set before it
  // in the same forward.
  bool tvm_rnn_history1 = false;
};

// Reached by ForkSequence and PopN: the last max_history ends of forwards, the checkpoints, 0.
class RNNState : public RecurrentState {
 public:
  // BadArgument for options out of range, OutOfMemory when the slots cannot be mapped. Options are
  // copied.
  static Result<std::unique_ptr<RNNState>> Create(const RNNStateOptions& options);

  virtual const RNNStateOptions& options() const = 0;

  // ---- FORWARD only. B = sequences of the batch, in its order. Tensors are of the state's dtype
  // and contiguous but for the first axis; bytes are copied as they are. Rows of `o` share no byte
  // with each other.

  // The states of the batch's sequences before this forward, whatever was Set in it (but see
  // tvm_rnn_history1). In a tree forward: those of the committed tokens, whatever nodes there are;
  // GetBefore gives the state before each row.
  // o: [B, *shape].
  virtual Status Get(int64_t layer, int64_t state, const TensorView& o) = 0;
  // The states after this forward; a second call replaces the first. EndForward is BadState until
  // every layer and state was set.
  // data: [B, *shape].
  virtual Status Set(int64_t layer, int64_t state, const TensorView& data) = 0;

  // The states before tokens of the forward: rows[i] is a new token, counted from the batch's
  // first. For a node of a tree, that is the state after its parent, or, for a root, that of the
  // committed tokens. o: [n, *shape] for n rows. BadState if the token before was not set in this
  // layer and state.
  virtual Status GetBefore(int64_t layer, int64_t state, std::span<const int64_t> rows,
                           const TensorView& o) = 0;

  // States inside the forward: rows[i] is a new token, counted from the batch's first;
  // the state is the one after it. SetAt at the last row of a sequence is Set for that sequence; at
  // another row it makes a checkpoint there, and then EndForward wants every layer and state of it.
  // o, data: [n, *shape] for n rows.
  // In a tree forward EndForward wants every layer and state of every row, set by SetAt; Set is
  // BadState.
  // GetAt: BadState for a row that was not set in this layer and state.
  virtual Status GetAt(int64_t layer, int64_t state, std::span<const int64_t> rows,
                       const TensorView& o) = 0;
  // TooLarge for more than max_checkpoints new checkpoints of one sequence.
  // REQUIRES: rows distinct.
  virtual Status SetAt(int64_t layer, int64_t state, std::span<const int64_t> rows,
                       const TensorView& data) = 0;

  // A copy of the current state, at any time; in FORWARD that of before the forward.
  // o: shape.
  virtual Status DebugGet(int64_t layer, int64_t state, int64_t seq_id, const TensorView& o) = 0;
};

}  // namespace quire

#endif  // QUIRE_RNN_STATE_H_
