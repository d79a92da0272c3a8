#include "kv/recurrent/state_forwards.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/reserve.h"
#include "kv/pages/token_tree.h"

namespace quire {

Status NoFreeSlots(const ControlCall& call, const char* what, int64_t needed,
                   const SlotPool& pool) {
  return Status(StatusCode::kOutOfPages,
                std::string(call.name()) + ": needs " + std::to_string(needed) + " " + what +
                    ", of " + std::to_string(pool.slot_count()) + " are free " +
                    std::to_string(pool.free_count()) + "; remove or pop sequences");
}

StateForwards::StateForwards(const StateHistoryOptions& options, SequenceControl& control,
                             StateTracks& tracks)
    : options_(options), control_(control), tracks_(tracks), batch_(options.keep, tracks) {}

void StateForwards::Clear() noexcept {
  if (control_.in_forward()) CommitAbort();
  batch_.Clear();
  FreeAll(tree_depths_);
  loaded_ = {};
}

int64_t StateForwards::memory_bytes() const {
  return batch_.memory_bytes() + static_cast<int64_t>(tree_depths_.capacity() * sizeof(int32_t)) +
         loaded_.memory_bytes();
}

// ---------------------------------------------------------------------- both halves

Status StateForwards::Plan(const ControlCall& call) {
  call_ = call;
  switch (call.kind) {
    case ControlCall::Kind::kBegin:
      return PlanBegin(call);
    case ControlCall::Kind::kBeginTree:
      return PlanBeginTree(call);
    case ControlCall::Kind::kEnd:
      return PlanEnd(call);
    case ControlCall::Kind::kAbort:
      return control_.RequireForward(call.name());
    case ControlCall::Kind::kCommitTree:
      return PlanCommitTree(call);
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kImport:
      break;
  }
  QUIRE_CHECK(false) << call.name() << " is no call of forwards";
  return Status();
}

void StateForwards::Commit() noexcept {
  switch (call_.kind) {
    case ControlCall::Kind::kBegin:
      return CommitBegin();
    case ControlCall::Kind::kBeginTree:
      return CommitBeginTree();
    case ControlCall::Kind::kEnd:
      return CommitEnd();
    case ControlCall::Kind::kAbort:
      return CommitAbort();
    case ControlCall::Kind::kCommitTree:
      return CommitTrees();
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kImport:
      break;
  }
  QUIRE_DCHECK(false) << "no forward call is planned";
}

void StateForwards::Drop() noexcept {
  const bool ends =
      call_.kind == ControlCall::Kind::kEnd || call_.kind == ControlCall::Kind::kAbort;
  if (ends) return;
  QUIRE_DCHECK(!control_.in_forward()) << "the open forward has the batch";
  if (call_.kind == ControlCall::Kind::kCommitTree) {
    for (size_t m = batch_.members().size(); m-- > 0;) batch_.ReleaseBlocks(batch_.members()[m]);
  }
  batch_.Drop();
}

// ---------------------------------------------------------------------- begin

Status StateForwards::PlanBegin(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call.name(), call.seq_ids, call.append_lengths));
  control_.StartPlanning();
  StateBatch::Planned planned = batch_.Start(call.seq_ids.size());
  std::span<const LayerLoad> loads = call.loads;
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i)
    status = PlanMember(call, i, TakeLoad(call.seq_ids[i], loads));
  if (status.ok()) status = RequireNoLoadLeft(call.name(), loads);
  if (status.ok()) status = CheckRoomForBatch();
  if (status.ok()) planned.Keep();
  return status;
}

Status StateForwards::PlanMember(const ControlCall& call, size_t i, const LayerLoad* load) {
  const int64_t row_count = call.append_lengths[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, CheckMember(call, call.seq_ids[i], row_count));
  QUIRE_RETURN_IF_ERROR(
      RequireNoTree(call.name(), control_.table()[index].id, tracks_[index].tree.size()));
  StateTrack& track = tracks_[index];
  StateMember& member = batch_.Next(index, row_count);
  if (load != nullptr) QUIRE_RETURN_IF_ERROR(StartLoad(call, *load, member));
  const StateTrack& from = load == nullptr ? track : loaded_;
  batch_.PlanCheckpoints(from, member);
  batch_.PlanBlocks(from, member);
  if (load != nullptr) member.pending.insert(member.pending.begin(), loaded_.records.front());
  ReserveGrowing(track.records, track.records.size() + member.pending.capacity());
  control_.Name(index);
  batch_.Add(member);
  return Status();
}

