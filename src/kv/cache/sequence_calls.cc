#include "kv/cache/sequence_calls.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace quire {

SequenceCalls::SequenceCalls(const Owners& owners) : kv_(owners.kv), owners_(owners) {}

// ---------------------------------------------------------------------- planning

Status SequenceCalls::Plan(const ControlCall& call) {
  call_ = call;
  switch (call.kind) {
    case ControlCall::Kind::kAdd:
      return PlanAdd();
    case ControlCall::Kind::kRemove:
      return FindSequence();
    case ControlCall::Kind::kFork:
      return PlanFork();
    case ControlCall::Kind::kPop:
      return PlanPop();
    case ControlCall::Kind::kRetain:
      return PlanRetain();
    case ControlCall::Kind::kImport:
      return PlanImport();
    case ControlCall::Kind::kCommitTree:
      return PlanCommitTrees();
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

Status SequenceCalls::FindSequence() {
  QUIRE_ASSIGN_OR_RETURN(index_, kv_.control.FindOutsideBatch(call_.name(), call_.seq_id));
  return Status();
}

Status SequenceCalls::PlanAdd() {
  QUIRE_RETURN_IF_ERROR(kv_.control.CheckNew(call_.name(), call_.seq_id));
  kv_.control.table().ReserveOne();
  kv_.tree.hidden().ReserveSequences(kv_.control.table().entries().size());
  return Status();
}

Status SequenceCalls::PlanFork() {
  const char* const call = call_.name();
  QUIRE_RETURN_IF_ERROR(FindSequence());
  QUIRE_RETURN_IF_ERROR(kv_.control.CheckNew(call, call_.child_id));
  const Sequence& parent = kv_.control[index_];
  const int64_t length = kv_.LengthOf(index_);
  if (call_.count < -1 || call_.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(call, parent.id) + "of length " +
                                                std::to_string(length) + " cannot be forked at " +
                                                std::to_string(call_.count));
  }
  position_ = call_.count < 0 ? length : call_.count;
  if (position_ > kv_.CommittedLength(parent)) {
    QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted("ForkSequence behind the committed tokens", index_));
  }
  QUIRE_RETURN_IF_ERROR(owners_.windows.CheckEnd(call, parent, position_));
  kv_.control.table().ReserveOne();
  kv_.tree.hidden().ReserveSequences(kv_.control.table().entries().size());
  kv_.tree.ReserveSplit();
  return Status();
}

Status SequenceCalls::PlanPop() {
  const char* const call = call_.name();
  QUIRE_RETURN_IF_ERROR(FindSequence());
  const Sequence& sequence = kv_.control[index_];
  const int64_t length = kv_.LengthOf(index_);
  if (call_.count < 0 || call_.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(call, sequence.id) + "of length " +
                                                std::to_string(length) + " cannot lose " +
                                                std::to_string(call_.count) + " tokens");
  }
  if (call_.count > 0 && sequence.pending > call_.count)
    QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index_));
  position_ = length - call_.count;
  QUIRE_RETURN_IF_ERROR(
      owners_.windows.CheckEnd(call, sequence, std::min(position_, kv_.CommittedLength(sequence))));
  kv_.tree.ReserveSplit();
  return Status();
}

Status SequenceCalls::PlanRetain() {
  QUIRE_RETURN_IF_ERROR(FindSequence());
  if (call_.retained) return kv_.RequireCommitted(call_.name(), index_);
  if (!kv_.control[index_].retained) return Status();
  return kv_.control.CheckRoomForActive(call_.name(), call_.seq_id);
}

Status SequenceCalls::PlanImport() {
  QUIRE_DCHECK(call_.kv != nullptr);
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call_.name()));
  QUIRE_ASSIGN_OR_RETURN(index_, kv_.control.Find(call_.name(), call_.seq_id));
  return owners_.importer.PlanImport(call_.name(), index_, *call_.kv, call_.leaves_out);
}

Status SequenceCalls::PlanCommitTrees() {
  const char* const call = call_.name();
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
  QUIRE_RETURN_IF_ERROR(CheckLeafCount(call, call_.seq_ids, call_.leaves));
  kv_.control.StartPlanning();
  for (size_t i = 0; i < call_.seq_ids.size(); ++i)
    QUIRE_RETURN_IF_ERROR(owners_.trees.PlanLeaf(call, call_.seq_ids[i], call_.leaves[i]));
  return Status();
}

