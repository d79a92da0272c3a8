#include "kv/recurrent/state_history.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/round_up.h"
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

// Whether a retained sequence keeps the record.
bool StaysRetained(const StateTrack& track, const StateRecord& record) {
  return record.checkpoint || record.position == track.length;
}

template <typename... T>
int64_t BytesOf(const std::vector<T>&... tables) {
  return static_cast<int64_t>((... + (tables.capacity() * sizeof(T))));
}

int64_t BytesIn(const StateTrack& track) {
  const StateTree& tree = track.tree;
  return BytesOf(track.records, track.blocks, tree.parents, tree.depths, tree.slots, tree.blocks);
}

// Blocks for the inputs of this number of nodes.
int64_t BlocksOfNodes(int64_t node_count, int64_t interval) {
  return interval == 0 ? 0 : CeilDiv(node_count, interval);
}

}  // namespace

void ThinPositions(std::vector<int64_t>& positions, int64_t limit, int64_t now) {
  while (static_cast<int64_t>(positions.size()) > limit) {
    size_t least = 0;
    double least_ratio = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < positions.size(); ++i) {
      const int64_t before = i == 0 ? 0 : positions[i - 1];
      const int64_t behind = i + 1 == positions.size() ? now : positions[i + 1];
      const double ratio =
          static_cast<double>(behind - before) / static_cast<double>(now - positions[i] + 1);
      if (ratio >= least_ratio) continue;
      least = i;
      least_ratio = ratio;
    }
    positions.erase(positions.begin() + static_cast<std::ptrdiff_t>(least));
  }
}

namespace {

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

int64_t StateHistory::SlotCount(const StateHistoryOptions& options) {
  if (options.slot_count != 0) return options.slot_count + options.max_tree_slots;
  // Before the forward: history and checkpoints.
  const int64_t checkpoints = options.keep.recent + options.keep.thinned;
  return options.max_num_sequences * (options.keep.history + checkpoints) +
         AddedMax(options, options.max_rows, checkpoints) + options.max_loads +
         options.max_retained_slots + options.max_tree_slots;
}

int64_t StateHistory::BlockCount(const StateHistoryOptions& options) {
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
      slots_(SlotCount(options)),
      blocks_(BlockCount(options)),
      control_(options.max_num_sequences),
      retained_holders_(static_cast<size_t>(slots_.slot_count()), 0) {}

// ---------------------------------------------------------------------- queries

Result<int64_t> StateHistory::Length(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  for (const StateMember& member : members()) {
    if (in_forward() && member.index == index && !member.is_tree) return member.end();
  }
  return TrackOf(index).length + TrackOf(index).tree.size();
}

Result<int64_t> StateHistory::ReplayStart(int64_t seq_id, int64_t position) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find("ReplayStart", seq_id));
  const StateTrack& track = TrackOf(index);
  const int64_t length = track.length + track.tree.size();
  if (position < 0 || position > length) {
    return Status(StatusCode::kBadArgument, OfSequence("ReplayStart", seq_id) + "of length " +
                                                std::to_string(length) + " has no position " +
                                                std::to_string(position));
  }
  if (position > track.length) return position;  // every node has a state
  const Cut cut = CutAt(track, position);
  if (cut.exact || cut.replays) return position;
  return cut.record_count == 0 ? 0 : track.records[cut.record_count - 1].position;
}

StateHistory::Cut StateHistory::CutAt(const StateTrack& track, int64_t position) const {
  Cut cut;
  while (cut.record_count < track.records.size() &&
         track.records[cut.record_count].position <= position) {
    ++cut.record_count;
  }
  const int64_t held = cut.record_count == 0 ? 0 : track.records[cut.record_count - 1].position;
  cut.exact = held == position;
  cut.replays = !cut.exact && options_.keep.interval > 0 && position > track.input_start;
  if (position <= track.input_start) return cut;
  while (cut.block_count < track.blocks.size() &&
         track.blocks[cut.block_count].index * options_.keep.interval < position) {
    ++cut.block_count;
  }
  return cut;
}

Result<int32_t> StateHistory::SlotAt(const char* call, int64_t seq_id, int64_t position) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  const StateTrack& track = TrackOf(index);
  if (position < 0 || position > track.length) {
    return Status(StatusCode::kBadArgument, OfSequence(call, seq_id) + "of length " +
                                                std::to_string(track.length) + " has no position " +
                                                std::to_string(position));
  }
  const Cut cut = CutAt(track, position);
  const StateRecord held =
      cut.record_count == 0 ? StateRecord() : track.records[cut.record_count - 1];
  if (!cut.exact) return NeedsReplay(call, seq_id, position, held.position);
  return held.slot;
}