// `member` goes on behind what it loads, as if it had been imported before.
Status StateForwards::StartLoad(const ControlCall& call, const LayerLoad& load,
                                StateMember& member) {
  QUIRE_DCHECK(load.seq_id == control_.table()[member.index].id) << "the load is of another one";
  QUIRE_RETURN_IF_ERROR(CheckLoad(call.name(), load));
  QUIRE_RETURN_IF_ERROR(
      CheckPositions(call.name(), load.seq_id, member.base, member.row_count, load.tokens));
  member.base += load.tokens;
  member.imported = load.tokens;
  member.source = load.source;
  member.current = -1;
  loaded_.length = loaded_.input_start = member.base;
  loaded_.records.assign(1, {.position = member.base, .ends_forward = true, .checkpoint = true});
  return Status();
}

Result<int32_t> StateForwards::CheckMember(const ControlCall& call, int64_t seq_id,
                                           int64_t row_count) {
  const int32_t index = control_.table().Find(seq_id);
  QUIRE_RETURN_IF_ERROR(control_.CheckMember(call.name(), seq_id, index));
  QUIRE_RETURN_IF_ERROR(CheckRowCount(call.name(), seq_id, row_count));
  QUIRE_RETURN_IF_ERROR(CheckPositions(call.name(), seq_id, tracks_[index].length, row_count, 0));
  if (row_count <= kPositionsMax - batch_.row_count()) return index;
  return Status(StatusCode::kTooLarge,
                std::string(call.name()) + ": with the " + std::to_string(row_count) +
                    " tokens of sequence " + std::to_string(seq_id) +
                    " the batch has 2^31 rows or more; append them in several forwards");
}

Status StateForwards::CheckRoomForBatch() const {
  const int64_t needed = batch_.SlotsNeeded();
  if (needed > tracks_.slots().free_count())
    return NoFreeSlots(call_, "slots for states", needed, tracks_.slots());
  return CheckRoomForInputs();
}

Status StateForwards::CheckRoomForInputs() const {
  const int64_t needed = batch_.BlocksNeeded();
  if (needed <= tracks_.blocks().free_count()) return Status();
  return NoFreeSlots(call_, "blocks for inputs", needed, tracks_.blocks());
}

void StateForwards::CommitBegin() noexcept {
  QUIRE_DCHECK(batch_.row_count() > 0) << "a batch without rows was planned";
  control_.OpenForward();
  batch_.TakeSlots();
  batch_.TakeBlocks();
}

// ---------------------------------------------------------------------- end and abort

Status StateForwards::PlanEnd(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.RequireForward(call.name()));
  if (options_.keep.interval > 0) return Status();
  for (StateMember& member : batch_.members()) batch_.PlanKept(member);
  return Status();
}

void StateForwards::CommitEnd() noexcept {
  control_.CloseForward();
  for (StateMember& member : batch_.members()) {
    if (!member.is_tree) batch_.End(member);
  }
  batch_.Drop();
}

// In the reverse order of the commit that opened it, so that slots come back to the free list as
// they left it.
void StateForwards::CommitAbort() noexcept {
  control_.CloseForward();
  for (size_t m = batch_.members().size(); m-- > 0;) {
    const StateMember& member = batch_.members()[m];
    StateTree& tree = tracks_[member.index].tree;
    if (member.is_tree) tracks_.DropNodes(tree, tree.size() - member.row_count);
    batch_.ReleaseBlocks(member);
    batch_.ReleaseSlots(member);
  }
  batch_.Drop();
}

// ---------------------------------------------------------------------- token trees

Status StateForwards::PlanBeginTree(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call.name(), call.seq_ids, call.append_lengths));
  control_.StartPlanning();
  StateBatch::Planned planned = batch_.Start(call.seq_ids.size());
  tree_depths_.clear();
  NodeParents parents(call.name(), call.parents);
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i) {
    const auto of_member = parents.Take(call.seq_ids[i], call.append_lengths[i]);
    status = of_member.ok() ? PlanTreeMember(call, i, *of_member) : of_member.status();
  }
  if (status.ok()) status = parents.RequireNoneLeft();
  if (status.ok()) status = CheckRoomForNodes();
  if (status.ok()) planned.Keep();
  return status;
}

Status StateForwards::PlanTreeMember(const ControlCall& call, size_t i,
                                     std::span<const int64_t> parents) {
  const int64_t seq_id = call.seq_ids[i];
  const int64_t count = call.append_lengths[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, CheckMember(call, seq_id, count));
  StateTree& tree = tracks_[index].tree;
  QUIRE_RETURN_IF_ERROR(
      CheckTreeSize(call.name(), seq_id, tree.size(), count, options_.max_tree_size));
  QUIRE_RETURN_IF_ERROR(AddDepths(call.name(), seq_id, tree.depths, parents, tree_depths_));
  const size_t size = static_cast<size_t>(tree.size() + count);
  ReserveGrowing(tree.parents, size);
  ReserveGrowing(tree.depths, size);
  ReserveGrowing(tree.slots, size);
  ReserveGrowing(tree.blocks, static_cast<size_t>(BlocksOfNodes(static_cast<int64_t>(size),
                                                                options_.keep.interval)));
  StateMember& member = batch_.Next(index, count);
  member.is_tree = true;
  control_.Name(index);
  batch_.Add(member);
  return Status();
}

