#include "kv/transfer/slot_runs.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/check.h"

namespace quire {
namespace {

Status BadMap(const std::string& why) {
  return Status(
      StatusCode::kBadArgument,
      "DisaggMarkSend: the map is not [segments, begin, length, begin, length, ...]: " + why);
}

}  // namespace

Result<SlotRuns> SlotRuns::Decode(std::span<const int64_t> slots, int64_t count_max) {
  const int64_t size = static_cast<int64_t>(slots.size());
  if (size == 0 || slots[0] < 1 || slots[0] > size || 2 * slots[0] + 1 != size) {
    return BadMap(std::to_string(size) + " numbers" +
                  (size == 0 ? "" : ", the first of them " + std::to_string(slots[0])));
  }
  SlotRuns decoded;
  decoded.runs_.reserve(static_cast<size_t>(slots[0]));
  for (size_t i = 1; i < slots.size(); i += 2) {
    const int64_t begin = slots[i];
    const int64_t length = slots[i + 1];
    if (begin < -1 || length < 1 || length > count_max - decoded.count_ ||
        begin > std::numeric_limits<int64_t>::max() - length) {
      return BadMap("segment " + std::to_string(i / 2) + " begins at " + std::to_string(begin) +
                    " and has " + std::to_string(length) + " slots, with " +
                    std::to_string(decoded.count_) + " before it; there may be " +
                    std::to_string(count_max));
    }
    decoded.runs_.push_back({.row = decoded.count_, .slot = begin});
    decoded.count_ += length;
  }
  return decoded;
}

void SlotRuns::Fill(int64_t first, std::span<int64_t> slots) const noexcept {
  QUIRE_DCHECK(first >= 0);
  QUIRE_DCHECK(first + static_cast<int64_t>(slots.size()) <= count_);
  auto run = std::ranges::upper_bound(runs_, first, {}, &Run::row) - 1;
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t row = first + static_cast<int64_t>(i);
    if (run + 1 != runs_.end() && row >= run[1].row) ++run;
    slots[i] = run->slot + row - run->row;
  }
}

}  // namespace quire
