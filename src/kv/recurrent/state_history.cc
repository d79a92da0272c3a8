#include "kv/recurrent/state_history.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

Status NeedsReplay(const char* call, int64_t seq_id, int64_t position, int64_t from) {
  return Status(StatusCode::kNeedsReplay, OfSequence(call, seq_id) + "holds no state at position " +
                                              std::to_string(position) + "; go to position " +
                                              std::to_string(from) +
                                              " and run the tokens from there again");
}

Status NoFreeSlots(const ControlCall& call, const char* what, int64_t needed,
                   const SlotPool& pool) {
  return Status(StatusCode::kOutOfPages,
                std::string(call.name()) + ": needs " + std::to_string(needed) + " " + what +
                    ", of " + std::to_string(pool.slot_count()) + " are free " +
                    std::to_string(pool.free_count()) + "; remove or pop sequences");
}

// The most that one call adds, of states or of blocks of inputs: each sequence has one at its end,
// and `more_max` before it. Sequences share the rows: the first of those takes two of them (one
// before the border, one behind it), each further one an interval. So the small ones first, as many
// as there may be.
int64_t AddedMax(const StateHistoryOptions& options, int64_t rows_max, int64_t more_max) {
  if (options.keep.interval == 0) return options.max_num_sequences * (more_max + 1);
  const int64_t ends = std::min(options.max_num_sequences, rows_max);
  if (more_max == 0) return ends;
  const int64_t firsts = std::min(ends, rows_max - ends);
  const int64_t others = (rows_max - ends - firsts) / options.keep.interval;
  return ends + firsts + std::min(firsts * (more_max - 1), others);
}

}  // namespace

int64_t StateSlotCount(const StateHistoryOptions& options) {
  if (options.slot_count != 0) return options.slot_count + options.max_tree_slots;
  // Before the forward: history and checkpoints.
  const int64_t checkpoints = options.keep.recent + options.keep.thinned;
  return options.max_num_sequences * (options.keep.history + checkpoints) +
         AddedMax(options, options.max_rows, checkpoints) + options.max_loads +
         options.max_retained_slots + options.max_tree_slots;
}

int64_t InputBlockCount(const StateHistoryOptions& options) {
  if (options.keep.interval == 0) return 0;
  // Inputs since the oldest recent checkpoint lie in one block more than there are such. A commit
  // of trees adds those of the accepted nodes.
  const int64_t for_inputs =
      options.max_num_sequences * (options.keep.recent + 1) +
      AddedMax(options, std::max(options.max_rows, options.max_tree_slots), options.keep.recent);
  if (options.max_tree_slots == 0) return for_inputs;
  // Each tree's last block may hold a single node.
  return for_inputs + options.max_tree_slots / options.keep.interval +
         std::min(options.max_num_sequences, options.max_tree_slots);
}

StateHistory::StateHistory(const StateHistoryOptions& options)
    : options_(options),
      control_(options.max_num_sequences),
      tracks_(options.keep, StateSlotCount(options), InputBlockCount(options)),
      batch_(options.keep, tracks_) {}

// ---------------------------------------------------------------------- queries

Result<int64_t> StateHistory::Length(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  for (const StateMember& member : members()) {
    if (in_forward() && member.index == index && !member.is_tree) return member.end();
  }
  return tracks_[index].length + tracks_[index].tree.size();
}

Result<int64_t> StateHistory::ReplayStart(int64_t seq_id, int64_t position) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find("ReplayStart", seq_id));
  const StateTrack& track = tracks_[index];
  const int64_t length = track.length + track.tree.size();
  if (position < 0 || position > length) {
    return Status(StatusCode::kBadArgument, OfSequence("ReplayStart", seq_id) + "of length " +
                                                std::to_string(length) + " has no position " +
                                                std::to_string(position));
  }
  if (position > track.length) return position;  // every node has a state
  const StateCut cut = tracks_.CutAt(track, position);
  if (cut.exact || cut.replays) return position;
  return cut.record_count == 0 ? 0 : track.records[cut.record_count - 1].position;
}