Status StateForwards::CheckRoomForNodes() const {
  int64_t needed = 0;
  for (const StateMember& member : members()) {
    const int64_t size = tracks_[member.index].tree.size();
    needed += BlocksOfNodes(size + member.row_count, options_.keep.interval) -
              BlocksOfNodes(size, options_.keep.interval);
  }
  if (batch_.row_count() > options_.max_tree_slots - tracks_.node_count()) {
    return Status(StatusCode::kOutOfPages,
                  std::string(call_.name()) + ": " + std::to_string(batch_.row_count()) +
                      " new nodes beside " + std::to_string(tracks_.node_count()) +
                      " uncommitted ones are more than max_tree_slots, " +
                      std::to_string(options_.max_tree_slots) + "; commit trees first");
  }
  if (batch_.row_count() > tracks_.slots().free_count())
    return NoFreeSlots(call_, "slots for states", batch_.row_count(), tracks_.slots());
  if (needed > tracks_.blocks().free_count())
    return NoFreeSlots(call_, "blocks for inputs", needed, tracks_.blocks());
  return Status();
}

void StateForwards::CommitBeginTree() noexcept {
  QUIRE_DCHECK(std::ssize(tree_depths_) == batch_.row_count());
  control_.OpenForward();
  for (const StateMember& member : members()) {
    StateTree& tree = tracks_[member.index].tree;
    for (int64_t row = member.first_row; row < member.first_row + member.row_count; ++row) {
      tracks_.AddNode(tree, static_cast<int32_t>(call_.parents[static_cast<size_t>(row)]),
                      tree_depths_[static_cast<size_t>(row)]);
    }
  }
}

// As a forward of the accepted tokens, whose states and inputs are there already.
Status StateForwards::PlanCommitTree(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call.name()));
  QUIRE_RETURN_IF_ERROR(CheckLeafCount(call.name(), call.seq_ids, call.leaves));
  control_.StartPlanning();
  StateBatch::Planned planned = batch_.Start(call.seq_ids.size());
  for (size_t i = 0; i < call.seq_ids.size(); ++i) QUIRE_RETURN_IF_ERROR(PlanLeaf(call, i));
  QUIRE_RETURN_IF_ERROR(CheckRoomForInputs());
  planned.Keep();
  batch_.TakeBlocks();  // now, so that the owner can copy inputs there before the commit
  return Status();
}

Status StateForwards::PlanLeaf(const ControlCall& call, size_t i) {
  const int64_t seq_id = call.seq_ids[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find(call.name(), seq_id));
  QUIRE_RETURN_IF_ERROR(control_.NameOnce(call.name(), index));
  StateTrack& track = tracks_[index];
  const StateTree& tree = track.tree;
  const int64_t leaf = call.leaves[i];
  QUIRE_RETURN_IF_ERROR(CheckLeaf(call.name(), seq_id, tree.size(), leaf));
  const int64_t count = leaf < 0 ? 0 : tree.depths[static_cast<size_t>(leaf)] + 1;
  StateMember& member = batch_.Next(index, count);
  member.is_tree = true;
  batch_.Add(member);
  if (count == 0) return Status();
  member.path.reserve(static_cast<size_t>(count));
  FillPath(tree.parents, leaf, member.path);
  batch_.PlanCheckpoints(track, member);
  batch_.PlanBlocks(track, member);
  if (options_.keep.interval == 0) batch_.PlanKept(member);
  ReserveGrowing(track.records, track.records.size() + member.pending.size());
  return Status();
}

void StateForwards::CommitTrees() noexcept {
  for (StateMember& member : batch_.members()) {
    StateTree& tree = tracks_[member.index].tree;
    QUIRE_DCHECK(member.row_count == 0 || std::ssize(member.path) == member.row_count);
    for (StateRecord& record : member.pending) {
      QUIRE_DCHECK(record.position > member.base && record.position <= member.end());
      const int32_t node = member.path[static_cast<size_t>(record.position - member.base - 1)];
      record.slot = tree.slots[static_cast<size_t>(node)];
      tracks_.slots().Hold(record.slot);
    }
    if (member.row_count > 0) batch_.End(member);
    tracks_.DropNodes(tree, 0);
  }
  batch_.Drop();
}

}  // namespace quire
