// PinBoard: which chunks are kept from being evicted, by which pins, and until when. It only keeps
// the books: the caller that takes a pin off tells the tiers. Thread-safe; calls no other class.
#ifndef QUIRE_STORE_TIERED_PIN_BOARD_H_
#define QUIRE_STORE_TIERED_PIN_BOARD_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "store/tier/chunk_tier.h"

namespace quire {

struct PinnedChunk {
  ChunkKey key{};
  uint8_t tiers = 0;  // bit TierKind: pinned there
};

class PinBoard {
 public:
  using Ticket = uint64_t;  // never 0

  explicit PinBoard(int64_t timeout_ns) : timeout_ns_(timeout_ns) {}

  // `named`: ReleaseNamed finds it. std::bad_alloc changes nothing.
  Ticket Add(const PinnedChunk& pin, bool named, int64_t now_ns);
  std::optional<PinnedChunk> Release(Ticket ticket) noexcept;
  // The oldest named pin of the chunk.
  std::optional<PinnedChunk> ReleaseNamed(const ChunkKey& key) noexcept;
  // One whose time is over; counted as forced.
  std::optional<PinnedChunk> ReleaseExpired(int64_t now_ns) noexcept;
  // The chunk is gone from a tier, and its pins there with it.
  void Forget(const ChunkKey& key, TierKind tier) noexcept;

  int64_t size() const;
  int64_t forced() const;
  int64_t next_deadline() const;  // kNever if there is no pin

 private:
  struct Record {
    PinnedChunk pin{};
    bool named = false;
    int64_t deadline_ns = 0;
  };
  std::optional<PinnedChunk> ReleaseLocked(std::map<Ticket, Record>::iterator at) noexcept;

  const int64_t timeout_ns_;
  mutable std::mutex mutex_;
  Ticket last_ = 0;
  int64_t forced_ = 0;
  // All pins last equally long and time does not go back: the oldest one ends first.
  std::map<Ticket, Record> records_;
  std::multimap<ChunkKey, Ticket> by_chunk_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_PIN_BOARD_H_
