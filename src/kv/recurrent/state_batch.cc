#include "kv/recurrent/state_batch.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {

void ThinPositions(std::vector<int64_t>& positions, int64_t limit, int64_t now) {
  QUIRE_DCHECK(std::ranges::is_sorted(positions));
  QUIRE_DCHECK(limit >= 0 && (positions.empty() || positions.back() <= now));
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

// ---------------------------------------------------------------------- planning

StateBatch::Planned StateBatch::Start(size_t member_count) {
  count_ = 0;
  row_count_ = 0;
  if (members_.size() < member_count) members_.resize(member_count);
  return Planned(*this);
}

StateMember& StateBatch::Next(int32_t index, int64_t row_count) {
  QUIRE_DCHECK(count_ < members_.size()) << "more members than were announced";
  QUIRE_DCHECK(row_count >= 0);
  const StateTrack& track = tracks_[index];
  StateMember& member = members_[count_];
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
  return member;
}

void StateBatch::Add(const StateMember& member) noexcept {
  QUIRE_DCHECK(&member == &members_[count_]) << "another member is next";
  row_count_ += member.row_count;
  ++count_;
}

void StateBatch::PlanCheckpoints(const StateTrack& track, StateMember& member) const {
  member.pending.clear();
  member.kept.clear();
  member.input_start = 0;
  // Those that are kept, its end, and what it loads.
  member.pending.reserve(static_cast<size_t>(keep_.recent + keep_.thinned + 2));
  StateRecord end{.position = member.end(), .ends_forward = true};
  if (keep_.interval > 0) {
    std::vector<int64_t> all;
    for (const StateRecord& record : track.records) {
      if (record.checkpoint) all.push_back(record.position);
    }
    for (int64_t p = (member.base / keep_.interval + 1) * keep_.interval; p <= member.end();
         p += keep_.interval) {
      all.push_back(p);
    }
    const size_t recent = std::min(all.size(), static_cast<size_t>(keep_.recent));
    const auto oldest_recent = all.end() - static_cast<std::ptrdiff_t>(recent);
    for (auto p = all.begin(); p != oldest_recent; ++p) {
      member.kept.push_back(*p);
      ThinPositions(member.kept, keep_.thinned, member.end());
    }
    member.kept.insert(member.kept.end(), oldest_recent, all.end());
    const bool full = recent == static_cast<size_t>(keep_.recent);
    member.input_start = std::max(track.input_start, full ? *oldest_recent : 0);
    for (const int64_t p : member.kept) {
      if (p > member.base && p < member.end())
        member.pending.push_back({.position = p, .checkpoint = true});
    }
    end.checkpoint = member.end() % keep_.interval == 0;
  }
  member.pending.push_back(end);
}

void StateBatch::PlanBlocks(const StateTrack& track, StateMember& member) const {
  const int64_t interval = keep_.interval;
  member.blocks.clear();
  member.first_new_block = 0;
  member.copied_block = -1;
  if (interval == 0) return;
  const int64_t first = member.input_start / interval;
  QUIRE_DCHECK(member.input_start <= member.end());
  const int64_t last = (member.end() - 1) / interval;
  for (const InputBlock& block : track.blocks) {
    if (block.index < first) continue;
    const bool full = (block.index + 1) * interval <= member.base;
    if (full || tracks_.blocks().holder_count(block.slot) == 1) {
      member.blocks.push_back(block);
    } else {
      member.copied_block = block.slot;
    }
  }
  member.first_new_block = member.blocks.size();
  const int64_t next = member.blocks.empty() ? first : member.blocks.back().index + 1;
  for (int64_t index = next; index <= last; ++index) member.blocks.push_back({.index = index});
  QUIRE_DCHECK(member.blocks.empty() || member.blocks.back().index == last);
  QUIRE_DCHECK(member.copied_block < 0 || member.first_new_block < member.blocks.size())
      << "there is no new block to copy to";
}

// Where the caller adds checkpoints.
void StateBatch::PlanKept(StateMember& member) const {
  member.kept.clear();
  for (const StateRecord& record : tracks_[member.index].records) {
    if (record.checkpoint) member.kept.push_back(record.position);
  }
  for (const StateRecord& record : member.pending) {
    if (record.checkpoint) member.kept.push_back(record.position);
  }
  ThinPositions(member.kept, keep_.thinned, member.end());
}

int64_t StateBatch::SlotsNeeded() const {
  int64_t slots = 0;
  for (const StateMember& member : members()) {
    // Where the caller adds checkpoints, room for all that it may add.
    slots += keep_.interval > 0 ? static_cast<int64_t>(member.pending.size()) : keep_.thinned + 1;
  }
  return slots;
}

int64_t StateBatch::BlocksNeeded() const {
  int64_t blocks = 0;
  for (const StateMember& member : members())
    blocks += static_cast<int64_t>(member.blocks.size() - member.first_new_block);
  return blocks;
}

// ---------------------------------------------------------------------- commits

void StateBatch::TakeSlots() noexcept {
  for (StateMember& member : members()) {
    for (StateRecord& record : member.pending) {
      QUIRE_DCHECK(record.slot < 0) << "position " << record.position << " has a slot already";
      record.slot = tracks_.slots().Take();
    }
  }
}

void StateBatch::TakeBlocks() noexcept {
  for (StateMember& member : members()) {
    for (size_t b = member.first_new_block; b < member.blocks.size(); ++b) {
      QUIRE_DCHECK(member.blocks[b].slot < 0) << "block " << b << " has a slot already";
      member.blocks[b].slot = tracks_.blocks().Take();
    }
  }
}

void StateBatch::ReleaseSlots(const StateMember& member) noexcept {
  for (size_t r = member.pending.size(); r-- > 0;) {
    QUIRE_DCHECK(member.pending[r].slot >= 0) << "no slot was taken";
    tracks_.slots().Release(member.pending[r].slot);
  }
}

void StateBatch::ReleaseBlocks(const StateMember& member) noexcept {
  for (size_t b = member.blocks.size(); b-- > member.first_new_block;)
    tracks_.blocks().Release(member.blocks[b].slot);
}

void StateBatch::End(StateMember& member) noexcept {
  QUIRE_DCHECK(!member.pending.empty() && member.pending.back().position == member.end());
  tracks_.End(tracks_[member.index], {.length = member.end(),
                                      .input_start = member.input_start,
                                      .pending = member.pending,
                                      .checkpoints = member.kept,
                                      .blocks = member.blocks});
}

void StateBatch::Clear() noexcept {
  FreeAll(members_);
  count_ = 0;
}

// ---------------------------------------------------------------------- rows

int32_t StateBatch::SlotOfRow(int64_t row) const {
  const StateMember& member = members_[FindRow(row).member];
  if (!member.is_tree) return PendingSlot(FindRow(row));
  return tracks_[member.index].tree.slots[static_cast<size_t>(NodeOfRow(member, row))];
}

int32_t StateBatch::SlotBeforeRow(int64_t row, bool* is_known) const {
  const StateMember& member = members_[FindRow(row).member];
  *is_known = true;
  if (member.is_tree) {
    const StateTree& tree = tracks_[member.index].tree;
    const int32_t parent = tree.parents[static_cast<size_t>(NodeOfRow(member, row))];
    return parent < 0 ? member.current : tree.slots[static_cast<size_t>(parent)];
  }
  if (row == member.first_row) return member.current;
  const int32_t slot = SlotOfRow(row - 1);
  *is_known = slot >= 0;
  return slot;
}

// ---------------------------------------------------------------------- in a forward

StateBatch::RowPlace StateBatch::FindRow(int64_t row) const {
  QUIRE_DCHECK(row >= 0 && row < row_count_);
  const auto all = members();
  const auto behind =
      std::upper_bound(all.begin(), all.end(), row,
                       [](int64_t r, const StateMember& member) { return r < member.first_row; });
  const size_t member = static_cast<size_t>(behind - all.begin()) - 1;
  QUIRE_DCHECK(row - all[member].first_row < all[member].row_count);
  return {member, all[member].base + row - all[member].first_row + 1};
}

int32_t StateBatch::PendingSlot(const RowPlace& place) const {
  for (const StateRecord& record : members_[place.member].pending) {
    if (record.position == place.position) return record.slot;
  }
  return -1;
}

int64_t StateBatch::CheckpointRoom(size_t member) const {
  return keep_.thinned + 1 - static_cast<int64_t>(members_[member].pending.size());
}

int32_t StateBatch::AddCheckpoint(const RowPlace& place) noexcept {
  std::vector<StateRecord>& pending = members_[place.member].pending;
  const auto behind = std::find_if(pending.begin(), pending.end(), [&](const StateRecord& record) {
    return record.position > place.position;
  });
  QUIRE_DCHECK(pending.size() < pending.capacity()) << "no room was reserved";
  QUIRE_DCHECK(place.position > members_[place.member].base &&
               place.position < members_[place.member].end());
  const int32_t slot = tracks_.slots().Take();
  pending.insert(behind, {.position = place.position, .slot = slot, .checkpoint = true});
  return slot;
}

int64_t StateBatch::memory_bytes() const {
  const auto bytes_of = [](const auto& table) {
    return static_cast<int64_t>(table.capacity() * sizeof(table[0]));
  };
  int64_t bytes = bytes_of(members_);
  for (const StateMember& member : members_)
    bytes += bytes_of(member.pending) + bytes_of(member.kept) + bytes_of(member.blocks) +
             bytes_of(member.path);
  return bytes;
}

}  // namespace quire