int64_t StateHistory::memory_bytes() const {
  int64_t bytes = BytesOf(tracks_, members_, tree_depths_);
  for (const StateTrack& track : tracks_) bytes += BytesIn(track);
  for (const StateMember& member : members_)
    bytes += BytesOf(member.pending, member.kept, member.blocks, member.path);
  return bytes + BytesIn(child_) + BytesIn(loaded_);
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
      PlanEnd();
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
  if (tracks_.size() < table().entries().size()) tracks_.resize(table().entries().size());
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
  const int64_t committed = TrackOf(index_).length;
  const int64_t length = committed + TrackOf(index_).tree.size();
  if (call.count < -1 || call.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(call.name(), call.seq_id) + "of length " +
                                                std::to_string(length) + " cannot be forked at " +
                                                std::to_string(call.count));
  }
  const int64_t position = call.count < 0 ? length : call.count;
  if (position > committed) QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index_));
  ReserveSequence();
  return PlanCut(call, TrackOf(index_), position);
}

Status StateHistory::PlanPop(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, control_.FindOutsideBatch(call.name(), call.seq_id));
  const StateTrack& track = TrackOf(index_);
  const int64_t length = track.length + track.tree.size();
  if (call.count < 0 || call.count > length) {
    return Status(StatusCode::kBadArgument, OfSequence(call.name(), call.seq_id) + "of length " +
                                                std::to_string(length) + " cannot lose " +
                                                std::to_string(call.count) + " tokens");
  }
  return PlanCut(call, track, std::min(track.length, length - call.count));
}

Status StateHistory::PlanCut(const ControlCall& call, const StateTrack& track, int64_t position) {
  cut_ = CutAt(track, position);
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
    ReserveGrowing(TrackOf(index_).records, cut_.record_count + 1);
  }
  if (!cut_.replays) return Status();
  if (slots_.free_count() == 0) return NoFreeSlots(call, "slot for a state", 1, slots_);
  const int64_t first_block = track.blocks.front().index;
  const int64_t block = held.position / options_.keep.interval - first_block;
  replay_ = {.needed = true,
             .from_slot = held.slot,
             .from = held.position,
             .position = position,
             .to_slot = slots_.Take(),
             .block = track.blocks[static_cast<size_t>(block)].slot};
  return Status();
}

Status StateHistory::PlanRetain(const ControlCall& call) {
  QUIRE_ASSIGN_OR_RETURN(index_, control_.FindOutsideBatch(call.name(), call.seq_id));
  if (table()[index_].retained == call.retained) return Status();
  if (!call.retained) return control_.CheckRoomForActive(call.name(), call.seq_id);
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index_));
  return CheckRetainedRoom(call, TrackOf(index_));
}

Status StateHistory::CheckRetainedRoom(const ControlCall& call, const StateTrack& track) const {
  int64_t count = retained_slot_count_;
  for (const StateRecord& record : track.records) {
    if (!StaysRetained(track, record)) continue;
    if (retained_holders_[static_cast<size_t>(record.slot)] == 0) ++count;
  }
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
  StateTrack& track = TrackOf(index_);
  if (call.count <= track.length || call.count > kPositionsMax) {
    return Status(call.count > kPositionsMax ? StatusCode::kTooLarge : StatusCode::kBadArgument,
                  OfSequence(call.name(), call.seq_id) + "of length " +
                      std::to_string(track.length) + " cannot be given the state at position " +
                      std::to_string(call.count) +
                      "; the position must be after the length, and positions end at 2^31");
  }
  if (slots_.free_count() == 0) return NoFreeSlots(call, "slot for a state", 1, slots_);
  ReserveGrowing(track.records, 1);
  position_ = call.count;
  import_slot_ = slots_.Take();
  return Status();
}

// No sequence is in the batch yet; there is room for this number of them.
void StateHistory::StartBatch(size_t member_count) {
  control_.StartPlanning();
  member_count_ = 0;
  row_count_ = 0;
  if (members_.size() < member_count) members_.resize(member_count);
}

Status StateHistory::PlanBegin(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call.name(), call.seq_ids, call.append_lengths));
  StartBatch(call.seq_ids.size());
  std::span<const LayerLoad> loads = call.loads;
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i)
    status = PlanMember(call, i, TakeLoad(call.seq_ids[i], loads));
  if (status.ok()) status = RequireNoLoadLeft(call.name(), loads);
  if (status.ok()) status = CheckRoomForBatch();
  if (!status.ok()) member_count_ = 0;
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
  QUIRE_RETURN_IF_ERROR(CheckPositions(call.name(), seq_id, TrackOf(index).length, row_count, 0));
  if (row_count <= kPositionsMax - row_count_) return index;
  return Status(StatusCode::kTooLarge,
                std::string(call.name()) + ": with the " + std::to_string(row_count) +
                    " tokens of sequence " + std::to_string(seq_id) +
                    " the batch has 2^31 rows or more; append them in several forwards");
}

