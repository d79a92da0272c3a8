// WriteQueue: chunks that wait to be written to one slow tier, and the threads that write them. A
// chunk is in it at most once; its bytes are limited.
#ifndef QUIRE_STORE_TIERED_WRITE_QUEUE_H_
#define QUIRE_STORE_TIERED_WRITE_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "store/tiered/memory_tier.h"
#include "store/tiered/put_state.h"
#include "store/tiered/removals.h"
#include "store/tiered/slow_tier.h"

namespace quire {

class WriteQueue {
 public:
  // std::system_error when there is no thread.
  WriteQueue(SlowTier* tier, std::shared_ptr<Clock> clock, int64_t bytes_max);
  ~WriteQueue() { Close(); }

  // `put`, unless it is null, hears of the outcome once this returned ok. Else: Full, Unavailable
  // (the tier is left alone), Closed; the write is dropped and counted. std::bad_alloc changes
  // nothing.
  Status Push(const KeptChunk& kept, std::shared_ptr<PutState> put);
  // Waits until `bytes` have room, or nothing is taken any more. False: never, or not by then.
  bool AwaitRoom(int64_t bytes, int64_t until_ns);
  void CountDropped() noexcept { ++tier_->dropped_writes; }
  bool Has(const ChunkId& id) const;
  int64_t bytes() const;
  // The tier gets the chunk, if it waits, with this end of its time; 0 = none but its own.
  void SetExpiry(const ChunkKey& key, int64_t expires_ms);
  // Drops what is being removed (Cancelled), and waits until none of it is being written. False:
  // some of it still is.
  bool Forget(const Removals::Scope& removal, int64_t until_ns);
  // Waits until all that was pushed before is written or dropped.
  bool Drain(int64_t until_ns);
  // Writes what is left, unless the tier is left alone, and ends the threads.
  void Close() noexcept;

 private:
  struct Job {
    KeptChunk kept{};
    std::vector<std::shared_ptr<PutState>> puts{};
    bool is_taken = false;  // by a writer
  };
  using Jobs = std::map<uint64_t, Job>;  // in the order in which they came

  Status Dropped(StatusCode code, const char* why) noexcept(false);
  // What a writer writes at once, in memory that is taken once.
  struct Batch {
    std::vector<uint64_t> numbers{};
    std::vector<TierWrite> writes{};
  };
  void Run(Batch& batch) noexcept;
  void TakeSome(Batch& batch) noexcept;
  void WriteSome(Batch& batch, std::unique_lock<std::mutex>& lock) noexcept;
  Status SetExpiryInTier(const ChunkKey& key, int64_t expires_ms) noexcept;
  void Finish(Job& job, const Status& status) noexcept;

  SlowTier* const tier_;
  const std::shared_ptr<Clock> clock_;
  const int64_t bytes_max_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;
  int64_t bytes_ = 0;
  uint64_t last_ = 0;
  Jobs jobs_;
  std::map<ChunkId, uint64_t> by_id_;
  size_t untaken_ = 0;  // jobs
  std::vector<Batch> batches_;
  std::vector<std::thread> writers_;  // as many
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_WRITE_QUEUE_H_