// ---------------------------------------------------------------------- commit

void SequenceCalls::Commit() noexcept {
  switch (call_.kind) {
    case ControlCall::Kind::kAdd:
      return CommitAdd();
    case ControlCall::Kind::kRemove:
      return CommitRemove();
    case ControlCall::Kind::kFork:
      return CommitFork();
    case ControlCall::Kind::kPop:
      return CommitPop();
    case ControlCall::Kind::kRetain:
      return CommitRetain();
    case ControlCall::Kind::kImport:
      return owners_.importer.CommitImport();
    case ControlCall::Kind::kCommitTree:
      return CommitTrees();
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kBegin:
    case ControlCall::Kind::kBeginTree:
    case ControlCall::Kind::kEnd:
    case ControlCall::Kind::kAbort:
      break;
  }
  QUIRE_CHECK(false) << call_.name() << " was not planned here";
}

void SequenceCalls::CommitAdd() noexcept {
  Sequence& sequence = kv_.control[kv_.control.table().Insert(call_.seq_id)];
  QUIRE_DCHECK(sequence.last == kNoBlock) << "an entry of the table was not emptied";
  sequence.long_factors = kv_.options.rope.use_long_factors;
}

void SequenceCalls::CommitRemove() noexcept {
  if (kv_.trees.Find(index_) != nullptr) owners_.trees.DropNodes(index_, 0);
  owners_.sender.Stop(call_.seq_id, "its sequence was removed");
  const Sequence& sequence = kv_.control[index_];
  if (sequence.pending > 0) owners_.receiver.End(index_);
  QUIRE_DCHECK(sequence.reserved == 0) << "positions without tokens are left";
  kv_.tree.hidden().Unhide(index_);
  kv_.tree.Release(sequence.last, !sequence.retained);
  kv_.control.table().Erase(index_);
  QUIRE_DCHECK(kv_.control.table().Find(call_.seq_id) == SequenceTable::kAbsent);
  FreeUnseen();
}

void SequenceCalls::CommitFork() noexcept {
  QUIRE_DCHECK(position_ >= 0 && position_ <= kv_.CommittedLength(kv_.control[index_]));
  const BlockIndex last = kv_.tree.ForkAt(kv_.control[index_].last, position_);
  const int32_t child_index = kv_.control.table().Insert(call_.child_id);
  QUIRE_DCHECK(child_index != index_);
  const Sequence& parent = kv_.control[index_];
  Sequence& child = kv_.control[child_index];
  child.last = last;
  child.long_factors = parent.long_factors;
  QUIRE_DCHECK(kv_.tree.End(last) == position_);
  owners_.windows.MoveEnd(parent, position_, &child);
  owners_.windows.UpdateHidden(child_index);
}

void SequenceCalls::CommitPop() noexcept {
  QUIRE_DCHECK(position_ >= 0 && position_ <= kv_.LengthOf(index_));
  Sequence& sequence = kv_.control[index_];
  const int64_t committed = kv_.CommittedLength(sequence);
  const int64_t end = std::min(position_, committed);
  if (kv_.trees.Find(index_) != nullptr)
    owners_.trees.DropNodes(index_, std::max<int64_t>(position_ - committed, 0));
  if (call_.count > 0 && sequence.pending > 0) owners_.receiver.End(index_);
  owners_.sender.ShortenTo(call_.seq_id, end);
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

void SequenceCalls::CommitRetain() noexcept {
  const Sequence& sequence = kv_.control[index_];
  QUIRE_DCHECK(!call_.retained || sequence.reserved == 0)
      << "sequence " << sequence.id << " has a tree or pending tokens";
  if (call_.retained != sequence.retained) kv_.tree.SetActive(sequence.last, !call_.retained);
  kv_.control.table().SetRetained(index_, call_.retained);
  owners_.plan.ForbidRepeat();
}

void SequenceCalls::CommitTrees() noexcept {
  QUIRE_DCHECK(call_.seq_ids.size() == call_.leaves.size());
  for (size_t i = 0; i < call_.seq_ids.size(); ++i)
    owners_.trees.CommitPath(kv_.control.table().Find(call_.seq_ids[i]), call_.leaves[i]);
  owners_.windows.FreeHidden();
}

void SequenceCalls::FreeUnseen() noexcept {
  owners_.windows.FreeHidden();
  if (!kv_.control.in_forward()) owners_.ropes.DropUnneeded();
}

}  // namespace quire