void StateHistory::StartMember(StateMember& member, int32_t index, int64_t row_count) const {
  const StateTrack& track = TrackOf(index);
  member.index = index;
  member.base = track.length;
  member.row_count = row_count;
  member.first_row = row_count_;
  member.current = track.records.empty() ? -1 : track.records.back().slot;
  member.pending.clear();
  member.kept.clear();
  member.blocks.clear();
  member.first_new_block = 0;
  member.copied_block = -1;
  member.imported = 0;
  member.source = nullptr;
  member.is_tree = false;
  member.path.clear();
}

Status StateHistory::PlanMember(const ControlCall& call, size_t i, const LayerLoad* load) {
  const int64_t row_count = call.append_lengths[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, CheckMember(call, call.seq_ids[i], row_count));
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  StateTrack& track = TrackOf(index);
  StateMember& member = members_[i];
  StartMember(member, index, row_count);
  if (load != nullptr) QUIRE_RETURN_IF_ERROR(StartLoad(call, *load, member));
  const StateTrack& from = load == nullptr ? track : loaded_;
  PlanCheckpoints(from, member);
  PlanBlocks(from, member);
  if (load != nullptr) member.pending.insert(member.pending.begin(), loaded_.records.front());
  ReserveGrowing(track.records, track.records.size() + member.pending.capacity());
  control_.Name(index);
  row_count_ += row_count;
  member_count_ = i + 1;
  return Status();
}

void StateHistory::PlanCheckpoints(const StateTrack& track, StateMember& member) const {
  const KeepPolicy& keep = options_.keep;
  member.pending.clear();
  member.kept.clear();
  member.input_start = 0;
  // Those that are kept, its end, and what it loads.
  member.pending.reserve(static_cast<size_t>(keep.recent + keep.thinned + 2));
  StateRecord end{.position = member.end(), .ends_forward = true};
  if (keep.interval > 0) {
    std::vector<int64_t> all;
    for (const StateRecord& record : track.records) {
      if (record.checkpoint) all.push_back(record.position);
    }
    for (int64_t p = (member.base / keep.interval + 1) * keep.interval; p <= member.end();
         p += keep.interval) {
      all.push_back(p);
    }
    const size_t recent = std::min(all.size(), static_cast<size_t>(keep.recent));
    const auto oldest_recent = all.end() - static_cast<std::ptrdiff_t>(recent);
    for (auto p = all.begin(); p != oldest_recent; ++p) {
      member.kept.push_back(*p);
      ThinPositions(member.kept, keep.thinned, member.end());
    }
    member.kept.insert(member.kept.end(), oldest_recent, all.end());
    const bool full = recent == static_cast<size_t>(keep.recent);
    member.input_start = std::max(track.input_start, full ? *oldest_recent : 0);
    for (const int64_t p : member.kept) {
      if (p > member.base && p < member.end())
        member.pending.push_back({.position = p, .checkpoint = true});
    }
    end.checkpoint = member.end() % keep.interval == 0;
  }
  member.pending.push_back(end);
}

void StateHistory::PlanBlocks(const StateTrack& track, StateMember& member) const {
  const int64_t interval = options_.keep.interval;
  member.blocks.clear();
  member.first_new_block = 0;
  member.copied_block = -1;
  if (interval == 0) return;
  const int64_t first = member.input_start / interval;
  const int64_t last = (member.end() - 1) / interval;
  for (const InputBlock& block : track.blocks) {
    if (block.index < first) continue;
    const bool full = (block.index + 1) * interval <= member.base;
    if (full || blocks_.holder_count(block.slot) == 1) {
      member.blocks.push_back(block);
    } else {
      member.copied_block = block.slot;
    }
  }
  member.first_new_block = member.blocks.size();
  const int64_t next = member.blocks.empty() ? first : member.blocks.back().index + 1;
  for (int64_t index = next; index <= last; ++index) member.blocks.push_back({.index = index});
}

Status StateHistory::CheckRoomForBatch() const {
  int64_t slots = 0;
  int64_t blocks = 0;
  for (const StateMember& member : members()) {
    // Where the caller adds checkpoints, room for all that it may add.
    slots += options_.keep.interval > 0 ? static_cast<int64_t>(member.pending.size())
                                        : options_.keep.thinned + 1;
    blocks += static_cast<int64_t>(member.blocks.size() - member.first_new_block);
  }
  if (slots > slots_.free_count()) return NoFreeSlots(call_, "slots for states", slots, slots_);
  if (blocks > blocks_.free_count())
    return NoFreeSlots(call_, "blocks for inputs", blocks, blocks_);
  return Status();
}