Result<int32_t> StateHistory::SlotAt(const char* call, int64_t seq_id, int64_t position) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  const StateTrack& track = tracks_[index];
  if (position < 0 || position > track.length) {
    return Status(StatusCode::kBadArgument, OfSequence(call, seq_id) + "of length " +
                                                std::to_string(track.length) + " has no position " +
                                                std::to_string(position));
  }
  const StateCut cut = tracks_.CutAt(track, position);
  const StateRecord held =
      cut.record_count == 0 ? StateRecord() : track.records[cut.record_count - 1];
  if (!cut.exact) return NeedsReplay(call, seq_id, position, held.position);
  return held.slot;
}

int64_t StateHistory::memory_bytes() const {
  return tracks_.memory_bytes() + batch_.memory_bytes() +
         static_cast<int64_t>(tree_depths_.capacity() * sizeof(int32_t)) + child_.memory_bytes() +
         loaded_.memory_bytes();
}

// ---------------------------------------------------------------------- planning

Status StateHistory::Plan(const ControlCall& call) {
  call_ = call;
  replay_ = {};
  switch (call.kind) {
    case ControlCall::Kind::kClear:
      return Status();
    case ControlCall::Kind::kAdd:
      return PlanAdd(call);
    case ControlCall::Kind::kRemove:
      return PlanRemove(call);
    case ControlCall::Kind::kFork:
      return PlanFork(call);
    case ControlCall::Kind::kPop:
      return PlanPop(call);
    case ControlCall::Kind::kRetain:
      return PlanRetain(call);
    case ControlCall::Kind::kBegin:
      return PlanBegin(call);
    case ControlCall::Kind::kEnd:
      QUIRE_RETURN_IF_ERROR(RequireForward(call.name()));
      if (options_.keep.interval > 0) return Status();
      for (StateMember& member : batch_.members()) batch_.PlanKept(member);
      return Status();
    case ControlCall::Kind::kAbort:
      return RequireForward(call.name());
    case ControlCall::Kind::kBeginTree:
      return PlanBeginTree(call);
    case ControlCall::Kind::kCommitTree:
      return PlanCommitTree(call);
    case ControlCall::Kind::kImport:
      return PlanImport(call);
  }
  return Status();
}

void StateHistory::ReserveSequence() {
  control_.table().ReserveOne();
  tracks_.Reserve(table().entries().size());
}

Status StateHistory::PlanAdd(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckNew(call.name(), call.seq_id));
  ReserveSequence();
  return Status();
}

Status StateHistory::PlanRemove(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, control_.FindOutsideBatch(call.name(), call.seq_id));
  return Status();
}

Status StateHistory::PlanFork(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, control_.FindOutsideBatch(call.name(), call.seq_id));
  QUIRE_RETURN_IF_ERROR(control_.CheckNew(call.name(), call.child_id));
  const int64_t committed = tracks_[index_].length;
  const int64_t length = committed + tracks_[index_].tree.size();
  if (call.count < -1 || call.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(call.name(), call.seq_id) + "of length " +
                                                std::to_string(length) + " cannot be forked at " +
                                                std::to_string(call.count));
  }
  const int64_t position = call.count < 0 ? length : call.count;
  if (position > committed) QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index_));
  ReserveSequence();
  return PlanCut(call, tracks_[index_], position);
}

Status StateHistory::PlanPop(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, control_.FindOutsideBatch(call.name(), call.seq_id));
  const StateTrack& track = tracks_[index_];
  const int64_t length = track.length + track.tree.size();
  if (call.count < 0 || call.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(call.name(), call.seq_id) + "of length " +
                                                std::to_string(length) + " cannot lose " +
                                                std::to_string(call.count) + " tokens");
  }
  return PlanCut(call, track, std::min(track.length, length - call.count));
}

