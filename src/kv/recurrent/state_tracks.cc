#include "kv/recurrent/state_tracks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/round_up.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

// Whether a retained sequence keeps the record.
bool StaysRetained(const StateTrack& track, const StateRecord& record) {
  return record.checkpoint || record.position == track.length;
}

Status Violated(int64_t seq_id, const char* what) {
  return Status(StatusCode::kInternal,
                "StateHistory: sequence " + std::to_string(seq_id) + ": " + what);
}

Status CheckPool(const SlotPool& pool, const std::vector<int32_t>& holds, const char* what) {
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

template <typename... T>
int64_t TrackBytes(const std::vector<T>&... tables) {
  return static_cast<int64_t>((... + (tables.capacity() * sizeof(T))));
}

}  // namespace

int64_t BlocksOfNodes(int64_t node_count, int64_t interval) {
  QUIRE_DCHECK(node_count >= 0 && interval >= 0);
  return interval == 0 ? 0 : CeilDiv(node_count, interval);
}

int64_t StateTrack::memory_bytes() const {
  return TrackBytes(records, blocks, tree.parents, tree.depths, tree.slots, tree.blocks);
}

// ---------------------------------------------------------------------- queries

int64_t StateTracks::RetainedSlotsWith(const StateTrack& track) const {
  int64_t count = retained_slot_count_;
  for (const StateRecord& record : track.records) {
    if (!StaysRetained(track, record)) continue;
    if (retained_holders_[static_cast<size_t>(record.slot)] == 0) ++count;
  }
  return count;
}

StateCut StateTracks::CutAt(const StateTrack& track, int64_t position) const {
  QUIRE_DCHECK(position >= 0 && position <= track.length);
  StateCut cut;
  while (cut.record_count < track.records.size() &&
         track.records[cut.record_count].position <= position) {
    ++cut.record_count;
  }
  const int64_t held = cut.record_count == 0 ? 0 : track.records[cut.record_count - 1].position;
  cut.exact = held == position;
  cut.replays = !cut.exact && keep_.interval > 0 && position > track.input_start;
  if (position <= track.input_start) return cut;
  while (cut.block_count < track.blocks.size() &&
         track.blocks[cut.block_count].index * keep_.interval < position) {
    ++cut.block_count;
  }
  return cut;
}

// ---------------------------------------------------------------------- commits

StateTrack& StateTracks::Start(int32_t index) noexcept {
  StateTrack& track = (*this)[index];
  QUIRE_DCHECK(track.tree.size() == 0);
  QUIRE_DCHECK(track.records.empty() && track.blocks.empty()) << "their slots would be lost";
  track.length = 0;
  track.input_start = 0;
  track.records.clear();
  track.blocks.clear();
  return track;
}

void StateTracks::CopyCut(const StateTrack& parent, const StateCut& cut,
                          StateTrack* child) noexcept {
  QUIRE_DCHECK(child->records.empty() && child->blocks.empty());
  QUIRE_DCHECK(child->records.capacity() >= cut.record_count) << "no room was reserved";
  QUIRE_DCHECK(child->blocks.capacity() >= cut.block_count) << "no room was reserved";
  for (size_t r = 0; r < cut.record_count; ++r) {
    slots_.Hold(parent.records[r].slot);
    child->records.push_back(parent.records[r]);
  }
  for (size_t b = 0; b < cut.block_count; ++b) {
    blocks_.Hold(parent.blocks[b].slot);
    child->blocks.push_back(parent.blocks[b]);
  }
  child->input_start = parent.input_start;
}

void StateTracks::Truncate(StateTrack& track, const StateCut& cut, bool retained) noexcept {
  QUIRE_DCHECK(cut.record_count <= track.records.size());
  QUIRE_DCHECK(cut.block_count <= track.blocks.size());
  while (track.records.size() > cut.record_count) {
    ReleaseRecord(track.records.back(), retained);
    track.records.pop_back();
  }
  while (track.blocks.size() > cut.block_count) {
    blocks_.Release(track.blocks.back().slot);
    track.blocks.pop_back();
  }
}

void StateTracks::End(StateTrack& track, KeptStates kept) noexcept {
  QUIRE_DCHECK(kept.length >= track.length);
  track.length = kept.length;
  track.input_start = kept.input_start;
  KeepRecords(track, kept);
  QUIRE_DCHECK(!track.records.empty() && track.records.back().position == track.length)
      << "there is no state at the end";
  KeepBlocks(track, kept.blocks);
}

void StateTracks::KeepRecords(StateTrack& track, const KeptStates& kept) noexcept {
  QUIRE_DCHECK(track.records.capacity() >= track.records.size() + kept.pending.size())
      << "no room was reserved";
  track.records.insert(track.records.end(), kept.pending.begin(), kept.pending.end());
  int64_t older_ends = -keep_.history;
  for (const StateRecord& record : track.records) older_ends += record.ends_forward;
  size_t count = 0;
  for (StateRecord record : track.records) {
    if (record.ends_forward && older_ends-- > 0) record.ends_forward = false;
    record.checkpoint =
        record.checkpoint &&
        std::binary_search(kept.checkpoints.begin(), kept.checkpoints.end(), record.position);
    if (record.ends_forward || record.checkpoint) {
      track.records[count++] = record;
    } else {
      slots_.Release(record.slot);
    }
  }
  track.records.resize(count);
}