void StateHistory::PlanEnd() {
  if (options_.keep.interval > 0) return;
  for (size_t m = 0; m < member_count_; ++m) PlanKept(members_[m]);
}

// Where the caller adds checkpoints.
void StateHistory::PlanKept(StateMember& member) const {
  member.kept.clear();
  for (const StateRecord& record : TrackOf(member.index).records) {
    if (record.checkpoint) member.kept.push_back(record.position);
  }
  for (const StateRecord& record : member.pending) {
    if (record.checkpoint) member.kept.push_back(record.position);
  }
  ThinPositions(member.kept, options_.keep.thinned, member.end());
}

// ---------------------------------------------------------------------- committing

ControlCall::Kind StateHistory::Commit() noexcept {
  switch (call_.kind) {
    case ControlCall::Kind::kClear:
      ClearAll();
      break;
    case ControlCall::Kind::kAdd:
      InsertSequence(call_.seq_id);
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
      CommitBegin();
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
  if (replay_.needed) slots_.Release(replay_.to_slot);
  replay_ = {};
  if (import_slot_ >= 0) slots_.Release(std::exchange(import_slot_, -1));
  if (call_.kind == ControlCall::Kind::kCommitTree) ReleasePlannedBlocks();
  const bool opens = call_.kind == ControlCall::Kind::kBegin ||
                     call_.kind == ControlCall::Kind::kBeginTree ||
                     call_.kind == ControlCall::Kind::kCommitTree;
  if (opens) member_count_ = 0;
}

int32_t StateHistory::InsertSequence(int64_t seq_id) noexcept {
  const int32_t index = control_.table().Insert(seq_id);
  StateTrack& track = TrackOf(index);
  track.length = 0;
  track.input_start = 0;
  track.records.clear();
  track.blocks.clear();
  return index;
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
  const StateTrack& parent = TrackOf(index_);
  for (size_t r = 0; r < cut_.record_count; ++r) {
    slots_.Hold(parent.records[r].slot);
    child_.records.push_back(parent.records[r]);
  }
  for (size_t b = 0; b < cut_.block_count; ++b) {
    blocks_.Hold(parent.blocks[b].slot);
    child_.blocks.push_back(parent.blocks[b]);
  }
  child_.input_start = parent.input_start;
  FinishCut(child_);
  std::swap(TrackOf(InsertSequence(call_.child_id)), child_);
}

void StateHistory::CommitPop() noexcept {
  StateTrack& track = TrackOf(index_);
  if (track.tree.size() > 0)
    DropNodes(index_, std::max<int64_t>(track.tree.size() - call_.count, 0));
  while (track.records.size() > cut_.record_count) {
    ReleaseRecord(track.records.back(), table()[index_].retained);
    track.records.pop_back();
  }
  while (track.blocks.size() > cut_.block_count) {
    blocks_.Release(track.blocks.back().slot);
    track.blocks.pop_back();
  }
  FinishCut(track);
}

void StateHistory::CommitRetain() noexcept {
  if (table()[index_].retained == call_.retained) return;
  control_.table().SetRetained(index_, call_.retained);
  StateTrack& track = TrackOf(index_);
  if (!call_.retained) {
    for (const StateRecord& record : track.records) ReleaseRetained(record.slot);
    return;
  }
  std::erase_if(track.records, [&](const StateRecord& record) {
    if (StaysRetained(track, record)) return false;
    slots_.Release(record.slot);
    return true;
  });
  for (const StateRecord& record : track.records) HoldRetained(record.slot);
  for (const InputBlock& block : track.blocks) blocks_.Release(block.slot);
  track.blocks.clear();
  track.input_start = 0;
  if (track.records.empty() || options_.keep.interval == 0) return;
  track.input_start = track.length;
  track.records.back().checkpoint = true;
}

void StateHistory::CommitImport() noexcept {
  StateTrack& track = TrackOf(index_);
  for (const StateRecord& record : track.records) slots_.Release(record.slot);
  for (const InputBlock& block : track.blocks) blocks_.Release(block.slot);
  track.records.clear();
  track.blocks.clear();
  const bool keeps_inputs = options_.keep.interval > 0;
  track.length = position_;
  track.input_start = keeps_inputs ? position_ : 0;
  track.records.push_back({.position = position_,
                           .slot = std::exchange(import_slot_, -1),
                           .ends_forward = true,
                           .checkpoint = keeps_inputs});
}

void StateHistory::CommitBegin() noexcept {
  control_.OpenForward();
  for (size_t m = 0; m < member_count_; ++m) {
    StateMember& member = members_[m];
    for (StateRecord& record : member.pending) record.slot = slots_.Take();
    for (size_t b = member.first_new_block; b < member.blocks.size(); ++b) {
      member.blocks[b].slot = blocks_.Take();
    }
  }
}

void StateHistory::CommitEnd() noexcept {
  control_.CloseForward();
  for (size_t m = 0; m < member_count_; ++m) {
    if (!members_[m].is_tree) EndMember(members_[m]);
  }
  member_count_ = 0;
}

void StateHistory::EndMember(StateMember& member) noexcept {
  StateTrack& track = TrackOf(member.index);
  track.length = member.end();
  track.input_start = member.input_start;
  KeepRecords(track, member);
  KeepBlocks(track, member);
}

void StateHistory::KeepRecords(StateTrack& track, const StateMember& member) noexcept {
  track.records.insert(track.records.end(), member.pending.begin(), member.pending.end());
  int64_t older_ends = -options_.keep.history;
  for (const StateRecord& record : track.records) older_ends += record.ends_forward;
  size_t count = 0;
  for (StateRecord record : track.records) {
    if (record.ends_forward && older_ends-- > 0) record.ends_forward = false;
    record.checkpoint = record.checkpoint &&
                        std::binary_search(member.kept.begin(), member.kept.end(), record.position);
    if (record.ends_forward || record.checkpoint) {
      track.records[count++] = record;
    } else {
      slots_.Release(record.slot);
    }
  }
  track.records.resize(count);
}

void StateHistory::KeepBlocks(StateTrack& track, StateMember& member) noexcept {
  for (const InputBlock& block : track.blocks) {
    const auto stays =
        std::any_of(member.blocks.begin(), member.blocks.end(),
                    [&](const InputBlock& other) { return other.slot == block.slot; });
    if (!stays) blocks_.Release(block.slot);
  }
  std::swap(track.blocks, member.blocks);
}

// In the reverse order of CommitBegin, so that slots come back to the free list as they left it.
void StateHistory::CommitAbort() noexcept {
  control_.CloseForward();
  for (size_t m = member_count_; m-- > 0;) {
    const StateMember& member = members_[m];
    if (member.is_tree)
      DropNodes(member.index, TrackOf(member.index).tree.size() - member.row_count);
    for (size_t b = member.blocks.size(); b-- > member.first_new_block;) {
      blocks_.Release(member.blocks[b].slot);
    }
    for (size_t r = member.pending.size(); r-- > 0;) slots_.Release(member.pending[r].slot);
  }
  member_count_ = 0;
}

void StateHistory::ClearAll() noexcept {
  if (in_forward()) CommitAbort();
  for (size_t i = 0; i < table().entries().size(); ++i) {
    if (table().entries()[i].id >= 0) ReleaseTrack(static_cast<int32_t>(i));
  }
  control_.Clear();
  QUIRE_DCHECK(slots_.free_count() == slots_.slot_count()) << "a cleared history holds states";
  QUIRE_DCHECK(blocks_.free_count() == blocks_.slot_count()) << "a cleared history holds inputs";
  QUIRE_DCHECK(retained_slot_count_ == 0);
  FreeAll(tracks_);
  FreeAll(members_);
  member_count_ = 0;
  FreeAll(tree_depths_);
  child_ = {};
  loaded_ = {};
}

void StateHistory::ReleaseTrack(int32_t index) noexcept {
  StateTrack& track = TrackOf(index);
  DropNodes(index, 0);
  for (size_t r = track.records.size(); r-- > 0;) {
    ReleaseRecord(track.records[r], table()[index].retained);
  }
  for (size_t b = track.blocks.size(); b-- > 0;) blocks_.Release(track.blocks[b].slot);
  track.records.clear();
  track.blocks.clear();
}

void StateHistory::ReleaseRecord(const StateRecord& record, bool retained) noexcept {
  if (retained) ReleaseRetained(record.slot);
  slots_.Release(record.slot);
}

void StateHistory::HoldRetained(int32_t slot) noexcept {
  if (retained_holders_[static_cast<size_t>(slot)]++ == 0) ++retained_slot_count_;
}

void StateHistory::ReleaseRetained(int32_t slot) noexcept {
  if (--retained_holders_[static_cast<size_t>(slot)] == 0) --retained_slot_count_;
}

// ---------------------------------------------------------------------- token trees

Result<int64_t> StateHistory::TreeSize(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call, seq_id));
  return TrackOf(index).tree.size();
}