Status StateHistory::PlanCut(const ControlCall& call, const StateTrack& track, int64_t position) {
  cut_ = tracks_.CutAt(track, position);
  position_ = position;
  const StateRecord held =
      cut_.record_count == 0 ? StateRecord() : track.records[cut_.record_count - 1];
  if (!cut_.exact && !cut_.replays)
    return NeedsReplay(call.name(), call.seq_id, position, held.position);
  // The entry that Insert will take is not known yet, so the child's lists are made aside.
  if (call.kind == ControlCall::Kind::kFork) {
    child_.records.clear();
    child_.blocks.clear();
    child_.records.reserve(cut_.record_count + 1);
    child_.blocks.reserve(cut_.block_count);
  } else {
    ReserveGrowing(tracks_[index_].records, cut_.record_count + 1);
  }
  if (!cut_.replays) return Status();
  if (slots().free_count() == 0) return NoFreeSlots(call, "slot for a state", 1, slots());
  const int64_t first_block = track.blocks.front().index;
  const int64_t block = held.position / options_.keep.interval - first_block;
  replay_ = {.needed = true,
             .from_slot = held.slot,
             .from = held.position,
             .position = position,
             .to_slot = slots().Take(),
             .block = track.blocks[static_cast<size_t>(block)].slot};
  return Status();
}

Status StateHistory::PlanRetain(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, control_.FindOutsideBatch(call.name(), call.seq_id));
  if (table()[index_].retained == call.retained) return Status();
  if (!call.retained) return control_.CheckRoomForActive(call.name(), call.seq_id);
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index_));
  return CheckRetainedRoom(call, tracks_[index_]);
}

Status StateHistory::CheckRetainedRoom(const ControlCall& call, const StateTrack& track) const {
  const int64_t count = tracks_.RetainedSlotsWith(track);
  if (count <= options_.max_retained_slots) return Status();
  return Status(StatusCode::kOutOfPages,
                OfSequence(call.name(), call.seq_id) + "would make retained sequences hold " +
                    std::to_string(count) + " slots, over max_retained_slots, " +
                    std::to_string(options_.max_retained_slots) + "; remove retained ones first");
}

Status StateHistory::PlanImport(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call.name()));
  QUIRE_ASSIGN_OR_RETURN(index_, Find(call.name(), call.seq_id));
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index_));
  QUIRE_RETURN_IF_ERROR(control_.RequireActive(call.name(), index_));
  StateTrack& track = tracks_[index_];
  if (call.count <= track.length || call.count > kPositionsMax) {
    return Status(call.count > kPositionsMax ? StatusCode::kTooLarge : StatusCode::kBadArgument,
                  OfSequence(call.name(), call.seq_id) + "of length " +
                      std::to_string(track.length) + " cannot be given the state at position " +
                      std::to_string(call.count) +
                      "; the position must be after the length, and positions end at 2^31");
  }
  if (slots().free_count() == 0) return NoFreeSlots(call, "slot for a state", 1, slots());
  ReserveGrowing(track.records, 1);
  position_ = call.count;
  import_slot_ = slots().Take();
  return Status();
}

Status StateHistory::PlanBegin(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call.name(), call.seq_ids, call.append_lengths));
  control_.StartPlanning();
  batch_.Start(call.seq_ids.size());
  std::span<const LayerLoad> loads = call.loads;
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i)
    status = PlanMember(call, i, TakeLoad(call.seq_ids[i], loads));
  if (status.ok()) status = RequireNoLoadLeft(call.name(), loads);
  if (status.ok()) status = CheckRoomForBatch();
  if (!status.ok()) batch_.Drop();
  return status;
}

