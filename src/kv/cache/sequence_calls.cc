#include "kv/cache/sequence_calls.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace quire {

SequenceCalls::SequenceCalls(const Owners& owners) : kv_(owners.kv), owners_(owners) {}

// ---------------------------------------------------------------------- planning

Status SequenceCalls::Plan(const ControlCall& call) {
  switch (call.kind) {
    case ControlCall::Kind::kAdd:
      return PlanAdd(call);
    case ControlCall::Kind::kRemove:
      return FindSequence(call);
    case ControlCall::Kind::kFork:
      return PlanFork(call);
    case ControlCall::Kind::kPop:
      return PlanPop(call);
    case ControlCall::Kind::kRetain:
      return PlanRetain(call);
    case ControlCall::Kind::kImport:
      return PlanImport(call);
    case ControlCall::Kind::kCommitTree:
      return PlanCommitTrees(call);
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kBegin:
    case ControlCall::Kind::kBeginTree:
    case ControlCall::Kind::kEnd:
    case ControlCall::Kind::kAbort:
      break;
  }
  QUIRE_CHECK(false) << call.name() << " is no call of sequences";
  return Status();
}

Status SequenceCalls::FindSequence(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, kv_.control.FindOutsideBatch(call.name(), call.seq_id));
  return Status();
}

Status SequenceCalls::PlanAdd(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(kv_.control.CheckNew(call.name(), call.seq_id));
  kv_.control.table().ReserveOne();
  kv_.tree.hidden().ReserveSequences(kv_.control.table().entries().size());
  return Status();
}

Status SequenceCalls::PlanFork(const ControlCall& call) {
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(FindSequence(call));
  QUIRE_RETURN_IF_ERROR(kv_.control.CheckNew(name, call.child_id));
  const Sequence& parent = kv_.control[index_];
  const int64_t length = kv_.LengthOf(index_);
  if (call.count < -1 || call.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(name, parent.id) + "of length " +
                                                std::to_string(length) + " cannot be forked at " +
                                                std::to_string(call.count));
  }
  position_ = call.count < 0 ? length : call.count;
  if (position_ > kv_.CommittedLength(parent)) {
    QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted("ForkSequence behind the committed tokens", index_));
  }
  QUIRE_RETURN_IF_ERROR(owners_.windows.CheckEnd(name, parent, position_));
  kv_.control.table().ReserveOne();
  kv_.tree.hidden().ReserveSequences(kv_.control.table().entries().size());
  kv_.tree.ReserveSplit();
  return Status();
}

Status SequenceCalls::PlanPop(const ControlCall& call) {
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(FindSequence(call));
  const Sequence& sequence = kv_.control[index_];
  const int64_t length = kv_.LengthOf(index_);
  if (call.count < 0 || call.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(name, sequence.id) + "of length " +
                                                std::to_string(length) + " cannot lose " +
                                                std::to_string(call.count) + " tokens");
  }
  if (call.count > 0 && sequence.pending > call.count)
    QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(name, index_));
  position_ = length - call.count;
  QUIRE_RETURN_IF_ERROR(
      owners_.windows.CheckEnd(name, sequence, std::min(position_, kv_.CommittedLength(sequence))));
  kv_.tree.ReserveSplit();
  return Status();
}

Status SequenceCalls::PlanRetain(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(FindSequence(call));
  if (call.retained) return kv_.RequireCommitted(call.name(), index_);
  if (!kv_.control[index_].retained) return Status();
  return kv_.control.CheckRoomForActive(call.name(), call.seq_id);
}

Status SequenceCalls::PlanImport(const ControlCall& call) {
  QUIRE_DCHECK(call.kv != nullptr);
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call.name()));
  QUIRE_ASSIGN_OR_RETURN(index_, kv_.control.Find(call.name(), call.seq_id));
  return owners_.importer.PlanImport(call.name(), index_, *call.kv, call.leaves_out);
}

Status SequenceCalls::PlanCommitTrees(const ControlCall& call) {
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(name));
  QUIRE_RETURN_IF_ERROR(CheckLeafCount(name, call.seq_ids, call.leaves));
  kv_.control.StartPlanning();
  for (size_t i = 0; i < call.seq_ids.size(); ++i)
    QUIRE_RETURN_IF_ERROR(owners_.trees.PlanLeaf(name, call.seq_ids[i], call.leaves[i]));
  return Status();
}

// ---------------------------------------------------------------------- commit