Status StateHistory::RequireCommitted(const ControlCall& call, int32_t index) const {
  return RequireNoTree(call.name(), table()[index].id, TrackOf(index).tree.size());
}

Status StateHistory::PlanBeginTree(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call.name(), call.seq_ids, call.append_lengths));
  StartBatch(call.seq_ids.size());
  tree_depths_.clear();
  NodeParents parents(call.name(), call.parents);
  Status status;
  for (size_t i = 0; i < call.seq_ids.size() && status.ok(); ++i) {
    const auto of_member = parents.Take(call.seq_ids[i], call.append_lengths[i]);
    status = of_member.ok() ? PlanTreeMember(call, i, *of_member) : of_member.status();
  }
  if (status.ok()) status = parents.RequireNoneLeft();
  if (status.ok()) status = CheckRoomForNodes();
  if (!status.ok()) member_count_ = 0;
  return status;
}

Status StateHistory::PlanTreeMember(const ControlCall& call, size_t i,
                                    std::span<const int64_t> parents) {
  const int64_t seq_id = call.seq_ids[i];
  const int64_t count = call.append_lengths[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, CheckMember(call, seq_id, count));
  StateTree& tree = TrackOf(index).tree;
  QUIRE_RETURN_IF_ERROR(
      CheckTreeSize(call.name(), seq_id, tree.size(), count, options_.max_tree_size));
  QUIRE_RETURN_IF_ERROR(AddDepths(call.name(), seq_id, tree.depths, parents, tree_depths_));
  const size_t size = static_cast<size_t>(tree.size() + count);
  ReserveGrowing(tree.parents, size);
  ReserveGrowing(tree.depths, size);
  ReserveGrowing(tree.slots, size);
  ReserveGrowing(tree.blocks, static_cast<size_t>(BlocksOfNodes(static_cast<int64_t>(size),
                                                                options_.keep.interval)));
  StateMember& member = members_[i];
  StartMember(member, index, count);
  member.is_tree = true;
  control_.Name(index);
  row_count_ += count;
  member_count_ = i + 1;
  return Status();
}

