#include "kv/control/sequence_control.h"

#include <algorithm>

#include "base/check.h"

namespace quire {
namespace {

Status Bad(StatusCode code, const char* call, const std::string& why) {
  return Status(code, std::string(call) + ": " + why);
}

}  // namespace

std::string OfSequence(const char* call, int64_t seq_id) {
  return std::string(call) + ": sequence " + std::to_string(seq_id) + " ";
}

Status ForwardIsOpen(const char* call) {
  return Bad(StatusCode::kBadState, call,
             "a forward is open; end it with EndForward or AbortForward first");
}

Status NoSuchSequence(const char* call, int64_t seq_id) {
  return Status(StatusCode::kUnknownSequence, OfSequence(call, seq_id) + "does not exist");
}

// ---------------------------------------------------------------------- sequences

Status SequenceControl::RefuseToChange(const char* call, int64_t seq_id, int32_t index) const {
  if (index == SequenceTable::kAbsent) return NoSuchSequence(call, seq_id);
  QUIRE_DCHECK(InBatch(index));
  return Status(
      StatusCode::kBadState,
      OfSequence(call, seq_id) + "is in the batch of the open forward; end or abort that first");
}

Status SequenceControl::RefuseNew(const char* call, int64_t seq_id) const {
  if (seq_id < 0) {
    return Bad(StatusCode::kBadArgument, call,
               std::to_string(seq_id) + " is no sequence id; ids are 0 or above");
  }
  if (table_.Find(seq_id) != SequenceTable::kAbsent) {
    return Status(StatusCode::kSequenceExists, OfSequence(call, seq_id) + "exists already");
  }
  return CheckRoomForActive(call, seq_id);
}

Status SequenceControl::CheckRoomForActive(const char* call, int64_t seq_id) const {
  if (HasRoomForActive()) return Status();
  return Status(StatusCode::kTooLarge,
                OfSequence(call, seq_id) + "would be one more than max_num_sequences, " +
                    std::to_string(max_num_sequences_) + "; remove or retain another one first");
}

Status SequenceControl::RequireActive(const char* call, int32_t index) const {
  const Sequence& sequence = table_[index];
  QUIRE_DCHECK(sequence.id >= 0) << "entry " << index << " is free";
  if (!sequence.retained) return Status();
  return Status(
      StatusCode::kBadState,
      OfSequence(call, sequence.id) + "is retained; make it active with SetRetained, or fork it");
}

// ---------------------------------------------------------------------- the open forward

Status SequenceControl::RefuseForward(const char* call) const {
  if (!in_forward_)
    return Bad(StatusCode::kBadState, call, "no forward is open; call BeginForward first");
  QUIRE_DCHECK(failed_);
  return Bad(StatusCode::kBadState, call,
             "an attention call of this forward has failed; call AbortForward");
}

void SequenceControl::Clear() noexcept {
  table_.Clear();
  in_forward_ = false;
  failed_ = false;
}

// ---------------------------------------------------------------------- batches

Status SequenceControl::CheckBatch(const char* call, std::span<const int64_t> seq_ids,
                                   std::span<const int64_t> append_lengths) const {
  QUIRE_RETURN_IF_ERROR(RequireIdle(call));
  if (seq_ids.size() != append_lengths.size()) {
    return Bad(StatusCode::kBadArgument, call,
               std::to_string(seq_ids.size()) + " sequence ids, but " +
                   std::to_string(append_lengths.size()) + " append lengths");
  }
  if (!seq_ids.empty()) return Status();
  return Bad(StatusCode::kBadArgument, call, "the batch is empty");
}

Status SequenceControl::CheckMember(const char* call, int64_t seq_id, int32_t index) const {
  if (index == SequenceTable::kAbsent) return Find(call, seq_id).status();
  if (!IsNamed(index)) return RequireActive(call, index);
  return Status(StatusCode::kBadArgument, OfSequence(call, seq_id) + "is in the batch twice");
}

Status SequenceControl::NameOnce(const char* call, int32_t index) const {
  if (IsNamed(index)) {
    return Status(StatusCode::kBadArgument, OfSequence(call, table_[index].id) + "is named twice");
  }
  Name(index);
  return Status();
}

Status CheckRowCount(const char* call, int64_t seq_id, int64_t row_count) {
  if (row_count >= 1) return Status();
  return Status(StatusCode::kBadArgument, OfSequence(call, seq_id) + "is to get " +
                                              std::to_string(row_count) +
                                              " tokens; the least is 1");
}

Status CheckPositions(const char* call, int64_t seq_id, int64_t length, int64_t row_count,
                      int64_t imported) {
  QUIRE_DCHECK(length >= 0 && length <= kPositionsMax);
  const int64_t room = kPositionsMax - length;
  if (imported <= room && row_count <= room - imported) return Status();
  const std::string after =
      imported == 0 ? "" : " after " + std::to_string(imported) + " imported ones";
  return Status(StatusCode::kTooLarge,
                OfSequence(call, seq_id) + "of length " + std::to_string(length) + " cannot get " +
                    std::to_string(row_count) + " more tokens" + after + ": positions end at 2^31");
}

Status CheckReceiveCount(const char* call, int64_t seq_id, int64_t length, int64_t count) {
  QUIRE_DCHECK(length >= 0 && length <= kPositionsMax);
  if (count >= 1 && count <= kPositionsMax - length) return Status();
  return Status(count < 1 ? StatusCode::kBadArgument : StatusCode::kTooLarge,
                OfSequence(call, seq_id) + "of length " + std::to_string(length) +
                    " cannot receive " + std::to_string(count) +
                    " tokens; the least is 1, and positions end at 2^31");
}

Status CheckLoad(const char* call, const LayerLoad& load) {
  if (load.tokens >= 1 && load.source != nullptr) return Status();
  return Status(StatusCode::kBadArgument, OfSequence(call, load.seq_id) + "is to import " +
                                              std::to_string(load.tokens) + " tokens from " +
                                              (load.source == nullptr ? "no" : "a") +
                                              " source; the least is 1, and a source is needed");
}

Status RequireNoLoadLeft(const char* call, std::span<const LayerLoad> loads) {
  if (loads.empty()) return Status();
  return Bad(StatusCode::kBadArgument, call,
             "sequence " + std::to_string(loads.front().seq_id) +
                 " of a load is not in the batch, or loads are in another order than the batch");
}

// ---------------------------------------------------------------------- token trees

Status RequireNoTree(const char* call, int64_t seq_id, int64_t tree_size) {
  if (tree_size == 0) return Status();
  return Status(StatusCode::kBadState,
                OfSequence(call, seq_id) + "has an uncommitted tree of " +
                    std::to_string(tree_size) +
                    " nodes; call CommitAcceptedTokenTreeNodes first (leaf -1 drops all of them)");
}

Status CheckTreeSize(const char* call, int64_t seq_id, int64_t tree_size, int64_t count,
                     int64_t max_tree_size) {
  QUIRE_DCHECK(tree_size >= 0 && tree_size <= max_tree_size);
  if (count <= max_tree_size - tree_size) return Status();
  return Status(StatusCode::kTooLarge,
                OfSequence(call, seq_id) + "would have an uncommitted tree of " +
                    std::to_string(tree_size) + " + " + std::to_string(count) +
                    " nodes; max_tree_size is " + std::to_string(max_tree_size));
}

Status CheckLeafCount(const char* call, std::span<const int64_t> seq_ids,
                      std::span<const int64_t> leaves) {
  if (seq_ids.size() == leaves.size()) return Status();
  return Bad(StatusCode::kBadArgument, call,
             std::to_string(seq_ids.size()) + " sequence ids, but " +
                 std::to_string(leaves.size()) + " leaves");
}

Status CheckLeaf(const char* call, int64_t seq_id, int64_t tree_size, int64_t leaf) {
  if (tree_size == 0) {
    return Status(StatusCode::kBadState, OfSequence(call, seq_id) +
                                             "has no uncommitted tree; it was committed already, "
                                             "or never given one by BeginTreeForward");
  }
  if (leaf >= -1 && leaf < tree_size) return Status();
  return Status(StatusCode::kBadArgument, OfSequence(call, seq_id) + "has a tree of " +
                                              std::to_string(tree_size) + " nodes; " +
                                              std::to_string(leaf) +
                                              " is none of them, nor -1, which drops all of them");
}

Result<std::span<const int64_t>> NodeParents::Take(int64_t seq_id, int64_t count) {
  QUIRE_DCHECK(taken_ <= parents_.size());
  const size_t left = parents_.size() - taken_;
  const size_t wanted = count < 1 ? 0 : static_cast<size_t>(count);
  if (wanted > left) {
    return Status(StatusCode::kBadArgument, OfSequence(call_, seq_id) + "is to get " +
                                                std::to_string(count) + " nodes, but of " +
                                                std::to_string(parents_.size()) + " parents " +
                                                std::to_string(left) + " are left for it");
  }
  const auto parents = parents_.subspan(taken_, wanted);
  taken_ += wanted;
  return parents;
}

Status NodeParents::RequireNoneLeft() const {
  if (taken_ == parents_.size()) return Status();
  return Bad(
      StatusCode::kBadArgument, call_,
      std::to_string(parents_.size()) + " parents for " + std::to_string(taken_) + " new nodes");
}

}  // namespace quire
