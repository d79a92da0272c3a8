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

}  // namespace

StateHistory::StateHistory(const StateHistoryOptions& options)
    : options_(options),
      control_(options.max_num_sequences),
      tracks_(options.keep, StateSlotCount(options), InputBlockCount(options)),
      forwards_(options_, control_, tracks_) {}

// ---------------------------------------------------------------------- queries

Result<int64_t> StateHistory::Length(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  for (const StateMember& member : members()) {
    if (in_forward() && member.index == index && !member.is_tree) return member.end();
  }
  return tracks_[index].length + tracks_[index].tree.size();
}

Result<int64_t> StateHistory::TreeSize(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  return tracks_[index].tree.size();
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
  return tracks_.memory_bytes() + forwards_.memory_bytes() + child_.memory_bytes();
}

// ---------------------------------------------------------------------- planning

Status StateHistory::Plan(const ControlCall& call) {
  QUIRE_DCHECK(!replay_.needed && import_slot_ < 0) << "the slot of another planned call is lost";
  kind_ = call.kind;
  replay_ = {};
  if (StateForwards::Takes(call.kind)) return forwards_.Plan(call);
  call_ = call;
  switch (call.kind) {
    case ControlCall::Kind::kBegin:
    case ControlCall::Kind::kBeginTree:
    case ControlCall::Kind::kEnd:
    case ControlCall::Kind::kAbort:
    case ControlCall::Kind::kCommitTree:
      break;
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
    case ControlCall::Kind::kImport:
      return PlanImport(call);
  }
  return Status();
}

Status StateHistory::RequireCommitted(const ControlCall& call, int32_t index) const {
  return RequireNoTree(call.name(), table()[index].id, tracks_[index].tree.size());
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
  QUIRE_DCHECK(position >= 0 && position <= track.length);
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
  QUIRE_DCHECK(!track.blocks.empty() && options_.keep.interval > 0) << "no inputs are held";
  if (slots().free_count() == 0) return NoFreeSlots(call, "slot for a state", 1, slots());
  const int64_t first_block = track.blocks.front().index;
  const int64_t block = held.position / options_.keep.interval - first_block;
  QUIRE_DCHECK(block >= 0 && block < std::ssize(track.blocks)) << "the inputs are not held";
  QUIRE_DCHECK(held.position / options_.keep.interval == (position - 1) / options_.keep.interval)
      << "they lie in several blocks";
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

// ---------------------------------------------------------------------- committing

ControlCall::Kind StateHistory::Commit() noexcept {
  switch (kind_) {
    case ControlCall::Kind::kBegin:
    case ControlCall::Kind::kBeginTree:
    case ControlCall::Kind::kEnd:
    case ControlCall::Kind::kAbort:
    case ControlCall::Kind::kCommitTree:
      forwards_.Commit();
      break;
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
    case ControlCall::Kind::kImport:
      CommitImport();
      break;
  }
  return kind_;
}

void StateHistory::Drop() noexcept {
  if (replay_.needed) slots().Release(replay_.to_slot);
  replay_ = {};
  if (import_slot_ >= 0) slots().Release(std::exchange(import_slot_, -1));
  if (StateForwards::Takes(kind_)) forwards_.Drop();
}

void StateHistory::FinishCut(StateTrack& track) noexcept {
  track.length = position_;
  if (replay_.needed) {
    track.records.push_back({.position = position_, .slot = replay_.to_slot, .ends_forward = true});
    replay_ = {};
  }
  QUIRE_DCHECK((track.records.empty() ? 0 : track.records.back().position) == position_)
      << "there is no state at the end";
  if (position_ > track.input_start || options_.keep.interval == 0) return;
  track.input_start = position_;
  if (!track.records.empty()) track.records.back().checkpoint = true;
}

void StateHistory::CommitFork() noexcept {
  QUIRE_DCHECK(position_ <= tracks_[index_].length);
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
  QUIRE_DCHECK(import_slot_ >= 0) << "no import is planned";
  QUIRE_DCHECK(position_ > track.length && track.tree.size() == 0);
  tracks_.Release(track, false);
  const bool keeps_inputs = options_.keep.interval > 0;
  track.length = position_;
  track.input_start = keeps_inputs ? position_ : 0;
  track.records.push_back({.position = position_,
                           .slot = std::exchange(import_slot_, -1),
                           .ends_forward = true,
                           .checkpoint = keeps_inputs});
}

void StateHistory::ClearAll() noexcept {
  forwards_.Clear();
  for (size_t i = 0; i < table().entries().size(); ++i) {
    if (table().entries()[i].id >= 0) ReleaseTrack(static_cast<int32_t>(i));
  }
  control_.Clear();
  tracks_.Clear();
  child_ = {};
}

void StateHistory::ReleaseTrack(int32_t index) noexcept {
  StateTrack& track = tracks_[index];
  tracks_.DropNodes(track.tree, 0);
  tracks_.Release(track, table()[index].retained);
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
  // An open forward has taken slots and blocks, and so has a planned call, between Plan and Commit
  // or Drop.
  const auto add = [](int32_t slot, std::vector<int32_t>& holds) {
    if (slot >= 0) ++holds[static_cast<size_t>(slot)];
  };
  for (const StateMember& member : members()) {
    for (const StateRecord& record : member.pending) add(record.slot, slot_holds);
    for (size_t b = member.first_new_block; b < member.blocks.size(); ++b)
      add(member.blocks[b].slot, block_holds);
  }
  if (replay_.needed) ++slot_holds[static_cast<size_t>(replay_.to_slot)];
  add(import_slot_, slot_holds);
  return tracks_.CheckHolds(slot_holds, block_holds, retained, nodes);
}

}  // namespace quire