Status StateHistory::CheckRoomForNodes() const {
  int64_t blocks = 0;
  for (const StateMember& member : members()) {
    const int64_t size = TrackOf(member.index).tree.size();
    blocks += BlocksOfNodes(size + member.row_count, options_.keep.interval) -
              BlocksOfNodes(size, options_.keep.interval);
  }
  if (row_count_ > options_.max_tree_slots - tree_node_count_) {
    return Status(StatusCode::kOutOfPages,
                  std::string(call_.name()) + ": " + std::to_string(row_count_) +
                      " new nodes beside " + std::to_string(tree_node_count_) +
                      " uncommitted ones are more than max_tree_slots, " +
                      std::to_string(options_.max_tree_slots) + "; commit trees first");
  }
  if (row_count_ > slots_.free_count())
    return NoFreeSlots(call_, "slots for states", row_count_, slots_);
  if (blocks > blocks_.free_count())
    return NoFreeSlots(call_, "blocks for inputs", blocks, blocks_);
  return Status();
}

void StateHistory::CommitBeginTree() noexcept {
  control_.OpenForward();
  for (const StateMember& member : members()) {
    StateTree& tree = TrackOf(member.index).tree;
    for (int64_t row = member.first_row; row < member.first_row + member.row_count; ++row) {
      tree.parents.push_back(static_cast<int32_t>(call_.parents[static_cast<size_t>(row)]));
      tree.depths.push_back(tree_depths_[static_cast<size_t>(row)]);
      tree.slots.push_back(slots_.Take());
    }
    const size_t blocks = static_cast<size_t>(BlocksOfNodes(tree.size(), options_.keep.interval));
    while (tree.blocks.size() < blocks) tree.blocks.push_back(blocks_.Take());
    tree_node_count_ += member.row_count;
  }
}

// The last taken first, so that slots come back to the free list as they left it.
void StateHistory::DropNodes(int32_t index, int64_t size) noexcept {
  StateTree& tree = TrackOf(index).tree;
  tree_node_count_ -= tree.size() - size;
  const size_t blocks = static_cast<size_t>(BlocksOfNodes(size, options_.keep.interval));
  for (; tree.blocks.size() > blocks; tree.blocks.pop_back()) blocks_.Release(tree.blocks.back());
  for (; tree.size() > size; tree.parents.pop_back()) {
    slots_.Release(tree.slots.back());
    tree.slots.pop_back();
    tree.depths.pop_back();
  }
}