void StateTracks::KeepBlocks(StateTrack& track, std::vector<InputBlock>& blocks) noexcept {
  for (const InputBlock& block : track.blocks) {
    const auto stays = std::any_of(blocks.begin(), blocks.end(), [&](const InputBlock& other) {
      return other.slot == block.slot;
    });
    if (!stays) blocks_.Release(block.slot);
  }
  std::swap(track.blocks, blocks);
}

void StateTracks::Retain(StateTrack& track) noexcept {
  QUIRE_DCHECK(track.tree.size() == 0) << "a retained sequence has no tree";
  std::erase_if(track.records, [&](const StateRecord& record) {
    if (StaysRetained(track, record)) return false;
    slots_.Release(record.slot);
    return true;
  });
  for (const StateRecord& record : track.records) HoldRetained(record.slot);
  for (const InputBlock& block : track.blocks) blocks_.Release(block.slot);
  track.blocks.clear();
  track.input_start = 0;
  if (track.records.empty() || keep_.interval == 0) return;
  track.input_start = track.length;
  track.records.back().checkpoint = true;
}

void StateTracks::Activate(const StateTrack& track) noexcept {
  for (const StateRecord& record : track.records) ReleaseRetained(record.slot);
}

void StateTracks::Release(StateTrack& track, bool retained) noexcept {
  for (size_t r = track.records.size(); r-- > 0;) ReleaseRecord(track.records[r], retained);
  for (size_t b = track.blocks.size(); b-- > 0;) blocks_.Release(track.blocks[b].slot);
  track.records.clear();
  track.blocks.clear();
}

void StateTracks::ReleaseRecord(const StateRecord& record, bool retained) noexcept {
  if (retained) ReleaseRetained(record.slot);
  slots_.Release(record.slot);
}

void StateTracks::HoldRetained(int32_t slot) noexcept {
  QUIRE_DCHECK(slots_.holder_count(slot) > retained_holders_[static_cast<size_t>(slot)]);
  if (retained_holders_[static_cast<size_t>(slot)]++ == 0) ++retained_slot_count_;
}

void StateTracks::ReleaseRetained(int32_t slot) noexcept {
  QUIRE_DCHECK(retained_holders_[static_cast<size_t>(slot)] > 0);
  if (--retained_holders_[static_cast<size_t>(slot)] == 0) --retained_slot_count_;
}

void StateTracks::AddNode(StateTree& tree, int32_t parent, int32_t depth) noexcept {
  QUIRE_DCHECK(parent < tree.size());
  QUIRE_DCHECK(tree.slots.size() < tree.slots.capacity()) << "no room was reserved";
  tree.parents.push_back(parent);
  tree.depths.push_back(depth);
  tree.slots.push_back(slots_.Take());
  if (static_cast<int64_t>(tree.blocks.size()) < BlocksOfNodes(tree.size(), keep_.interval))
    tree.blocks.push_back(blocks_.Take());
  ++node_count_;
}

void StateTracks::DropNodes(StateTree& tree, int64_t size) noexcept {
  QUIRE_DCHECK(size >= 0 && size <= tree.size());
  node_count_ -= tree.size() - size;
  QUIRE_DCHECK(node_count_ >= 0);
  const size_t blocks = static_cast<size_t>(BlocksOfNodes(size, keep_.interval));
  for (; tree.blocks.size() > blocks; tree.blocks.pop_back()) blocks_.Release(tree.blocks.back());
  for (; tree.size() > size; tree.parents.pop_back()) {
    slots_.Release(tree.slots.back());
    tree.slots.pop_back();
    tree.depths.pop_back();
  }
}

// ---------------------------------------------------------------------- invariants

Status StateTracks::CheckTrack(int64_t id, const StateTrack& track,
                               std::vector<int32_t>& slot_holds,
                               std::vector<int32_t>& block_holds) const {
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
          BlocksOfNodes(track.tree.size(), keep_.interval)) {
    return Violated(id, "its tree's nodes have other slots or blocks");
  }
  for (const InputBlock& block : track.blocks) ++block_holds[static_cast<size_t>(block.slot)];
  const int64_t interval = keep_.interval;
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

Status StateTracks::CheckHolds(const std::vector<int32_t>& slot_holds,
                               const std::vector<int32_t>& block_holds,
                               const std::vector<int32_t>& retained, int64_t nodes) const {
  if (nodes != node_count_)
    return Status(StatusCode::kInternal, "StateHistory: tree nodes are miscounted");
  if (retained != retained_holders_) {
    return Status(StatusCode::kInternal, "StateHistory: retained holds are miscounted");
  }
  QUIRE_RETURN_IF_ERROR(CheckPool(slots_, slot_holds, "slot"));
  return CheckPool(blocks_, block_holds, "block");
}

void StateTracks::Clear() noexcept {
  QUIRE_DCHECK(slots_.free_count() == slots_.slot_count()) << "a cleared history holds states";
  QUIRE_DCHECK(blocks_.free_count() == blocks_.slot_count()) << "a cleared history holds inputs";
  QUIRE_DCHECK(retained_slot_count_ == 0);
  QUIRE_DCHECK(node_count_ == 0);
  FreeAll(tracks_);
}

int64_t StateTracks::memory_bytes() const {
  int64_t bytes = TrackBytes(tracks_);
  for (const StateTrack& track : tracks_) bytes += track.memory_bytes();
  return bytes;
}

}  // namespace quire
