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
// AddSequence and the counters are always legal.
//
// Threads. Calls that are not const come from one thread at a time; a second one meanwhile gets
// BadState. Const ones are queries: from any thread at any time, beside each other and beside the
// other calls, with three exceptions. StateDigest and CheckInvariants must not run beside a layer's
// call, and of a CompositeState beside none that is not const; what GetQueryPositions gives is
// valid only as long as its forward is open. A query waits for a call that changes sequences
// (BeginForward, EndForward, imports, ...) and sees the state before or after it; it does not wait
// for calls of layers. Between the parts of a CompositeState it may see one that is ahead.
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

  // BeginForward of new *nodes* of the sequences' token trees, for drafts with branches. A node is
  // a token that follows its parent: token_tree_parents, one per new node, the sequences' arrays
  // one after the other, has the parent's index in its sequence's whole uncommitted tree, or -1
  // for a node that follows the committed tokens. Nodes are counted from 0 through all forwards
  // since the last commit, in the order in which they were given; a forward adds append_lengths[i]
  // of them.
  //
  // A node stands at position base + depth, base being the number of committed tokens, and sees of
  // those what a token there would see, its ancestors and itself. So its row is, bit for bit, that
  // of the same token at the end of the plain sequence committed tokens + path.
  //
  // The tree stays until it is committed or popped. Meanwhile lengths count all nodes; PopN drops
  // the nodes with the highest numbers first, then committed tokens; ForkSequence at or before base
  // gives a child without a tree, after it BadState, as are BeginForward and all other calls that
  // read, write or import tokens at or after base, or change windows or retention.
  // REQUIRES: as BeginForward; -1 <= parent < the node's own index; at most max_tree_size nodes of
  // a sequence.
  virtual Status BeginTreeForward(std::span<const int64_t> seq_ids,
                                  std::span<const int64_t> append_lengths,
                                  std::span<const int64_t> token_tree_parents) = 0;

  // In each sequence, in any order, the tokens on the path from the root to node leaf_indices[i]
  // (which may have children) become committed tokens, and the tree is dropped: the sequence is
  // what the plain one with these tokens would be. -1 drops all nodes. Takes no pages. REQUIRES:
  // IDLE; equal sizes; ids known and distinct, each with a tree (else BadState); -1 <= leaf < nodes
  // of the tree.
  virtual Status CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                              std::span<const int64_t> leaf_indices) = 0;

  // Nodes of the sequence's uncommitted tree, those of an open forward included; 0 without one.
  virtual Result<int64_t> GetTreeSize(int64_t seq_id) const = 0;

  // Ends the forward; the new tokens count from now on. BadState, and still FORWARD, if a layer was
  // not run.
  virtual Status EndForward() = 0;

  // FORWARD -> IDLE; the batch's sequences are as before BeginForward.
  virtual Status AbortForward() = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_STATE_H_
