#include "engine/prefix/evicted_prefixes.h"

#include <algorithm>
#include <new>

#include "base/checksum.h"

namespace quire {
namespace {

uint64_t HashOf(std::span<const int32_t> tokens, int64_t length) {
  const auto prefix = tokens.first(static_cast<size_t>(length));
  return Hash64(prefix.data(), prefix.size_bytes());
}

}  // namespace

void EvictedPrefixes::Note(const PrefixSpace& space, int64_t sequence_id,
                           std::span<const int32_t> tokens, int64_t kept, int64_t now_ns) noexcept {
  const int64_t length = std::min(kept + kEvidence, static_cast<int64_t>(tokens.size()));
  try {
    std::deque<Record> newest = {{.sequence_id = sequence_id,
                                  .length = length,
                                  .hash = HashOf(tokens, length),
                                  .time_ns = now_ns}};
    const auto found = spaces_.find(space);
    if (found == spaces_.end()) {
      spaces_.emplace(space, std::move(newest));
    } else if (found->second.back().sequence_id == sequence_id) {
      found->second.back() = newest.front();
    } else {
      found->second.push_back(newest.front());
      if (static_cast<int64_t>(found->second.size()) > kRecordsMax) found->second.pop_front();
    }
  } catch (const std::bad_alloc&) {
    return;
  }
  if (space_count() <= kSpacesMax) return;
  spaces_.erase(std::min_element(spaces_.begin(), spaces_.end(), [](const auto& a, const auto& b) {
    return a.second.back().time_ns < b.second.back().time_ns;
  }));
}

std::optional<int64_t> EvictedPrefixes::Find(const PrefixSpace& space,
                                             std::span<const int32_t> tokens, int64_t known) const {
  const auto records = spaces_.find(space);
  if (records == spaces_.end()) return {};
  const auto found =
      std::find_if(records->second.rbegin(), records->second.rend(), [&](const Record& record) {
        return record.length > known && record.length <= static_cast<int64_t>(tokens.size()) &&
               record.hash == HashOf(tokens, record.length);
      });
  if (found == records->second.rend()) return {};
  return found->time_ns;
}

}  // namespace quire