void SequenceCalls::Commit(const ControlCall& call) noexcept {
  switch (call.kind) {
    case ControlCall::Kind::kAdd:
      return CommitAdd(call);
    case ControlCall::Kind::kRemove:
      return CommitRemove(call);
    case ControlCall::Kind::kFork:
      return CommitFork(call);
    case ControlCall::Kind::kPop:
      return CommitPop(call);
    case ControlCall::Kind::kRetain:
      return CommitRetain(call);
    case ControlCall::Kind::kImport:
      return owners_.importer.CommitImport();
    case ControlCall::Kind::kCommitTree:
      return CommitTrees(call);
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kBegin:
    case ControlCall::Kind::kBeginTree:
    case ControlCall::Kind::kEnd:
    case ControlCall::Kind::kAbort:
      break;
  }
  QUIRE_CHECK(false) << call.name() << " was not planned here";
}

void SequenceCalls::CommitAdd(const ControlCall& call) noexcept {
  Sequence& sequence = kv_.control[kv_.control.table().Insert(call.seq_id)];
  QUIRE_DCHECK(sequence.last == kNoBlock) << "an entry of the table was not emptied";
  sequence.long_factors = kv_.options.rope.use_long_factors;
}

void SequenceCalls::CommitRemove(const ControlCall& call) noexcept {
  if (kv_.trees.Find(index_) != nullptr) owners_.trees.DropNodes(index_, 0);
  owners_.sender.Stop(call.seq_id, "its sequence was removed");
  const Sequence& sequence = kv_.control[index_];
  if (sequence.pending > 0) owners_.receiver.End(index_);
  QUIRE_DCHECK(sequence.reserved == 0) << "positions without tokens are left";
  kv_.tree.hidden().Unhide(index_);
  kv_.tree.Release(sequence.last, !sequence.retained);
  kv_.control.table().Erase(index_);
  QUIRE_DCHECK(kv_.control.table().Find(call.seq_id) == SequenceTable::kAbsent);
  FreeUnseen();
}

void SequenceCalls::CommitFork(const ControlCall& call) noexcept {
  QUIRE_DCHECK(position_ >= 0 && position_ <= kv_.CommittedLength(kv_.control[index_]));
  const BlockIndex last = kv_.tree.ForkAt(kv_.control[index_].last, position_);
  const int32_t child_index = kv_.control.table().Insert(call.child_id);
  QUIRE_DCHECK(child_index != index_);
  const Sequence& parent = kv_.control[index_];
  Sequence& child = kv_.control[child_index];
  child.last = last;
  child.long_factors = parent.long_factors;
  QUIRE_DCHECK(kv_.tree.End(last) == position_);
  owners_.windows.MoveEnd(parent, position_, &child);
  owners_.windows.UpdateHidden(child_index);
}

void SequenceCalls::CommitPop(const ControlCall& call) noexcept {
  QUIRE_DCHECK(position_ >= 0 && position_ <= kv_.LengthOf(index_));
  Sequence& sequence = kv_.control[index_];
  const int64_t committed = kv_.CommittedLength(sequence);
  const int64_t end = std::min(position_, committed);
  if (kv_.trees.Find(index_) != nullptr)
    owners_.trees.DropNodes(index_, std::max<int64_t>(position_ - committed, 0));
  if (call.count > 0 && sequence.pending > 0) owners_.receiver.End(index_);
  owners_.sender.ShortenTo(call.seq_id, end);
  if (end < committed) {
    QUIRE_DCHECK(sequence.reserved == 0) << "tokens are popped that others follow";
    kv_.tree.hidden().Unhide(index_);
    sequence.last = kv_.tree.Pop(sequence.last, end, !sequence.retained);
    owners_.windows.MoveEnd(sequence, end, &sequence);
    owners_.windows.UpdateHidden(index_);
  }
  QUIRE_DCHECK(kv_.CommittedLength(sequence) == end) << "sequence " << sequence.id;
  FreeUnseen();
}

void SequenceCalls::CommitRetain(const ControlCall& call) noexcept {
  const Sequence& sequence = kv_.control[index_];
  QUIRE_DCHECK(!call.retained || sequence.reserved == 0)
      << "sequence " << sequence.id << " has a tree or pending tokens";
  if (call.retained != sequence.retained) kv_.tree.SetActive(sequence.last, !call.retained);
  kv_.control.table().SetRetained(index_, call.retained);
  owners_.plan.ForbidRepeat();
}

void SequenceCalls::CommitTrees(const ControlCall& call) noexcept {
  QUIRE_DCHECK(call.seq_ids.size() == call.leaves.size());
  for (size_t i = 0; i < call.seq_ids.size(); ++i)
    owners_.trees.CommitPath(kv_.control.table().Find(call.seq_ids[i]), call.leaves[i]);
  owners_.windows.FreeHidden();
}

void SequenceCalls::FreeUnseen() noexcept {
  owners_.windows.FreeHidden();
  if (!kv_.control.in_forward()) owners_.ropes.DropUnneeded();
}

}  // namespace quire