// `member` goes on behind what it loads, as if it had been imported before.
Status StateHistory::StartLoad(const ControlCall& call, const LayerLoad& load,
                               StateMember& member) {
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

Result<int32_t> StateHistory::CheckMember(const ControlCall& call, int64_t seq_id,
                                          int64_t row_count) {
  const int32_t index = table().Find(seq_id);
  QUIRE_RETURN_IF_ERROR(control_.CheckMember(call.name(), seq_id, index));
  QUIRE_RETURN_IF_ERROR(CheckRowCount(call.name(), seq_id, row_count));
  QUIRE_RETURN_IF_ERROR(CheckPositions(call.name(), seq_id, tracks_[index].length, row_count, 0));
  if (row_count <= kPositionsMax - batch_.row_count()) return index;
  return Status(StatusCode::kTooLarge,
                std::string(call.name()) + ": with the " + std::to_string(row_count) +
                    " tokens of sequence " + std::to_string(seq_id) +
                    " the batch has 2^31 rows or more; append them in several forwards");
}

Status StateHistory::PlanMember(const ControlCall& call, size_t i, const LayerLoad* load) {
  const int64_t row_count = call.append_lengths[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, CheckMember(call, call.seq_ids[i], row_count));
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
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

Status StateHistory::CheckRoomForBatch() const {
  const int64_t needed = batch_.SlotsNeeded();
  if (needed > slots().free_count()) return NoFreeSlots(call_, "slots for states", needed, slots());
  return CheckRoomForInputs();
}

Status StateHistory::CheckRoomForInputs() const {
  const int64_t needed = batch_.BlocksNeeded();
  if (needed <= blocks().free_count()) return Status();
  return NoFreeSlots(call_, "blocks for inputs", needed, blocks());
}

// ---------------------------------------------------------------------- committing

ControlCall::Kind StateHistory::Commit() noexcept {
  switch (call_.kind) {
    case ControlCall::Kind::kClear:
      ClearAll();
      break;
    case ControlCall::Kind::kAdd:
      tracks_.Start(control_.table().Insert(call_.seq_id));
      break;
    case ControlCall::Kind::kRemove:
      ReleaseTrack(index_);
      control_.table().Erase(index_);
      break;
    case ControlCall::Kind::kFork:
      CommitFork();
      break;
    case ControlCall::Kind::kPop:
      CommitPop();
      break;
    case ControlCall::Kind::kRetain:
      CommitRetain();
      break;
    case ControlCall::Kind::kBegin:
      control_.OpenForward();
      batch_.TakeSlots();
      batch_.TakeBlocks();
      break;
    case ControlCall::Kind::kEnd:
      CommitEnd();
      break;
    case ControlCall::Kind::kAbort:
      CommitAbort();
      break;
    case ControlCall::Kind::kBeginTree:
      CommitBeginTree();
      break;
    case ControlCall::Kind::kCommitTree:
      CommitTrees();
      break;
    case ControlCall::Kind::kImport:
      CommitImport();
      break;
  }
  return call_.kind;
}

void StateHistory::Drop() noexcept {
  if (replay_.needed) slots().Release(replay_.to_slot);
  replay_ = {};
  if (import_slot_ >= 0) slots().Release(std::exchange(import_slot_, -1));
  if (call_.kind == ControlCall::Kind::kCommitTree) {
    for (size_t m = batch_.members().size(); m-- > 0;) batch_.ReleaseBlocks(batch_.members()[m]);
  }
  const bool opens = call_.kind == ControlCall::Kind::kBegin ||
                     call_.kind == ControlCall::Kind::kBeginTree ||
                     call_.kind == ControlCall::Kind::kCommitTree;
  if (opens) batch_.Drop();
}

void StateHistory::FinishCut(StateTrack& track) noexcept {
  track.length = position_;
  if (replay_.needed) {
    track.records.push_back({.position = position_, .slot = replay_.to_slot, .ends_forward = true});
    replay_ = {};
  }
  if (position_ > track.input_start || options_.keep.interval == 0) return;
  track.input_start = position_;
  if (!track.records.empty()) track.records.back().checkpoint = true;
}

void StateHistory::CommitFork() noexcept {
  tracks_.CopyCut(tracks_[index_], cut_, &child_);
  FinishCut(child_);
  std::swap(tracks_.Start(control_.table().Insert(call_.child_id)), child_);
}

void StateHistory::CommitPop() noexcept {
  StateTrack& track = tracks_[index_];
  if (track.tree.size() > 0)
    tracks_.DropNodes(track.tree, std::max<int64_t>(track.tree.size() - call_.count, 0));
  tracks_.Truncate(track, cut_, table()[index_].retained);
  FinishCut(track);
}

void StateHistory::CommitRetain() noexcept {
  if (table()[index_].retained == call_.retained) return;
  control_.table().SetRetained(index_, call_.retained);
  StateTrack& track = tracks_[index_];
  if (call_.retained) {
    tracks_.Retain(track);
  } else {
    tracks_.Activate(track);
  }
}

void StateHistory::CommitImport() noexcept {
  StateTrack& track = tracks_[index_];
  QUIRE_DCHECK(!table()[index_].retained);
  tracks_.Release(track, false);
  const bool keeps_inputs = options_.keep.interval > 0;
  track.length = position_;
  track.input_start = keeps_inputs ? position_ : 0;
  track.records.push_back({.position = position_,
                           .slot = std::exchange(import_slot_, -1),
                           .ends_forward = true,
                           .checkpoint = keeps_inputs});
}

void StateHistory::CommitEnd() noexcept {
  control_.CloseForward();
  for (StateMember& member : batch_.members()) {
    if (!member.is_tree) batch_.End(member);
  }
  batch_.Drop();
}

// In the reverse order of the commit that opened it, so that slots come back to the free list as
// they left it.
void StateHistory::CommitAbort() noexcept {
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

void StateHistory::ClearAll() noexcept {
  if (in_forward()) CommitAbort();
  for (size_t i = 0; i < table().entries().size(); ++i) {
    if (table().entries()[i].id >= 0) ReleaseTrack(static_cast<int32_t>(i));
  }
  control_.Clear();
  tracks_.Clear();
  batch_.Clear();
  FreeAll(tree_depths_);
  child_ = {};
  loaded_ = {};
}

void StateHistory::ReleaseTrack(int32_t index) noexcept {
  StateTrack& track = tracks_[index];
  tracks_.DropNodes(track.tree, 0);
  tracks_.Release(track, table()[index].retained);
}

// ---------------------------------------------------------------------- token trees

Result<int64_t> StateHistory::TreeSize(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  return tracks_[index].tree.size();
}

Status StateHistory::RequireCommitted(const ControlCall& call, int32_t index) const {
  return RequireNoTree(call.name(), table()[index].id, tracks_[index].tree.size());
}

Status StateHistory::PlanBeginTree(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call.name(), call.seq_ids, call.append_lengths));
  control_.StartPlanning();
  batch_.Start(call.seq_ids.size());
  tree_depths_.clear();
  NodeParents parents(call.name(), call.parents);
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i) {
    const auto of_member = parents.Take(call.seq_ids[i], call.append_lengths[i]);
    status = of_member.ok() ? PlanTreeMember(call, i, *of_member) : of_member.status();
  }
  if (status.ok()) status = parents.RequireNoneLeft();
  if (status.ok()) status = CheckRoomForNodes();
  if (!status.ok()) batch_.Drop();
  return status;
}

