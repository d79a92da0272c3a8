// Which prefixes were given up for want of room, so that a request whose KV was there once can say
// so. Tokens are not kept, but a hash of each prefix: of the tokens that stayed and of those that
// were given up next to them.
//
// A record is found by its own space alone (PrefixSpace), and nothing of it tells what others
// asked.
//
// A sequence that is given up bit by bit has one record, the newest.
//
// Invariants: no space has more than kRecordsMax records, the newest last, and none has no record;
// there are at most kSpacesMax spaces: the one whose last record is the oldest makes room.
#ifndef QUIRE_ENGINE_PREFIX_EVICTED_PREFIXES_H_
#define QUIRE_ENGINE_PREFIX_EVICTED_PREFIXES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>

#include "engine/prefix/prefix_space.h"

namespace quire {

class EvictedPrefixes {
 public:
  static constexpr int64_t kRecordsMax = 16;   // hashed again with each prompt that looks
  static constexpr int64_t kSpacesMax = 4096;  // 2 MiB of records
  // Tokens of what was given up that a text must have in common: fewer foretell no reuse.
  static constexpr int64_t kEvidence = 16;

  // Only the first `kept` of a sequence's `tokens` are there from now on. Without memory nothing is
  // noted.
  void Note(const PrefixSpace& space, int64_t sequence_id, std::span<const int32_t> tokens,
            int64_t kept, int64_t now_ns) noexcept;
  // When tokens behind the first `known` ones of this text were given up last; nothing: they were
  // not, as far as is remembered.
  std::optional<int64_t> Find(const PrefixSpace& space, std::span<const int32_t> tokens,
                              int64_t known) const;
  int64_t space_count() const { return static_cast<int64_t>(spaces_.size()); }

 private:
  struct Record {
    int64_t sequence_id;
    int64_t length;  // of the prefix that is hashed
    uint64_t hash;
    int64_t time_ns;
  };
  std::map<PrefixSpace, std::deque<Record>> spaces_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PREFIX_EVICTED_PREFIXES_H_