// As a forward of the accepted tokens, whose states and inputs are there already.
Status StateHistory::PlanCommitTree(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call.name()));
  QUIRE_RETURN_IF_ERROR(CheckLeafCount(call.name(), call.seq_ids, call.leaves));
  StartBatch(call.seq_ids.size());
  int64_t blocks = 0;
  for (size_t i = 0; i < call.seq_ids.size(); ++i) {
    const Status status = PlanLeaf(call, i);
    if (!status.ok()) {
      member_count_ = 0;
      return status;
    }
    blocks += static_cast<int64_t>(members_[i].blocks.size() - members_[i].first_new_block);
  }
  if (blocks > blocks_.free_count()) {
    member_count_ = 0;
    return NoFreeSlots(call, "blocks for inputs", blocks, blocks_);
  }
  // Now, so that the owner can copy inputs there before the commit.
  for (size_t m = 0; m < member_count_; ++m) {
    StateMember& member = members_[m];
    for (size_t b = member.first_new_block; b < member.blocks.size(); ++b)
      member.blocks[b].slot = blocks_.Take();
  }
  return Status();
}

Status StateHistory::PlanLeaf(const ControlCall& call, size_t i) {
  const int64_t seq_id = call.seq_ids[i];
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, Find(call.name(), seq_id));
  QUIRE_RETURN_IF_ERROR(control_.NameOnce(call.name(), index));
  StateTrack& track = TrackOf(index);
  const StateTree& tree = track.tree;
  const int64_t leaf = call.leaves[i];
  QUIRE_RETURN_IF_ERROR(CheckLeaf(call.name(), seq_id, tree.size(), leaf));
  const int64_t count = leaf < 0 ? 0 : tree.depths[static_cast<size_t>(leaf)] + 1;
  StateMember& member = members_[i];
  StartMember(member, index, count);
  member.is_tree = true;
  member_count_ = i + 1;
  if (count == 0) return Status();
  member.path.reserve(static_cast<size_t>(count));
  FillPath(tree.parents, leaf, member.path);
  PlanCheckpoints(track, member);
  PlanBlocks(track, member);
  if (options_.keep.interval == 0) PlanKept(member);
  ReserveGrowing(track.records, track.records.size() + member.pending.size());
  return Status();
}

void StateHistory::ReleasePlannedBlocks() noexcept {
  for (size_t m = member_count_; m-- > 0;) {
    const StateMember& member = members_[m];
    for (size_t b = member.blocks.size(); b-- > member.first_new_block;)
      blocks_.Release(member.blocks[b].slot);
  }
}

void StateHistory::CommitTrees() noexcept {
  for (size_t m = 0; m < member_count_; ++m) {
    StateMember& member = members_[m];
    const StateTree& tree = TrackOf(member.index).tree;
    for (StateRecord& record : member.pending) {
      const int32_t node = member.path[static_cast<size_t>(record.position - member.base - 1)];
      record.slot = tree.slots[static_cast<size_t>(node)];
      slots_.Hold(record.slot);
    }
    if (member.row_count > 0) EndMember(member);
    DropNodes(member.index, 0);
  }
  member_count_ = 0;
}

int32_t StateHistory::SlotOfRow(int64_t row) const {
  const StateMember& member = MemberOfRow(row);
  if (!member.is_tree) return PendingSlot(FindRow(row));
  return TrackOf(member.index).tree.slots[static_cast<size_t>(NodeOfRow(member, row))];
}

int32_t StateHistory::SlotBeforeRow(int64_t row, bool* is_known) const {
  const StateMember& member = MemberOfRow(row);
  *is_known = true;
  if (member.is_tree) {
    const StateTree& tree = TrackOf(member.index).tree;
    const int32_t parent = tree.parents[static_cast<size_t>(NodeOfRow(member, row))];
    return parent < 0 ? member.current : tree.slots[static_cast<size_t>(parent)];
  }
  if (row == member.first_row) return member.current;
  const int32_t slot = SlotOfRow(row - 1);
  *is_known = slot >= 0;
  return slot;
}

// ---------------------------------------------------------------------- in a forward

StateHistory::RowPlace StateHistory::FindRow(int64_t row) const {
  const auto all = members();
  const auto behind =
      std::upper_bound(all.begin(), all.end(), row,
                       [](int64_t r, const StateMember& member) { return r < member.first_row; });
  const size_t member = static_cast<size_t>(behind - all.begin()) - 1;
  return {member, all[member].base + row - all[member].first_row + 1};
}

int32_t StateHistory::PendingSlot(const RowPlace& place) const {
  for (const StateRecord& record : members_[place.member].pending) {
    if (record.position == place.position) return record.slot;
  }
  return -1;
}

int64_t StateHistory::CheckpointRoom(size_t member) const {
  return options_.keep.thinned + 1 - static_cast<int64_t>(members_[member].pending.size());
}

int32_t StateHistory::AddCheckpoint(const RowPlace& place) noexcept {
  std::vector<StateRecord>& pending = members_[place.member].pending;
  const auto behind = std::find_if(pending.begin(), pending.end(), [&](const StateRecord& record) {
    return record.position > place.position;
  });
  const int32_t slot = slots_.Take();
  pending.insert(behind, {.position = place.position, .slot = slot, .checkpoint = true});
  return slot;
}

