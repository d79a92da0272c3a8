// The slots of a receive map's tokens, as runs: memory is that of the map as it was given, whatever
// number of tokens it claims.
#ifndef QUIRE_KV_TRANSFER_SLOT_RUNS_H_
#define QUIRE_KV_TRANSFER_SLOT_RUNS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/status.h"

namespace quire {

class SlotRuns {
 public:
  SlotRuns() = default;
  // The runs of a map's encoding (quire/kv_transfer.h). BadArgument for what is none, or has more
  // tokens than count_max.
  static Result<SlotRuns> Decode(std::span<const int64_t> slots, int64_t count_max);

  int64_t count() const { return count_; }  // tokens
  // Those of the tokens from `first` on; -1: not stored. REQUIRES: they are in the map.
  void Fill(int64_t first, std::span<int64_t> slots) const noexcept;

 private:
  struct Run {
    int64_t row;   // of its first token
    int64_t slot;  // of it; the others follow
  };
  std::vector<Run> runs_;
  int64_t count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_SLOT_RUNS_H_