Status StateHistory::PlanTreeMember(const ControlCall& call, size_t i,
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

Status StateHistory::CheckRoomForNodes() const {
  int64_t needed = 0;
  for (const StateMember& member : members()) {
    const int64_t size = tracks_[member.index].tree.size();
    needed += BlocksOfNodes(size + member.row_count, options_.keep.interval) -
              BlocksOfNodes(size, options_.keep.interval);
  }
  if (row_count() > options_.max_tree_slots - tracks_.node_count()) {
    return Status(StatusCode::kOutOfPages,
                  std::string(call_.name()) + ": " + std::to_string(row_count()) +
                      " new nodes beside " + std::to_string(tracks_.node_count()) +
                      " uncommitted ones are more than max_tree_slots, " +
                      std::to_string(options_.max_tree_slots) + "; commit trees first");
  }
  if (row_count() > slots().free_count())
    return NoFreeSlots(call_, "slots for states", row_count(), slots());
  if (needed > blocks().free_count())
    return NoFreeSlots(call_, "blocks for inputs", needed, blocks());
  return Status();
}

void StateHistory::CommitBeginTree() noexcept {
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
Status StateHistory::PlanCommitTree(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call.name()));
  QUIRE_RETURN_IF_ERROR(CheckLeafCount(call.name(), call.seq_ids, call.leaves));
  control_.StartPlanning();
  batch_.Start(call.seq_ids.size());
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i) status = PlanLeaf(call, i);
  if (status.ok()) status = CheckRoomForInputs();
  if (!status.ok()) {
    batch_.Drop();
    return status;
  }
  batch_.TakeBlocks();  // now, so that the owner can copy inputs there before the commit
  return Status();
}