// ---------------------------------------------------------------------- digest and invariants

void StateHistory::AppendFacts(std::vector<int64_t>& facts) const {
  facts.insert(facts.end(), {in_forward(), table().count(), retained_slot_count_});
  for (const int32_t index : table().SortedById()) {
    const StateTrack& track = TrackOf(index);
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
  for (const SlotPool* pool : {&slots_, &blocks_}) {
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

namespace {

Status Violated(int64_t seq_id, const char* what) {
  return Status(StatusCode::kInternal,
                "StateHistory: sequence " + std::to_string(seq_id) + ": " + what);
}

Status CheckHolds(const SlotPool& pool, const std::vector<int32_t>& holds, const char* what) {
  int64_t free = 0;
  for (size_t slot = 0; slot < holds.size(); ++slot) {
    if (holds[slot] != pool.holder_count(static_cast<int32_t>(slot))) {
      return Status(StatusCode::kInternal, std::string("StateHistory: ") + what + " " +
                                               std::to_string(slot) + " has another holder count");
    }
    free += holds[slot] == 0;
  }
  if (free == pool.free_count()) return Status();
  return Status(StatusCode::kInternal,
                std::string("StateHistory: free ") + what + "s are not listed");
}

}  // namespace

Status StateHistory::CheckTrack(int32_t index, std::vector<int32_t>& slot_holds,
                                std::vector<int32_t>& block_holds) const {
  const StateTrack& track = TrackOf(index);
  const int64_t id = table()[index].id;
  int64_t last = 0;
  for (const StateRecord& record : track.records) {
    if (record.position <= last) return Violated(id, "records are not ascending");
    if (!record.checkpoint && !record.ends_forward) return Violated(id, "a record has no reason");
    last = record.position;
    ++slot_holds[static_cast<size_t>(record.slot)];
  }
  if (last != track.length) return Violated(id, "no state at its length");
  for (const int32_t slot : track.tree.slots) ++slot_holds[static_cast<size_t>(slot)];
  for (const int32_t block : track.tree.blocks) ++block_holds[static_cast<size_t>(block)];
  if (track.tree.slots.size() != track.tree.parents.size() ||
      track.tree.depths.size() != track.tree.parents.size() ||
      static_cast<int64_t>(track.tree.blocks.size()) !=
          BlocksOfNodes(track.tree.size(), options_.keep.interval)) {
    return Violated(id, "its tree's nodes have other slots or blocks");
  }
  if (table()[index].retained && track.tree.size() > 0)
    return Violated(id, "it is retained and has a tree");
  for (const InputBlock& block : track.blocks) ++block_holds[static_cast<size_t>(block.slot)];
  const int64_t interval = options_.keep.interval;
  if (interval == 0) return Status();
  for (int64_t p = track.input_start; p <= track.length; p = (p / interval + 1) * interval) {
    const bool kept = p == 0 || std::any_of(track.records.begin(), track.records.end(),
                                            [&](const StateRecord& record) {
                                              return record.position == p && record.checkpoint;
                                            });
    if (!kept) return Violated(id, "a checkpoint is missing behind input_start");
  }
  if (track.input_start == track.length) return Status();
  int64_t next = track.input_start / interval;
  for (const InputBlock& block : track.blocks) {
    if (block.index != next++) return Violated(id, "input blocks are not consecutive");
  }
  if (next - 1 == (track.length - 1) / interval) return Status();
  return Violated(id, "input blocks do not reach its length");
}

Status StateHistory::CheckInvariants() const {
  std::vector<int32_t> slot_holds(static_cast<size_t>(slots_.slot_count()), 0);
  std::vector<int32_t> block_holds(static_cast<size_t>(blocks_.slot_count()), 0);
  std::vector<int32_t> retained(slot_holds.size(), 0);
  int64_t nodes = 0;
  for (const int32_t index : table().SortedById()) {
    nodes += TrackOf(index).tree.size();
    QUIRE_RETURN_IF_ERROR(CheckTrack(index, slot_holds, block_holds));
    if (!table()[index].retained) continue;
    for (const StateRecord& record : TrackOf(index).records) {
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
  if (nodes != tree_node_count_)
    return Status(StatusCode::kInternal, "StateHistory: tree nodes are miscounted");
  if (retained != retained_holders_) {
    return Status(StatusCode::kInternal, "StateHistory: retained holds are miscounted");
  }
  QUIRE_RETURN_IF_ERROR(CheckHolds(slots_, slot_holds, "slot"));
  return CheckHolds(blocks_, block_holds, "block");
}

}  // namespace quire
