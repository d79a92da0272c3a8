// SpareChunks: memory of fetched chunks that have gone, kept for the next ones. The first touch of
// a fresh page is a fault and 4096 zeros, and in a virtual machine often a page of the host's, too:
// together that takes longer than a disk takes to bring the bytes.
#ifndef QUIRE_STORE_TIER_SPARE_CHUNKS_H_
#define QUIRE_STORE_TIER_SPARE_CHUNKS_H_

#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "quire/chunk_store.h"
#include "store/tier/byte_budget.h"

namespace quire {

// All calls from any thread.
class SpareChunks {
 public:
  // Spare memory and what is taken from the budget are no more than the budget together.
  explicit SpareChunks(std::shared_ptr<const ByteBudget> budget) : budget_(std::move(budget)) {}

  // A chunk with this header and memory for all its bytes, not cleared. Spare memory of this size
  // is used if there is some, and comes back when the last reference is gone, `spares` being kept
  // until then. std::bad_alloc.
  static std::shared_ptr<StoredChunk> Make(const std::shared_ptr<SpareChunks>& spares,
                                           ChunkHeader header, std::span<std::byte>* bytes);

  int64_t bytes() const;
  // Frees what no chunk took in the last `rounds` calls.
  void Age(int rounds) noexcept;

 private:
  // Nobody may touch it: a sanitizer watches.
  class Spare {
   public:
    explicit Spare(ChunkBuffer buffer);
    ~Spare() { Open(); }
    ChunkBuffer Release() && {
      Open();
      return std::move(buffer_);
    }
    int64_t bytes() const { return std::ssize(buffer_.bytes()); }
    int64_t round = 0;  // in which it came

   private:
    void Open() noexcept;

    ChunkBuffer buffer_;
  };
  using Spares = std::list<Spare>;  // the oldest first

  ChunkBuffer Take(int64_t size);
  void Give(ChunkBuffer buffer) noexcept;
  void MoveOldestLocked(Spares* to) noexcept;

  const std::shared_ptr<const ByteBudget> budget_;
  mutable std::mutex mutex_;
  int64_t bytes_ = 0;
  int64_t round_ = 0;
  Spares spares_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_SPARE_CHUNKS_H_