Status StateHistory::PlanLeaf(const ControlCall& call, size_t i) {
  const int64_t seq_id = call.seq_ids[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call.name(), seq_id));
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

void StateHistory::CommitTrees() noexcept {
  for (StateMember& member : batch_.members()) {
    StateTree& tree = tracks_[member.index].tree;
    for (StateRecord& record : member.pending) {
      const int32_t node = member.path[static_cast<size_t>(record.position - member.base - 1)];
      record.slot = tree.slots[static_cast<size_t>(node)];
      slots().Hold(record.slot);
    }
    if (member.row_count > 0) batch_.End(member);
    tracks_.DropNodes(tree, 0);
  }
  batch_.Drop();
}

// ---------------------------------------------------------------------- digest and invariants

void StateHistory::AppendFacts(std::vector<int64_t>& facts) const {
  facts.insert(facts.end(), {in_forward(), table().count(), retained_slot_count()});
  for (const int32_t index : table().SortedById()) {
    const StateTrack& track = tracks_[index];
    facts.insert(facts.end(), {table()[index].id, table()[index].retained, control_.InBatch(index),
                               track.length, track.input_start, track.tree.size()});
    for (const std::vector<int32_t>* list :
         {&track.tree.parents, &track.tree.slots, &track.tree.blocks}) {
      facts.insert(facts.end(), list->begin(), list->end());
    }
    for (const StateRecord& record : track.records) {
      facts.insert(facts.end(),
                   {record.position, record.slot, record.ends_forward, record.checkpoint});
    }
    facts.push_back(-1);
    for (const InputBlock& block : track.blocks)
      facts.insert(facts.end(), {block.index, block.slot});
    facts.push_back(-1);
  }
  for (const SlotPool* pool : {&slots(), &blocks()}) {
    std::vector<int32_t> free = pool->free_slots();
    std::sort(free.begin(), free.end());
    facts.insert(facts.end(), free.begin(), free.end());
    facts.push_back(-1);
  }
  if (!in_forward()) return;
  for (const StateMember& member : members()) {
    facts.insert(facts.end(), {member.index, member.base, member.row_count});
    for (const StateRecord& record : member.pending) {
      facts.insert(facts.end(), {record.position, record.slot, record.ends_forward});
    }
  }
}

Status StateHistory::CheckInvariants() const {
  std::vector<int32_t> slot_holds(static_cast<size_t>(slots().slot_count()), 0);
  std::vector<int32_t> block_holds(static_cast<size_t>(blocks().slot_count()), 0);
  std::vector<int32_t> retained(slot_holds.size(), 0);
  int64_t nodes = 0;
  for (const int32_t index : table().SortedById()) {
    nodes += tracks_[index].tree.size();
    const int64_t id = table()[index].id;
    QUIRE_RETURN_IF_ERROR(tracks_.CheckTrack(id, tracks_[index], slot_holds, block_holds));
    if (!table()[index].retained) continue;
    if (tracks_[index].tree.size() > 0) {
      return Status(StatusCode::kInternal, "StateHistory: sequence " + std::to_string(id) +
                                               ": it is retained and has a tree");
    }
    for (const StateRecord& record : tracks_[index].records) {
      ++retained[static_cast<size_t>(record.slot)];
    }
  }
  if (in_forward()) {
    for (const StateMember& member : members()) {
      for (const StateRecord& record : member.pending)
        ++slot_holds[static_cast<size_t>(record.slot)];
      for (size_t b = member.first_new_block; b < member.blocks.size(); ++b) {
        ++block_holds[static_cast<size_t>(member.blocks[b].slot)];
      }
    }
  }
  return tracks_.CheckHolds(slot_holds, block_holds, retained, nodes);
}

}  // namespace quire
